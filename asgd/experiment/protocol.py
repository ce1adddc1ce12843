"""Protocols: the participants of a run and their messages, one value for each.

A recipe belongs to a protocol: a server of dense parameters, peers, tables of
keyed rows, or a coordinator. Engines, replays, audits and commands look up all
facts about a run's protocol in its value; none of them asks which protocol it
is. The values are in `asgd.experiment.protocols`; `asgd.experiment` registers
them, one line each.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import names

LIVE_ENGINES = "threads", "ray"  # the engines of live cells
DEFAULT = "server"  # the protocol of recipes and cells that name no other


class Refusal(NamedTuple):
  """A key of a config that the runs of a protocol may not set, and why."""

  key: str  # dotted; a section stands for all its keys, `recipe.K` for options
  why: str  # ends the sentence: KEY VALUE is not for the recipe R: ...
  remedy: str = "leave it out"  # may hold {value} and {label}
  engines: tuple[str, ...] = ()  # that refuse the key; () is all
  values: tuple[Any, ...] = ()  # refused ones; () is all but the default


def _no_check(*_: Any) -> None:
  """The check of an engine that has nothing to check."""


class Runner(NamedTuple):
  """How one engine runs a protocol; errors are those of `EngineKind`."""

  plan: Callable[[Any, Any, int], Any]  # (Experiment, Run, workers) -> Plan
  start: Callable[[Any], Any]  # Context -> Engine
  describe: Callable[[Mapping[str, Any]], str]  # a result, in a few words
  check: Callable[[Any], None] = _no_check  # of a Run, as EngineKind.check
  workers: Callable[[Any], Sequence[int]] = lambda run: run.config["workers"]
  devices: Callable[[Any], int] = lambda run: 1  # CPU devices of a Run
  # As EngineKind.programs, of a Run of this protocol.
  programs: Callable[[Any, Any, int, Any], Iterator[Any]] | None = None


class Recomputed(NamedTuple):
  """The result of the replay of a cell."""

  trace: Any  # base.Trace
  records: Any  # a NamedTuple of columns
  params: Any
  # Columns of result.json that must be equal too, besides params_sha256.
  digests: Mapping[str, str] = {}


class LiveCells(NamedTuple):
  """How the folders of a protocol's live cells are read.

  The functions raise ValueError. `description` is the content of cell.json.
  """

  # (folder, description): whether the protocol wrote the folder of a cell.
  # `of_cell` calls it only if the recipe of the cell has no name.
  wrote_folder: Callable[[Path, Mapping[str, Any]], bool]
  trace: Callable[[Path, Mapping[str, Any]], Any]  # -> base.Trace
  read: Callable[[Path, Mapping[str, Any]], Any]  # -> live_files.LiveFiles
  # Refuses files that were changed since the cell ended.
  check: Callable[[Path, Mapping[str, Any]], Any]
  rows: Callable[[Path], Sequence[Any]]  # events so far, of all workers
  # (plan, cell, folder, description) -> Recomputed
  replay: Callable[[Any, Any, Path, Mapping[str, Any]], Recomputed]
  # (plan, folder, result, failures): yields Findings; returns the records that
  # a replay must repeat, or None.
  audit: Callable[..., Generator[Any, None, Any]]
  # The kinds of processes that `asgd chaos` kills as workers and as shards.
  parties: Mapping[str, str] = {"worker": "worker", "shard": "shard"}
  # Refuses a cell that has nothing to replay, or cannot be replayed. None:
  # a replay calls `check`, for a finished cell, and `trace` instead.
  check_replayable: Callable[[Path, Mapping[str, Any]], None] | None = None
  link_faults: str = ""  # why --fault cannot drop messages; "": it can
  # (plan, cell, folder) -> (Rules, trace -> (params, records)): the rules of
  # the cell's order, and a simulation of any order that they allow. None if no
  # server decides the order.
  simulation: (
    Callable[[Any, Any, Path], tuple[Any, Callable[[Any], Any]]] | None
  ) = None


class Protocol(NamedTuple):
  """All facts about a protocol that other modules use."""

  name: str
  participants: str  # ends "the recipe has ...": "peers", "a coordinator"
  recipes: Mapping[str, Callable[..., Any]]  # makers, by name
  runners: Mapping[str, Runner]  # by engine
  live: Any = None  # a LiveCells; None: the protocol is simulated only
  refusals: Sequence[Refusal] = ()
  columns: Sequence[Any] = ()  # engines.Column of its results
  column: str = ""  # a key that its results alone have; "": none
  updates: bool = False  # it applies `Problem.updates`, instead of gradients
  # Its workers ask for batches in the order of their jobs, as iterators do.
  iterators: bool = False


PROTOCOLS: dict[str, Protocol] = {}  # by name; see `asgd.experiment`


def named_recipe_protocol(recipe: Any) -> Protocol | None:
  """Returns the protocol that has a recipe of this name; None if none does."""
  for protocol in PROTOCOLS.values():
    if recipe in protocol.recipes:
      return protocol
  return None


def recipes() -> dict[str, Any]:
  """Returns the makers of all recipes, of all protocols, by their names."""
  return {
    name: maker
    for each in PROTOCOLS.values()
    for name, maker in each.recipes.items()
  }


def of(run: Any) -> Protocol:
  """Returns the protocol of a Run: that of its recipe.

  The recipe is given by name, by MODULE:FUNCTION, or by a caller as an object.
  """
  protocol, recipe = named_recipe_protocol(run.recipe), run.given_recipe
  if protocol is not None:
    return protocol
  if recipe is None:
    # An unknown name: `make_recipe` shows the nearest one later.
    if not names.is_import(run.recipe):
      return PROTOCOLS[DEFAULT]
    rate, workers = run.config["learning_rate"], max(run.config["workers"])
    recipe = run.make_recipe(rate, workers)
  return PROTOCOLS[recipe.protocol]


def check_engine(run: Any, protocols: Sequence[str]) -> None:
  """Raises ValueError if a Run's engine does not run its recipe's protocol.

  `protocols`: the names of the protocols that the engine runs.
  """
  protocol = of(run)
  if protocol.name in protocols:
    return
  *other_names, last_name = map(repr, protocol.runners)
  engine_names = (
    f"{', '.join(other_names)} or {last_name}" if other_names else last_name
  )
  raise ValueError(
    f"config.runs.{run.label}: the recipe {run.recipe!r} has"
    f" {protocol.participants} instead of a server's update, which engine"
    f" {run.engine!r} does not run: use engine={engine_names}"
  )


def of_result(result: Mapping[str, Any]) -> Protocol:
  """Returns the protocol of a row of results."""
  # [1] By the name of the recipe; [2] for other code by a column of results.
  protocol = named_recipe_protocol(result["recipe"])
  if protocol is not None:
    return protocol
  for candidate in PROTOCOLS.values():
    if candidate.column and candidate.column in result:
      return candidate
  return PROTOCOLS[DEFAULT]


def of_cell(folder: Path, description: Mapping[str, Any]) -> Protocol:
  """Returns the protocol of a live cell, by its cell.json and the files in its
  folder. The code that the config names is not imported."""
  # [1] A recipe with a name. A live cell has one run.
  for entry in description["config"].get("runs", {}).values():
    protocol = named_recipe_protocol(entry.get("recipe"))
    if protocol is not None:
      return protocol
  # [2] A recipe object of a call. cell.json then has the protocol's name.
  noted_name = (description.get("dataset") or {}).get("protocol")
  if noted_name in PROTOCOLS:
    return PROTOCOLS[noted_name]
  # [3] A MODULE:FUNCTION.
  for protocol in PROTOCOLS.values():
    if protocol.live and protocol.live.wrote_folder(folder, description):
      return protocol
  return PROTOCOLS[DEFAULT]
