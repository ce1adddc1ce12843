"""Hosts that are called through sockets."""

import errno
import pickle
import socket
import struct
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asgd.live.append_only import FileGone
from asgd.live.faults import Killed
from asgd.live.hosts import HostExited, actors, sockets
from asgd.live.hosts.sockets import HostServer, SocketHost
from asgd.live.hosts.threads import ThreadHost, ThreadHosts
from asgd.safe_files import DiskFull


class OddError(Exception):
  """Cannot be unpickled."""

  def __init__(self, one, two):
    super().__init__(one + two)


class Rows:
  """Has an array, and answers that are put off."""

  def __init__(self, inside):
    self.inside, self.later, self.rows = inside, Future(), np.arange(6.0)

  def add(self, more):
    self.rows += more
    return self.rows

  def put_off(self):
    return self.later

  def do_it(self):
    self.later.set_result(b"late")

  def no_data(self):
    return lambda: self

  def fail(self):
    raise ValueError("not so")

  def fill(self):
    raise DiskFull(errno.ENOSPC, "No space left on device", "a.csv")

  def lose_file(self):
    raise FileGone("a.csv")

  def err(self):
    raise KeyError("ours")

  def err_oddly(self):
    raise OddError("a", "b")

  def other_is_gone(self):
    raise HostExited("shard", 7)

  def die(self):
    self.inside.kill()


@pytest.fixture
def folder():
  with tempfile.TemporaryDirectory() as folder:  # a path that is short
    yield Path(folder)


@pytest.fixture
def served(folder):

  def die():  # as when a process is killed
    server.close()
    raise Killed

  host = ThreadHost("shard", 3, Rows, time.monotonic, die)
  server = HostServer(host, folder / "served.sock")
  yield SocketHost("shard", 3, folder / "served.sock"), host
  host.end()
  host.thread.join()
  server.close()
  server.close()
  names = [thread.name for thread in threading.enumerate()]
  assert "served.sock-accept" not in names


def test_calls_come_to_what_calls_in_the_process_do(served):
  near, host = served
  answers = [near.call("add", np.float32(1.0)).result() for _ in range(3)]
  assert [answer[0] for answer in answers] == [1.0, 2.0, 3.0]
  assert answers[-1].tolist() == host.call("add", 0).result().tolist()
  assert len(near.idle_connections) == 1  # the calls share it


def test_an_answer_that_is_put_off_is_in_no_others_way(served):
  near, _ = served
  late = near.call("put_off")
  assert near.call("add", 1).result()[0] == 1.0
  assert not late.done()
  near.call("do_it").result()
  assert late.result() == b"late"
  assert len(near.idle_connections) == 2


FAILURES = [
  ("fail", ValueError, "^shard 3 failed: not so$"),
  ("fill", ValueError, "^shard 3 failed: cannot write a.csv"),
  ("lose_file", ValueError, "^shard 3 failed: a.csv is gone: it was deleted"),
  ("err", RuntimeError, "KeyError: 'ours'"),
  ("err_oddly", RuntimeError, "OddError: ab"),
  ("other_is_gone", HostExited, "shard 7 has exited"),
  ("nobody", RuntimeError, "no attribute 'nobody'"),
]


@pytest.mark.parametrize(
  ("method", "error", "says"),
  [*FAILURES, ("no_data", RuntimeError, "Can't pickle")],
)
def test_what_a_method_raises_is_told_and_ends_nothing(
  served, method, error, says
):
  near, _ = served
  with pytest.raises(error, match=says):
    near.call(method).result()
  assert near.call("add", 1).result()[0] == 1.0


