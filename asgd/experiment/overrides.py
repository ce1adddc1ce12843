"""Changes of a config before it is resolved: the keys of a command line, and
another engine for all runs."""

from collections.abc import Mapping
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
    place = _place(config, keys, above, key, engines)
    if above and place.get(key) != value:
      _forget(place, above, key, value, engines, config)
    place[key] = value
  return config


def _place(config, keys, above, key, engines):
  """Returns the dict that a dotted key's last part is in, made if need be."""
  place, node = config, keys
  for depth, name in enumerate(above):
    path, of_runs = ".".join(above[: depth + 1]), above[0] == "runs"
    if of_runs and depth == 2:
      node = _nodes_of_run(above[1], place, config, engines)
    below = schema.keys_of(node).get(name)
    if name not in place:
      new = of_runs and depth == 1
      if new and (len(above) > 2 or key not in ("recipe", "engine")):
        other = f" (a new run begins with {path}.recipe)"
        raise schema.unknown(path, place, other)
      if below is None and not new and (depth == 0 or of_runs):
        raise schema.unknown(path, node)
      # A section of a run is laid over that of the config.
      section = not isinstance(below, schema.Setting)
      place[name] = {} if of_runs and section else schema.default_of(below)
    may_be_dict = isinstance(below, schema.Setting) and below != schema.PLAIN
    if place[name] is None and may_be_dict:
      place[name] = {}
    if isinstance(place[name], ml_collections.ConfigDict):
      place[name] = place[name].to_dict()
    if not isinstance(place[name], dict):
      raise ValueError(f"config.{path}: {shown(name)} has no keys below it")
    place, node = place[name], below
  return place


def _nodes_of_run(label, entry, config, engines):
  """Returns all keys of a run."""
  engine, keys = entry.get("engine", config.get("engine", "simulate")), {}
  if isinstance(engine, str) and engine in engines:
    kind = engines[engine]
    with checks.blame(f"runs.{label}"):
      keys = dict.fromkeys(schema.keys_of_engine(kind, entry), schema.PLAIN)
    settings = kind.sections.get(kind.settings)
    keys |= {**kind.sections, **schema.keys_of(settings)}
  others = {*schema.RESERVED, *_options(entry.get("recipe"))}
  shared = {key: schema.SHARED[key] for key in schema.OF_A_RUN}
  return dict.fromkeys(others, schema.PLAIN) | shared | keys


def _forget(place, above, key, value, engines, config) -> None:
  """Removes keys of a section or a run that follow from a key's old value."""
  if key == "name":
    place.clear()
    return
  if key == "recipe" and above[0] == "runs":
    old, new = _options(place.get(key)), _options(value)
    dropped = old - new - {*schema.RESERVED, *schema.OF_A_RUN}
  else:
    engine = place.get("engine", config.get("engine", "simulate"))
    if not isinstance(engine, str) or engine not in engines:
      return
    dropped = engines[engine].dependents(place, key, value)
  for dependent in dropped:
    place.pop(dependent, None)


def _options(recipe) -> set[str]:
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
  for label, entry in entries.items() if isinstance(entries, Mapping) else ():
    if not isinstance(entry, Mapping):
      continue
    own = {k: v for k, v in entry.items() if k != "engine"}
    own.setdefault("recipe", "asgd")
    known = {*schema.RESERVED, *schema.OF_A_RUN}
    known.update(schema.keys_of_engine(kind, own))
    others = (schema.keys_of_engine(other, entry) for other in engines.values())
    foreign = set().union(*others) - known - _options(own["recipe"])
    entries[label] = {k: v for k, v in own.items() if k not in foreign}
  return config
