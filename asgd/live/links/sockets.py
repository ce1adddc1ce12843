"""Frames between processes of one machine, or threads: Unix sockets.

A socket's folder is readable by its owner alone, and nothing listens on a
network. Frames have one size and are data only. When a process is killed the
kernel closes its sockets, so the other side notices at once. A peer that sends
an impossible frame, or reads nothing, loses its connection; the connections of
other peers stay open.

`SocketLink` is a worker's end, `ShardServer` a shard's end. A simulated world
replaces `UnixNetwork`.
"""

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard

_PAUSE = 0.05  # seconds between two tries to connect
_TICK = 0.1  # seconds between two checks of the deadlines
_PATIENCE = 60.0  # seconds that a worker's `send` waits for the shard to read
_MAX_UNREAD = 2**20  # bytes that a peer may leave unread
# Errors of `accept` that cease once other connections are closed.
_NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class UnixNetwork:
  """Unix sockets of the kernel. A simulation has a class with these methods."""

  pair = staticmethod(socket.socketpair)  # two sockets, connected to each other
  selector = selectors.DefaultSelector
  sleep = staticmethod(time.sleep)

  def listen(self, path: Path) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    path.unlink(missing_ok=True)  # a killed predecessor leaves it behind
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
def _closed_on_error() -> Iterator[socket.socket]:
  """Opens a socket, and closes it if the block raises OSError."""
  sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
  try:
    yield sock
  except OSError:
    sock.close()
    raise


UNIX = UnixNetwork()


class _Connection:
  """A socket from which frames are read."""

  def __init__(self, sock: Any):
    self.sock = sock
    # The first bytes of a frame that has not arrived completely: a stream
    # socket may cut a frame anywhere.
    self._incomplete = b""

  def read(self) -> list[Frame]:
    """Returns the frames that have arrived. Raises EOFError if the connection
    is closed, ValueError for bytes that are not a frame."""
    try:
      data = self.sock.recv(64 * frames.SIZE)
    except BlockingIOError:
      return []
    except OSError as error:
      raise EOFError from error
    if not data:
      raise EOFError
    data = self._incomplete + data
    end = len(data) - len(data) % frames.SIZE  # of the last complete frame
    self._incomplete = data[end:]
    return [
      frames.unpack(data[i : i + frames.SIZE])
      for i in range(0, end, frames.SIZE)
    ]


class _Waker:
  """Ends a waiting `select` by a byte, sent through a pair of sockets."""

  def __init__(self, network: UnixNetwork, selector: Any):
    self._read, self._write = network.pair()
    self._read.setblocking(False)
    self._write.setblocking(False)
    selector.register(self._read, selectors.EVENT_READ, self)

  def wake(self) -> None:
    """Ends the present `select`, or else the next one; a signal handler may
    call it."""
    with contextlib.suppress(OSError):  # closed; or full of earlier wakes
      self._write.send(b"x")

  def clear(self) -> None:
    """Reads and drops the bytes of earlier calls of `wake`."""
    with contextlib.suppress(OSError):
      self._read.recv(64)

  def close(self) -> None:
    self._read.close()
    self._write.close()


class SocketLink:
  """The connections of a worker to the shards; see `base.WorkerLink`."""

  def __init__(self, paths: list[Path], network: UnixNetwork = UNIX):
    """Connects to no shard yet: `connect` does. `paths` are the sockets of
    shards 0, 1, ..."""
    self._paths, self._network = paths, network
    self._connections: list[_Connection | None] = [None] * len(paths)
    self._selector = network.selector()
    self._inbox: list[tuple[int, Frame]] = []
    self._waker = _Waker(network, self._selector)
    self.wake = self._waker.wake

  def send(self, shard: int, frame: Frame) -> None:
    """See `base.WorkerLink`."""
    connection = self._connections[shard]
    if connection is None:
      raise Disconnected(shard)
    try:
      connection.sock.sendall(frames.pack(frame))
    except OSError as error:
      self._drop(shard)
      raise Disconnected(shard) from error

  def receive(self, seconds: float | None) -> tuple[int, Frame] | None:
    """See `base.WorkerLink`."""
    if self._inbox:
      return self._inbox.pop(0)
    if None in self._connections:
      # The caller of `send` may have ignored its error.
      raise Disconnected(self._connections.index(None))
    for key, _ in self._selector.select(seconds):
      if key.data is self._waker:
        self._waker.clear()
        continue
      shard, connection = key.data
      try:
        self._inbox += [(shard, frame) for frame in connection.read()]
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
    self._connections[shard] = connection = _Connection(sock)
    self._selector.register(sock, selectors.EVENT_READ, (shard, connection))
    return True

  def close(self) -> None:
    """Closes all connections: the worker has left all shards."""
    for shard in range(len(self._connections)):
      self._drop(shard)
    self._waker.close()
    self._selector.close()

  def _drop(self, shard: int) -> None:
    """Closes the connection to a shard, if there is one."""
    connection = self._connections[shard]
    if connection is not None:
      self._selector.unregister(connection.sock)
      connection.sock.close()
      self._connections[shard] = None
    # Over the next connection the shard resends the frames that still count.
    self._inbox = [item for item in self._inbox if item[0] != shard]


