# ruff: noqa: E402 (imports follow the change of sys.path)
"""The tables of the reference, made from the code that they describe.

  python docs/hooks/reference_tables.py

A page has `<!-- table: NAME -->`, and below it `TABLES[NAME]()`, which this
command writes there. `<!-- api: NAME -->` stands for the docstrings of
`NAMES[NAME]()`, which only the built documentation has.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # commands are in launch/, which is not installed
from asgd import algorithms, compression, data, experiment, models, transforms
from asgd.data import sentences
from asgd.experiment import problem, protocol
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


def _summary(of: Any) -> str:
  """The first paragraph of a docstring."""
  return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())


def _source(of: Any) -> str:
  """The section `Source:` of a docstring."""
  text = inspect.getdoc(of) or ""
  found = re.search(r"^Source:\n((?:  .*\n?)+)", text, re.MULTILINE)
  return " ".join(found[1].split()) if found else ""


def sources(makers: Mapping[str, Callable]) -> str:
  """Where each is from, as its docstring says it."""
  rows = ((f"`{name}`", _source(maker)) for name, maker in makers.items())
  return format_markdown(("name", "source"), (row for row in rows if row[1]))


def _path(package: str, name: str) -> str:
  """The path of a function of a package, also where a module has its name."""
  is_module = importlib.util.find_spec(f"{package}.{name}") is not None
  return f"{package}.{name}.{name}" if is_module else f"{package}.{name}"


def recipes(
  makers: Mapping[str, Callable] = algorithms.RECIPES,
  page: str = "../api/algorithms.md",
) -> str:
  """All recipes: what each does, its order and its options; `page` has their
  docstrings."""
  rows = []
  for name, maker in makers.items():
    order = algorithms.build(name, 0.1, 3).order
    link = f"[`{name}`]({page}#asgd.algorithms.{name})"
    options = _code(listing.options(maker, algorithms.options(name)))
    rows.append((link, _summary(maker), f"`{order}`", options))
  return format_markdown(("recipe", "description", "order", "options"), rows)


def transform_names() -> list[str]:
  """The public functions of `asgd.transforms`."""
  functions = inspect.getmembers(transforms, inspect.isfunction)
  return [name for name, _ in functions if not name.startswith("_")]


def transform_table() -> str:
  """All transforms, each with its first line."""
  rows = (
    (
      f"[`{name}`](../api/transforms.md#{_path('asgd.transforms', name)})",
      _summary(getattr(transforms, name)),
    )
    for name in transform_names()
  )
  return format_markdown(("transform", "description"), rows)


def schedule_table() -> str:
  """All schedules with a description, their assumptions and their options."""
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
  """The sections of a config that are of some engines only, and of which."""
  engines: dict[tuple[str, str], list[str]] = {}
  for name, kind in ENGINES.items():
    for section, node in kind.sections.items():
      keys = _code(listing.settings(node)) or "a name and its arguments"
      row = f"`{section}`", keys
      engines.setdefault(row, []).append(f"`{name}`")
  return format_markdown(
    ("section", "engines", "settings with their defaults"),
    (
      (section, ", ".join(names), keys)
      for (section, keys), names in engines.items()
    ),
  )


def _is_refused(engine: str, name: str) -> bool:
  """Whether a mesh or a pipeline, which run other recipes of its protocol,
  refuses a recipe."""
  if name in algorithms.PEER_RECIPES:
    # A mesh is in step, and peers without rounds are not.
    return engine == "mesh" and not algorithms.build(name, 0.1, 3).rounds
  if engine not in ("mesh", "pipeline") or name not in algorithms.RECIPES:
    return False
  # Local steps of workers: a pipeline has one gradient for all of them, and the
  # islands of a mesh have rounds.
  recipe = algorithms.build(name, 0.1, 3)
  if engine == "mesh":
    return recipe.worker is not None and not recipe.rounds
  # A pipeline would drop the gradients of all stages but the last.
  return recipe.worker is not None or recipe.max_staleness is not None


def _runs(engine: str, kind: Any, each: Any) -> str:
  """Whether an engine runs a protocol, with the recipes that it refuses."""
  if each.name not in kind.protocols():
    return "no"
  names = [name for name in each.recipes if _is_refused(engine, name)]
  return f"yes, except {_code(names)}" if names else "yes"


def protocol_table() -> str:
  """All protocols: their recipes, and the engines that run them."""
  header = ("a run has", "recipes", *(f"`{name}`" for name in ENGINES))
  rows = (
    (
      each.participants,
      _code(each.recipes),
      *(_runs(engine, kind, each) for engine, kind in ENGINES.items()),
    )
    for each in experiment.PROTOCOLS.values()
  )
  return format_markdown(header, rows)


def refusal_table() -> str:
  """The keys that runs of a protocol may not set, and the reasons."""
  whats: dict[tuple[str, ...], list[str]] = {}
  for each in experiment.PROTOCOLS.values():
    for refusal in each.refusals:
      engines = refusal.engines or tuple(each.runners)
      row = each.participants, _code(engines), refusal.why.rstrip("=")
      values = "".join(f" {value!r}" for value in refusal.values)
      keys = whats.setdefault(row, [])
      keys.append(f"`{refusal.key.removeprefix('recipe.')}{values}`")
    if each.live and each.live.link_faults:
      engines = _code(protocol.LIVE_ENGINES)
      row = each.participants, engines, each.live.link_faults
      flags = [f"`--fault={kind}`" for kind in faults.LINK_FAULTS]
      whats.setdefault(row, []).extend(flags)
  return format_markdown(
    ("runs with", "may not set", "on engines", "because"),
    (
      (participants, ", ".join(keys), engines, why)
      for (participants, engines, why), keys in whats.items()
    ),
  )


def _made(
  header: str, functions: Mapping[str, Callable], derived: Iterable[str]
) -> str:
  """A table of makers; all their arguments are options except `derived`."""
  rows = []
  for name, maker in functions.items():
    known = set(inspect.signature(maker).parameters) - set(derived)
    options = _code(listing.options(maker, known))
    rows.append((f"`{name}`", _summary(maker), options))
  return format_markdown((header, "description", "options"), rows)


def _functions(module: Any, names: Iterable[str]) -> dict[str, Callable]:
  return {name: getattr(module, name) for name in names}


def datasets() -> str:
  """All data that a config can name."""
  kinds = {
    "images, numbers": data.DATASETS,
    "texts": problem.TEXT_NAMES,
    "sentences": sentences.TASKS,
  }
  rows = (
    (kind, ", ".join(f"`{name}`" for name in names))
    for kind, names in kinds.items()
  )
  return format_markdown(("kind", "`data.name`"), rows)


def command_table() -> str:
  """The commands of `launch`, each with the first line of its docstring."""
  rows = (
    (f"`asgd {name}`", command_line.summary(name))
    for name in command_line.COMMANDS
  )
  return format_markdown(("command", "description"), rows)


_COMPOSED = "error_feedback", "clip", "named", "as_codec"
_IN_STEP = "named_reducer", "average", "powersgd_reducer", "onebit_adam"
_FEEDBACK = {"needed": "yes", "own": "its own", "optional": "no"}


def codec_table() -> str:
  """All codecs: content of a message, whether the decoded mean is unbiased,
  whether error feedback is on by default, and the options."""
  rows = []
  for name, maker in compression.CODECS.items():
    parameters = inspect.signature(maker).parameters
    needed = {"tau": 1.0} if name == "threshold" else {}
    codec = maker(**needed)
    link = f"[`{name}`](api/compression.md#{_path('asgd.compression', name)})"
    unbiased = "yes" if codec.unbiased else "no"
    options = _code(listing.options(maker, set(parameters)))
    feedback = _FEEDBACK[codec.feedback]
    rows.append((link, _summary(maker), unbiased, feedback, options))
  return format_markdown(
    ("codec", "message", "unbiased", "error feedback", "options"), rows
  )


def codec_sources() -> str:
  """Where codecs and reducers are from, if they are from a paper."""
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
  "topologies": lambda: _made(
    "topology", topologies.TOPOLOGIES, ["workers"]
  ),
  "schedule_sources": lambda: sources(schedules.SCHEDULES),
  "models": lambda: _made("`model.name`", models.MODELS, ["classes"]),
  "orders": lambda: _made(
    "`order.name`",
    _functions(makers, _ORDERS),
    ["durations", "workers", "messages"],
  ),
  "durations": lambda: _made(
    "`durations.name`", _functions(durations, _DURATIONS), ["seed"]
  ),
  "datasets": datasets,
  "commands": command_table,
  "codecs": codec_table,
  "codec_sources": codec_sources,
}
# List of names -> dotted names that the page documents by their docstrings.
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
  """Returns a page with its tables as the code has them."""

  def table(match: re.Match[str]) -> str:
    return f"{match[1]}\n{TABLES[match[2]]().rstrip()}\n"

  return _TABLE.sub(table, text)


def fill(markdown: str) -> str:
  """Puts docstrings where a page asks for them."""

  def docstrings(match: re.Match[str]) -> str:
    return "\n\n".join(f"::: {path}" for path in NAMES[match[1]]())

  return _API.sub(docstrings, markdown)


def pages() -> list[Path]:
  """Returns the pages that have tables."""
  found = sorted((ROOT / "docs").rglob("*.md"))
  return [path for path in found if _TABLE.search(path.read_text())]


def main() -> None:
  """Writes the tables into all pages."""
  for path in pages():
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
  main()
