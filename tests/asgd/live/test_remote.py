"""Frames between machines: a worker whose shard does not answer, and a shard
whose worker says what cannot be."""

import sys
import types
from concurrent.futures import Future

import numpy as np
import pytest
from shard_bench import PARAMS_AT_FIRST, Bench, one

from asgd.live import deadlines, frames
from asgd.live.frames import Frame
from asgd.live.hosts import Inside
from asgd.live.links import remote
from asgd.live.links.base import Disconnected
from asgd.live.server.hosted_shard import HostedShard

FIRST, OTHER = (0, 0, "a"), (2, 0, "a")  # tokens of sessions


class RayError(Exception):
  pass


class Calls:
  """The methods of an actor; each of its calls is its name and a number."""

  def __init__(self):
    self.calls = []

    self.call = types.SimpleNamespace(remote=self._call)

  def _call(self, name, args):
    assert isinstance(args, tuple)
    self.calls.append(name)
    return name, len(self.calls)


class FakeRay:
  """A Ray in which nothing but the opening of a session is ever answered."""

  exceptions = types.SimpleNamespace(RayError=RayError)

  def __init__(self):
    self.actors = {"shard-0-0": Calls()}
    self.starts = False  # whether an actor is about to start: no answer at all

  def get_actor(self, name):
    if name not in self.actors:
      raise ValueError(name)
    return self.actors[name]

  def get(self, ref, timeout):
    assert timeout

  def wait(self, refs, timeout):
    assert timeout is not None
    ended = [r for r in refs if r[0] == "open" and not self.starts]
    return ended, [r for r in refs if r not in ended]


@pytest.fixture
def ray(monkeypatch):
  fake = FakeRay()
  monkeypatch.setitem(sys.modules, "ray", fake)
  return fake


def connected(ladder):
  site = types.SimpleNamespace(
    setup=types.SimpleNamespace(shards=1, ladder=ladder),
    actor_name=lambda kind, index, generation: f"{kind}-{index}-{generation}",
  )
  link = remote.RayLink(site, 0, 0)
  assert link.connect(0)
  return link


def test_a_shard_with_a_successor_is_not_waited_for(ray):
  link = connected(deadlines.Ladder())
  ray.actors["shard-0-1"] = Calls()
  with pytest.raises(Disconnected):
    link.send(0, Frame(frames.HELLO, 0))
  assert ray.actors["shard-0-0"].calls == ["open", "listen", "deliver"]
  # It is away, until the worker connects again.
  with pytest.raises(Disconnected):
    link.receive(None)


def test_a_shard_that_starts_is_asked_once(ray):
  link = connected(deadlines.Ladder())
  shard = ray.actors["shard-0-1"] = Calls()
  ray.starts = True
  tries = [link.connect(0) for _ in range(4)]  # the first finds the successor
  assert not any(tries)
  assert shard.calls == ["open"]
  ray.starts = False
  assert link.connect(0)
  assert shard.calls == ["open", "listen"]


def test_a_shard_that_says_nothing_is_not_waited_for_without_end(ray):
  link = connected(deadlines.Ladder(start=1e-9))
  with pytest.raises(Disconnected):
    link.send(0, Frame(frames.HELLO, 0))


class Server:
  """Calls a shard at once, in the place of its serving thread."""

  def __init__(self, shard):
    self._shard, self._calls = shard, []
    self._serves = False

  def serve(self):
    """Nothing: calls are made at once."""

  def submit(self, call):
    answer = Future()
    self._calls.append((call, answer))
    if self._serves:  # by one of the calls: after that
      return answer
    self._serves = True
    while self._calls:
      call, each = self._calls.pop(0)
      try:
        each.set_result(call(self._shard))
      except Exception as error:
        each.set_exception(error)
    self._serves = False
    return answer


def reachable(shard):
  """A shard in a host, without Ray."""
  inside = Inside(lambda: None, lambda seconds: None, lambda: 0.0)
  return HostedShard(inside, Server(shard), None)


def opened():
  """A shard by hand, and its sessions FIRST and OTHER; FIRST is worker 0."""
  bench = Bench(one())
  sessions = reachable(bench.lead)
  for token in (FIRST, OTHER):
    sessions.open(token).result(timeout=0)
  tell(sessions, FIRST, Frame(frames.HELLO, 0, job=-1))
  return bench, sessions


def heard(sessions, token):
  said = sessions.listen(token).result(timeout=0)
  return [frames.unpack(data) for data, _ in said]


def tell(sessions, token, frame, message=None):
  sessions.deliver(token, frames.pack(frame), message).result(timeout=0)


@pytest.mark.parametrize(
  "frame",
  [
    Frame(frames.FETCH, 0),
    Frame(frames.HELLO, 1, job=-1),
    Frame(frames.FOLLOW, 1),
    Frame(frames.PUSH, 0, flag=1),
  ],
)
def test_a_session_ends_with_what_cannot_be(frame):
  bench, sessions = opened()
  tell(sessions, OTHER, Frame(frames.HELLO, 2, job=-1))
  with pytest.raises(frames.BadFrame):
    tell(sessions, FIRST, frame)
  assert bench.lead.workers == [2]
  with pytest.raises(KeyError):
    heard(sessions, FIRST)
  kinds = [said.kind for said in heard(sessions, OTHER)]
  assert kinds[:2] == [frames.WELCOME, frames.TICKET]


def test_a_message_is_that_of_the_session_that_holds_the_place():
  bench, sessions = opened()
  _, ticket = heard(sessions, FIRST)
  push = Frame(frames.PUSH, 0, 0, flag=1, message=ticket.message)
  message = np.ones_like(PARAMS_AT_FIRST)
  tell(sessions, OTHER, push, np.full_like(message, 9.0))
  assert [said.kind for said in heard(sessions, OTHER)] == [frames.EXPEL]
  with pytest.raises(frames.BadFrame, match="does not lie in slot"):
    tell(sessions, FIRST, push)
  assert bench.received[0] == 0


def test_frames_that_are_sent_together_are_one_answer():
  sessions = reachable(Bench(one()).lead)
  sessions.open((0, 0, "a")).result(timeout=0)
  listens = sessions.listen((0, 0, "a"))
  tell(sessions, (0, 0, "a"), Frame(frames.HELLO, 0, job=-1))
  said = [frames.unpack(data).kind for data, _ in listens.result(timeout=0)]
  assert said[:2] == [frames.WELCOME, frames.TICKET]


def test_who_opens_another_session_listens_to_the_former_no_more():
  sessions = reachable(Bench(one()).lead)
  for token in ((1, 1, "a"), (1, 11, "a")):
    sessions.open(token)
  mine, others = sessions.listen((1, 1, "a")), sessions.listen((1, 11, "a"))
  sessions.open((1, 1, "b"))
  assert mine.result(timeout=0) == []
  assert not others.done()


def test_the_sessions_of_a_worker_end_with_it():
  bench = Bench(one())
  sessions = reachable(bench.lead)
  for token, worker in (((0, 0, "a"), 0), ((2, 0, "a"), 2)):
    sessions.open(token)
    tell(sessions, token, Frame(frames.HELLO, worker, job=-1))
  sessions.worker_exited(0, 0)
  assert bench.lead.workers == [2]
  with pytest.raises(KeyError):
    heard(sessions, (0, 0, "a"))
