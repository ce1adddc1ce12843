"""Draws the README's figure from the folders of two finished runs.

  python -m launch.train --config=configs/digits.py --workdir=runs/main
  python -m launch.train --config=configs/language.py --workdir=runs/text
  python docs/figures/main_job.py runs/main runs/text docs/figures/main_job.svg

A row for each run: the error on test data, the mean gap, and the simulated time
to a training loss, against the number of workers. Each seed is a point, the
median a line. A cross is a seed that diverged, or never reached the loss.
"""

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from asgd.experiment.figure import COLORS, DASHES, MARKERS
from asgd.experiment.folder import read_results
from asgd.figures.columns import CellResult, CellTable

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

ONE, LEVEL_COLOR = "sgd", "#666666"  # the run with one worker, a level line
# Labels of runs, in the order of the legend. The baseline that waits is black.
LABELS = "ssgd", "asgd", "nag_asgd", "dc_asgd", "gap_aware", "dana_zero"
TIME = "time to loss"
APART = 1.045  # factor on x between the points of two runs
UNREACHED = 0.96  # height of crosses for "never", as a fraction of the axis


class Measure(NamedTuple):
  """The quantity of each cell that a panel shows."""

  title: str  # with its unit
  column: str  # of the cell's result, or TIME
  shown: Callable[[float], float] = lambda value: value
  ticks: tuple[float, ...] = ()  # none: those of matplotlib


class Task(NamedTuple):
  """A row of the figure."""

  name: str
  loss: float  # the training loss to reach, in nats
  measures: tuple[Measure, ...]


def measures(error: Measure, loss: float) -> tuple[Measure, ...]:
  """Returns the three panels of a row."""
  return (
    error,
    Measure("mean gap", "gap_mean"),
    Measure(f"time to loss {loss:g} (batches)", TIME),
  )


ERROR = Measure(
  *("test error (%)", "test_accuracy"),
  shown=lambda accuracy: 100 * (1 - accuracy),
  ticks=(2, 5, 10, 20, 50, 90),
)
TEST_LOSS = Measure("test loss (nats)", "test_loss")
TASKS = (
  Task("digits", 0.3, measures(ERROR, 0.3)),
  Task("text", 2.8, measures(TEST_LOSS, 2.8)),
)


class Run(NamedTuple):
  """The cells of a folder."""

  table: CellTable
  workers: dict[str, list[int]]  # label -> numbers of workers
  titles: dict[str, str]  # label -> title


def read(folder: Path, loss: float) -> Run:
  """Returns the finished cells of a folder, with the time to a loss."""
  cells, workers, titles = {}, {}, {}
  for row in read_results(folder):
    label, count = row["label"], row["workers"]
    place = folder / "cells" / row["cell"]
    cells[label, count, row["seed"]] = CellResult(row, place)
    titles[label] = row["algorithm"]
    if count not in workers.setdefault(label, []):
      workers[label].append(count)
  made = {TIME: {"kind": "reach", "loss": loss}}
  return Run(CellTable(cells, made), workers, titles)


def looks() -> dict[str, dict[str, Any]]:
  """Returns colour, marker and dashes of each run's line, which differ in
  grey, too."""
  return {
    label: {
      "color": COLORS[i],
      "marker": MARKERS[i],
      "ls": DASHES[i % len(DASHES)],
    }
    for i, label in enumerate(LABELS)
  }


def draw_run(
  axis: Any, run: Run, label: str, measure: Measure, look: dict[str, Any]
) -> None:
  """Draws the medians of a run's seeds, and each seed beside its median."""
  color, counts, medians = look["color"], run.workers[label], []
  aside = APART ** (LABELS.index(label) - (len(LABELS) - 1) / 2)
  for count in counts:
    values = run.table.values(measure.column, label, count)
    shown = {seed: measure.shown(value) for seed, value in values.items()}
    medians.append(statistics.median(shown.values()))
    for seed, value in shown.items():
      dot = {"color": color, "ms": 3.5, "alpha": 0.8, "clip_on": False}
      if not math.isfinite(value):  # a loss that is never reached
        top = axis.get_xaxis_transform()
        axis.plot(count * aside, UNREACHED, "x", transform=top, **dot)
      else:
        mark = "x" if run.table.diverged(label, count, seed) else "."
        axis.plot(count * aside, value, mark, **dot)
  # SSGD has no gap, and a logarithmic axis cannot show 0.
  medians = [m if 0 < m < math.inf else math.nan for m in medians]
  axis.plot(counts, medians, label=run.titles[label], lw=1.3, ms=4, **look)


def draw_panel(axis: Any, run: Run, measure: Measure) -> None:
  """Draws all runs of a panel, the level of one worker, and the axes."""
  for label, look in looks().items():
    draw_run(axis, run, label, measure, look)
  counts = run.workers[LABELS[0]]
  of_one = run.table.values(measure.column, ONE, 1).values()
  level = statistics.median(map(measure.shown, of_one))
  style = {"color": LEVEL_COLOR, "lw": 1.0, "ls": (0, (4, 3)), "zorder": 0}
  axis.axhline(level, label=run.titles[ONE], **style)
  axis.set(xscale="log", yscale="log", xlabel="workers")
  axis.xaxis.set_major_locator(ticker.FixedLocator(counts))
  axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
  if measure.ticks:
    axis.yaxis.set_major_locator(ticker.FixedLocator(measure.ticks))
  elif measure.column != "gap_mean":
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
  if measure.column != "gap_mean":
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
  axis.minorticks_off()
  axis.margins(x=0.09)
  if measure.column == TIME:  # room for the crosses of "never"
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.15)
    where = {"transform": axis.transAxes, "va": "center"}
    axis.text(0.02, UNREACHED, "never", fontsize=8, **where)
  axis.spines[["top", "right"]].set_visible(False)
  axis.grid(axis="y", color="#dddddd", lw=0.6)
  axis.set_axisbelow(True)


def draw(folders: list[Path], out: Path) -> None:
  """Draws the figure of the tasks' folders, with text that stays text."""
  plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "main job"})
  plt.rcParams.update({"font.size": 9, "font.family": "sans-serif"})
  shape = len(TASKS), len(TASKS[0].measures)
  figure, axes = plt.subplots(*shape, figsize=(8, 5))
  figure.subplots_adjust(left=0.06, right=0.98, bottom=0.17, top=0.94)
  figure.subplots_adjust(wspace=0.26, hspace=0.52)
  letters = iter("abcdef")
  for task, folder, row in zip(TASKS, folders, axes, strict=True):
    run = read(folder, task.loss)
    for axis, measure in zip(row, task.measures, strict=True):
      draw_panel(axis, run, measure)
      title = f"({next(letters)}) {task.name}: {measure.title}"
      axis.set_title(title, fontsize=9, loc="left", x=-0.12)
  figure.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="lower center",
    ncols=len(LABELS) + 1,
    columnspacing=1.2,
    fontsize=8.5,
    frameon=False,
  )
  figure.savefig(out, metadata={"Date": None}, dpi=110)


def strip_lines(path: Path) -> None:
  """Removes the blanks with which matplotlib ends lines of an SVG."""
  lines = path.read_text().splitlines()
  path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


if __name__ == "__main__":
  *folders, out = map(Path, sys.argv[1:])
  draw(folders, out)
  if out.suffix == ".svg":
    strip_lines(out)
