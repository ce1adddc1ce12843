# ruff: noqa: E402 (imports follow the change of sys.path)
"""Generates the tables of the reference pages from the code.

  python docs/hooks/reference_tables.py

The command writes `TABLES[NAME]()` below each `<!-- table: NAME -->` of a page.
For `<!-- api: NAME -->` the site build inserts the docstrings of the objects
`NAMES[NAME]()`; the page itself does not change.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for launch/, which is not installed
from asgd import algorithms, compression, data, experiment, models, transforms
from asgd.data import sentences
from asgd.experiment import problem
from asgd.experiment import protocol as protocol_lib
from asgd.gossip import topologies
from asgd.live import faults
from asgd.orders import durations, makers
from asgd.pipeline import schedules
from asgd.pipeline.engine import PIPELINE
from asgd.text_table import format_markdown
from launch import command_line, listing

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(\n(?:\|.*\n)+)?")
_API = re.compile(r"^<!-- api: (\w+) -->$", re.MULTILINE)


def _code(words: Iterable[str]) -> str:
  return ", ".join(f"`{word}`" for word in words)


def _summary(documented: Any) -> str:
  """Returns the first paragraph of an object's docstring, on one line."""
  text = inspect.getdoc(documented) or ""
  return " ".join(text.partition("\n\n")[0].split())


def _source(documented: Any) -> str:
  """Returns the section `Source:` of an object's docstring, on one line."""
  text = inspect.getdoc(documented) or ""
  section = re.search(r"^Source:\n((?:  .*\n?)+)", text, re.MULTILINE)
  return " ".join(section[1].split()) if section else ""


def sources(makers: Mapping[str, Callable]) -> str:
  """Returns a table of sources, from the docstrings of the functions."""
  rows = ((f"`{name}`", _source(maker)) for name, maker in makers.items())
  return format_markdown(("name", "source"), (row for row in rows if row[1]))


def _path(package: str, name: str) -> str:
  """Returns the dotted path of a package's function, which may be in a module
  of the same name."""
  is_module = importlib.util.find_spec(f"{package}.{name}") is not None
  return f"{package}.{name}.{name}" if is_module else f"{package}.{name}"


def recipes(
  makers: Mapping[str, Callable] = algorithms.RECIPES,
  page: str = "../api/algorithms.md",
) -> str:
  """Returns a table of recipes with description, order and options; names link
  to the docstrings on `page`."""
  rows = []
  for name, maker in makers.items():
    order = algorithms.build(name, 0.1, 3).order
    link = f"[`{name}`]({page}#asgd.algorithms.{name})"
    options = _code(listing.options(maker, algorithms.options(name)))
    rows.append((link, _summary(maker), f"`{order}`", options))
  return format_markdown(("recipe", "description", "order", "options"), rows)


def transform_names() -> list[str]:
  """Returns the names of the public functions of `asgd.transforms`."""
  functions = inspect.getmembers(transforms, inspect.isfunction)
  return [name for name, _ in functions if not name.startswith("_")]


def transform_table() -> str:
  """Returns a table of transforms with descriptions."""
  rows = (
    (
      f"[`{name}`](../api/transforms.md#{_path('asgd.transforms', name)})",
      _summary(getattr(transforms, name)),
    )
    for name in transform_names()
  )
  return format_markdown(("transform", "description"), rows)


def schedule_table() -> str:
  """Returns a table of schedules: description, flush, weights and options."""
  rows = []
  for name, maker in schedules.SCHEDULES.items():
    traits = schedules.describe(name)
    link = f"[`{name}`](../api/schedules.md#asgd.pipeline.schedules.{name})"
    flush = "after each batch" if traits.flush else "never"
    weights = "latest" if traits.flush else traits.weights
    options = _code(listing.options(maker, traits.options))
    rows.append((link, _summary(maker), flush, f"`{weights}`", options))
  return format_markdown(
    ("schedule", "description", "flushes", "`weights`", "options"), rows
  )


def engine_table() -> str:
  """Returns a table of config sections that only some engines have."""
  engines_by_row: dict[tuple[str, str], list[str]] = {}
  for name, engine in ENGINES.items():
    for section, node in engine.sections.items():
      keys = _code(listing.settings(node)) or "a name and its arguments"
      row = f"`{section}`", keys
      engines_by_row.setdefault(row, []).append(f"`{name}`")
  return format_markdown(
    ("section", "engines", "settings with their defaults"),
    (
      (section, ", ".join(names), keys)
      for (section, keys), names in engines_by_row.items()
    ),
  )


