"""Each consistency model keeps its definition on random traces.

Job j adds 2^j to each row that it reads: so a read value shows which jobs'
updates it has.
"""

from typing import NamedTuple

import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asgd import base, orders, tables
from asgd.orders import trace as trace_lib
from asgd.orders.durations import Durations
from asgd.orders.network import Network

ROWS = 5
SLOW = Network(latency=0.25, up=80.0, down=60.0, port=50.0, service=0.125)
NETWORKS = None, SLOW, Network(port=40.0, incast="share")


class World(NamedTuple):
  """A random cluster."""

  workers: int
  every: int  # jobs in a clock
  jobs: int  # of each worker
  times: list  # of workers, cycles of times
  keys: list  # of jobs, the rows that they read
  network: Network | None = None  # None: messages take no time

  @property
  def total(self):
    return self.workers * self.jobs

  def clock(self, job):
    """Returns the clock of a job."""
    return job // self.workers // self.every


@st.composite
def worlds(draw):
  workers, every = draw(st.integers(1, 4)), draw(st.integers(1, 3))
  jobs = draw(st.integers(1, 24 // workers))
  time = st.sampled_from([0.5, 1.0, 1.25, 2.0, 7.0])
  times = [
    draw(st.lists(time, min_size=1, max_size=4)) for _ in range(workers)
  ]
  some = st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=3)
  keys = draw(st.lists(some, min_size=3, max_size=7))
  network = draw(st.sampled_from(NETWORKS))
  return World(workers, every, jobs, times, [sorted(k) for k in keys], network)


def work_of(world, value):
  def keys(job):
    return {"w": np.array(world.keys[job % len(world.keys)])}

  def gradient(rows, job, keys, *_):
    return 0.0, {"w": np.full((len(keys["w"]), 1), -value(job))}

  return tables.Work(lambda worker, job: job, keys, gradient)


def cycle(times):
  def stream(worker):
    while True:
      yield from times[worker]

  return Durations(stream)


def simulated(world, value=lambda job: 2.0**job, **options):
  reads, kind, more = [], tables.Simulation, {}
  if world.network is not None:
    kind, more = tables.OverNetwork, {"network": world.network}
    options = {"shards": 2, **options}
  run = kind(
    tables.table(1.0, world.workers, clock_every=world.every, **options),
    {"w": np.zeros((ROWS, 1))},
    work_of(world, value),
    cycle(world.times),
    workers=world.workers,
    messages=world.total,
    observe=reads.append,
    **more,
  )
  run.advance(world.total)
  return run, reads


class Past(NamedTuple):
  """The state of a run before a row of its trace."""

  ended: set  # jobs
  flushed: set  # jobs with updates that were sent
  slowest: int  # the least of all workers' clocks


def past(world, run, row, *, each_job=False):
  ended = {e.job for e in run.rows[:row] if e.action == base.RECEIVE}
  counts = [
    sum(job % world.workers == w for job in ended) for w in range(world.workers)
  ]
  over = [n == world.jobs for n in counts]
  clocks = [n // world.every for n in counts]
  flushed = {
    job
    for job in ended
    if each_job
    or over[job % world.workers]
    or world.clock(job) < clocks[job % world.workers]
  }
  # With its last job a worker has finished its last clock.
  done = -(-world.jobs // world.every)
  clocks = [done if end else n for n, end in zip(clocks, over, strict=True)]
  return Past(ended, flushed, min(clocks))


def jobs_in(value):
  """Returns the jobs with an update in a value."""
  number = int(value)
  return {job for job in range(number.bit_length()) if number >> job & 1}


def seen(world, read):
  """Yields (key, jobs in its row, all jobs that write to it) of a read."""
  for key, value in zip(read.keys["w"], read.values["w"][:, 0], strict=True):
    writers = {
      job
      for job in range(world.total)
      if key in world.keys[job % len(world.keys)]
    }
    yield jobs_in(value), writers


def own(world, run, read):
  ended = past(world, run, read.row).ended
  return {job for job in ended if job % world.workers == read.worker}


def check_what_all_keep(world, run, reads):
  orders.check(trace_lib.from_events(run.rows))
  assert run.received == world.total
  whole = {
    key: sum(
      2.0**job
      for job in range(world.total)
      if key in world.keys[job % len(world.keys)]
    )
    for key in range(ROWS)
  }
  # No update is lost, and none is applied twice.
  assert run.tables()["w"][:, 0].tolist() == list(whole.values())
  for read in reads:
    mine = own(world, run, read)
    for jobs, writers in seen(world, read):
      assert mine & writers <= jobs  # it reads its writes
      assert jobs <= past(world, run, read.row).ended


MANY = settings(max_examples=10, deadline=None)


@MANY
@given(worlds())
def test_bulk_synchronous_reads_what_is_of_clocks_before(world):
  run, reads = simulated(world, consistency="bulk_synchronous")
  check_what_all_keep(world, run, reads)
  assert set(run.differentials) <= {-1}
  for read in reads:
    before = {j for j in range(world.total) if world.clock(j) < read.clock}
    for jobs, writers in seen(world, read):
      assert jobs == (before | own(world, run, read)) & writers


@MANY
@given(worlds(), st.integers(0, 3), st.sampled_from(["ssp", "essp"]))
# Two messages with rows arrive at a waiting worker at the same time.
@example(
  World(2, 1, 7, [[0.5], [0.5]], [[0], [0, 1], [0], [2], [2]], NETWORKS[2]),
  *(1, "essp"),
)
def test_stale_synchronous_reads_what_the_bound_wants(world, bound, which):
  run, reads = simulated(world, consistency=which, bound=bound)
  check_what_all_keep(world, run, reads)
  assert all(-bound - 1 <= d <= -1 for d in run.differentials)
  for read in reads:
    now = past(world, run, read.row)
    assert read.clock - now.slowest <= bound
    wanted = {
      j for j in range(world.total) if world.clock(j) < read.clock - bound
    }
    for jobs, writers in seen(world, read):
      assert wanted & writers <= jobs
    if which == "essp" and world.network is None:
      # All that every worker has finished.
      assert (read.clocks["w"] == now.slowest).all()


@MANY
@given(worlds(), st.integers(0, 3), st.integers(0, 3))
def test_managed_keeps_the_bound_and_the_budget(world, bound, budget):
  run, reads = simulated(
    world, consistency="managed", bound=bound, budget=budget
  )
  check_what_all_keep(world, run, reads)
  for read in reads:
    wanted = {
      j for j in range(world.total) if world.clock(j) < read.clock - bound
    }
    for (jobs, writers), clock in zip(
      seen(world, read), read.clocks["w"], strict=True
    ):
      assert clock >= read.clock - bound
      assert wanted & writers <= jobs


@MANY
@given(worlds(), st.sampled_from([0.5, 2.0, 20.0]))
def test_value_bounded_lacks_no_more_than_the_bound(world, threshold):
  # Updates have both signs, so missing ones may cancel out.
  def value(job):
    return (-1.0) ** (job // 2) * (1 + job % 3) / 4

  run, reads = simulated(
    world, value, consistency="value_bounded", threshold=threshold
  )
  limits = []
  for read in reads:
    ended = past(world, run, read.row, each_job=True).ended
    limit = threshold / np.sqrt(read.clock + 1)
    for key, got in zip(read.keys["w"], read.values["w"][:, 0], strict=True):
      whole = sum(
        value(job) for job in ended if key in world.keys[job % len(world.keys)]
      )
      assert abs(whole - got) <= limit + 1e-9
      limits.append(abs(whole - got))
  assert len(limits) > 0


HOLDING = {
  "nothing": {},
  "skip": dict(filters=(dict(name="random_skip", probability=0.75),)),
  "small": dict(filters=(dict(name="significantly_modified", threshold=3.0),)),
  "codec": dict(codec=dict(name="sign")),
}


def most_lacking(network, threshold, options):
  """Returns the most that a read of a run of value_bounded lacks of all
  updates, divided by its bound."""
  times = [[1.0], [1.25], [2.0, 0.5]]
  world = World(3, 1, 8, times, [[0, 1], [0, 2], [0]], network)
  lacks = []

  def observe(read):
    keys = read.keys["w"]
    whole = np.array(run.server.tables["w"].peek(keys))
    for client in run._clients:
      rows = client._rows["w"]
      known = rows.has(keys)
      whole[known] += rows.read(keys[known], "own")
    most = np.abs(whole - read.values["w"]).max()
    lacks.append(most / threshold * np.sqrt(read.clock + 1))

  kind, more = tables.Simulation, {}
  if network is not None:
    kind, more = tables.OverNetwork, {"network": network}
  model = dict(consistency="value_bounded", threshold=threshold, shards=2)
  run = kind(
    tables.table(1.0, world.workers, **model, **options),
    {"w": np.zeros((ROWS, 1))},
    work_of(world, lambda job: (1 + job % 3) / 4),
    cycle(world.times),
    workers=world.workers,
    messages=world.total,
    observe=observe,
    **more,
  )
  assert run.advance(world.total) == world.total == len(lacks)
  return max(lacks)


@pytest.mark.parametrize("network", NETWORKS, ids=["none", "slow", "port"])
@pytest.mark.parametrize("holding", HOLDING)
def test_dai_2015_value_bounded_counts_all_updates_on_their_way(
  network, holding
):
  # The server's updates, also those since its reply, and the updates that
  # filters and a codec hold back at other workers.
  for threshold in (0.5, 2.0, 8.0):
    most = most_lacking(network, threshold, HOLDING[holding])
    assert most <= 1 + 1e-9


def test_value_bounded_holds_back_no_more_than_its_share():
  # 2 workers may each hold back half of 4 / sqrt(4 + 1) at v0 = 4.
  model = dict(consistency="value_bounded", threshold=4.0)
  skip = dict(name="significantly_modified", threshold=10.0)
  settings = tables.table(1.0, 2, filters=(skip,), **model).of_run(2, jobs=4)
  half = 2 / np.sqrt(5)
  assert settings.rules.hold == settings.rules.held == half
  assert settings.rules.limit(3) == 2.0 - half
  assert tables.table(1.0, 2, **model).of_run(2, jobs=4).rules.held == 0
  spec = {"w": tables.TableSpec((1,), np.float64)}
  client = tables.Client(
    0, spec, settings.rules, filters=settings.filters
  )
  keys = np.arange(3)
  client.take(tables.Rows(0, {"w": (keys, np.zeros((3, 1)))}))
  values = np.array([[0.5], [-1.0], [0.8]])
  client.write({"w": (keys, values)})
  push = client.flush(clock=1)
  assert push.tables["w"].keys.keys.tolist() == [1]
  client.write({"w": (keys[:1], values[:1])})
  assert client.flush(clock=2).tables["w"].values.tolist() == [[1.0]]


@pytest.mark.parametrize(
  "options",
  [
    dict(optimizer=optax.sgd, **HOLDING["skip"]),
    dict(optimizer=optax.adagrad, codec="int8"),
    dict(ftrl=dict(l1=0.1), filters=(dict(name="kkt", l1=0.1),)),
    dict(proximal=dict(l1=0.1)),
  ],
)
def test_value_bounded_refuses_what_changes_rows_by_an_unknown_value(options):
  with pytest.raises(ValueError, match="value_bounded cannot bound updates"):
    tables.table(
      0.1, 2, consistency="value_bounded", threshold=1.0, **options
    )


@MANY
@given(worlds(), st.integers(0, 3))
def test_delay_bounded_starts_when_all_have_finished(world, bound):
  run, reads = simulated(world, consistency="delay_bounded", bound=bound)
  check_what_all_keep(world, run, reads)
  for read in reads:
    now = past(world, run, read.row)
    assert now.slowest >= read.clock - bound
    for jobs, writers in seen(world, read):
      assert jobs == (now.flushed | own(world, run, read)) & writers


@MANY
@given(worlds())
def test_asynchronous_reads_what_the_server_has_and_never_waits(world):
  run, reads = simulated(world, consistency="asynchronous")
  check_what_all_keep(world, run, reads)
  for read in reads:
    now = past(world, run, read.row)
    for jobs, writers in seen(world, read):
      assert jobs == (now.flushed | own(world, run, read)) & writers
  for worker, times in enumerate(world.times):
    if world.network is not None:
      break
    ends = [
      e.time
      for e in run.rows
      if e.worker == worker and e.action == base.RECEIVE
    ]
    whole = [times[i % len(times)] for i in range(world.jobs)]
    np.testing.assert_allclose(ends, np.cumsum(whole))


@MANY
@given(worlds(), st.sampled_from(["ssp", "essp", "bulk_synchronous"]))
def test_an_order_obeyed_again_gives_the_same(world, which):
  bound = None if which == "bulk_synchronous" else 1
  if which == "essp":  # rows that are sent come when they come
    world = world._replace(network=None)
  run, reads = simulated(world, consistency=which, bound=bound)
  again = tables.Simulation(
    tables.table(
      1.0, world.workers, clock_every=world.every, consistency=which,
      bound=bound,
    ),
    {"w": np.zeros((ROWS, 1))},
    work_of(world, lambda job: 2.0**job),
    cycle([[1.0]] * world.workers),  # which no row of a trace needs
    workers=world.workers,
    messages=world.total,
  )
  again.replay(trace_lib.from_events(run.rows))
  assert again.rows == run.rows
  for a, b in zip(again.records(), run.records(), strict=True):
    assert a.tobytes() == b.tobytes()


def straggling(which, bound, jobs=12):
  """Returns the differentials of a cluster in which one worker sometimes takes
  twice as long. Jobs are short, and a clock has ten."""
  times = [[1.0] * 9 + [1.5], [1.0] * 9 + [1.5], [1.5] + [1.0] * 9]
  world = World(3, 10, 10 * jobs, times, [[0, 1], [1, 2], [3, 4]])
  run, _ = simulated(
    world, lambda job: 0.0, consistency=which, bound=bound
  )
  total = sum(run.differentials.values())
  return {d: count / total for d, count in run.differentials.items()}


@pytest.mark.parametrize("bound", [1, 3, 10])
def test_ssp_spreads_over_its_bound_and_essp_does_not(bound):
  ssp, essp = straggling("ssp", bound), straggling("essp", bound)
  even = 1 / (bound + 1)
  assert min(ssp) == -bound - 1
  assert all(ssp[-1 - d] > even / 3 for d in range(bound + 1))
  assert essp[-1] > 0.9


def test_bsp_comes_to_the_same_bits_whatever_the_workers_take():
  world = World(3, 2, 8, [[1.0], [3.0, 0.5], [0.25]], [[0, 1], [1, 4], [2]])

  def value(job):
    return np.sin(job)

  one, _ = simulated(world, value, consistency="bulk_synchronous")
  two, _ = simulated(
    world._replace(times=[[1.0], [1.0], [9.0]]),
    value,
    consistency="bulk_synchronous",
  )
  assert one.tables()["w"].tobytes() == two.tables()["w"].tobytes()


def test_a_row_that_its_model_does_not_allow_is_refused():
  world = World(2, 1, 4, [[1.0], [5.0]], [[0]])
  run, _ = simulated(world, consistency="ssp", bound=2)
  strict = tables.Simulation(
    tables.table(1.0, 2, consistency="ssp", bound=1),
    {"w": np.zeros((ROWS, 1))},
    work_of(world, float),
    cycle(world.times),
    workers=2,
    messages=8,
  )
  with pytest.raises(trace_lib.TraceError, match="too old|it was a"):
    strict.replay(trace_lib.from_events(run.rows))


def test_rules_say_what_is_missing_and_what_is_too_much():
  with pytest.raises(ValueError, match="'ssp' needs bound"):
    tables.rules("ssp")
  with pytest.raises(ValueError, match="has no bound, which is 3; drop it"):
    tables.rules("asynchronous", bound=3)
  with pytest.raises(ValueError, match="unknown consistency 'sspp'; did you"):
    tables.rules("sspp")
  with pytest.raises(ValueError, match="threshold must be a positive .*not 0"):
    tables.rules("value_bounded", threshold=0)
