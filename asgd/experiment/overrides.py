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
  """Returns a copy of a config with the dotted keys of a command line.

  Keys that select something (name, engine, recipe, schedule) come first. If
  such a key selects another thing, the keys that belonged to the former one are
  dropped. For example, a new `data.name` drops all other keys of `data`.
  (`schema.resolve` treats a run's section with another name in the same way.)
  """
  config, key_tree = schema.as_dict(config), schema.sections(engines)
  # Names first, so that arguments of the new name survive in any order.
  selecting = {"name", "engine", "recipe", "schedule"}
  sorted_paths = sorted(
    overrides, key=lambda p: (p.split(".")[-1] not in selecting, p.count("."))
  )
  for path in sorted_paths:
    value = overrides[path]
    *parents, key = path.split(".")
    section = _find_section(config, key_tree, parents, key, engines)
    if parents and section.get(key) != value:
      _drop_dependents(section, parents, key, value, engines, config)
    section[key] = value
  return config


def _find_section(
  config: dict[str, Any],
  key_tree: Mapping[str, Any],
  parents: Sequence[str],
  key: str,
  engines: schema.Engines,
) -> dict[str, Any]:
  """Returns the dict that has the last part of a dotted key. The dict is made
  if the config lacks it.

  Args:
    config: is changed.
    key_tree: the keys that a config may have, of `schema.sections`.
    parents: the parts of the dotted key before the last one.
    key: the last part.
    engines: the engines, by name.
  """
  section = config
  # The part of `key_tree` for `section`: a dict of keys, Section, NamedSection
  # or Setting; None for a key that the tree lacks.
  node: Any = key_tree
  in_runs = parents[:1] == ["runs"]
  for depth, name in enumerate(parents):
    path = ".".join(parents[: depth + 1])
    if in_runs and depth == 2:  # runs.LABEL.name: the keys of that run
      node = _keys_of_run(parents[1], section, config, engines)
    child = schema.keys_of(node).get(name)
    # [1] Make a dict that the config does not mention.
    if name not in section:
      is_new_run = in_runs and depth == 1
      begins_run = len(parents) == 2 and key in ("recipe", "engine")
      if is_new_run and not begins_run:
        remedy = f" (a new run begins with {path}.recipe)"
        raise schema.unknown_key(path, section, remedy)
      # Elsewhere a deeper key may be an argument of a MODULE:FUNCTION, which is
      # imported later.
      if child is None and not is_new_run and (depth == 0 or in_runs):
        raise schema.unknown_key(path, node)
      # A run's section starts empty: `schema.resolve` adds the config's keys.
      is_section = not isinstance(child, schema.Setting)
      starts_empty = in_runs and is_section
      section[name] = {} if starts_empty else schema.default_of(child)
    # [2] Replace None by an empty dict, for example in config.optimizer.
    has_check = isinstance(child, schema.Setting) and child != schema.UNCHECKED
    if section[name] is None and has_check:
      section[name] = {}
    if isinstance(section[name], ml_collections.ConfigDict):
      section[name] = section[name].to_dict()
    if not isinstance(section[name], dict):
      raise ValueError(f"config.{path}: {shown(name)} has no keys below it")
    # [3] Go down.
    section, node = section[name], child
  return section


def _keys_of_run(
  label: str,
  entry: Mapping[str, Any],
  config: Mapping[str, Any],
  engines: schema.Engines,
) -> dict[str, Any]:
  """Returns the keys that a run may have, with their checks."""
  engine = entry.get("engine", config.get("engine", "simulate"))
  keys: dict[str, Any] = {}
  if isinstance(engine, str) and engine in engines:
    engine_kind = engines[engine]
    with checks.prefix_errors(f"runs.{label}"):
      engine_keys = schema.keys_of_engine(engine_kind, entry)
    keys = dict.fromkeys(engine_keys, schema.UNCHECKED)
    # The engine's sections, and the keys of its main section, which a run may
    # set without the section's name.
    settings = engine_kind.sections.get(engine_kind.settings)
    keys |= {**engine_kind.sections, **schema.keys_of(settings)}
  unchecked_keys = {*schema.RESERVED, *_options(entry.get("recipe"))}
  shared_settings = {key: schema.SHARED_KEYS[key] for key in schema.RUN_KEYS}
  unchecked = dict.fromkeys(unchecked_keys, schema.UNCHECKED)
  return unchecked | shared_settings | keys


def _drop_dependents(
  section: dict[str, Any],
  parents: Sequence[str],
  key: str,
  value: Any,
  engines: schema.Engines,
  config: Mapping[str, Any],
) -> None:
  """Removes the keys of a section or run that belong to a key's old value."""
  # [1] Another model, dataset, optimizer, ...: all other keys were chosen for
  # the former one.
  if key == "name" and (parents[0] != "runs" or len(parents) > 2):
    section.clear()
    return
  # [2] Another recipe of a run: the options that the new recipe lacks.
  if key == "recipe" and parents[0] == "runs":
    old_options, new_options = _options(section.get(key)), _options(value)
    dropped: Iterable[str] = (
      old_options - new_options - {*schema.RESERVED, *schema.RUN_KEYS}
    )
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


def use_engine(
  config: schema.Config, engine: str, engines: schema.Engines
) -> dict[str, Any]:
  """Returns a config with all runs on one engine.

  Settings that only other engines have are dropped from the runs.
  """
  engine_kind = names.lookup("engine", engine, engines)
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
    # A mistaken key, which no engine has, stays: `schema.resolve` names it.
    allowed = {*schema.RESERVED, *schema.RUN_KEYS}
    allowed.update(schema.keys_of_engine(engine_kind, new_entry))
    allowed |= _options(new_entry["recipe"])
    of_engines = (schema.keys_of_engine(k, entry) for k in engines.values())
    dropped = set[str]().union(*of_engines) - allowed
    entries[label] = {k: v for k, v in new_entry.items() if k not in dropped}
  return config
