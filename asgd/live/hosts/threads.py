"""Hosts that are threads of this process; arguments are passed by reference.

A thread cannot be killed. A killed host answers no call: its calls raise
HostExited at once, and its thread ends when the running method calls
`Inside.wait` or returns. An object that waits by other means needs a method
`interrupt`.
"""

import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asgd.live.faults import Killed
from asgd.live.hosts.base import (
  LOCAL,
  Call,
  Host,
  HostExited,
  Hosts,
  Inside,
  Make,
)

_MAX_POOL = 64  # calls of `Inside.run_later` that run at the same time


class _GuardedDisk:
  """The disk of an object; it refuses writes once the host has ended.

  A hanging thread may wake up when its successor already writes to the same
  files.
  """

  def __init__(self, lock: threading.Lock, end: threading.Event):
    self._lock, self._end = lock, end

  def write(self, file: int, data: Any) -> int:
    """See `os.write`."""
    with self._lock:
      if self._end.is_set():
        raise Killed
      return os.write(file, data)

  def replace(self, source: Any, target: Any) -> None:
    """See `os.replace`."""
    with self._lock:
      if self._end.is_set():
        raise Killed
      os.replace(source, target)


class ThreadHost(Host):
  """An object, and the thread that calls its methods."""

  def __init__(
    self,
    kind: str,
    index: int,
    make: Make,
    clock: Callable[[], float],
    kill: Callable[[], None] | None = None,
  ):
    """`kill` becomes `Inside.kill`; None: a call of that ends the thread."""
    self.kind, self.index = kind, index
    # (Future of the result, method, arguments); None ends the thread.
    self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._end = threading.Event()
    self._lock = threading.Lock()  # guards `_open_calls`
    self._open_calls: set[Future[Any]] = set()  # calls without a result
    self._call_lock = threading.Lock()  # held while a method runs
    self._object: Any = None  # None until `make` has returned
    # Whether this host adds its name to errors; that of a process is added by
    # the caller.
    self._names_itself = kill is None
    self._disk_lock = threading.Lock()  # held while the disk is written
    disk = _GuardedDisk(self._disk_lock, self._end)
    self._pool: ThreadPoolExecutor | None = None  # of `Inside.run_later`
    self._inside = Inside(
      kill or self._die, self._wait, clock, disk, run_later=self._run_later
    )
    self.make_call: Future[Any] = self._new_call()
    self.thread = threading.Thread(
      target=self._run, args=(make,), name=f"{kind}-{index}", daemon=True
    )
    self.thread.start()

  @property
  def is_alive(self) -> bool:
    """Whether the host answers calls."""
    return not self._end.is_set()

  def call(self, method: str, *args: Any) -> Future[Any]:
    """See the base."""
    call = self._new_call()
    if not call.done():
      self._calls.put((call, method, args))
    return call

  def call_here(self, method: str, *args: Any) -> Any:
    """Calls a method in the caller's thread, so that no thread has to wake
    another. Returns the result; raises the method's error, or HostExited."""
    self.make_call.result()
    with self._call_lock:
      if not self.is_alive:
        raise HostExited(self.kind, self.index)
      value = getattr(self._object, method)(*args)
    return value.result() if isinstance(value, Future) else value

  def end(self) -> None:
    """Ends the thread; each open call raises HostExited."""
    with self._disk_lock, self._lock:
      self._end.set()
      open_calls, self._open_calls = self._open_calls, set()
    for call in open_calls:
      call.set_exception(HostExited(self.kind, self.index))
    self._calls.put(None)
    if hasattr(self._object, "interrupt"):
      self._object.interrupt()

  def drain(self) -> bool:
    """Calls `drain` of the object in the caller's thread; returns whether the
    object has that method."""
    if has_drain := hasattr(self._object, "drain"):
      self._object.drain()
    return has_drain

  def _new_call(self) -> Future[Any]:
    """Returns an open call; if the host has ended, a call that raises
    HostExited."""
    call: Future[Any] = Future()
    with self._lock:
      if self.is_alive:
        self._open_calls.add(call)
        return call
    call.set_exception(HostExited(self.kind, self.index))
    return call

  def _die(self) -> None:
    raise Killed

  def _wait(self, seconds: float) -> None:
    """Blocks the object; a kill of the host ends the wait."""
    if self._end.wait(seconds):
      raise Killed

  def _run_later(
    self, function: Callable[[], Any], method: str, *args: Any
  ) -> None:
    """See `Inside.run_later`."""
    if self._pool is None:
      name = f"{self.kind}-{self.index}-call"
      self._pool = ThreadPoolExecutor(_MAX_POOL, name)

    def post(future: Future[Any]) -> None:
      self.call(method, *args, future)

    self._pool.submit(function).add_done_callback(post)

  def _answer(
    self,
    call: Future[Any],
    value: Any = None,
    error: BaseException | None = None,
  ) -> None:
    """Sets the result or the error of an open call."""
    with self._lock:
      if call not in self._open_calls:  # the host was killed meanwhile
        return
      self._open_calls.remove(call)
    if error is None:
      call.set_result(value)
    else:
      call.set_exception(error)

  def _run(self, make: Make) -> None:
    """Makes the object, then runs calls one after the other until the end."""
    try:
      self._object = self._try(self.make_call, lambda: make(self._inside))
      self._answer(self.make_call)
      failure = self.make_call.exception()
      while self.is_alive and (item := self._calls.get()) is not None:
        call, method, args = item
        if failure is not None:  # there is no object
          self._answer(call, error=failure)
          continue
        value = self._try(call, lambda: self._call(method, args))  # noqa: B023
        if isinstance(value, Future):  # the next call runs before it is done
          value.add_done_callback(functools.partial(self._answer_from, call))
        else:
          self._answer(call, value)
    except Killed:
      pass
    finally:
      self.end()
      if self._pool is not None:
        self._pool.shutdown(wait=False, cancel_futures=True)
      if hasattr(self._object, "close"):
        self._object.close()

  def _call(self, method: str, args: Sequence[Any]) -> Any:
    # Other threads may be in `call_here`.
    with self._call_lock:
      return getattr(self._object, method)(*args)

  def _try(self, call: Future[Any], function: Callable[[], Any]) -> Any:
    """Calls the function and returns its result. An error, except Killed,
    becomes the result of `call`."""
    try:
      return function()
    except Exception as error:
      if self._names_itself and not isinstance(error, HostExited):
        error.add_note(f"in {self.kind} {self.index}")
      self._answer(call, error=error)
      return None

  def _answer_from(self, call: Future[Any], future: Future[Any]) -> None:
    """Answers a call with the result of a future that has ended."""
    # The end of the host cancels futures; `end` has answered their calls.
    with contextlib.suppress(concurrent.futures.CancelledError):
      error = future.exception()
      value = None if error else future.result()
      self._answer(call, value, error)


