"""Changes of a config before it is resolved: the keys of a command line, and
another engine for all runs."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import ml_collections

from asgd import names
from asgd.checks import shown
from asgd.experiment import checks, schema


def override(
  config: schema.Config, overrides: Mapping[str, Any], engines: schema.Engines
) -> dict[str, Any]:
  """Applies the dotted keys of a command line, in its order, to a config. A new
  name of a model, an order, durations, an optimizer, or of a run's schedule or
  recipe drops the arguments of the old one."""
  config, keys = schema.as_dict(config), schema.sections(engines)
  # Names first, so that arguments of the new name survive in any order.
  selecting = {"name", "engine", "recipe", "schedule"}
  order = sorted(
    overrides, key=lambda p: (p.split(".")[-1] not in selecting, p.count("."))
  )
  for path in order:
    value = overrides[path]
    *above, key = path.split(".")
    section = _section_of(config, keys, above, key, engines)
    if above and section.get(key) != value:
      _drop_dependents(section, above, key, value, engines, config)
    section[key] = value
  return config


def _section_of(
  config: dict[str, Any],
  keys: Mapping[str, Any],
  above: Sequence[str],
  key: str,
  engines: schema.Engines,
) -> dict[str, Any]:
  """Returns the dict that has the last part of a dotted key. The dict is made
  if the config lacks it.

  Args:
    config: is changed.
    keys: all keys of a config, with their settings.
    above: the parts of the dotted key before the last one.
    key: the last part.
    engines: by name.
  """
  section = config
  node: Any = keys  # the keys that `section` may have
  of_runs = above[:1] == ["runs"]
  for depth, name in enumerate(above):
    path = ".".join(above[: depth + 1])
    if of_runs and depth == 2:  # runs.LABEL.name: the keys of that run
      node = _keys_of_run(above[1], section, config, engines)
    below = schema.keys_of(node).get(name)
    # [1] Make a dict that the config does not mention.
    if name not in section:
      is_new_run = of_runs and depth == 1
      begins_run = len(above) == 2 and key in ("recipe", "engine")
      if is_new_run and not begins_run:
        remedy = f" (a new run begins with {path}.recipe)"
        raise schema.unknown(path, section, remedy)
      # Deeper keys may be arguments of a MODULE:FUNCTION, known only later.
      if below is None and not is_new_run and (depth == 0 or of_runs):
        raise schema.unknown(path, node)
      # A section of a run is laid over that of the config.
      is_section = not isinstance(below, schema.Setting)
      default = {} if of_runs and is_section else schema.default_of(below)
      section[name] = default
    # [2] Make it a dict if it may be one, as `optimizer`, which is None.
    may_be_dict = isinstance(below, schema.Setting) and below != schema.PLAIN
    if section[name] is None and may_be_dict:
      section[name] = {}
    if isinstance(section[name], ml_collections.ConfigDict):
      section[name] = section[name].to_dict()
    if not isinstance(section[name], dict):
      raise ValueError(f"config.{path}: {shown(name)} has no keys below it")
    # [3] Go down.
    section, node = section[name], below
  return section


def _keys_of_run(
  label: str,
  entry: Mapping[str, Any],
  config: Mapping[str, Any],
  engines: schema.Engines,
) -> dict[str, Any]:
  """Returns all keys that a run may have, with their settings."""
  engine = entry.get("engine", config.get("engine", "simulate"))
  keys: dict[str, Any] = {}
  if isinstance(engine, str) and engine in engines:
    kind = engines[engine]
    with checks.blame(f"runs.{label}"):
      keys = dict.fromkeys(schema.keys_of_engine(kind, entry), schema.PLAIN)
    # Sections, and the settings of one of them, which a run gives directly.
    settings = kind.sections.get(kind.settings)
    keys |= {**kind.sections, **schema.keys_of(settings)}
  others = {*schema.RESERVED, *_options(entry.get("recipe"))}
  shared = {key: schema.SHARED[key] for key in schema.OF_A_RUN}
  return dict.fromkeys(others, schema.PLAIN) | shared | keys


def _drop_dependents(
  section: dict[str, Any],
  above: Sequence[str],
  key: str,
  value: Any,
  engines: schema.Engines,
  config: Mapping[str, Any],
) -> None:
  """Removes keys of a section or a run that follow from a key's old value."""
  # [1] Another model, optimizer, ...: all others are its arguments.
  if key == "name":
    section.clear()
    return
  # [2] Another recipe of a run: the options that the new recipe lacks.
  if key == "recipe" and above[0] == "runs":
    old, new = _options(section.get(key)), _options(value)
    dropped: Iterable[str] = old - new - {*schema.RESERVED, *schema.OF_A_RUN}
  # [3] Other keys: the engine knows their dependents.
  else:
    engine = section.get("engine", config.get("engine", "simulate"))
    if not isinstance(engine, str) or engine not in engines:
      return  # `schema.resolve` names the mistake
    dropped = engines[engine].dependents(section, key, value)
  for dependent in dropped:
    section.pop(dependent, None)


def _options(recipe: Any) -> set[str]:
  """Returns the options of a recipe; the empty set for an unknown one."""
  try:
    return set(schema.options_of(recipe))
  except ValueError:
    return set()


def retarget(
  config: schema.Config, engine: str, engines: schema.Engines
) -> dict[str, Any]:
  """Returns a config with all runs on one engine.

  A run's settings of another engine are dropped: the new engine has no use for
  them.
  """
  kind = names.lookup("engine", engine, engines)
  config = schema.as_dict(config)
  config["engine"] = engine
  entries = config.get("runs")
  if not isinstance(entries, MutableMapping):
    return config  # `schema.resolve` names the mistake
  for label, entry in entries.items():
    if not isinstance(entry, Mapping):
      continue
    new_entry = {k: v for k, v in entry.items() if k != "engine"}
    # Runs of a mesh may name no recipe; other engines require one.
    new_entry.setdefault("recipe", "asgd")
    # Dropped are keys that another engine has and this one has not. A mistaken
    # key, which no engine has, stays: `schema.resolve` names it.
    keys = {*schema.RESERVED, *schema.OF_A_RUN}
    keys.update(schema.keys_of_engine(kind, new_entry))
    keys |= _options(new_entry["recipe"])
    others = (schema.keys_of_engine(other, entry) for other in engines.values())
    foreign = set[str]().union(*others) - keys
    entries[label] = {k: v for k, v in new_entry.items() if k not in foreign}
  return config
