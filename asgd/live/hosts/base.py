"""What a host is: one object that lives elsewhere and is called by method."""

import abc
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

# Kinds of hosts.
SHARD, WORKER, PEER, COUNTER = "shard", "worker", "peer", "counter"
KINDS = SHARD, WORKER, PEER, COUNTER
# Kinds that run on the driver's machine. Only one process may write the files
# of such a host.
LOCAL = SHARD, COUNTER


class Gone(Exception):
  """A host has died, with its object."""

  def __init__(self, kind: str, index: int):
    super().__init__(kind, index)
    self.kind, self.index = kind, index

  def __str__(self):
    return f"{self.kind} {self.index} is gone"


class Inside(NamedTuple):
  """What an object is told of its host."""

  kill: Callable[[], None]  # ends the host at once; does not return
  wait: Callable[[float], None]  # lets seconds go by
  clock: Callable[[], float]  # seconds since the run began
  disk: Any = os  # writes files: `write` and `replace`, as those of `os`
  # Makes a pool that does one call at a time.
  pool: Callable[[], Executor] = functools.partial(ThreadPoolExecutor, 1)
  # (call, method, *args): runs a call in another thread, and then calls a
  # method of the object with (*args, a Future of the result of the call).
  later: Callable[..., None] = lambda call, method, *args: None
  # Returns a handle of another host, whose calls take the time of a network.
  link: Callable[["Host"], "Host"] = lambda host: host


# Makes the object, in its host. Two methods of it, if it has them, are called
# when the host ends, unless its process is killed: `interrupt` at once, by
# another thread, so that a method that waits returns; and `close` when no
# method runs any more. `drain` is called, by another thread as well, when the
# process of a worker or a peer receives SIGTERM.
Make = Callable[[Inside], Any]


class Call(Protocol):
  """A call of a method, which goes on elsewhere."""

  def done(self) -> bool:
    """Whether it has ended."""

  def result(self) -> Any:
    """Returns the answer, once it is there. Raises Gone if the host has died,
    and what the method raised: Gone of another host as it is."""


class Host(abc.ABC):
  """A handle, which may be given to other objects in calls."""

  kind: str  # one of KINDS
  index: int

  @abc.abstractmethod
  def call(self, method: str, *args: Any) -> Call:
    """Calls a method of the object, once it is made; calls that nobody has
    waited for are made in any order. Calls are made one after the other; one
    that returns a `concurrent.futures.Future` is answered when that is done,
    and the next may be made before."""


class Hosts(abc.ABC):
  """The hosts of a run, of those who start and end them.

  Example:
    >>> import time
    >>> from asgd.live.hosts.threads import ThreadHosts
    >>> hosts = ThreadHosts(began=time.monotonic())
    >>> host = hosts.start("shard", 0, lambda inside: [3, 1, 2])
    >>> host.call("sort").result()
    >>> host.call("index", 3).result()
    2
    >>> hosts.kill("shard", 0)
    >>> hosts.gone()
    [('shard', 0)]
    >>> host.call("index", 3).result()
    Traceback (most recent call last):
    ...
    asgd.live.hosts.base.Gone: shard 0 is gone
    >>> hosts.close()
  """

  disk: Any = os  # writes the driver's files: `write` and `replace`
  # Shows a line to the user, at once.
  say: Callable[[str], None] = staticmethod(lambda text: None)

  @abc.abstractmethod
  def clock(self) -> float:
    """Returns the seconds since the run began."""

  @abc.abstractmethod
  def sleep(self, seconds: float) -> None:
    """Blocks the caller, the driver, for so many seconds."""

  @abc.abstractmethod
  def start(self, kind: str, index: int, make: Make) -> Host:
    """Begins to make an object, in a new host, which takes the place of the
    last one of that kind and index. What `make` raises is raised by `made` and
    by all calls."""

  @abc.abstractmethod
  def made(self, kind: str, index: int) -> Call:
    """Returns the call that makes the object."""

  @abc.abstractmethod
  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """Returns those of some calls that have ended, once there is one or the
    time is over."""

  @abc.abstractmethod
  def gone(self) -> list[tuple[str, int]]:
    """Returns (kind, index) of the hosts that have died and were not replaced,
    and raises nothing that made them end."""

  @abc.abstractmethod
  def kill(self, kind: str, index: int) -> None:
    """Ends a host at once, whatever it does; its object is not closed in a
    process, and in a thread when the method that is called ends."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends all hosts; may be called twice."""
