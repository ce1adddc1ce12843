"""Frames between processes of one machine, or threads: Unix sockets.

A socket's folder is readable by its owner alone, and nothing listens on a
network. Frames have one size and are data only. When a process is killed the
kernel closes its sockets, so the other side notices at once. A peer that sends
an impossible frame, or reads nothing, loses its connection, and no other peer
does.
"""

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard

_PAUSE = 0.05  # seconds between two tries to connect
_TICK = 0.1  # seconds between two looks at the deadlines
_PATIENCE = 60.0  # seconds for a shard to read a worker's frames
_MOST_UNREAD = 2**20  # bytes that a peer may leave unread
_NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class UnixNetwork:
  """The kernel's sockets; a simulation has others, with the same methods."""

  pair = staticmethod(socket.socketpair)  # two sockets, connected to each other
  selector = selectors.DefaultSelector
  sleep = staticmethod(time.sleep)

  def listen(self, path: Path) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    path.unlink(missing_ok=True)
    with _closed_on_error() as listener:
      listener.bind(str(path))
      listener.listen(1024)
    return listener

  def connect(self, path: Path) -> socket.socket:
    """Returns a connected socket. Raises OSError."""
    with _closed_on_error() as sock:
      sock.settimeout(_PATIENCE)
      sock.connect(str(path))
    return sock


@contextlib.contextmanager
def _closed_on_error():
  sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
  try:
    yield sock
  except OSError:
    sock.close()
    raise


UNIX = UnixNetwork()


class _Connection:
  """A socket, and the beginning of a frame that is not whole yet."""

  def __init__(self, sock: Any):
    self.sock = sock
    self._rest = b""

  def read(self) -> list[Frame]:
    """Returns the frames that have come. Raises EOFError at the end, ValueError
    for other bytes."""
    try:
      data = self.sock.recv(64 * frames.SIZE)
    except BlockingIOError:
      return []
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


class _Waker:
  """Ends a `select` that is waiting; may be called from a signal handler."""

  def __init__(self, network: UnixNetwork, selector: Any):
    self._read, self._write = network.pair()
    self._read.setblocking(False)
    self._write.setblocking(False)
    selector.register(self._read, selectors.EVENT_READ, self)

  def wake(self) -> None:
    with contextlib.suppress(OSError):
      self._write.send(b"x")

  def clear(self) -> None:
    with contextlib.suppress(OSError):
      self._read.recv(64)

  def close(self) -> None:
    self._read.close()
    self._write.close()


class SocketLink:
  """A worker's way to the shards; see `base.WorkerLink`."""

  def __init__(self, paths: list[Path], network: UnixNetwork = UNIX):
    """Connects to no shard yet: `connect` does."""
    self._paths, self._network = paths, network
    self._ways: list[_Connection | None] = [None] * len(paths)
    self._selector = network.selector()
    self._inbox: list[tuple[int, Frame]] = []
    self._waker = _Waker(network, self._selector)
    self.wake = self._waker.wake

  def send(self, shard: int, frame: Frame) -> None:
    """See `base.WorkerLink`."""
    way = self._ways[shard]
    if way is None:
      raise Disconnected(shard)
    try:
      way.sock.sendall(frames.pack(frame))
    except OSError as error:
      self._drop(shard)
      raise Disconnected(shard) from error

  def receive(self, seconds: float | None) -> tuple[int, Frame] | None:
    """See `base.WorkerLink`."""
    if self._inbox:
      return self._inbox.pop(0)
    if None in self._ways:  # `send` noticed it, and may not have raised
      raise Disconnected(self._ways.index(None))
    for key, _ in self._selector.select(seconds):
      if key.data is self._waker:
        self._waker.clear()
        continue
      shard = key.data
      try:
        self._inbox += [(shard, frame) for frame in self._ways[shard].read()]
      except (EOFError, ValueError):
        self._drop(shard)
        raise Disconnected(shard) from None
    return self._inbox.pop(0) if self._inbox else None

  def connect(self, shard: int) -> bool:
    """See `base.WorkerLink`."""
    self._drop(shard)
    try:
      sock = self._network.connect(self._paths[shard])
    except OSError:
      self._network.sleep(_PAUSE)
      return False
    self._ways[shard] = _Connection(sock)
    self._selector.register(sock, selectors.EVENT_READ, shard)
    return True

  def close(self) -> None:
    """Closes all connections: the worker has left all shards."""
    for shard in range(len(self._ways)):
      self._drop(shard)
    self._waker.close()
    self._selector.close()

  def _drop(self, shard):
    way = self._ways[shard]
    if way is not None:
      self._selector.unregister(way.sock)
      way.sock.close()
      self._ways[shard] = None
    self._inbox = [item for item in self._inbox if item[0] != shard]