class _Peer(_Connection):
  """A shard's connection to a worker or another shard."""

  def __init__(self, sock: Any, unsent_peers: dict["_Peer", None]):
    super().__init__(sock)
    # Non-blocking: the serving thread must never wait for one peer.
    sock.setblocking(False)
    # ("worker" or "shard", index), known from the first frame on.
    self.sender: tuple[str, int] | None = None
    # The keys are the peers with unsent frames; all peers share the dict.
    self._unsent_peers = unsent_peers
    self._unsent = bytearray()  # bytes that the socket has not accepted
    self.has_room = True  # the socket accepted all bytes of the last `flush`

  def send(self, frame: Frame) -> None:
    """Queues a frame for the next `flush`: an answer is often two frames. Drops
    a frame to a closed connection."""
    if self.sock.fileno() < 0:
      return
    self._unsent += frames.pack(frame)
    self._unsent_peers[self] = None

  def flush(self) -> bool:
    """Sends the queued frames. Returns False if the socket has no room for the
    rest until the peer reads. Raises EOFError if the peer leaves too much
    unread."""
    try:
      n_sent = self.sock.send(self._unsent)
    except BlockingIOError:
      n_sent = 0
    except OSError:  # `read` notices the closed connection, and reports it
      n_sent = len(self._unsent)
    del self._unsent[:n_sent]
    if len(self._unsent) > _MAX_UNREAD:
      raise EOFError
    return not self._unsent


# An entry: (call, the Future of its result).
CallQueue = queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]]


