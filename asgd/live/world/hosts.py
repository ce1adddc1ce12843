"""Hosts of a simulated world: each is a process of the scheduler.

A host holds one object and executes calls of its methods. There is a fault
point at every call, at every write of an object, and wherever an object or the
driver waits. A fault can lose the answer of a call, as a broken connection
does. It can also repeat a call that callers retry.
"""

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from asgd.live.faults import Killed
from asgd.live.hosts.base import (
  COUNTER,
  LOCAL,
  PEER,
  SHARD,
  Call,
  Host,
  HostExited,
  Hosts,
  Inside,
  Make,
)
from asgd.live.world.injections import Faults
from asgd.live.world.network import SimulatedNetwork
from asgd.live.world.scheduler import Process, Scheduler
from asgd.live.world.storage import Disk

# Methods that callers retry after a broken connection, perhaps late. All
# methods of a shard are retried too, but at once.
_RETRIED = {(PEER, "deliver"), (COUNTER, "take")}
_DELAY_PART = 0.1  # delay of a call, as a fraction of a fault's seconds
_P = ParamSpec("_P")
_T = TypeVar("_T")


class World(NamedTuple):
  """The simulated parts that a run uses instead of the system's."""

  scheduler: Scheduler
  faults: Faults
  network: SimulatedNetwork
  disk: Disk
  folder: Path  # of its files and its memory
  skew: list[float]  # seconds by which its clock has jumped

  def clock(self) -> float:
    """Returns seconds since the run began, as its processes read them."""
    return self.scheduler.now + self.skew[0]

  def spoil(self, message: Any) -> Any:
    """Returns a worker's message; with an armed fault its floats are NaN."""
    if not self.faults.take("nan", "worker"):
      return message

    def to_nan(x: Any) -> Any:
      # Integers of a packed code have no NaN.
      return x if np.dtype(x.dtype).kind in "iub" else x * float("nan")

    return jax.tree.map(to_nan, message)


class _InlinePool(Executor):
  """A pool that runs each call at once, because the scheduler gives no turns
  to threads of a pool."""

  def submit(
    self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
  ) -> Future[_T]:
    """See the base."""
    future: Future[_T] = Future()
    future.set_result(call(*args, **kwargs))
    return future


class _FencedDisk:
  """The disk of an object; it refuses writes once the driver has given up the
  object's host."""

  def __init__(self, host: "WorldHost", scheduler: Scheduler, disk: Disk):
    self._host, self._scheduler, self._disk = host, scheduler, disk

  def _touch(self) -> None:
    """Passes a fault point, then ends the process if the driver has given up
    its host."""
    self._scheduler.touch()
    if self._host.is_given_up:
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
  """A call of an object's method in another process of the world."""

  def __init__(self, scheduler: Scheduler, host: "WorldHost"):
    self._scheduler, self.host = scheduler, host
    self.answer: Future[Any] | None = None  # None: not received yet
    self.is_cut = False  # the connection broke: the answer is lost

  def take(self, future: Future[Any]) -> None:
    """Receives the answer, a future that is done."""
    self.answer = future

  def done(self) -> bool:
    """See the base."""
    if self.answer is not None or self.is_cut:
      return True
    return not self.host.is_alive

  def result(self) -> Any:
    """See the base."""
    if not self.done():
      self._scheduler.wait(self.done, None)
    if self.is_cut or self.answer is None:
      raise HostExited(self.host.kind, self.host.index)
    return self.answer.result()


