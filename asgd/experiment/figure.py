"""The figure of an experiment: curves of its runs, and sweeps over workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]


def mean_and_std(rows: Sequence[Row], key: str) -> tuple[float, float]:
  """Mean and sample standard deviation of a column, whose missing values are
  NaN; NaN for the latter if there is one row only."""
  values = np.array(
    [np.nan if row.get(key) is None else row[key] for row in rows], float
  )
  with np.errstate(invalid="ignore", over="ignore"):
    std = values.std(ddof=1) if len(values) > 1 else np.nan
  return float(values.mean()), float(std)


def group_by(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
  """Groups rows by the values of some columns, in the order they are met."""
  groups: dict[tuple, list[Row]] = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


class Panel(NamedTuple):
  """One pair of axes."""

  name: str  # of its points
  x: str  # column along it; "workers" of results, others of evaluations
  y: str  # column up it
  xlabel: str
  ylabel: str


_CLOCKS = {
  "time": ("simulated_time", "time (mean batches)"),
  "seconds": ("seconds", "seconds of training"),
}
_ACCURACY = "test accuracy (%)"


def clocks(results: Sequence[Row]) -> list[str]:
  """Returns the clocks that results were timed by: "time", of simulations, and
  "seconds"."""
  return [
    clock
    for clock, (key, _) in _CLOCKS.items()
    if any(key in row for row in results)
  ]


def panels(results: Sequence[Row]) -> list[Panel]:
  """Returns what is drawn of an experiment.

  A run with several numbers of workers is drawn against them, and its curves at
  the largest; otherwise there are curves of accuracy and loss.
  """
  timed = clocks(results)
  at_workers: dict[str, set] = {}
  for row in results:
    at_workers.setdefault(row["algorithm"], set()).add(row["workers"])
  if any(len(counts) > 1 for counts in at_workers.values()) and timed:
    key, label = _CLOCKS[timed[0]]
    return [
      Panel("accuracy", "workers", "test_accuracy", "workers", _ACCURACY),
      Panel("gap", "workers", "gap_mean", "workers", "mean gap"),
      Panel("time", "workers", key, "workers", label),
      Panel("accuracy_curve", "epoch", "test_accuracy", "epoch", _ACCURACY),
      Panel("gap_curve", "epoch", "gap_mean", "epoch", "mean gap"),
      Panel("accuracy_by_time", timed[0], "test_accuracy", label, _ACCURACY),
    ]
  axes = [("epoch", "epoch"), ("update", "updates")]
  axes += [(clock, _CLOCKS[clock][1]) for clock in timed]
  return [
    Panel(f"{y}_by_{x}", x, y, xlabel, ylabel)
    for y, ylabel in (("test_accuracy", _ACCURACY), ("test_loss", "test loss"))
    for x, xlabel in axes
  ]


def numbers(results: Sequence[Row], curves: Sequence[Row]) -> list[dict]:
  """Reduces cells to the points of the figure, means over seeds.

  Args:
    results: one row per cell, as in result.json.
    curves: one row per evaluation, as in metrics.jsonl.

  Returns:
    Rows of panel, algorithm, workers, x, mean, std, seeds. Curves are of the
    largest number of workers of each run.
  """
  largest: dict[str, int] = {}
  for row in results:
    title = row["algorithm"]
    largest[title] = max(largest.get(title, 0), row["workers"])
  shown = [row for row in curves if row["workers"] == largest[row["algorithm"]]]
  by_result = group_by(results, "algorithm", "workers")
  by_message = group_by(shown, "algorithm", "workers", "message")
  points = []
  for panel in panels(results):
    groups = by_result if panel.x == "workers" else by_message
    for (title, workers, *_), rows in groups.items():
      if not any(panel.y in row and panel.x in row for row in rows):
        continue  # an engine without this clock, or without staleness
      x, _ = mean_and_std(rows, panel.x)
      mean, std = mean_and_std(rows, panel.y)
      points.append(
        {
          "panel": panel.name,
          "algorithm": title,
          "workers": workers,
          "x": x,
          "mean": mean,
          "std": std,
          "seeds": len(rows),
        }
      )
  return points


_ACCURACY_TICKS = (0, 20, 50, 70, 80, 90, 95, 98, 99, 99.9)
_BEST = 100.3  # percent; where the logarithm of the error would end


def _spread_accuracy(axis) -> None:
  """Spaces accuracies by the logarithm of the error, so that 96 and 97 % can be
  told apart beside a run that collapsed."""
  low, high = axis.get_ylim()
  low, high = max(low, 0), min(high, 100)
  axis.set_yscale(
    "function",
    functions=(
      lambda a: -np.log10(np.maximum(_BEST - a, 1e-3)),
      lambda y: _BEST - 10.0 ** (-y),
    ),
  )
  axis.set_ylim(low, high)
  ticks = [t for t in _ACCURACY_TICKS if low <= t <= high]
  if len(ticks) < 2:
    ticks = np.linspace(low, high, 4).round(1)
  axis.set_yticks(ticks)
  axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
  axis.minorticks_off()


def _band(mean, std, logarithmic):
  """One standard deviation either way; by a factor on logarithmic axes, where
  mean - std may not be drawable."""
  if not logarithmic:
    return mean - std, mean + std
  with np.errstate(invalid="ignore", divide="ignore"):
    factor = np.where(mean > 0, 1 + std / mean, 1.0)
  return mean / factor, mean * factor


def _draw_rows(axis, rows, style, *, scale, curve, level):
  """Draws one run in one panel: a curve with a band, a horizontal line
  (`level`), or points with bars."""
  rows = [row for row in rows if np.isfinite(row["mean"])]
  if not rows:
    return
  x = np.array([row["x"] for row in rows], float)
  mean = scale * np.array([row["mean"] for row in rows], float)
  std = scale * np.nan_to_num([row["std"] for row in rows])
  low, high = _band(mean, std, logarithmic=scale == 1)
  plain = {key: style[key] for key in ("color", "label")}
  shade = {"color": style["color"], "alpha": 0.15, "lw": 0}
  if curve:
    axis.plot(x, mean, **style)
    axis.fill_between(x, low, high, **shade)
  elif level:
    axis.axhline(mean[0], ls="--", **plain)
    axis.axhspan(low[0], high[0], **shade)
  else:
    axis.errorbar(x, mean, (mean - low, high - mean), capsize=3, **style)


def pyplot() -> Any:
  """Returns matplotlib's pyplot, drawing to files.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  return plt