class _Peer(_Connection):
  """A shard's connection to a worker or another shard."""

  def __init__(self, sock: Any, waiting: dict["_Peer", None]):
    super().__init__(sock)
    sock.setblocking(False)
    self.speaker: tuple[str, int] | None = None  # its sender, after a frame
    self._waiting = waiting  # peers that have something to be sent
    self._out = bytearray()
    self.reads = True  # it reads the bytes sent to it

  def send(self, frame: Frame) -> None:
    """Sends a frame with the next `flush`: an answer is often two frames.
    Frames to a closed connection are dropped."""
    if self.sock.fileno() < 0:
      return
    self._out += frames.pack(frame)
    self._waiting[self] = None

  def flush(self) -> bool:
    """Sends the frames so far; False if the peer must read before there is
    room. A closed connection is noticed elsewhere. Raises EOFError if it reads
    nothing."""
    try:
      sent = self.sock.send(self._out)
    except BlockingIOError:
      sent = 0
    except OSError:
      sent = len(self._out)
    del self._out[:sent]
    if len(self._out) > _MOST_UNREAD:
      raise EOFError
    return not self._out


Calls = queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]]


class ShardServer:
  """Feeds a Shard with calls, and with frames from its sockets, all in the
  thread of `serve`."""

  def __init__(
    self,
    shard: Shard,
    path: Path,
    *,
    clock: Callable[[], float],
    lead: Path | None = None,
    network: UnixNetwork = UNIX,
  ):
    """Listens at a path, in a folder that its owner alone can read, or raises
    ValueError; a follower in a consistent run also connects to the lead's
    socket. The clock counts seconds since the run began."""
    self.shard, self._clock, self._lead_path = shard, clock, lead
    self._calls: Calls = queue.SimpleQueue()
    self.ended = threading.Event()  # `serve` has ended
    self._over = False  # `serve` is to return
    self._network, self._selector = network, network.selector()
    self._waker = _Waker(network, self._selector)
    try:
      self._listener = network.listen(path)
    except OSError as error:
      raise ValueError(
        f"cannot listen at {path} ({error}); a socket's path has at most 107"
        " characters: use a folder with a shorter path"
      ) from error
    self._listener.setblocking(False)
    self._listens = False  # for connections, as far as there is room for them
    self._listen()
    self._lead: _Peer | None = None
    self._followers: dict[int, _Peer] = {}  # by shard
    self._waiting: dict[_Peer, None] = {}  # in their order

  def submit(self, call: Callable[[Shard], Any]) -> Future[Any]:
    """Calls something with the shard, in the serving thread. The future raises
    Disconnected if `serve` has ended, or ends before."""
    answer: Future[Any] = Future()
    self._calls.put((call, answer))
    self._waker.wake()
    if self.ended.is_set():
      self._refuse_calls()
    return answer

  def end(self) -> None:
    """Makes `serve` return; may be called by any thread."""
    self._over = True
    self._waker.wake()

  def serve(self) -> None:
    """Serves until `end`."""
    try:
      self._serve()
    finally:
      self.ended.set()
      self._refuse_calls()
      self._close()

  def _serve(self):
    ticked = self._clock()
    while not self._over:
      self._follow_lead()
      self._receive_frames(_TICK)
      while not self._calls.empty():
        self._make(*self._calls.get())
      now = self._clock()
      if now - ticked >= _TICK:
        ticked = now
        self._listen()
        self.shard.tick(now)
      self._flush()

  def _make(self, call, answer):
    """Makes a call; its error is the caller's."""
    try:
      answer.set_result(call(self.shard))
    except Exception as error:
      answer.set_exception(error)
    except BaseException:
      answer.set_exception(Disconnected(self.shard.index))
      raise

  def _refuse_calls(self):
    with contextlib.suppress(queue.Empty):
      while True:
        _, answer = self._calls.get_nowait()
        answer.set_exception(Disconnected(self.shard.index))

  def _close(self):
    for key in list(self._selector.get_map().values()):
      if key.data is not self._waker:
        key.fileobj.close()
    self._listener.close()
    self._waker.close()
    self._selector.close()

  def _follow_lead(self):
    if self._lead_path and self._lead is None:
      # While it is being replaced, the next round tries again.
      with contextlib.suppress(OSError):
        self._lead = self._add_peer(self._network.connect(self._lead_path))
        self.shard.role.follow(self._lead.send)

  def _receive_frames(self, seconds):
    """Waits for frames, not longer than that, and handles them."""
    for key, events in self._selector.select(seconds):
      if key.data is self._waker:
        self._waker.clear()
      elif key.data is self:
        self._accept()
      else:
        if events & selectors.EVENT_WRITE:
          self._waiting[key.data] = None
        if events & selectors.EVENT_READ:
          self._read(key.data)

  def _listen(self):
    if not self._listens:
      self._selector.register(self._listener, selectors.EVENT_READ, self)
    self._listens = True

  def _accept(self):
    try:
      sock, _ = self._listener.accept()
    except OSError as error:
      if error.errno in _NO_ROOM:  # until the next tick
        self._selector.unregister(self._listener)
        self._listens = False
      return  # or the peer has disconnected again
    self._add_peer(sock)

  def _add_peer(self, sock):
    peer = _Peer(sock, self._waiting)
    self._selector.register(sock, selectors.EVENT_READ, peer)
    return peer

  def _read(self, peer):
    try:
      for frame in peer.read():
        if peer is not self._lead:
          self._identify(peer, frame)
        self.shard.handle(frame, peer.send, self._clock())
    except (EOFError, frames.BadFrame):
      self._drop(peer)

  def _identify(self, peer, frame):
    """One connection speaks for one worker or follower. For a follower no other
    does while its own is open: one that was cut off tries again until this end
    has read that."""
    peer.speaker = frames.speaker(frame, peer.speaker)
    if (
      frame.kind == frames.FOLLOW
      and self._followers.setdefault(frame.worker, peer) is not peer
    ):
      raise frames.BadFrame(f"shard {frame.worker} is connected: {frame}")

  def _flush(self):
    """Sends waiting frames, and the rest once their peer reads."""
    while self._waiting:
      peer, _ = self._waiting.popitem()
      if peer.sock.fileno() < 0:  # it was dropped
        continue
      try:
        done = peer.flush()
      except EOFError:
        self._drop(peer)
        continue
      if done != peer.reads:
        peer.reads = done
        events = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
        self._selector.modify(peer.sock, events, peer)

  def _drop(self, peer):
    self._selector.unregister(peer.sock)
    peer.sock.close()
    kind, number = peer.speaker or ("", -1)
    if peer is self._lead:
      self._lead = None
      self._network.sleep(_PAUSE)  # it may refuse another for a moment
    elif kind == "worker":
      self.shard.disconnect(number, self._clock(), peer.send)
    elif self._followers.get(number) is peer:
      del self._followers[number]
