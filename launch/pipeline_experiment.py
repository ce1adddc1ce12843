"""From a config to the runs of a pipeline experiment.

A run is a schedule, an algorithm against staleness and the way weights are
kept; a cell is a run with a seed. All cells are given the same microbatches in
the same order. Everything that can be wrong with a config is found here, before
anything is written or trained.
"""

import contextlib
import functools
import importlib
import inspect
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from asgd import (
  algorithms,
  base,
  data,
  encoder,
  models,
  names,
  problems,
  schedules,
  sentences,
  sharding,
  text,
  transforms,
)
from launch import experiment, tables
from pipeline import (
  analyze,
  generate,
  graph,
  mixed_pipe,
  partition,
  parts,
  pipedream_partition,
  validate,
)
from pipeline.executor import Part
from pipeline.schedule import KNOWN, Schedule

DEFAULTS = {
  # `context`: characters of a window, of texts; pieces of words of an example,
  # of sentences; `augment`: of images.
  "data": {"name": "digits", "context": 64, "augment": False},
  # `pretrained`, of bert: a package or folder that has its weights.
  "model": {"name": "mlp"},
  "stages": 2,
  "cuts": "parameters",  # what is balanced; or "time", or a list of layers
  "microbatch_size": 8,  # examples, or windows
  "microbatches": 8,  # of an update of a synchronous schedule
  "updates": 100,  # of these; any run is given updates x microbatches
  "seeds": (0,),
  "learning_rate": 0.1,  # of an update of `microbatches`
  "schedule": {  # in updates of `microbatches`
    "warmup_updates": 0,
    "decay_updates": (),
    "decay_factor": 0.1,
  },
  "runs": {},  # label -> {schedule, [recipe, title, weights, ...], options}
  "only": (),  # labels to run; () is all
  # Norm to which the gradient of an update is clipped: of all stages, or of
  # each in an asynchronous schedule, where there is no update of all.
  "clip_norm": None,
  "evaluations": 10,  # per cell, evenly spaced, the last at the end
  "evaluation_examples": 0,  # 0 is all images or sentences, or 64 windows
  "checkpoint_seconds": 30.0,
  "on_nan": "stop",  # or "record": keep the cell as diverged and go on
}
_RUN_KEYS = (
  *("schedule", "recipe", "title", "weights", "predict", "recompute"),
  *("every", "stages", "learning_rate", "partition", "bandwidth"),
)
# Partitioners that also place stages, and the schedule that each is for.
_PARTITIONS = {"pipedream": "pipedream", "mixed_pipe": "ftpipe"}
_BANDWIDTH = 1e10  # bytes a second between devices
# What follows from other keys; `devices` too, where it is not a list.
_DERIVED = ("stages", "microbatches", "batches", "every", "costs", "name")
_LISTS = ("zero_bubble", "ftpipe", "custom")
_WEIGHTS = {"pipedream_2bw": "2bw", "stale": "latest", "pipemare": "latest"}
_CUTS = ("parameters", "time")
_TEXTS = ("pydoc", "file")
_WINDOWS = 64  # on which a text is evaluated
_START = 0.1  # of the peak, where a warm-up begins
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # a folder's name
_MOST, _MOST_STAGES, _MOST_MICROBATCHES = 10**6, 256, 10**6


class Cell(NamedTuple):
  """One training run."""

  label: str
  seed: int

  @property
  def name(self) -> str:
    """Its folder."""
    return f"{self.label}-s{self.seed}"


class Plan(NamedTuple):
  """What the cells of a run have in common."""

  label: str
  title: str  # for people
  table: Schedule  # of one update if synchronous, else of the whole run
  weights: str  # as in `analyze.versions`
  recompute: bool
  learning_rate: float  # the peak
  rate: Any  # float, or update -> learning rate
  microbatches: int  # in all
  parts: tuple[Part, ...]  # with shapes in the place of parameters
  cuts: tuple[int, ...]
  together: bool  # whether the updates of a batch know a norm of all stages

  @property
  def updates(self) -> int:
    """Of each stage, in all."""
    return self.microbatches // self.table.every


