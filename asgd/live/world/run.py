"""A run in a simulated world: commands, the faults that come, and the checks.

A run is one command after another until one finishes: each starts a driver,
which starts the other processes. A fault may kill all of them; the next command
then resumes. After the last fault the run has to finish within bounded time.
"""

import abc
import collections
import contextlib
import dataclasses
import os
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax

from asgd.live import faults
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scheduler import Process, Scheduler, Stuck
from asgd.live.world.storage import Broken, Disk

_SECONDS, _TURNS = 600.0, 200_000  # in which a command ends
_RESTARTS = 12  # of the same command, at most
_REASONS = {"fill", "remove memory", "flip"}  # for a command to end early
_TEARS = 4  # writes, of which one is torn; or the next of a row like these:
_TORN = {0.05: b"", 0.5: b"leave", 2.0: b"join", 8.0: b"receive"}

_MOST_FAULTS = 6
_STEPS = 4000  # fault points in which faults come, at most
_FEW_KINDS = 0.5  # probability that only some kinds of faults come
_LATE = 0.2  # probability of one after one of the last jobs has begun
_SOON, _NEAR = 0.4, 100  # probability of a next one within so many steps


class Injection(NamedTuple):
  """A fault of a world."""

  job: int  # that has begun; 0: none needs to
  step: int  # of the scheduler, since then
  kind: str  # one of a menu's kinds
  which: float  # of those that there are, a fraction
  seconds: float  # of a stop or a jump


class Menu(NamedTuple):
  """From what the scenarios of a protocol are drawn."""

  cases: Sequence[Any]  # runs without faults
  kinds: Sequence[str]  # of faults
  workers: int
  jobs: int


class Scenario(NamedTuple):
  """A run with its faults; of a seed."""

  seed: int
  case: Any
  faults: tuple[Injection, ...]


def draw(seed: int, menu: Menu) -> Scenario:
  """Returns the scenario of a seed."""
  rng = random.Random(seed)
  case, kinds = rng.choice(menu.cases), menu.kinds
  if rng.random() < _FEW_KINDS:
    kinds = rng.sample(menu.kinds, rng.randint(1, 4))
  faults: list[Injection] = []
  for _ in range(rng.randint(0, _MOST_FAULTS)):
    job, step = 0, int(_STEPS ** rng.uniform(0.4, 1.0))
    if rng.random() < _LATE:  # when what is lost may be found out too late
      job, step = menu.jobs - rng.randint(1, menu.workers), int(
        _STEPS ** rng.random()
      )
    elif faults and rng.random() < _SOON:  # before the last is got over
      job = faults[-1].job
      step = faults[-1].step + int(_NEAR ** rng.random())
    kind, which = rng.choice(kinds), rng.random()
    seconds = rng.choice((0.05, 0.5, 2.0, 8.0))
    faults.append(Injection(job, step, kind, which, seconds))
  return Scenario(seed, case, tuple(sorted(faults)))


class World(NamedTuple):
  """What a run stands on."""

  scheduler: Scheduler
  network: SimulatedNetwork
  disk: Disk
  folder: Path  # of its files and its memory
  skew: list[float]  # seconds by which its clock has jumped
  nans: list[None]  # messages to come that are NaN

  def clock(self) -> float:
    """Seconds since the run began."""
    return self.scheduler.now + self.skew[0]


class WorldScript(faults.Script):
  """The faults of a worker that come from within."""

  def __init__(self, world: World):
    super().__init__((), kill=lambda: None, wait=world.scheduler.sleep)
    self._nans = world.nans

  def message(self, worker: int, seq: int, message: Any) -> Any:
    """See the base."""
    if not self._nans:
      return message
    self._nans.pop()

    def spoil(x):
      return x if x.dtype.kind in "iub" else x * float("nan")

    return jax.tree.map(spoil, message)


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


