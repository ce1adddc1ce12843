"""Lists all names that a config may use: recipes, schedules, engines, models,
data and problems."""

import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asgd import compression, data, models, safe_files
from asgd.data import sentences
from asgd.experiment import ENGINES, problem, protocol, schema
from asgd.gossip.topologies import TOPOLOGIES
from asgd.pipeline import schedules
from asgd.pipeline.engine import PIPELINE
from asgd.problems import (
  clustering,
  embeddings,
  factorisation,
  sparse_logistic,
  topics,
)
from asgd.tables import CONSISTENCIES, FILTERS

_TABLE_PROBLEMS = (  # problems that pull rows
  factorisation.matrix_factorisation,
  sparse_logistic.sparse_logistic_regression,
  topics.lda,
  clustering.k_means,
  embeddings.skip_gram,
)


def options(maker: Callable[..., Any], arguments: Any = None) -> list[str]:
  """Returns the options of a maker with their defaults. If `arguments` are
  given, only these are listed, also those without a default."""
  texts = []
  for name, parameter in inspect.signature(maker).parameters.items():
    is_required = parameter.default is parameter.empty
    # A parameter without a default is no option, unless it is asked for.
    if name in arguments if arguments is not None else not is_required:
      texts.append(name if is_required else f"{name}={parameter.default!r}")
  return texts


def _entry(name: str, summary: str, options_text: str = "") -> str:
  """Returns the lines of one name: its summary, and its options below."""
  # As wide as a terminal.
  wrap = functools.partial(textwrap.wrap, width=79, subsequent_indent="    ")
  lines = wrap(f"{name}: {summary}" if summary else name, initial_indent="  ")
  return "\n".join(lines + wrap(options_text, initial_indent=" " * 4))


def _entries(
  makers: Mapping[str, Callable[..., Any]],
  option_names: Callable[[str], Any] = lambda _: None,
) -> list[str]:
  """Returns an entry for each maker; `option_names` returns the options of a
  name, or None for all with defaults."""
  entries = []
  for name, maker in makers.items():
    # The first paragraph of the docstring.
    summary = (inspect.getdoc(maker) or "").partition("\n\n")[0]
    options_text = ", ".join(options(maker, option_names(name)))
    entries.append(_entry(name, summary.replace("\n", " "), options_text))
  return entries


def settings(node: Any) -> list[str]:
  """Returns the settings of a section of a config, with their defaults."""
  keys = schema.keys_of(node).items()
  return [f"{key}={schema.default_of(child)!r}" for key, child in keys]


def _kind_of_value(setting: Any) -> str:
  """Returns the kind of a setting's value, in the words of its check."""
  # No value of a config is a bare object, so the check fails and its error
  # names the kind.
  try:
    setting.check(object(), "")
  except ValueError as error:
    kind = re.search(r" must be (.*?), not ", str(error))
    listed = re.search(r" known: (.*?)(?:;|$)", str(error))
    optional = " or None" if "None leaves it out" in str(error) else ""
    if match := kind or listed:
      return match[1] + optional
  return "a dict" if isinstance(setting.default, dict) else "anything"


def keys(node: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
  """Returns (kind, default) of each key of a config, by its dotted name."""
  entries = {}
  for key, child in schema.keys_of(node).items():
    # A leaf; an open section has any keys; another section has sections below.
    if isinstance(child, schema.Setting):
      entries[prefix + key] = _kind_of_value(child), schema.default_of(child)
    elif isinstance(child, schema.NamedSection):
      kind = "a dict of a name and its arguments"
      entries[prefix + key] = kind, schema.default_of(child)
    else:
      entries |= keys(child, f"{prefix}{key}.")
  return entries


def catalogue(engines: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the lines of --list and the config keys of --help, as plain
  data."""
  # Sorted: a change of the code then changes few lines of the file.
  config_keys = keys(schema.sections(engines)).items()
  return {
    "list": text(engines).splitlines(),
    "keys": {key: list(row) for key, row in sorted(config_keys)},
  }


def write() -> None:
  """Writes catalogue.json, from which commands print without importing JAX. A
  test fails if the file differs from the code; `python -m launch.listing`
  updates it."""
  content = json.dumps(catalogue({**ENGINES, "pipeline": PIPELINE}), indent=0)
  path = Path(__file__).parent / "catalogue.json"
  safe_files.write(path, content + "\n")


def text(engines: Mapping[str, Any]) -> str:
  """Returns every name that a config may use, with its options; `engines` are
  the engines, by name."""
  engine_entries = []
  for name, kind in engines.items():
    section_settings = {
      k: ", ".join(settings(v)) for k, v in kind.sections.items()
    }
    section_texts = [
      f"{key}: {text}" for key, text in section_settings.items() if text
    ]
    options_text = "; ".join(section_texts)
    engine_entries.append(_entry(name, "", options_text))
  sections = {
    "engines (--engine, or engine of a run)": engine_entries,
    "recipes (recipe of a run)": _entries(
      protocol.recipes(), schema.options_of
    ),
    "consistency (of a run of tables)": [_entry(", ".join(CONSISTENCIES), "")],
    "filters (of a run of tables)": _entries(
      FILTERS, lambda name: inspect.signature(FILTERS[name]).parameters
    ),
    "topologies (topology of a recipe of peers)": _entries(TOPOLOGIES),
    "codecs (name of config.compress)": _entries(compression.CODECS),
    "schedules (schedule of a run of engine pipeline)": _entries(
      schedules.SCHEDULES, lambda name: schedules.describe(name).options
    ),
    "models (config.model.name)": _entries(models.MODELS),
    "problems (config.problem.name, instead of data and model)": _entries(
      {f"{make.__module__}:{make.__name__}": make for make in _TABLE_PROBLEMS}
    ),
    "datasets (config.data.name)": [
      _entry("images", ", ".join(data.DATASETS)),
      _entry("texts", ", ".join(problem.TEXT_NAMES)),
      _entry("sentences", ", ".join(sentences.TASKS)),
    ],
  }
  return "\n\n".join(
    "\n".join([heading, *entries]) for heading, entries in sections.items()
  )


if __name__ == "__main__":
  write()
