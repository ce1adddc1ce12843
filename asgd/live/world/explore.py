"""Many seeds; and of one that fails, the shortest list of faults that does."""

import collections
import functools
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from asgd.live.world import (
  batch_run,
  invariants,
  peer_run,
  scenario,
  table_run,
)
from asgd.live.world.batch_run import BatchRun
from asgd.live.world.peer_run import PeersRun
from asgd.live.world.run import Menu, Run, Scenario, SeedResult, describe, draw
from asgd.live.world.server_run import ServerRun
from asgd.live.world.table_run import TablesRun

_AT_ONCE = 10  # seeds that a process takes
_REASON = re.compile(r"[0-9/][^ ]*")  # what differs between two like errors


class Room(NamedTuple):
  """How the runs of a protocol are drawn, run and checked in a world."""

  run: type[Run]
  menu: Callable[[], Menu]
  invariants: Sequence[str]  # what is checked of a finished run

  def draw(self, seed: int) -> Scenario:
    """Returns the scenario of a seed."""
    return draw(seed, self.menu())


ROOMS = {
  "server": Room(ServerRun, scenario.menu, invariants.NAMES),
  "tables": Room(TablesRun, table_run.menu, table_run.INVARIANTS),
  "sandblaster": Room(BatchRun, batch_run.menu, batch_run.INVARIANTS),
  "gossip": Room(PeersRun, peer_run.menu, peer_run.INVARIANTS),
}


def run_seed(
  seed: int, keep: Sequence[int] | None = None, room: str = "server"
) -> SeedResult:
  """Runs the scenario of a seed, with all its faults or some.

  Args:
    seed: from which case, faults, and the order of all steps follow.
    keep: numbers of the faults that come; None: all.
    room: one of ROOMS.
  """
  drawn = ROOMS[room].draw(seed)
  if keep is None:
    keep = range(len(drawn.faults))
  with tempfile.TemporaryDirectory(prefix="asgd-world-") as folder:
    return ROOMS[room].run(drawn, Path(folder)).run(keep)


def shrink(seed: int, room: str = "server") -> list[int]:
  """Returns the faults of a seed that fails without which it does not fail."""
  keep = list(range(len(ROOMS[room].draw(seed).faults)))
  for index in list(keep):
    fewer = [i for i in keep if i != index]
    if run_seed(seed, fewer, room).error:
      keep = fewer
  return keep


def _prepare() -> None:
  """Settings of a process that does nothing else: one thread at a time."""
  jax.config.update("jax_cpu_enable_async_dispatch", False)


def _run_many(room: str, seeds: Sequence[int]) -> list[SeedResult]:
  return [run_seed(seed, room=room) for seed in seeds]


def run_seeds(
  seeds: range,
  *,
  jobs: int = 1,
  keep: Sequence[int] | None = None,
  room: str = "server",
) -> Iterator[SeedResult]:
  """Yields the outcomes of seeds, in so many processes; `keep` and `room` are
  as in `run_seed`."""
  if jobs == 1:
    for seed in seeds:
      yield run_seed(seed, keep, room)
    return
  parts = [seeds[i : i + _AT_ONCE] for i in range(0, len(seeds), _AT_ONCE)]
  context = multiprocessing.get_context("spawn")
  with context.Pool(jobs, _prepare) as pool:
    for outcomes in pool.imap(functools.partial(_run_many, room), parts):
      yield from outcomes


def explain(
  outcome: SeedResult, keep: Sequence[int] | None = None, room: str = "server"
) -> str:
  """Returns what went wrong at a seed, its shortest list of faults, and the
  command that repeats it."""
  fewest = shrink(outcome.seed, room) if keep is None else list(keep)
  text = describe(ROOMS[room].draw(outcome.seed), fewest)
  faults = f" --faults={','.join(map(str, fewest))}" if fewest else ""
  command = f"asgd chaos --simulate=1 --seed={outcome.seed}{faults}"
  if room != "server":
    command += f" --protocol={room}"
  return f"{text}\n  {outcome.error.strip()}\n  again: {command}"


class Tally:
  """Counts of many outcomes."""

  def __init__(self, room: str = "server"):
    self._room = ROOMS[room]
    self.runs = self.steps = self.restarts = 0
    self.seconds = 0.0
    self.injected: collections.Counter[str] = collections.Counter()
    self.refused: collections.Counter[str] = collections.Counter()
    self.failed: list[int] = []  # seeds

  def add(self, outcome: SeedResult) -> None:
    """Counts one more."""
    self.runs += 1
    self.steps += outcome.steps
    self.restarts += outcome.restarts - 1
    self.seconds += outcome.seconds
    self.injected.update(outcome.injected)
    self.refused.update(_REASON.sub("#", text)[:60] for text in outcome.refused)
    if outcome.error:
      self.failed.append(outcome.seed)

  def table(self) -> str:
    """Returns a table of faults and invariants."""
    width = max(map(len, (*self._room.menu().kinds, *self._room.invariants)))
    lines = [
      f"{self.runs:,} runs, {self.steps:,} steps, {self.seconds:,.0f} simulated"
      f" seconds, {self.restarts:,} restarts"
    ]
    lines += ["", f"{'fault':{width}}  injected"]
    for kind in self._room.menu().kinds:
      lines.append(f"{kind:{width}}  {self.injected[kind]:8,}")
    lines += ["", f"{'invariant':{width}}  checked"]
    checked = self.runs - len(self.failed)
    lines += [f"{name:{width}}  {checked:8,}" for name in self._room.invariants]
    if self.failed:
      some = ", ".join(map(str, self.failed[:20]))
      lines += ["", f"FAILED: {len(self.failed)} seeds ({some})"]
    return "\n".join(lines)
