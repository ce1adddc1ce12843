"""Makers: each order is what its definition says, row by row."""

import itertools
import math

import jax
import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from asgd import algorithms, base, orders, problems, simulator
from asgd.orders import durations
from asgd.worker import gradient_worker

quick = settings(deadline=None, derandomize=True, max_examples=50)

# Halves make ties between workers, the floats all other orders.
TIMES = st.one_of(st.sampled_from([0.5, 1.0, 1.5, 2.0]), st.floats(0.01, 100.0))
CLUSTERS = st.lists(
  st.lists(TIMES, min_size=1, max_size=5), min_size=1, max_size=5
)
MESSAGES = st.integers(1, 40)
BOUNDS = st.one_of(st.integers(0, 4), st.just(math.inf))


def events(trace):
  """Yields the rows as (time, worker, job, is_send) of Python numbers."""
  columns = [column.tolist() for column in trace]
  for time, worker, _, job, action in zip(*columns, strict=True):
    yield time, worker, job, action == base.SEND


def received(trace, column):
  return getattr(trace, column)[trace.action == base.RECEIVE]


def stale(rows, messages, bound, **options):
  clock = durations.measured(rows)
  return orders.stale_synchronous(
    clock, workers=len(rows), messages=messages, bound=bound, **options
  )


def free(rows, messages, **options):
  clock = durations.measured(rows)
  return orders.asynchronous(
    clock, workers=len(rows), messages=messages, **options
  )


def bulk(rows, rounds):
  clock, workers = durations.measured(rows), len(rows)
  return orders.bulk_synchronous(
    clock, workers=workers, messages=rounds * workers
  )


# The protocols.


def test_the_example_of_the_module():
  clock = durations.constant(slowdown=(1, 1.5))
  trace = orders.asynchronous(clock, workers=2, messages=3)
  assert orders.dump(trace) == kit.TRACE
  assert orders.staleness(trace).tolist() == [0, 1, 1]


def test_bulk_synchronous_by_hand():
  assert kit.steps(bulk([[1, 3], [2, 1]], rounds=2)) == [
    "0.0  send 0:0  send 1:1",
    "1.0  receive 0:0",
    "2.0  receive 1:1  send 0:2  send 1:3",
    "3.0  receive 1:3",
    "5.0  receive 0:2",
  ]


def test_stale_synchronous_by_hand():
  # Worker 0 may be one batch ahead: it waits from 2 until worker 1 ends one.
  assert kit.steps(stale([[1], [5]], 4, bound=1)) == [
    "0.0  send 0:0  send 1:1",
    "1.0  receive 0:0  send 0:2",
    "2.0  receive 0:2",
    "5.0  receive 1:1  send 0:3  send 1:4",
    "6.0  receive 0:3",
  ]


@quick
@given(CLUSTERS, MESSAGES, BOUNDS)
def test_stale_synchronous_is_its_definition(rows, messages, bound):
  """A worker starts if, and as soon as, it is no more than `bound` ahead; its
  message arrives one duration later; the earliest arrives first."""
  workers, clock = len(rows), durations.measured(rows)
  trace = stale(rows, messages, bound)
  assert orders.check(trace) == workers

  streams = [clock.stream(worker) for worker in range(workers)]
  finished = [0] * workers
  running = {}  # worker -> (when it ends, job)
  jobs = itertools.count()
  now = 0.0
  for time, worker, job, is_send in events(trace):
    ahead = [count - min(finished) for count in finished]
    if is_send:
      assert worker not in running
      assert ahead[worker] <= bound
      assert time == now
      assert job == next(jobs)
      running[worker] = (time + next(streams[worker]), job)
    else:
      for idle in set(range(workers)) - set(running):
        assert ahead[idle] > bound
      assert (time, job) == running.pop(worker)
      assert all((time, job) < other for other in running.values())
      finished[worker] += 1
      now = time

  assert sum(finished) == messages
  assert trace.action[-1] == base.RECEIVE
  assert len(running) < workers


@quick
@given(CLUSTERS, st.integers(1, 8), MESSAGES)
def test_bounds_of_stale_synchronous_give_the_other_protocols(
  rows, rounds, messages
):
  kit.same(stale(rows, rounds * len(rows), 0), bulk(rows, rounds))
  for bound in (math.inf, messages):  # no worker can be further ahead
    kit.same(stale(rows, messages, bound), free(rows, messages))


@quick
@given(CLUSTERS, MESSAGES, st.integers(0, 3))
def test_a_bound_between_whole_numbers_is_the_one_below(rows, messages, bound):
  kit.same(stale(rows, messages, bound), stale(rows, messages, bound + 0.5))


