"""Ways between processes: one that breaks is noticed, whatever finds it out."""

import contextlib
import errno
import socket
import threading

import pytest

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.links.sockets import (
  _TICK,
  ShardServer,
  SocketLink,
  UnixNetwork,
  _Peer,
)
from asgd.live.setup import Setup
from asgd.orders.protocol import Rules

HELLO = Frame(frames.HELLO, 0, job=-1)


class Listener:
  """A shard's socket that is fed and killed by hand."""

  def __init__(self, path):
    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    self._socket.bind(str(path))
    self._socket.listen()

  def accept(self):
    return self._socket.accept()[0]

  def close(self):
    self._socket.close()


@pytest.fixture
def way(tmp_path):
  """A worker's link to two shards, and their ends of it."""
  paths = [tmp_path / f"{shard}.sock" for shard in range(2)]
  with contextlib.ExitStack() as stack:
    listeners = [
      stack.enter_context(contextlib.closing(Listener(path))) for path in paths
    ]
    link = stack.enter_context(contextlib.closing(SocketLink(paths)))
    assert link.connect(0) and link.connect(1)
    ends = [listener.accept() for listener in listeners]
    for end in ends:
      stack.callback(end.close)
    yield link, ends


def test_frames_come_whole_and_in_their_order(way):
  link, (first, second) = way
  link.send(0, HELLO)
  assert frames.unpack(first.recv(frames.SIZE)) == HELLO
  data = frames.pack(HELLO) + frames.pack(HELLO._replace(seq=1))
  second.sendall(data[:100])
  assert link.receive(5.0) == (1, HELLO)
  assert link.receive(0.0) is None
  second.sendall(data[100:])
  assert link.receive(5.0) == (1, HELLO._replace(seq=1))


@pytest.mark.parametrize("noticed_by", ["send", "receive"])
def test_a_shard_that_is_killed_is_missed_until_there_is_another(
  way, noticed_by
):
  """`send` may notice it where its worker waits for another shard, and goes on:
  then `receive` has no socket to wait for."""
  link, (first, second) = way
  second.sendall(frames.pack(HELLO))
  assert link.receive(5.0) == (1, HELLO)
  first.close()
  if noticed_by == "send":
    with pytest.raises(Disconnected):
      link.send(0, HELLO)
  for _ in range(2):
    with pytest.raises(Disconnected) as error:
      link.receive(5.0)
    assert error.value.shard == 0
  assert link.connect(0)
  assert link.receive(0.0) is None


def test_waking_ends_a_wait(way):
  link, _ = way
  waker = threading.Thread(target=link.wake)
  waker.start()
  assert link.receive(None) is None
  waker.join()


class FakeShard:
  """Answers HELLO, and takes what is well-formed for a run of three workers."""

  index = 0

  def __init__(self, shards=1):
    self.taken, self.left = [], []
    self._setup = Setup(Rules(), 3, 9, shards, consistent=shards > 1)

  def handle(self, frame, send, now):
    frames.check(frame, 0, self._setup)
    self.taken.append(frame)
    for _ in range(frame.version):
      send(Frame(frames.WELCOME, frame.worker))

  def tick(self, now):
    pass

  def disconnect(self, worker, now, send):
    self.left.append(worker)


@contextlib.contextmanager
def serving(path, shards=1, clock=lambda: 0.0, **options):
  shard = FakeShard(shards)
  server = ShardServer(shard, path, clock=clock, **options)
  thread = threading.Thread(target=server.serve)
  thread.start()
  try:
    yield shard, server
  finally:
    server.end()
    thread.join()


def answered(path, frame, count=1):
  """Whether a new peer that says a frame hears so many answers."""
  with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
    peer.connect(str(path))
    peer.sendall(frames.pack(frame))
    data = b""
    while len(data) < count * frames.SIZE:
      part = peer.recv(2**16)
      if not part:
        return False
      data += part
    return True


@pytest.mark.parametrize(
  "frame",
  [
    Frame(frames.HELLO, 5, job=-1),
    Frame(frames.HELLO, -1, job=-1),
    Frame(frames.PUSH, 0, seq=-1),
    Frame(frames.PUSH, 0, job=9, flag=1),
    Frame(frames.FOLLOW, 1),
    Frame(frames.ROW, 0),
    Frame(frames.TICKET, 0),
  ],
)
def test_a_peer_that_says_what_cannot_be_ends_its_own_connection(
  tmp_path, frame
):
  path = tmp_path / "0.sock"
  with serving(path) as (shard, _):
    assert not answered(path, frame)
    assert answered(path, HELLO._replace(version=1))
    assert [taken.kind for taken in shard.taken] == [frames.HELLO]


