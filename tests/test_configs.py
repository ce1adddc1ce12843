"""Each config file builds, and every run of it can make a step."""

import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from asgd import data, experiment, simulator
from asgd.experiment import schema
from pipeline.engine import PIPELINE

ROOT = Path(__file__).parent.parent
ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
FILES = sorted(
  path
  for path in (ROOT / "configs").glob("*.py")
  if not path.stem.startswith("__")
)
SHAPES = {"fashion": (28, 28, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
# Where building every run would take long, or needs files of others.
SOME = {"cifar10": ("sgd", "ssgd", "dana_dc"), "pipeline_cifar10": ("stale",)}
VARIANTS_ONLY = ("pipeline_sentences", "mesh_gpt")


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def variants(path):
  """The variants that a file has: FILE.py:NAME."""
  return re.findall(r'arg == "(\w+)"', path.read_text())


@pytest.fixture(autouse=True)
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
  config = load(path).get_config(*filter(None, [arg]))
  assert isinstance(config, ml_collections.ConfigDict)
  assert config.is_locked
  config = config.to_dict()
  config["only"] = SOME.get(path.stem, config.get("only", ()))
  # In the place of what it takes to measure each layer.
  seconds = {"layer_seconds": [[1.0, 2.0]] * 11}
  exp = experiment.build(
    config,
    engines=ENGINES,
    measurements=seconds if path.stem == "pipeline_cifar10" else None,
  )
  assert {c.label for c in exp.cells} == set(config["only"] or config["runs"])
  return exp


def simulated(exp):
  """The plan and the seed of a cell of each simulated run."""
  cells = {c.label: c for c in reversed(exp.cells)}
  return [
    (exp.plan(cell), cell.seed)
    for label, cell in cells.items()
    if exp.runs[label].engine == "simulate"
    and exp.runs[label].recipe not in schema.SERVED
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("path", "arg"),
  [
    (path, arg)
    for path in FILES
    for arg in (None, *variants(path))
    if arg or path.stem not in VARIANTS_ONLY
  ],
  ids=lambda value: getattr(value, "stem", value),
)
def test_the_config_builds_and_simulations_can_make_a_step(path, arg):
  exp = build(path, arg)
  for cell in exp.cells:
    plan = exp.plan(cell)
    assert plan.messages > 0
    assert plan.learning_rate > 0
  if arg:
    assert len({cell.seed for cell in exp.cells}) == 1
    with pytest.raises(ValueError, match=f"known: .*{arg}"):
      load(path).get_config(arg[:-1])
    return  # its layers are those of the whole
  for plan, seed in simulated(exp):
    before, after, loss = jax.eval_shape(
      functools.partial(one_message, plan),
      jax.random.key(0),
      plan.job_batches(seed)(0, 0),
    )
    assert after == before
    assert loss.dtype == np.float32
  for cell in exp.cells:
    if exp.runs[cell.label].recipe == "table" and not cell.seed:
      plan, key = exp.plan(cell), jax.random.key(0)
      params = jax.device_get(plan.problem.init(key))
      assert plan.simulation(0, params, key).advance(1) == 1


def one_message(plan, key, batch):
  """Returns the server before and after a message, and its loss."""
  params = plan.problem.init(key)
  before = plan.server.init(params)
  ticket = plan.server.send(before, jnp.int32(0))
  state = plan.worker.init(params)
  _, message, metrics = plan.worker.work(state, ticket, batch, key)
  after, _ = plan.server.receive(before, ticket, message)
  return before, after, metrics.loss


@pytest.mark.slow
def test_every_run_of_the_main_job_makes_a_step():
  for plan, seed in simulated(build(ROOT / "configs" / "digits.py")):
    # Two examples of each batch: what is compiled is small.
    whole = plan.job_batches(seed)(0, 0)
    few = jax.tree.map(lambda x: np.take(x, [0, 1], 0), whole)
    trace = plan.trace(seed, messages=plan.workers)
    host = simulator.make_host(plan.server, plan.worker)
    params = plan.problem.init(jax.random.key(0))
    _, records = host.run(
      host.init(params, plan.workers),
      trace,
      plan.workers + 1,  # the sends, and the first receive
      batch=lambda worker, job, few=few: few,
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


def test_a_config_is_data():
  for path in FILES:
    pattern = r"^(?:import|from) (\S+)"
    imported = re.findall(pattern, path.read_text(), re.MULTILINE)
    assert set(imported) <= {"ml_collections"}, path
