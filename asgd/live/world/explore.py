"""Many seeds; and of one that fails, the shortest list of faults that does."""

import collections
import functools
import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from asgd.live.world.batch_run import BatchRun
from asgd.live.world.injections import Scenario, draw
from asgd.live.world.peer_run import PeersRun
from asgd.live.world.run import SeedResult, WorldRun
from asgd.live.world.server_run import ServerRun
from asgd.live.world.table_run import TablesRun

_AT_ONCE = 10  # seeds that a process takes
_MEMORY = "/dev/shm"  # where files are quick; anywhere without it
_REASON = re.compile(r"[0-9/][^ ]*")  # what differs between two like errors


ROOMS: dict[str, type[WorldRun]] = {
  "server": ServerRun,
  "tables": TablesRun,
  "sandblaster": BatchRun,
  "gossip": PeersRun,
}


def drawn(seed: int, room: str = "server") -> Scenario:
  """Returns the scenario of a seed."""
  return draw(seed, ROOMS[room].menu())


def run_seed(
  seed: int, keep: Sequence[int] | None = None, room: str = "server"
) -> SeedResult:
  """Runs the scenario of a seed, with all its faults or some.

  Args:
    seed: from which case, faults, and the order of all steps follow.
    keep: numbers of the faults that come; None: all.
    room: one of ROOMS.
  """
  return _run(seed, keep, room, lambda run: None)[0]


def _run(seed, keep, room, read):
  """Returns the outcome, and what is read of the run that has ended."""
  script = drawn(seed, room)
  if keep is None:
    keep = range(len(script.faults))
  memory = _MEMORY if os.path.isdir(_MEMORY) else None
  with tempfile.TemporaryDirectory(prefix="asgd-world-", dir=memory) as folder:
    run = ROOMS[room](script, Path(folder))
    return run.run(keep), read(run)


def shrink(seed: int, room: str = "server") -> list[int]:
  """Returns the faults of a seed that fails without which it does not fail."""
  keep = list(range(len(drawn(seed, room).faults)))
  for index in list(keep):
    fewer = [i for i in keep if i != index]
    if run_seed(seed, fewer, room).error:
      keep = fewer
  return keep


_TURNS = "turns of processes"


def _logs(run) -> dict[str, list[str]]:
  """Returns the turns of a run's processes, and the rows of its CSV files."""
  logs = {_TURNS: [f"{time:.6f},{name}" for time, name in run.scheduler.turns]}
  for path in sorted(run.folder.glob("*.csv")):
    logs[path.name] = path.read_text(errors="replace").splitlines()
  return logs


def first_difference(seed: int, keep: Sequence[int], room: str) -> str:
  """Returns where a run that fails differs first from the nearest one that
  does not, which lacks one of its faults: the first turn, which is the fault's
  own, and the earliest row, which follows from it."""
  _, logs = _run(seed, keep, room, _logs)
  for index in reversed(keep):
    fewer = [each for each in keep if each != index]
    outcome, others = _run(seed, fewer, room, _logs)
    if not outcome.error:
      break
  else:
    return "  it fails as well without any one of these faults"
  rows = []
  for name, log in logs.items():
    pairs = itertools.zip_longest(log, others.get(name, ()), fillvalue="")
    for number, (mine, other) in enumerate(pairs, 1):
      if mine != other:
        text = f"    {name}, line {number}: {mine or 'none'}; {other or 'none'}"
        rows.append((name != _TURNS, _time_of(mine or other), text))
        break
  texts = [text for _, _, text in sorted(rows)]
  title = f"  without fault {index} it does not fail; first differences:"
  return "\n".join([title, *texts[:2]])


def _time_of(line):
  try:
    return float(line.partition(",")[0])
  except ValueError:  # a header, or a row that was changed
    return 0.0


def _prepare() -> None:
  """Settings of a process that does nothing else: one thread at a time."""
  jax.config.update("jax_cpu_enable_async_dispatch", False)


def _run_many(room: str, seeds: Sequence[int]) -> list[SeedResult]:
  return [run_seed(seed, room=room) for seed in seeds]


def run_seeds(
  seeds: Sequence[int],
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
  """Returns what went wrong at a seed, its shortest list of faults, where
  it differs first from a run that passes, and the command that repeats it."""
  fewest = shrink(outcome.seed, room) if keep is None else list(keep)
  text = drawn(outcome.seed, room).describe(fewest)
  faults = f" --faults={','.join(map(str, fewest))}" if fewest else ""
  command = f"asgd chaos --simulate=1 --seed={outcome.seed}{faults}"
  if room != "server":
    command += f" --protocol={room}"
  differs = first_difference(outcome.seed, fewest, room) if fewest else ""
  lines = text, f"  {outcome.error.strip()}", differs, f"  again: {command}"
  return "\n".join(filter(None, lines))


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
    width = max(map(len, (*self._room.menu().kinds, *self._room.INVARIANTS)))
    lines = [
      f"{self.runs:,} runs, {self.steps:,} steps, {self.seconds:,.0f} simulated"
      f" seconds, {self.restarts:,} restarts"
    ]
    lines += ["", f"{'fault':{width}}  injected"]
    for kind in self._room.menu().kinds:
      lines.append(f"{kind:{width}}  {self.injected[kind]:8,}")
    lines += ["", f"{'invariant':{width}}  checked"]
    checked = self.runs - len(self.failed)
    lines += [f"{name:{width}}  {checked:8,}" for name in self._room.INVARIANTS]
    if self.failed:
      some = ", ".join(map(str, self.failed[:20]))
      lines += ["", f"FAILED: {len(self.failed)} seeds ({some})"]
    return "\n".join(lines)
