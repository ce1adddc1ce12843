"""Ways between processes: one that breaks is noticed, whatever finds it out."""

import contextlib
import socket
import threading

import pytest

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.links.sockets import SocketLink

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
  link.say(0, HELLO)
  assert frames.unpack(first.recv(frames.SIZE)) == HELLO
  data = frames.pack(HELLO) + frames.pack(HELLO._replace(seq=1))
  second.sendall(data[:100])
  assert link.hear(5.0) == (1, HELLO)
  assert link.hear(0.0) is None
  second.sendall(data[100:])
  assert link.hear(5.0) == (1, HELLO._replace(seq=1))


@pytest.mark.parametrize("noticed_by", ["say", "hear"])
def test_a_shard_that_is_killed_is_missed_until_there_is_another(
  way, noticed_by
):
  """`say` may notice it where its worker waits for another shard, and goes on:
  then `hear` has no socket to wait for."""
  link, (first, second) = way
  second.sendall(frames.pack(HELLO))
  assert link.hear(5.0) == (1, HELLO)
  first.close()
  if noticed_by == "say":
    with pytest.raises(Disconnected):
      link.say(0, HELLO)
  for _ in range(2):
    with pytest.raises(Disconnected) as error:
      link.hear(5.0)
    assert error.value.shard == 0
  assert link.connect(0)
  assert link.hear(0.0) is None


def test_waking_ends_a_wait(way):
  link, _ = way
  waker = threading.Thread(target=link.wake)
  waker.start()
  assert link.hear(None) is None
  waker.join()
