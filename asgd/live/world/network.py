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
from asgd.live.world.injections import Faults
from asgd.live.world.scheduler import Process, Scheduler

_ROOM = 2**12  # bytes that a socket holds for its reader
# Frames that are lost or held back, though a stream loses nothing but its end,
# are sent again; more of them may be sent twice.
_AGAIN = frames.PUSH, frames.ACK
_SPOILED = {
  "lose": _AGAIN,
  "reorder": _AGAIN,
  "double": (
    *(*_AGAIN, frames.HELLO, frames.WELCOME, frames.FETCH, frames.TICKET),
    *(frames.FOLLOW, frames.PREPARED, frames.ASKED),
  ),
}


class Socket:
  """One end of a connection, or a listener."""

  def __init__(self, network: "SimulatedNetwork", owner: Process | None):
    self.network, self.owner = network, owner
    if owner:
      owner.at_end.append(self.close)
    self.peer: Socket | None = None
    self.data = bytearray()  # that has come
    self.backlog: list[Socket] = []  # of a listener
    self.closed = self.broken = False

  def setblocking(self, blocking: bool) -> None:
    """Does nothing: of all methods only `sendall` ever blocks."""

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
    return self.at_end or len(self.peer.data) < _ROOM

  def _check(self):
    if self.closed or self.broken:
      raise OSError(errno.ECONNRESET, "cut")

  def send(self, data: bytes) -> int:
    """Sends what there is room for."""
    self.network.scheduler.touch()
    self._check()
    if self.peer is None or self.peer.closed:
      raise OSError(errno.EPIPE, "the other end is closed")
    if not self.writable:
      raise BlockingIOError
    part = bytes(data[: _ROOM - len(self.peer.data)])
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
    self._check()
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
    changes = self._network.changes
    if self._idle != changes and not self._events():
      self._idle = changes
    return self._idle != changes

  def _events(self):
    out = []
    for sock, key in self._keys.items():
      ready = 0
      if key.events & selectors.EVENT_READ and sock.readable:
        ready = selectors.EVENT_READ
      if key.events & selectors.EVENT_WRITE and sock.peer and sock.writable:
        ready |= selectors.EVENT_WRITE
      if ready:
        out.append((key, ready))
    return out

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

  def __init__(self, scheduler: Scheduler, faults: Faults):
    self.scheduler, self._faults = scheduler, faults
    self._listeners: dict[str, Socket] = {}
    self.sockets: list[Socket] = []  # that are connected
    self._late: dict[Socket, bytes] = {}  # frames that are held back
    self.changes = 0  # of what can be read or written, so far
    self.sleep = scheduler.sleep

  def listen(self, path: Path) -> Socket:
    """See `sockets.UnixNetwork`."""
    self._listeners[str(path)] = sock = Socket(self, self.scheduler.current)
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
    one, other = Socket(self, self.scheduler.current), Socket(self, owner)
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

  def tampered(self, sock: Socket, data: bytes) -> bytes:
    """Returns what arrives of what is sent."""
    late = self._late.pop(sock, b"")
    how = None if len(data) % frames.SIZE else self._fault(data)
    first, rest = data[: frames.SIZE], data[frames.SIZE :]
    if how == "double":
      return first + data + late
    if how == "reorder":
      self._late[sock] = first
    return data + late if how is None else rest + late

  def _fault(self, data):
    """Returns what happens to the first of some frames, None if nothing."""
    for how, kinds in _SPOILED.items():
      if not self._faults.next(how):
        continue
      if frames.unpack(data[: frames.SIZE]).kind in kinds:
        self._faults.take(how, self.scheduler.current.name)
        return how
    return None
