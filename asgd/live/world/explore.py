"""Many seeds; and of one that fails, the shortest list of faults that does."""

import collections
import contextlib
import dataclasses
import multiprocessing
import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd.live.clusters.base import finished
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard
from asgd.live.world import invariants, scenario
from asgd.live.world.cluster import Training, World, WorldCluster
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scenario import Injection, Scenario
from asgd.live.world.scheduler import Scheduler, Stuck
from asgd.live.world.storage import Broken, Disk, flip

_LOOK = 0.1  # seconds between two looks of the driver
_SAVES = 3  # looks between two checkpoints
_JOB = 0.03  # seconds that a job takes, on average
_SECONDS, _TURNS = 600.0, 200_000  # in which a run ends
_RESTARTS = 12  # of the same command, at most
_REASONS = {"fill", "remove memory", "flip"}  # for a command to end early
_TEARS = 4  # writes, of which one is torn; or the next of a row like these:
_TORN = {0.05: b"", 0.5: b"leave", 2.0: b"join", 8.0: b"receive"}
_AT_ONCE = 50  # seeds that a process takes
_REASON = re.compile(r"[0-9/][^ ]*")  # what differs between two like errors


@dataclasses.dataclass
class SeedResult:
  """What became of a scenario."""

  seed: int
  injected: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  refused: list[str] = dataclasses.field(default_factory=list)  # clear errors
  error: str = ""  # what is wrong; nothing if all is well
  restarts: int = 0
  steps: int = 0
  seconds: float = 0.0  # of the world


class _Run:
  """One scenario, from its start to the checks."""

  def __init__(self, drawn: Scenario, folder: Path):
    self._scenario, self._folder = drawn, folder
    self.outcome = SeedResult(drawn.seed)
    scheduler = Scheduler(drawn.seed)
    self._scheduler = scheduler
    network, disk = SimulatedNetwork(scheduler), Disk(scheduler)
    self._world = World(scheduler, network, disk, folder, [0.0], [])
    rng = random.Random(drawn.seed + 1)

    def pause(job):
      for fault in self._of_jobs.pop(job, ()):
        self._plan(fault, scheduler.steps)
      scheduler.sleep(rng.expovariate(1 / _JOB))

    self._training: Training = scenario.training(drawn.case, pause)
    self._cluster: WorldCluster | None = None
    self._driver = None
    self._shards: list[Shard] = []
    self._images: list[Any] | None = None  # the last checkpoint
    self._finished = False
    # Faults that come after a job has begun.
    self._of_jobs: dict[int, list[Injection]] = collections.defaultdict(list)

  def _plan(self, fault, steps):
    calls = self._scheduler.faults.setdefault(steps + fault.step, [])
    calls.append(lambda: self._inject(fault))

  def run(self, keep: Sequence[int]) -> SeedResult:
    """Runs with some of the faults."""
    outcome, scheduler = self.outcome, self._scheduler
    for index in keep:
      fault = self._scenario.faults[index]
      if fault.job:
        self._of_jobs[fault.job].append(fault)
      else:
        self._plan(fault, 0)
    try:
      while not self._finished:
        self._start(resumed=outcome.restarts > 0)
        # Also of a worker that has no place any more.
        for error in scheduler.errors:
          if isinstance(error, Broken):
            raise error
        outcome.restarts += 1
        if outcome.restarts > _RESTARTS:
          raise Stuck(f"not finished after {_RESTARTS} restarts")
      invariants.check(
        *(self._world, self._training, self._scenario.case, self._shards)
      )
    except (Broken, Stuck) as error:
      outcome.error = f"{type(error).__name__}: {error}"
    except Exception:
      outcome.error = traceback.format_exc()
      outcome.error = outcome.error.replace(str(self._folder), "FOLDER")
    finally:
      scheduler.close()
    outcome.steps, outcome.seconds = scheduler.steps, scheduler.now
    return outcome

  def _start(self, resumed):
    """One command, from its start until it ends or is killed."""
    self._cluster = WorldCluster(
      self._world,
      self._training,
      kills=self._scenario.case.kills,
      resumed=resumed,
      images=self._images,
    )
    self._driver = self._scheduler.start("driver", self._drive)
    driver = self._driver
    self._scheduler.run(lambda: not driver.alive, _SECONDS, _TURNS)
    self._scheduler.close()
    self._world.disk.full = False
    if driver.error is not None:
      if not isinstance(driver.error, ValueError):
        raise driver.error
      text = str(driver.error).replace(str(self._folder), "FOLDER")
      self.outcome.refused.append(text)
      if not self.outcome.injected.keys() & _REASONS:
        raise Broken(f"refused without a reason: {text}")

  def _drive(self):
    """The main function of the driver."""
    cluster, looks = self._cluster, 0
    cluster.start()
    while True:
      cluster.check()
      looks += 1
      if looks % _SAVES == 0:
        with contextlib.suppress(Disconnected):
          self._images = cluster.images() or self._images
      if finished(cluster.status()):
        break
      self._scheduler.sleep(_LOOK)
    self._shards = list(cluster.opened)
    self._finished = True

  def _inject(self, fault: Injection):
    """A fault comes, if there is what it happens to."""
    if self._finished or self._cluster is None:
      return
    if _INJECT[fault.kind](self, fault):
      self.outcome.injected[fault.kind] += 1

  def _pick(self, kind, fault):
    there = self._cluster.processes(kind)
    return there[int(fault.which * len(there))] if there else None

  def _kill(self, kind, fault):
    process = self._pick(kind, fault)
    if process:
      self._scheduler.kill(process)
    return process

  def _kill_all(self, fault):
    for process in self._scheduler.processes:
      self._scheduler.kill(process)
    return True

  def _stop(self, kind, fault):
    process = self._pick(kind, fault)
    if process:
      process.sleeps_until = self._scheduler.now + fault.seconds
    return process

  def _cut(self, fault):
    there = self._world.network.connections()
    if there:
      self._world.network.cut(there[int(fault.which * len(there))])
    return there

  def _spoil(self, fault):
    self._world.network.spoil(fault.kind)
    return True

  def _tear(self, fault):
    text = _TORN[fault.seconds]
    left = 0 if text else int(fault.which * _TEARS)
    self._world.disk.tears.append((left, text))
    return True

  def _fill(self, fault):
    self._world.disk.full = True
    return True

  def _jump(self, fault):
    self._world.skew[0] += fault.seconds * (1 if fault.which < 0.8 else -1)
    return True

  def _remove_memory(self, fault):
    shutil.rmtree(self._folder / "memory", ignore_errors=True)
    self._kill("shard", fault)
    return True

  def _drain(self, fault):
    process = self._pick("worker", fault)
    for there, loops, _ in self._cluster.workers.values():
      for loop in loops if there is process else ():
        loop.drain()
        return True
    return False

  def _nan(self, fault):
    self._world.nans.append(None)
    return True

  def _spoil_message(self, fault):
    case = self._scenario.case
    if case.tau is None and case.down is None:
      return False  # nobody could tell
    self._world.disk.spoils.append(fault.which)
    return True

  def _flip(self, fault):
    paths = sorted((self._folder / "memory").glob("shard-*/snapshot.json"))
    if not paths:
      return False
    path = paths[int(fault.which * len(paths))]
    name = path.parent.name.replace("-", " ")
    flip(path, fault.seconds / 8)
    for process in self._cluster.processes(name):
      self._scheduler.kill(process)
    return True


