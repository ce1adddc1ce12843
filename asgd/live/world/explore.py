"""Runs many seeds. Shrinks the faults of a seed that fails, and explains it."""

import collections
import functools
import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd.live.world.batch_run import BatchRun
from asgd.live.world.injections import Scenario, draw
from asgd.live.world.peer_run import PeersRun
from asgd.live.world.run import SeedResult, WorldRun
from asgd.live.world.server_run import ServerRun
from asgd.live.world.table_run import TablesRun

_SEEDS_PER_TASK = 10  # seeds that a process of the pool gets at once
_MEMORY = "/dev/shm"  # if it is missing, runs use a temporary folder on disk
# Numbers and paths, in which two errors of the same kind differ.
_DETAILS = re.compile(r"[0-9/][^ ]*")
_TURNS = "turns of processes"


PROTOCOLS: dict[str, type[WorldRun]] = {
  "server": ServerRun,
  "tables": TablesRun,
  "sandblaster": BatchRun,
  "gossip": PeersRun,
}


def scenario_of(seed: int, protocol: str = "server") -> Scenario:
  """Returns the scenario of a seed."""
  return draw(seed, PROTOCOLS[protocol].menu())


def run_seed(
  seed: int, keep: Sequence[int] | None = None, protocol: str = "server"
) -> SeedResult:
  """Runs the scenario of a seed, with all or some of its faults.

  Args:
    seed: determines the case, the faults, and the order of all steps.
    keep: indices of the faults that are injected; None: all.
    protocol: one of PROTOCOLS.
  """
  return _run(seed, keep, protocol, lambda run: None)[0]


def _run(
  seed: int,
  keep: Sequence[int] | None,
  protocol: str,
  read: Callable[[WorldRun], Any],
) -> tuple[SeedResult, Any]:
  """Returns the outcome of a run and the result of `read`, which is called with
  the ended run before its folder is removed."""
  scenario = scenario_of(seed, protocol)
  if keep is None:
    keep = range(len(scenario.faults))
  memory = _MEMORY if os.path.isdir(_MEMORY) else None
  with tempfile.TemporaryDirectory(prefix="asgd-world-", dir=memory) as folder:
    run = PROTOCOLS[protocol](scenario, Path(folder))
    return run.run(keep), read(run)


def shrink(seed: int, protocol: str = "server") -> list[int]:
  """Returns indices of faults with which a failing seed still fails. Each fault
  is left out once, and stays out if the seed still fails."""
  keep = list(range(len(scenario_of(seed, protocol).faults)))
  # One pass: a run of all subsets would take 2^6 runs instead of 6.
  for index in list(keep):
    other_faults = [i for i in keep if i != index]
    if run_seed(seed, other_faults, protocol).error:
      keep = other_faults
  return keep


def _logs(run: WorldRun) -> dict[str, list[str]]:
  """Returns the turns of a run's processes, and the rows of its CSV files."""
  logs = {_TURNS: [f"{time:.6f},{name}" for time, name in run.scheduler.turns]}
  for path in sorted(run.folder.glob("*.csv")):
    logs[path.name] = path.read_text(errors="replace").splitlines()
  return logs


def first_difference(seed: int, keep: Sequence[int], protocol: str) -> str:
  """Compares a failing run with a run that passes because it lacks one fault.

  Returns, as text, the first turn in which the runs differ, which is where the
  fault was injected, and the earliest row of a file that differs.
  """
  _, failing = _run(seed, keep, protocol, _logs)
  # Leave out a late fault first: the runs are then equal up to a late time.
  for index in reversed(keep):
    other_faults = [i for i in keep if i != index]
    outcome, passing = _run(seed, other_faults, protocol, _logs)
    if not outcome.error:
      break
  else:
    return "  the run also fails without any one of these faults"
  # (False for turns, time, text) of the first difference in each log: sorting
  # puts the turns first, then the earliest row.
  differences = []
  for name, log in failing.items():
    pairs = itertools.zip_longest(log, passing.get(name, ()), fillvalue="")
    for line, (failed, passed) in enumerate(pairs, 1):
      if failed != passed:
        rows = f"{failed or 'none'}; {passed or 'none'}"
        text = f"    {name}, line {line}: {rows}"
        time = _time_of(failed or passed)
        differences.append((name != _TURNS, time, text))
        break
  texts = [text for _, _, text in sorted(differences)]
  title = f"  without fault {index} the run passes; first differences:"
  return "\n".join([title, *texts[:2]])


