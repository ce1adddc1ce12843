"""Sockets of a simulated world; see `asgd.live.links.sockets.UnixNetwork`.

Sent bytes arrive at once and in order, as between processes of one machine. A
fault can cut a connection. It can also drop a frame, send it twice, or delay it
until after the next one.
"""

import errno
import selectors
from pathlib import Path
from typing import Any

from asgd.live import frames
from asgd.live.world.injections import Faults
from asgd.live.world.scheduler import Process, Scheduler

_BUFFER = 2**12  # bytes that a socket holds for its reader
# Fault -> kinds of frames that it applies to. A real stream socket drops no
# frame in its middle. So only frames that their sender retries can be lost or
# delayed, and only idempotent frames can be sent twice.
_RETRIED = frames.PUSH, frames.ACK
_FRAMES_OF_FAULT = {
  "lose": _RETRIED,
  "reorder": _RETRIED,
  "double": (
    *(*_RETRIED, frames.HELLO, frames.WELCOME, frames.FETCH, frames.TICKET),
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
    self.data = bytearray()  # bytes received, and not read yet
    self.backlog: list[Socket] = []  # of a listener: connections to accept
    self.closed = self.broken = False

  def setblocking(self, blocking: bool) -> None:
    """Does nothing: only `sendall` blocks, whatever is set here."""

  def fileno(self) -> int:
    """Returns a number that is unique to this socket; -1 once it is closed."""
    return -1 if self.closed else id(self)

  @property
  def readable(self) -> bool:
    """Whether `recv` or `accept` would return something."""
    return bool(self.data or self.backlog or self.is_at_end)

  @property
  def is_at_end(self) -> bool:
    """Whether no more bytes can arrive."""
    return self.broken or (self.peer is not None and self.peer.closed)

  @property
  def writable(self) -> bool:
    """Whether `send` would accept at least a byte, or raise."""
    if self.is_at_end or self.peer is None:
      return True
    return len(self.peer.data) < _BUFFER

  def _check(self) -> None:
    """Raises OSError if this end is closed, or its connection was cut."""
    if self.closed or self.broken:
      raise OSError(errno.ECONNRESET, "cut")

  def send(self, data: bytes) -> int:
    """Sends the bytes that fit the reader's buffer; returns their count."""
    self.network.scheduler.touch()
    self._check()
    if self.peer is None or self.peer.closed:
      raise OSError(errno.EPIPE, "the other end is closed")
    if not self.writable:
      raise BlockingIOError
    accepted = bytes(data[: _BUFFER - len(self.peer.data)])
    self.peer.data += self.network.apply_fault(self, accepted)
    self.network.changes += 1
    # The sender does not notice a fault that has dropped or doubled a frame.
    return len(accepted)

  def sendall(self, data: bytes) -> None:
    """Sends all bytes; waits while the reader's buffer is full."""
    unsent = bytes(data)
    while unsent:
      try:
        unsent = unsent[self.send(unsent) :]
      except BlockingIOError:
        self.network.scheduler.wait(lambda: self.writable, None)

  def recv(self, size: int) -> bytes:
    """Returns received bytes; b"" at the end of the connection."""
    self.network.scheduler.touch()
    self._check()
    if not self.data:
      if self.is_at_end:
        return b""
      raise BlockingIOError
    data = bytes(self.data[:size])
    del self.data[:size]
    self.network.changes += 1
    return data

  def accept(self) -> tuple["Socket", None]:
    """Returns the first connection of the backlog."""
    if not self.backlog:
      raise BlockingIOError
    return self.backlog.pop(0), None

  def close(self) -> None:
    """Closes this end. The other end reads the bytes sent, then the end."""
    self.closed = True
    self.network.changes += 1


class Selector:
  """Waits for sockets."""

  def __init__(self, network: "SimulatedNetwork"):
    self._network = network
    self._keys: dict[Socket, selectors.SelectorKey] = {}
    # `SimulatedNetwork.changes` when the last check found no ready socket; -1
    # if there was no such check.
    self._idle_at = -1

  def register(self, sock: Socket, events: int, data: Any = None) -> None:
    """Watches a socket."""
    self._keys[sock] = selectors.SelectorKey(sock, 0, events, data)
    self._idle_at = -1

  modify = register

  def unregister(self, sock: Socket) -> None:
    """Stops watching a socket."""
    del self._keys[sock]

  def get_map(self) -> dict[Socket, selectors.SelectorKey]:
    """Returns the watched sockets and their keys."""
    return dict(self._keys)

  def close(self) -> None:
    """Stops watching all sockets."""
    self._keys.clear()

  def _is_ready(self) -> bool:
    """Whether a watched socket is ready. The scheduler calls this at each turn,
    so the result False is cached until the network changes: this saves a third
    of a run's time."""
    changes = self._network.changes
    if self._idle_at != changes and not self._ready_keys():
      self._idle_at = changes
    return self._idle_at != changes

  def _ready_keys(self) -> list[tuple[selectors.SelectorKey, int]]:
    """Returns (key, ready events) of the sockets that are ready now."""
    keys = []
    for sock, key in self._keys.items():
      events = 0
      if key.events & selectors.EVENT_READ and sock.readable:
        events = selectors.EVENT_READ
      # A listener has no peer, and is never written to.
      if key.events & selectors.EVENT_WRITE and sock.peer and sock.writable:
        events |= selectors.EVENT_WRITE
      if events:
        keys.append((key, events))
    return keys

  def select(self, seconds: float | None = None) -> list[tuple[Any, int]]:
    """Waits until a socket is ready; returns (key, events) of ready ones."""
    scheduler = self._network.scheduler
    if seconds is None or seconds > 0:
      scheduler.wait(self._is_ready, seconds)
    else:
      scheduler.touch()
    return self._ready_keys()


class SimulatedNetwork:
  """All sockets of a world."""

  def __init__(self, scheduler: Scheduler, faults: Faults):
    self.scheduler, self._faults = scheduler, faults
    self._listeners: dict[str, Socket] = {}
    self.sockets: list[Socket] = []  # both ends of each connection, in pairs
    self._delayed: dict[Socket, bytes] = {}  # sender -> one frame
    self.changes = 0  # count of changes to readable or writable bytes
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
    client, server = self._pair(listener.owner)
    listener.backlog.append(server)
    self.changes += 1
    self.sockets += [client, server]
    return client

  def pair(self) -> tuple[Socket, Socket]:
    """See `sockets.UnixNetwork`."""
    return self._pair(self.scheduler.current)

  def _pair(self, owner: Process | None) -> tuple[Socket, Socket]:
    """Returns both ends of a new connection: the end of the calling process,
    and that of `owner`. An end is closed when its process ends."""
    near_end = Socket(self, self.scheduler.current)
    far_end = Socket(self, owner)
    near_end.peer, far_end.peer = far_end, near_end
    return near_end, far_end

  def selector(self) -> Selector:
    """See `sockets.UnixNetwork`."""
    return Selector(self)

  def connections(self) -> list[Socket]:
    """Returns one end of each open connection."""
    # If one end is closed, the other one `is_at_end`. So both leave the
    # list, which remains a list of pairs.
    self.sockets = [
      sock for sock in self.sockets if not sock.closed and not sock.is_at_end
    ]
    return self.sockets[::2] or self.sockets

  def cut(self, sock: Socket) -> None:
    """Breaks a connection; bytes that were not read yet are lost."""
    for end in filter(None, (sock, sock.peer)):
      end.broken = True
      end.data.clear()
    self.changes += 1

  def apply_fault(self, sock: Socket, data: bytes) -> bytes:
    """Returns the bytes that arrive when `data` is sent, after a fault."""
    delayed = self._delayed.pop(sock, b"")
    # Faults apply to frames, so bytes with an incomplete frame get none.
    fault = None if len(data) % frames.SIZE else self._fault(data)
    first_frame, later_frames = data[: frames.SIZE], data[frames.SIZE :]
    if fault == "double":
      return first_frame + data + delayed
    if fault == "reorder":
      self._delayed[sock] = first_frame
    return (data if fault is None else later_frames) + delayed

  def _fault(self, data: bytes) -> str | None:
    """Returns the kind of fault that applies to the first frame of `data`."""
    for fault, kinds in _FRAMES_OF_FAULT.items():
      if not self._faults.first_armed(fault):
        continue
      if frames.unpack(data[: frames.SIZE]).kind in kinds:
        self._faults.take(fault, self.scheduler.calling.name)
        return fault
    return None
