"""Sockets of a simulated world; see `asgd.live.links.sockets.UnixNetwork`.

What is sent arrives at once and in order, as between processes of one machine;
a connection can be cut, and a message, or the answer to it, can be lost,
doubled or held back until after the next one.
"""

import errno
import selectors
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.world.scheduler import Process, Scheduler

_ROOM = 2**12  # bytes that a socket holds for its reader
# Frames that are lost or held back, though a stream loses nothing but its end:
# they are said again. And those that may be said twice.
_SPOILED = frames.PUSH, frames.ACK
_DOUBLED = (
  *(*_SPOILED, frames.HELLO, frames.WELCOME, frames.FETCH, frames.TICKET),
  *(frames.FOLLOW, frames.PREPARED, frames.ASKED),
)


class Socket:
  """One end of a connection, or a listener."""

  def __init__(self, network: "SimulatedNetwork", owner: Process | None):
    self.network, self.owner = network, owner
    self.peer: Socket | None = None
    self.data = bytearray()  # that has come
    self.backlog: list[Socket] = []  # of a listener
    self.closed = self.broken = False
    self.blocking = True

  def setblocking(self, blocking: bool) -> None:
    """See `socket.socket`; here nothing ever blocks but `sendall`."""
    self.blocking = blocking

  def fileno(self) -> int:
    """A number of its own; -1 once it is closed."""
    return -1 if self.closed else id(self)

  @property
  def readable(self) -> bool:
    """Whether `recv` or `accept` would return something."""
    return bool(self.data or self.backlog or self.at_end)

  @property
  def at_end(self) -> bool:
    """Whether nothing more can come."""
    return self.broken or (self.peer is not None and self.peer.closed)

  @property
  def writable(self) -> bool:
    """Whether `send` would take something."""
    return self.at_end or self._room > 0

  @property
  def _room(self):
    return _ROOM - len(self.peer.data)

  def _check(self):
    if self.closed or self.broken:
      raise OSError(errno.ECONNRESET, "cut")
    if self.peer is None or self.peer.closed:
      raise OSError(errno.EPIPE, "the other end is closed")

  def send(self, data: bytes) -> int:
    """Sends what there is room for."""
    self.network.scheduler.touch()
    self._check()
    if self._room <= 0:
      raise BlockingIOError
    part = bytes(data[: self._room])
    self.peer.data += self.network.tampered(self, part)
    self.network.changes += 1
    return len(part)

  def sendall(self, data: bytes) -> None:
    """Sends all, waiting for room."""
    rest = bytes(data)
    while rest:
      try:
        rest = rest[self.send(rest) :]
      except BlockingIOError:
        self.network.scheduler.wait(lambda: self.writable, None)

  def recv(self, size: int) -> bytes:
    """Returns what has come; nothing at the end of the connection."""
    self.network.scheduler.touch()
    if self.closed or self.broken:
      raise OSError(errno.ECONNRESET, "cut")
    if not self.data:
      if self.at_end:
        return b""
      raise BlockingIOError
    data = bytes(self.data[:size])
    del self.data[:size]
    self.network.changes += 1
    return data

  def accept(self) -> tuple["Socket", None]:
    """Returns a connection that waits."""
    if not self.backlog:
      raise BlockingIOError
    return self.backlog.pop(0), None

  def close(self) -> None:
    """Closes it: the other end reads what was sent, then the end."""
    self.closed = True
    self.network.changes += 1