class Experiment(NamedTuple):
  """All there is to run."""

  config: dict[str, Any]  # resolved: every key, plain data
  dataset: data.Dataset | text.Text | sentences.Sentences
  problem: problems.Problem
  plans: dict[str, Plan]
  cells: tuple[Cell, ...]
  # Of each layer (forward, backward), where stages are made by time.
  seconds: list[list[float]] | None


# The config.


def resolve(
  config: ml_collections.ConfigDict | Mapping,
  defaults: Mapping[str, Any] = DEFAULTS,
) -> dict[str, Any]:
  """Returns the config as plain data, with defaults filled in.

  Args:
    config: keys as in `defaults`.
    defaults: of an experiment.

  Raises:
    ValueError: for a key that means nothing, naming the nearest that does.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  if not isinstance(config, Mapping):
    raise ValueError(
      f"get_config() must return a ConfigDict, not {type(config).__name__}"
    )
  for key in config:
    if key not in defaults:
      raise ValueError(
        f"unknown config key {key!r}; {names.nearest(key, defaults)}"
      )
  resolved = {}
  for key, default in defaults.items():
    value = config.get(key, default)
    if isinstance(default, dict):
      if not isinstance(value, Mapping):
        raise ValueError(f"config.{key} must be a dict, not {value!r}")
      for inner in value if key in ("data", "schedule") else ():
        if inner not in default:
          raise ValueError(
            f"unknown config key '{key}.{inner}';"
            f" {names.nearest(inner, default)}"
          )
      value = {**default, **value}
    if isinstance(default, tuple) and isinstance(value, (str, int, float)):
      value = [value]
    resolved[key] = experiment.plain(value)
  return resolved


def override(
  config: ml_collections.ConfigDict | Mapping,
  overrides: Iterable[tuple[str, str]],
) -> dict[str, Any]:
  """Applies command-line overrides to a config.

  Another schedule of a run drops what the config has for the old one: its
  weights, its `every`, its title, its partition and its options.

  Args:
    config: keys as in DEFAULTS.
    overrides: (dotted key, text), as in `experiment.override`.

  Returns:
    The config as plain data, checked by `resolve`.

  Raises:
    ValueError: for a key that means nothing.
  """
  config, overrides = resolve(config), list(overrides)
  for path, value in overrides:
    first, *rest = path.split(".")
    if first not in DEFAULTS:
      raise ValueError(
        f"unknown config key {first!r}; {names.nearest(first, DEFAULTS)}"
      )
    run = config["runs"].get(rest[0]) if first == "runs" and rest else None
    if first == "runs" and len(rest) > 1 and run is None:
      raise ValueError(
        f"unknown config key 'runs.{rest[0]}';"
        f" {names.nearest(rest[0], config['runs'])}"
      )
    if rest[1:] == ["schedule"] and run.get("schedule") != value:
      config["runs"][rest[0]] = {
        key: held
        for key, held in run.items()
        if key not in ("weights", "every", "devices", *_all_options())
        and key not in ("partition", "bandwidth", "title")
      }
  return resolve(experiment.override(config, overrides))


def _all_options() -> set[str]:
  """Options of any schedule."""
  return {key for name in generate.SCHEDULES for key in options(name)}


def options(schedule: str) -> list[str]:
  """Returns the options of a schedule that a run may have.

  Raises:
    ValueError: for an unknown schedule, naming the nearest.
  """
  if tables.is_file(schedule):
    return []  # all is in the table
  maker = names.lookup("schedule", schedule, generate.SCHEDULES)
  own = [k for k in inspect.signature(maker).parameters if k not in _DERIVED]
  if schedule not in _LISTS and "devices" in own:
    own.remove("devices")
  return own


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
  """Names the key of the config in errors about its value."""
  try:
    yield
  except (
    *(TypeError, OverflowError, ArithmeticError, LookupError),
    AttributeError,
  ) as error:
    raise ValueError(
      f"config.{key} has a value of the wrong kind: {error}"
    ) from error
  except ValueError as error:
    if "config." in str(error):
      raise
    raise ValueError(f"config.{key}: {error}") from error


def whole(value, key, least=1, most=_MOST):
  """Returns a key's value if it is a whole number in range, or raises
  ValueError."""
  if type(value) is not int or not least <= value <= most:
    raise ValueError(
      f"config.{key} must be a whole number from {least} to {most}, not"
      f" {value!r}"
    )
  return value


def positive(value, key, *, or_zero=False):
  """Returns a key's value as a float, or raises ValueError."""
  known = type(value) in (int, float) and 0 <= value <= 1e30
  if not known or not (value or or_zero):
    least = "from 0" if or_zero else "positive and"
    raise ValueError(
      f"config.{key} must be a number, {least} at most 1e30, not {value!r}"
    )
  return float(value)


