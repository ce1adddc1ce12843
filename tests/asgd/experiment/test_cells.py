"""Cells: their order, and what they share."""

import copy
import functools

import kit
import pytest

from asgd import data, experiment
from asgd.experiment import cells
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
ASGD = {"asgd": {"recipe": "asgd"}}
MLP = {"name": "mlp", "hidden": (8,)}

build = functools.partial(kit.build, {"runs": ASGD, "model": MLP})


MIXED = {
  "a": {"recipe": "asgd", "batch_size": 16},
  "b": {"recipe": "asgd", "workers": (1,)},
  "pipe": {"engine": "pipeline", "schedule": "gpipe", "microbatches": 4},
  "mesh": {"engine": "mesh", "axes": {"data": 2}, "optimizer": "adam"},
}


@pytest.fixture(scope="module")
def mixed():
  """Five plans of four runs, each with two seeds."""
  return build(runs=MIXED, workers=(8, 2), seeds=(0, 3))


def test_cells_go_by_workers_then_run_then_seed(mixed):
  assert [cell.name for cell in mixed.cells] == [
    *("b-n1-s0", "b-n1-s3", "pipe-n1-s0", "pipe-n1-s3"),
    *("mesh-n1-s0", "mesh-n1-s3"),
    *("a-n2-s0", "a-n2-s3", "a-n8-s0", "a-n8-s3"),
  ]


def test_the_config_is_left_as_it_was():
  config = {"runs": copy.deepcopy(MIXED), "model": MLP, "only": "a"}
  before = copy.deepcopy(config)
  kit.build(config)
  assert config == before


def test_plans_are_made_once_and_shared_by_seeds(mixed, monkeypatch):
  def refuse(*_):
    raise AssertionError("a plan was made again")

  for name, kind in ENGINES.items():
    monkeypatch.setitem(mixed.engines, name, kind._replace(plan=refuse))
  plans = {}
  for cell in mixed.cells:
    key = cell.label, cell.workers
    plans.setdefault(key, []).append(mixed.plan(cell))
  assert len(plans) == 5
  for first, second in plans.values():
    assert first is second


def test_a_run_has_its_batch_size_and_others_share_a_problem(mixed):
  a, b, pipe, mesh = (mixed.problem_of(run) for run in mixed.runs.values())
  assert b is pipe is mesh
  assert a is mixed.problem_of(mixed.runs["a"])
  for problem, size in ((a, 16), (b, 32)):
    images, labels = problem.batches(0, 1)(0, 0)
    assert images.shape[0] == labels.shape[0] == size
  assert (a.batches_per_epoch, b.batches_per_epoch) == (89, 44)
  # As many examples, and so twice as many messages.
  counts = {c.name: mixed.plan(c).messages for c in mixed.cells}
  assert (counts["a-n2-s0"], counts["b-n1-s0"]) == (88, 44)
  assert (counts["pipe-n1-s0"], counts["mesh-n1-s0"]) == (44, 44)


def test_a_batch_size_of_a_run_that_does_not_fit_is_named():
  with pytest.raises(ValueError, match="^config.runs.a.batch_size: .* 1437"):
    build(runs={"a": {"recipe": "asgd", "batch_size": 5000}})


@pytest.mark.parametrize("label", MIXED)
def test_the_only_cell_of_a_config_is_the_same_cell(mixed, label):
  cell = next(c for c in mixed.cells if c.label == label and c.seed == 3)
  run = mixed.runs[label]
  again = kit.build(cells.single_cell_config(run, cell))
  assert again.cells == (cell,)
  (other,) = again.runs.values()
  swept = ("workers", "seeds", "engine")
  for key in set(run.config) - set(swept):
    assert other.config[key] == run.config[key], key
  assert other._replace(config=None) == run._replace(config=None)
  mine, its = mixed.plan(cell), again.plan(cell)
  assert mine.messages == its.messages
  assert mine.learning_rate == its.learning_rate
  if label in ("a", "b"):
    a, b = (plan.trace(cell.seed) for plan in (mine, its))
    for x, y in zip(a, b, strict=True):
      assert (x == y).all()


def test_cells_of_one_plan_are_a_group(mixed):
  groups = cells.groups(mixed.cells)
  assert [len(group) for group in groups] == [2] * 5
  assert [c for g in groups for c in g] == list(mixed.cells)
  for group in groups:
    assert len({id(mixed.plan(cell)) for cell in group}) == 1


def test_what_runs_and_experiments_have_in_common_is_compiled_once():
  runs = {"a": {"recipe": "asgd"}, "b": {"recipe": "dana_zero"}}
  runs["own"] = {"recipe": "asgd:asgd"}  # a function that may have changed

  def plans(**config):
    built = build(runs=runs, workers=(2,), **config)
    return {cell.label: built.plan(cell) for cell in built.cells}

  first, again, other = plans(), plans(), plans(learning_rate=0.125)
  for each in (first, again, other):
    for label in runs:  # all send plain gradients
      assert each[label].worker is first["a"].worker
  for label in ("a", "b"):
    assert again[label].server == first[label].server != other[label].server
  assert again["own"].server != first["own"].server


def test_a_dataset_that_is_loaded_is_used_as_it_is():
  digits = data.load("digits")
  some = digits._replace(
    train_images=digits.train_images[:64], train_labels=digits.train_labels[:64]
  )
  config = {"runs": ASGD, "data": {"name": "nowhere"}, "batch_size": 8}
  exp = kit.build(config, dataset=some)
  assert exp.dataset is some
  (cell,) = exp.cells
  assert exp.plan(cell).problem.batches_per_epoch == 8
