"""Corrects names of a config in other spellings, such as `dana-zero`."""

from collections.abc import Mapping
from typing import Any

from asgd import data, models, names
from asgd.data import sentences
from asgd.experiment import protocol


def correct(config: dict[str, Any], engines: Mapping[str, Any]) -> None:
  """Replaces names of a checked config by their exact spelling. Changes
  `config` itself.

  The names are those of engines, recipes, labels in `only`, the model and the
  data. An unknown name stays: the code that uses it raises the error.

  Args:
    config: plain data, with every key.
    engines: the engines, by name.

  Example:
    >>> runs = {"a": {"recipe": "Dana-Zero"}}
    >>> config = {"runs": runs, "engine": "simulate", "only": ["A"]}
    >>> correct(config | {"model": {}, "data": {}}, {"simulate": None})
    >>> runs
    {'a': {'recipe': 'dana_zero'}}
  """
  # `schema` checks the entries of runs later: they may be anything here.
  runs = config["runs"] if isinstance(config["runs"], Mapping) else {}
  entries = [entry for entry in runs.values() if isinstance(entry, dict)]
  for section in (config, *entries):
    _replace(section, "engine", engines)
  for entry in entries:
    _replace(entry, "recipe", protocol.recipes())
  # `problem` has a MODULE:FUNCTION only, which has one spelling.
  _replace(config["model"], "name", models.MODELS)
  _replace(config["data"], "name", (*data.DATASETS, *sentences.TASKS))
  config["only"] = [names.canonical(label, runs) for label in config["only"]]


def _replace(section: dict[str, Any], key: str, valid: Any) -> None:
  """Replaces the value of a key by the equal one of the `valid` names, if any.
  """
  if key in section:  # entries of runs may leave it out
    section[key] = names.canonical(section[key], valid)
