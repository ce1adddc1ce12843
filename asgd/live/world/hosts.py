"""Hosts of a simulated world: each is a process of the scheduler.

A fault may come at every call, at every write of an object, and wherever an
object or the driver waits. An answer may be lost, as through a connection that
breaks, and a call that callers retry may be made twice.
"""

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.live.faults import Killed
from asgd.live.hosts.base import (
  COUNTER,
  LOCAL,
  PEER,
  SHARD,
  Call,
  Gone,
  Host,
  Hosts,
  Inside,
  Make,
)
from asgd.live.world.injections import Faults
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scheduler import Process, Scheduler
from asgd.live.world.storage import Disk

# Methods that are called again when a connection broke, perhaps late; of a
# shard all are, at once.
_RETRIED = {(PEER, "deliver"), (COUNTER, "take")}
_LATE = 0.1  # of a fault's seconds: how late a call comes


class World(NamedTuple):
  """What a run stands on."""

  scheduler: Scheduler
  faults: Faults
  network: SimulatedNetwork
  disk: Disk
  folder: Path  # of its files and its memory
  skew: list[float]  # seconds by which its clock has jumped

  def clock(self) -> float:
    """Seconds since the run began."""
    return self.scheduler.now + self.skew[0]

  def spoil(self, message: Any) -> Any:
    """Returns a message of a worker, whose real numbers may become NaN."""
    if not self.faults.take("nan", "worker"):
      return message

    def nan(x):
      return x if np.dtype(x.dtype).kind in "iub" else x * float("nan")

    return jax.tree.map(nan, message)


class _Inline(Executor):
  """A pool that makes each call at once: threads have no turns."""

  def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
    """See the base."""
    future: Future[Any] = Future()
    future.set_result(call(*args))
    return future


class _Fenced:
  """The disk of an object: once its host has ended, nothing is written."""

  def __init__(self, host: "WorldHost", scheduler: Scheduler, disk: Disk):
    self._host, self._scheduler, self._disk = host, scheduler, disk

  def _touch(self):
    self._scheduler.touch()
    if self._host.ended:
      raise Killed

  def write(self, file: int, data: Any) -> int:
    """See `os.write`."""
    self._touch()
    return self._disk.put(file, data)

  def replace(self, source: Any, target: Any) -> None:
    """See `os.replace`."""
    self._touch()
    os.replace(source, target)


class WorldCall(Call):
  """A call of a method of an object in another process."""

  def __init__(self, scheduler: Scheduler, host: "WorldHost"):
    self._scheduler, self.host = scheduler, host
    self.answer: Future[Any] | None = None  # that is there
    self.cut = False  # the connection broke: the answer is lost

  def take(self, future: Future[Any]) -> None:
    """Takes a future that is done for the answer."""
    self.answer = future

  def done(self) -> bool:
    """See the base."""
    if self.answer is not None or self.cut:
      return True
    return not self.host.alive

  def result(self) -> Any:
    """See the base."""
    if not self.done():
      self._scheduler.wait(self.done, None)
    if self.cut or self.answer is None:
      raise Gone(self.host.kind, self.host.index)
    return self.answer.result()


