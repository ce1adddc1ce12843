"""The driver's part of a dense server, over shards that are called by hand."""

from concurrent.futures import Future

import pytest
from shard_bench import Bench, crew, one, team

from asgd import base
from asgd.live.failures import NotFinite, ShardsDie, WorkersDie
from asgd.live.hosts import Host, Hosts
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.links.base import Disconnected
from asgd.live.server.cluster import ServerCluster
from asgd.live.shard import Shard
from asgd.orders.protocol import Rules


def done(value):
  call = Future()
  call.set_result(value)
  return call


class BenchHost(Host):
  """A shard of a bench, which is called at once, or a worker, which does
  nothing."""

  def __init__(self, kind, index, shard, changes):
    self.kind, self.index = kind, index
    self._shard, self._changes = shard, changes

  def call(self, method, *args):
    if method == "run":
      return Future()
    if method != "ask":
      return done(None)
    (call,) = args
    answer = call(self._shard)
    if call is Shard.status:
      answer |= self._changes
    return done((answer,))


class BenchHosts(Hosts):
  """Hosts of the shards of a bench; `lead` is what its status says instead."""

  def __init__(self, bench, **lead):
    self.bench, self.lead = bench, lead
    self.now, self.lost, self.killed = 0.0, set(), []

  def clock(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds

  def start(self, kind, index, make):
    self.lost.discard((kind, index))
    shard = self.bench.shards[index] if kind == SHARD else None
    lead = kind == SHARD and not index
    return BenchHost(kind, index, shard, self.lead if lead else {})

  def make_call(self, kind, index):
    return done(None)

  def wait(self, calls, seconds):
    return list(calls)

  def exited(self):
    return sorted(self.lost)

  def kill(self, kind, index):
    self.killed.append((kind, index))
    self.lost.add((kind, index))

  def close(self):
    pass


class NoMakers:
  """Makes nothing: the hosts of a bench have it."""

  def shard(self, index, resumed):
    return None

  def worker(self, worker, restarts):
    return None

  def close(self):
    pass


def started(bench, **lead):
  hosts = BenchHosts(bench, **lead)
  cluster = ServerCluster(
    *(bench.setup, None, hosts, NoMakers(), lambda: None)
  )
  cluster.start()
  return cluster, hosts


@pytest.mark.parametrize("make", [crew, team])
def test_what_is_open_when_the_lead_has_all_was_lost(make):
  # A worker was given up before it came back to a shard that was restarted.
  bench = Bench(make(rules=Rules(depth=2)))
  bench.join(0)
  assert bench.shards[1].status()["busy"]
  cluster, _ = started(bench, stopped=True, busy=False)
  cluster.status()
  own = bench.setup.consistent is False  # an order of its own, or the lead's
  cluster.status()
  assert cluster.finished == own
  rows = [e.action for e in bench.journals[1].events()[-3:]]
  ends = [base.LOST, base.LOST, base.LEAVE]
  assert (rows == ends) == own
  assert base.LOST not in [e.action for e in bench.journals[0].events()]


@pytest.mark.parametrize(
  ("kind", "error"), [(WORKER, WorkersDie), (SHARD, ShardsDie)]
)
def test_parties_that_exit_over_and_over_end_the_run(kind, error):
  bench = Bench(one())
  cluster, hosts = started(bench)
  hand = bench.join(0)
  index = 1 if kind == WORKER else 0
  exits = 5 * (bench.setup.workers if kind == WORKER else 1)

  def exit_once():
    hosts.lost.add((kind, index))
    return cluster.check()

  for _ in range(2):
    for _ in range(exits):
      assert len(exit_once()) == 1
    hand.push()
    cluster.status()  # a message has come
  assert cluster.replaced[kind] == 2 * exits
  with pytest.raises(error, match=f"{exits + 1}"):
    for _ in range(exits + 1):
      exit_once()


def test_who_came_for_a_dead_worker_is_not_ended_for_its_death():
  bench = Bench(one())
  cluster, hosts = started(bench, expelled=[0, 1])
  hosts.lost.add((WORKER, 0))  # the driver was quicker than the lead
  assert cluster.check() == ["worker 0 died; another takes its place"]
  hosts.killed.clear()
  cluster.status()
  assert hosts.killed == [(WORKER, 1)]
  assert cluster.check() == ["worker 1 hung; another takes its place"]
  assert cluster.replaced == {"worker": 2, "shard": 0}


def test_a_worker_that_never_joins_is_replaced():
  bench = Bench(one())
  cluster, hosts = started(bench)
  bench.join(0)
  cluster.status()
  hosts.now += 3 * bench.setup.ladder.start
  cluster.status()
  assert not hosts.killed
  hosts.now += 1.0
  cluster.status()
  others = range(1, bench.setup.workers)
  assert hosts.killed == [(WORKER, worker) for worker in others]


def test_messages_that_are_refused_over_and_over_end_the_run():
  bench = Bench(one())
  most = 3 * bench.setup.workers
  cluster, hosts = started(bench, refused=most)
  assert cluster.status() is not None
  hosts.lead["refused"] += 1
  with pytest.raises(NotFinite, match=f"{most + 1} messages, in a row or of"):
    cluster.status()


def test_a_shard_that_has_failed_is_not_asked_for_parameters(monkeypatch):
  bench = Bench(crew())
  cluster, _ = started(bench)
  assert len(cluster.images()) == bench.setup.shards
  call = BenchHost.call

  def failed(self, method, *args):
    broken = self.kind == SHARD and self.index and method == "ask"
    return done(None) if broken else call(self, method, *args)

  monkeypatch.setattr(BenchHost, "call", failed)
  with pytest.raises(Disconnected, match="shard 1 cannot be reached"):
    cluster.images()
  assert cluster.status() is None


def test_images_of_a_row_in_the_past_are_not_those_of_shards_at_rest():
  bench = Bench(team(jobs=30))
  cluster, _ = started(bench)
  bench.join()
  lead = bench.lead.state
  lead.rows += 1  # the lead is ahead: images of a later row are requested
  assert cluster.images() is None
  lead.rows -= 1
  bench.complete()
  assert [meta["rows"] for _, meta in cluster.images()] == [lead.rows] * 2
