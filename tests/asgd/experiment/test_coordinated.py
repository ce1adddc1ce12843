"""Runs that a coordinator drives, in an experiment."""

import csv
import functools

import jax
import kit
import numpy as np
import pytest
from kit import TINY_RUN

from asgd import experiment, orders, sandblaster
from asgd.experiment import cell_files, protocol
from asgd.experiment.engines import NonFiniteResult
from asgd.experiment.signals import Stopped

RUN = {"recipe": "sandblaster", "portions": 6, "push_every": 2, "shards": 2}


build = functools.partial(kit.build, {**TINY_RUN, "runs": {"run": RUN}})


def train(exp, workdir, **arguments):
  return kit.train(exp, workdir, **arguments)[:2]


def iterates_of(place):
  return list(csv.DictReader((place / "iterates.csv").read_text().split()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  exp = build(examples=16 * 120, evaluations=6)
  return exp, *train(exp, tmp_path_factory.mktemp("whole"))


def test_a_cell_has_a_trace_and_the_time_of_each_loss(undisturbed):
  exp, result, place = undisturbed
  (cell,) = exp.cells
  assert result["messages"] == exp.plan(cell).messages == 60
  assert result["updates"] > 8
  assert result["bytes_down"] < result["bytes_up"]  # once an evaluation
  text = (place / "trace.csv").read_text()
  table = orders.load(text.splitlines(keepends=True))
  assert orders.check(table) == 2
  iterates = iterates_of(place)
  assert len(iterates) == result["updates"] + 1
  times = [float(row["time"]) for row in iterates]
  losses = [float(row["loss"]) for row in iterates]
  assert times == sorted(times)
  assert losses == sorted(losses, reverse=True)
  assert losses[-1] == result["train_loss"]
  assert losses[-1] < losses[0] / 2
  assert not result["diverged"]
  records = cell_files.read_records(place)
  assert len(records["loss"]) == 60


@pytest.mark.parametrize("looks", [1, 3])
def test_a_cell_that_was_stopped_goes_on_to_the_same_bits(
  undisturbed, tmp_path, looks
):
  exp, expected, before = undisturbed
  with pytest.raises(Stopped):
    train(exp, tmp_path, signals=kit.AfterLooks(looks))
  result, place = train(exp, tmp_path)
  ignored = {"wall_seconds": 0}
  assert str({**result, **ignored}) == str({**expected, **ignored})  # NaN, too
  for name in ("trace.csv", "iterates.csv"):
    assert (place / name).read_text() == (before / name).read_text()


def test_a_network_takes_time_and_changes_no_loss(undisturbed, tmp_path):
  network = {"latency": 0.25, "port": 6000.0, "service": 0.125}
  exp = build(examples=16 * 60, evaluations=6, network=network)
  result, place = train(exp, tmp_path)
  rows, expected = map(iterates_of, (place, undisturbed[2]))
  assert len(rows) > 2
  for one, other in zip(rows, expected, strict=False):
    assert one["loss"] == other["loss"]
    assert float(one["time"]) > float(other["time"]) + 5 * 0.25
  assert 0 < result["link_utilisation"] < 1
  assert result["throughput"] == pytest.approx(
    result["messages"] / result["simulated_time"]
  )
  said = experiment.ENGINES["simulate"].describe(result)
  assert "messages per unit of time" in said
  # Without limits it takes no time.
  wide = build(examples=16 * 60, evaluations=6, network={"up": 1e30})
  _, place = train(wide, tmp_path / "wide")
  for one, other in zip(iterates_of(place), expected, strict=False):
    assert one == other


def test_killed_processes_change_no_iterate(undisturbed, tmp_path):
  failures = [(3.3, "worker", 1), (4.4, "shard", 1), (5.5, "coordinator", 0)]
  result, place = train(
    build(run={"failures": failures}, examples=16 * 120), tmp_path
  )
  assert result["shard_recoveries"] == 1
  rows, expected = map(iterates_of, (place, undisturbed[2]))
  for one, other in zip(rows[:6], expected, strict=False):
    assert one["loss"] == other["loss"]


def test_it_ends_by_itself_and_says_why(tmp_path):
  exp = build(run={"tolerance": 0.5}, examples=16 * 1200)
  result, _ = train(exp, tmp_path)
  (cell,) = exp.cells
  assert result["messages"] < exp.plan(cell).messages
  assert result["reason"].startswith("converged: the gradient's norm")
  assert result["gradient_norm"] <= 0.5
  assert experiment.ENGINES["simulate"].describe(result).endswith(
    f"ended by {result['reason']}"
  )


@pytest.mark.parametrize(
  ("backup", "examples"), [(0, 16 * 6), (1, 16 * 8), (9, 16 * 8)]
)
def test_the_least_budget_is_one_evaluation(tmp_path, backup, examples):
  exp = build(run={"backup": backup}, examples=examples, evaluations=1)
  result, _ = train(exp, tmp_path)
  assert result["evaluations_of_batch"] >= 1
  assert np.isfinite(result["gradient_norm"])
  assert not result["diverged"]
  with pytest.raises(ValueError, match=f"Use config.examples {examples} or"):
    build(run={"backup": backup}, examples=examples - 32)


@pytest.mark.parametrize("on_nan", ["stop", "record"])
def test_a_loss_that_is_not_finite(tmp_path, monkeypatch, on_nan):
  exp = build(on_nan=on_nan)
  (cell,) = exp.cells
  plan = exp.plan(cell)
  nan = lambda *args: (  # noqa: E731
    (np.float32(np.nan), None),
    plan.problem.init(jax.random.key(0)),
  )
  monkeypatch.setitem(vars(plan), "gradient", nan)
  if on_nan == "stop":
    with pytest.raises(NonFiniteResult, match="not finite: the loss is nan"):
      train(exp, tmp_path)
    return
  result, _ = train(exp, tmp_path)
  assert result["diverged"]
  assert result["messages"] == 3  # one evaluation of the batch


MISTAKES = (
  ({"optimizer": "adam"}, {}, "config.optimizer .* L-BFGS is the optimizer"),
  ({"clip_norm": 1.0}, {}, "config.clip_norm 1.0 is not for the recipe"),
  ({}, {"compress": "sign"}, "config.compress .* a coded gradient is not"),
  ({"gate": {"max_staleness": 3}}, {}, "config.gate.max_staleness 3 is not"),
  ({}, {"order": {"name": "nosuch"}}, "config.order: unknown order 'nosuch'"),
  ({"histroy": 3}, {}, "did you mean 'history'"),
  ({"history": 0}, {}, "config.runs.run.history must be a positive whole"),
  ({"shards": 10**6}, {}, "config.runs.run.shards must be at most"),
  ({"line_search": {"c2": 1}}, {}, "takes no argument 'c2'"),
  ({"history": True}, {}, "history must be a positive whole .*, not True"),
  ({"learning_rate": 0.1}, {}, "runs.run.learning_rate 0.1 is not for"),
  ({}, {"examples": 96}, "takes up to 4: 3 .* Use config.examples 128 or"),
  ({"portions": None, "push_every": 1}, {"examples": None, "epochs": 1.0},
   r"takes up to 90: 89 for its 89 portions, .* Use config.epochs 1.02 or"),
  ({}, {"engine": "mesh"}, "use engine='simulate', 'threads' or 'ray'"),
)


test_one_line_for_what_it_cannot_do = kit.refuses(
  [((a, b), why) for a, b, why in MISTAKES],
  lambda value: build(run=value[0], **value[1]), longest=600,
)


@pytest.mark.parametrize(
  "engine",
  ["simulate", "threads", pytest.param("mesh", marks=pytest.mark.slow)],
)
def test_lbfgs_in_synchronous_training_needs_the_loss(engine, tmp_path):
  config = {
    **TINY_RUN,
    "engine": engine,
    "runs": {"run": {"recipe": "ssgd"}},
    "optimizer": {"name": "lbfgs", "memory_size": 3},
    "mesh": {"axes": {"data": 2}},
    "batch_size": 128,
    "examples": 128 * 8,
    "evaluations": 1,
  }
  if engine != "mesh":
    del config["mesh"]
    with pytest.raises(ValueError, match="'lbfgs' searches along a line, so"):
      kit.build(config)
    return
  exp = kit.build(config)
  result, _ = train(exp, tmp_path)
  assert result["optimizer"] == "lbfgs"
  assert result["test_loss"] < 2.0  # of guessing: 2.3


def test_statistics_of_batches_are_refused():
  with pytest.raises(ValueError, match="has statistics of batches"):
    build(model={"name": "cnn", "norm": "batch"})


def test_all_recipes_are_known():
  assert set(sandblaster.RECIPES) <= set(protocol.recipes())
  with pytest.raises(ValueError, match="did you mean 'sandblaster'"):
    build(run={"recipe": "sandblastr"})
