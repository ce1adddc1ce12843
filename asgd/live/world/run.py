"""A run in a simulated world: commands, injected faults, and checks.

A run is one command after another until one finishes. Each command starts a
driver, which starts the other processes, in hosts. A fault may kill all of
them; the next command then resumes. After the last fault the run must finish
within bounded time.
"""

import abc
import collections
import contextlib
import dataclasses
import os
import random
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from asgd.live import faults
from asgd.live.deadlines import Ladder
from asgd.live.world.broken import Broken
from asgd.live.world.hosts import World, WorldHosts
from asgd.live.world.injections import Faults, Injection, Menu, Scenario
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scheduler import Process, Scheduler, Stuck
from asgd.live.world.storage import Disk, flip

LADDER = Ladder(k=5.0, floor=0.3, start=2.0)
_SECONDS, _TURNS = 600.0, 200_000  # limits of one command
_RESTARTS = 12  # of the same command, at most
_REASONS = {"fill", "remove memory", "flip"}  # faults that may end a command
# Time that processes work on without a driver, as a part of a fault's seconds.
_ORPHANS = 0.1
_JOB = 0.03  # mean seconds of a job


class WorldScript(faults.Script):
  """Faults inside a worker: its messages may become NaN."""

  def __init__(self, world: World):
    super().__init__((), kill=lambda: None, wait=world.scheduler.sleep)
    self._world = world

  def message(self, worker: int, seq: int, message: Any) -> Any:
    """See the base."""
    return self._world.spoil(message)


@dataclasses.dataclass
class SeedResult:
  """The outcome of a scenario."""

  seed: int
  injected: collections.Counter[str]
  parties: collections.Counter[tuple[str, str]]  # (kind of fault, party)
  refused: list[str] = dataclasses.field(default_factory=list)  # ValueErrors
  error: str = ""  # the violated invariant or the failure; "": the run passed
  restarts: int = 0
  steps: int = 0
  seconds: float = 0.0  # simulated


