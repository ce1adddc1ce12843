"""Each config file builds, and every run of it can make a step."""

import importlib.util
import re
from pathlib import Path

import jax
import ml_collections
import numpy as np
import pytest

from asgd import data, experiment, simulator
from pipeline.engine import PIPELINE

ROOT = Path(__file__).parent.parent
ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
FILES = sorted(
  path
  for path in (ROOT / "configs").glob("*.py")
  if not path.stem.startswith("__")
)
SHAPES = {"fashion": (28, 28, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
# Where building every run would take minutes, or needs files of others.
SOME = {
  "cifar10": {"only": ("sgd", "ssgd", "dana_dc")},
  "pipeline_cifar10": {"only": ("gpipe",)},
}
VARIANT = {"pipeline_sentences": "small", "mesh_gpt": "tiny"}


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def variants(path):
  """The variants that a file has: FILE.py:NAME."""
  return re.findall(r'arg == "(\w+)"', path.read_text())


@pytest.fixture
def small_data(monkeypatch):
  """Random images in the place of those that have to be installed."""
  real = data.load

  def fake(name, *, data_dir=None):
    if name not in SHAPES:
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


def build(path, arg=None):
  config = load(path).get_config(arg)
  assert isinstance(config, ml_collections.ConfigDict)
  assert config.is_locked
  config = config.to_dict()
  labels = list(config["runs"])
  for key, value in SOME.get(path.stem, {}).items():
    config[key] = [v for v in value if v in labels] or labels[:1]
  return config, experiment.build(config, engines=ENGINES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_config_builds_and_simulations_make_a_step(path, small_data):
  config, exp = build(path, VARIANT.get(path.stem))
  labels = set(config.get("only") or config["runs"])
  assert {cell.label for cell in exp.cells} == labels
  first = {}
  for cell in exp.cells:
    plan = exp.plan(cell)
    assert plan.messages > 0
    assert plan.learning_rate > 0
    if exp.runs[cell.label].engine == "simulate":
      first.setdefault(cell.label, cell)
  for cell in first.values():
    make_a_step(exp.plan(cell), cell)


def make_a_step(plan, cell):
  # Two examples of each batch: what is compiled is small.
  whole = plan.job_batches(cell.seed)(0, 0)
  axis = 0 if plan.batches == 1 else 1
  few = jax.tree.map(lambda x: np.take(x, [0, 1], axis), whole)
  trace = plan.trace(cell.seed, messages=cell.workers)
  host = simulator.make_host(plan.server, plan.worker)
  simulation = host.init(plan.problem.init(jax.random.key(0)), cell.workers)
  _, records = host.run(
    simulation,
    trace,
    cell.workers + 1,  # the sends, and the first receive
    batch=lambda worker, job: few,
    root=jax.random.key(0),
  )
  assert len(records.loss) == 1
  assert np.isfinite(records.loss).all()
  assert np.isfinite(records.update_norm).all()
  assert plan.curvature_limit > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_gives_the_command(path):
  doc = load(path).__doc__
  given = re.findall(r"python -m (launch\.\w+) --config=configs/(\w+)\.py", doc)
  assert {name for _, name in given} == {path.stem}
  assert given[0][0] in ("launch.train", "launch.compare")


@pytest.mark.parametrize(
  ("path", "arg"),
  [(path, arg) for path in FILES for arg in variants(path)],
  ids=lambda value: getattr(value, "stem", value),
)
def test_a_variant_builds_and_others_are_refused(path, arg, small_data):
  _, exp = build(path, arg)
  assert len({cell.seed for cell in exp.cells}) == 1
  with pytest.raises(ValueError, match=f"known: .*{arg}"):
    load(path).get_config(arg[:-1])


def test_a_config_is_data():
  for path in FILES:
    pattern = r"^(?:import|from) (\S+)"
    imported = re.findall(pattern, path.read_text(), re.MULTILINE)
    assert set(imported) <= {"ml_collections"}, path
