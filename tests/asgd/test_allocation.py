"""Work by speed: how much is whose, what it is, and what it comes to."""

import itertools
import json

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from linear import squares

import asgd
from asgd import algorithms, base, problems
from asgd import worker as worker_lib
from asgd.allocation import Allocation, in_proportion, job_batches
from asgd.experiment import storage
from asgd.experiment.engines import allocations

X = kit.normal(96, 3)
DATA = X, X.sum(1) + 0.1 * kit.normal(96, seed=1)
SLOW = {"name": "constant", "slowdown": (3, 1)}  # speeds 1 : 3
BY_SPEED = {"batch_size": "speed"}


def train(recipe, *, messages=12, train=asgd.simulate, **options):
  if train is asgd.simulate:
    options = {"durations": SLOW, **options}
  return train(
    *(squares, np.zeros(3), DATA, recipe),
    messages=messages,
    batch_size=8,
    progress=False,
    **options,
  )


def first(count):
  return DATA[0][:count], DATA[1][:count]


# How much.


@pytest.mark.parametrize(
  "speeds, total, options, parts",
  [
    ([1, 3], 64, {}, (16, 48)),
    ([1, 1, 1], 64, {}, (22, 21, 21)),
    ([1, 3], 64, {"most": 40}, (24, 40)),
    ([1, 3], 64, {"unit": 8}, (16, 48)),
    ([1, 2], 64, {"unit": 8}, (24, 40)),
    ([1e-300, 1e300], 10, {}, (1, 9)),  # nobody goes without
    ([1, 1, 1000], 3, {}, (1, 1, 1)),
    ([5.0], 7, {}, (7,)),
  ],
)
def test_parts_by_hand(speeds, total, options, parts):
  found = in_proportion(speeds, total, **options)
  assert sorted(found) == sorted(parts) and sum(found) == total
  assert found[-1] == parts[-1] or len(set(speeds)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_no_other_parts_are_done_sooner(seed):
  rng = np.random.default_rng(seed)
  speeds = rng.uniform(0.2, 3, 3).tolist()
  total = int(rng.integers(3, 16))

  def seconds(parts):
    return max(p / s for p, s in zip(parts, speeds, strict=True))

  every = itertools.product(range(1, total), repeat=3)
  best = min(seconds(parts) for parts in every if sum(parts) == total)
  assert seconds(in_proportion(speeds, total)) == pytest.approx(best)


@pytest.mark.parametrize(
  "speeds, total, options, what",
  [
    ([1, 0], 8, {}, "speed must be a positive finite number"),
    ([1, float("nan")], 8, {}, "speed must be a positive finite number"),
    ([1, 1, 1], 2, {}, "2 cannot be divided among 3 workers"),
    ([1, 1], 8, {"most": 3}, "8 cannot be divided among 2 workers"),
    ([1, 1], 9, {"unit": 2}, "9 total are not a whole number of units of 2"),
  ],
)
def test_what_cannot_be_divided(speeds, total, options, what):
  with pytest.raises(ValueError, match=what):
    in_proportion(speeds, total, **options)


# What.


def test_a_job_is_the_first_of_the_largest():
  def largest(worker, job):
    return np.arange(6) + 10 * job, {"y": np.full((6, 2), worker)}

  given = Allocation((6, 2), (1, 1))
  batch = job_batches(largest, given, stacked=False)
  kit.same(batch(0, 3), largest(0, 3))
  kit.same(batch(1, 3), (np.array([30, 31]), {"y": np.full((2, 2), 1)}))
  several = job_batches(largest, Allocation((6, 2), (1, 3)), stacked=True)
  assert several(0, 2).batches[0].tolist() == [[60, 61, 62, 63, 64, 65]]
  assert several(1, 2).batches[0].tolist() == [[60, 61], [70, 71], [80, 81]]
  with pytest.raises(ValueError, match="is not its 6 examples"):
    job_batches(lambda w, j: np.ones(5), given, stacked=False)(1, 0)


def test_a_message_counts_as_its_examples_and_statistics_do_not():
  stats = {"mean": jnp.ones(3)}

  def with_stats(params, batch, key):
    del key
    return squares(params.weights, batch), worker_lib.Aux(stats)

  params = base.Variables(jnp.ones(3), stats)
  ticket = base.Ticket(jnp.int32(0), jnp.int32(0), params)
  plain = worker_lib.gradient_worker(with_stats)
  arguments = plain.init(params), ticket, first(6), jax.random.key(0)
  _, message, metrics = plain.work(*arguments)
  _, counted, same = worker_lib.weighted(plain, 4).work(*arguments)
  kit.same(counted.weights, 1.5 * message.weights)
  kit.same((counted.stats, same), (message.stats, metrics))


# What it comes to.


@pytest.mark.usefixtures("float64")
def test_a_round_is_a_step_on_all_of_its_examples():
  sizes = 4, 12
  result = train(
    asgd.ssgd(0.1, workers=2), allocation={"batch_size": sizes}, messages=8
  )
  batches = problems.own.streams.read_data(DATA, 12).batches(0, 2)
  params, step = jnp.zeros(3), jax.grad(squares)
  for update in range(4):
    jobs = [batches(worker, 2 * update + worker) for worker in range(2)]
    parts = [
      jax.tree.map(lambda leaf, size=size: leaf[:size], job)
      for job, size in zip(jobs, sizes, strict=True)
    ]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    params = params - 0.1 * step(params, whole)
  kit.close(result.params, params, rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_local_steps_of_each_worker_equal_an_optax_loop():
  recipe = asgd.model_averaging(0.05, workers=2, steps=2)
  result = train(recipe, allocation={"steps": [1, 3]}, messages=4)
  batches = problems.own.streams.read_data(DATA, 8).batches(0, 2)
  params, tx = jnp.zeros(3), optax.sgd(0.05)
  for update in range(2):
    ends = []
    for worker, steps in enumerate((1, 3)):
      local = params
      for h in range(steps):
        grads = jax.grad(squares)(
          local, batches(worker, (2 * update + worker) * 3 + h)
        )
        updates, _ = tx.update(grads, tx.init(local))
        local = optax.apply_updates(local, updates)
      ends.append(local)
    params = sum(ends) / 2
  kit.close(result.params, params, rtol=1e-12)


@pytest.mark.parametrize("key", ["batch_size", "steps"])
def test_by_speed_all_workers_take_as_long(key):
  recipe = asgd.ssgd(0.1, workers=2)
  if key == "steps":
    recipe = asgd.model_averaging(0.1, workers=2, steps=2)
  equal = train(recipe)
  fast = train(recipe, allocation={key: "speed"})
  given = train(
    recipe, allocation={key: [4, 12] if key == "batch_size" else [1, 3]}
  )
  kit.same(fast.params, given.params)
  # A round took three units for each of its batches, and takes one and a half.
  assert fast.trace.time[-1] == equal.trace.time[-1] / 2
  assert (np.diff(np.unique(fast.trace.time)) > 0.5).all()  # all end at once


def test_an_even_allocation_is_none():
  recipe = algorithms.build("dana_zero", 0.05, 2)
  kit.same(
    train(recipe, allocation={"batch_size": [8, 8]}).params,
    train(recipe).params,
  )


@pytest.mark.parametrize("name", ["easgd", "fedasync"])
def test_models_that_are_mixed_do_not_count_as_examples(name):
  recipe = algorithms.build(name, 0.05, 2)
  assert recipe.mixes
  result = train(recipe, messages=4, allocation={"batch_size": [4, 12]})
  assert np.isfinite(result.params).all()


def test_live_workers_get_what_was_measured_and_replay(tmp_path):
  recipe = asgd.ssgd(0.05, workers=2)
  options = {"allocation": BY_SPEED, "folder": tmp_path}
  live = {"slowdown": (40, 1)}  # whatever else the machine does
  result = train(recipe, train=asgd.train_live, live=live, **options)
  (path,) = tmp_path.glob("cells/*/allocation.json")
  sizes = json.loads(path.read_text())["batch_sizes"]
  assert sum(sizes) == 16 and sizes[0] < sizes[1]
  replayed = asgd.replay(tmp_path, squares, np.zeros(3), DATA, recipe)
  assert replayed.same
  kit.same(replayed.params, result.params)
  given = train(recipe, allocation={"batch_size": sizes})
  kit.same(given.records.loss, result.records.loss)  # the same jobs
  path.unlink()
  with pytest.raises(ValueError, match="the allocation of the run, is missing"):
    asgd.replay(tmp_path, squares, np.zeros(3), DATA, recipe)


test_what_does_not_fit_is_refused = kit.refuses(
  [
    ({"batch_size": [1, 2, 3]}, "has 3 numbers, and there are 2 workers"),
    ({"batch_size": [8, 9]}, "has the sum 17, and 2 times batch_size is 16"),
    ({"batch_size": "fast"}, "must be 'equal', 'speed', or a whole number"),
    ({"batch_size": [0, 16]}, "must be 'equal', 'speed', or a whole number"),
    ({"batch_size": [1.5, 14.5]}, "must be 'equal', 'speed', or a whole"),
    ({"steps": "speed"}, "a job of asgd is one"),
    ({"steps": [1, 3]}, "a job of asgd is one"),
    ({"batch_size": "speed", "steps": "speed"}, "are both 'speed'"),
    ({"jobs": 0}, "allocation.jobs must be a whole number from 1"),
    ({"batch_size": "9" * 5000}, "must be 'equal', 'speed', or a whole"),
    ({"sizes": [8, 8]}, "unknown argument 'allocation.sizes'"),
  ],
  lambda given: train(asgd.build("asgd", 0.1, 2), allocation=given),
)


def test_more_examples_than_there_are():
  recipe = asgd.build("asgd", 0.1, 14)
  sizes = [1] * 12 + [3, 97]
  with pytest.raises(ValueError, match="batch_size.*97 is larger than the 96"):
    train(recipe, messages=14, allocation={"batch_size": sizes})
  # By speed, nobody gets more than there are.
  slow = {"name": "constant", "slowdown": [1e6] * 13 + [1]}
  train(recipe, messages=14, durations=slow, allocation=BY_SPEED)


@pytest.mark.parametrize("sizes", ["speed", [4, 12]])
def test_a_loss_of_batches_of_one_size_is_refused(sizes):
  def of_eight(params, batch):
    return squares(params, batch) + batch[1].reshape(2, 4).mean()

  with pytest.raises(ValueError, match=r"fails on a batch of \d+ examples"):
    asgd.simulate(
      *(of_eight, np.zeros(3), DATA, asgd.build("asgd", 0.1, 2)),
      messages=4,
      batch_size=8,
      allocation={"batch_size": sizes},
      progress=False,
    )


@pytest.mark.parametrize(
  "wrong, what",
  [
    ({"batch_sizes": [16]}, "has 1 numbers"),
    ({"batch_sizes": [8, 9]}, "has the sum 17"),
    ({"batch_sizes": [0, 16]}, "a whole number from 1"),
    ({"batch_sizes": ["4", "12"]}, "a whole number from 1"),
    ({"steps": [5, 5]}, "a job of a is one"),
    ({"steps": None}, "a whole number from 1"),
  ],
)
def test_what_a_folder_says_is_checked(tmp_path, wrong, what):
  whole = {**kit.TINY_RUN, "runs": {"a": {"recipe": "asgd"}}, "batch_size": 8}
  exp = kit.build(whole, allocation=BY_SPEED)
  plan = exp.plan(exp.cells[0])
  allocations.write(tmp_path, Allocation((4, 12), (1, 1)))
  assert allocations.read(plan, tmp_path).allocation == ((4, 12), (1, 1))
  found = {"batch_sizes": [4, 12], "steps": [1, 1], **wrong}
  path = tmp_path / "allocation.json"
  storage.write_json(path, storage.sealed(found))
  with pytest.raises(ValueError, match=f"not what the run wrote.*{what}"):
    allocations.read(plan, tmp_path)
  path.unlink()
  path.mkdir()
  with pytest.raises(ValueError, match="is missing or was changed"):
    allocations.read(plan, tmp_path, begun=True)


@pytest.mark.parametrize("data", [lambda worker, job: first(8), [first(8)] * 3])
def test_batches_that_are_made_cannot_be_cut(data):
  with pytest.raises(ValueError, match="give examples, and batch_size"):
    asgd.simulate(
      *(squares, np.zeros(3), data, asgd.build("asgd", 0.1, 2)),
      messages=4,
      allocation=BY_SPEED,
      progress=False,
    )
