"""Processes that take turns: one runs at a time, chosen by a seed.

Each process is a thread, and all but one of them wait for their turn. A turn
ends where the process touches the world: a socket, a file, a slot of memory, or
a wait. There the scheduler draws the next process and the time that has passed,
and injects a fault if one is due. A fault kills a process or stops it for a
while.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

from asgd.live.faults import Killed

_KEEPS_TURN = 0.6  # probability that a process keeps its turn at a touch
_SPELL = 60  # turns for which one process, or none, is starved
_SELDOM = 0.05  # probability that a starved process is eligible in a turn
_TURN_SECONDS = 2e-4  # mean time between two turns


class Stuck(Exception):
  """All processes wait for each other, or they run for too long."""


def _closed_gate() -> threading.Lock:
  """Returns a lock that another thread releases: a semaphore of 0, but faster
  than `threading.Semaphore`."""
  gate = threading.Lock()
  gate.acquire()
  return gate


class Process:
  """A process of the world."""

  def __init__(self, name: str, call: Callable[[], Any]):
    self.name = name
    self._call = call
    self.thread: _Thread | None = None  # None: it has not had a turn yet
    # The process waits for the condition `ready`, or for the time `wake_time`
    # (None: no timeout).
    self.ready: Callable[[], bool] = lambda: True
    self.wake_time: float | None = 0.0
    self.sleeps_until = 0.0  # end of a stop, during which it gets no turn
    self.doomed = False  # killed; it ends at its next turn
    self.alive = True
    self.result: Any = None
    self.error: BaseException | None = None
    # Actions of the kernel at the end of a process, such as closing sockets.
    self.at_end: list[Callable[[], None]] = []

  def run(self) -> None:
    """Runs the process from its first turn to its last."""
    try:
      if not self.doomed:
        self.result = self._call()
    except Killed:
      pass
    except BaseException as error:
      self.error = error
    finally:
      self.alive = False

  def is_runnable(self, now: float) -> bool:
    """Whether the process, which is alive, can use a turn."""
    if self.doomed:
      return True
    if now < self.sleeps_until:
      return False
    wake_time = self.wake_time
    return (wake_time is not None and now >= wake_time) or self.ready()


class _Thread:
  """A thread that runs one process after another."""

  def __init__(self, scheduler: "Scheduler", process: Process):
    self.gate = _closed_gate()  # opened when a turn of its process begins
    self.process: Process | None = process  # None: the thread ends
    self._scheduler = scheduler
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self) -> None:
    """Runs processes until the scheduler closes."""
    while self.process is not None:
      self.process.thread = self
      self.process.run()
      self.process = self._scheduler.after_last_turn(self)


class Scheduler:
  """Gives processes their turns.

  The process that ends a turn draws the next one and wakes its thread. If the
  same process is drawn, it continues without a switch of threads.
  """

  def __init__(self, seed: int):
    self._rng = random.Random(seed)
    self.now = 0.0  # seconds
    self.steps = 0  # fault points passed so far
    self.processes: list[Process] = []  # alive
    self.current: Process | None = None  # the process that has the turn
    self.faults: dict[int, list[Callable[[], None]]] = {}  # by step
    self.errors: list[BaseException] = []  # errors that ended processes
    self.turns: list[tuple[float, str]] = []  # (time, name of the process)
    # Returns the process of the next turn; None gives the turn back to the
    # caller of `run` or `close`, which waits at `_caller_gate`.
    self._draw: Callable[[], Process | None] = lambda: None
    self._failure: BaseException | None = None  # raised to that caller
    self._caller_gate = _closed_gate()
    # Threads without a process. A run starts thousands of short processes, so
    # their threads are used again.
    self._idle: list[_Thread] = []
    self._spell = 0  # turns left until another process is starved
    self._starved: Process | None = None

  @property
  def calling(self) -> Process:
    """The process that calls this: the one that has the turn."""
    assert self.current is not None
    return self.current

  def start(self, name: str, call: Callable[[], Any]) -> Process:
    """Starts a process."""
    process = Process(name, call)
    self.processes.append(process)
    return process

  def kill(self, process: Process) -> None:
    """Ends a process at its present point. Only the calls of its `at_end` are
    still made."""
    if process.alive and not process.doomed:
      process.doomed = True
      for call in process.at_end:
        call()

  def point(self) -> None:
    """Injects the faults that are due here. Ends the calling process if it was
    killed."""
    self.steps += 1
    for fault in self.faults.pop(self.steps, ()):
      fault()
    if self.current and self.current.doomed:
      raise Killed

  def touch(self) -> None:
    """Passes a fault point (`point`), at which the turn may also end."""
    self.point()
    if self.current is None:  # no process calls this: there is no turn
      return
    keeps_turn = self._rng.random() < _KEEPS_TURN
    if not keeps_turn or self.now < self.current.sleeps_until:
      self.wait(lambda: True, 0.0)

  def sleep(self, seconds: float) -> None:
    """Ends the turn until some simulated seconds have passed."""
    self.wait(lambda: False, seconds)

  def wait(self, ready: Callable[[], bool], seconds: float | None) -> None:
    """Ends the turn until `ready()` holds or `seconds` (None: no timeout) have
    passed."""
    self.point()
    process = self.calling
    assert process.thread is not None
    process.ready = ready
    process.wake_time = None if seconds is None else self.now + seconds
    successor = self._next_turn()
    if successor is not process:
      self._hand_over(successor)
      process.thread.gate.acquire()
    # The process may have been killed while it waited.
    if process.doomed:
      raise Killed

  def run(self, until: Callable[[], bool], seconds: float, turns: int) -> None:
    """Gives turns until a condition holds.

    Raises Stuck if no process is runnable, or after `seconds` of simulated time
    or `turns` turns.
    """
    end_time, turns_left = self.now + seconds, iter(range(turns))

    def draw() -> Process | None:
      if next(turns_left, None) is None:
        raise Stuck(f"still running after {turns} turns")
      if until():
        return None
      if self.now > end_time:
        raise Stuck(f"still running after {seconds:g} s")
      return self._draw_runnable()

    self._give_turns(draw)

  def _draw_runnable(self) -> Process:
    """Advances the time and returns the process of the next turn."""
    # The order of the draws below must not change: it defines a seed's run.
    now = self.now
    runnable = [p for p in self.processes if p.is_runnable(now)]
    while not runnable:  # skip the time until a timeout or the end of a stop
      times = []
      for process in self.processes:
        if process.ready():
          times.append(process.sleeps_until)
        elif process.wake_time is not None:
          times.append(max(process.wake_time, process.sleeps_until))
      if not times:
        names = ", ".join(process.name for process in self.processes)
        raise Stuck(f"all wait for each other: {names}")
      self.now = max(self.now, min(times)) + _TURN_SECONDS * self._rng.random()
      runnable = [p for p in self.processes if p.is_runnable(self.now)]
    self.now += self._rng.expovariate(1 / _TURN_SECONDS)
    return self._choose(runnable)

  def _choose(self, runnable: list[Process]) -> Process:
    """Draws one of the processes. For a while one process is starved, so that
    the others get far ahead of it."""
    self._spell -= 1
    if self._spell < 0:
      self._spell = _SPELL
      starves = self._rng.random() < 0.5
      self._starved = self._rng.choice(self.processes) if starves else None
    starved = self._starved
    if (
      starved is not None
      and len(runnable) > 1
      and starved in runnable
      and self._rng.random() > _SELDOM
    ):
      runnable.remove(starved)
    return self._rng.choice(runnable)

  def _give_turns(self, draw: Callable[[], Process | None]) -> None:
    """Gives turns to the processes that `draw` returns, until it returns None.
    Raises the error of `draw`, if there is one."""
    self._draw, self._failure = draw, None
    successor = self._next_turn()
    if successor is not None:
      self._hand_over(successor)
      try:
        self._caller_gate.acquire()
      except KeyboardInterrupt:
        # Wait for the end of the turn; otherwise two threads would run.
        self._draw = lambda: None
        self._caller_gate.acquire()
        raise
    if self._failure is not None:
      raise self._failure

  def _next_turn(self, ended: Process | None = None) -> Process | None:
    """Begins the next turn and returns its process; None gives the turn to the
    caller of `run` or `close`. `ended` is a process that has just ended."""
    self.current = process = None
    try:
      if ended:
        self._remove(ended)
      process = self._draw()
    except BaseException as error:
      # `run` raises it: an error in the thread of a process would be lost.
      self._failure = error
    if process is not None:
      self.current = process
      self.turns.append((self.now, process.name))
    return process

  def _hand_over(self, process: Process | None) -> None:
    """Wakes the thread of the process that has the turn."""
    if process is None:
      self._caller_gate.release()
    elif process.thread is not None:
      process.thread.gate.release()
    elif self._idle:
      thread = self._idle.pop()
      thread.process = process
      thread.gate.release()
    else:
      _Thread(self, process)

  def after_last_turn(self, thread: _Thread) -> Process | None:
    """Ends the process of a thread and begins the next turn. Blocks until the
    thread has another process to run, and returns that process."""
    successor = self._next_turn(ended=thread.process)
    if successor is not None and successor.thread is None:
      return successor  # a new process: this thread runs it
    self._idle.append(thread)
    self._hand_over(successor)
    thread.gate.acquire()
    return thread.process

  def _remove(self, process: Process) -> None:
    """Removes a process that has ended, and makes the calls of its `at_end`."""
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