class Selector:
  """Waits for sockets."""

  def __init__(self, network: "SimulatedNetwork"):
    self._network = network
    self._keys: dict[Socket, selectors.SelectorKey] = {}
    self._idle = -1  # the network's changes when none was ready

  def register(self, sock: Socket, events: int, data: Any = None) -> None:
    """Watches a socket."""
    self._keys[sock] = selectors.SelectorKey(sock, 0, events, data)
    self._idle = -1

  modify = register

  def unregister(self, sock: Socket) -> None:
    """Watches it no more."""
    del self._keys[sock]

  def get_map(self) -> dict[Socket, selectors.SelectorKey]:
    """Returns what is watched."""
    return dict(self._keys)

  def close(self) -> None:
    """Watches nothing any more."""
    self._keys.clear()

  def _is_ready(self):
    """Whether a socket is. It is asked at each turn, and looks again only when
    something has changed since none was: a third of a run's time."""
    if self._idle == self._network.changes:
      return False
    ready = bool(self._events())
    if not ready:
      self._idle = self._network.changes
    return ready

  def _events(self):
    return [
      (key, ready)
      for sock, key in self._keys.items()
      if (
        ready := key.events
        & (
          selectors.EVENT_READ * sock.readable
          | selectors.EVENT_WRITE * (sock.peer is not None and sock.writable)
        )
      )
    ]

  def select(self, seconds: float | None = None) -> list[tuple[Any, int]]:
    """Returns the (key, events) of sockets that are ready."""
    scheduler = self._network.scheduler
    if seconds is None or seconds > 0:
      scheduler.wait(self._is_ready, seconds)
    else:
      scheduler.touch()
    return self._events()


class SimulatedNetwork:
  """All sockets of a world."""

  def __init__(self, scheduler: Scheduler):
    self.scheduler = scheduler
    self._listeners: dict[str, Socket] = {}
    self.sockets: list[Socket] = []  # that are connected
    self._to_spoil: list[str] = []  # what happens to frames to come
    self._late: dict[Socket, bytes] = {}  # frames that are held back
    self.spoiled = 0
    self.changes = 0  # of what can be read or written, so far
    self.sleep = scheduler.sleep

  def _socket(self, owner):
    sock = Socket(self, owner)
    if owner:
      owner.at_end.append(sock.close)
    return sock

  def listen(self, path: Path) -> Socket:
    """See `sockets.UnixNetwork`."""
    sock = self._socket(self.scheduler.current)
    self._listeners[str(path)] = sock
    return sock

  def connect(self, path: Path) -> Socket:
    """See `sockets.UnixNetwork`."""
    self.scheduler.touch()
    listener = self._listeners.get(str(path))
    if listener is None or listener.closed:
      raise ConnectionRefusedError
    ours, theirs = self._pair(listener.owner)
    listener.backlog.append(theirs)
    self.changes += 1
    self.sockets += [ours, theirs]
    return ours

  def pair(self) -> tuple[Socket, Socket]:
    """See `sockets.UnixNetwork`."""
    return self._pair(self.scheduler.current)

  def _pair(self, owner):
    one, other = self._socket(self.scheduler.current), self._socket(owner)
    one.peer, other.peer = other, one
    return one, other

  def selector(self) -> Selector:
    """See `sockets.UnixNetwork`."""
    return Selector(self)

  def connections(self) -> list[Socket]:
    """Returns one end of each connection that is open."""
    self.sockets = [s for s in self.sockets if not s.closed and not s.at_end]
    return self.sockets[::2] or self.sockets

  def cut(self, sock: Socket) -> None:
    """Breaks a connection; what was on its way is lost."""
    for end in (sock, sock.peer):
      end.broken = True
      end.data.clear()
    self.changes += 1

  def spoil(self, how: str) -> None:
    """Loses, doubles or holds back ("lose", "double", "reorder") the next
    message or its answer."""
    self._to_spoil.append(how)

  def tampered(self, sock: Socket, data: bytes) -> bytes:
    """Returns what arrives of what is sent."""
    late = self._late.pop(sock, b"")
    if not self._to_spoil or len(data) % frames.SIZE:
      return data + late
    first, rest = data[: frames.SIZE], data[frames.SIZE :]
    doubles = self._to_spoil[0] == "double"
    if frames.unpack(first).kind not in (_DOUBLED if doubles else _SPOILED):
      return data + late
    how, self.spoiled = self._to_spoil.pop(0), self.spoiled + 1
    if how == "double":
      return first + data + late
    if how == "reorder":
      self._late[sock] = first
    return rest + late