_INJECT: dict[str, Callable] = {
  "kill worker": lambda run, fault: run._kill("worker", fault),
  "kill shard": lambda run, fault: run._kill("shard", fault),
  "kill all": _Run._kill_all,
  "stop worker": lambda run, fault: run._stop("worker", fault),
  "stop shard": lambda run, fault: run._stop("shard", fault),
  "cut": _Run._cut,
  "lose": _Run._spoil,
  "double": _Run._spoil,
  "reorder": _Run._spoil,
  "tear": _Run._tear,
  "fill": _Run._fill,
  "jump": _Run._jump,
  "remove memory": _Run._remove_memory,
  "flip": _Run._flip,
  "drain": _Run._drain,
  "nan": _Run._nan,
  "spoil": _Run._spoil_message,
}


def run_seed(seed: int, keep: Sequence[int] | None = None) -> SeedResult:
  """Runs the scenario of a seed, with all its faults or some."""
  drawn = scenario.draw(seed)
  if keep is None:
    keep = range(len(drawn.faults))
  with tempfile.TemporaryDirectory(prefix="asgd-world-") as folder:
    return _Run(drawn, Path(folder)).run(keep)


def shrink(seed: int) -> list[int]:
  """Returns the faults of a seed that fails without which it does not fail."""
  keep = list(range(len(scenario.draw(seed).faults)))
  for index in list(keep):
    fewer = [i for i in keep if i != index]
    if run_seed(seed, fewer).error:
      keep = fewer
  return keep


def _prepare() -> None:
  """Settings of a process that does nothing else: one thread at a time."""
  jax.config.update("jax_cpu_enable_async_dispatch", False)


def _run_many(seeds: Sequence[int]) -> list[SeedResult]:
  return [run_seed(seed) for seed in seeds]


def run_seeds(
  seeds: range, *, jobs: int = 1, keep: Sequence[int] | None = None
) -> Iterator[SeedResult]:
  """Yields the outcomes of seeds, in so many processes; `keep` is as in
  `run_seed`."""
  if jobs == 1:
    for seed in seeds:
      yield run_seed(seed, keep)
    return
  parts = [seeds[i : i + _AT_ONCE] for i in range(0, len(seeds), _AT_ONCE)]
  context = multiprocessing.get_context("spawn")
  with context.Pool(jobs, _prepare) as pool:
    for outcomes in pool.imap(_run_many, parts):
      yield from outcomes


def explain(outcome: SeedResult, keep: Sequence[int] | None = None) -> str:
  """Returns what went wrong at a seed, its shortest list of faults, and the
  command that repeats it."""
  fewest = shrink(outcome.seed) if keep is None else list(keep)
  text = scenario.describe(scenario.draw(outcome.seed), fewest)
  faults = f" --faults={','.join(map(str, fewest))}" if fewest else ""
  command = f"asgd chaos --simulate=1 --seed={outcome.seed}{faults}"
  return f"{text}\n  {outcome.error.strip()}\n  again: {command}"


class Tally:
  """Counts of many outcomes."""

  def __init__(self):
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
    width = max(map(len, (*scenario.KINDS, *invariants.NAMES)))
    lines = [
      f"{self.runs:,} runs, {self.steps:,} steps, {self.seconds:,.0f} simulated"
      f" seconds, {self.restarts:,} restarts"
    ]
    lines += ["", f"{'fault':{width}}  injected"]
    for kind in scenario.KINDS:
      lines.append(f"{kind:{width}}  {self.injected[kind]:8,}")
    lines += ["", f"{'invariant':{width}}  checked"]
    checked = self.runs - len(self.failed)
    lines += [f"{name:{width}}  {checked:8,}" for name in invariants.NAMES]
    if self.failed:
      some = ", ".join(map(str, self.failed[:20]))
      lines += ["", f"FAILED: {len(self.failed)} seeds ({some})"]
    return "\n".join(lines)