def _time_of(line: str) -> float:
  """Returns the time at the start of a row; 0 for a header or a torn row."""
  try:
    return float(line.partition(",")[0])
  except ValueError:
    return 0.0


def _prepare() -> None:
  """Configures a process of the pool: JAX computes in the calling thread."""
  # One simulated process runs at a time, so a second thread is of no use.
  jax.config.update("jax_cpu_enable_async_dispatch", False)


def _run_many(protocol: str, seeds: Sequence[int]) -> list[SeedResult]:
  """Runs seeds in a process of the pool."""
  return [run_seed(seed, protocol=protocol) for seed in seeds]


def run_seeds(
  seeds: Sequence[int],
  *,
  jobs: int = 1,
  keep: Sequence[int] | None = None,
  protocol: str = "server",
) -> Iterator[SeedResult]:
  """Yields the outcomes of seeds, computed in `jobs` processes; `keep`, which
  is for one process only, and `protocol` are as in `run_seed`."""
  if jobs == 1:
    for seed in seeds:
      yield run_seed(seed, keep, protocol)
    return
  size = _SEEDS_PER_TASK
  tasks = [seeds[i : i + size] for i in range(0, len(seeds), size)]
  # A forked child would inherit JAX's threads in an undefined state.
  context = multiprocessing.get_context("spawn")
  with context.Pool(jobs, _prepare) as pool:
    for outcomes in pool.imap(functools.partial(_run_many, protocol), tasks):
      yield from outcomes


def explain(
  outcome: SeedResult,
  keep: Sequence[int] | None = None,
  protocol: str = "server",
) -> str:
  """Returns a text about a seed that fails: its fewest faults, the error, the
  first difference to a run that passes, and the command that repeats it."""
  seed = outcome.seed
  fewest = shrink(seed, protocol) if keep is None else list(keep)
  faults = f" --faults={','.join(map(str, fewest))}" if fewest else ""
  command = f"asgd chaos --simulate=1 --seed={seed}{faults}"
  if protocol != "server":
    command += f" --protocol={protocol}"
  lines = [
    scenario_of(seed, protocol).describe(fewest),
    f"  {outcome.error.strip()}",
    first_difference(seed, fewest, protocol) if fewest else "",
    f"  repeat: {command}",
  ]
  return "\n".join(filter(None, lines))


class Tally:
  """Counts of many outcomes."""

  def __init__(self, protocol: str = "server"):
    self._run_type = PROTOCOLS[protocol]
    self.runs = self.steps = self.restarts = 0
    self.seconds = 0.0
    self.injected: collections.Counter[str] = collections.Counter()
    self.refused: collections.Counter[str] = collections.Counter()
    self.failed_seeds: list[int] = []

  def add(self, outcome: SeedResult) -> None:
    """Counts an outcome."""
    self.runs += 1
    self.steps += outcome.steps
    self.restarts += outcome.restarts - 1  # the first start is no restart
    self.seconds += outcome.seconds
    self.injected.update(outcome.injected)
    texts = (_DETAILS.sub("#", text)[:60] for text in outcome.refused)
    self.refused.update(texts)
    if outcome.error:
      self.failed_seeds.append(outcome.seed)

  def table(self) -> str:
    """Returns a table of faults and invariants."""
    kinds, invariants = self._run_type.menu().kinds, self._run_type.INVARIANTS
    width = max(map(len, (*kinds, *invariants)))
    lines = [
      f"{self.runs:,} runs, {self.steps:,} steps, {self.seconds:,.0f} simulated"
      f" seconds, {self.restarts:,} restarts"
    ]
    lines += ["", f"{'fault':{width}}  injected"]
    for kind in kinds:
      lines.append(f"{kind:{width}}  {self.injected[kind]:8,}")
    lines += ["", f"{'invariant':{width}}  checked"]
    checked = self.runs - len(self.failed_seeds)
    lines += [f"{name:{width}}  {checked:8,}" for name in invariants]
    if self.failed_seeds:
      first_seeds = ", ".join(map(str, self.failed_seeds[:20]))
      lines += ["", f"FAILED: {len(self.failed_seeds)} seeds ({first_seeds})"]
    return "\n".join(lines)
