"""A run in a simulated world: commands, injected faults, and checks.

A command is one start of the program, as by a user. It starts a driver, which
starts the other processes, in hosts. A fault may kill all of them; the next
command then resumes the run. After the last fault the run must finish within
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
from asgd.live.failures import ShardsDie, WorkersDie
from asgd.live.supervisor import MOST_EXITS
from asgd.live.world.broken import Broken
from asgd.live.world.hosts import World, WorldHosts
from asgd.live.world.injections import Faults, Injection, Menu, Scenario
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scheduler import Process, Scheduler, Stuck
from asgd.live.world.storage import Disk, flip

LADDER = Ladder(k=5.0, floor=0.3, start=2.0)
_SECONDS, _TURNS = 600.0, 200_000  # limits of one command
_MAX_RESTARTS = 12  # commands after the first
_REASONS = {"fill", "remove memory", "flip"}  # faults that may end a command
# Time for which processes continue without a driver, as a part of a fault's
# seconds.
_WITHOUT_DRIVER = 0.1
_JOB_SECONDS = 0.03  # mean seconds of a job


class WorldScript(faults.Script):
  """Faults inside a worker: its messages may become NaN."""

  def __init__(self, world: World):
    super().__init__((), kill=lambda: None, wait=world.scheduler.sleep)
    self._world = world

  def apply_to_message(self, worker: int, seq: int, message: Any) -> Any:
    """See the base."""
    return self._world.spoil(message)


@dataclasses.dataclass
class SeedResult:
  """The result of a scenario's run."""

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
  STEP_SECONDS = 0.1  # seconds between two steps of the driver
  STEPS_PER_SAVE = 3  # steps between two checkpoints

  def __init__(self, scenario: Scenario, folder: Path):
    self.scenario, self.folder = scenario, folder
    self.memory = folder / "memory"
    self.scheduler = scheduler = Scheduler(scenario.seed)
    armed_faults = Faults()
    self.world = World(
      scheduler=scheduler,
      faults=armed_faults,
      network=SimulatedNetwork(scheduler, armed_faults),
      disk=Disk(scheduler, armed_faults),
      folder=folder,
      skew=[0.0],
    )
    self.outcome = SeedResult(
      scenario.seed, armed_faults.injected, armed_faults.parties
    )
    # A generator beside the scheduler's, so that the lengths of jobs do not
    # depend on the count of turns.
    self.rng = random.Random(scenario.seed + 1)
    self.finished = False
    # Seconds for which processes continue after their driver was killed.
    self._driverless_seconds = 0.0
    # (the last ValueError of a command, number of faults injected before it).
    self._last_refusal = "", 0
    # Faults that wait until a job has begun, by job.
    self._waiting_faults: dict[int, list[Injection]] = (
      collections.defaultdict(list)
    )

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
    step: Callable[[], bool],
    save: Callable[[], Any],
    wait: Callable[[float], Any] | None = None,
  ) -> None:
    """Drives a run until it has ended.

    Args:
      step: one step of the driver; returns whether the run has ended.
      save: makes a checkpoint; called after every STEPS_PER_SAVE steps.
      wait: waits the given seconds between two steps; None: sleeps.
    """
    steps, wait = 0, wait or self.scheduler.sleep
    while not step():
      steps += 1
      if steps % self.STEPS_PER_SAVE == 0:
        save()
      wait(self.STEP_SECONDS)

  def simulate_work(self, job: int, factor: float = 1.0) -> None:
    """Waits as long as a job takes (`factor` slows its worker down), and
    schedules the faults that waited for this job."""
    for fault in self._waiting_faults.pop(job, ()):
      self._plan(fault, self.scheduler.steps)
    self.scheduler.sleep(factor * self.rng.expovariate(1 / _JOB_SECONDS))

  def _plan(self, fault: Injection, start_step: int) -> None:
    """Schedules a fault, `fault.step` steps after `start_step`."""
    calls = self.scheduler.faults.setdefault(start_step + fault.step, [])
    calls.append(lambda: self._inject(fault))

  def _inject(self, fault: Injection) -> None:
    """Injects a fault now, and counts it if it reached a part of the world."""
    if self.finished:  # the checks read what the run has left
      return
    parties = self.INJECT[fault.kind](self, fault)
    if parties:
      self.world.faults.count(fault.kind, parties[0])

  def run(self, keep: Sequence[int]) -> SeedResult:
    """Runs the scenario with the faults of the indices in `keep`."""
    outcome, scheduler = self.outcome, self.scheduler
    # [1] Plan the faults.
    for index in keep:
      fault = self.scenario.faults[index]
      if fault.job:
        self._waiting_faults[fault.job].append(fault)
      else:
        self._plan(fault, 0)
    # [2] Run commands until the run has finished, then the checks.
    try:
      while not self.finished:
        self._run_command(resumed=outcome.restarts > 0)
        # Also errors of workers that the driver has given up.
        for error in scheduler.errors:
          if isinstance(error, Broken):
            raise error
        outcome.restarts += 1
        if outcome.restarts > _MAX_RESTARTS:
          raise Stuck(f"not finished after {_MAX_RESTARTS} restarts")
      self.check()
    except (Broken, Stuck) as error:
      outcome.error = f"{type(error).__name__}: {error}"
    except Exception:
      outcome.error = self._without_folder(traceback.format_exc())
    # [3] End all processes in any case.
    finally:
      scheduler.close()
      self._close_files()
    outcome.steps, outcome.seconds = scheduler.steps, scheduler.now
    return outcome

  def _close_files(self) -> None:
    """Closes files that processes of the world had open. The kernel does this
    for a real process, but here all processes are threads of the test."""
    for name in os.listdir("/proc/self/fd"):
      with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{name}")
        target = target.removesuffix(" (deleted)")
        if target.startswith(f"{self.folder}/") and target.endswith(self.OPEN):
          os.close(int(name))

  def _without_folder(self, text: object) -> str:
    """Returns a text that is the same in each repetition of the seed."""
    return str(text).replace(str(self.folder), "FOLDER")

  def _run_command(self, resumed: bool) -> None:
    """Runs one command until it ends or is killed."""
    scheduler = self.scheduler
    driver = scheduler.start("driver", self.command(resumed))
    self._driverless_seconds = 0.0
    scheduler.run(lambda: not driver.alive, _SECONDS, _TURNS)
    if self._driverless_seconds:
      # Stuck is expected: the time is over, or all processes wait for a driver.
      with contextlib.suppress(Stuck):
        scheduler.run(lambda: False, self._driverless_seconds, _TURNS)
    scheduler.close()
    self.world.disk.full = False  # a user frees the disk before a new command
    if driver.error is not None:
      self._check_refusal(driver.error)

  def _check_refusal(self, error: BaseException) -> None:
    """Records that a command was refused with a ValueError. Raises Broken if no
    injected fault is a reason. Raises any other error of the driver."""
    if not isinstance(error, ValueError):
      raise error
    text = self._without_folder(error)
    count = self.outcome.injected.total()
    # An error names a remedy, which the next command applies. So the same error
    # must not follow unless another fault was injected.
    if (text, count) == self._last_refusal:
      raise Broken(f"refused again without another fault: {text}")
    self._last_refusal = text, count
    self.outcome.refused.append(text)
    injected = self.outcome.injected
    kills = sum(n for kind, n in injected.items() if kind.startswith("kill"))
    # As many kills in a row as the supervisor allows, and one more.
    is_killed = isinstance(error, ShardsDie | WorkersDie) and kills > MOST_EXITS
    if not injected.keys() & _REASONS and not is_killed:
      raise Broken(f"refused without a reason: {text}")

  # Faults.

  def processes(self, kind: str) -> Sequence[Process]:
    """Returns the live processes with names that begin with `kind`."""
    return [
      process
      for process in self.scheduler.processes
      if process.alive and process.name.startswith(kind)
    ]

  def pick(self, kind: str, fault: Injection) -> Process | None:
    """Returns the process of a kind that a fault selects; None if the world has
    no process of that kind."""
    processes = self.processes(kind)
    return processes[int(fault.target * len(processes))] if processes else None

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
    """Kills the driver. The other processes continue until they notice."""
    self._driverless_seconds = fault.seconds * _WITHOUT_DRIVER
    return self.kill("driver", fault)

  def stop(self, kind: str, fault: Injection) -> Sequence[str]:
    """Stops a process and its helper threads for the fault's seconds."""
    process = self.pick(kind, fault)
    if process is None:
      return ()
    end_time = self.scheduler.now + fault.seconds
    host = self.hosts.host_of(process)
    for stopped_process in (process, *(host.helpers if host else ())):
      stopped_process.sleeps_until = end_time
    return (process.name,)

  def arm(self, fault: Injection) -> Sequence[str]:
    """Arms a fault for the next write, call or message of a matching kind."""
    self.world.faults.arm(fault)
    return ()

  def arm_reorder(self, fault: Injection) -> Sequence[str]:
    """Arms a fault that changes the order of calls. It applies to processes
    only, because threads execute calls in order."""
    return self.arm(fault) if self.scenario.case.kills else ()

  def fill(self, fault: Injection) -> Sequence[str]:
    """Fills the disk, until the next command."""
    del fault
    self.world.disk.full = True
    return ("disk",)

  def jump(self, fault: Injection) -> Sequence[str]:
    """Moves the clock, forward in four of five cases, else back."""
    self.world.skew[0] += fault.seconds * (1 if fault.target < 0.8 else -1)
    return ("clock",)

  def cut(self, fault: Injection) -> Sequence[str]:
    """Breaks the connection of a call. With "cut" the answer is lost; with
    "drop" the call does not arrive."""
    return self.hosts.cut(fault.target, arrives=fault.kind != "drop")

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
    path = paths[int(fault.target * len(paths))]
    flip(path, fault.seconds / 8)  # 8 is the largest number of seconds drawn
    # "shard-1/snapshot" is of process "shard 1", "worker-2-0.message" of
    # "worker 2".
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


def _for_kind(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
  """Returns a function of INJECT that calls `method` for a kind of process."""
  return lambda run, fault: method(run, kind, fault)


COMMON: dict[str, Callable[[Any, Injection], Sequence[str]]] = {
  **{
    f"kill {kind}": _for_kind(WorldRun.kill, kind)
    for kind in ("worker", "shard")
  },
  "kill driver": WorldRun.kill_driver,
  "kill all": WorldRun.kill_all,
  **{
    f"stop {kind}": _for_kind(WorldRun.stop, kind)
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
