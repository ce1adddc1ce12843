"""Sandblaster in simulated time: the assignment of jobs changes no iterate."""

import functools
import json

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.orders import durations, trace
from asgd.orders.network import Network
from asgd.sandblaster import (
  PlannedKill,
  SandblasterOverNetwork,
  SandblasterSimulation,
  Saved,
  Settings,
  sandblaster_lbfgs,
  template,
)
from asgd.sandblaster.portions import PortionJobs

PORTIONS = 10
DATA = kit.normal(PORTIONS, 6, 4)
TARGETS = kit.normal(PORTIONS, 6, seed=1)


@jax.jit
def work_of(params, x, y):
  def loss(params):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

  return jax.value_and_grad(loss)(params)


def work(params, portion):
  return work_of(params, DATA[portion], TARGETS[portion])


PARAMS = {"v": kit.normal(3, seed=2), "w": kit.normal(4, 3, seed=3)}
GAMMA = durations.gamma(1.0, variation=0.5, seed=3)


def make(workers=4, times=GAMMA, saved=None, network=None, **settings):
  options = Settings(**{"portions": PORTIONS, "history": 4, **settings})
  kind = SandblasterSimulation
  if network is not None:
    kind = functools.partial(SandblasterOverNetwork, network=network)
  return kind(options, PARAMS, work, times, workers=workers, saved=saved)


def run(until=150, **options):
  with jax.enable_x64(True):
    simulation = make(**options)
    simulation.advance(until)
    return simulation


@pytest.fixture(scope="module")
def whole():
  return run(push_every=2)


def losses(simulation, count):
  return [each.loss for each in simulation.run_log.iterates[:count]]


@pytest.mark.parametrize(
  "options",
  [
    {"workers": 1},
    {"workers": 7, "backup": 0},
    {"workers": 4, "times": durations.constant(slowdown=[1, 9])},
    {"workers": 9, "loading": 2.0, "prefetch": False},
  ],
  ids=["one", "seven", "slow", "loading"],
)
def test_who_computes_changes_no_bit(whole, options):
  other = run(push_every=2, **options)
  count = min(len(whole.run_log.iterates), len(other.run_log.iterates))
  assert count > 11
  assert losses(other, count) == losses(whole, count)


def test_shards_and_sizes_of_jobs_change_round_off_only(whole):
  for options in ({"push_every": 2, "shards": 3}, {"push_every": 1}):
    other = run(**options)
    count = min(len(whole.run_log.iterates), len(other.run_log.iterates), 12)
    np.testing.assert_allclose(
      losses(other, count), losses(whole, count), rtol=1e-10
    )


def test_killed_processes_change_no_iterate():
  kills = [
    PlannedKill(0.7 * i + 0.1, what, index)
    for i in range(25)
    for what, index in (("worker", i % 4), ("shard", i % 2), ("coordinator", 0))
  ]
  one = run(push_every=2, shards=2)
  other = run(push_every=2, shards=2, failures=tuple(kills), restart=0.4)
  assert other.recoveries > 5
  actions = [row.action for row in other.run_log.rows]
  assert actions.count(base.LOST) > 10
  assert actions.count(base.JOIN) > 20
  count = min(len(one.run_log.iterates), len(other.run_log.iterates))
  assert count > 12
  assert losses(other, count) == losses(one, count)
  assert other.run_log.iterates[10].time > one.run_log.iterates[10].time
  assert orders.check(trace.from_events(other.run_log.rows)) == 4


def test_the_trace_can_be_read_and_says_what_was_done(whole):
  text = orders.dump(trace.from_events(whole.run_log.rows))
  again = orders.load(text.splitlines(keepends=True))
  kit.same(again, trace.from_events(whole.run_log.rows))
  assert orders.check(again) == 4
  records = whole.run_log.records()
  assert len(records.loss) == (again.action == base.RECEIVE).sum() == 150
  assert np.isfinite(records.loss).all()
  # A worker fetches once for an evaluation, and keeps the parameters then.
  fetched = {}
  for row in trace.events(again):
    evaluation = row.job // 5
    if row.action == base.SEND:
      assert fetched.get(row.worker, -1) < evaluation
      fetched[row.worker] = evaluation
    elif row.action == base.KEEP:
      assert fetched[row.worker] == evaluation
  # Each job of an evaluation counts once.
  jobs = records.job[records.accepted]
  assert len(set(jobs.tolist())) == len(jobs)
  assert sorted(jobs.tolist()) == list(range(len(jobs)))
  assert not records.accepted.all()
  assert (records.staleness[records.accepted] == 0).all()


def test_backup_tasks_do_the_work_of_a_slow_worker():
  slow = durations.constant(slowdown=[10])
  with_backup = run(times=slow, workers=3, until=60)
  without = run(times=slow, workers=3, until=60, backup=0)
  assert without.counts.copies == 0
  assert with_backup.counts.first > 0
  # Two others do nine portions, and a copy of the slow one's, in 5.
  assert with_backup.run_log.iterates[0].time == 5.0
  assert without.run_log.iterates[0].time == 10.0


