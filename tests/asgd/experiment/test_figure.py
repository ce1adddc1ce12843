"""The figure: its panels, and the numbers in it."""

import numpy as np
import pytest

from asgd.experiment import figure


def result(algorithm, workers, accuracy, gap, **kwargs):
  seed = kwargs.get("seed", 0)
  return {
    "cell": f"{algorithm}-n{workers}-s{seed}",
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
  points = figure.figure_points(SWEPT, [curve(row) for row in SWEPT])
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


def test_seeds_that_end_at_different_messages_have_one_curve():
  seeds = [result("A", 8, accuracy, 1.0, seed=i) for i, accuracy in
           enumerate((0.5, 0.7))]
  rows = [
    curve(seed, message, epoch=message / 10)
    for seed, last in zip(seeds, (30, 26), strict=True)
    for message in (10, 20, last)
  ]
  points = figure.figure_points(seeds, rows)
  drawn = [p for p in points if p["panel"] == "test_accuracy_by_epoch"]
  assert [p["seeds"] for p in drawn] == [2, 2, 2]
  assert [p["x"] for p in drawn] == pytest.approx([1.0, 2.0, 2.8])


def test_clocks_are_called_what_they_are():
  live = {**SWEPT[0], "seconds": 33.0}
  del live["simulated_time"]
  labels = {p.name: p.xlabel for p in figure.panels([live])}
  assert labels["test_accuracy_by_seconds"] == "seconds of training"
  for rows in (SWEPT, [*SWEPT, live]):
    (panel,) = (p for p in figure.panels(rows) if p.name == "time")
    assert panel.ylabel == "time (mean batches)"


def test_runs_with_codecs_are_drawn_against_their_traffic():
  rows = [{**row, "codec": "onebit", "bytes_up": 5} for row in SWEPT[:1]]
  labels = {p.name: p.xlabel for p in figure.panels(rows)}
  assert labels["test_accuracy_by_megabytes"] == "traffic (MB)"
  panels = {p.name: (p.x, p.y) for p in figure.panels(rows + SWEPT[1:])}
  assert panels["accuracy_by_megabytes"] == ("megabytes", "test_accuracy")
  assert panels["megabytes"] == ("workers", "bytes_up")
  units = {p.name: p.ylabel for p in figure.panels(rows + SWEPT[1:])}
  assert units["megabytes"] == "traffic up (MB)"
  assert "megabytes" not in {p.name for p in figure.panels(SWEPT)}


def test_runs_of_several_engines_are_compared_on_each_clock():
  simulated = result("A", 8, 0.5, 1.0)
  mesh = {
    "cell": "B-n1-s0",
    "algorithm": "B",
    "workers": 1,
    "test_accuracy": 0.9,
    "test_loss": 0.2,
    "seconds": 3.0,
  }
  rows = [curve(simulated), curve(mesh, seconds=2.5)]
  del rows[1]["time"]
  points = figure.figure_points([simulated, mesh], rows)
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


def labels_of(drawn, side):
  """The labels that can be read on an axis."""
  drawn.canvas.draw()
  low, high = sorted(side.get_view_interval())
  labels = [*side.get_majorticklabels(), *side.get_minorticklabels()]
  at = 0 if side.axis_name == "x" else 1
  inside = [t for t in labels if low <= t.get_position()[at] <= high]
  return [t.get_text() for t in inside if t.get_text()]


@pytest.mark.parametrize(
  ("low", "high"),
  [
    *((0, 1), (0.1, 0.97), (0.15, 0.79), (0.87, 0.97), (0.945, 0.99)),
    *((0.954, 0.973), (0.959, 0.9606), (0.9995, 0.9999), (0.5, 0.5)),
  ],
)
def test_an_error_has_two_labels_or_more_whatever_its_range(low, high):
  panel = figure.Panel("accuracy", "epoch", "test_accuracy", "epoch", "error")
  rows = [
    {
      **dict(panel="accuracy", algorithm="A", workers=2, x=x, mean=y, std=0.0),
      **dict(seeds=1, values=[y], diverged=[False]),
    }
    for x, y in ((1.0, low), (2.0, high))
  ]
  drawn, ((axis,),) = figure.new_figure(1, 1, 2.4, 1.95)
  styles = {"A": {**figure.styles(["A"])["A"], "label": "A"}}
  figure._draw_panel(axis, panel, rows, styles, set())
  assert len(labels_of(drawn, axis.yaxis)) >= 2
  assert axis.get_ylabel() in ("error", "error, log scale")
  assert (axis.get_yscale() == "log") == axis.get_ylabel().endswith("log scale")


def lightness(color):
  """CIE L*, from 0 of black to 100 of white."""
  parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [
    part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
    for part in parts
  ]
  y = np.dot([0.2126, 0.7152, 0.0722], linear)
  return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


@pytest.mark.parametrize("count", range(1, 25))
def test_lines_are_told_apart_in_grey(count):
  grey = [lightness(color) for color in figure.COLORS]
  assert (np.diff(grey) >= 7).all()
  assert max(grey) < 68  # on white
  styles = list(figure.styles([str(i) for i in range(count)]).values())
  looks = {(lightness(s["color"]), s["marker"], s["ls"]) for s in styles}
  assert len(looks) == count
  few = styles[: len(figure.COLORS)]
  assert len({s["color"] for s in few}) == len(few)
  assert len({s["marker"] for s in few}) == len(few)


def test_a_level_to_compare_with_has_no_curve_at_the_most_workers():
  level = result("one", 1, 0.9, 0.1)
  results = [*SWEPT, level]
  points = figure.figure_points(results, [curve(row) for row in results])
  runs = {}
  for point in points:
    runs.setdefault(point["panel"], set()).add(point["algorithm"])
  assert runs["accuracy"] == runs["gap"] == {"A", "one"}
  assert runs["accuracy_curve"] == runs["gap_curve"] == {"A"}


def test_each_seed_is_in_the_numbers_and_whether_it_diverged():
  results = [
    result("A", 8, 0.5, 1.0),
    result("A", 8, 0.1, float("nan"), seed=1, diverged=True),
    result("A", 16, 0.4, 5.0),
  ]
  rows = [curve(row, diverged=False) for row in results[:2]]
  points = figure.figure_points(results, rows + [curve(results[2])])
  first = next(p for p in points if (p["panel"], p["x"]) == ("accuracy", 8))
  assert (first["values"], first["diverged"]) == ([0.5, 0.1], [False, True])
  said = figure._legend_notes(points, figure.panels(results))
  assert "dots: seeds" in said
  assert "crosses: seeds that diverged" in said


def drawn(results, rows):
  points = figure.figure_points(results, rows)
  return [panel.name for panel in figure.drawn_panels(results, points)]


def test_panels_that_tell_nothing_are_left_out():
  def evaluated(**kwargs):
    rows = [result("A", 8, 0.5, 0.0), result("B", 8, 0.6, 0.0, **kwargs)]
    steps = (
      dict(message=m, epoch=m, update=2 * m, time=3.0 * m) for m in (1, 2)
    )
    return rows, [
      curve(row, test_accuracy=0.1 * i + 0.2 * step["epoch"], **step)
      for step in steps
      for i, row in enumerate(rows)
    ]

  # Updates and time are epochs in other units; the loss does not change.
  results, rows = evaluated()
  rows = [{**row, "test_loss": 1.0} for row in rows]
  assert drawn(results, rows) == ["test_accuracy_by_epoch"]
  # One of them is faster.
  rows = [
    {**row, "time": row["time"] / (1 + (row["algorithm"] == "B"))}
    for row in rows
  ]
  expected = ["test_accuracy_by_epoch", "test_accuracy_by_time"]
  assert drawn(results, rows) == expected
  # Nothing of anything: one panel is left.
  assert drawn(results, rows[:1]) == ["test_accuracy_by_epoch"]


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
  if labels is None:
    assert axis.get_xscale() == "linear"
    return
  assert labels_of(drawn, axis.xaxis) == labels


@pytest.mark.parametrize("swept", [True, False])
def test_it_is_drawn_even_if_a_run_diverged(tmp_path, swept):
  results = SWEPT if swept else SWEPT[:2]
  broken = result("B", 8, 0.1, float("nan"), test_loss=float("inf"))
  results = [*results, broken]
  rows = [curve(row, m, epoch=m) for row in results for m in (10, 20)]
  points = figure.figure_points(results, rows)
  figure.draw(points, results, tmp_path / "figure", "a heading")
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
  assert "a heading" in (tmp_path / "figure.svg").read_text()


@pytest.mark.parametrize("loss", [0.0, float("nan")])
@pytest.mark.filterwarnings("error")
def test_it_is_drawn_silently_where_nothing_is_above_0(tmp_path, loss):
  row = result("A", 8, 0.5, 0.0, test_loss=loss, simulated_time=0.0)
  rows = [curve(row, update=0, time=0.0)]
  figure.draw(figure.figure_points([row], rows), [row], tmp_path / "figure", "")