@quick
@given(CLUSTERS, MESSAGES, BOUNDS)
def test_a_shorter_trace_is_the_start_of_a_longer_one(rows, messages, bound):
  short, long = stale(rows, messages, bound), stale(rows, messages + 7, bound)
  kit.same(short, base.Trace(*(x[: len(short.time)] for x in long)))


@quick
@given(CLUSTERS, st.integers(1, 8))
def test_bulk_synchronous_rounds_take_the_time_of_the_slowest(rows, rounds):
  clock, workers = durations.measured(rows), len(rows)
  trace = bulk(rows, rounds)
  streams = [clock.stream(worker) for worker in range(workers)]
  slowest = [max(map(next, streams)) for _ in range(rounds)]
  ends = received(trace, "time").reshape(rounds, workers).max(1)
  np.testing.assert_array_equal(ends, np.cumsum(slowest))
  actions = trace.action.reshape(rounds, 2, workers)
  assert (actions[:, 0] == base.SEND).all()
  assert (actions[:, 1] == base.RECEIVE).all()


def test_fixed_delay_by_hand():
  trace = orders.fixed_delay(delay=1, messages=3)
  assert kit.steps(trace) == [
    "0.0  send 0:0  send 1:1",
    "1.0  receive 0:0  send 0:2",
    "2.0  receive 1:1  send 1:3",
    "3.0  receive 0:2",
  ]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_fixed_delay_warms_up_then_is_fixed(delay):
  trace = orders.fixed_delay(delay=delay, messages=12)
  assert orders.check(trace) == delay + 1
  expected = [min(message, delay) for message in range(12)]
  assert orders.staleness(trace).tolist() == expected
  assert received(trace, "job").tolist() == list(range(12))


def test_fixed_delay_shorter_than_its_warmup():
  trace = orders.fixed_delay(delay=5, messages=2)
  assert orders.staleness(trace).tolist() == [0, 1]
  assert orders.check(trace) == 6


@pytest.mark.parametrize("workers", [1, 4])
def test_fixed_delay_is_the_order_of_equal_workers(workers):
  fixed = orders.fixed_delay(delay=workers - 1, messages=30)
  equal = orders.asynchronous(
    durations.constant(), workers=workers, messages=30
  )
  kit.same(fixed._replace(time=equal.time), equal)


# Jobs and staleness.


@quick
@given(CLUSTERS, MESSAGES, BOUNDS)
def test_jobs_are_numbered_by_sends_and_received_at_most_once(
  rows, messages, bound
):
  fixed = orders.fixed_delay(delay=len(rows) - 1, messages=messages)
  for trace in (stale(rows, messages, bound), fixed):
    sent = trace.job[trace.action == base.SEND]
    np.testing.assert_array_equal(sent, np.arange(len(sent)))
    jobs = received(trace, "job")
    assert len(jobs) == len(set(jobs.tolist())) == messages
    assert set(jobs.tolist()) <= set(sent.tolist())


