"""Each config file builds, and every algorithm in it runs two events."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from asgd import data
from launch import experiment

ROOT = Path(__file__).parent.parent
FILES = sorted(  # those of other commands are tested with what trains them
  path
  for path in (ROOT / "configs").glob("*.py")
  if not path.stem.startswith(("__", "pipeline_", "gpt_", "resnet_"))
)
SHAPES = {"fashion": (28, 28, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
# Where compiling every algorithm's gradient would take minutes.
SOME = {"simulate_cifar10": ("sgd", "ssgd", "dana_dc")}


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def small_data(monkeypatch):
  """Random images in the place of those that have to be installed."""
  real = data.load

  def fake(name, *, data_dir=None):
    if name == "digits":
      return real(name, data_dir=data_dir)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (512, *SHAPES[name]), np.uint8)
    labels = rng.integers(0, 10, 512, np.int32)
    channels = SHAPES[name][-1]
    return data.Dataset(
      *(name, "drawn here", images, labels, images[:32], labels[:32]),
      *(10, np.full(channels, 128, np.float32)),
      np.full(channels, 74, np.float32),
    )

  monkeypatch.setattr(data, "load", fake)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_config_builds_and_two_events_run(path, small_data):
  config = load(path).get_config()
  assert config.is_locked
  with config.unlocked():
    config.only = SOME.get(path.stem, ())
  exp = experiment.build(config)
  labels = set(config.only or config.algorithms)
  assert {cell.label for cell in exp.cells} == labels
  smallest = {}
  for cell in exp.cells:
    smallest.setdefault(cell.label, cell)
  batches = exp.problem.batches(0, 1)
  images, labels = batches(0, 0)
  few = lambda worker, job: (images[:2], labels[:2])  # noqa: E731
  for cell in smallest.values():
    plan = experiment.plan(exp, cell)
    trace = experiment.trace(exp, cell, messages=cell.workers)
    simulation = plan.host.init(
      exp.problem.init(jax.random.key(0)), cell.workers
    )
    simulation, records = plan.host.run(
      simulation,
      trace,
      cell.workers + 1,  # the sends, and the first receive
      batch=few,
      root=jax.random.key(0),
    )
    assert np.isfinite(records.loss).all()
    assert len(records.loss) == 1
    assert plan.curvature_limit > 0
    assert np.isfinite(float(jax.numpy.sum(records.update_norm)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_gives_the_command(path):
  doc = load(path).__doc__
  assert f"--config=configs/{path.name}" in doc


@pytest.mark.parametrize(
  "path",
  [path for path in FILES if ":smoke" in path.read_text()],
  ids=lambda path: path.stem,
)
def test_the_smoke_variant_builds_and_others_are_refused(path, small_data):
  exp = experiment.build(load(path).get_config("smoke"))
  assert len({cell.seed for cell in exp.cells}) == 1
  with pytest.raises(ValueError, match="known: smoke"):
    load(path).get_config("smok")
