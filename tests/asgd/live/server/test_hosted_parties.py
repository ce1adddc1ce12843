"""A shard and a worker as objects in threads, without a cluster."""

import threading
import time
from concurrent.futures import Future

import pytest
from shard_bench import Bench, one

from asgd.live.faults import Fault, Script
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.links.local import ShardQueue
from asgd.live.server.hosted_shard import ENDED, HostedShard
from asgd.live.server.hosted_worker import HostedWorker
from asgd.live.shard import Shard
from asgd.live.worker import Reach


@pytest.fixture
def hosts():
  hosts = ThreadHosts(began=time.monotonic())
  yield hosts
  hosts.close()


def shard_host(hosts, shard):
  def make(inside):
    queue = ShardQueue(0, [None])
    queue.open(shard, inside.clock)
    return HostedShard(inside, queue)

  return hosts.start("shard", 0, make)


def test_a_shard_answers_until_it_is_asked_to_end(hosts):
  host = shard_host(hosts, Bench(one()).lead)
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
  hosts,
):
  host = shard_host(hosts, Bench(one()).lead)
  run = host.call("run")
  with pytest.raises(ValueError, match="no such thing"):
    host.call("ask", fail).result()
  assert not run.done()
  host.call("ask", fail_from_now_on).result()
  with pytest.raises(OSError, match="no space left"):
    run.result()
  assert host.call("ask", Shard.status).result() is None


def test_of_a_shard_that_is_ended_nothing_is_served_once_its_thread_ends(hosts):
  shard = Bench(one()).lead
  host = shard_host(hosts, shard)
  host.made.result()
  hosts.kill("shard", 0)
  host.thread.join()
  assert host.call("ask", Shard.status).exception() is not None
  assert host._held._served.is_set()


class NoShards:
  """A link to a shard that is never there."""

  def __init__(self):
    self.tried, self.closed = threading.Event(), Future()

  def connect(self, shard):
    self.tried.set()
    return False


class NoDuty:
  """What a worker does that comes to no job."""

  def parts(self):
    return [None]


def test_a_worker_that_finds_no_shard_ends_when_its_host_is(hosts):
  link = NoShards()

  def reach(worker, life, duty, inside):
    script = Script((), kill=inside.kill, wait=inside.wait)
    end = lambda: link.closed.set_result((worker, life))  # noqa: E731
    return Reach(link, list, inside.clock, inside.wait, script, None, end)

  host = hosts.start(
    "worker", 3, lambda inside: HostedWorker(inside, 3, 2, reach)
  )
  host.call("run", NoDuty)
  link.tried.wait()
  hosts.kill("worker", 3)
  host.thread.join()
  assert link.closed.result() == (3, 2)


def test_a_fault_is_injected_by_one_of_the_loops_that_share_a_script():
  fault, killed = Fault(1, 4, "kill"), []
  script = Script(
    [fault], kill=lambda: None, wait=lambda seconds: None
  )
  first, second = (
    script.within(lambda i=i: killed.append(i), lambda seconds: None)
    for i in range(2)
  )
  second.before_work(1, 4)
  first.before_work(1, 4)
  assert killed == [1]
  assert script.injected == [fault]