def flag(value, key):
  """Returns a key's value if it is a bool, or raises ValueError."""
  if not isinstance(value, bool):
    raise ValueError(f"config.{key} must be True or False, not {value!r}")
  return value


def check_common(config: Mapping[str, Any]) -> None:
  """Checks what experiments of all kinds have that train synchronously, too.

  Raises:
    ValueError: naming a key, its value and the remedy.
  """
  for key in ("updates", "evaluations"):
    whole(config[key], key)
  whole(config["evaluation_examples"], "evaluation_examples", least=0)
  whole(config["data"]["context"], "data.context")
  flag(config["data"]["augment"], "data.augment")
  positive(config["learning_rate"], "learning_rate")
  positive(config["checkpoint_seconds"], "checkpoint_seconds", or_zero=True)
  if config["clip_norm"] is not None:
    positive(config["clip_norm"], "clip_norm")
  if config["on_nan"] not in ("stop", "record"):
    raise ValueError(
      f"config.on_nan must be 'stop' or 'record', not {config['on_nan']!r}"
    )
  seeds = config["seeds"]
  for seed in seeds:
    whole(seed, "seeds", 0, 2**32 - 1)
  if not seeds or len(set(seeds)) != len(seeds):
    raise ValueError(f"config.seeds must be different numbers, not {seeds!r}")
  if "classes" in config["model"]:
    raise ValueError("config.model.classes follows from the data; drop it")


def _check(config):
  """Checks all but the runs."""
  whole(config["stages"], "stages", most=_MOST_STAGES)
  for key in ("microbatch_size", "microbatches"):
    whole(config[key], key)
  check_common(config)
  total = config["updates"] * config["microbatches"]
  if total > _MOST_MICROBATCHES:
    raise ValueError(
      f"config.updates {config['updates']} x config.microbatches"
      f" {config['microbatches']} are {total:,} microbatches; use at most"
      f" {_MOST_MICROBATCHES:,}"
    )
  cuts = config["cuts"]
  if cuts not in _CUTS and not isinstance(cuts, list):
    raise ValueError(
      f"config.cuts must be 'parameters', 'time', or a list of layers from 0"
      f" to their number, not {cuts!r}"
    )
  if not config["runs"]:
    raise ValueError(
      "config.runs names no run; give it entries such as"
      " gpipe=dict(schedule='gpipe')"
    )
  titles = {}
  for label, run in config["runs"].items():
    if not _LABEL.fullmatch(label):
      raise ValueError(
        "config.runs: a label names a folder; use letters, digits and _.- for"
        f" {label!r}, and its title for other text"
      )
    if not isinstance(run, Mapping) or "schedule" not in run:
      raise ValueError(
        f"config.runs.{label} must be a dict with a schedule, one of"
        f" {', '.join(generate.SCHEDULES)}"
      )
    title = str(run.get("title", label))
    if title in titles:
      raise ValueError(
        f"config.runs.{label} and .{titles[title]} have the same title"
        f" {title!r}; give each its own"
      )
    titles[title] = label
  for label in config["only"]:
    names.lookup("label in config.only", label, config["runs"])


# A run's table.