def _is_refused(engine: str, name: str) -> bool:
  """Whether a mesh or a pipeline refuses a recipe, though it runs other recipes
  of the same protocol."""
  if name in algorithms.PEER_RECIPES:
    # A mesh is in step, and peers without rounds are not.
    return engine == "mesh" and not algorithms.build(name, 0.1, 3).rounds
  if engine not in ("mesh", "pipeline") or name not in algorithms.RECIPES:
    return False
  # Recipes with local steps of workers: only islands of a mesh run them, in
  # rounds. A pipeline sends one gradient per message.
  recipe = algorithms.build(name, 0.1, 3)
  if engine == "mesh":
    return recipe.worker is not None and not recipe.rounds
  # A pipeline would drop the gradients of all stages but the last.
  return recipe.worker is not None or recipe.max_staleness is not None


def _answer(engine_name: str, engine: Any, protocol: Any) -> str:
  """Returns "yes" or "no", whether an engine runs a protocol; "yes" may name
  recipes that it refuses."""
  if protocol.name not in engine.protocols():
    return "no"
  names = [name for name in protocol.recipes if _is_refused(engine_name, name)]
  return f"yes, except {_code(names)}" if names else "yes"


def protocol_table() -> str:
  """Returns a table of protocols: their recipes, and the engines that run
  them."""
  header = ("a run has", "recipes", *(f"`{name}`" for name in ENGINES))
  rows = (
    (
      protocol.participants,
      _code(protocol.recipes),
      *(_answer(name, engine, protocol) for name, engine in ENGINES.items()),
    )
    for protocol in experiment.PROTOCOLS.values()
  )
  return format_markdown(header, rows)


def refusal_table() -> str:
  """Returns a table of keys that runs of a protocol may not set, and why."""
  keys_by_row: dict[tuple[str, ...], list[str]] = {}
  for protocol in experiment.PROTOCOLS.values():
    for refusal in protocol.refusals:
      engines = refusal.engines or tuple(protocol.runners)
      row = protocol.participants, _code(engines), refusal.why.rstrip("=")
      values = "".join(f" {value!r}" for value in refusal.values)
      keys = keys_by_row.setdefault(row, [])
      keys.append(f"`{refusal.key.removeprefix('recipe.')}{values}`")
    if protocol.live and protocol.live.link_faults:
      engines = _code(protocol_lib.LIVE_ENGINES)
      row = protocol.participants, engines, protocol.live.link_faults
      flags = [f"`--fault={kind}`" for kind in faults.LINK_FAULTS]
      keys_by_row.setdefault(row, []).extend(flags)
  return format_markdown(
    ("runs with", "may not set", "on engines", "because"),
    (
      (participants, ", ".join(keys), engines, why)
      for (participants, engines, why), keys in keys_by_row.items()
    ),
  )


def _function_table(
  header: str, functions: Mapping[str, Callable], derived: Iterable[str]
) -> str:
  """Returns a table of functions; their arguments are options, except those in
  `derived`, which the run gives."""
  rows = []
  for name, function in functions.items():
    option_names = set(inspect.signature(function).parameters) - set(derived)
    options = _code(listing.options(function, option_names))
    rows.append((f"`{name}`", _summary(function), options))
  return format_markdown((header, "description", "options"), rows)


def _functions(module: Any, names: Iterable[str]) -> dict[str, Callable]:
  return {name: getattr(module, name) for name in names}


def datasets() -> str:
  """Returns a table of the datasets that a config can name."""
  names_by_kind = {
    "images, numbers": data.DATASETS,
    "texts": problem.TEXT_NAMES,
    "sentences": sentences.TASKS,
  }
  rows = (
    (kind, ", ".join(f"`{name}`" for name in names))
    for kind, names in names_by_kind.items()
  )
  return format_markdown(("kind", "`data.name`"), rows)


def command_table() -> str:
  """Returns a table of commands with the first line of their docstrings."""
  rows = (
    (f"`asgd {name}`", command_line.summary(name))
    for name in command_line.COMMANDS
  )
  return format_markdown(("command", "description"), rows)


