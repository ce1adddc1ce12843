"""What there is to choose from: recipes, schedules, engines, models, data."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from asgd import algorithms, data, models
from asgd.data import sentences
from asgd.experiment import problem, schema
from pipeline import schedules

_WIDTH = 79


def _options(maker: Callable, known: Any = None) -> str:
  """The options of a maker with their defaults."""
  parts = []
  for name, parameter in inspect.signature(maker).parameters.items():
    if known is not None and name not in known:
      continue
    if parameter.default is parameter.empty:
      if known is not None:
        parts.append(name)
      continue
    parts.append(f"{name}={parameter.default!r}")
  return ", ".join(parts)


def _summary(maker: Any) -> str:
  return (inspect.getdoc(maker) or "").partition("\n\n")[0].replace("\n", " ")


def _entry(name: str, summary: str, options: str = "") -> str:
  text = f"{name}: {summary}" if summary else name
  lines = textwrap.wrap(
    text, _WIDTH, initial_indent="  ", subsequent_indent="    "
  )
  if options:
    lines += textwrap.wrap(
      options, _WIDTH, initial_indent="    ", subsequent_indent="    "
    )
  return "\n".join(lines)


def _settings(node: Any) -> str:
  return ", ".join(
    f"{key}={schema.default_of(inner)!r}"
    for key, inner in schema.keys_of(node).items()
  )


def text(engines: Mapping[str, Any]) -> str:
  """Returns everything that a config may name, with its options.

  Args:
    engines: by their names.
  """
  sections = {
    "engines (--engine, or engine of a run)": [
      _entry(
        name,
        "",
        "; ".join(
          f"{section}: {_settings(node)}"
          for section, node in kind.sections.items()
          if schema.keys_of(node)
        ),
      )
      for name, kind in engines.items()
    ],
    "recipes (recipe of a run)": [
      _entry(name, _summary(maker), _options(maker, algorithms.options(name)))
      for name, maker in algorithms.RECIPES.items()
    ],
    "schedules (schedule of a run of engine pipeline)": [
      _entry(
        name,
        _summary(maker),
        _options(maker, schedules.describe(name).options),
      )
      for name, maker in schedules.SCHEDULES.items()
    ],
    "models (config.model.name)": [
      _entry(name, _summary(maker), _options(maker))
      for name, maker in models.MODELS.items()
    ],
    "datasets (config.data.name)": [
      _entry("images", ", ".join(data.DATASETS)),
      _entry("texts", ", ".join(problem.TEXTS)),
      _entry("sentences", ", ".join(sentences.TASKS)),
    ],
  }
  return "\n\n".join(
    "\n".join([heading, *entries]) for heading, entries in sections.items()
  )