class Run(abc.ABC):
  """One scenario, from its start to the checks; a protocol has a subclass."""

  # Kind of fault -> what injects it; False if there is nothing it happens to.
  INJECT: ClassVar[Mapping[str, Callable[[Any, Injection], Any]]]

  # Ends of the paths of files that processes keep open; no mapped ones.
  OPEN: ClassVar[tuple[str, ...]] = (".csv", ".bin")

  def __init__(self, drawn: Scenario, folder: Path):
    self.scenario, self.folder = drawn, folder
    self.outcome = SeedResult(drawn.seed)
    self.scheduler = scheduler = Scheduler(drawn.seed)
    network, disk = SimulatedNetwork(scheduler), Disk(scheduler)
    self.world = World(scheduler, network, disk, folder, [0.0], [])
    self.finished = False
    self._refused = "", 0  # the last command: by what, after how many faults
    # Faults that come after a job has begun.
    self._of_jobs: dict[int, list[Injection]] = collections.defaultdict(list)

  @abc.abstractmethod
  def command(self, resumed: bool) -> Callable[[], None]:
    """Returns the main function of a command's driver, which sets `finished`
    when the run has ended."""

  @abc.abstractmethod
  def check(self) -> None:
    """Raises Broken if the finished run is not what it must be."""

  def processes(self, kind: str) -> Sequence[Process]:
    """Returns the processes that run whose names begin so."""
    running = self.scheduler.processes
    return [p for p in running if p.alive and p.name.startswith(kind)]

  def job_begins(self, job: int) -> None:
    """Plans the faults that come after this job has begun."""
    for fault in self._of_jobs.pop(job, ()):
      self._plan(fault, self.scheduler.steps)

  def _plan(self, fault, steps):
    calls = self.scheduler.faults.setdefault(steps + fault.step, [])
    calls.append(lambda: self._inject(fault))

  def _inject(self, fault):
    if not self.finished and self.INJECT[fault.kind](self, fault):
      self.outcome.injected[fault.kind] += 1

  def run(self, keep: Sequence[int]) -> SeedResult:
    """Runs with some of the faults."""
    outcome, scheduler = self.outcome, self.scheduler
    for index in keep:
      fault = self.scenario.faults[index]
      if fault.job:
        self._of_jobs[fault.job].append(fault)
      else:
        self._plan(fault, 0)
    try:
      while not self.finished:
        self._start(resumed=outcome.restarts > 0)
        # Also of a worker that has no place any more.
        for error in scheduler.errors:
          if isinstance(error, Broken):
            raise error
        outcome.restarts += 1
        if outcome.restarts > _RESTARTS:
          raise Stuck(f"not finished after {_RESTARTS} restarts")
      self.check()
    except (Broken, Stuck) as error:
      outcome.error = f"{type(error).__name__}: {error}"
    except Exception:
      outcome.error = self._shown(traceback.format_exc())
    finally:
      scheduler.close()
      self._close_files()
    outcome.steps, outcome.seconds = scheduler.steps, scheduler.now
    return outcome

  def _close_files(self):
    """Closes what processes had open, as the kernel does when they end."""
    for name in os.listdir("/proc/self/fd"):
      with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{name}")
        target = target.removesuffix(" (deleted)")
        if target.startswith(f"{self.folder}/") and target.endswith(self.OPEN):
          os.close(int(name))

  def _shown(self, text):
    return str(text).replace(str(self.folder), "FOLDER")

  def _start(self, resumed):
    """One command, from its start until it ends or is killed."""
    driver = self.scheduler.start("driver", self.command(resumed))
    self.scheduler.run(lambda: not driver.alive, _SECONDS, _TURNS)
    self.scheduler.close()
    self.world.disk.full = False
    if driver.error is not None:
      if not isinstance(driver.error, ValueError):
        raise driver.error
      text = self._shown(driver.error)
      count = self.outcome.injected.total()
      if (text, count) == self._refused:
        raise Broken(f"refused again, and nothing happened: {text}")
      self._refused = text, count
      self.outcome.refused.append(text)
      if not self.outcome.injected.keys() & _REASONS:
        raise Broken(f"refused without a reason: {text}")

  # Faults of all protocols.

  def pick(self, kind: str, fault: Injection) -> Process | None:
    """Returns the process that a fault happens to."""
    there = self.processes(kind)
    return there[int(fault.which * len(there))] if there else None

  def kill(self, kind: str, fault: Injection) -> Process | None:
    """Kills one process."""
    process = self.pick(kind, fault)
    if process:
      self.scheduler.kill(process)
    return process

  def kill_all(self, fault: Injection) -> bool:
    """Kills all processes; the next command resumes."""
    del fault
    for process in self.scheduler.processes:
      self.scheduler.kill(process)
    return True

  def stop(self, kind: str, fault: Injection) -> Process | None:
    """Has a process stand still for a while."""
    process = self.pick(kind, fault)
    if process:
      process.sleeps_until = self.scheduler.now + fault.seconds
    return process

  def tear(self, fault: Injection) -> bool:
    """Kills a process in the middle of a write to come."""
    text = _TORN[fault.seconds]
    left = 0 if text else int(fault.which * _TEARS)
    self.world.disk.tears.append((left, text))
    return True

  def fill(self, fault: Injection) -> bool:
    """Fills the disk, until the next command."""
    del fault
    self.world.disk.full = True
    return True

  def jump(self, fault: Injection) -> bool:
    """Moves the clock, mostly forward."""
    self.world.skew[0] += fault.seconds * (1 if fault.which < 0.8 else -1)
    return True

  def nan(self, fault: Injection) -> bool:
    """Makes a message to come NaN."""
    del fault
    self.world.nans.append(None)
    return True


COMMON: dict[str, Callable[[Any, Injection], Any]] = {
  "kill worker": lambda run, fault: run.kill("worker", fault),
  "kill shard": lambda run, fault: run.kill("shard", fault),
  "kill all": Run.kill_all,
  "stop worker": lambda run, fault: run.stop("worker", fault),
  "stop shard": lambda run, fault: run.stop("shard", fault),
  "tear": Run.tear,
  "fill": Run.fill,
  "jump": Run.jump,
  "nan": Run.nan,
}


def describe(scenario: Scenario, keep: Sequence[int]) -> str:
  """Returns some faults of a scenario, a line each."""
  lines = [f"seed {scenario.seed}: {scenario.case}"]
  for index in keep:
    fault = scenario.faults[index]
    since = f" after job {fault.job} has begun" if fault.job else ""
    lines.append(
      f"  fault {index}: {fault.kind} at step {fault.step}{since}"
      f" (which {fault.which:.2f}, {fault.seconds:g} s)"
    )
  return "\n".join(lines)
