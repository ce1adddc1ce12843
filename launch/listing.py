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
  """The options of a maker with their defaults; of those that are `known`, also
  what must be given."""
  parts = []
  for name, parameter in inspect.signature(maker).parameters.items():
    needed = parameter.default is parameter.empty
    if name in known if known is not None else not needed:
      parts.append(name if needed else f"{name}={parameter.default!r}")
  return ", ".join(parts)


def _entry(name: str, summary: str, options: str = "") -> str:
  text = f"{name}: {summary}" if summary else name
  lines = textwrap.wrap(
    text, _WIDTH, initial_indent="  ", subsequent_indent="    "
  )
  lines += textwrap.wrap(
    options, _WIDTH, initial_indent="    ", subsequent_indent="    "
  )
  return "\n".join(lines)


def _entries(makers: Mapping[str, Callable], known: Any = lambda _: None):
  """An entry for each maker; `known` says which options it takes, of a name."""
  entries = []
  for name, maker in makers.items():
    summary = (inspect.getdoc(maker) or "").partition("\n\n")[0]
    options = _options(maker, known(name))
    entries.append(_entry(name, summary.replace("\n", " "), options))
  return entries


def _settings(node: Any) -> str:
  return ", ".join(
    f"{key}={schema.default_of(inner)!r}"
    for key, inner in schema.keys_of(node).items()
  )


def text(engines: Mapping[str, Any]) -> str:
  """Returns everything that a config may name, with its options, those of
  engines by their names."""
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
    "recipes (recipe of a run)": _entries(
      algorithms.RECIPES, algorithms.options
    ),
    "schedules (schedule of a run of engine pipeline)": _entries(
      schedules.SCHEDULES, lambda name: schedules.describe(name).options
    ),
    "models (config.model.name)": _entries(models.MODELS),
    "datasets (config.data.name)": [
      _entry("images", ", ".join(data.DATASETS)),
      _entry("texts", ", ".join(problem.TEXTS)),
      _entry("sentences", ", ".join(sentences.TASKS)),
    ],
  }
  return "\n\n".join(
    "\n".join([heading, *entries]) for heading, entries in sections.items()
  )
