"""The figure of an experiment: what staleness costs, and what cures it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
  """Mean and sample standard deviation, NaN for the latter if only one."""
  values = np.asarray(values, float)
  std = values.std(ddof=1) if len(values) > 1 else np.nan
  return float(values.mean()), float(std)


def _by(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
  groups: dict[tuple, list[Row]] = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


def _point(panel, title, workers, x, rows, key):
  mean, std = mean_and_std([np.nan if r[key] is None else r[key] for r in rows])
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
    Rows of panel, algorithm, workers, x, mean, std, seeds. Panels: "accuracy"
    and "gap" against workers; "accuracy_curve" and "gap_curve" against epochs,
    at the largest number of workers of each algorithm.
  """
  points = []
  for panel, key in (("accuracy", "test_accuracy"), ("gap", "gap_mean")):
    for (title, workers), rows in _by(results, "algorithm", "workers").items():
      points.append(_point(panel, title, workers, workers, rows, key))
  largest: dict[str, int] = {}
  for row in results:
    title = row["algorithm"]
    largest[title] = max(largest.get(title, 0), row["workers"])
  for panel, key in (
    ("accuracy_curve", "test_accuracy"),
    ("gap_curve", "gap_mean"),
  ):
    at_largest = [r for r in curves if r["workers"] == largest[r["algorithm"]]]
    groups = _by(at_largest, "algorithm", "workers", "epoch")
    for (title, workers, epoch), rows in groups.items():
      points.append(_point(panel, title, workers, epoch, rows, key))
  return points


_PANELS = (
  ("accuracy", "workers", "final test accuracy (%)"),
  ("gap", "workers", "mean gap"),
  ("accuracy_curve", "epoch", "test accuracy (%)"),
  ("gap_curve", "epoch", "mean gap"),
)


def draw(points: Sequence[Row], stem: Path, heading: str) -> list[Path]:
  """Draws the points of `numbers` as STEM.png and STEM.svg.

  Lines are means over seeds, bars and bands one standard deviation. An
  algorithm that ran at one number of workers, which no sweep of the others
  has, is a horizontal line in the panels against workers.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  titles = list(dict.fromkeys(point["algorithm"] for point in points))
  colors = {t: plt.get_cmap("tab10")(i % 10) for i, t in enumerate(titles)}
  markers = {t: "osv^D*XPhd"[i % 10] for i, t in enumerate(titles)}
  figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
  at = {
    t: {p["workers"] for p in points if p["algorithm"] == t} for t in titles
  }
  swept = set().union(*(ns for ns in at.values() if len(ns) > 1))
  swept = swept or set().union(*at.values())
  for axis, (panel, xlabel, ylabel) in zip(axes.flat, _PANELS, strict=True):
    scale = 100 if "accuracy" in panel else 1
    for title in titles:
      rows = [
        p for p in points if p["panel"] == panel and p["algorithm"] == title
      ]
      x = np.array([row["x"] for row in rows], float)
      mean = scale * np.array([row["mean"] for row in rows], float)
      std = scale * np.nan_to_num([row["std"] for row in rows])
      style = {"color": colors[title], "label": title, "ms": 5}
      if xlabel == "epoch":
        axis.plot(x, mean, marker=markers[title], **style)
        axis.fill_between(
          x, mean - std, mean + std, color=colors[title], alpha=0.15, lw=0
        )
      elif len(x) == 1 and x[0] not in swept:
        axis.axhline(mean[0], ls="--", color=colors[title], label=title)
        axis.axhspan(
          mean[0] - std[0], mean[0] + std[0], color=colors[title], alpha=0.15
        )
      else:
        axis.errorbar(x, mean, std, marker=markers[title], capsize=3, **style)
    if xlabel == "workers":
      ticks = sorted(swept)
      axis.set_xscale("log", base=2)
      axis.set_xticks(ticks, [str(t) for t in ticks])
      axis.minorticks_off()
    positive = [p["mean"] for p in points if p["panel"] == panel]
    if "gap" in panel and any(value > 0 for value in positive):
      axis.set_yscale("log", nonpositive="clip")
      axis.set_ylim(0.3 * min(v for v in positive if v > 0))
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.3)
  largest = max(p["workers"] for p in points)
  axes[0, 0].set_title("after training, by number of workers")
  axes[1, 0].set_title(f"during training, at {largest} workers")
  axes[0, 1].legend(fontsize="small")
  figure.suptitle(heading)
  paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
  for path in paths:
    figure.savefig(path, dpi=130)
  plt.close(figure)
  return paths
