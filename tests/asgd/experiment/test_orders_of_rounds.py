"""Recipes of rounds in other orders: backup workers, depth, asynchronous."""

import jax.numpy as jnp
import kit
import numpy as np
import pytest

import asgd

pytestmark = pytest.mark.usefixtures("blank_pictures")

BACKUP = {"name": "backup_workers", "backup": 1}
LATE = {"name": "asynchronous", "depth": 1}
DEEP = {"name": "asynchronous", "depth": 2}


def descend(recipe, order, *, messages, **options):
  """Returns w after messages of workers that start at w = 8, with the gradient
  w and one job in a unit of time."""
  options = {"durations": {"name": "constant"}, **options}
  result = asgd.simulate(
    lambda w, batch: 0.5 * w**2 + 0 * batch.sum(),
    *(jnp.float32(8.0), np.zeros(64, np.float32), recipe),
    **{"order": order, "messages": messages, "batch_size": 1, **options},
  )
  return float(result.params)


SSGD = asgd.ssgd(0.5, workers=2)
AVERAGING = asgd.model_averaging(0.5, workers=2, steps=2)
DILOCO = asgd.diloco(
  0.5, workers=2, steps=2, outer_rate=1.0, outer_momentum=0.5, optimizer="sgd"
)
# (recipe, order) -> w after the first four messages, by hand.
CASES = (
  # 8 - 0.5 8, 4 - 0.5 4.
  (SSGD, None, 2.0),
  (SSGD, {"name": "stale_synchronous", "bound": 0}, 2.0),
  # Worker 0 starts its second job before the first update, at 8, and worker 1
  # at 4: 4 - 0.5 (8 + 4) / 2.
  (SSGD, LATE, 1.0),
  # Both workers hold two tickets of 8: 4 - 0.5 8.
  (SSGD, DEEP, 0.0),
  # A job from w ends at w / 4. Averages: 2, and then 1 / 2.
  (AVERAGING, None, 0.5),
  # Displacements of 6, and then of 6 and 1.5: 2 - 3.75.
  (AVERAGING, LATE, -1.75),
  (AVERAGING, DEEP, -4.0),
  # Outer steps: v = 6, 8 - (3 + 6) = -1. In rounds D = -0.75: v = 2.25 and
  # -1 - (1.125 - 0.75). Late, D = (6 - 0.75) / 2 = 2.625: v = 5.625.
  (DILOCO, None, -1.375),
  (DILOCO, LATE, -1 - (0.5 * 5.625 + 2.625)),
)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_order_replaces_the_rounds_of_a_recipe(case):
  recipe, order, expected = CASES[case]
  options = {} if order is None else {"order": order}
  w = descend(recipe, **{"order": "asynchronous", **options}, messages=4)
  assert w == pytest.approx(expected)


@pytest.mark.parametrize(
  ("recipe", "expected"), [(SSGD, 4.0), (AVERAGING, 2.0), (DILOCO, -1.0)]
)
@pytest.mark.parametrize("order", [LATE, DEEP])
def test_without_rounds_any_count_of_messages_is_trained(
  recipe, expected, order
):
  """The third message waits for a fourth, so one update is made."""
  w = descend(recipe, order, messages=3)
  assert w == pytest.approx(expected)


def test_rounds_need_complete_rounds_of_messages():
  for order in ("asynchronous", {"name": "stale_synchronous", "bound": 0}):
    with pytest.raises(ValueError, match="3 messages are not a whole number"):
      descend(SSGD, order, messages=3)


@pytest.mark.parametrize(
  ("make", "factor"), [(asgd.ssgd, 0.5), (asgd.model_averaging, 0.25)]
)
def test_backup_workers_average_the_fastest_messages(make, factor):
  """Worker 2 takes 3. At 3 two late messages are dropped: its first one, and
  that of a job that worker 0 started in round 2 instead of worker 2. So nine
  messages are three rounds of two, and a half."""
  options = {} if make is asgd.ssgd else {"steps": 2}
  recipe = make(0.5, workers=3, **options)
  # A job takes a unit of time for each of its batches.
  clock = {"name": "constant", "slowdown": (1, 1, 3)}
  w = descend(recipe, BACKUP, messages=9, durations=clock)
  assert w == pytest.approx(8 * factor**3)


def test_ssgd_with_backup_workers_is_asgd_with_them():
  digests = {
    recipe: kit.train(
      kit.tiny(runs={"a": {"recipe": recipe}}, workers=(4,), order=BACKUP)
    ).result["params_sha256"]
    for recipe in ("ssgd", "asgd")
  }
  assert digests["ssgd"] == digests["asgd"]


def test_repeated_jobs_change_no_average_of_stateless_workers():
  clock = {"name": "constant", "slowdown": (1, 1, 9)}
  run = {"recipe": "model_averaging", "steps": 2}
  digests = {
    kit.train(
      kit.tiny(runs={"a": run}, workers=(3,), order=order, durations=clock)
    ).result["params_sha256"]
    for order in ({"name": "asynchronous"}, {"name": "backup_tasks", "late": 2})
  }
  assert len(digests) == 1


def test_a_live_run_without_rounds_receives_any_count_of_messages(tmp_path):
  parts = (
    lambda w, batch: 0.5 * w**2 + 0 * batch.sum(),
    *(jnp.float32(8.0), np.zeros(64, np.float32), asgd.ssgd(0.5, workers=3)),
  )
  result = asgd.train_live(
    *parts, order=BACKUP, messages=7, batch_size=1, folder=tmp_path
  )
  assert len(result.records.loss) == 7
  assert asgd.replay(tmp_path, *parts).same


LIVE = (
  ({"recipe": "diloco", "steps": 2}, BACKUP),
  ({"recipe": "slowmo", "steps": 2, "optimizer_state": "averaged"}, DEEP),
  ({"recipe": "model_averaging", "steps": 2},
   {"name": "stale_synchronous", "bound": 1, "depth": 2}),
)


@pytest.mark.parametrize("case", range(len(LIVE)))
def test_a_live_run_keeps_the_order_and_is_replayed(case, tmp_path):
  run, order = LIVE[case]
  place, result, _ = kit.train_live(tmp_path, runs={"a": run}, order=order)
  every = 2 if order is BACKUP else 3
  assert result["updates"] <= result["messages"] // every
  replayed = asgd.replay(place)
  assert replayed.same
  assert replayed.recorded == result["params_sha256"]