class _Draft(NamedTuple):
  """A plan before there is a model."""

  table: Schedule
  weights: str
  recompute: bool
  predict: bool
  stages: int
  recipe: str
  recipe_options: dict[str, Any]


def _draft(config, label) -> _Draft:
  run = config["runs"][label]
  where = f"runs.{label}"
  with blame(where):
    recipe = run.get("recipe", "asgd")
    known = options(run["schedule"])
    of_recipe = algorithms.options(recipe)
    for key in run:
      if key not in (*_RUN_KEYS, *known, *of_recipe):
        everything = (*_RUN_KEYS, *known, *of_recipe)
        raise ValueError(
          f"unknown config key '{where}.{key}' (schedule"
          f" {run['schedule']!r}, recipe {recipe!r});"
          f" {names.nearest(key, everything)}"
        )
    stages = _stages(config, label)
    if tables.is_file(run["schedule"]):
      table = _read_table(config, label)
      stages = table.stages
    else:
      table = _table(config, label, stages)
    weights = run.get("weights")
    if weights is None:
      weights = "latest" if table.flush else _WEIGHTS.get(table.name, "stash")
    if table.flush and weights not in ("latest", "stash"):
      raise ValueError(
        f"config.{where}.weights {weights!r} is for asynchronous schedules, and"
        f" {run['schedule']} flushes: drop it"
      )
    analyze.versions(table, weights)
    predict = flag(run.get("predict", False), f"{where}.predict")
    if predict and weights == "latest" and not table.flush:
      raise ValueError(
        f"config.{where}.predict needs the predicted weights in the backward,"
        f" too: set config.{where}.weights='stash'"
      )
    return _Draft(
      *(table, weights),
      flag(run.get("recompute", False), f"{where}.recompute"),
      *(predict, stages, recipe),
      {key: run[key] for key in of_recipe if key in run},
    )


def _stages(config, label):
  wanted = config["runs"][label].get("stages", config["stages"])
  return whole(wanted, f"runs.{label}.stages", 1, _MOST_STAGES)


def _table(config, label, stages) -> Schedule:
  run = config["runs"][label]
  name, where = run["schedule"], f"runs.{label}"
  maker = generate.SCHEDULES[name]
  takes = inspect.signature(maker).parameters
  given = {key: run[key] for key in options(name) if key in run}
  if "stages" in takes:
    given["stages"] = stages
  elif name in _LISTS:
    given.setdefault("devices", list(range(stages)))
    found = given["devices"]
    if not isinstance(found, list) or len(found) != stages:
      raise ValueError(
        f"config.{where}.devices must be a device for each of {stages} stages,"
        f" not {found!r}"
      )
  else:
    each = 2
    if "chunks" in takes:
      each = given.setdefault("chunks", 2)
      whole(each, f"{where}.chunks")
    if stages % each:
      raise ValueError(
        f"{name} has {each} stages on each device, and {stages} are no multiple"
        f" of that: set config.{where}.stages={stages + each - stages % each}"
      )
    given["devices"] = stages // each
  if name == "zero_bubble":
    given.setdefault("max_activations", stages)
  if name == "custom":
    given["rule"] = _function(run.get("rule"), f"{where}.rule")
  flush = "batches" in takes or name == "custom" and given.get("flush", True)
  every = run.get("every")
  if every is None:
    every = config["microbatches"] if flush or name == "pipedream_2bw" else 1
  whole(every, f"{where}.every")
  total = config["updates"] * config["microbatches"]
  if total % every:
    raise ValueError(
      f"config.{where}.every {every} does not divide the"
      f" {total} microbatches of config.updates x config.microbatches; use a"
      f" divisor such as {math.gcd(total, every)}"
    )
  given["microbatches"] = every if flush else total
  if "every" in takes:
    given["every"] = every
  table = generate.build(name, **given)
  if (validate.rows(table).weight < 0).any():
    raise ValueError("its table has no backward: there is nothing to train")
  return table


