"""What a worker on another machine does when a shard does not answer."""

import sys
import types

import pytest

from asgd.live import deadlines, frames
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
