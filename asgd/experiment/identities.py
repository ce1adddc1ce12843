"""Compares identities: whether a config or a cell belongs to an experiment.

An identity is the content of config.json (`folder.identity`): the config, the
data, and values that may change.
"""

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from asgd.checks import shortened
from asgd.experiment import protocol, schema, storage
from asgd.models import encoder

GROWING = ("workers", "seeds")  # lists that may get longer
_MAX_SHOWN = 3  # differences in a summary
_MAX_CHARACTERS = 300  # of a summary
# Keys of a config that may name a file (recorded durations, the table of a
# pipeline's schedule), or a folder: of a pre-trained encoder.
_FILE_KEYS = "path", "schedule", "pretrained"
_MAX_VALUE = 80  # characters of a value in a difference


def differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Returns a line for each leaf in which two trees of plain data differ, and
  for each part in which two long texts differ.

  Example:
    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b was 1, now 3']
    >>> differences([1, [2, 3]], [1, [2, 4]], "a")
    ['a[1][1] was 3, now 4']
  """
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    lines, prefix = [], f"{path}." if path else ""
    for key in {**old, **new}:
      lines += differences(old.get(key), new.get(key), prefix + key)
    return lines
  if old == new:
    return []
  is_list = isinstance(old, list) and isinstance(new, list)
  if is_list and len(old) == len(new):
    items = enumerate(zip(old, new, strict=True))
    return [line for i, x in items for line in differences(*x, f"{path}[{i}]")]
  pairs = [(old, new)]
  if isinstance(old, str) and isinstance(new, str) and len(old) > _MAX_VALUE:
    pairs, path = _different_parts(old, new), f"a part of {path}"
  return [
    f"{path} was {_shown(old)}, now {_shown(new)}" for old, new in pairs
  ]


def _shown(value: Any) -> str:
  return shortened(repr(value), _MAX_VALUE)


def _different_parts(old: str, new: str) -> list[tuple[str, str]]:
  """Returns the parts in which two descriptions differ, such as the settings of
  a recipe.

  Example:
    >>> _different_parts("f(a=1, b=(2, 3), c=4)", "f(a=0, b=(2, 5), c=4)")
    [('a=1', 'a=0'), ('3', '5')]
  """
  # The parentheses of a call without arguments belong to its name.
  ends = re.compile(r"(?:\((?!\))|(?<!\()\)|,)+ ?")
  old_parts, new_parts = ends.split(old), ends.split(new)
  matcher = difflib.SequenceMatcher(None, old_parts, new_parts, autojunk=False)
  return [
    (", ".join(old_parts[i:j]), ", ".join(new_parts[k:end]))
    for tag, i, j, k, end in matcher.get_opcodes()
    if tag != "equal"
  ]


def of_data(experiment: Any) -> dict[str, Any]:
  """Returns the identity of an experiment's data, with the checksums of the
  files that its config names."""
  return {**experiment.dataset_identity, **_checksums(experiment.config)}


def _checksums(section: Mapping[str, Any]) -> dict[str, str | None]:
  """Returns the checksums of the files that a section of a config names."""
  checksums: dict[str, str | None] = {}
  for key, value in section.items():
    if isinstance(value, Mapping):
      checksums |= _checksums(value)
    elif key in _FILE_KEYS and isinstance(value, str):
      path = Path(value).expanduser()
      paths = [path / name for name in encoder.FILES]
      for file in filter(Path.is_file, [path, *paths]):
        checksums[f"file {file}"] = storage.file_digest(file)
  return checksums


def summary(lines: Sequence[str]) -> str:
  """Returns the first few `differences` in one short line."""
  return shortened("; ".join(lines[:_MAX_SHOWN]), _MAX_CHARACTERS)


def _fixed_part(identity: Mapping[str, Any], labels: Sequence[str]) -> Any:
  """Returns the part of an identity that must be equal when an experiment
  resumes: without workers, seeds, and runs that are not in `labels`."""
  config = {k: v for k, v in identity["config"].items() if k not in GROWING}
  runs = {label: dict(config["runs"][label]) for label in labels}
  for entry in runs.values():
    entry.pop("workers", None)
  return {"config": {**config, "runs": runs}, "dataset": identity["dataset"]}


def changes(
  old_identity: Mapping[str, Any], new_identity: Mapping[str, Any]
) -> list[str]:
  """Returns the `differences` of two identities, except in runs, workers and
  seeds that only one of them has."""
  runs = new_identity["config"]["runs"]
  labels = [label for label in old_identity["config"]["runs"] if label in runs]
  return differences(
    _fixed_part(old_identity, labels), _fixed_part(new_identity, labels)
  )


def merge(
  old_identity: Mapping[str, Any], new_identity: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns an identity with the runs, workers and seeds of both; all else is
  from `new_identity`."""
  old, new = old_identity["config"], dict(new_identity["config"])

  def union(key: str, *sections: Mapping[str, Any]) -> list[Any]:
    # `shared` turns a number or a text of the config into a list.
    lists = [schema.shared(key, section[key]) for section in sections]
    return list(dict.fromkeys(itertools.chain(*lists)))

  for key in GROWING:
    new[key] = union(key, old, new)
  runs = dict(old["runs"])
  for label, entry in new["runs"].items():
    old_entry = runs.get(label, {})
    runs[label] = {**old_entry, **entry}
    # A run without `workers` takes those of the config.
    if "workers" in old_entry and "workers" in entry:
      runs[label]["workers"] = union("workers", old_entry, entry)
  return {**new_identity, "config": {**new, "runs": runs}}