def _read_table(config, label) -> Schedule:
  """A table of the user's, which must be of the microbatches of the config."""
  run, where = config["runs"][label], f"config.runs.{label}"
  path, total = run["schedule"], config["updates"] * config["microbatches"]
  try:
    table = validate.validate(tables.read(Path(path)))
  except OSError as error:
    raise ValueError(
      f"{where}.schedule: {path} cannot be read: {error.strerror}"
    ) from error
  own = sorted(set(table.action.tolist()) - set(KNOWN))
  if own:
    raise ValueError(
      f"{where}.schedule: {path} has actions {own}, for which there are no"
      " functions here: use pipeline.executor, or drop them"
    )
  if (validate.rows(table).weight < 0).any():
    raise ValueError("its table has no backward: there is nothing to train")
  if "stages" in run and run["stages"] != table.stages:
    raise ValueError(
      f"{where}.stages {run['stages']} are not the {table.stages} of {path}:"
      " drop it"
    )
  every = run.get("every", config["microbatches"] if table.flush else None)
  if every is not None and every != table.every:
    raise ValueError(
      f"{path} has {table.every} microbatches in an update, not {every!r}: set"
      f" {where}.every={table.every}, or leave it out and set"
      f" config.microbatches={table.every}"
    )
  wanted = table.every if table.flush else total
  if table.microbatches != wanted or total % table.every:
    raise ValueError(
      f"{path} has {table.microbatches} microbatches, {table.every} in an"
      f" update; a table that flushes must be of one update, and divide the"
      f" {total} of config.updates x config.microbatches, another must have"
      " them all"
    )
  return table


def _function(path, key) -> Callable:
  """Returns the function MODULE:NAME."""
  module, _, name = path.partition(":") if isinstance(path, str) else ("", 0, 0)
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError, TypeError) as error:
    raise ValueError(
      f"config.{key} must be the place of a function, as in"
      f" 'my_module:my_rule', not {path!r} ({error})"
    ) from None


# The whole.


def start_jax(devices: int) -> None:
  """Makes JAX have that many CPU devices; to be called before it is used.

  Raises:
    ValueError: if it finds no device.
  """
  if jax.config.jax_num_cpu_devices < devices:
    jax.config.update("jax_num_cpu_devices", devices)
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    raise ValueError(
      f"JAX finds no device: {error}; see the variable JAX_PLATFORMS"
    ) from error


def build(
  config: ml_collections.ConfigDict | Mapping,
  *,
  data_dir: str | None = None,
  dataset: Any = None,
  start: Callable[[int], None] = lambda devices: None,
  seconds: list[list[float]] | None = None,
) -> Experiment:
  """Builds an experiment from a config, checking all of it.

  Args:
    config: keys as in DEFAULTS.
    data_dir: where the data's files are; of a text, the file.
    dataset: of another process, instead of what would be loaded.
    start: called with the number of devices that are needed, before JAX is.
    seconds: of each layer (forward, backward), where stages are made by time;
      None measures them.

  Raises:
    ValueError: for anything wrong, naming it and the remedy.
  """
  config = resolve(config)
  _check(config)
  labels = list(dict.fromkeys(config["only"] or config["runs"]))
  for label in config["runs"]:
    if label not in labels:  # what is not run must make sense, too
      options(config["runs"][label]["schedule"])
  later = [label for label in labels if _partition_of(config, label)]
  drafts = {
    label: _draft(config, label) for label in labels if label not in later
  }
  counts = [draft.table.devices for draft in drafts.values()]
  start(max(counts + [_stages(config, label) for label in later]))
  dataset, problem = load_problem(config, data_dir, dataset)
  shapes = shapes_of(config, problem)
  if seconds is None and (config["cuts"] == "time" or later):
    seconds = _layer_seconds(problem)
  placed = {}
  for label in later:
    made = _placed(config, label, problem, shapes, seconds)
    placed[label], drafts[label] = made, _draft(made, label)
  servers: dict[Any, Part] = {}
  plans = {
    label: _plan(
      *(placed.get(label, config), label, drafts[label], problem, shapes),
      *(seconds, servers),
    )
    for label in labels
  }
  cells = [Cell(label, seed) for label in labels for seed in config["seeds"]]
  return Experiment(config, dataset, problem, plans, tuple(cells), seconds)