def test_what_is_no_frame_ends_its_own_connection(tmp_path):
  path = tmp_path / "0.sock"
  with serving(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
      peer.connect(str(path))
      peer.sendall(b"GET / HTTP/1.1\r\n" * 20)
      assert peer.recv(1) == b""
    assert answered(path, HELLO._replace(version=1))


def test_a_peer_that_reads_nothing_stops_nobody(tmp_path):
  path = tmp_path / "0.sock"
  many = 2**21 // frames.SIZE  # more than what may be left unread
  with serving(path) as (_, server):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
      peer.connect(str(path))
      peer.sendall(frames.pack(HELLO._replace(version=many)))
      assert answered(path, HELLO._replace(version=1))
      assert server.submit(lambda shard: shard.index).result() == 0
    # One that reads slowly gets all that fits.
    assert answered(path, HELLO._replace(version=8000), count=8000)


def test_a_connection_holds_one_place(tmp_path):
  """Or, when it breaks, only the last of them would be given up."""
  path = tmp_path / "0.sock"
  with serving(path) as (shard, server):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
      peer.connect(str(path))
      for worker in (0, 1):
        peer.sendall(frames.pack(HELLO._replace(worker=worker)))
      assert peer.recv(1) == b""
    assert server.submit(lambda shard: shard.left).result() == [0]
    assert [taken.worker for taken in shard.taken] == [0]


def test_a_follower_has_one_connection_and_opens_another_when_it_breaks(
  tmp_path,
):
  path, follow = tmp_path / "0.sock", Frame(frames.FOLLOW, 1, version=1)
  with serving(path, shards=2) as (shard, _):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
      first.connect(str(path))
      first.sendall(frames.pack(follow))
      assert first.recv(frames.SIZE)
      assert not answered(path, follow)  # a stranger
      assert answered(path, HELLO._replace(version=1))
      first.sendall(frames.pack(follow))
      assert first.recv(frames.SIZE)
    while not answered(path, follow):
      pass
    kinds = [taken.kind for taken in shard.taken]
    follows = 3 * [frames.FOLLOW]
    assert [kind for kind in kinds if kind != frames.HELLO] == follows


def test_nothing_is_kept_for_a_peer_that_is_gone():
  one, other = socket.socketpair()
  waiting = {}
  with one, other:
    peer = _Peer(one, waiting)
    peer.send(HELLO)
    assert list(waiting) == [peer]
    waiting.clear()
    one.close()
    peer.send(HELLO)
    assert not waiting


class FullListener:
  """A listener of a process that has no file descriptor left at first."""

  def __init__(self, listener):
    self._listener = listener
    self.asked = 0  # times

  def accept(self):
    self.asked += 1
    if self.asked == 1:
      raise OSError(errno.EMFILE, "Too many open files")
    return self._listener.accept()

  def __getattr__(self, name):
    return getattr(self._listener, name)


def test_without_file_descriptors_a_shard_waits_a_moment(tmp_path):
  path, now, made = tmp_path / "0.sock", [0.0], []

  class FullNetwork(UnixNetwork):
    def listen(self, path):
      made.append(FullListener(super().listen(path)))
      return made[0]

  options = dict(clock=lambda: now[0], network=FullNetwork())
  with (
    serving(path, **options) as (_, server),
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer,
  ):
    peer.connect(str(path))
    peer.sendall(frames.pack(HELLO._replace(version=1)))
    while not made[0].asked:
      server.submit(lambda shard: None).result()
    for _ in range(9):  # rounds in which it is to do something else
      server.submit(lambda shard: None).result()
    assert made[0].asked == 1
    now[0] += _TICK
    assert peer.recv(frames.SIZE)
  assert made[0].fileno() < 0


def test_calls_of_a_shard_that_has_failed_are_refused(tmp_path):
  shard = FakeShard()
  server = ShardServer(shard, tmp_path / "0.sock", clock=iter([0.0]).__next__)
  before = server.submit(lambda shard: 1)
  with pytest.raises(StopIteration):  # of its clock
    server.serve()
  after = server.submit(lambda shard: 2)
  assert before.result(5.0) == 1
  with pytest.raises(Disconnected):
    after.result(5.0)


def test_a_call_that_waits_when_a_shard_fails_is_refused(tmp_path):
  server = ShardServer(FakeShard(), tmp_path / "0.sock", clock=lambda: 0.0)

  def fail(shard):
    waiting.append(server.submit(lambda shard: 2))
    raise KeyboardInterrupt  # no answer, but the end

  waiting = [server.submit(fail)]
  with pytest.raises(KeyboardInterrupt):
    server.serve()
  with pytest.raises(Disconnected):
    waiting[1].result(5.0)
