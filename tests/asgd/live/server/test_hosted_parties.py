"""A shard and a worker as objects in threads, without a cluster."""

import threading
import types
from concurrent.futures import Future

import pytest
from shard_bench import Bench, one

from asgd.live.faults import Script
from asgd.live.links.sockets import ShardServer
from asgd.live.server.hosted_shard import ENDED, HostedShard
from asgd.live.server.hosted_worker import HostedWorker
from asgd.live.shard import Shard
from asgd.live.worker import LoopContext


@pytest.fixture
def start(hosts, tmp_path):
  """Starts a shard in a host."""

  def start(shard):
    def make(inside):
      path = tmp_path / "0.sock"
      server = ShardServer(shard, path, clock=inside.clock)
      return HostedShard(inside, server, tmp_path)

    return hosts.start("shard", 0, make)

  return start


def test_a_shard_answers_until_it_is_asked_to_end(start):
  host = start(Bench(one()).lead)
  (status,) = host.call("ask", Shard.status).result()
  assert status["received"] == 0
  run = host.call("run")
  assert host.call("end").result() == (None,)
  assert run.result() == ENDED
  assert host.call("ask", Shard.status).result() is None


def fail(shard):
  raise ValueError("no such thing")


def fail_from_now_on(shard):
  def tick(now):
    raise OSError("no space left")

  shard.tick = tick


def test_what_a_call_raises_is_its_answer_and_what_serving_raises_the_runs(
  start,
):
  host = start(Bench(one()).lead)
  run = host.call("run")
  with pytest.raises(ValueError, match="no such thing"):
    host.call("ask", fail).result()
  assert not run.done()
  host.call("ask", fail_from_now_on).result()
  with pytest.raises(OSError, match="no space left"):
    run.result()
  assert host.call("ask", Shard.status).result() is None


def test_of_a_shard_that_is_ended_nothing_is_served_once_its_thread_ends(
  hosts, start
):
  shard = Bench(one()).lead
  host = start(shard)
  host.make_call.result()
  hosts.kill("shard", 0)
  host.thread.join()
  assert host.call("ask", Shard.status).exception() is not None
  assert host._object.server.ended.is_set()


class NoShards:
  """A link to a shard that is never there."""

  def __init__(self):
    self.tried, self.closed = threading.Event(), Future()

  def connect(self, shard):
    self.tried.set()
    return False


class NoSpec:
  """What a worker does that comes to no job."""

  def kept_in(self, run, worker):
    return self

  def parts(self):
    return [None]


def test_a_worker_that_finds_no_shard_ends_when_its_host_is(hosts):
  link = NoShards()

  def make_context(spec, inside):
    script = Script((), kill=inside.kill, wait=inside.wait)
    end = lambda: link.closed.set_result("left")  # noqa: E731
    return LoopContext(link, list, inside.clock, inside.wait, script, None, end)

  site = types.SimpleNamespace(run="runs")
  maker = types.SimpleNamespace(
    worker=3, warm_up=False, make_context=make_context, site=site
  )
  host = hosts.start("worker", 3, lambda inside: HostedWorker(inside, maker))
  host.call("run", NoSpec)
  assert link.tried.wait(60)
  hosts.kill("worker", 3)
  host.thread.join()
  assert link.closed.result() == "left"
