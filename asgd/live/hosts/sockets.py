"""Unix sockets by which other processes of a machine call a host's methods.

A call of a Ray actor passes several threads of both processes. A call by
socket runs in the thread that reads the socket. Each open call has a separate
connection, so a late result, or one that the caller never fetches, blocks no
other call. Objects are pickled, and unpickling can run any code. So only the
owner may have access to the folder of a socket.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from asgd.live.failures import process_failure
from asgd.live.faults import Killed
from asgd.live.hosts.base import Call, Host, HostExited
from asgd.live.hosts.threads import ThreadHost

_BACKLOG = 128  # connections that wait to be accepted
_CLOSE_SECONDS = 1.0  # to end the thread that accepts
_RETRY_SECONDS = 0.05  # until `accept` is retried after an error


class HostServer:
  """Runs the calls of other processes at a host, and sends the results.

  Each connection has a thread.
  """

  def __init__(self, host: ThreadHost, path: Path):
    """Listens at a path. Raises OSError, for example for a path of more than
    107 characters."""
    self._host, self._path = host, path
    path.unlink(missing_ok=True)
    self._socket = socket.socket(socket.AF_UNIX)
    try:
      self._socket.bind(str(path))
    except OSError:
      self._socket.close()
      raise
    self._socket.listen(_BACKLOG)
    self._file = path.stat()  # identifies the file of this server
    self._closed = threading.Event()
    self._connections: set[Connection] = set()
    name = f"{path.name}-accept"
    self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
    self._thread.start()

  def _accept(self) -> None:
    """Starts a thread for each connection."""
    while not self._closed.is_set():
      try:
        accepted_socket, _ = self._socket.accept()
      except OSError:  # the caller has left, or no descriptor is free
        self._closed.wait(_RETRY_SECONDS)
        continue
      connection = Connection(accepted_socket.detach())
      self._connections.add(connection)
      threading.Thread(
        target=self._serve, args=(connection,), daemon=True
      ).start()

  def _serve(self, connection: Connection) -> None:
    """Answers the calls of one connection until it is closed."""
    # Invalid bytes close their connection only.
    with contextlib.suppress(Exception, Killed), connection:
      while True:
        method, args = connection.recv()
        answer = self._answer(method, args)
        try:
          connection.send(answer)
        except OSError:
          raise
        except Exception as error:  # the answer cannot be pickled
          connection.send((None, self._failure(error)))
    self._connections.discard(connection)

  def _answer(self, method: str, args: Sequence[Any]) -> tuple[Any, Any]:
    """Calls the method; returns (result, None) or (None, error)."""
    try:
      return self._host.call_here(method, *args), None
    except Exception as error:
      return None, self._failure(error)

  def _failure(self, error: Exception) -> Exception:
    """Returns the error that a caller raises; see `process_failure`."""
    text = f"{self._host.kind} {self._host.index} failed"
    return process_failure(text, error)

  def close(self) -> None:
    """Ends all connections; waiting callers raise HostExited."""
    if self._closed.is_set():
      self._thread.join(_CLOSE_SECONDS)  # another thread is closing the server
      return
    self._closed.set()
    self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
    self._thread.join(_CLOSE_SECONDS)
    self._socket.close()
    with contextlib.suppress(FileNotFoundError):
      # Another server may have taken over the path; its file stays.
      if os.path.samestat(self._file, self._path.stat()):
        self._path.unlink()
    # `shutdown` ends a `recv` of another thread; `close` would not.
    for connection in [*self._connections]:
      with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(connection.fileno())) as sock,
      ):
        sock.shutdown(socket.SHUT_RDWR)


class SocketCall(Call):
  """An open call over a connection, which is None if the call was not sent."""

  def __init__(self, host: "SocketHost", connection: Connection | None):
    self._host, self._connection = host, connection

  def done(self) -> bool:
    """See the base."""
    try:
      return self._connection is None or self._connection.poll(0)
    except OSError:
      return True

  def result(self) -> Any:
    """See the base; may be called once.

    A ValueError or OSError of the method becomes a ValueError of one line;
    another error becomes a RuntimeError with the traceback.
    """
    connection, self._connection = self._connection, None
    try:
      if connection is None:
        raise EOFError
      value, error = connection.recv()
    except (EOFError, OSError):
      raise HostExited(self._host.kind, self._host.index) from None
    self._host.idle_connections.append(connection)
    if error is not None:
      raise error
    return value


class SocketHost(Host):
  """A caller's handle of a host with a HostServer, for use by one thread."""

  def __init__(self, kind: str, index: int, path: Path):
    """Stores the path; the first call connects."""
    self.kind, self.index, self._path = kind, index, path
    self.idle_connections: list[Connection] = []  # without an open call

  def call(self, method: str, *args: Any) -> SocketCall:
    """See the base."""
    try:
      if self.idle_connections:
        connection = self.idle_connections.pop()
      else:
        connection = Client(str(self._path), "AF_UNIX")
      connection.send((method, args))
    except OSError:
      return SocketCall(self, None)
    return SocketCall(self, connection)
