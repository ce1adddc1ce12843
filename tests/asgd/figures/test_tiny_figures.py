"""Each figure's experiment at its tiny size: all cells count and are judged."""

import runpy

import kit
import pytest
import tiny
from pipeline_experiments import ENGINES
from tiny import no_limits

from asgd.experiment import report, schema
from asgd.experiment.progress import Silent
from asgd.figures import reproduce

FIGURES = reproduce.files(kit.ROOT / "configs" / "figures")

pytestmark = pytest.mark.usefixtures("no_pictures", no_limits.__name__)


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


@pytest.mark.parametrize("name", FIGURES)
def test_each_run_trains_at_the_tiny_size_and_is_judged(name, tmp_path):
  task, workdir = load(FIGURES[name]), str(tmp_path / "out")
  exp, place = reproduce.train(
    task, ENGINES, bar=lambda messages: Silent(), workdir=workdir, count=1
  )
  report.write(place, exp)
  tiny.check(place)
  verdicts, points, data = reproduce.judge(task, exp, place)
  assert data["cells"] == data["of_cells"] == len(exp.cells)
  assert len(verdicts) == len(task.figure.claims)
  assert points
