"""Each figure's experiment at its tiny size: all cells count and are judged."""

import math
import runpy

import kit
import pytest
import tiny
from pipeline_experiments import ENGINES

from asgd import diagnosis
from asgd.experiment import report, schema
from asgd.experiment.progress import Silent
from asgd.figures import reproduce

FIGURES = reproduce.files(kit.ROOT / "configs" / "figures")

pytestmark = pytest.mark.usefixtures("no_pictures")


def load(path):
  """Returns a figure with its experiment at the tiny size."""
  task = reproduce.load(path, ENGINES)
  config = runpy.run_path(str(path))["get_config"]("tiny")
  resolved = schema.resolve(config, ENGINES)
  counts = {
    label: ENGINES[run.engine].workers(run)
    for label, run in resolved.runs.items()
  }
  return task._replace(resolved=resolved, counts=counts)


class NoUpdates(Silent):
  """A bar that is told of no message: nothing is trained."""

  def update(self, cell, progress):
    """Fails."""
    raise AssertionError(f"{cell.name} is trained again")


@pytest.mark.parametrize("name", FIGURES)
def test_each_run_trains_at_the_tiny_size_and_is_judged(
  name, tmp_path, monkeypatch
):
  # No claim is about it, and it is a fifth of the time of a run.
  monkeypatch.setattr(diagnosis, "curvature_limit", lambda *_, **__: math.nan)
  task, workdir = load(FIGURES[name]), str(tmp_path / "out")
  options = {"workdir": workdir, "count": 1}
  exp, place = reproduce.train(
    task, ENGINES, bar=lambda messages: Silent(), **options
  )
  report.write(place, exp)
  tiny.check(place)
  verdicts, points, data = reproduce.judge(task, exp, place)
  assert data["cells"] == data["of_cells"] == len(exp.cells)
  assert len(verdicts) == len(task.figure.claims)
  assert points
  before = tiny.written(place)
  reproduce.train(task, ENGINES, bar=lambda messages: NoUpdates(), **options)
  assert tiny.written(place) == before
