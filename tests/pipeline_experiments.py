"""Small experiments of pipelines, for tests of plans and of the engine.

A test imports it with `import pipeline_experiments`; see `pythonpath` in
pyproject.toml.
"""

import io
from unittest import mock

import jax
import numpy as np

from asgd import experiment
from asgd.experiment import cells, loop
from asgd.experiment import overrides as overrides_lib
from asgd.experiment.engines import Context
from asgd.experiment.machine import Machine
from asgd.experiment.progress import ProgressBar
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
STAGES, MICROBATCHES, UPDATES = 4, 8, 2
_LEARNT = "data", "model", "problem", "batch_size", "evaluation_examples"
CASES = {
  "stash": {"schedule": "pipedream", "recipe": "gap_aware"},
  "recomputing": {"schedule": "stale", "recompute": True, "momentum": 0.9},
  "predicted": {
    "schedule": "pipedream_2bw",
    "every": 4,
    "predict": True,
    "momentum": 0.9,
  },
  "synchronous": {"schedule": "zb_v", "recipe": "dana_slim"},
  "in_part": {
    "schedule": "breadth_first",
    "chunks": STAGES,
    "recipe": "ssgd",
    "momentum": 0.9,
    "device_megabytes": 0.008,
  },
  "replicas": {
    "schedule": "pipedream",
    "replicas": (1, 1, 1, 2),
    "recipe": "dana_zero",
  },
}


def small_config(**runs):
  """Returns a config of 16 microbatches: two updates that flush."""
  return {
    "data": {"name": "digits"},
    # Three stages of four have the same shapes, and share their programs.
    "model": {"name": "mlp", "hidden": (10, 10, 10)},
    "engine": "pipeline",
    "pipeline": {"stages": STAGES, "microbatches": MICROBATCHES},
    "batch_size": 4,
    "examples": 4 * MICROBATCHES * UPDATES,
    "learning_rate": 0.0125,
    "evaluations": 2,
    "evaluation_examples": 50,
    "curvature_checks": 0,
    "runs": runs or {"x": {"schedule": "gpipe"}},
  }


_load, _loaded = cells.problem.load, {}


def _load_once(config, **given):
  """Loads what several experiments learn once, so that their stages are
  compiled once."""
  what = [config[key] for key in _LEARNT]
  key = repr([what, given, jax.config.jax_enable_x64])
  if key not in _loaded:
    _loaded[key] = _load(config, **given)
  return _loaded[key]


def build_pipelines(overrides=(), config=None, **options):
  """Builds an experiment, its config overridden as by a command line."""
  config = overrides_lib.override(
    config or small_config(), dict(overrides), ENGINES
  )
  with mock.patch.object(cells.problem, "load", _load_once):
    return experiment.build(config, engines=ENGINES, **options)


def cell_of(exp, label):
  """Returns the first cell of a run."""
  return next(cell for cell in exp.cells if cell.label == label)


def plan_of(exp, label="x"):
  """Returns the plan of a run."""
  return exp.plan(cell_of(exp, label))


def train_pipelines(exp, folder, labels=None, **options):
  """Trains all cells, or those of some runs; returns their results."""
  bar = ProgressBar(
    1,
    stream=io.StringIO(),
    describe=lambda engine, row: ENGINES[engine].describe(row),
  )
  options.setdefault("bar", bar)
  return [
    loop.train(exp, cell, folder, **options)
    for cell in exp.cells
    if labels is None or cell.label in labels
  ]


def start_engine(exp, label, *, restore=lambda rebuild: None, seed=0):
  """Starts the engine of a cell without the loop and the folder."""
  cell = cell_of(exp, label)._replace(seed=seed)
  plan, place = exp.plan(cell), None
  context = Context(exp, cell, plan, place, None, restore, [], Machine())
  return exp.engine_kind(cell).start(context)


def to_the_end(exp, label, **options):
  """Trains a cell without the loop and the folder; returns its engine."""
  engine = start_engine(exp, label, **options)
  while engine.done < engine.total:
    engine.advance(engine.total)
  return engine


def host_leaves(params):
  """Returns the arrays of a tree, on the host."""
  return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