class WorldHost(Host):
  """An object in a process of the world."""

  def __init__(self, hosts: "WorldHosts", kind: str, index: int, make: Make):
    self.kind, self.index, self._hosts = kind, index, hosts
    self._scheduler = scheduler = hosts.world.scheduler
    # Calls that have arrived and not been executed: (call, method, arguments).
    self._inbox: list[tuple[WorldCall, str, Sequence[Any]]] = []
    # The driver has given up the host, and ignores its answers.
    self.is_given_up = False
    self.open_calls: list[WorldCall] = []  # without an answer
    self.make_call = self._new_call()
    self._inside = Inside(
      kill=self._die,
      wait=self._wait,
      clock=hosts.clock,
      disk=_FencedDisk(self, scheduler, hosts.disk),
      make_pool=_InlinePool,
      run_later=self._run_later,
    )
    self.made_object: Any = None  # None: `make` has not returned
    self.process: Process = scheduler.start(
      f"{kind} {index}", lambda: self._run(make)
    )
    self.helpers: list[Process] = []  # they run calls of `Inside.run_later`
    # The end of a process ends its helpers. The end of a thread does not, but
    # the helpers of a LOCAL host would write to files of its successor.
    self._ends_helpers = hosts.kills or kind in LOCAL
    if self._ends_helpers:
      self.process.at_end.append(self._end_helpers)

  @property
  def is_alive(self) -> bool:
    """Whether the host answers calls."""
    return self.process.alive and not (self.process.doomed or self.is_given_up)

  def call(self, method: str, *args: Any) -> WorldCall:
    """See the base."""
    call, faults = self._new_call(), self._hosts.world.faults
    self._scheduler.touch()
    may_be_late = (self.kind, method) in _RETRIED
    is_retried = may_be_late or self.kind == SHARD
    # [1] A second call, as if the caller had repeated the first one.
    if is_retried and (double_fault := faults.take("double", self.kind)):
      repeated_call = WorldCall(self._scheduler, self)  # no caller waits for it
      seconds = double_fault.seconds * _DELAY_PART * may_be_late
      self._post(repeated_call, method, args, seconds)
    # [2] The call itself, which may be delayed.
    delay_fault = faults.take("delay", self.kind)
    seconds = delay_fault.seconds * _DELAY_PART if delay_fault else 0.0
    self._post(call, method, args, seconds)
    return call

  def _post(
    self,
    call: WorldCall,
    method: str,
    args: Sequence[Any],
    seconds: float = 0.0,
  ) -> None:
    """Puts a call into the host's inbox, after some simulated seconds."""

    def post() -> None:
      if seconds:
        self._scheduler.sleep(seconds)
      self._inbox.append((call, method, args))

    if seconds:
      self._scheduler.start(f"late call of {self.kind} {self.index}", post)
    else:
      post()

  def lose(self, call: WorldCall) -> None:
    """Drops a call that the host has not begun to execute."""
    self._inbox = [entry for entry in self._inbox if entry[0] is not call]

  def _run_later(
    self, function: Callable[[], Any], method: str, *args: Any
  ) -> None:
    """Runs `function` in a helper process; see `Inside.run_later`."""
    future: Future[Any] = Future()

    def run() -> None:
      try:
        future.set_result(function())
      except Exception as error:
        future.set_exception(error)
      self._post(WorldCall(self._scheduler, self), method, (*args, future))

    self.helpers = [helper for helper in self.helpers if helper.alive]
    name = f"call beside {self.kind} {self.index}"
    helper = self._scheduler.start(name, run)
    self.helpers.append(helper)

    def end_process() -> None:
      # A killed helper ends the process of its host; a helper that has finished
      # does not.
      if helper.doomed:
        self._scheduler.kill(self.process)

    if self._ends_helpers:
      helper.at_end.append(end_process)

  def _end_helpers(self) -> None:
    for helper in self.helpers:
      self._scheduler.kill(helper)

  def drain(self) -> bool:
    """Calls the object's `drain`; returns whether it has such a method."""
    if has_drain := hasattr(self.made_object, "drain"):
      self.made_object.drain()
    return has_drain

  def interrupt(self) -> None:
    """Calls the object's `interrupt`, if it has such a method."""
    if hasattr(self.made_object, "interrupt"):
      self.made_object.interrupt()

  def _new_call(self) -> WorldCall:
    """Returns a new call, listed in `open_calls`."""
    self.open_calls = [call for call in self.open_calls if not call.done()]
    new_call = WorldCall(self._scheduler, self)
    self.open_calls.append(new_call)
    return new_call

  def _die(self) -> None:
    """Kills this host from within."""
    scheduler = self._scheduler
    scheduler.kill(self.process)
    scheduler.kill(scheduler.calling)  # the caller may be a helper
    scheduler.point()

  def _wait(self, seconds: float) -> None:
    """Sleeps, then ends the process if the driver has given up its host."""
    self._scheduler.sleep(seconds)
    if self.is_given_up:
      raise Killed

  def _run(self, make: Make) -> None:
    """Makes the object, then executes the calls of its methods."""

    def make_object() -> None:
      self.made_object = make(self._inside)

    self._execute(self.make_call, make_object)
    make_answer = self.make_call.answer
    assert make_answer is not None
    while True:
      self._scheduler.wait(lambda: self.is_given_up or bool(self._inbox), None)
      if self.is_given_up:
        return
      call, method, args = self._inbox.pop(self._next_index())
      if make_answer.exception():  # there is no object
        call.take(make_answer)
        continue
      self._execute(
        call,
        lambda: getattr(self.made_object, method)(*args),  # noqa: B023
      )

  def _next_index(self) -> int:
    """Returns the index of the waiting call that is executed next."""
    order, count = self._hosts.order, len(self._inbox)
    if order is not None:
      return order.randrange(count)
    faults = self._hosts.world.faults
    takes_newest = count > 1 and faults.take("reorder", self.kind)
    return -1 if takes_newest else 0

  def _execute(self, call: WorldCall, compute: Callable[[], Any]) -> None:
    """Answers a call with the value or the error of `compute`. Killed is not an
    answer: it ends the process."""
    answer: Future[Any] = Future()
    try:
      value = compute()
      # A method that returns a Future answers later (`Host.call`).
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
    """`kills`: whether a host that the driver kills ends at once, as a process
    does. Otherwise it ends when it waits or has ended its call, as a thread
    does."""
    self.world, self.kills, self.disk = world, kills, world.disk
    # Chooses which waiting call a host executes next; None: the oldest.
    self.order: random.Random | None = None
    self.hosts: dict[tuple[str, int], WorldHost] = {}
    self.cuts = 0  # connections of calls that were broken

  def clock(self) -> float:
    """See the base."""
    return self.world.clock()

  def sleep(self, seconds: float) -> None:
    """See the base."""
    self.world.scheduler.sleep(seconds)

  def host_of(self, process: Process) -> WorldHost | None:
    """Returns the host of a process."""
    hosts = self.hosts.values()
    return next((host for host in hosts if host.process is process), None)

  def start(self, kind: str, index: int, make: Make) -> WorldHost:
    """See the base."""
    if predecessor := self.hosts.get((kind, index)):
      self._end(predecessor)
      if kind in LOCAL and predecessor.process.alive:
        # Two hosts must not write the same files at the same time.
        self.world.scheduler.wait(lambda: not predecessor.process.alive, None)
    host = self.hosts[kind, index] = WorldHost(self, kind, index, make)
    return host

  def make_call(self, kind: str, index: int) -> WorldCall:
    """See the base."""
    return self.hosts[kind, index].make_call

  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """See the base."""
    self.world.scheduler.wait(
      lambda: any(call.done() for call in calls), seconds
    )
    return [call for call in calls if call.done()]

  def exited(self) -> list[tuple[str, int]]:
    """See the base."""
    # The dict has the last host of each kind and index only.
    return [key for key, host in self.hosts.items() if not host.is_alive]

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    self._end(self.hosts[kind, index])

  def _end(self, host: WorldHost) -> None:
    """Gives up a host, and ends it as a process or as a thread ends."""
    host.is_given_up = True
    if self.kills:
      self.world.scheduler.kill(host.process)
    else:
      host.interrupt()

  def close(self) -> None:
    """See the base."""
    for host in self.hosts.values():
      self.world.scheduler.kill(host.process)

  def cut(self, target: float, *, arrives: bool = True) -> Sequence[str]:
    """Breaks the connection of an open call.

    Args:
      target: selects the call, in [0, 1).
      arrives: whether the host still receives the call.

    Returns:
      The name of the call's host; nothing if no call is open.
    """
    open_calls = [
      call
      for host in self.hosts.values()
      for call in host.open_calls
      if not call.done() and call is not host.make_call
    ]
    if not open_calls:
      return ()
    self.cuts += 1
    call = open_calls[int(target * len(open_calls))]
    call.is_cut = True
    if not arrives:
      call.host.lose(call)
    return (call.host.process.name,)
