"""Frames between processes of one machine: Unix sockets.

A socket's folder is readable by its owner alone, and nothing listens on a
network. Frames have one size and are data only. When a process is killed the
kernel closes its sockets, so the other side knows at once.
"""

import contextlib
import os
import queue
import selectors
import socket
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard

_PAUSE = 0.05  # seconds between two tries to connect
_TICK = 0.1  # seconds between two looks at the deadlines


class _Connection:
  """A socket, and what has come of a frame that is not whole yet."""

  def __init__(self, sock: socket.socket):
    self.sock = sock
    self._rest = b""

  def read(self) -> list[Frame]:
    """Returns the frames that are there; raises EOFError at the end."""
    try:
      data = self.sock.recv(64 * frames.SIZE)
    except OSError as error:
      raise EOFError from error
    if not data:
      raise EOFError
    data = self._rest + data
    whole = len(data) - len(data) % frames.SIZE
    self._rest = data[whole:]
    return [
      frames.unpack(data[i : i + frames.SIZE])
      for i in range(0, whole, frames.SIZE)
    ]


def _open(path: Path) -> socket.socket:
  sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
  try:
    sock.connect(str(path))
  except OSError:
    sock.close()
    raise
  return sock


class _WakePipe:
  """Ends a `select` that is waiting; may be called from a signal handler."""

  def __init__(self, selector: selectors.BaseSelector):
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    selector.register(self._read, selectors.EVENT_READ, self)

  def wake(self) -> None:
    with contextlib.suppress(BlockingIOError):
      os.write(self._write, b"x")

  def clear(self) -> None:
    os.read(self._read, 64)


class SocketLink:
  """A worker's way to the shards; see `base.WorkerLink`."""

  def __init__(self, paths: list[Path]):
    """Connects to no shard yet: `connect` does."""
    self._paths = paths
    self._ways: list[_Connection | None] = [None] * len(paths)
    self._selector = selectors.DefaultSelector()
    self._inbox: list[tuple[int, Frame]] = []
    self._pipe = _WakePipe(self._selector)
    self.wake = self._pipe.wake

  def say(self, shard: int, frame: Frame) -> None:
    """Sends a frame. Raises Disconnected."""
    way = self._ways[shard]
    if way is None:
      raise Disconnected(shard)
    try:
      way.sock.sendall(frames.pack(frame))
    except OSError as error:
      self._drop(shard)
      raise Disconnected(shard) from error

  def hear(self, seconds: float | None) -> tuple[int, Frame] | None:
    """Returns the next (shard, frame). Raises Disconnected."""
    if self._inbox:
      return self._inbox.pop(0)
    if None in self._ways:  # `say` has noticed it, and may not have told
      raise Disconnected(self._ways.index(None))
    for key, _ in self._selector.select(seconds):
      if key.data is self._pipe:
        self._pipe.clear()
        continue
      shard = key.data
      try:
        self._inbox += [(shard, frame) for frame in self._ways[shard].read()]
      except EOFError:
        self._drop(shard)
        raise Disconnected(shard) from None
    return self._inbox.pop(0) if self._inbox else None

  def connect(self, shard: int) -> bool:
    """Opens the way to a shard anew; waits a moment if it is not there."""
    self._drop(shard)
    try:
      sock = _open(self._paths[shard])
    except OSError:
      time.sleep(_PAUSE)
      return False
    self._ways[shard] = _Connection(sock)
    self._selector.register(sock, selectors.EVENT_READ, shard)
    return True

  def close(self) -> None:
    """Closes all ways: to the shards, the worker has left."""
    for shard in range(len(self._ways)):
      self._drop(shard)

  def _drop(self, shard):
    way = self._ways[shard]
    if way is not None:
      self._selector.unregister(way.sock)
      way.sock.close()
      self._ways[shard] = None
    self._inbox = [heard for heard in self._inbox if heard[0] != shard]


class _Peer(_Connection):
  """A shard's connection, and the way back."""

  def __init__(self, sock: socket.socket, waiting: set["_Peer"]):
    super().__init__(sock)
    self.worker: int | None = None
    self._waiting = waiting  # peers that have something to be sent
    self._out = bytearray()

  def say(self, frame: Frame) -> None:
    """Sends a frame with the next `flush`: an answer is often two of them."""
    self._out += frames.pack(frame)
    self._waiting.add(self)

  def flush(self) -> None:
    """Sends what was said; a peer that is gone is noticed elsewhere."""
    with contextlib.suppress(OSError):
      self.sock.sendall(self._out)
    self._out.clear()


class ShardServer:
  """Feeds a Shard from its sockets. All of it runs in `serve`'s thread."""

  def __init__(
    self,
    shard: Shard,
    path: Path,
    *,
    clock: Callable[[], float],
    lead: Path | None = None,
  ):
    """Listens at a path, in a folder that its owner alone can read, or raises
    ValueError; a follower in a consistent run also connects to the lead's
    socket. The clock tells seconds since the run began."""
    self._shard, self._clock, self._lead_path = shard, clock, lead
    self._selector = selectors.DefaultSelector()
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    self._pipe = _WakePipe(self._selector)
    path.unlink(missing_ok=True)
    self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
      self._listener.bind(str(path))
    except OSError as error:
      raise ValueError(
        f"cannot listen at {path} ({error}); a socket's path has at most 107"
        " characters: use a folder with a shorter path"
      ) from error
    self._listener.listen(1024)
    self._selector.register(self._listener, selectors.EVENT_READ, self)
    self._lead: _Peer | None = None
    self._waiting: set[_Peer] = set()
    self._over = False

  def ask(self, call: Callable[[Shard], Any]) -> Any:
    """Has the serving thread call something, and returns the answer."""
    answer = futures.Future()
    self._calls.put((call, answer))
    self._pipe.wake()
    return answer.result()

  def end(self) -> None:
    """Has `serve` return."""
    self._over = True
    self._pipe.wake()

  def serve(self) -> None:
    """Serves until `end`."""
    ticked = self._clock()
    while not self._over:
      if self._lead_path and self._lead is None:
        # While it is being replaced, the next round tries again.
        with contextlib.suppress(OSError):
          self._lead = self._add_peer(_open(self._lead_path))
          self._shard.role.follow(self._lead.say)
      for key, _ in self._selector.select(_TICK):
        if key.data is self._pipe:
          self._pipe.clear()
        elif key.data is self:
          sock, _ = self._listener.accept()
          self._add_peer(sock)
        else:
          self._read(key.data)
      while not self._calls.empty():
        call, answer = self._calls.get()
        try:
          answer.set_result(call(self._shard))
        except Exception as error:
          answer.set_exception(error)
      now = self._clock()
      if now - ticked >= _TICK:
        ticked = now
        self._shard.tick(now)
      while self._waiting:
        self._waiting.pop().flush()

  def _add_peer(self, sock):
    peer = _Peer(sock, self._waiting)
    self._selector.register(sock, selectors.EVENT_READ, peer)
    return peer

  def _read(self, peer):
    try:
      read = peer.read()
    except (EOFError, ValueError):
      self._drop(peer)
      return
    for frame in read:
      if frame.kind == frames.HELLO:
        peer.worker = frame.worker
      self._shard.handle(frame, peer.say, self._clock())

  def _drop(self, peer):
    self._selector.unregister(peer.sock)
    peer.sock.close()
    if peer is self._lead:
      self._lead = None
    elif peer.worker is not None:
      self._shard.gone(peer.worker, self._clock(), peer.say)
