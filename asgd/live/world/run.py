"""A run in a simulated world: commands, the faults that come, and the checks.

A run is one command after another until one finishes: each starts a driver,
which starts the other processes, in hosts. A fault may kill all of them; the
next command then resumes. After the last fault the run has to finish within
bounded time.
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
_SECONDS, _TURNS = 600.0, 200_000  # in which a command ends
_RESTARTS = 12  # of the same command, at most
_REASONS = {"fill", "remove memory", "flip"}  # for a command to end early
_ORPHANS = 0.1  # of a fault's seconds: parties work on without a driver
_JOB = 0.03  # seconds that a job takes, on average


class WorldScript(faults.Script):
  """The faults of a worker that come from within."""

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
  refused: list[str] = dataclasses.field(default_factory=list)  # clear errors
  error: str = ""  # what is wrong; nothing if all is well
  restarts: int = 0
  steps: int = 0
  seconds: float = 0.0  # of the world


class WorldRun(abc.ABC):
  """One scenario, from its start to the checks; a protocol has a subclass."""

  INVARIANTS: ClassVar[Sequence[str]]  # what is checked of a finished run
  # Kind of fault -> what injects it, and returns the names of the processes or
  # parts of the world that it happened to; one that is armed returns none.
  INJECT: ClassVar[Mapping[str, Callable[[Any, Injection], Sequence[str]]]]
  # Ends of the paths of files that processes keep open; no mapped ones.
  OPEN: ClassVar[tuple[str, ...]] = (".csv", ".bin", "/messages", "/commands")
  # Files in the memory of the run of which a byte may be changed.
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
    self._orphans = 0.0  # seconds for which parties work without a driver
    self._refused = "", 0  # the last command: by what, after how many faults
    # Faults that come after a job has begun.
    self._of_jobs: dict[int, list[Injection]] = collections.defaultdict(list)

  @staticmethod
  @abc.abstractmethod
  def menu() -> Menu:
    """Returns from what scenarios are drawn."""

  @abc.abstractmethod
  def command(self, resumed: bool) -> Callable[[], None]:
    """Returns the main function of a command's driver, which sets `finished`
    when the run has ended."""

  @abc.abstractmethod
  def check(self) -> None:
    """Raises Broken if the finished run is not what it must be."""

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
    """Looks at a run until it has ended, and saves it now and then; `rest`
    lets the time between two looks go by."""
    looks, rest = 0, rest or self.scheduler.sleep
    while not look():
      looks += 1
      if looks % self.SAVES == 0:
        save()
      rest(self.LOOK)

  def work(self, job: int, factor: float = 1.0) -> None:
    """Lets the time of a job go by, and plans the faults that come after it has
    begun."""
    for fault in self._of_jobs.pop(job, ()):
      self._plan(fault, self.scheduler.steps)
    self.scheduler.sleep(factor * self.rng.expovariate(1 / _JOB))

  def _plan(self, fault, steps):
    calls = self.scheduler.faults.setdefault(steps + fault.step, [])
    calls.append(lambda: self._inject(fault))

  def _inject(self, fault):
    if self.finished:
      return
    parties = self.INJECT[fault.kind](self, fault)
    if parties:
      self.world.faults.happened(fault.kind, parties[0])

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
    scheduler = self.scheduler
    driver = scheduler.start("driver", self.command(resumed))
    self._orphans = 0.0
    scheduler.run(lambda: not driver.alive, _SECONDS, _TURNS)
    if self._orphans:
      with contextlib.suppress(Stuck):  # they wait for a driver
        scheduler.run(lambda: False, self._orphans, _TURNS)
    scheduler.close()
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

  # Faults.

  def processes(self, kind: str) -> Sequence[Process]:
    """Returns the processes that run whose names begin so."""
    running = self.scheduler.processes
    return [p for p in running if p.alive and p.name.startswith(kind)]

  def pick(self, kind: str, fault: Injection) -> Process | None:
    """Returns the process that a fault happens to."""
    running = self.processes(kind)
    return running[int(fault.which * len(running))] if running else None

  def kill(self, kind: str, fault: Injection) -> Sequence[str]:
    """Kills one process."""
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
    """Kills the driver; the others work on until they notice."""
    self._orphans = fault.seconds * _ORPHANS
    return self.kill("driver", fault)

  def stop(self, kind: str, fault: Injection) -> Sequence[str]:
    """Makes a process stand still for a while, with its helper threads."""
    process = self.pick(kind, fault)
    if process is None:
      return ()
    until = self.scheduler.now + fault.seconds
    host = self.hosts.of(process)
    for each in (process, *(host.helpers if host else ())):
      each.sleeps_until = until
    return (process.name,)

  def arm(self, fault: Injection) -> Sequence[str]:
    """Lets a fault happen to the next write, call or message."""
    self.world.faults.arm(fault)
    return ()

  def arm_reorder(self, fault: Injection) -> Sequence[str]:
    """The same, where calls may be made in another order: in processes."""
    return self.arm(fault) if self.scenario.case.kills else ()

  def fill(self, fault: Injection) -> Sequence[str]:
    """Fills the disk, until the next command."""
    del fault
    self.world.disk.full = True
    return ("disk",)

  def jump(self, fault: Injection) -> Sequence[str]:
    """Moves the clock, mostly forward."""
    self.world.skew[0] += fault.seconds * (1 if fault.which < 0.8 else -1)
    return ("clock",)

  def cut(self, fault: Injection) -> Sequence[str]:
    """Breaks the connection of a call: its answer is lost ("cut"), or it does
    not arrive ("drop")."""
    return self.hosts.cut(fault.which, arrives=fault.kind != "drop")

  def flip(self, fault: Injection) -> Sequence[str]:
    """Changes a byte of what a party keeps in memory, and kills it."""
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
