"""What simulated and live runs share: schedules, jobs, rounds and orders."""

import functools

import jax
import kit
import numpy as np
import pytest

from asgd import base, orders, sharding, simulator
from asgd.experiment.engines import server_results

build = functools.partial(
  kit.build, {"model": {"name": "mlp", "hidden": (8,)}}
)


def test_seeds_draw_other_orders_and_runs_share_them():
  exp = build(
    runs={"a": {"recipe": "asgd"}, "b": {"recipe": "dana_zero"}},
    seeds=(0, 1),
    workers=(4,),
  )
  plans = [exp.plan(cell) for cell in exp.cells]
  first, second = (plans[0].trace(seed, messages=40).time for seed in (0, 1))
  assert (first != second).any()
  for plan in plans:
    np.testing.assert_array_equal(first, plan.trace(0, messages=40).time)


def test_the_schedule_counts_updates_not_messages():
  exp = build(
    runs={"ssgd": {"recipe": "ssgd"}, "asgd": {"recipe": "asgd"}},
    workers=(4,),
    batch_size=16,  # 89 batches in an epoch
    learning_rate=0.4,
    learning_rate_schedule={
      "warmup_epochs": 1.0,
      "decay_epochs": (2.0,),
      "decay_factor": 0.5,
    },
  )
  for label, per_epoch in (("asgd", 89), ("ssgd", 22)):
    (cell,) = (c for c in exp.cells if c.label == label)
    schedule = exp.plan(cell).schedule
    assert float(schedule(0)) == pytest.approx(0.1)  # the peak over N
    assert float(schedule(per_epoch)) == pytest.approx(0.4)
    # ssgd: 178 batches are 44.5 rounds, rounded to 44.
    assert float(schedule(2 * per_epoch + 1)) == pytest.approx(0.2)


def test_a_schedule_in_examples_is_that_in_epochs():
  epochs = {"warmup_epochs": 1.0, "decay_epochs": (2.0,)}
  examples = {"warmup_examples": 1424, "decay_examples": (2848,)}
  exp = build(
    runs={
      "a": {"recipe": "asgd", "learning_rate_schedule": epochs},
      "b": {"recipe": "asgd", "learning_rate_schedule": examples},
    },
    workers=(4,),
    batch_size=16,
  )
  a, b = (exp.plan(cell).schedule for cell in exp.cells)
  for update in range(0, 200, 3):
    assert float(a(update)) == float(b(update))


def test_a_budget_in_examples_replaces_epochs():
  exp = build(
    runs={"a": {"recipe": "asgd"}, "b": {"recipe": "asgd", "batch_size": 8}},
    workers=(3,),
    batch_size=16,
    examples=1000,  # 62.5 batches of 16, 125 of 8, in whole rounds of three
  )
  assert [exp.plan(cell).messages for cell in exp.cells] == [60, 123]


LOCAL = {
  "downpour": {"recipe": "downpour", "push_every": 2, "fetch_every": 4},
  "averaging": {"recipe": "model_averaging", "steps": 2, "momentum": 0.9},
  "averaged": {
    "recipe": "slowmo",
    "steps": 2,
    "optimizer_state": "averaged",
  },
  "easgd": {"recipe": "easgd", "steps": 2},
  "diloco": {"recipe": "diloco", "steps": 2},
  "fedasync": {"recipe": "fedasync", "steps": 2},
  "fedbuff": {"recipe": "fedbuff", "steps": 2},
  "async_diloco": {"recipe": "async_diloco", "steps": 2},
  "added": {"recipe": "worker_optimizer", "steps": 2, "optimizer": "adam"},
}


local = functools.partial(
  kit.build,
  {
    "model": {"name": "mlp", "hidden": ()},
    "runs": LOCAL,
    "workers": (3,),
    "batch_size": 16,  # 89 batches in an epoch
    "learning_rate": 0.01,
  },
)


@pytest.mark.parametrize("label", LOCAL)
def test_recipes_that_work_locally_run(label):
  exp = local(only=(label,), learning_rate_schedule={"warmup_epochs": 0.1})
  (cell,) = exp.cells
  plan = exp.plan(cell)
  assert plan.batches == plan.recipe.steps == 2
  assert plan.messages == 42  # of 44 jobs of two batches: 14 whole rounds
  assert np.isnan(plan.curvature_limit)
  trace = plan.trace(0, messages=6)
  assert orders.check(trace) == 3
  assert (trace.action == base.KEEP).any() == (label == "downpour")
  params = plan.problem.init(jax.random.key(0))
  host = simulator.make_host(plan.server, plan.worker)
  simulation, records = host.run(
    *(host.init(params, 3), trace, len(trace.action)),
    batch=plan.job_batches(cell.seed),
    root=jax.random.key(0),
  )
  assert len(records.loss) == 6
  alone = "downpour", "easgd", "fedasync", "async_diloco", "added"
  assert plan.recipe.every == (1 if label in alone else 3)
  assert int(simulation.server.version) == 6 // plan.recipe.every
  for column in records:
    assert np.isfinite(column).all()
  assert (records.message_norm > 0).all()


