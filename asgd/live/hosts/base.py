"""The interface of hosts.

A host is a thread or a process that holds one object. The driver starts and
ends hosts. The driver and other hosts call the object's methods by handles.
"""

import abc
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

# Kinds of hosts.
SHARD, WORKER, PEER = "shard", "worker", "peer"
COUNTER = "counter"  # assigns job numbers to peers that train without rounds
KINDS = SHARD, WORKER, PEER, COUNTER
# Hosts of these kinds run on the driver's machine. Only one process may write
# the files of such a host.
LOCAL = SHARD, COUNTER


class HostExited(Exception):
  """The host of a called object has exited or was killed."""

  def __init__(self, kind: str, index: int):
    super().__init__(kind, index)
    self.kind, self.index = kind, index

  def __str__(self):
    return f"{self.kind} {self.index} has exited"


class Inside(NamedTuple):
  """The functions that a host gives to its object."""

  kill: Callable[[], None]  # ends the host at once; does not return
  wait: Callable[[float], None]  # blocks for a number of seconds
  clock: Callable[[], float]  # seconds since the run began
  disk: Any = os  # has the methods `write` and `replace` of `os`
  # Makes a pool that runs one call at a time.
  make_pool: Callable[[], Executor] = functools.partial(ThreadPoolExecutor, 1)
  # (function, method, *args): calls `function` in another thread, then calls
  # `method` of the object with (*args, Future of the function's result). The
  # default does nothing; each kind of host replaces it.
  run_later: Callable[..., None] = lambda function, method, *args: None
  # Returns a handle of another host; its calls take as long as over a network.
  # The default adds no delay.
  wrap_host: Callable[["Host"], "Host"] = lambda host: host


class Make(Protocol):
  """Makes the object of a host; called in the host.

  The host calls three methods, if the object has them. When the host ends,
  unless its process was killed, the host calls `interrupt` at once from another
  thread, so that a waiting method returns. It calls `close` when no method
  runs. When the process of a worker or a peer receives SIGTERM, the host calls
  `drain` from another thread.
  """

  def __call__(self, inside: Inside, /) -> Any:
    """Returns the object."""


class Call(Protocol):
  """A call of a method that runs in another thread or process."""

  def done(self) -> bool:
    """Whether the call has ended."""

  def result(self) -> Any:
    """Waits for the result and returns it.

    Raises HostExited if the host has exited. Otherwise raises the error of the
    method, which may be a HostExited of another host.
    """


class Host(abc.ABC):
  """A handle of a host, which may be given to other objects in calls."""

  kind: str  # one of KINDS
  index: int

  @abc.abstractmethod
  def call(self, method: str, *args: Any) -> Call:
    """Calls a method of the object, once the host has created the object.

    The host runs one call at a time. Calls may run in any order if the
    caller has not waited for their results. If a method returns a
    `concurrent.futures.Future`, its result is the result of the call, and the
    next call may run before the future is done."""


class Hosts(abc.ABC):
  """The hosts of a run, for the driver that starts and ends them.

  Example:
    >>> import time
    >>> from asgd.live.hosts.threads import ThreadHosts
    >>> hosts = ThreadHosts(began=time.monotonic())
    >>> host = hosts.start("shard", 0, lambda inside: [3, 1, 2])
    >>> host.call("sort").result()
    >>> host.call("index", 3).result()
    2
    >>> hosts.kill("shard", 0)
    >>> hosts.exited()
    [('shard', 0)]
    >>> host.call("index", 3).result()
    Traceback (most recent call last):
    ...
    asgd.live.hosts.base.HostExited: shard 0 has exited
    >>> hosts.close()
  """

  disk: Any = os  # for the driver's files; has `write` and `replace` of `os`
  # Shows a line to the user, at once.
  show: Callable[[str], None] = staticmethod(lambda text: None)

  @abc.abstractmethod
  def clock(self) -> float:
    """Returns the seconds since the run began."""

  @abc.abstractmethod
  def sleep(self, seconds: float) -> None:
    """Blocks the calling driver for a number of seconds."""

  @abc.abstractmethod
  def start(self, kind: str, index: int, make: Make) -> Host:
    """Starts a host, which calls `make` in the background. Ends the present
    host of that kind and index, if there is one. If `make` raises an error,
    `result` of `make_call` and of each later call raises the same error."""

  @abc.abstractmethod
  def make_call(self, kind: str, index: int) -> Call:
    """Returns the call of `make`: it is done when the host has its object."""

  @abc.abstractmethod
  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """Waits until one of the calls has ended or the time is over; returns the
    calls that have ended."""

  @abc.abstractmethod
  def exited(self) -> list[tuple[str, int]]:
    """Returns (kind, index) of each host that has exited and has no successor.
    Does not raise the errors that ended them."""

  @abc.abstractmethod
  def kill(self, kind: str, index: int) -> None:
    """Ends a host at once, even in the middle of a call. An object in a
    process is not closed; an object in a thread is closed when its running
    method ends."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends all hosts; may be called twice."""