class ShardServer:
  """Passes frames from sockets, and calls of other threads, to a Shard, all in
  the thread that runs `serve`.

  Each round of `serve`: [1] connect to the lead, if this is a follower. [2]
  Handle the frames that arrived. [3] Make the calls of other threads. [4] Tick,
  ten times a second. [5] Send the answers.
  """

  def __init__(
    self,
    shard: Shard,
    path: Path,
    *,
    clock: Callable[[], float],
    lead: Path | None = None,
    network: UnixNetwork = UNIX,
  ):
    """Listens at a path, in a folder that its owner alone can read. Raises
    ValueError if it cannot. `lead` is the lead's socket, for a follower in a
    consistent run. The clock counts seconds since the run began."""
    self.shard, self._clock, self._lead_path = shard, clock, lead
    self._calls: CallQueue = queue.SimpleQueue()
    self.ended = threading.Event()  # `serve` has ended; its sockets are closed
    self._must_end = False  # `serve` must return
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
    self._is_listening = False  # False while there is no room for a connection
    self._resume_listening()
    self._lead: _Peer | None = None
    self._followers: dict[int, _Peer] = {}  # by shard
    # The keys are the peers with unsent frames, in order.
    self._unsent_peers: dict[_Peer, None] = {}

  def submit(self, call: Callable[[Shard], Any]) -> Future[Any]:
    """Calls a function with the shard, in the serving thread. The future raises
    Disconnected if `serve` has ended, or ends before the call."""
    answer: Future[Any] = Future()
    self._calls.put((call, answer))
    self._waker.wake()
    # Tested after the `put`, because `serve` may end just before the `put`.
    if self.ended.is_set():
      self._refuse_calls()
    return answer

  def end(self) -> None:
    """Makes `serve` return; may be called by any thread."""
    self._must_end = True
    self._waker.wake()

  def serve(self) -> None:
    """Serves until `end`."""
    try:
      self._serve()
    finally:
      try:
        self._close()
      finally:
        self.ended.set()
        self._refuse_calls()

  def _serve(self) -> None:
    """Repeats the steps [1] to [5] of the class."""
    last_tick = self._clock()
    while not self._must_end:
      self._follow_lead()  # [1]
      self._receive_frames(_TICK)  # [2]
      while not self._calls.empty():  # [3]
        self._make_call(*self._calls.get())
      now = self._clock()
      if now - last_tick >= _TICK:  # [4]
        last_tick = now
        self._resume_listening()
        self.shard.tick(now)
      self._flush()  # [5]

  def _make_call(
    self, call: Callable[[Any], Any], answer: Future[Any]
  ) -> None:
    """Makes a call. `answer` gets the result, or the error of the call."""
    try:
      answer.set_result(call(self.shard))
    except Exception as error:
      answer.set_exception(error)
    except BaseException:  # a kill of this thread, which ends the shard, too
      answer.set_exception(Disconnected(self.shard.index))
      raise

  def _refuse_calls(self) -> None:
    """Sets Disconnected as the error of all queued calls."""
    with contextlib.suppress(queue.Empty):
      while True:
        _, answer = self._calls.get_nowait()
        answer.set_exception(Disconnected(self.shard.index))

  def _close(self) -> None:
    """Closes all sockets: workers and other shards notice at once."""
    for key in list(self._selector.get_map().values()):
      if isinstance(key.data, _Peer):
        key.data.sock.close()
    self._listener.close()
    self._waker.close()
    self._selector.close()

  def _follow_lead(self) -> None:
    """Connects a follower to the lead, unless it is connected."""
    if self._lead_path and self._lead is None:
      # While the lead is being replaced, the next round tries again.
      with contextlib.suppress(OSError):
        self._lead = self._add_peer(self._network.connect(self._lead_path))
        self.shard.role.follow(self._lead.send)

  def _receive_frames(self, seconds: float) -> None:
    """Waits for frames, for `seconds` at most, and handles them."""
    # `key.data` is the waker, a peer, or, for the listener, this server.
    for key, events in self._selector.select(seconds):
      if key.data is self._waker:
        self._waker.clear()
      elif key.data is self:
        self._accept()
      else:
        if events & selectors.EVENT_WRITE:  # there is room again
          self._unsent_peers[key.data] = None
        if events & selectors.EVENT_READ:
          self._read(key.data)

  def _resume_listening(self) -> None:
    """Accepts connections again, after there was no room for one."""
    if not self._is_listening:
      self._selector.register(self._listener, selectors.EVENT_READ, self)
    self._is_listening = True

  def _accept(self) -> None:
    """Accepts a connection, or stops listening until the next tick."""
    try:
      sock, _ = self._listener.accept()
    except OSError as error:
      # The listener stays readable, so each `select` would return at once.
      if error.errno in _NO_ROOM:
        self._selector.unregister(self._listener)
        self._is_listening = False
      return  # after another error: the peer has disconnected again
    self._add_peer(sock)

  def _add_peer(self, sock: Any) -> _Peer:
    peer = _Peer(sock, self._unsent_peers)
    self._selector.register(sock, selectors.EVENT_READ, peer)
    return peer

  def _read(self, peer: _Peer) -> None:
    """Handles the frames of a peer. A bad frame ends the peer's connection."""
    try:
      for frame in peer.read():
        if peer is not self._lead:  # the lead sends frames about workers
          self._check_sender(peer, frame)
        self.shard.handle(frame, peer.send, self._clock())
    except (EOFError, frames.BadFrame):
      self._drop(peer)

  def _check_sender(self, peer: _Peer, frame: Frame) -> None:
    """Raises BadFrame if a connection sends frames of two senders, or if the
    sender is a follower that has another connection.

    A follower that lost its connection tries again until this shard has noticed
    the loss.
    """
    peer.sender = frames.sender_of(frame, peer.sender)
    if (
      frame.kind == frames.FOLLOW
      and self._followers.setdefault(frame.worker, peer) is not peer
    ):
      raise frames.BadFrame(f"shard {frame.worker} is connected: {frame}")

  def _flush(self) -> None:
    """Sends the queued frames, as far as each socket has room. The remaining
    bytes follow once the peer reads."""
    while self._unsent_peers:
      peer, _ = self._unsent_peers.popitem()
      if peer.sock.fileno() < 0:  # it was dropped
        continue
      try:
        has_room = peer.flush()
      except EOFError:
        self._drop(peer)
        continue
      if has_room != peer.has_room:  # `modify` is a system call: only on change
        peer.has_room = has_room
        write_event = 0 if has_room else selectors.EVENT_WRITE
        self._selector.modify(
          peer.sock, selectors.EVENT_READ | write_event, peer
        )

  def _drop(self, peer: _Peer) -> None:
    """Closes a peer's connection. If the peer is a worker, the shard ends the
    worker's tickets."""
    self._selector.unregister(peer.sock)
    peer.sock.close()
    kind, index = peer.sender or ("", -1)
    if peer is self._lead:
      self._lead = None
      # The lead refuses a second connection until it has noticed the loss.
      self._network.sleep(_PAUSE)
    elif kind == "worker":
      self.shard.disconnect(index, self._clock(), peer.send)
    elif self._followers.get(index) is peer:
      del self._followers[index]