def load_problem(config, data_dir, held, size_key="microbatch_size"):
  """The dataset (`held`, or loaded) and the problem; `size_key` is the key of
  the config that says how many examples a batch has."""
  chosen, model = config["data"], dict(config["model"])
  kind, size = model.pop("name"), config[size_key]
  examples = config["evaluation_examples"]
  if not isinstance(chosen["name"], str):
    raise ValueError(f"config.data.name must be a name, not {chosen['name']!r}")
  if chosen["name"] in _TEXTS:
    with blame("data"):
      held = held or text.load(chosen["name"], data_dir=data_dir)
    if kind == "gpt":
      model.setdefault("context", chosen["context"])
    with blame("model"):
      layers = models.build(kind, held.classes, **model)
    with blame("data"):
      problem = problems.language(
        held,
        layers,
        batch_size=size,
        context=chosen["context"],
        evaluation_windows=examples or _WINDOWS,
      )
      problem.batches(0, 1)  # are there windows?
    return held, problem
  if chosen["name"] in sentences.TASKS:
    return _sentences(config, data_dir, held, size_key)
  try:
    held = held or data.load(chosen["name"], data_dir=data_dir)
  except ValueError as error:
    if not str(error).startswith("unknown dataset"):
      raise
    texts, tasks = ", ".join(_TEXTS), ", ".join(sentences.TASKS)
    raise ValueError(
      f"config.data.name: {error}; texts: {texts}; sentences: {tasks}"
    ) from None
  with blame("model"):
    layers = models.build(kind, held.classes, **model)
  with blame(size_key):
    problem = problems.classification(
      held,
      layers,
      batch_size=size,
      augment=chosen["augment"],
      evaluation_examples=examples,
    )
  return held, problem


def _sentences(config, data_dir, held, size_key):
  """The dataset and the problem of a task of sentences."""
  chosen, model = config["data"], dict(config["model"])
  if (kind := model.pop("name")) != "bert":
    raise ValueError(f"config.model.name must be 'bert' here, not {kind!r}")
  found, place = None, model.pop("pretrained", None)
  if place is not None:
    try:
      found = encoder.pretrained(place, pooling=model.get("pooling", "mean"))
    except (TypeError, ValueError) as error:
      raise ValueError(f"config.model.pretrained: {error}") from error
    for key in found.sizes:
      if key in model and key != "pooling":
        raise ValueError(
          f"config.model.{key} follows from config.model.pretrained; drop it"
        )
    model |= found.sizes
  elif "vocabulary" in model:
    raise ValueError("config.model.vocabulary follows from the data; drop it")
  with blame("data"):
    held = held or sentences.load(
      chosen["name"],
      context=chosen["context"],
      data_dir=data_dir,
      tokenizer=found and found.folder,
    )
  model.setdefault("context", chosen["context"])
  model.setdefault("vocabulary", held.vocabulary)
  with blame("model"):
    layers = models.build(kind, held.classes, **model)
  with blame(size_key):
    problem = problems.classify_sentences(
      held,
      layers,
      batch_size=config[size_key],
      evaluation_examples=config["evaluation_examples"],
      weights=found and found.weights,
    )
  return held, problem


def shapes_of(config, problem):
  """The parameters' shapes, if the model fits the data."""
  key = jax.random.key(0)
  try:
    shapes = jax.eval_shape(problem.init, key)
    jax.eval_shape(problem.loss, shapes, problem.batches(0, 1)(0, 0), key)
  except (TypeError, ValueError) as error:
    line = " ".join(str(error).split())[:300]
    raise ValueError(
      f"config.model {config['model']['name']!r} does not fit config.data"
      f" {config['data']['name']!r}: {line}"
    ) from error
  return shapes


