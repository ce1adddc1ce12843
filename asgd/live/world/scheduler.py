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
    self.thread: _Thread | None = None  # that runs it, from its first turn on
    self.ready: Callable[[], bool] = lambda: True  # what it waits for
    self.wakes: float | None = 0.0  # when it goes on at the latest; None: never
    self.sleeps_until = 0.0  # it stands still
    self.doomed = False
    self.alive = True
    self.result: Any = None
    self.error: BaseException | None = None
    self.at_end: list[Callable[[], None]] = []  # what the kernel does then

  def run(self) -> None:
    """Runs it from its first turn to its last."""
    try:
      if not self.doomed:
        self.result = self._call()
    except Killed:
      pass
    except BaseException as error:
      self.error = error
    finally:
      self.alive = False

  def may_go_on(self, now: float) -> bool:
    """Whether it, which is alive, would do something in a turn."""
    if self.doomed:
      return True
    if now < self.sleeps_until:
      return False
    wakes = self.wakes
    return (wakes is not None and now >= wakes) or self.ready()


class _Thread:
  """A thread that runs one process after another."""

  def __init__(self, scheduler: "Scheduler", process: Process):
    self.gate = _closed_gate()  # opened when a turn of its process begins
    self.process: Process | None = process  # None: it ends
    self._scheduler = scheduler
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self):
    while self.process is not None:
      self.process.thread = self
      self.process.run()
      self.process = self._scheduler.after_last_turn(self)


class Scheduler:
  """Gives processes their turns.

  Who ends a turn draws the next one and hands it over, so that a process goes
  on without a change of threads where it is drawn again.
  """

  def __init__(self, seed: int):
    self._rng = random.Random(seed)
    self.now = 0.0  # seconds
    self.steps = 0  # places at which a fault may come, so far
    self.processes: list[Process] = []
    self.current: Process | None = None  # whose turn it is
    self.faults: dict[int, list[Callable[[], None]]] = {}  # by step
    self.errors: list[BaseException] = []  # that have ended processes
    self.turns: list[tuple[float, str]] = []  # when, and of which process
    # Returns whose turn is next; None: that of the caller of `run`, `close`.
    self._draw: Callable[[], Process | None] = lambda: None
    self._over: BaseException | None = None  # why no turns are given any more
    self._back = _closed_gate()  # opened for that caller
    self._idle: list[_Thread] = []
    self._spell = 0  # turns that it still lasts
    self._starved: Process | None = None

  def start(self, name: str, call: Callable[[], Any]) -> Process:
    """Starts a process."""
    process = Process(name, call)
    self.processes.append(process)
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
    following = self._next_turn()
    if following is not process:
      self._hand_over(following)
      process.thread.gate.acquire()
    if process.doomed:
      raise Killed

  def run(self, until: Callable[[], bool], seconds: float, turns: int) -> None:
    """Gives turns until a condition holds. Raises Stuck if none can go on, or
    after so many seconds, or turns."""
    end, left = self.now + seconds, iter(range(turns))

    def draw():
      if next(left, None) is None:
        raise Stuck(f"still running after {turns} turns")
      if until():
        return None
      if self.now > end:
        raise Stuck(f"still running after {seconds:g} s")
      return self._drawn()

    self._give_turns(draw)

  def _drawn(self):
    now = self.now
    ready = [p for p in self.processes if p.may_go_on(now)]
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
    return self._choose(ready)

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

  def _give_turns(self, draw):
    """Gives turns to those that are drawn, until none is."""
    self._draw, self._over = draw, None
    following = self._next_turn()
    if following is not None:
      self._hand_over(following)
      try:
        self._back.acquire()
      except KeyboardInterrupt:  # once the turn has ended, or two would run
        self._draw = lambda: None
        self._back.acquire()
        raise
    if self._over is not None:
      raise self._over

  def _next_turn(self, ended=None):
    """Begins the next turn, after the last one of a process that has ended;
    returns whose it is, None for the caller of `run` or `close`."""
    self.current = process = None
    try:
      if ended:
        self._bury(ended)
      process = self._draw()
    except BaseException as error:
      self._over = error
    if process is not None:
      self.current = process
      self.turns.append((self.now, process.name))
    return process

  def _hand_over(self, process):
    """Wakes who has the turn."""
    if process is None:
      self._back.release()
    elif process.thread is not None:
      process.thread.gate.release()
    elif self._idle:
      thread = self._idle.pop()
      thread.process = process
      thread.gate.release()
    else:
      _Thread(self, process)

  def after_last_turn(self, thread: _Thread) -> Process | None:
    """Ends the process of a thread, and hands the turn over; returns the next
    process that the thread runs, once it has its turn."""
    following = self._next_turn(ended=thread.process)
    if following is not None and following.thread is None:
      return following
    self._idle.append(thread)
    self._hand_over(following)
    thread.gate.acquire()
    return thread.process

  def _bury(self, process):
    self.processes.remove(process)
    if process.error:
      self.errors.append(process.error)
    for call in process.at_end:
      call()

  def close(self) -> None:
    """Ends all processes."""
    for process in [*self.processes]:
      self.kill(process)
      self._give_turns(lambda: process if process.alive else None)  # noqa: B023
    for thread in self._idle:
      thread.process = None
      thread.gate.release()
    self._idle.clear()
