"""The keys of a config: their defaults and the checks of their values.

A config describes a problem, a length of training, and runs. A run names an
engine and a recipe. Its other keys are settings of that engine, options of that
recipe, or other values for shared keys. `resolve` returns plain data with every
key, and the complete config of each run. `asgd.experiment.overrides` applies
the keys of a command line.
"""

import copy
import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import ml_collections
import optax

from asgd import algorithms, names, optimizers, rates, sharding, transforms
from asgd.checks import shown
from asgd.experiment import checks, protocol, spelling


class Setting(NamedTuple):
  """A key: its default and its check."""

  default: Any
  check: checks.Check


def changed_keys(
  section: Mapping[str, Any] | None, keys: Mapping[str, Setting]
) -> list[str]:
  """Returns the keys of a section with other values than their defaults."""
  items = (section or {}).items()
  return [key for key, value in items if value != keys[key].default]


class NamedSection(NamedTuple):
  """A section with the `name` of a function or class, and its arguments."""

  default: Mapping[str, Any]
  derived: tuple[str, ...] = ()  # arguments that follow from other keys


class Section(NamedTuple):
  """A section with fixed keys, and further keys that its values select."""

  keys: Mapping[str, Any]
  options: Any  # (the section's value) -> names of the further keys


_check_sweep = functools.partial(checks.several, distinct=True, least=1)


@checks.name_or_options
def _check_optimizer(value: Any, key: str) -> dict[str, Any] | None:
  """Checks an optimizer: its name, or a dict of its name and options."""
  if value is None:
    return None
  if isinstance(value, str):
    value = {"name": value}
  with checks.prefix_errors(key):
    optimizers.resolve(value)
  return dict(value)