def difference_from(
  description: Mapping[str, Any] | None, identity: Mapping[str, Any]
) -> str:
  """Returns how a cell differs from the cells of an experiment; "" if it does
  not.

  User code is not imported, so results can be read on other machines. Keys that
  may change are not compared. The engine is not known here: its settings in a
  run's entry may be texts that it reads as lists or dicts (`_agrees`).

  Args:
    description: contents of cell.json; None if it cannot be read.
    identity: contents of config.json.
  """
  invalid = "its cell.json is not what a run wrote"
  if description is None:
    return invalid
  try:
    return summary(_differences_from(description, identity))
  except (AttributeError, KeyError, TypeError):
    return invalid


def _differences_from(
  description: Mapping[str, Any], identity: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each difference of a cell from an experiment."""
  label, cell_config = description["cell"]["label"], description["config"]
  config = identity["config"]
  if label not in config["runs"]:
    return [f"config.runs has no {label}"]
  # [1] The cell's entry of `runs` has only the options of the recipe. They must
  # be the same in the experiment's entry, which has other keys too.
  entry, run = config["runs"][label], dict(cell_config["runs"][label])
  options = run.keys() | (_options(entry.get("recipe")) - config.keys())
  expected = {key: value for key, value in entry.items() if key in options}
  for key in ("recipe", "title"):  # an entry may lack these
    expected.setdefault(key, run.get(key) if key == "recipe" else label)
  lines = differences(run, expected, f"config.runs.{label}")
  # [2] The entry's settings of the engine are in a section of the cell's.
  settings = entry.keys() - {*options, *schema.SHARED_KEYS, *cell_config}
  sections = [v for k, v in cell_config.items() if k not in schema.SHARED_KEYS]
  given = {key: entry[key] for key in settings}
  lines += _setting_differences(sections, given, f"config.runs.{label}")
  # [3] In the cell's config, the run's values replace those of the experiment.
  for key in config.keys() & cell_config.keys() - {"runs", *GROWING}:
    old, new = cell_config[key], config[key]
    if key in schema.SHARED_KEYS:
      if key in entry:
        new = schema.shared_of_run(key, new, entry[key])
    elif key in entry:  # keys of an engine's section, or a text
      given = entry[key] if isinstance(entry[key], Mapping) else {}
      lines += _setting_differences([old], given, f"config.{key}")
      continue
    else:
      old, new = _drop_keys(old, settings), _drop_keys(new, settings)
    lines += differences(old, new, f"config.{key}")
  # [4] The data. The experiment also has checksums of files.
  old = description["dataset"]
  new = {key: identity["dataset"].get(key) for key in old}
  return sorted(lines) + differences(old, new, "dataset")


def _setting_differences(
  sections: Sequence[Any], given: Mapping[str, Any], path: str
) -> list[str]:
  """Returns lines for the settings in a run's entry that no section of the
  cell's config has."""
  sections, lines = [x for x in sections if isinstance(x, Mapping)], []
  for key, value in given.items():
    values = [section[key] for section in sections if key in section]
    if not any(_agrees(old, value) for old in values):
      old = values[0] if values else None
      lines += differences(old, value, f"{path}.{key}")
  return lines


def _agrees(checked: Any, value: Any) -> bool:
  """Whether a checked value may come from a value of a run's entry: the check
  fills in defaults, and reads a text or a number as a list or a dict.

  Example:
    >>> _agrees({"a": [2], "b": 3}, {"a": 2}), _agrees([1, 2], [1, 3])
    (True, False)
  """
  if isinstance(checked, Mapping) and isinstance(value, Mapping):
    pairs = ((checked.get(key), inner) for key, inner in value.items())
    return all(_agrees(*pair) for pair in pairs)
  if isinstance(checked, Mapping | list) and isinstance(value, str):
    return True
  return bool(checked == value or checked == [value])


def _options(recipe: Any) -> Set[str]:
  """Returns the options of a recipe; none of one that is not of asgd."""
  known = recipe in protocol.recipes()
  return schema.options_of(recipe).keys() if known else set()


def _drop_keys(section: Any, settings: Set[str]) -> Any:
  """Returns an engine's section without the settings that a run sets itself."""
  if not isinstance(section, Mapping):
    return section
  return {key: value for key, value in section.items() if key not in settings}