@pytest.mark.parametrize(("method", "error", "says"), FAILURES)
def test_what_an_actor_raises_can_be_unpickled(
  folder, monkeypatch, method, error, says
):
  monkeypatch.setattr(actors, "prepare_process", lambda *args, **options: None)
  monkeypatch.setattr(actors, "node_id", lambda: "far")
  site = SimpleNamespace(memory=folder, machine="near", clock=time.monotonic)
  actor = actors.HostActor("shard", 3, site, 0.0, folder / "actor.sock")
  actor.make(Rows)
  with pytest.raises(error) as raised:
    actor.call(method, ())
  with pytest.raises(error, match=says):
    raise pickle.loads(pickle.dumps(raised.value))
  actor.end()
  actor._server.close()


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"GET / HTTP/1.0\r\n\r\n",
    struct.pack("!i", 5) + b"hello",
    struct.pack("!i", -7),
    struct.pack("!iQ", -1, 2**62),
    struct.pack("!i", 5) + pickle.dumps(3),
  ],
  ids=["nothing", "http", "no pickle", "negative", "huge", "no call"],
)
def test_what_is_no_call_disturbs_nobody(served, folder, data):
  near, _ = served
  with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(str(folder / "served.sock"))
    sock.sendall(data)
    assert near.call("add", 1).result()[0] == 1.0
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""  # it is ended
  assert near.call("add", 1).result()[0] == 2.0


def test_a_server_without_its_file_closes(folder):
  hosts = ThreadHosts(began=time.monotonic())
  server = HostServer(hosts.start("shard", 0, Rows), folder / "gone.sock")
  (folder / "gone.sock").unlink()
  server.close()
  hosts.close()


def test_a_server_that_closes_leaves_the_file_of_its_successor(folder):
  hosts = ThreadHosts(began=time.monotonic())
  path = folder / "taken.sock"
  former = HostServer(hosts.start("shard", 0, Rows), path)
  successor = HostServer(hosts.start("shard", 1, Rows), path)
  former.close()
  names = [thread.name for thread in threading.enumerate()]
  assert names.count("taken.sock-accept") == 1
  assert SocketHost("shard", 1, path).call("add", 1).result()[0] == 1.0
  successor.close()
  assert not path.exists()
  hosts.close()


def test_one_that_died_is_gone_and_no_other_is_taken_for_it(served, folder):
  near, _ = served
  waiting = near.call("put_off")
  near.call("add", 1).result()
  for call in (near.call("die"), waiting):
    with pytest.raises(HostExited, match="shard 3 has exited"):
      call.result()
  with pytest.raises(HostExited, match="shard 3 has exited"):
    near.call("add", 1).result()
  nobody = SocketHost("shard", 3, folder / "b.sock")
  call = nobody.call("add", 1)
  assert call.done()
  with pytest.raises(HostExited, match="shard 3 has exited"):
    call.result()


def test_who_waits_for_a_server_that_closes_hears_that_it_is_gone(folder):
  hosts = ThreadHosts(began=time.monotonic())
  server = HostServer(hosts.start("shard", 0, Rows), folder / "a.sock")
  near = SocketHost("shard", 0, folder / "a.sock")
  near.call("add", 1).result()
  waiting = near.call("put_off")
  server.close()
  with pytest.raises(HostExited):
    waiting.result()
  with pytest.raises(HostExited):
    near.call("add", 1).result()
  hosts.close()


def test_a_path_that_no_socket_can_have_is_told(folder):
  hosts = ThreadHosts(began=time.monotonic())
  with pytest.raises(OSError, match="too long"):
    HostServer(hosts.start("shard", 0, Rows), folder / ("a" * 120))
  hosts.close()


def test_a_listener_without_free_descriptors_waits_before_it_accepts_again(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(sockets, "_RETRY_SECONDS", 0.2)
  host = ThreadHost("shard", 0, lambda inside: [1], lambda: 0.0)
  server = sockets.HostServer(host, tmp_path / "a.sock")
  listening, tries = server._socket, []

  class Refusing:
    """Accepts at the third try only."""

    def accept(self):
      tries.append(None)
      if len(tries) < 3:
        raise OSError(errno.EMFILE, "too many open files")
      return listening.accept()

    def __getattr__(self, name):
      return getattr(listening, name)

  server._socket = Refusing()
  waits = []
  wait = server._closed.wait
  server._closed.wait = lambda seconds: (waits.append(seconds), wait(0.0))[1]
  calls = [
    sockets.SocketHost("shard", 0, tmp_path / "a.sock").call("index", 1)
    for _ in range(2)
  ]
  assert [call.result() for call in calls] == [0, 0]
  assert waits == [0.2, 0.2]
  server.close()
  host.end()
