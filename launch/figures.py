"""The figure of an experiment: what staleness costs, and what cures it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def mean_and_std(rows: Sequence[Row], key: str) -> tuple[float, float]:
  """Mean and sample standard deviation of a column, whose missing values are
  NaN; NaN for the latter if there is one row only."""
  values = np.array([np.nan if r[key] is None else r[key] for r in rows], float)
  with np.errstate(invalid="ignore", over="ignore"):
    std = values.std(ddof=1) if len(values) > 1 else np.nan
  return float(values.mean()), float(std)


def group_by(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
  """Groups rows by the values of some columns, in the order they are met."""
  groups: dict[tuple, list[Row]] = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


def time_key(results: Sequence[Row]) -> str:
  """Returns the column of the times of results: the simulated ones, or the
  seconds of live runs, which have none."""
  simulated = all("simulated_time" in row for row in results)
  return "simulated_time" if simulated else "seconds"


def time_label(results: Sequence[Row]) -> str:
  """Returns what a clock of these results counts."""
  simulated = time_key(results) == "simulated_time"
  return "time (mean batches)" if simulated else "seconds"


def _point(panel, title, workers, x, rows, key):
  mean, std = mean_and_std(rows, key)
  return {
    "panel": panel,
    "algorithm": title,
    "workers": workers,
    "x": x,
    "mean": mean,
    "std": std,
    "seeds": len(rows),
  }


def numbers(results: Sequence[Row], curves: Sequence[Row]) -> list[dict]:
  """Reduces cells to the points of the figure, means over seeds.

  Args:
    results: one row per cell, as in result.json.
    curves: one row per evaluation, as in metrics.jsonl.

  Returns:
    Rows of panel, algorithm, workers, x, mean, std, seeds. Panels: "accuracy",
    "gap" and "time" (to the end, `time_key`) against workers; "accuracy_curve"
    and "gap_curve" against epochs and "accuracy_by_time" against the mean
    time, at the largest number of workers of each algorithm.
  """
  points = []
  for panel, key in (
    ("accuracy", "test_accuracy"),
    ("gap", "gap_mean"),
    ("time", time_key(results)),
  ):
    for (title, workers), rows in group_by(
      results, "algorithm", "workers"
    ).items():
      points.append(_point(panel, title, workers, workers, rows, key))
  largest: dict[str, int] = {}
  for row in results:
    title = row["algorithm"]
    largest[title] = max(largest.get(title, 0), row["workers"])
  at_largest = [r for r in curves if r["workers"] == largest[r["algorithm"]]]
  groups = group_by(at_largest, "algorithm", "workers", "epoch")
  for panel, key in (
    ("accuracy_curve", "test_accuracy"),
    ("gap_curve", "gap_mean"),
    ("accuracy_by_time", "test_accuracy"),
  ):
    for (title, workers, epoch), rows in groups.items():
      x = epoch
      if panel == "accuracy_by_time":
        x, _ = mean_and_std(rows, "time")
      points.append(_point(panel, title, workers, x, rows, key))
  return points


# Panel, what is along it, what is up it; TIME is the clock of the results.
_PANELS = (
  ("accuracy", "workers", "test accuracy (%)"),
  ("gap", "workers", "mean gap"),
  ("time", "workers", "TIME"),
  ("accuracy_curve", "epoch", "test accuracy (%)"),
  ("gap_curve", "epoch", "mean gap"),
  ("accuracy_by_time", "TIME", "test accuracy (%)"),
)
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
  axis.set_yticks([t for t in _ACCURACY_TICKS if low <= t <= high])
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
  """Draws one algorithm in one panel: a curve with a band, a horizontal line
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


def draw(
  points: Sequence[Row],
  stem: Path,
  heading: str,
  time: str = "time (mean batches)",
) -> list[Path]:
  """Draws the points of `numbers` as STEM.png and STEM.svg.

  Lines are means over seeds, bars and bands one standard deviation (by a factor
  on logarithmic axes). An algorithm that ran at one number of workers, which no
  sweep of the others has, is a horizontal line in the panels against workers.

  Args:
    points: from `numbers`.
    stem: of the files' names.
    heading: above all panels.
    time: what the clock counts, from `time_label`.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  titles = list(dict.fromkeys(point["algorithm"] for point in points))
  styles = {
    title: {
      "color": plt.get_cmap("tab10")(i % 10),
      "marker": "osv^D*XPhd"[i % 10],
      "ms": 5,
      "label": title.replace("$", r"\$"),  # no mathematics
    }
    for i, title in enumerate(titles)
  }
  at = {
    t: {p["workers"] for p in points if p["algorithm"] == t} for t in titles
  }
  swept = set().union(*(ns for ns in at.values() if len(ns) > 1))
  swept = swept or set().union(*at.values())
  figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
  for axis, (panel, xlabel, ylabel) in zip(axes.flat, _PANELS, strict=True):
    shown = [p for p in points if p["panel"] == panel]
    scale = 100 if "accuracy" in panel else 1
    against_workers = xlabel == "workers"
    for title in titles:
      rows = [p for p in shown if p["algorithm"] == title]
      _draw_rows(
        axis,
        rows,
        styles[title],
        scale=scale,
        curve=not against_workers,
        level=len(rows) == 1 and rows[0]["x"] not in swept,
      )
    if against_workers:
      ticks = sorted(swept)
      axis.set_xscale("log", base=2)
      axis.set_xticks(ticks, [str(t) for t in ticks])
      axis.minorticks_off()
    elif xlabel == "TIME":
      axis.set_xscale("log")
    positive = [p["mean"] for p in shown if 0 < p["mean"] < np.inf]
    if scale == 100:
      _spread_accuracy(axis)
    elif positive:
      axis.set_yscale("log")
      axis.set_ylim(0.3 * min(positive))
    when = "at the end" if against_workers else "at the most workers"
    axis.set_title(when, fontsize="medium")
    axis.set(
      xlabel=xlabel.replace("TIME", time), ylabel=ylabel.replace("TIME", time)
    )
    axis.grid(alpha=0.3)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(len(labels), 8)
  )
  figure.suptitle(heading.replace("$", r"\$"))
  paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
  for path in paths:
    figure.savefig(path, dpi=110)
  plt.close(figure)
  return paths