def _plan(config, label, draft, problem, shapes, seconds, servers) -> Plan:
  run, where = config["runs"][label], f"runs.{label}"
  table = draft.table
  peak = config["learning_rate"] * table.every / config["microbatches"]
  if "learning_rate" in run:
    peak = positive(run["learning_rate"], f"{where}.learning_rate")
  with blame("schedule"):
    rate = rate_of(config, peak, table.every)
  with blame("cuts"):
    at = _cuts(config, draft.stages, problem, shapes, seconds)
  with blame(where):
    ahead = [None] * draft.stages  # as the recipe has it
    if draft.predict:
      ahead = _steady(table, draft.weights)
    kinds = [
      (len(devices), ahead[stage])
      for stage, devices in enumerate(table.places())
    ]
    recipes = [_recipe(config, draft, rate, *kind) for kind in kinds]
    made = parts.cut(problem, shapes, at, recipes)
  # Runs of the same algorithm share what is compiled of it.
  same = draft.recipe, str(draft.recipe_options), peak, table.every
  for stage, kind in enumerate(kinds):
    known = servers.setdefault((*same, *kind), made[stage])
    made[stage] = made[stage]._replace(
      server=known.server, message=known.message
    )
  return Plan(
    *(label, str(run.get("title", label)), table, draft.weights),
    *(draft.recompute, peak, rate),
    *(config["updates"] * config["microbatches"], tuple(made), tuple(at)),
    together=table.flush and config["clip_norm"] is not None,
  )


def rate_of(config, peak, every):
  """The learning rate, in updates of that many microbatches."""
  section, each = config["schedule"], config["microbatches"] / every
  decays = section["decay_updates"]
  positive(section["warmup_updates"], "schedule.warmup_updates", or_zero=True)
  if not isinstance(decays, list):
    decays = [decays]
  for update in decays:
    positive(update, "schedule.decay_updates", or_zero=True)
  return schedules.warmup_steps(
    peak,
    warmup=round(section["warmup_updates"] * each),
    start=_START * peak,
    boundaries=[round(update * each) for update in decays],
    factor=positive(section["decay_factor"], "schedule.decay_factor"),
  )


def _steady(table, weights):
  """How stale a forward of each stage is once the pipeline is full."""
  stale = analyze.staleness(table, weights).forward
  return np.median(stale, axis=1).astype(int).tolist()


def _recipe(config, draft, rate, replicas, ahead) -> algorithms.Recipe:
  recipe = algorithms.build(
    draft.recipe, rate, replicas, **draft.recipe_options
  )
  algorithm = recipe.algorithm
  if config["clip_norm"] is not None:
    algorithm = transforms.precede(
      algorithm, sharding.clip_by_global_norm(config["clip_norm"])
    )
  if ahead is not None:
    tx = optax.GradientTransformationExtraArgs(algorithm.init, algorithm.update)
    algorithm = base.as_algorithm(tx)
    if ahead:
      algorithm = transforms.lookahead(
        tx, lambda worker: np.zeros(ahead, np.int32) + worker
      )
  return recipe._replace(algorithm=algorithm)


def _cuts(config, stages, problem, shapes, seconds) -> list[int]:
  """Where the layers are cut."""
  wanted, layers = config["cuts"], problem.pieces.layers
  if isinstance(wanted, list) and stages == config["stages"]:
    if len(wanted) != stages + 1:
      raise ValueError(
        f"{stages} stages are cut at {stages + 1} layers, from 0 to"
        f" {len(layers)}, not {wanted}"
      )
    for layer in wanted:
      whole(layer, "cuts", 0, len(layers))
    return wanted
  ends = _ends(problem, shapes)
  if stages > len(ends):
    raise ValueError(
      f"the model has {len(ends)} layers with weights, and that many stages at"
      f" most, not {stages}: set config.stages={len(ends)}, or a deeper"
      " config.model"
    )
  if wanted == "time":
    costs = [sum(both) for both in seconds]
  else:
    costs = [models.count(weights) for weights in base.weights_of(shapes)]
  groups = [
    sum(costs[start:end]) for start, end in zip([0, *ends], ends, strict=False)
  ]
  found = partition.balance(groups, stages)
  return [0, *(ends[nodes[-1]] for nodes in found)]


