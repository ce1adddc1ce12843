"""What tests of problems on tables share: short runs of them."""

from asgd import experiment
from asgd.experiment import loop
from asgd.experiment.progress import Silent


def build(problem, runs, data_dir=None, **config):
  """Returns an experiment of a problem, whose runs are of the recipe `table`
  unless they say otherwise."""
  runs = {label: {"recipe": "table", **run} for label, run in runs.items()}
  base = {"workers": (3,), "evaluations": 1, "curvature_checks": 0}
  config = {**base, "problem": problem, "runs": runs, **config}
  return experiment.build(
    config, engines=experiment.ENGINES, data_dir=data_dir
  )


def ends(exp):
  """Trains all cells; returns (parameters, last evaluation) by label."""
  out = {}
  for cell in exp.cells:
    kept = []
    loop.train(
      *(exp, cell, None),
      bar=Silent(),
      ended=lambda *what, kept=kept: kept.extend(what),
    )
    out[cell.label] = kept[1], kept[2][-1]
  return out
