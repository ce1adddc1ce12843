"""Frames between machines: a worker whose shard does not answer, and a shard
whose worker says what cannot be."""

import sys
import types

import numpy as np
import pytest
from shard_bench import PARAMS_AT_FIRST, Bench, one

from asgd.live import deadlines, frames
from asgd.live.clusters.ray_processes import ShardActor
from asgd.live.frames import Frame
from asgd.live.links import remote
from asgd.live.links.base import Disconnected


class RayError(Exception):
  pass


class Calls:
  """The methods of an actor; each of its calls is a number."""

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    def call(*args):
      self.calls.append(name)
      return len(self.calls)

    return types.SimpleNamespace(remote=call)


class FakeRay:
  """A Ray in which nothing but the opening of a session is ever answered."""

  exceptions = types.SimpleNamespace(RayError=RayError)

  def __init__(self):
    self.actors = {"shard-0-0": Calls()}

  def get_runtime_context(self):
    return types.SimpleNamespace(get_actor_id=lambda: "worker")

  def get_actor(self, name):
    if name not in self.actors:
      raise ValueError(name)
    return self.actors[name]

  def get(self, ref, timeout):
    assert timeout

  def wait(self, refs, timeout):
    assert timeout is not None
    return [], refs


@pytest.fixture
def ray(monkeypatch):
  fake = FakeRay()
  monkeypatch.setitem(sys.modules, "ray", fake)
  return fake


def connected(ladder):
  site = types.SimpleNamespace(
    setup=types.SimpleNamespace(shards=1, ladder=ladder),
    actor_name=lambda index, generation: f"shard-{index}-{generation}",
  )
  link = remote.RayLink(site)
  assert link.connect(0)
  return link


def test_a_shard_with_a_successor_is_not_waited_for(ray):
  link = connected(deadlines.Ladder())
  ray.actors["shard-0-1"] = Calls()
  with pytest.raises(Disconnected):
    link.say(0, Frame(frames.HELLO, 0))
  assert ray.actors["shard-0-0"].calls == ["open", "listen", "tell"]
  # It is away, until the worker connects again.
  with pytest.raises(Disconnected):
    link.hear(None)


def test_a_shard_that_says_nothing_is_not_waited_for_without_end(ray):
  link = connected(deadlines.Ladder(start=1e-9))
  with pytest.raises(Disconnected):
    link.say(0, Frame(frames.HELLO, 0))


def shard_actor(shard):
  """An actor's sessions with a shard, without Ray."""
  actor = ShardActor.__new__(ShardActor)
  actor._sessions = {}
  actor._site = types.SimpleNamespace(clock=lambda: 0.0)
  actor._server = types.SimpleNamespace(ask=lambda call: call(shard))
  return actor


def heard(actor, token):
  return [frames.unpack(data) for data, _ in actor.listen(token)]


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
  bench = Bench(one())
  actor = shard_actor(bench.lead)
  for token in ("first", "other"):
    actor.open(token)
  actor.tell("first", frames.pack(Frame(frames.HELLO, 0, job=-1)), None)
  actor.tell("other", frames.pack(Frame(frames.HELLO, 2, job=-1)), None)
  with pytest.raises(frames.BadFrame):
    actor.tell("first", frames.pack(frame), None)
  assert bench.lead.workers == [2]
  with pytest.raises(KeyError):
    actor.listen("first")
  kinds = [said.kind for said in heard(actor, "other")]
  assert kinds[:2] == [frames.WELCOME, frames.TICKET]


def test_a_message_is_that_of_the_session_that_holds_the_place():
  bench = Bench(one())
  actor = shard_actor(bench.lead)
  for token in ("holder", "stranger"):
    actor.open(token)
  actor.tell("holder", frames.pack(Frame(frames.HELLO, 0, job=-1)), None)
  _, ticket = heard(actor, "holder")
  push = Frame(frames.PUSH, 0, 0, flag=1, message=ticket.message)
  message = np.ones_like(PARAMS_AT_FIRST)
  actor.tell("stranger", frames.pack(push), np.full_like(message, 9.0))
  assert [said.kind for said in heard(actor, "stranger")] == [frames.EXPEL]
  with pytest.raises(frames.BadFrame, match="does not lie in slot"):
    actor.tell("holder", frames.pack(push), None)
  assert bench.lead.state.received == 0