class WorldHost(Host):
  """An object in a process of the world."""

  def __init__(self, hosts: "WorldHosts", kind: str, index: int, make: Make):
    self.kind, self.index, self._hosts = kind, index, hosts
    self._scheduler = scheduler = hosts.world.scheduler
    self._box: list[tuple[WorldCall, str, Sequence[Any]]] = []
    self.ended = False  # nobody hears it any more
    self.open: list[WorldCall] = []  # without an answer
    self.made = self._new_call()
    disk = _Fenced(self, scheduler, hosts.disk)
    self._inside = Inside(
      *(self._die, self._wait, hosts.clock, disk, _Inline, self._later)
    )
    self._held: Any = None
    self.process: Process = scheduler.start(
      f"{kind} {index}", lambda: self._run(make)
    )
    self.helpers: list[Process] = []  # calls beside the object (`Inside.later`)
    # A thread that has ended leaves its calls, unless its files are the next
    # one's.
    self._ends_whole = hosts.kills or kind in LOCAL
    if self._ends_whole:
      self.process.at_end.append(self._end_helpers)

  @property
  def alive(self) -> bool:
    """Whether it answers."""
    return self.process.alive and not (self.process.doomed or self.ended)

  def call(self, method: str, *args: Any) -> WorldCall:
    """See the base."""
    call, faults = self._new_call(), self._hosts.world.faults
    self._scheduler.touch()
    late = (self.kind, method) in _RETRIED
    retried = late or self.kind == SHARD
    if retried and (double := faults.take("double", self.kind)):
      again = WorldCall(self._scheduler, self)  # nobody waits
      self._post(again, method, args, double.seconds * _LATE * late)
    delay = faults.take("delay", self.kind)
    self._post(call, method, args, delay.seconds * _LATE if delay else 0.0)
    return call

  def _post(self, call, method, args, seconds=0.0):
    """Makes a call, after some time."""

    def post():
      if seconds:
        self._scheduler.sleep(seconds)
      self._box.append((call, method, args))

    if seconds:
      self._scheduler.start(f"late call of {self.kind} {self.index}", post)
    else:
      post()

  def lose(self, call: WorldCall) -> None:
    """Forgets a call that it has not begun to make."""
    self._box = [each for each in self._box if each[0] is not call]

  def _later(self, do, method, *args):
    """Runs a call in a process of its own; see `Inside.later`."""
    future: Future[Any] = Future()

    def run():
      try:
        future.set_result(do())
      except Exception as error:
        future.set_exception(error)
      self._post(WorldCall(self._scheduler, self), method, (*args, future))

    self.helpers = [each for each in self.helpers if each.alive]
    name = f"call beside {self.kind} {self.index}"
    helper = self._scheduler.start(name, run)
    self.helpers.append(helper)

    def end_all():
      if helper.doomed:  # or it has only ended
        self._scheduler.kill(self.process)

    if self._ends_whole:
      helper.at_end.append(end_all)

  def _end_helpers(self):
    for helper in self.helpers:
      self._scheduler.kill(helper)

  def drain(self) -> bool:
    """Calls `drain` of the object; returns whether it has such a method."""
    if drains := hasattr(self._held, "drain"):
      self._held.drain()
    return drains

  def interrupt(self) -> None:
    """Calls `interrupt` of the object, if it has such a method."""
    if hasattr(self._held, "interrupt"):
      self._held.interrupt()

  def _new_call(self):
    call = WorldCall(self._scheduler, self)
    self.open = [each for each in self.open if not each.done()]
    self.open.append(call)
    return call

  def _die(self):
    scheduler = self._scheduler
    scheduler.kill(self.process)
    scheduler.kill(scheduler.current)  # which may be a helper
    scheduler.point()

  def _wait(self, seconds):
    self._scheduler.sleep(seconds)
    if self.ended:
      raise Killed

  def _run(self, make):
    self._do(self.made, lambda: make(self._inside), keeps=True)
    while True:
      self._scheduler.wait(lambda: self.ended or bool(self._box), None)
      if self.ended:
        return
      call, method, args = self._box.pop(self._next())
      if self.made.answer.exception():
        call.take(self.made.answer)
        continue
      self._do(call, lambda: getattr(self._held, method)(*args))  # noqa: B023

  def _next(self):
    """Which call is made next: those that wait are made in any order."""
    order, waiting = self._hosts.order, len(self._box)
    if order is not None:
      return order.randrange(waiting)
    late = waiting > 1 and self._hosts.world.faults.take("reorder", self.kind)
    return -1 if late else 0

  def _do(self, call, do, keeps=False):
    """Answers a call with what is done, or what that raises but Killed."""
    answer: Future[Any] = Future()
    try:
      value = do()
      if keeps:
        self._held, value = value, None
      if isinstance(value, Future):
        answer = value
      else:
        answer.set_result(value)
    except Exception as error:
      answer.set_exception(error)
    answer.add_done_callback(call.take)


class WorldHosts(Hosts):
  """Hosts as processes of a world, and their driver's clock and disk."""

  def __init__(self, world: World, *, kills: bool):
    """`kills`: what the driver kills ends at once, as a process; otherwise, as
    a thread, when it waits or has ended its call."""
    self.world, self.kills, self.disk = world, kills, world.disk
    # Draws which of the calls that wait for a host is made next; None: the
    # first.
    self.order: random.Random | None = None
    self.hosts: dict[tuple[str, int], WorldHost] = {}
    self.cuts = 0  # answers that were lost

  def clock(self) -> float:
    """See the base."""
    return self.world.clock()

  def sleep(self, seconds: float) -> None:
    """See the base."""
    self.world.scheduler.sleep(seconds)

  def of(self, process: Process) -> WorldHost | None:
    """Returns the host of a process."""
    hosts = self.hosts.values()
    return next((host for host in hosts if host.process is process), None)

  def start(self, kind: str, index: int, make: Make) -> WorldHost:
    """See the base."""
    if before := self.hosts.get((kind, index)):
      self._end(before)
      if kind in LOCAL and before.process.alive:  # it may write its files
        self.world.scheduler.wait(lambda: not before.process.alive, None)
    host = self.hosts[kind, index] = WorldHost(self, kind, index, make)
    return host

  def made(self, kind: str, index: int) -> WorldCall:
    """See the base."""
    return self.hosts[kind, index].made

  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """See the base."""
    self.world.scheduler.wait(
      lambda: any(call.done() for call in calls), seconds
    )
    return [call for call in calls if call.done()]

  def gone(self) -> list[tuple[str, int]]:
    """See the base."""
    return [key for key, host in self.hosts.items() if not host.alive]

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    self._end(self.hosts[kind, index])

  def _end(self, host):
    host.ended = True
    if self.kills:
      self.world.scheduler.kill(host.process)
    else:
      host.interrupt()

  def close(self) -> None:
    """See the base."""
    for host in self.hosts.values():
      self.world.scheduler.kill(host.process)

  def cut(self, which: float, *, arrives: bool = True) -> Sequence[str]:
    """Breaks the connection of an open call, before it arrives or later.
    Returns the name of its host, of no call none."""
    calls = [
      call
      for host in self.hosts.values()
      for call in host.open
      if not call.done() and call is not host.made
    ]
    if not calls:
      return ()
    self.cuts += 1
    call = calls[int(which * len(calls))]
    call.cut = True
    if not arrives:
      call.host.lose(call)
    return (call.host.process.name,)
