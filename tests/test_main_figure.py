"""The README's figure has medians, levels, and crosses of unreached losses."""

import math
import runpy
from pathlib import Path

import kit
import pytest

from asgd.figures import columns


@pytest.fixture(scope="module")
def main_job():
  pytest.importorskip("matplotlib")
  return kit.load_module(kit.ROOT / "docs" / "figures" / "main_job.py")


@pytest.fixture
def run(main_job):
  """Three seeds at 8 and 16 workers; NAG-ASGD reaches no loss with 16, and its
  first seed diverges there. SSGD has no gap."""
  labels = (main_job.ONE, *main_job.LABELS)
  workers = {label: [8, 16] for label in main_job.LABELS}
  workers[main_job.ONE] = [1]
  cells = {}
  for number, label in enumerate(labels):
    for count in workers[label]:
      for seed in (0, 1, 2):
        late = label == "nag_asgd" and count == 16
        result = {
          "test_accuracy": 0.9 - 0.01 * seed,
          "gap_mean": 0.0 if label == "ssgd" else 0.1 * (number + 1) + seed,
          "messages": math.inf if late else 100.0 / count + seed,
          "updates": 1,
          "diverged": late and seed == 0,
        }
        cells[label, count, seed] = columns.CellResult(result, Path())
  made = {main_job.TIME: dict(kind="quotient", of="messages", by="updates")}
  table = columns.CellTable(cells, made)
  titles = {label: label.upper() for label in labels}
  return main_job.Run(table, workers, titles)


def drawn(main_job, run, measure):
  """Returns the named lines of a panel, and its crosses."""
  axis = main_job.plt.figure().add_subplot()
  main_job.draw_panel(axis, run, measure)
  named = {
    line.get_label(): line.get_ydata()
    for line in axis.lines
    if not line.get_label().startswith("_")
  }
  crosses = [line for line in axis.lines if line.get_marker() == "x"]
  main_job.plt.close("all")
  return named, crosses


def test_a_line_is_of_medians_and_one_worker_a_level(main_job, run):
  named, crosses = drawn(main_job, run, main_job.ERROR)
  assert set(named) == set(run.titles.values())
  assert all(values == pytest.approx([11, 11]) for values in named.values())
  assert len(crosses) == 1  # of the seed that diverged


def test_a_loss_that_is_never_reached_is_a_cross_at_the_top(main_job, run):
  time = main_job.TASKS[0].measures[-1]
  named, crosses = drawn(main_job, run, time)
  assert named["ASGD"] == pytest.approx([13.5, 7.25])
  assert named["NAG_ASGD"][0] == pytest.approx(13.5)
  assert math.isnan(named["NAG_ASGD"][1])
  assert [line.get_ydata()[0] for line in crosses] == [main_job.UNREACHED] * 3


def test_no_gap_is_not_drawn(main_job, run):
  _, gap, _ = main_job.TASKS[0].measures
  named, _ = drawn(main_job, run, gap)
  assert all(map(math.isnan, named["SSGD"]))
  assert not any(map(math.isnan, named["ASGD"]))


def test_the_runs_are_those_of_the_configs(main_job):
  for name in ("digits", "language"):
    config = runpy.run_path(str(kit.ROOT / "configs" / f"{name}.py"))
    runs = config["get_config"]().runs
    assert set(runs) == {main_job.ONE, *main_job.LABELS}
