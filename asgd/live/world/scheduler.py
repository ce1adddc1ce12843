"""Processes that take turns: one goes on at a time, and a seed says which.

Each process is a thread, and all but one of them wait for their turn. A turn
ends where the process touches the world (a socket, a file, a slot of memory, a
wait). There the seed draws who goes on and how much time has passed, and there
a fault may come: a process is killed, or stands still for a while.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

from asgd.live.faults import Killed

_STAYS = 0.6  # probability that a process goes on at once
_SPELL = 60  # turns in which one process, or none, is seldom chosen
_SELDOM = 0.05
_STEP = 2e-4  # seconds between two turns, on average


class Stuck(Exception):
  """No process can go on, or they go on for too long."""


def _closed_gate():
  """A lock that somebody else releases, as a semaphore and quicker."""
  gate = threading.Lock()
  gate.acquire()
  return gate


class Process:
  """A process of the world."""

  def __init__(self, name: str, call: Callable[[], Any]):
    self.name = name
    self._call = call
    self.turn = _closed_gate()
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.ready: Callable[[], bool] = lambda: True  # what it waits for
    self.wakes: float | None = 0.0  # when it goes on at the latest; None: never
    self.sleeps_until = 0.0  # it stands still
    self.doomed = False
    self.alive = True
    self.result: Any = None
    self.error: BaseException | None = None
    self.at_end: list[Callable[[], None]] = []  # what the kernel does then
    self.give_turn_back: Callable[[], None] = lambda: None

  def _run(self):
    self.turn.acquire()
    try:
      if not self.doomed:
        self.result = self._call()
    except Killed:
      pass
    except BaseException as error:
      self.error = error
    finally:
      self.alive = False
      self.give_turn_back()

  def may_go_on(self, now: float) -> bool:
    """Whether it, which is alive, would do something in a turn."""
    if self.doomed:
      return True
    if now < self.sleeps_until:
      return False
    return (self.wakes is not None and now >= self.wakes) or self.ready()


class Scheduler:
  """Gives processes their turns."""

  def __init__(self, seed: int):
    self._rng = random.Random(seed)
    self.now = 0.0  # seconds
    self.steps = 0  # places at which a fault may come, so far
    self.processes: list[Process] = []
    self.current: Process | None = None  # whose turn it is
    self.faults: dict[int, list[Callable[[], None]]] = {}  # by step
    self.errors: list[BaseException] = []  # that have ended processes
    self.turns: list[tuple[float, str]] = []  # when, and of which process
    self._back = _closed_gate()
    self._spell = 0  # turns that it still lasts
    self._starved: Process | None = None

  def start(self, name: str, call: Callable[[], Any]) -> Process:
    """Starts a process."""
    process = Process(name, call)
    process.give_turn_back = self._back.release
    self.processes.append(process)
    process.thread.start()
    return process

  def kill(self, process: Process) -> None:
    """Ends a process where it is; it does nothing more, but for what the
    kernel does in its place."""
    if process.alive and not process.doomed:
      process.doomed = True
      for call in process.at_end:
        call()

  def point(self) -> None:
    """A place at which a fault may come; of a process that was killed, it is
    its end."""
    self.steps += 1
    for fault in self.faults.pop(self.steps, ()):
      fault()
    if self.current and self.current.doomed:
      raise Killed

  def touch(self) -> None:
    """A place at which the turn may end as well."""
    self.point()
    if self.current is None:
      return
    stays = self._rng.random() < _STAYS
    if not stays or self.now < self.current.sleeps_until:
      self.wait(lambda: True, 0.0)

  def sleep(self, seconds: float) -> None:
    """Waits."""
    self.wait(lambda: False, seconds)

  def wait(self, ready: Callable[[], bool], seconds: float | None) -> None:
    """Ends the turn until `ready`, or so many seconds have passed."""
    self.point()
    process = self.current
    process.ready = ready
    process.wakes = None if seconds is None else self.now + seconds
    self._back.release()
    process.turn.acquire()
    if process.doomed:
      raise Killed

  def run(self, until: Callable[[], bool], seconds: float, turns: int) -> None:
    """Gives turns until a condition holds. Raises Stuck if none can go on, or
    after so many seconds, or turns."""
    end = self.now + seconds
    for _ in range(turns):
      if until():
        return
      if self.now > end:
        raise Stuck(f"still running after {seconds:g} s")
      self._turn()
    raise Stuck(f"still running after {turns} turns")

  def _turn(self):
    ready = [p for p in self.processes if p.may_go_on(self.now)]
    while not ready:
      times = [
        max(process.wakes, process.sleeps_until)
        if not process.ready()
        else process.sleeps_until
        for process in self.processes
        if process.wakes is not None or process.ready()
      ]
      if not times:
        names = ", ".join(process.name for process in self.processes)
        raise Stuck(f"all wait for each other: {names}")
      self.now = max(self.now, min(times)) + _STEP * self._rng.random()
      ready = [p for p in self.processes if p.may_go_on(self.now)]
    self.now += self._rng.expovariate(1 / _STEP)
    self._resume(self._choose(ready))

  def _choose(self, ready):
    """Returns whose turn it is. One of them is slow for some time, so that the
    others come far ahead of it."""
    self._spell -= 1
    if self._spell < 0:
      self._spell = _SPELL
      slow = self._rng.random() < 0.5
      self._starved = self._rng.choice(self.processes) if slow else None
    late = len(ready) > 1 and self._starved in ready
    if late and self._rng.random() > _SELDOM:
      ready.remove(self._starved)
    return self._rng.choice(ready)

  def _resume(self, process):
    self.current = process
    self.turns.append((self.now, process.name))
    process.turn.release()
    try:
      self._back.acquire()
    except KeyboardInterrupt:  # once the turn has ended, or two would run
      self._back.acquire()
      raise
    finally:
      self.current = None
    if not process.alive:
      self.processes.remove(process)
      if process.error:
        self.errors.append(process.error)
      for call in process.at_end:
        call()

  def close(self) -> None:
    """Ends all processes."""
    for process in [*self.processes]:
      self.kill(process)
      while process.alive:
        self._resume(process)