# Functions of `asgd.compression` besides the codecs: those that wrap a codec,
# and those for devices in step.
_COMPOSED = "error_feedback", "clip", "named", "as_codec"
_IN_STEP = "named_reducer", "average", "powersgd_reducer", "onebit_adam"
_FEEDBACK = {"needed": "yes", "own": "its own", "optional": "no"}


def codec_table() -> str:
  """Returns a table of codecs: content of a message, whether the decoded mean
  is unbiased, whether error feedback is on by default, and the options."""
  rows = []
  for name, maker in compression.CODECS.items():
    parameters = inspect.signature(maker).parameters
    required = {"tau": 1.0} if name == "threshold" else {}
    codec = maker(**required)
    link = f"[`{name}`](api/compression.md#{_path('asgd.compression', name)})"
    unbiased = "yes" if codec.unbiased else "no"
    options = _code(listing.options(maker, set(parameters)))
    feedback = _FEEDBACK[codec.feedback]
    rows.append((link, _summary(maker), unbiased, feedback, options))
  return format_markdown(
    ("codec", "message", "unbiased", "error feedback", "options"), rows
  )


def codec_sources() -> str:
  """Returns a table of the sources of codecs and reducers that have one."""
  makers = {**compression.CODECS, "onebit_adam": compression.onebit_adam}
  return sources({k: v for k, v in makers.items() if _source(v) != "none."})


_ORDERS = "asynchronous", "bulk_synchronous", "stale_synchronous"
_ORDERS += "backup_workers", "backup_tasks", "fixed_delay", "with_stops"
_DURATIONS = "constant", "gamma", "homogeneous", "heterogeneous", "measured"
_DURATIONS += "pareto", "bursts", "failing"

TABLES: dict[str, Callable[[], str]] = {
  "recipes": recipes,
  "transforms": transform_table,
  "schedules": schedule_table,
  "engines": engine_table,
  "protocols": protocol_table,
  "refusals": refusal_table,
  "recipe_sources": lambda: sources(algorithms.RECIPES),
  "peer_recipes": lambda: recipes(algorithms.PEER_RECIPES, "api/gossip.md"),
  "peer_sources": lambda: sources(algorithms.PEER_RECIPES),
  "topologies": lambda: _function_table(
    "topology", topologies.TOPOLOGIES, ["workers"]
  ),
  "schedule_sources": lambda: sources(schedules.SCHEDULES),
  "models": lambda: _function_table("`model.name`", models.MODELS, ["classes"]),
  "orders": lambda: _function_table(
    "`order.name`",
    _functions(makers, _ORDERS),
    ["durations", "workers", "messages"],
  ),
  "durations": lambda: _function_table(
    "`durations.name`", _functions(durations, _DURATIONS), ["seed"]
  ),
  "datasets": datasets,
  "commands": command_table,
  "codecs": codec_table,
  "codec_sources": codec_sources,
}
# NAME of `<!-- api: NAME -->` -> dotted names of the documented objects.
NAMES: dict[str, Callable[[], list[str]]] = {
  "recipes": lambda: [f"asgd.algorithms.{name}" for name in algorithms.RECIPES],
  "peer_recipes": lambda: [
    f"asgd.algorithms.{name}" for name in algorithms.PEER_RECIPES
  ],
  "transforms": lambda: [
    _path("asgd.transforms", name) for name in transform_names()
  ],
  "schedules": lambda: [
    f"asgd.pipeline.schedules.{name}" for name in schedules.SCHEDULES
  ],
  "codecs": lambda: [
    _path("asgd.compression", name)
    for name in (*compression.CODECS, *_COMPOSED, *_IN_STEP)
  ],
}


def page(text: str) -> str:
  """Returns a page with tables that agree with the code."""

  def table(match: re.Match[str]) -> str:
    return f"{match[1]}\n{TABLES[match[2]]().rstrip()}\n"

  return _TABLE.sub(table, text)


def fill(markdown: str) -> str:
  """Returns a page with mkdocstrings' directives for `<!-- api: NAME -->`."""

  def docstrings(match: re.Match[str]) -> str:
    return "\n\n".join(f"::: {path}" for path in NAMES[match[1]]())

  return _API.sub(docstrings, markdown)


def pages() -> list[Path]:
  """Returns the paths of the pages that have tables."""
  paths = sorted((ROOT / "docs").rglob("*.md"))
  return [path for path in paths if _TABLE.search(path.read_text())]


def main() -> None:
  """Writes the tables into all pages."""
  for path in pages():
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
  main()