def test_a_carried_state_is_the_same_on_each_engine_and_evaluated_without():
  exp = local(only=("averaged",))
  (cell,) = exp.cells
  plan, found = exp.plan(cell), []
  trace = plan.trace(0, messages=12)
  data = {"batch": plan.job_batches(0), "root": jax.random.key(0)}
  params = plan.problem.init(jax.random.key(0))
  for make in (simulator.make_host, simulator.make_chunk):
    simulation, _ = simulator.run_whole(
      make(plan.server, plan.worker), params, 3, trace, **data
    )
    found.append(jax.device_get(simulation.server.params))
  kit.same(*found)
  split = sharding.make_plan(params, 2)
  sharded = simulator.run_sharded(
    plan.server, plan.worker, params, [trace, trace], plan=split, workers=3,
    **data,
  )
  parts = [jax.device_get(state.params) for state in sharded.states]
  kit.close(sharding.join(split, parts), found[0], rtol=1e-5, atol=1e-6)
  moved = [np.abs(x).max() for x in jax.tree.leaves(found[0].stats.state)]
  assert min(moved) > 0
  bare = exp.problem_of(exp.runs["averaged"]).evaluate(found[0])
  assert np.isfinite(bare.loss)


def test_a_job_is_consecutive_batches_and_takes_their_time():
  exp = local(
    runs={**LOCAL, "asgd": {"recipe": "asgd"}},
    only=("asgd", "easgd"),
    workers=(1,),
  )
  plans = {cell.label: exp.plan(cell) for cell in exp.cells}
  one, two = plans["asgd"], plans["easgd"]
  images, labels = two.job_batches(0)(0, 3)
  assert images.shape == (2, 16, 8, 8, 1)
  for h in range(2):
    image, label = one.job_batches(0)(0, 6 + h)
    np.testing.assert_array_equal(images[h], image)
    np.testing.assert_array_equal(labels[h], label)
  batches, jobs = (
    plan.trace(0, messages=n) for plan, n in ((one, 8), (two, 4))
  )
  times = batches.time[batches.action == base.RECEIVE]
  np.testing.assert_allclose(
    jobs.time[jobs.action == base.RECEIVE], times[1::2], rtol=1e-12
  )


def test_the_schedule_counts_updates_of_long_jobs():
  exp = local(
    only=("averaging", "easgd"),
    epochs=2.0,
    learning_rate_schedule={"warmup_epochs": 1.0},
  )
  # 89 batches are 44.5 jobs of two, and 14.8 rounds of three such jobs.
  for cell, updates in zip(exp.cells, (15, 44), strict=True):
    schedule = exp.plan(cell).schedule
    assert float(schedule(0)) == pytest.approx(0.01 / 3)
    assert float(schedule(updates - 1)) < 0.0099
    assert float(schedule(updates)) == pytest.approx(0.01)


def test_a_summary_is_means_and_maxima_of_its_records():
  part = kit.records(
    loss=np.array([1.0, 3.0]),
    staleness=np.array([0, 5]),
    gap=np.array([0.5, 0.1]),
    message_norm=np.array([2.0, 2.0]),
    update_norm=np.array([0.1, 0.3]),
    accepted=np.array([True, False]),
  )
  assert server_results.summary(part) == pytest.approx(
    {
      "train_loss": 2.0,
      "staleness_mean": 2.5,
      "staleness_max": 5,
      "gap_mean": 0.3,
      "gap_max": 0.5,
      "effective_rate": 0.1,
      "accepted": 0.5,
    }
  )


def described(**kwargs):
  return server_results.describe(
    {
      "workers": 8,
      "staleness_mean": 7.0,
      "staleness_max": 9,
      "gap_mean": 1.0,
      "gap_max": 2.0,
      "effective_rate": 0.1,
      "rate_x_sharpness": 0.5,
      "rate_x_sharpness_limit": 0.4,
      "accepted": 1.0,
      **kwargs,
    }
  )


def test_a_limit_that_is_not_known_is_a_dash():
  line = described(rate_x_sharpness_limit=float("nan"))
  assert line.endswith("(quadratic limit -)")
  assert described().endswith("(quadratic limit 0.4)")
  assert "sharpness" not in described(rate_x_sharpness=float("nan"))


def test_the_share_that_was_accepted_is_said_where_some_was_not():
  assert "accepted" not in described()
  assert "75.0 % of the messages accepted" in described(accepted=0.75)


def test_workers_that_took_no_part_are_said():
  assert "only 5 of 8 workers took part" in described(took_part=5)
  assert "took part" not in described(took_part=8)
