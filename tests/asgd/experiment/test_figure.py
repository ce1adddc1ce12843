"""The figure: its panels, and the numbers in it."""

import numpy as np
import pytest

from asgd.experiment import figure


def result(algorithm, workers, accuracy, gap, **kwargs):
  return {
    "algorithm": algorithm,
    "workers": workers,
    "test_accuracy": accuracy,
    "test_loss": 1 - accuracy,
    "gap_mean": gap,
    "simulated_time": 10.0 / workers,
    **kwargs,
  }


def curve(row, message=10, **kwargs):
  times = {"epoch": 1.0, "update": 5, "message": message, "time": 4.0}
  return {**row, **times, **kwargs}


SWEPT = [
  result("A", 8, 0.5, 1.0),
  result("A", 8, 0.7, 3.0),
  result("A", 16, 0.4, 5.0),
]


def test_the_points_of_a_sweep_are_means_over_seeds():
  points = figure.numbers(SWEPT, [curve(row) for row in SWEPT])
  by_place = {(p["panel"], p["x"]): p for p in points}
  first = by_place["accuracy", 8]
  assert first["mean"] == pytest.approx(0.6)
  assert first["std"] == pytest.approx(np.sqrt(0.02))
  assert first["seeds"] == 2
  assert by_place["gap", 16]["mean"] == 5.0
  assert by_place["time", 8]["mean"] == 1.25
  assert by_place["accuracy_by_time", 4.0]["mean"] == 0.4
  # Curves are drawn at each run's largest number of workers.
  assert by_place["gap_curve", 1.0]["workers"] == 16


def test_clocks_are_called_what_they_are():
  live = {**SWEPT[0], "seconds": 33.0}
  del live["simulated_time"]
  labels = {p.name: p.xlabel for p in figure.panels([live])}
  assert labels["test_accuracy_by_seconds"] == "seconds of training"
  for rows in (SWEPT, [*SWEPT, live]):
    (panel,) = (p for p in figure.panels(rows) if p.name == "time")
    assert panel.ylabel == "time (mean batches)"


def test_runs_of_several_engines_are_compared_on_each_clock():
  simulated = result("A", 8, 0.5, 1.0)
  mesh = {
    "algorithm": "B",
    "workers": 1,
    "test_accuracy": 0.9,
    "test_loss": 0.2,
    "seconds": 3.0,
  }
  rows = [curve(simulated), curve(mesh, seconds=2.5)]
  del rows[1]["time"]
  points = figure.numbers([simulated, mesh], rows)
  panels = {}
  for point in points:
    panels.setdefault(point["panel"], []).append(point["algorithm"])
  assert panels == {
    f"{y}_by_{x}": runs
    for y in ("test_accuracy", "test_loss")
    for x, runs in (
      *(("epoch", ["A", "B"]), ("update", ["A", "B"])),
      *(("time", ["A"]), ("seconds", ["B"])),
    )
  }


def test_a_mean_of_what_one_has_not_is_not_known():
  rows = [{"x": 1.0}, {"x": 3.0}, {}]
  assert figure.mean_and_std(rows[:2], "x") == (2.0, np.sqrt(2))
  mean, std = figure.mean_and_std(rows, "x")
  assert np.isnan(mean)
  assert np.isnan(std)
  assert np.isnan(figure.mean_and_std(rows[:1], "x")[1])


@pytest.mark.parametrize(
  ("low", "high", "ticks"),
  [
    (0, 100, [0, 60, 90, 96, 99, 100]),
    (15, 79, [20, 40, 50, 60, 70, 75]),
    (87, 97, [88, 90, 92, 95, 96, 97]),
    (95.4, 97.3, [95.5, 96, 96.5, 97]),
    (95.9, 96.06, [95.9, 95.95, 96, 96.05]),
  ],
)
def test_accuracies_are_labelled_three_times_and_do_not_collide(
  low, high, ticks
):
  assert figure.accuracy_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
  ("values", "labels"),
  [
    ([90, 900], ["100", "200", "500", "1,000"]),
    ([3000, 64000], ["5,000", "10,000", "20,000", "50,000"]),
    ([0, 0], None),
  ],
)
@pytest.mark.filterwarnings("error")
def test_a_logarithmic_axis_has_few_labels(values, labels):
  drawn, ((axis,),) = figure.new_figure(1, 1, 5, 4)
  axis.plot(values, [1, 2])
  figure.scale_by_logarithm(axis, "x", values)
  drawn.canvas.draw()
  if labels is None:
    assert axis.get_xscale() == "linear"
    return
  low, high = axis.get_xlim()
  texts = axis.get_xticklabels(which="both")
  inside = [t for t in texts if low <= t.get_position()[0] <= high]
  assert [t.get_text() for t in inside if t.get_text()] == labels


@pytest.mark.parametrize("swept", [True, False])
def test_it_is_drawn_even_if_a_run_diverged(tmp_path, swept):
  results = SWEPT if swept else SWEPT[:2]
  broken = result("B", 8, 0.1, float("nan"), test_loss=float("inf"))
  results = [*results, broken]
  rows = [curve(row, m, epoch=m) for row in results for m in (10, 20)]
  points = figure.numbers(results, rows)
  figure.draw(points, results, tmp_path / "figure", "a heading")
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  assert "a heading" in (tmp_path / "figure.svg").read_text()


@pytest.mark.parametrize("loss", [0.0, float("nan")])
@pytest.mark.filterwarnings("error")
def test_it_is_drawn_silently_where_nothing_is_above_0(tmp_path, loss):
  row = result("A", 8, 0.5, 0.0, test_loss=loss, simulated_time=0.0)
  rows = [curve(row, update=0, time=0.0)]
  figure.draw(figure.numbers([row], rows), [row], tmp_path / "figure", "")