def _ends(problem, shapes) -> list[int]:
  """Where layers may be cut: each piece has weights. What has none goes with
  the layer after it."""
  held = enumerate(base.weights_of(shapes), 1)
  ends = [after for after, weights in held if models.count(weights)]
  return [*ends[:-1], len(problem.pieces.layers)]


def _partition_of(config, label) -> str | None:
  """The partitioner of a run, if it has one."""
  run, where = config["runs"][label], f"config.runs.{label}"
  wanted = run.get("partition")
  if wanted is None:
    if "bandwidth" in run:
      raise ValueError(f"{where}.bandwidth is for a partition: drop it")
    return None
  if not isinstance(wanted, str) or wanted not in _PARTITIONS:
    raise ValueError(
      f"{where}.partition must be one of {', '.join(_PARTITIONS)}, not"
      f" {wanted!r}"
    )
  if run["schedule"] != _PARTITIONS[wanted]:
    raise ValueError(
      f"{where}.partition={wanted} is for the schedule {_PARTITIONS[wanted]},"
      f" not {run['schedule']}"
    )
  for key in ("devices", "replicas"):
    if key in run:
      raise ValueError(
        f"{where}.{key} follows from {where}.partition: drop one of them"
      )
  return wanted


def _placed(config, label, problem, shapes, seconds) -> dict[str, Any]:
  """The config with what the partitioner of a run says: stages, cuts, and
  which devices have them. Its `stages` are the devices that there are."""
  run, where = config["runs"][label], f"runs.{label}"
  devices = _stages(config, label)
  speed = positive(run.get("bandwidth", _BANDWIDTH), f"{where}.bandwidth")
  ends = _ends(problem, shapes)
  with blame(where):
    profile = _profile(problem, shapes)
    nodes = []
    for first, last in zip([0, *ends], ends, strict=False):
      held = profile.nodes[first:last]
      times = np.sum(seconds[first:last], axis=0).tolist()
      nodes.append(
        held[-1]._replace(
          forward=times[0],
          backward=times[1],
          parameters=sum(node.parameters for node in held),
          stash=sum(node.stash for node in held),
        )
      )
    chain = graph.chain(nodes)
    if run["partition"] == "pipedream":
      made = pipedream_partition.pipedream(chain, devices, speed)
      placed = {"replicas": list(made.replicas)}
    else:
      again = "all" if run.get("recompute") else "none"
      made = mixed_pipe.mixed_pipe(
        chain, devices, bandwidth=speed, recompute=again
      )
      places = made.partition.devices
      placed = {"devices": [device for (device,) in places]}
    at = [0, *(ends[cut - 1] for cut in partition.cuts(made.partition)[1:])]
  new = {k: v for k, v in run.items() if k not in ("partition", "bandwidth")}
  new |= {"stages": len(at) - 1, **placed}
  runs = {**config["runs"], label: new}
  return {**config, "runs": runs, "stages": len(at) - 1, "cuts": at}


def _profile(problem, params, **options):
  """The graph of the model's layers."""
  key = jax.random.key(0)
  dtype = problems.dtype_of(base.weights_of(params))
  batch = problem.batches(0, 1)(0, 0)
  x = jax.eval_shape(
    lambda batch, key: problem.pieces.prepare(batch, key, dtype), batch, key
  )
  if options:  # it is run
    x = jax.numpy.asarray(problem.pieces.prepare(batch, key, dtype))
  return graph.profile(problem.pieces.layers, params, x, key=key, **options)


def _layer_seconds(problem) -> list[list[float]]:
  """Seconds of each layer, forward and backward, as measured here and now."""
  made = _profile(
    *(problem, problem.init(jax.random.key(0))),
    measure=functools.partial(graph.measure, clock=time.perf_counter),
  )
  return [[node.forward, node.backward] for node in made.nodes]