def _function_arguments(kind: str, caller_arguments: tuple[str, ...]) -> Any:
  """Returns the `options` of a section that names a MODULE:FUNCTION: the
  function's arguments, without `caller_arguments`, which asgd passes itself."""

  def options(section: Mapping[str, Any]) -> list[str]:
    name = section.get("name")
    if not isinstance(name, str) or not names.is_import(name):
      return []
    parameters = inspect.signature(names.import_function(kind, name)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = dict.fromkeys([*(section if takes_any else ()), *parameters])
    return [key for key in arguments if key not in (*caller_arguments, "name")]

  return options


def _schedule_arguments(section: Mapping[str, Any]) -> list[str]:
  """Returns the arguments of the schedule that a section names."""
  name = section.get("name", rates.STEPS)
  return [] if name == rates.STEPS else rates.arguments(name)


_COUNTS = "epochs", "messages", "updates"
_COUNT = checks.whole_number(0)
_EPOCHS = checks.number(most=1e6)

# Keys that the runs of an experiment share, whatever their engines.
SHARED_KEYS: dict[str, Any] = {
  "data": Section(
    {
      # A name of `asgd.data`, or MODULE:FUNCTION (the other keys) -> data.
      "name": Setting("digits", checks.text),
      "augment": Setting(False, checks.flag),  # images: pad, crop and flip
      "partition": Setting("shared", checks.partition),
      # Characters in a window of text, word pieces in a sentence.
      "context": Setting(64, checks.whole_number(1, 10**6)),
      # For a text: "characters", "bytes", FILE.json or MODULE:FUNCTION.
      "tokenizer": Setting("characters", checks.text),
    },
    _function_arguments("dataset", ("data_dir",)),
  ),
  # A name of `asgd.models`, or MODULE:FUNCTION.
  "model": NamedSection({"name": "mlp"}, ("classes",)),
  # Instead of data and model: MODULE:FUNCTION (batch_size, its other keys) ->
  # asgd.problems.Problem.
  "problem": Section(
    {"name": Setting(None, checks.optional(checks.text))},
    _function_arguments("problem", ("batch_size", "data_dir")),
  ),
  "runs": Setting({}, checks.anything),  # label -> engine, recipe, settings
  "only": Setting((), checks.several(checks.text)),  # labels; () is all
  "engine": Setting("simulate", checks.text),  # of runs that name none
  "workers": Setting((8,), _check_sweep(checks.whole_number(1, 10_000))),
  "seeds": Setting((0,), _check_sweep(checks.whole_number(0, 2**32 - 1))),
  "batch_size": Setting(32, checks.whole_number(1, 10**7)),  # of one gradient
  "epochs": Setting(1.0, checks.number(most=1e9, above=True)),
  # Instead of epochs: the count of training examples of all workers.
  "examples": Setting(None, checks.optional(checks.whole_number(1, 10**12))),
  "learning_rate": Setting(0.1, checks.positive),  # the peak
  # A name, or a dict of a name and options; None: the recipe's optimizer.
  "optimizer": Setting(None, _check_optimizer),
  "learning_rate_schedule": Section(
    {
      "warmup_epochs": Setting(0.0, _EPOCHS),
      "warmup_examples": Setting(0, checks.whole_number(0, 10**12)),
      # After the warm-up: "steps" drops at the times below. For any other
      # schedule of optax, or MODULE:FUNCTION, the section has its arguments;
      # they count steps in units of `count`.
      "name": Setting(rates.STEPS, checks.text),
      "count": Setting("epochs", checks.choice(*_COUNTS)),
      "decay_epochs": Setting((), checks.several(_EPOCHS)),
      "decay_examples": Setting(
        (), checks.several(checks.whole_number(0, 10**12))
      ),
      "decay_factor": Setting(0.1, checks.positive),
    },
    _schedule_arguments,
  ),
  "clip_norm": Setting(None, checks.optional(checks.positive)),
  "evaluations": Setting(10, checks.whole_number(1, 10**6)),  # evenly spaced
  "evaluation_examples": Setting(0, _COUNT),  # 0: all images, 64 windows
  "curvature_checks": Setting(4, _COUNT),  # evaluations with the sharpness
  "checkpoint_seconds": Setting(30.0, checks.number(most=1e9)),
  # "record" keeps a cell that diverges and continues with the next one.
  "on_nan": Setting("stop", checks.choice("stop", "record")),
}
# Keys of SHARED_KEYS that an entry of `runs` may set, for its run only.
RUN_KEYS: tuple[str, ...] = ("batch_size", "clip_norm", "learning_rate")
RUN_KEYS += ("learning_rate_schedule", "optimizer")
UNCHECKED = Setting(None, checks.anything)  # a value is checked elsewhere
# Stands for an object that a call was given: a recipe, data, a codec, ...
GIVEN_MARK = "given"
RESERVED = "engine", "recipe", "title", "workers"
# These may change when an experiment resumes.
FREE_KEYS = ("on_nan", "checkpoint_seconds")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # a folder's name
_MAX_TITLE_LENGTH = 100


class Run(NamedTuple):
  """One run. A cell is a run with a number of workers and a seed."""

  label: str  # key in config.runs, and in names of folders
  title: str  # in tables and figures
  engine: str
  recipe: str
  options: dict[str, Any]  # of the recipe
  config: dict[str, Any]  # the complete config, with the run's values
  given_recipe: algorithms.Recipe | None = None  # an object, not a name
  # Codecs, order and durations given as objects, by their keys of the config.
  objects: Mapping[str, Any] = {}

  def make_recipe(
    self,
    learning_rate: optax.ScalarOrSchedule,
    workers: int,
    *,
    searches: bool = False,
  ) -> algorithms.Recipe:
    """Builds the run's recipe with its optimizer and clipping.

    Args:
      learning_rate: a number or a schedule.
      workers: the number of workers of the cell.
      searches: whether the engine gives the loss function to the optimizer's
        update, as a line search needs.

    Raises:
      ValueError: names the key.
    """
    options, clip_norm = dict(self.options), self.config["clip_norm"]
    if self.config["optimizer"] is not None:
      if not searches:
        optimizers.refuse_search(self.config["optimizer"])
      options["optimizer"] = self.config["optimizer"]
    with checks.prefix_errors(f"runs.{self.label}", tuple(options)):
      if self.given_recipe is not None:
        recipe = algorithms.rebuild(self.given_recipe, learning_rate, workers)
      else:
        recipe = algorithms.build(
          self.recipe, learning_rate, workers, **options
        )
    if clip_norm is None:
      return recipe
    clip = sharding.clip_by_global_norm(clip_norm)
    return recipe._replace(algorithm=transforms.precede(recipe.algorithm, clip))


class Resolved(NamedTuple):
  """A checked config and its runs."""

  config: dict[str, Any]  # plain data, with every key
  runs: dict[str, Run]  # selected by config.only, by label


Config: TypeAlias = ml_collections.ConfigDict | Mapping[str, Any]
Engines = Mapping[str, Any]  # name -> `asgd.experiment.engines.EngineKind`


def sections(engines: Engines) -> dict[str, Any]:
  """Returns all keys: the shared ones, and the sections of engines."""
  keys = dict(SHARED_KEYS)
  for kind in engines.values():
    keys |= kind.sections
  return keys


def default_of(node: Any) -> Any:
  """Returns the default of a key or of a section, as plain data."""
  if isinstance(node, (Setting, NamedSection)):
    return plain_data(node.default)
  return {key: default_of(inner) for key, inner in keys_of(node).items()}


def keys_of(node: Any) -> Mapping[str, Any]:
  """Returns the keys of a section; a single setting has none."""
  if isinstance(node, Section):
    return node.keys
  has_keys = node is not None and not isinstance(node, (Setting, NamedSection))
  return node if has_keys else {}


def plain_data(value: Any, key: str = "") -> Any:
  """Returns a value as JSON reads it back. Raises ValueError, which names the
  key, if the value is not plain data."""
  if isinstance(value, Mapping):
    prefix = f"{key}." if key else ""
    return {str(k): plain_data(v, f"{prefix}{k}") for k, v in value.items()}
  if isinstance(value, (list, tuple, range)):
    return [plain_data(inner, key) for inner in value]
  if value is not None and not isinstance(value, (bool, int, float, str)):
    raise ValueError(
      f"config.{key} is {shown(value)}, and a config holds numbers, strings,"
      " lists and dicts"
    )
  return value


def as_dict(config: Config) -> dict[str, Any]:
  """Returns a config as a new dict. Raises ValueError if it is no mapping."""
  if isinstance(config, ml_collections.ConfigDict):
    _refuse_missing(config)
    config = config.to_dict()
  if not isinstance(config, Mapping):
    raise ValueError(
      f"get_config() must return a ConfigDict, not {type(config).__name__}"
    )
  return copy.deepcopy(dict(config))


def _refuse_missing(config: ml_collections.ConfigDict, path: str = "") -> None:
  """Raises ValueError for a required placeholder that nothing has filled."""
  for key in config:
    try:
      value = config[key]
    except ml_collections.config_dict.RequiredValueError:
      raise ValueError(
        f"config.{path}{key} is a required placeholder without a value: give"
        " it one in the file; the command line may give it another"
      ) from None
    if isinstance(value, ml_collections.ConfigDict):
      _refuse_missing(value, f"{path}{key}.")


def unknown_key(key: str, known: Any, where: str = "") -> ValueError:
  """Returns the error for an unknown key. It names the nearest known key."""
  nearest = names.nearest(key.rsplit(".", 1)[-1], known)
  return ValueError(f"unknown config key {shown(key)}{where}; {nearest}")


def _check_key(value: Any, node: Any, key: str, unchecked: bool = False) -> Any:
  """Checks the value of a key, and fills in defaults. `key` is "" for the
  complete config. `unchecked` accepts any options and imports no user code."""
  if isinstance(node, Setting):
    takes_list = isinstance(node.default, (tuple, list))
    if takes_list and isinstance(value, str):
      value = [part.strip() for part in value.split(",") if part.strip()]
    elif takes_list and isinstance(value, (int, float)):
      value = [value]
    return node.check(plain_data(value, key), key)
  if not isinstance(value, Mapping):
    has_name = isinstance(node, NamedSection) or "name" in keys_of(node)
    is_name = has_name and isinstance(value, str)
    remedy = f"; set config.{key}.name={shown(value)}" if is_name else ""
    raise ValueError(f"config.{key} must be a dict, not {shown(value)}{remedy}")
  if isinstance(node, NamedSection):
    for argument in node.derived:
      if argument in value:
        raise ValueError(
          f"config.{key}.{argument} follows from other keys; drop it"
        )
    base = {} if "name" in value else node.default
    return plain_data({**base, **value}, key)
  keys, options, prefix = keys_of(node), list[str](), f"{key}." if key else ""
  if isinstance(node, Section):
    with checks.prefix_errors(key):
      options = list(value) if unchecked else node.options(value)
  for inner in value:
    if inner not in keys and inner not in options:
      raise unknown_key(f"{prefix}{inner}", [*keys, *options])
  further_keys = [k for k in options if k in value and k not in keys]
  return {k: plain_data(value[k], prefix + k) for k in further_keys} | {
    k: _check_key(value.get(k, default_of(child)), child, prefix + k)
    for k, child in keys.items()
  }


def shared(key: str, value: Any) -> Any:
  """Checks a value of a key of SHARED_KEYS; returns it as `resolve` does."""
  return _check_key(value, SHARED_KEYS[key], key)


def shared_of_run(key: str, config_value: Any, value: Any) -> Any:
  """Returns a run's value of a key of SHARED_KEYS, merged with the config's
  value. No user code is imported: options of MODULE:FUNCTION are unchecked."""
  node = SHARED_KEYS[key]
  merged = _merge(node, config_value, value)
  unchecked = any(names.import_paths(merged))
  if unchecked and isinstance(node, Setting):  # an optimizer
    value = {"name": merged} if isinstance(merged, str) else merged
    return plain_data(value, key)
  return _check_key(merged, node, key, unchecked=unchecked)


def resolve(config: Config, engines: Engines) -> Resolved:
  """Returns the config as plain data, with defaults, and its runs. Raises
  ValueError, which names the key, for an unknown key or a wrong value."""
  resolved = _check_key(as_dict(config), sections(engines), "")
  spelling.correct(resolved, engines)
  for label in resolved["only"]:
    names.lookup("label in config.only", label, resolved["runs"])
  return Resolved(resolved, _runs(resolved, engines))


def entries(
  config: Mapping[str, Any], engines: Engines
) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
  """Yields (label, entry, engine kind) of all runs, after checks of labels,
  titles and engines."""
  if not isinstance(config["runs"], Mapping) or not config["runs"]:
    raise ValueError(
      "config.runs names no run; give it entries such as"
      " dana=dict(recipe='dana_zero')"
    )
  titles: dict[str, str] = {}
  for label, entry in config["runs"].items():
    if not _LABEL.fullmatch(label):
      raise ValueError(
        "config.runs: a label names a folder; use letters, digits and _.- for"
        f" {shown(label)}, and its title for other text"
      )
    if not isinstance(entry, Mapping):
      raise ValueError(
        f"config.runs.{label} {_needs_recipe()}, not {shown(entry)}"
      )
    title = str(entry.get("title", label))
    if len(title) > _MAX_TITLE_LENGTH:
      raise ValueError(
        f"config.runs.{label}.title has {len(title):,} characters; use at most"
        f" {_MAX_TITLE_LENGTH}"
      )
    if not title.isprintable():
      raise ValueError(
        f"config.runs.{label}.title is {shown(title)}, and stands in one"
        " line of tables and figures: write it without line ends and tabs"
      )
    if title in titles:
      raise ValueError(
        f"config.runs.{label} and .{titles[title]} have the same title"
        f" {title!r}; give them different titles"
      )
    titles[title] = label
    engine = entry.get("engine", config["engine"])
    engine_key = f"runs.{label}.engine" if "engine" in entry else "engine"
    with checks.prefix_errors(engine_key):
      kind = names.lookup("engine", engine, engines)
    yield label, entry, kind


def keys_of_engine(kind: Any, entry: Mapping[str, Any]) -> list[str]:
  """Returns the keys that a run may set for its engine."""
  settings = keys_of(kind.sections.get(kind.settings))
  return [*kind.sections, *settings, *kind.options(entry)]


def _runs(config: Mapping[str, Any], engines: Engines) -> dict[str, Run]:
  """Checks all runs of a config; returns the selected ones by label."""
  keys, runs = sections(engines), {}
  for label, entry, kind in list(entries(config, engines)):  # checks all first
    recipe = entry.get("recipe", kind.default_recipe)
    engine = entry.get("engine", config["engine"])
    if recipe is None:
      raise ValueError(f"config.runs.{label} {_needs_recipe()}")
    with checks.prefix_errors(f"runs.{label}"):
      options = {} if recipe == GIVEN_MARK else options_of(recipe)
      engine_keys = keys_of_engine(kind, entry)
    shared_keys = (*RUN_KEYS, *kind.sections, "workers")
    known_keys = (*RESERVED, *shared_keys, *engine_keys, *options)
    config_keys = {*SHARED_KEYS, *kind.sections} - {"runs", "only"}
    # The complete config of the run: its own values replace the shared ones.
    run_config = {k: value for k, value in config.items() if k in config_keys}
    recipe_options = {}
    for key, value in entry.items():
      full_key = f"runs.{label}.{key}"
      if key not in known_keys:
        source = f" (engine {engine!r}, recipe {recipe!r})"
        raise unknown_key(full_key, known_keys, source)
      if key in shared_keys:
        value = _merge(keys[key], config[key], value)
        run_config[key] = _check_key(value, keys[key], full_key)
      elif key in options:
        value = plain_data(value, full_key)
        # Settings of other protocols check whole numbers themselves.
        if not makes_settings(recipe) or type(options[key]) is not int:
          value = _check_option(value, options[key], full_key)
        recipe_options[key] = value
      elif key in engine_keys:
        section = kind.settings
        node = keys_of(kind.sections[section])
        if key in node:
          value = _check_key(value, node[key], full_key)
        value = plain_data(value, full_key)
        run_config[section] = {**run_config[section], key: value}
    title = str(entry.get("title", label))
    runs[label] = Run(label, title, engine, recipe, recipe_options, run_config)
  return {label: runs[label] for label in config["only"] or runs}


def _needs_recipe() -> str:
  return f"must be a dict with a recipe, one of {', '.join(protocol.recipes())}"


def makes_settings(recipe: Any) -> bool:
  """Whether the maker of a recipe returns settings of another protocol instead
  of an `algorithms.Recipe`."""
  return recipe in protocol.recipes() and recipe not in algorithms.ALL


def options_of(recipe: str) -> dict[str, Any]:
  """Returns the options of a recipe with their defaults. Raises ValueError for
  an unknown recipe."""
  maker = names.resolve("algorithm", recipe, protocol.recipes())
  if not makes_settings(recipe):
    return algorithms.options(recipe)
  parameters = inspect.signature(maker).parameters.values()
  return {p.name: p.default for p in parameters if p.default is not p.empty}


def _merge(node: Any, config_value: Any, value: Any) -> Any:
  """Returns a run's value of a shared key, merged with the config's value. A
  run that names another schedule or codec gets no arguments of the config's."""
  if isinstance(node, Setting) or not isinstance(value, Mapping):
    return value
  name = config_value.get("name")
  has_name = isinstance(node, NamedSection | Section)
  if has_name and value.get("name", name) != name:
    return value
  return {**config_value, **value}


def _check_option(value: Any, default: Any, key: str) -> Any:
  """Checks that an option of a recipe is a number if its default is a number.
  The recipe itself checks more."""
  # `type`, because a bool is an int, too.
  is_float = type(value) is float and math.isfinite(value)
  if type(default) is int and type(value) is not int and not is_float:
    raise ValueError(f"config.{key} must be a whole number, not {shown(value)}")
  if type(default) in (int, float) or type(value) in (int, float):
    limit = checks.MOST_INTEGER if type(value) is int else checks.MOST_NUMBER
    checks.number(-limit, limit)(value, key)
  return value
