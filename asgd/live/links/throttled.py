"""Links between threads that delay frames as a network would.

Threads of one process share the slots of memory, which takes no time. Here a
frame is delivered at the time at which a network would have delivered the frame
and the content of its slot, dense or packed. The network has the links of a
simulation (`asgd.orders.network`), with a real clock.

`Throttle` delays deliveries. `ThrottledNetwork` gives it the frames of sockets,
`throttled_hosts` the calls of hosts.
"""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.sockets import UnixNetwork
from asgd.live.slots import MESSAGES, PARAMS, UPDATES
from asgd.orders.link_queue import LinkQueue
from asgd.orders.network import Links, Network


class Throttle:
  """All links between the workers and the shards of a run.

  Any thread may call `send_up` and `send_down`. Such a thread, or the thread of
  `start`, calls `deliver`, which must not block. Parcels of one worker, shard
  and direction are delivered in the order in which they were sent.
  """

  def __init__(
    self,
    network: Network,
    workers: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """The clock counts seconds, the unit of the network's times."""
    self._queue, self._clock = LinkQueue(Links(network, workers)), clock
    self.time = 0.0  # time at which the latest parcel was delivered
    self._condition = threading.Condition()
    self._ended = False
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Begins to deliver."""
    self._thread.start()

  def close(self) -> None:
    """Ends the deliveries: frames under way are lost."""
    with self._condition:
      self._ended = True
      self._condition.notify()
    if self._thread.is_alive():
      self._thread.join()

  def send_up(
    self, worker: int, shard: int, nbytes: float, deliver: Callable[[], Any]
  ) -> None:
    """Carries `nbytes` bytes from a worker to a shard, then calls `deliver`."""
    self._carry(self._queue.send_up, worker, shard, nbytes, deliver)

  def send_down(
    self, worker: int, shard: int, nbytes: float, deliver: Callable[[], Any]
  ) -> None:
    """Carries `nbytes` bytes from a shard to a worker, then calls `deliver`."""
    self._carry(self._queue.send_down, worker, shard, nbytes, deliver)

  def _carry(
    self,
    send: Callable[..., None],
    worker: int,
    shard: int,
    nbytes: float,
    deliver: Callable[[], Any],
  ) -> None:
    """Sends a parcel by a method of the queue."""

    def deliver_parcel(delivery_time: float) -> None:
      self.time = delivery_time
      deliver()

    with self._condition:
      now = self._clock()
      # The links must be up to date before a parcel is added.
      self._queue.run(now)
      send(now, worker, shard, nbytes, deliver_parcel)
      self._condition.notify()

  def deliver_due(self) -> float | None:
    """Delivers the parcels that are due. Returns the time at which the next one
    may be due; None if there is none."""
    with self._condition:
      self._queue.run(self._clock())
      return self._queue.next_time

  def _run(self) -> None:
    """Delivers until `close`; sleeps until the next event is due."""
    with self._condition:
      while not self._ended:
        now = self._clock()
        self._queue.run(now)
        next_time = self._queue.next_time
        self._condition.wait(
          None if next_time is None else max(next_time - now, 0.0)
        )


# (frame, the call that delivers it)
CarryFrame = Callable[[Frame, Callable[[], None]], None]


class ThrottledNetwork(UnixNetwork):
  """Sockets that pass frames to a Throttle, except frames between shards."""

  def __init__(self, throttle: Throttle, open_memory: Callable[[int], Any]):
    """`open_memory` returns the slots of a shard, once the shard exists."""
    self._throttle = throttle
    self._memory = functools.cache(open_memory)

  def connect(self, path: Path) -> Any:
    """See the base. The name of a shard's socket is the shard's index."""
    shard = int(path.stem)
    carry = functools.partial(self._carry, self._throttle.send_up, shard)
    return _ThrottledSocket(super().connect(path), carry)

  def listen(self, path: Path) -> Any:
    """See the base."""
    shard = int(path.stem)
    carry = functools.partial(self._carry, self._throttle.send_down, shard)
    return _ThrottledSocket(super().listen(path), carry)

  def _carry(
    self,
    send: Callable[..., None],
    shard: int,
    frame: Frame,
    deliver: Callable[[], None],
  ) -> None:
    """Carries a frame by `send`: `Throttle.send_up` or `send_down`."""
    nbytes = 0  # a frame without content takes the latency alone
    if frame.kind in frames.SHARD_KINDS:
      deliver()
      return
    if frame.kind == frames.PUSH:
      nbytes = self._memory(shard).content_nbytes(MESSAGES, frame.message)
    elif frame.kind == frames.TICKET and frame.flag == frames.WHOLE:
      nbytes = self._memory(shard).content_nbytes(PARAMS, frame.params)
    elif frame.kind == frames.TICKET and frame.flag == frames.UPDATES:
      nbytes = self._memory(shard).content_nbytes(UPDATES, frame.message)
    send(frame.worker, shard, nbytes, deliver)


class _ThrottledSocket:
  """A socket that sends a frame once the throttle has carried it, or a listener
  that accepts such sockets."""

  def __init__(self, sock: Any, carry: CarryFrame):
    self._sock, self._carry = sock, carry
    # The throttle of the other end has carried the bytes that arrive here.
    self.fileno, self.recv, self.close = sock.fileno, sock.recv, sock.close
    self.setblocking = sock.setblocking

  def accept(self) -> tuple["_ThrottledSocket", Any]:
    sock, address = self._sock.accept()
    return _ThrottledSocket(sock, self._carry), address

  def send(self, data: bytes) -> int:
    # Links send complete frames only, so `data` divides into them.
    for start in range(0, len(data), frames.SIZE):
      packed_frame = bytes(data[start : start + frames.SIZE])
      deliver = functools.partial(self._deliver, packed_frame)
      self._carry(frames.unpack(packed_frame), deliver)
    return len(data)

  sendall = send

  def _deliver(self, packed_frame: bytes) -> None:
    """Sends a frame, or ends the connection if the receiver has read nothing
    for so long that there is no room: no other frame may follow a lost one."""
    with contextlib.suppress(OSError):
      try:
        self._sock.sendall(packed_frame)
      except OSError:
        self._sock.shutdown(socket.SHUT_RDWR)
