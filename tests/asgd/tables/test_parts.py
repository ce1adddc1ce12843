"""Independent shards and workers, in random order, with kills: no update is
lost or applied twice, and a replay gives the same bits."""

import functools
import random

import numpy as np
import powers_kit
import pytest
from powers_kit import JOBS, ROWS, WORKERS, first, whole

from asgd import base, orders, tables
from asgd.orders.trace import NO_SEQ, Event
from asgd.tables import division as division_lib
from asgd.tables import replay, requests, wire
from asgd.tables.requests import PUSH
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker

MODELS = {
  "bulk_synchronous": {},
  "ssp": dict(bound=1),
  "essp": dict(bound=1),
  "managed": dict(bound=2, budget=1),
  "value_bounded": dict(threshold=3.0),
  "delay_bounded": dict(bound=1),
  "asynchronous": {},
}


def work(exact=True, hot=ROWS):
  """Job j adds 2^j to each row that it reads, or what depends on it; with None
  a whole number that depends on all it reads, to all rows. It reads none of `v`
  from `hot` on."""

  def keys(job):
    if exact is None:
      return {"v": np.arange(ROWS), "w": np.arange(2)}
    return powers_kit.keys(job, hot)

  def gradient(rows, job, keys, *_):
    if exact is None:
      number = -(sum(x.sum() for x in rows.values()) % 9973 + job)
      return 0.0, {k: np.full_like(x, number) for k, x in rows.items()}
    if not exact:
      return 0.0, {k: 0.3 * x + np.sin(job) for k, x in rows.items()}
    return powers_kit.gradient(rows, job)

  return tables.Work(lambda worker, job: job, keys, gradient)