def count_staleness(trace, every=1):
  """Returns the staleness of received messages, and that which the tickets
  still open have gathered."""
  versions, counts, messages = {}, [], 0
  for _, worker, _, is_send in events(trace):
    if is_send:
      versions[worker] = messages // every
    else:
      counts.append(messages // every - versions.pop(worker))
      messages += 1
  return counts, [messages // every - sent for sent in versions.values()]


@quick
@given(CLUSTERS, MESSAGES, BOUNDS, st.integers(1, 4))
def test_staleness_counts_changes_between_send_and_receive(
  rows, messages, bound, every
):
  trace = stale(rows, messages, bound)
  expected, _ = count_staleness(trace, every)
  got = orders.staleness(trace, every)
  assert got.dtype == np.int32
  assert got.tolist() == expected


@quick
@given(CLUSTERS, MESSAGES)
def test_mean_staleness_is_workers_minus_one(rows, messages):
  """All N workers hold a ticket whenever a message is received, from the first
  on. It closes one, and makes the N - 1 others staler by one. So after U
  messages the staleness received, and that gathered by the N - 1 tickets still
  open, are together U (N - 1) to the last digit."""
  workers = len(rows)
  fixed = orders.fixed_delay(delay=workers - 1, messages=messages)
  for trace in (free(rows, messages), fixed):
    _, still_open = count_staleness(trace)
    assert len(still_open) == workers - 1
    total = orders.staleness(trace).sum() + sum(still_open)
    assert total == messages * (workers - 1)


@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
def test_mean_staleness_of_a_long_trace(name):
  clock = durations.build(name, seed=3)
  trace = orders.asynchronous(clock, workers=8, messages=2000)
  # Open tickets hold back at most 7 times the staleness of the slowest worker,
  # which for unequal machines is some tens.
  counts = orders.staleness(trace)
  assert counts.max() < 100
  assert counts.mean() == pytest.approx(7, abs=7 * 100 / 2000)


@quick
@given(CLUSTERS, st.integers(1, 8))
def test_synchronous_updates_are_never_stale(rows, rounds):
  assert not orders.staleness(bulk(rows, rounds), every=len(rows)).any()


@pytest.mark.parametrize("every", [1, 3])
def test_staleness_is_what_a_server_measures(every):
  trace = orders.asynchronous(
    durations.heterogeneous(seed=1), workers=4, messages=20
  )
  problem = problems.quadratic([1.0, 2.0])
  recipe = algorithms.build("asgd", 0.01, 4)._replace(every=every)
  host = simulator.make_host(recipe.server(), gradient_worker(problem.loss))
  key = jax.random.key(0)
  _, records = host.run(
    host.init(problem.init(key), 4),
    *(trace, len(trace.time)),
    batch=problem.batches(0, 4),
    root=key,
  )
  expected = orders.staleness(trace, every)
  np.testing.assert_array_equal(records.staleness, expected)
  assert expected.max() > 1


# Time.


def expected_maximum(workers):
  """E[max] of N batch times of the papers' equal machines, by quadrature."""
  times = stats.gamma(1 / 0.1**2, scale=0.1**2)
  below, _ = integrate.quad(lambda t: 1 - times.cdf(t) ** workers, 0, 3)
  return below


@pytest.mark.parametrize(("workers", "published"), [(8, 1.147), (32, 1.219)])
def test_synchronous_rounds_of_equal_machines(workers, published):
  assert round(expected_maximum(workers), 3) == published
  rounds = 150
  clock = durations.homogeneous(2.0, seed=11)
  trace = orders.bulk_synchronous(
    clock, workers=workers, messages=rounds * workers
  )
  # A maximum varies by less than one time, 0.1; its mean by 0.1 / sqrt(150).
  per_round = trace.time[-1] / rounds / 2
  assert per_round == pytest.approx(published, abs=4 * 0.1 / rounds**0.5)


@pytest.mark.parametrize("workers", [8, 32])
def test_asynchronous_machines_never_wait(workers):
  messages = 100 * workers
  clock = durations.homogeneous(2.0, seed=11)
  trace = orders.asynchronous(clock, workers=workers, messages=messages)
  # N workers make N messages a mean time. The batches at work at the end cost
  # up to one more; the sum of 100 times varies by 0.1 sqrt(100), the mean of N
  # such sums by 0.1 sqrt(100 / N). Synchronous rounds would take 114 and more.
  tolerance = 1 + 4 * 0.1 * (100 / workers) ** 0.5
  assert trace.time[-1] / 2 == pytest.approx(100, abs=tolerance)


# By name.


def test_build_is_the_maker_by_name():
  clock = durations.measured([[1], [2, 3], [5]])
  kwargs = dict(workers=3, messages=12)
  for name, options in [
    ("asynchronous", {}),
    ("asynchronous", dict(depth=2, fetch_every=3)),
    ("bulk_synchronous", {}),
    ("stale_synchronous", dict(bound=1)),
    ("stale_synchronous", dict(bound=2, cache=True)),
    ("backup_workers", dict(backup=1)),
    ("backup_tasks", dict(late=1.5)),
  ]:
    built = orders.build(name, clock, **kwargs, **options)
    kit.same(built, getattr(orders, name)(clock, **kwargs, **options))
  fixed = orders.fixed_delay(delay=2, messages=12)
  kit.same(orders.build("fixed_delay", clock, **kwargs), fixed)


@pytest.mark.parametrize(
  "name", ["asynchronous", "bulk_synchronous", "fixed_delay"]
)
def test_build_counts_in_numpy_numbers_too(name):
  clock = durations.constant()
  ours = orders.build(name, clock, workers=3, messages=6)
  numpys = orders.build(name, clock, workers=np.int64(3), messages=np.int64(6))
  kit.same(ours, numpys)


def test_build_names_the_nearest_order_and_argument():
  def build(name, **kwargs):
    orders.build(name, durations.constant(), workers=2, messages=4, **kwargs)

  with pytest.raises(ValueError, match="'async'; did you mean 'asynchronous'"):
    build("async")
  with pytest.raises(ValueError, match="needs the argument 'bound'"):
    build("stale_synchronous")
  with pytest.raises(ValueError, match="'bounds'; did you mean 'bound'"):
    build("stale_synchronous", bounds=1)
  with pytest.raises(ValueError, match="takes no argument 'bound'"):
    build("asynchronous", bound=1)


# Errors.


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3", None])
def test_counts_must_be_positive_whole_numbers(count):
  clock = durations.constant()
  float_remedy = ", which is a float: write 2" if count == 2.0 else ""
  words = f"must be a positive whole number, not {count!r}{float_remedy}$"
  for maker in (orders.asynchronous, orders.bulk_synchronous):
    with pytest.raises(ValueError, match=f"workers {words}"):
      maker(clock, workers=count, messages=4)
    with pytest.raises(ValueError, match=f"messages {words}"):
      maker(clock, workers=2, messages=count)
  with pytest.raises(ValueError, match=f"messages {words}"):
    orders.fixed_delay(delay=1, messages=count)
  with pytest.raises(ValueError, match=f"workers {words}"):
    orders.build("fixed_delay", clock, workers=count, messages=4)


@pytest.mark.parametrize("delay", [-1, 1.0, True, "2"])
def test_delays_must_be_whole_numbers(delay):
  words = f"delay must be a whole number, 0 or more, not {delay!r}"
  with pytest.raises(ValueError, match=words):
    orders.fixed_delay(delay=delay, messages=4)


@pytest.mark.parametrize("bound", [-1, math.nan])
def test_bounds_must_not_be_negative(bound):
  with pytest.raises(ValueError, match=f"0 or more, not {bound}"):
    stale([[1], [1]], 4, bound)


@pytest.mark.parametrize(
  ("messages", "workers", "remedies"), [(10, 4, [8, 12]), (3, 4, [4])]
)
def test_broken_rounds_are_refused_with_numbers_that_are_not(
  messages, workers, remedies
):
  words = f"{messages} messages are not .* rounds of {workers} workers; use "
  words += " or ".join(map(str, remedies)) + "$"
  clock = durations.constant()
  with pytest.raises(ValueError, match=words):
    orders.bulk_synchronous(clock, workers=workers, messages=messages)
  for remedy in remedies:
    orders.bulk_synchronous(clock, workers=workers, messages=remedy)


# Backups, caches, depth and jobs on one ticket.


def test_backup_workers_by_hand():
  trace = orders.backup_workers(
    durations.constant(slowdown=(1, 1.5, 4)), workers=3, messages=7, backup=1
  )
  assert kit.steps(trace) == [
    "0.0  send 0:0  send 1:1  send 2:2",
    # The message of job 0 came at 1, and waited for a second one.
    "1.5  receive 0:0  receive 1:1  send 0:3  send 1:4",
    "2.5  send 0:5",  # has handed in, and is the backup while 2 is busy
    "3.0  receive 0:3  receive 1:4  send 1:6",
    "3.5  receive 0:5  send 0:7",  # job 5 is too late for its round
    "4.0  receive 2:2  send 2:8",  # job 2 is too late by two rounds
    # One message more than was asked for: a round is received whole.
    "4.5  receive 1:6  receive 0:7",
  ]
  assert orders.check(trace, depth=2) == 3


def test_backup_workers_without_backups_are_bulk_synchronous():
  clock = durations.heterogeneous(seed=2)
  plain = orders.bulk_synchronous(clock, workers=3, messages=30)
  backup = orders.backup_workers(clock, workers=3, messages=30, backup=0)
  ends = plain.time[plain.action == base.RECEIVE]
  received = backup.action == base.RECEIVE
  np.testing.assert_array_equal(backup.time[received], ends[2::3].repeat(3))
  assert backup.job[received].tolist() == list(range(30))
  starts = backup.action == base.SEND
  np.testing.assert_array_equal(
    backup.time[starts], plain.time[plain.action == base.SEND]
  )


@pytest.mark.parametrize("backup", [-1, 3, 1.0, True])
def test_somebody_must_be_left_to_wait_for(backup):
  words = f"backup must be (a whole number, 0|at most 2, of 3).* not {backup!r}"
  with pytest.raises(ValueError, match=words):
    orders.backup_workers(
      durations.constant(), workers=3, messages=3, backup=backup
    )


def test_a_cache_in_an_order_by_hand():
  trace = stale([[1], [3]], 6, bound=2, cache=True)
  assert kit.steps(trace) == [
    "0.0  send 0:0  send 1:1",
    "1.0  receive 0:0  keep 0:2",
    "2.0  receive 0:2  keep 0:3",
    # Job 5 is at clock 3, and the worker's copy of clock 0.
    "3.0  receive 1:1  keep 1:4  receive 0:3  send 0:5",
    "4.0  receive 0:5",  # clock 4: three ahead
    "6.0  receive 1:4",
  ]
  # A kept ticket has the updates of its worker's jobs before.
  assert orders.staleness(trace).tolist() == [0, 0, 2, 1, 0, 4]


def test_depth_2_in_an_order_by_hand():
  trace = free([[1], [2]], 4, depth=2)
  assert kit.steps(trace) == [
    "0.0  send 0:0  send 1:1  send 0:2  send 1:3",
    # Job 4 starts at 2, when job 2 is done.
    "1.0  receive 0:0  send 0:4",
    "2.0  receive 1:1  send 1:5  receive 0:2  send 0:6",
    "3.0  receive 0:4",
  ]
  assert orders.check(trace, depth=2) == 2
  with pytest.raises(ValueError, match="row 2 .* holds a ticket already"):
    orders.check(trace)


def test_stages_in_an_order_by_hand():
  # Worker 1 may start after two messages of worker 0, at 2.
  trace = free([[1], [2]], 4, stages=((1, 2),))
  starts = trace.action == base.SEND
  rows = zip(trace.time[starts], trace.worker[starts], strict=True)
  assert list(rows) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]
  assert orders.staleness(trace).tolist() == [0, 0, 0, 1]


def test_a_warm_start_in_an_order_by_hand():
  trace = free([[1], [2]], 4, warm_start=2)
  assert kit.steps(trace) == [
    "0.0  send 0:0",
    "1.0  receive 0:0  send 0:1",
    "2.0  receive 0:1  send 0:2  send 1:3",
    "3.0  receive 0:2  send 0:4",
    "4.0  receive 1:3",
  ]
  assert orders.staleness(trace).tolist() == [0, 0, 0, 1]


def test_fetch_every_in_an_order_by_hand():
  trace = free([[1], [2]], 5, fetch_every=2)
  assert kit.steps(trace) == [
    "0.0  send 0:0  send 1:1",
    "1.0  receive 0:0  keep 0:2",
    "2.0  receive 1:1  keep 1:3  receive 0:2  send 0:4",
    "3.0  receive 0:4  keep 0:5",
    "4.0  receive 1:3",
  ]
  # A kept ticket has the update of its worker's job before.
  assert orders.staleness(trace).tolist() == [0, 1, 1, 0, 3]


@quick
@given(CLUSTERS, st.integers(1, 40), st.integers(0, 4))
def test_a_copy_is_kept_exactly_as_long_as_the_bound_allows(
  rows, messages, bound
):
  trace = stale(rows, messages, bound, cache=True)
  orders.check(trace)
  clock = [0] * len(rows)
  copied = [None] * len(rows)  # the slowest clock when the copy was made
  columns = (column.tolist() for column in trace)
  for _, worker, _, _, action in zip(*columns, strict=True):
    if action == base.RECEIVE:
      clock[worker] += 1
      continue
    old = copied[worker] is None or clock[worker] - copied[worker] > bound
    assert action == (base.SEND if old else base.KEEP)
    if old:
      copied[worker] = min(clock)


@quick
@given(CLUSTERS, st.integers(1, 40), st.integers(1, 3), st.integers(1, 4))
def test_orders_of_all_kinds_can_be_obeyed(rows, messages, depth, fetch_every):
  clock, workers = durations.measured(rows), len(rows)
  trace = free(rows, messages, depth=depth, fetch_every=fetch_every)
  assert orders.check(trace, depth=depth) == workers
  ended = trace.action == base.RECEIVE
  assert ended.sum() == messages
  # A worker's jobs end one after the other, one duration each.
  for worker in range(workers):
    times = trace.time[ended & (trace.worker == worker)]
    stream = clock.stream(worker)
    spent = list(itertools.accumulate(next(stream) for _ in times))
    np.testing.assert_allclose(times, spent)
    starts = trace.action[(trace.worker == worker) & ~ended]
    fresh = (np.arange(len(starts)) % fetch_every == 0).tolist()
    assert (starts == base.SEND).tolist() == fresh


def test_options_that_do_not_fit_are_refused():
  kwargs = dict(durations=durations.constant(), workers=3, messages=12)
  with pytest.raises(ValueError, match="a cache needs a finite bound"):
    orders.stale_synchronous(**kwargs, bound=math.inf, cache=True)
  with pytest.raises(ValueError, match="depth must be a positive whole number"):
    orders.asynchronous(**kwargs, depth=0)