def save(figure: Any, heading: str, stem: Path, **style: Any) -> list[Path]:
  """Writes a figure as STEM.png and STEM.svg, and closes it.

  Args:
    figure: of `pyplot`.
    heading: above all panels.
    stem: of the files' names.
    **style: of the heading.
  """
  figure.suptitle(heading.replace("$", r"\$"), **style)  # no mathematics
  paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
  for path in paths:
    figure.savefig(path, dpi=110)
  pyplot().close(figure)
  return paths


def _styles(plt, titles):
  colors = plt.get_cmap("tab10" if len(titles) <= 10 else "tab20")
  return {
    title: {
      "color": colors(i % colors.N),
      "marker": "osv^D*XPhd"[i % 10],
      "ls": ("-", "--")[i // colors.N % 2],
      "ms": 5,
      "label": title.replace("$", r"\$"),  # no mathematics
    }
    for i, title in enumerate(titles)
  }


def _loss_limits(axis, rows):
  """Keeps a run that diverged from hiding the others."""
  drawn = [row["mean"] for row in rows if np.isfinite(row["mean"])]
  if not drawn or min(drawn) <= 0:
    return
  firsts: dict[str, float] = {}
  for row in rows:
    firsts.setdefault(row["algorithm"], row["mean"])
  finite = [value for value in firsts.values() if np.isfinite(value)]
  top = 1.1 * max(finite, default=max(drawn))
  axis.set_yscale("log")
  axis.set_ylim(0.95 * min(drawn), min(top, 1.05 * max(drawn)))


def _draw_panel(axis, panel, points, styles, swept, *, sweeps):
  rows = [point for point in points if point["panel"] == panel.name]
  scale = 100 if panel.y == "test_accuracy" else 1
  against_workers = panel.x == "workers"
  for title, style in styles.items():
    mine = [row for row in rows if row["algorithm"] == title]
    _draw_rows(
      axis,
      mine,
      style,
      scale=scale,
      curve=not against_workers,
      level=len(mine) == 1 and mine[0]["x"] not in swept,
    )
  if against_workers:
    ticks = sorted(swept)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
  elif panel.x in (*_CLOCKS, "update") and rows:
    axis.set_xscale("log")
  positive = [row["mean"] for row in rows if 0 < row["mean"] < np.inf]
  if panel.y == "test_loss":
    _loss_limits(axis, rows)
  elif scale == 100 and rows:
    _spread_accuracy(axis)
  elif positive:
    axis.set_yscale("log")
    axis.set_ylim(0.3 * min(positive))
  if sweeps:
    when = "at the end" if against_workers else "at the most workers"
    axis.set_title(when, fontsize="medium")
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  axis.grid(alpha=0.3)


def draw(
  points: Sequence[Row], results: Sequence[Row], stem: Path, heading: str
) -> list[Path]:
  """Draws the points of `numbers` as STEM.png and STEM.svg.

  Lines are means over seeds, bars and bands one standard deviation (by a factor
  on logarithmic axes). A run with one number of workers, which no sweep of the
  others has, is a horizontal line in the panels against workers.

  Args:
    points: from `numbers`.
    results: that they are of.
    stem: of the files' names.
    heading: above all panels.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  plt = pyplot()
  drawn = panels(results)
  styles = _styles(plt, list(dict.fromkeys(p["algorithm"] for p in points)))
  counts: dict[str, set] = {}
  for row in results:
    counts.setdefault(row["algorithm"], set()).add(row["workers"])
  swept = set().union(*(ns for ns in counts.values() if len(ns) > 1))
  columns = len(drawn) // 2
  figure, axes = plt.subplots(
    2, columns, figsize=(5 * columns, 8), layout="constrained"
  )
  for axis, panel in zip(axes.flat, drawn, strict=True):
    _draw_panel(axis, panel, points, styles, swept, sweeps=bool(swept))
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(len(labels), 8)
  )
  return save(figure, heading, stem)