class World:
  """Shards and workers; each step is done by a random one."""

  def __init__(
    self, seed, consistency, shards=2, exact=True, hot=ROWS, **options
  ):
    self.draw, self.work = random.Random(seed), work(exact, hot)
    self.messages = [None] * WORKERS  # the last one of each worker
    self.cuts = []
    self.settings = tables.table(
      1.0, WORKERS, consistency=consistency, clock_every=2, **options
    )
    self.division = division_lib.divide(first(), shards)
    self.shards = [self.shard(s) for s in range(shards)]
    self.orders = [[] for _ in range(shards)]
    self.images = [wire.dump(shard.pack()) for shard in self.shards]
    self.log = [[] for _ in range(shards)]
    self.journals = [[] for _ in range(WORKERS)]
    self.records = [[] for _ in range(WORKERS)]
    self.workers = [self.worker(w, 0) for w in range(WORKERS)]
    self.steps = [None] * WORKERS
    self.asks = [{} for _ in range(WORKERS)]
    for w in range(WORKERS):
      self.join(w)

  def join(self, w):
    def left(done):
      message = self.messages[w]
      if message is None or message.done != done:
        return None
      received = {record.job for record in self.records[w]}
      mine = [r for r in message.records if r.job not in received]
      return message._replace(records=mine) if mine else None

    def begun(record):
      row = Event(0.0, w, 0, record.job, base.SEND)
      self.journals[w].append(row)

    join = self.workers[w].join(left, begun, functools.partial(self.done, w))
    self.begin(w, join)

  def done(self, w, record):
    row = Event(0.0, w, 0, record.job, base.RECEIVE)
    self.journals[w].append(row)
    self.records[w].append(record)

  def sends(self, w, message):
    self.messages[w] = message

  def partly(self, w):
    """Whether only one of the two shards has a worker's message."""
    asks = [requests.load_request(x) for x in self.asks[w].values()]
    return [request.kind for request in asks] == [PUSH]

  def shard(self, s):
    server = self.division.server(s, first(), self.settings, WORKERS)
    return TableShard(s, server)

  def worker(self, w, incarnation):
    self.journals[w].append(Event(0.0, w, NO_SEQ, incarnation, base.JOIN))
    return TableWorker(
      *(w, incarnation, self.settings, self.division, self.work),
      workers=WORKERS,
      jobs=JOBS,
    )

  def begin(self, w, steps):
    self.steps[w] = steps
    self.go_on(w)

  def go_on(self, w):
    asks = next(self.steps[w], None)
    self.asks[w] = dict(asks or {})
    if asks is None:
      self.steps[w] = None

  def ask(self, w):
    """Applies one request of a worker at a shard; False if it has to wait."""
    s = self.draw.choice(list(self.asks[w]))
    shard = self.shards[s]
    request = requests.load_request(self.asks[w][s])
    if shard.must_wait_for_clock(request):
      return False
    self.orders[s].append(shard.trace_row(request, 0.0))
    self.log[s].append(self.asks[w][s])
    shard.apply(request)
    self.workers[w].sessions.receive(s, shard.reply(request))
    del self.asks[w][s]
    return True

  def divide(self):
    """Moves ranges, as all workers rest."""
    load = [shard.load() for shard in self.shards]
    cuts = division_lib.by_load(load)
    self.cuts.append(cuts)
    given = [shard.give(cuts) for shard in self.shards]
    version = self.shards[0].version + 1
    for s, shard in enumerate(self.shards):
      parts = [mine[s] for mine in given if s in mine]
      data = requests.dump_move(version, cuts, parts)
      request = requests.load_request(data)
      self.orders[s].append(shard.trace_row(request, 0.0))
      self.log[s].append(data)
      shard.apply(request)
    for w, worker in enumerate(self.workers):
      for s, shard in enumerate(self.shards):
        rows = shard.rows_from(w, worker.sessions.taken[s])
        worker.sessions.receive_rows(s, rows)
      worker.divide(cuts)
    return True

  def move(self, w):
    """Does a step of a worker; False if none is possible."""
    worker = self.workers[w]
    if self.asks[w]:
      return self.ask(w)
    if self.steps[w] is not None:
      self.go_on(w)
      return True
    if worker.must_rest:
      rest = all(each.must_rest for each in self.workers)
      return rest and not any(self.steps) and self.divide()
    if worker.next_job is None:
      return False
    for s, shard in enumerate(self.shards):
      if self.draw.random() < 0.5:  # it has come, or not yet
        rows = shard.rows_from(w, worker.sessions.taken[s])
        worker.sessions.receive_rows(s, rows)
      worker.take(s, worker.sessions.available(s))
    taken = tuple(map(float, worker.sessions.taken))

    def begun(action):
      time = float(len(self.journals[w]))
      row = Event(time, w, 0, worker.next_job, action, totals=taken)
      self.journals[w].append(row)
      return row.time

    done = functools.partial(self.done, w)
    sends = functools.partial(self.sends, w)
    self.begin(w, worker.job(begun, done, on_send=sends))
    return True

  def kill_worker(self, w):
    self.workers[w] = self.worker(w, self.workers[w].sessions.incarnation + 1)
    self.join(w)

  def kill_shard(self, s):
    """Kills a shard, and rebuilds it from its image and the requests since."""
    self.shards[s] = self.shard(s)
    self.shards[s].unpack(wire.load(self.images[s]))
    for data in self.log[s]:
      self.shards[s].apply(requests.load_request(data))

  def run(self, kills=()):
    step, kills = 0, [*kills]
    while any(x is not None for x in self.steps) or any(
      w.next_job is not None for w in self.workers
    ):
      step += 1
      for kill in [*kills]:
        kind, index, at = kill
        if at == step or (at < 0 and self.partly(index)):
          kills.remove(kill)
          getattr(self, f"kill_{kind}")(index)
      if step % 9 == 0:
        s = self.draw.randrange(len(self.shards))
        self.images[s], self.log[s] = wire.dump(self.shards[s].pack()), []
      order = self.draw.sample(range(WORKERS), WORKERS)
      assert any(self.move(w) for w in order), "nobody can do anything"
    return self

  def tables(self):
    return self.division.join(
      [
        {name: t.whole() for name, t in shard.server.tables.items()}
        for shard in self.shards
      ]
    )


def same(one, two):
  return all(one[name].tobytes() == two[name].tobytes() for name in one)