class ThreadHosts(Hosts):
  """Starts and ends the threads that are a run's hosts."""

  def __init__(self, *, began: float):
    """`began` is the `time.monotonic()` at which the clock of the run is 0."""
    self._began = began
    self._hosts: dict[tuple[str, int], ThreadHost] = {}
    self._threads: list[threading.Thread] = []  # threads of all hosts so far

  def clock(self) -> float:
    """See the base."""
    return time.monotonic() - self._began

  def sleep(self, seconds: float) -> None:
    """See the base."""
    time.sleep(seconds)

  def start(self, kind: str, index: int, make: Make) -> ThreadHost:
    """See the base. A host of a local kind starts after the thread of its
    predecessor has ended, because both write to the same files."""
    predecessor = self._hosts.get((kind, index))
    if predecessor is not None:
      predecessor.end()
      if kind in LOCAL:
        predecessor.thread.join()
    host = ThreadHost(kind, index, make, self.clock)
    self._hosts[kind, index] = host
    self._threads.append(host.thread)
    return host

  def make_call(self, kind: str, index: int) -> Call:
    """See the base."""
    return self._hosts[kind, index].make_call

  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """See the base."""
    # All calls of threads are futures.
    futures = [call for call in calls if isinstance(call, Future)]
    ended_futures, _ = concurrent.futures.wait(
      futures, seconds, concurrent.futures.FIRST_COMPLETED
    )
    return [call for call in futures if call in ended_futures]

  def exited(self) -> list[tuple[str, int]]:
    """See the base."""
    return [key for key, host in self._hosts.items() if not host.is_alive]

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    self._hosts[kind, index].end()

  def close(self) -> None:
    """Ends all threads, and waits for them."""
    for host in self._hosts.values():
      host.end()
    for thread in self._threads:
      thread.join()
