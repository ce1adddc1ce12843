"""Compares configs, to find whether a folder's cells are of an experiment."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from asgd.checks import shortened
from asgd.experiment import schema

GROWING = ("workers", "seeds")  # lists that may get longer
_OF_EVERY_RUN = ("engine", "recipe", "title")
_SHOWN = 3  # differences in a summary
_LONGEST = 200  # characters of a summary


def differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Returns a line for each leaf in which two trees of plain data differ.

  Example:
    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b was 1, now 3']
  """
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    lines, above = [], f"{path}." if path else ""
    for key in {**old, **new}:
      lines += differences(old.get(key), new.get(key), above + key)
    return lines
  return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def summary(lines: Sequence[str]) -> str:
  """Returns the first few `differences` in one short line."""
  return shortened("; ".join(lines[:_SHOWN]), _LONGEST)


def foreign(
  description: Mapping[str, Any] | None, written: Mapping[str, Any]
) -> str:
  """Returns how a cell differs from an experiment's cells; "": it does not.

  User code is not imported, so results can be read on other machines. Keys that
  may change are not compared, nor are an engine's settings that the run sets
  itself.

  Args:
    description: contents of cell.json; None if it cannot be read.
    written: contents of config.json.
  """
  try:
    assert description is not None
    return summary(_foreign(description, written))
  except (AssertionError, AttributeError, KeyError, TypeError):
    return "its cell.json is not what a run wrote"


def _foreign(
  description: Mapping[str, Any], written: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each difference of a cell from an experiment."""
  label, own = description["cell"]["label"], description["config"]
  config = written["config"]
  if label not in config["runs"]:
    return [f"config.runs has no {label}"]
  entry, run = config["runs"][label], dict(own["runs"][label])
  wanted = {key: entry[key] for key in run if key in entry}
  for key in _OF_EVERY_RUN[1:]:  # recipe and title, which have defaults
    wanted.setdefault(key, run.get(key) if key == "recipe" else label)
  lines = differences(run, wanted, f"config.runs.{label}")
  settings = entry.keys() - run.keys()  # of the engine, set by the run
  for key in config.keys() & own.keys() - {"runs", *GROWING}:
    was, now = own[key], config[key]
    if key in schema.SHARED:
      if key in entry:
        now = schema.shared_of_run(key, now, entry[key])
    elif key in entry:
      continue
    else:
      was, now = _without(was, settings), _without(now, settings)
    lines += differences(was, now, f"config.{key}")
  was, now = description["dataset"], written["dataset"]
  return sorted(lines) + differences(was, now, "dataset")


def _without(section: Any, settings: Set[str]) -> Any:
  """Returns an engine's section without the settings that a run sets itself."""
  if not isinstance(section, Mapping):
    return section
  return {key: value for key, value in section.items() if key not in settings}