class WorldRun(abc.ABC):
  """One scenario, from its start to the checks; each protocol subclasses it."""

  INVARIANTS: ClassVar[Sequence[str]]  # names of the checks of a finished run
  # Kind of fault -> function that injects it. The function returns the names of
  # the processes or parts of the world that were reached; () if it found none
  # or only armed the fault.
  INJECT: ClassVar[Mapping[str, Callable[[Any, Injection], Sequence[str]]]]
  # Suffixes of the files that processes keep open, mapped files excepted.
  OPEN: ClassVar[tuple[str, ...]] = (".csv", ".bin", "/messages", "/commands")
  # Patterns of files in the run's memory that "flip" may change.
  FLIPPED: ClassVar[tuple[str, ...]] = ("shard-*/*",)
  HOSTS: ClassVar[type[WorldHosts]] = WorldHosts
  LOOK = 0.1  # seconds between two looks of the driver
  SAVES = 3  # looks between two checkpoints

  def __init__(self, drawn: Scenario, folder: Path):
    self.scenario, self.folder = drawn, folder
    self.memory = folder / "memory"
    self.scheduler = scheduler = Scheduler(drawn.seed)
    armed = Faults()
    self.world = World(
      *(scheduler, armed, SimulatedNetwork(scheduler, armed)),
      *(Disk(scheduler, armed), folder, [0.0]),
    )
    self.outcome = SeedResult(drawn.seed, armed.injected, armed.parties)
    self.rng = random.Random(drawn.seed + 1)
    self.finished = False
    self._orphans = 0.0  # seconds that processes work on without a driver
    # The last error of a command, and the faults that were injected before.
    self._refused = "", 0
    # Faults that wait until a job has begun, by job.
    self._of_jobs: dict[int, list[Injection]] = collections.defaultdict(list)

  @staticmethod
  @abc.abstractmethod
  def menu() -> Menu:
    """Returns the cases and faults that scenarios are drawn from."""

  @abc.abstractmethod
  def command(self, resumed: bool) -> Callable[[], None]:
    """Returns the main function of a command's driver. The function sets
    `finished` when the run has ended."""

  @abc.abstractmethod
  def check(self) -> None:
    """Raises Broken if the finished run violates an invariant."""

  def make_hosts(self) -> WorldHosts:
    """Returns the hosts of a command."""
    self.hosts = self.HOSTS(self.world, kills=self.scenario.case.kills)
    return self.hosts

  def drive(
    self,
    look: Callable[[], bool],
    save: Callable[[], Any],
    rest: Callable[[float], Any] | None = None,
  ) -> None:
    """Drives a run until it has ended.

    Args:
      look: one step of the driver; returns whether the run has ended.
      save: makes a checkpoint; called after every SAVES steps.
      rest: waits the given seconds between two steps.
    """
    looks, rest = 0, rest or self.scheduler.sleep
    while not look():
      looks += 1
      if looks % self.SAVES == 0:
        save()
      rest(self.LOOK)

  def work(self, job: int, factor: float = 1.0) -> None:
    """Waits as long as a job takes (`factor` slows its worker down), and
    schedules the faults that waited for this job."""
    for fault in self._of_jobs.pop(job, ()):
      self._plan(fault, self.scheduler.steps)
    self.scheduler.sleep(factor * self.rng.expovariate(1 / _JOB))

  def _plan(self, fault: Injection, steps: int) -> None:
    """Schedules a fault, `fault.step` steps after step `steps`."""
    calls = self.scheduler.faults.setdefault(steps + fault.step, [])
    calls.append(lambda: self._inject(fault))

  def _inject(self, fault: Injection) -> None:
    """Injects a fault now, and counts it if it reached anything."""
    if self.finished:
      return
    parties = self.INJECT[fault.kind](self, fault)
    if parties:
      self.world.faults.happened(fault.kind, parties[0])

  def run(self, keep: Sequence[int]) -> SeedResult:
    """Runs the scenario with the faults of the indices in `keep`."""
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
        # This includes errors of workers that the driver has given up.
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

  def _close_files(self) -> None:
    """Closes files that the processes had open, as the kernel does at their
    end: here the simulated processes share the test's descriptors."""
    for name in os.listdir("/proc/self/fd"):
      with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{name}")
        target = target.removesuffix(" (deleted)")
        if target.startswith(f"{self.folder}/") and target.endswith(self.OPEN):
          os.close(int(name))

  def _shown(self, text: object) -> str:
    return str(text).replace(str(self.folder), "FOLDER")

  def _start(self, resumed: bool) -> None:
    """Runs one command until it ends or is killed."""
    scheduler = self.scheduler
    driver = scheduler.start("driver", self.command(resumed))
    self._orphans = 0.0
    scheduler.run(lambda: not driver.alive, _SECONDS, _TURNS)
    if self._orphans:
      # The time is over, or all wait for a driver: both are expected.
      with contextlib.suppress(Stuck):
        scheduler.run(lambda: False, self._orphans, _TURNS)
    scheduler.close()
    self.world.disk.full = False
    if driver.error is not None:
      if not isinstance(driver.error, ValueError):
        raise driver.error
      text = self._shown(driver.error)
      count = self.outcome.injected.total()
      # An error names a remedy, so the same error must not follow it unless
      # another fault was injected.
      if (text, count) == self._refused:
        raise Broken(f"refused again without another fault: {text}")
      self._refused = text, count
      self.outcome.refused.append(text)
      if not self.outcome.injected.keys() & _REASONS:
        raise Broken(f"refused without a reason: {text}")

  # Faults.

  def processes(self, kind: str) -> Sequence[Process]:
    """Returns the live processes with names that begin with `kind`."""
    running = self.scheduler.processes
    return [p for p in running if p.alive and p.name.startswith(kind)]

  def pick(self, kind: str, fault: Injection) -> Process | None:
    """Returns the process of a kind that a fault selects; None if none is."""
    running = self.processes(kind)
    return running[int(fault.which * len(running))] if running else None

  def kill(self, kind: str, fault: Injection) -> Sequence[str]:
    """Kills the process of a kind that the fault selects."""
    process = self.pick(kind, fault)
    if process is None:
      return ()
    self.scheduler.kill(process)
    return (process.name,)

  def kill_all(self, fault: Injection) -> Sequence[str]:
    """Kills all processes; the next command resumes."""
    del fault
    for process in self.scheduler.processes:
      self.scheduler.kill(process)
    return ("all",)

  def kill_driver(self, fault: Injection) -> Sequence[str]:
    """Kills the driver. The other processes work on until they notice."""
    self._orphans = fault.seconds * _ORPHANS
    return self.kill("driver", fault)

  def stop(self, kind: str, fault: Injection) -> Sequence[str]:
    """Stops a process and its helper threads for the fault's seconds."""
    process = self.pick(kind, fault)
    if process is None:
      return ()
    until = self.scheduler.now + fault.seconds
    host = self.hosts.of(process)
    for each in (process, *(host.helpers if host else ())):
      each.sleeps_until = until
    return (process.name,)

  def arm(self, fault: Injection) -> Sequence[str]:
    """Arms a fault for the next write, call or message of a matching kind."""
    self.world.faults.arm(fault)
    return ()

  def arm_reorder(self, fault: Injection) -> Sequence[str]:
    """Arms a fault that changes the order of calls. Threads make calls in
    order, so it is for processes only."""
    return self.arm(fault) if self.scenario.case.kills else ()

  def fill(self, fault: Injection) -> Sequence[str]:
    """Fills the disk, until the next command."""
    del fault
    self.world.disk.full = True
    return ("disk",)

  def jump(self, fault: Injection) -> Sequence[str]:
    """Moves the clock, forward in four of five cases, else back."""
    self.world.skew[0] += fault.seconds * (1 if fault.which < 0.8 else -1)
    return ("clock",)

  def cut(self, fault: Injection) -> Sequence[str]:
    """Breaks the connection of a call. With "cut" the answer is lost; with
    "drop" the call does not arrive."""
    return self.hosts.cut(fault.which, arrives=fault.kind != "drop")

  def flip(self, fault: Injection) -> Sequence[str]:
    """Changes a byte of a file in memory, and kills the file's process."""
    paths = [
      path
      for pattern in self.FLIPPED
      for path in sorted(self.memory.glob(pattern))
      if path.is_file()
    ]
    if not paths:
      return ()
    path = paths[int(fault.which * len(paths))]
    flip(path, fault.seconds / 8)
    name = path.name if path.parent == self.memory else path.parent.name
    name = " ".join(name.split("-")[:2])
    for process in self.processes(name):
      self.scheduler.kill(process)
    return (name,)

  def remove_memory(self, fault: Injection) -> Sequence[str]:
    """Removes the memory of the run, and kills a shard."""
    shutil.rmtree(self.memory, ignore_errors=True)
    self.kill("shard", fault)
    return ("memory",)


def _of(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
  """Returns a function of INJECT that calls `method` for a kind of process."""
  return lambda run, fault: method(run, kind, fault)


COMMON: dict[str, Callable[[Any, Injection], Sequence[str]]] = {
  **{f"kill {kind}": _of(WorldRun.kill, kind) for kind in ("worker", "shard")},
  "kill driver": WorldRun.kill_driver,
  "kill all": WorldRun.kill_all,
  **{
    f"stop {kind}": _of(WorldRun.stop, kind)
    for kind in ("worker", "shard", "driver")
  },
  "cut": WorldRun.cut,
  **dict.fromkeys(("double", "delay", "tear", "nan"), WorldRun.arm),
  "drop": WorldRun.cut,
  "reorder": WorldRun.arm_reorder,
  "fill": WorldRun.fill,
  "jump": WorldRun.jump,
  "flip": WorldRun.flip,
}