def check_replay(world):
  again = replay.replay(
    *(world.settings, first(), world.division, world.work),
    replay.Orders(world.orders, world.journals),
    jobs=JOBS,
  )
  assert same(again.tables, world.tables())
  for mine, theirs in zip(world.records, again.records, strict=True):
    for record, (_, other) in zip(mine, theirs, strict=True):
      for a, b in zip(record, other, strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def check_bound(world, bound):
  for record in [r for mine in world.records for r in mine]:
    assert bound is None or record.staleness <= bound


KILLS = [("worker", 1, 14), ("shard", 0, 25), ("shard", 1, 40)]


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("kills", [(), KILLS])
def test_each_update_is_there_once_and_a_replay_is_the_same(which, kills):
  for seed in range(2):
    world = World(seed, which, **MODELS[which]).run(kills)
    assert same(world.tables(), whole())
    check_replay(world)
    check_bound(world, MODELS[which].get("bound"))


@pytest.mark.parametrize("which", MODELS)
def test_ranges_move_and_no_update_is_lost(which):
  for seed, shards in enumerate((2, 3)):
    model = dict(MODELS[which], rebalance_every=1, shards=shards, hot=4)
    world = World(seed, which, **model).run(KILLS)
    assert len(world.cuts) == 2  # after clocks 1 and 2 of 3
    assert world.cuts[0]["v"][1] < 4  # the first shard had rows 0 to 3
    assert same(world.tables(), whole(hot=4))
    check_replay(world)
    check_bound(world, MODELS[which].get("bound"))


@pytest.mark.parametrize("which", ["ssp", "essp", "asynchronous"])
def test_a_message_that_some_shards_have_comes_to_the_others(which):
  options = dict(exact=None, **MODELS[which])
  kills = [("worker", 1, -1), ("worker", 0, -1), ("worker", 1, -1)]
  for seed in range(3):
    world = World(seed, which, **options).run([*kills, ("shard", 1, 60)])
    # Shards that had updates of two attempts would differ in these.
    rows = world.tables()["v"]
    assert (rows == rows[0]).all() and rows[0, 0]
    again = [e for events in world.journals for e in events if not e.totals]
    assert sum(e.action == base.SEND for e in again) == 6  # jobs of 3 messages
    assert len({r.job for mine in world.records for r in mine}) == 18
    check_replay(world)


@pytest.mark.parametrize(
  ("filters", "kills"),
  # A worker that is killed loses what a filter holds back.
  [((dict(name="largest_change", nbytes=24),), ()), ((), KILLS)],
)
def test_messages_that_a_bandwidth_allows_are_those_of_the_replay(
  filters, kills
):
  options = dict(MODELS["managed"], bandwidth=40.0, filters=filters)
  for seed in range(2):
    world = World(seed, "managed", **options).run(kills)
    assert same(world.tables(), whole())
    rows = [row for row in world.orders[0] if row.action == base.RECEIVE]
    within = [row for row in rows if row.job % 2]  # a clock is of two jobs
    # Each worker can send three within its clocks.
    assert 0 < len(within) < 3 * WORKERS
    check_replay(world)
    check_bound(world, MODELS["managed"]["bound"])


@pytest.mark.parametrize("function", [{}, {"ftrl": {"l1": 0.01}}])
def test_bulk_synchronous_comes_to_the_bits_of_the_simulation_whoever_dies(
  function,
):
  # A row that moved without its state would train differently.
  shards = dict(rebalance_every=1, shards=2, **function)
  which = "bulk_synchronous"
  simulation = tables.Simulation(
    tables.table(1.0, WORKERS, consistency=which, clock_every=2, **shards),
    first(),
    work(exact=False),
    orders.durations.constant(),
    workers=WORKERS,
    messages=WORKERS * JOBS,
  )
  simulation.advance(WORKERS * 4)  # two clocks
  tables_there = simulation.server.tables.items()
  cuts = {name: list(table.ranges.cuts) for name, table in tables_there}
  simulation.advance(WORKERS * JOBS)
  for seed, kills in ((0, ()), (1, KILLS)):
    world = World(seed, which, exact=False, **shards).run(kills)
    assert kills or world.cuts[-1] == cuts
    assert same(world.tables(), simulation.tables())