def test_data_are_loaded_once_and_ahead():
  clock, times = durations.constant(), {}
  for prefetch in (False, True):
    options = {"loading": 0.5, "prefetch": prefetch, "workers": 1}
    other = run(times=clock, until=21, **options)
    times[prefetch] = [each.time for each in other.run_log.iterates]
  assert times[False] == [15.0, 25.0]
  assert times[True] == [10.5, 20.5]


def test_jobs_stay_with_the_worker_that_has_their_data():
  jobs = PortionJobs(4)
  for _ in range(3):
    jobs.begin()
    for job, worker in enumerate((0, 1, 0, 1)):
      assert jobs.take(worker) == job
      assert jobs.finish(worker, job)
  jobs.begin()
  assert [jobs.take(0) for _ in range(3)] == [0, 2, 3]  # the other's last
  jobs.lose(0, 3)
  assert jobs.peek(1) == jobs.take(1) == 1
  assert jobs.take(1) == 3


@pytest.mark.parametrize("until", [0, 3, 40, 77])
def test_a_simulation_goes_on_from_what_was_saved(until):
  kills = (PlannedKill(2.5, "worker", 1), PlannedKill(9.0, "coordinator", 0))
  with jax.enable_x64(True):
    one, two = (make(push_every=2, failures=kills) for _ in range(2))
    one.advance(100)
    two.advance(until)
    number, arrays, notes = two.save()
    notes = json.loads(json.dumps(notes))
    like = template(notes, PARAMS, Settings())
    assert jax.tree.structure(like) == jax.tree.structure(arrays)
    again = make(
      push_every=2, failures=kills, saved=Saved(number, arrays, notes)
    )
    assert again.received <= until
    again.advance(100)
  assert again.run_log.rows == one.run_log.rows
  kit.same(again.run_log.records(), one.run_log.records())
  kit.same(again.params(), one.params())
  assert again.run_log.iterates == one.run_log.iterates
  assert again.counts == one.counts


test_options_out_of_range = kit.refuses(
  [
    ({"history": 0}, "history must be a positive whole number, not 0"),
    ({"portions": 2.5}, "portions must be a positive whole number, not 2.5"),
    ({"backup": -1}, "backup must be a whole number, 0 or more, not -1"),
    ({"weight_decay": -1}, "weight_decay must be 0 or more, not -1"),
    ({"prefetch": 1}, "prefetch must be True or False, not 1"),
    ({"failures": [3]}, "a failure must be \\(time, kind, index\\)"),
    ({"failures": [(1, "driver", 0)]}, "must be one of worker, shard, coord"),
    ({"failures": [(1, "worker", 2)]}, "worker must be at most 1, not 2"),
  ],
  lambda options: sandblaster_lbfgs(0.1, 2, **options),
)


# Over a network.

NETWORK = Network(latency=0.25, up=64.0, down=96.0, port=80.0, service=0.125)


def test_a_network_changes_no_iterate(whole):
  over = run(push_every=2, shards=2, network=NETWORK)
  assert losses(over, 8) == losses(run(push_every=2, shards=2), 8)
  assert over.now > whole.now
  use = over.use()
  assert 0 < use.service < 1 and 0 < use.utilisation < 1 and use.waited > 0


def test_times_over_a_network_by_hand():
  clock = durations.constant(2.0)
  alone = {"workers": 1, "portions": 3, "shards": 1, "backup": 0}
  over = run(until=6, times=clock, network=NETWORK, **alone)
  nbytes = sum(leaf.nbytes for leaf in PARAMS.values())
  # A job: the assignment, the computation, the gradient, the answer.
  job = 0.25 + 2.0 + (nbytes / 64 + 0.25 + 0.125) + 0.25
  fetch = (0.25 + 0.125) + (0.25 + nbytes / 80)  # once for each evaluation
  dots = over.run_log.iterates[0].time - over.run_log.records().time[2]
  first = np.array([fetch + job, fetch + 2 * job, fetch + 3 * job])
  # The norm of the gradient; the slope along the first direction.
  assert dots == 2 * 0.25
  times = over.run_log.records().time
  np.testing.assert_allclose(times[:3], first, rtol=1e-12)
  waits = times[3] - times[2] - (fetch + job)
  assert waits > 0 and waits % (2 * 0.25) == pytest.approx(0, abs=1e-9)


def test_jobs_over_a_network_go_on_from_a_checkpoint_to_the_same_bits():
  options = {
    "push_every": 2,
    "shards": 2,
    "network": NETWORK,
    "failures": (
      PlannedKill(3.1, "worker", 1),
      PlannedKill(40.0, "worker", 0),
      PlannedKill(50.0, "shard", 1),
      PlannedKill(60.0, "coordinator", 0),
    ),
  }
  with jax.enable_x64(True):
    expected, first = make(**options), make(**options)
    expected.advance(150)
    first.advance(70)
    saved = first.save()
    notes = json.loads(json.dumps(saved.notes))
    again = make(saved=Saved(0, saved.arrays, notes), **options)
    again.advance(150)
  assert again.run_log.rows == expected.run_log.rows
  assert again.run_log.iterates == expected.run_log.iterates
  assert again.use() == expected.use()
