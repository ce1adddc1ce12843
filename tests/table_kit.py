"""Helpers of the tests of tables: short runs."""

import kit
import numpy as np

from asgd import base, orders, tables

ROWS, WORKERS, MESSAGES = 12, 3, 36


def build(problem, runs, data_dir=None, **config):
  """Returns an experiment of a problem, whose runs are of the recipe `table`
  unless they say otherwise."""
  runs = {label: {"recipe": "table", **run} for label, run in runs.items()}
  base = {"workers": (3,), "evaluations": 1, "curvature_checks": 0}
  return kit.build(
    base, problem=problem, runs=runs, data_dir=data_dir, **config
  )


def train(exp, workdir=None, index=0, **options):
  """Trains a cell; returns its records, its parameters and its evaluations."""
  return kit.train(exp, workdir, index, **options)[2:]


def ends(exp):
  """Trains all cells; returns (parameters, last evaluation) by label."""
  out = {}
  for index, cell in enumerate(exp.cells):
    _, params, said, *_ = train(exp, index=index)
    out[cell.label] = params, said[-1]
  return out


def least_squares(bad=None):
  """Returns work in which rows go to their keys; job `bad` has a NaN."""

  def keys(job):
    return {"w": np.arange(job % 5, ROWS, 2 + job % 2)}

  def gradient(rows, job, keys, worker, number):
    error = rows["w"] - keys["w"][:, None]
    if number == bad:
      error[1, 0] = np.nan
    return float(np.square(error).mean()), {"w": error}

  return tables.Work(lambda worker, job: job, keys, gradient)


def run_of(
  network=None, clock=None, messages=MESSAGES, bad=None, codec=None, **options
):
  """Returns a simulation of least squares that has not begun."""
  kind, more = tables.Simulation, {}
  if network is not None:
    kind, more = tables.OverNetwork, {"network": network}
  options = {"consistency": "ssp", **options}
  return kind(
    tables.table(0.2, WORKERS, clock_every=2, codec=codec, **options),
    {"w": np.zeros((ROWS, 2), np.float32)},
    least_squares(bad),
    clock or orders.durations.gamma(seed=3, variation=0.5),
    workers=WORKERS,
    messages=messages,
    **more,
  )


def finished(*args, **options):
  """Returns such a simulation at its end."""
  run = run_of(*args, **options)
  run.advance(MESSAGES)
  return run


def resumed(run, *args, **options):
  """Returns one that goes on to its end from what another one saves."""
  other = run_of(*args, **options)
  other.unpack(tables.wire.load(tables.wire.dump(run.pack())))
  other.advance(MESSAGES)
  return other


def same(one, two, but=()):
  """Asserts that two simulations have the same bits."""
  assert one.tables()["w"].tobytes() == two.tables()["w"].tobytes()
  for name, a, b in zip(
    base.Records._fields, one.records(), two.records(), strict=True
  ):
    assert name in but or a.tobytes() == b.tobytes(), name
  assert one.differentials == two.differentials
  assert one.rows == two.rows
