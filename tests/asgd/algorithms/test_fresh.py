"""Recipes that use fresh gradients only: dropped messages, stopped jobs."""

import jax
import kit
import numpy as np
import pytest

import asgd
from asgd import algorithms, base, orders, problems, simulator
from asgd import worker as worker_lib
from asgd.algorithms.recipe import Recipe
from asgd.orders import durations

pytestmark = pytest.mark.usefixtures("float64")

WORKERS, KEY = 4, jax.random.key(0)
PROBLEM = problems.quadratic(np.linspace(1, 5, 7), noise=0.3)
START = PROBLEM.init(KEY)


def order_of(recipe: Recipe, messages=120, clock=None):
  clock = clock or durations.heterogeneous(seed=2)
  return orders.build(
    *(recipe.order, clock),
    workers=WORKERS,
    messages=messages,
    **dict(recipe.order_options),
  )


def run(recipe, trace, make=simulator.make_host):
  worker = worker_lib.gradient_worker(PROBLEM.loss, recipe.at_worker)
  data = {"batch": PROBLEM.batches(0, WORKERS), "root": KEY}
  made = make(recipe.server(), worker)
  return simulator.run_whole(made, START, WORKERS, trace, **data)


def hand(name, clock, gradients, **options):
  """Two workers, by the recipe's order: the gradient of job j is gradients[j].

  Returns (job, accepted, parameter) of each message, from a parameter of 8."""
  recipe = algorithms.build(name, 0.5, 2, **options)
  trace = orders.build(
    recipe.order, clock, workers=2, messages=3, **dict(recipe.order_options)
  )
  worker = asgd.gradient_worker(lambda w, batch: w * batch)
  host = simulator.make_host(recipe.server(), worker)
  batch = {"batch": lambda worker, job: np.float64(gradients[job]), "root": KEY}
  simulation, rows, path = host.init(np.float64(8.0), 2), [], []
  for end in simulator.end_of_message(trace):
    simulation, records = host.run(simulation, trace, end, **batch)
    rows += zip(records.job, records.accepted, strict=True)
    path.append(float(simulation.server.params))
  return [(*row, value) for row, value in zip(rows, path, strict=True)]


def test_ringmaster_by_hand():
  # Worker 1 takes 1.5: it ends job 1 after worker 0's job 0, before its job 2.
  clock = durations.constant(slowdown=[1, 1.5])
  gradients = (4.0, 2.0, 1.0)
  # R = 1: job 1 was sent before job 0 moved the parameter.
  assert hand("ringmaster_asgd", clock, gradients, threshold=1) == [
    (0, True, 6.0), (1, False, 6.0), (2, True, 5.5)
  ]
  assert hand("ringmaster_asgd", clock, gradients, threshold=2) == [
    (0, True, 6.0), (1, True, 5.0), (2, True, 4.5)
  ]


def test_ringmaster_with_stops_by_hand():
  clock = durations.constant(slowdown=[1, 1.5])
  options = {"threshold": 1, "stops": True}
  # At 1 worker 1 is stopped; at 2, where it would end at 2.5, again.
  rows = hand("ringmaster_asgd", clock, np.arange(9.0), **options)
  assert rows == [(0, True, 8.0), (2, True, 7.0), (4, True, 5.0)]


def test_rennala_by_hand():
  clock = durations.constant(slowdown=[1, 2.5])
  # Worker 0 sends both gradients of the first update; worker 1's job 1, of the
  # same parameters, is late then. Job 3 waits for another.
  assert hand("rennala_sgd", clock, (4.0, 2.0, 2.0, 1.0)) == [
    (0, True, 8.0), (2, True, 6.5), (1, False, 6.5)
  ]


def test_mindflayer_by_hand():
  # Worker 1 takes 9, then 1: it is stopped at 1.5, and ends at 2.5.
  clock = durations.measured([[1.0], [9.0, 1.0]])
  rows = hand("mindflayer_sgd", clock, (4.0, 2.0, 2.0, 6.0, 9.0), budget=1.5)
  # Job 3 is worker 1's second one, begun before the update of jobs 0 and 2.
  assert rows == [(0, True, 8.0), (2, True, 6.5), (3, False, 6.5)]


def test_without_a_budget_mindflayer_is_rennala():
  recipes = [
    algorithms.build(name, 0.02, WORKERS, every=3)
    for name in ("mindflayer_sgd", "rennala_sgd")
  ]
  kit.same(*map(order_of, recipes))
  kit.same(*(run(recipe, order_of(recipe))[0].server for recipe in recipes))


@pytest.mark.parametrize("every", [1, 3, 8])
def test_rennala_uses_gradients_of_the_present_parameters_only(every):
  recipe = algorithms.build("rennala_sgd", 0.02, WORKERS, every=every)
  simulation, records = run(recipe, order_of(recipe))
  assert (records.staleness[records.accepted] == 0).all()
  assert not records.accepted[records.staleness > 0].any()
  assert (records.gap[records.accepted] == 0).all()
  version = int(simulation.server.version)
  assert version == records.accepted.sum() // every > 1
  # Some are late, in an asynchronous order.
  assert not records.accepted.all()


def test_stops_use_each_message_where_a_gate_drops_some():
  options = [{"threshold": 2, "stops": stops} for stops in (False, True)]
  dropped, stopped = (
    algorithms.build("ringmaster_asgd", 0.02, WORKERS, **each)
    for each in options
  )
  _, records = run(dropped, order_of(dropped))
  assert not records.accepted.all() and records.accepted.sum() > 20
  assert records.staleness[records.accepted].max() == 1
  trace = order_of(stopped)
  _, records = run(stopped, trace)
  assert records.accepted.all() and records.staleness.max() == 1
  assert (trace.action == base.STOP).sum() > 5
  # The staleness is that of the trace: each message is an update.
  np.testing.assert_array_equal(records.staleness, orders.staleness(trace))


@pytest.mark.parametrize("name", ["asgd", "dana_zero", "dana_slim"])
def test_the_engines_agree_on_an_order_with_stops(name):
  recipe = algorithms.build(name, 0.02, WORKERS)
  clock, options = durations.heterogeneous(seed=2), {"budget": 1.2}
  trace = orders.with_stops(
    clock, workers=WORKERS, messages=90, stop_after=4, **options
  )
  assert (trace.action == base.STOP).sum() > 20
  host, records = run(recipe, trace)
  assert len(records.loss) == 90
  for make in (simulator.make_chunk, simulator.make_rounds):
    other, its_records = run(recipe, trace, make)
    kit.close(other.server.params, host.server.params, rtol=1e-12)
    np.testing.assert_array_equal(its_records.staleness, records.staleness)
