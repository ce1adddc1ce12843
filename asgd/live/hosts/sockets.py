"""Calls of a host from other processes of its machine: Unix sockets.

A call of an actor of Ray passes several threads of both processes. A call by
socket runs in the thread that reads it. A connection carries one call at a
time, so that a late result, or one that no caller fetches, does not block other
calls. Objects are pickled: a socket's folder must be readable by its owner
alone.
"""

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from asgd.live.failures import process_failure
from asgd.live.faults import Killed
from asgd.live.hosts.base import Call, Host, HostExited
from asgd.live.hosts.threads import ThreadHost

_WAITING = 128  # connections that wait to be accepted
_SECONDS = 1.0  # to end the thread that accepts
_RETRY_SECONDS = 0.05  # until `accept` is retried after an error


class HostServer:
  """Answers calls of a host, with one thread for each connection."""

  def __init__(self, host: ThreadHost, path: Path):
    """Listens at a path. Raises OSError, for example for a path of more than
    107 characters."""
    self._host, self._path = host, path
    path.unlink(missing_ok=True)
    self._listener = Listener(str(path), "AF_UNIX", backlog=_WAITING)
    self._closed = threading.Event()
    self._connections: set[Connection] = set()
    name = f"{path.name}-accept"
    self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
    self._thread.start()

  def _accept(self) -> None:
    """Starts a thread for each connection."""
    while not self._closed.is_set():
      try:
        connection = self._listener.accept()
      except OSError:  # the caller has left, or no descriptor is free
        self._closed.wait(_RETRY_SECONDS)
        continue
      self._connections.add(connection)
      threading.Thread(
        target=self._serve, args=(connection,), daemon=True
      ).start()

  def _serve(self, connection: Connection) -> None:
    """Answers the calls of one connection until it is closed."""
    # Bytes that are no call end their connection and disturb no other one.
    with contextlib.suppress(Exception, Killed), connection:
      while True:
        method, args = connection.recv()
        answer = self._answer(method, args)
        try:
          connection.send(answer)
        except OSError:
          raise
        except Exception as error:  # it cannot be pickled
          connection.send((None, f"{type(error).__name__}: {error}"))
    self._connections.discard(connection)

  def _answer(self, method: str, args: Sequence[Any]) -> tuple[Any, Any]:
    """Calls the method; returns (result, None) or (None, error)."""
    try:
      return self._host.do(method, *args), None
    except HostExited as error:
      return None, error
    except Exception as error:
      return None, "".join(traceback.format_exception(error))

  def close(self) -> None:
    """Ends all connections; waiting callers raise HostExited."""
    if self._closed.is_set():
      self._thread.join(_SECONDS)  # another thread may be closing the server
      return
    self._closed.set()
    with contextlib.suppress(OSError):  # this connection wakes `_accept`
      Client(str(self._path), "AF_UNIX").close()
      # If the file belongs to another server by now, `_accept` waits until the
      # process ends.
      self._thread.join(_SECONDS)
    with contextlib.suppress(OSError):  # the file was removed
      self._listener.close()
    # `shutdown` ends a `recv` of another thread; `close` would not.
    for connection in [*self._connections]:
      with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(connection.fileno())) as sock,
      ):
        sock.shutdown(socket.SHUT_RDWR)


class SocketCall(Call):
  """An open call of a connection."""

  def __init__(self, host: "SocketHost", connection: Connection | None):
    self._host, self._connection = host, connection

  def done(self) -> bool:
    """See the base."""
    try:
      return self._connection is None or self._connection.poll(0)
    except OSError:
      return True

  def result(self) -> Any:
    """See the base; may be called once. An error of the method that the user
    can repair is raised with one line."""
    connection, self._connection = self._connection, None
    try:
      if connection is None:
        raise EOFError
      value, error = connection.recv()
    except (EOFError, OSError):
      raise HostExited(self._host.kind, self._host.index) from None
    self._host.free.append(connection)
    if error is None:
      return value
    if isinstance(error, HostExited):
      raise error
    text = f"{self._host.kind} {self._host.index} failed"
    raise process_failure(text, RuntimeError(error))


class SocketHost(Host):
  """A handle of a host that listens at a socket, for use by one thread."""

  def __init__(self, kind: str, index: int, path: Path):
    """Stores the path; the first call connects."""
    self.kind, self.index, self._path = kind, index, path
    self.free: list[Connection] = []  # connections without a call

  def call(self, method: str, *args: Any) -> SocketCall:
    """See the base."""
    try:
      if self.free:
        connection = self.free.pop()
      else:
        connection = Client(str(self._path), "AF_UNIX")
      connection.send((method, args))
    except OSError:
      return SocketCall(self, None)
    return SocketCall(self, connection)
