"""Links of threads that take the time of a network.

Threads of one process share the slots of memory, which takes no time. Over a
network a frame arrives when it, and the bytes in its slot, would have come: the
real size of a message, dense or packed. Its lines are those of a simulation
(`asgd.orders.network`), by a real clock.
"""

import collections
import contextlib
import functools
import heapq
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.links.sockets import UnixNetwork
from asgd.live.slots import MESSAGES, PARAMS
from asgd.orders.network import Links, MessagePart, Network


class _Parcel:
  """A frame on its way."""

  def __init__(self, deliver: Callable[[], Any]):
    self.deliver, self.there = deliver, False


class Throttle:
  """All links between the workers and the shards of a run.

  `up` and `down` may be called by any thread; frames are delivered by one of
  these or by the thread of `start`: delivering must not block. Between one
  worker and one shard nothing overtakes.
  """

  def __init__(
    self,
    network: Network,
    workers: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """The clock counts seconds, the unit of the network's times."""
    self._links, self._clock = Links(network, workers), clock
    self.time = 0.0  # when the content under delivery arrives
    self._heap: list[tuple[float, int, MessagePart | None, Any]] = []
    self._count = 0
    self._orders: dict[Any, collections.deque[_Parcel]] = (
      collections.defaultdict(collections.deque)
    )
    self._changed = threading.Condition()
    self._ended = False
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Begins to deliver."""
    self._thread.start()

  def close(self) -> None:
    """Ends: frames on their way are lost."""
    with self._changed:
      self._ended = True
      self._changed.notify()
    if self._thread.is_alive():
      self._thread.join()

  def up(
    self, worker: int, shard: int, nbytes: float, deliver: Callable[[], Any]
  ) -> None:
    """Carries so many bytes from a worker to a shard."""
    self._carry(self._links.up, worker, shard, nbytes, deliver)

  def down(
    self, worker: int, shard: int, nbytes: float, deliver: Callable[[], Any]
  ) -> None:
    """Carries so many bytes from a shard to a worker."""
    self._carry(self._links.down, worker, shard, nbytes, deliver)

  def _carry(self, way, worker, shard, nbytes, deliver):
    parcel = _Parcel(deliver)
    with self._changed:
      order = self._orders[way.__name__, worker, shard]
      now = self._clock()
      self._deliver_due(now)
      order.append(parcel)
      key = order, parcel
      self._move(now, way(key, worker, shard, nbytes), None)
      self._changed.notify()

  def deliver_due(self) -> float | None:
    """Delivers due frames; returns when more may be due."""
    with self._changed:
      self._deliver_due(self._clock())
      return self._heap[0][0] if self._heap else None

  def _deliver_due(self, now):
    while self._heap and self._heap[0][0] <= now:
      due, _, part, line = heapq.heappop(self._heap)
      self._move(due, part, line)

  def _move(self, now, part, line):
    if line is None and part.arrived:
      order, parcel = part.key
      parcel.there, self.time = True, now
      while order and order[0].there:
        order.popleft().deliver()
      return
    for when, following, on in self._links.advance(now, part, line):
      self._count += 1
      heapq.heappush(self._heap, (when, self._count, following, on))

  def _run(self):
    with self._changed:
      while not self._ended:
        now = self._clock()
        self._deliver_due(now)
        due = self._heap[0][0] if self._heap else None
        self._changed.wait(None if due is None else max(due - now, 0.0))


class ThrottledNetwork(UnixNetwork):
  """Sockets whose frames, but those between shards, pass a Throttle."""

  def __init__(self, throttle: Throttle, open_memory: Callable[[int], Any]):
    """`open_memory` returns the slots of a shard, once it is made."""
    self._throttle = throttle
    self._memory = functools.cache(open_memory)

  def connect(self, path: Path) -> Any:
    """See the base."""
    carry = functools.partial(self._carry, self._throttle.up, int(path.stem))
    return _ThrottledSocket(super().connect(path), carry)

  def listen(self, path: Path) -> Any:
    """See the base."""
    carry = functools.partial(self._carry, self._throttle.down, int(path.stem))
    return _ThrottledSocket(super().listen(path), carry)

  def _carry(self, way, shard, frame, deliver):
    nbytes = 0
    if frame.kind in frames.OF_SHARDS:
      deliver()
      return
    if frame.kind == frames.PUSH:
      nbytes = self._memory(shard).length(MESSAGES, frame.message)
    elif frame.kind == frames.TICKET and not frame.flag:
      nbytes = self._memory(shard).length(PARAMS, frame.params)
    way(frame.worker, shard, nbytes, deliver)


class _ThrottledSocket:
  """A socket of which each frame is carried before it is sent, or a
  listener."""

  def __init__(self, sock: Any, carry: Callable[..., None]):
    self._sock, self._carry = sock, carry
    self.fileno, self.recv, self.close = sock.fileno, sock.recv, sock.close
    self.setblocking = sock.setblocking

  def accept(self):
    sock, address = self._sock.accept()
    return _ThrottledSocket(sock, self._carry), address

  def send(self, data: bytes) -> int:
    for start in range(0, len(data), frames.SIZE):
      part = bytes(data[start : start + frames.SIZE])
      deliver = functools.partial(self._deliver, part)
      self._carry(frames.unpack(part), deliver)
    return len(data)

  sendall = send

  def _deliver(self, data):
    with contextlib.suppress(OSError):  # it was closed on the way
      self._sock.sendall(data)
