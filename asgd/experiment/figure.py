"""The figure of an experiment: curves of its runs, and sweeps over workers."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]
Rows = Sequence[Row]


def mean_and_std(rows: Rows, key: str) -> tuple[float, float]:
  """Mean and sample deviation of a column; a missing value makes them NaN."""
  values = np.array([row.get(key) for row in rows], float)  # None is NaN
  with np.errstate(invalid="ignore", over="ignore"):
    std = values.std(ddof=1) if len(values) > 1 else np.nan
  return float(values.mean()), float(std)


def group_by(rows: Rows, *keys: str) -> dict[tuple, list[Row]]:
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
_LOSSES = {"train_loss": "training loss", "test_loss": "test loss"}
_POINT = ("panel", "algorithm", "workers", "x", "mean", "std", "seeds")


def _workers(results):
  """The numbers of workers of each run: title -> set."""
  counts: dict[str, set[int]] = {}
  for row in results:
    counts.setdefault(row["algorithm"], set()).add(row["workers"])
  return counts


def has_accuracy(results: Rows) -> bool:
  """Whether the task has an accuracy: what has none has losses alone."""
  accuracies, losses = (
    any(np.isfinite(mean_and_std([row], key)[0]) for row in results)
    for key in ("test_accuracy", "test_loss")
  )
  return accuracies or not losses


def panels(results: Rows) -> list[Panel]:
  """Returns what is drawn: a run with several numbers of workers against them,
  and its curves at the largest; otherwise curves of accuracy and loss. A task
  without accuracy has the losses of training and test instead."""
  of_classes = has_accuracy(results)
  best = _ACCURACY if of_classes else _LOSSES["test_loss"]
  name = "accuracy" if of_classes else "loss"
  y = f"test_{name}"
  keys = set(itertools.chain.from_iterable(results))
  timed = [clock for clock, (key, _) in _CLOCKS.items() if key in keys]
  if timed and any(len(counts) > 1 for counts in _workers(results).values()):
    key, label = _CLOCKS[timed[0]]
    return [
      Panel(name, "workers", y, "workers", best),
      Panel("gap", "workers", "gap_mean", "workers", "mean gap"),
      Panel("time", "workers", key, "workers", label),
      Panel(f"{name}_curve", "epoch", y, "epoch", best),
      Panel("gap_curve", "epoch", "gap_mean", "epoch", "mean gap"),
      Panel(f"{name}_by_time", timed[0], y, label, best),
    ]
  first = "test_accuracy", _ACCURACY
  if not of_classes:
    first = "train_loss", _LOSSES["train_loss"]
  curves = first, ("test_loss", _LOSSES["test_loss"])
  axes = [("epoch", "epoch"), ("update", "updates")]
  axes += [(clock, _CLOCKS[clock][1]) for clock in timed]
  return [
    Panel(f"{y}_by_{x}", x, y, xlabel, ylabel)
    for y, ylabel in curves
    for x, xlabel in axes
  ]


def numbers(results: Rows, curves: Rows) -> list[dict]:
  """Returns the points of the figure, means over seeds, of the rows of cells
  and of evaluations; curves are of a run's largest number of workers."""
  largest = {title: max(counts) for title, counts in _workers(results).items()}
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
      point = panel.name, title, workers, x, mean, std, len(rows)
      points.append(dict(zip(_POINT, point, strict=True)))
  return points


_STEPS = (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # of accuracies
_BEST = 100.3  # percent; where the logarithm of the error would end


def _spread(accuracy):
  return -np.log10(np.maximum(_BEST - accuracy, 1e-3))


def accuracy_ticks(low: float, high: float) -> list[float]:
  """Returns accuracies to be labelled, in percent, at most nine: the roundest
  ones that do not collide, and less round ones until there are three."""
  room, ticks = (_spread(high) - _spread(low)) / 8, []
  for step in _STEPS:
    enough = len(ticks) >= 3
    for tick in step * np.arange(np.ceil(low / step), high // step + 1):
      if enough and step < (1 if tick > 90 else 5):
        continue
      if all(abs(_spread(tick) - _spread(other)) > room for other in ticks):
        ticks.append(float(tick))
  return sorted(ticks)


def _spread_accuracy(axis) -> None:
  """Spaces accuracies by the logarithm of the error: 96 and 97 % differ."""
  low, high = axis.get_ylim()
  low, high = max(low, 0), min(high, 100)
  axis.set_yscale(
    "function", functions=(_spread, lambda y: _BEST - 10.0 ** (-y))
  )
  axis.set_ylim(low, high)
  axis.set_yticks(accuracy_ticks(low, high))
  axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def scale_by_logarithm(axis: Any, direction: str, values: Any) -> None:
  """Makes the "x" or "y" axis of drawn values logarithmic if one of them is
  above 0, with labels such as 20, 50 and 1,000."""
  from matplotlib import ticker

  if not (np.asarray(values, float) > 0).any():
    return
  axis.set(**{f"{direction}scale": "log"})
  low, high = getattr(axis, f"get_{direction}lim")()
  subs = (1, 2, 5) if high < 300 * low else (1,)
  side = getattr(axis, f"{direction}axis")
  side.set_major_locator(ticker.LogLocator(subs=subs))
  side.set_major_formatter(lambda value, _: f"{value:,.7g}")
  side.set_minor_formatter(ticker.NullFormatter())


def _draw_run(axis, rows, style, *, panel, level):
  """Draws a curve with a band, a horizontal line (`level`), or error bars."""
  rows = [row for row in rows if np.isfinite(row["mean"])]
  if not rows:
    return
  scale = 100 if panel.y == "test_accuracy" else 1
  x = np.array([row["x"] for row in rows], float)
  mean = scale * np.array([row["mean"] for row in rows], float)
  std = scale * np.nan_to_num([row["std"] for row in rows])
  low, high = mean - std, mean + std
  if scale == 1:  # on a logarithmic axis, mean - std may not be drawable
    with np.errstate(invalid="ignore", divide="ignore"):
      factor = np.where(mean > 0, 1 + std / mean, 1.0)
    low, high = mean / factor, mean * factor
  shade = {"color": style["color"], "alpha": 0.15, "lw": 0}
  if panel.x != "workers":
    axis.plot(x, mean, **style)
    axis.fill_between(x, low, high, **shade)
  elif level:
    axis.axhline(mean[0], ls="--", color=style["color"], label=style["label"])
    axis.axhspan(low[0], high[0], **shade)
  else:
    axis.errorbar(x, mean, (mean - low, high - mean), capsize=3, **style)


def new_figure(rows: int, columns: int, width: float, height: float) -> Any:
  """Returns an empty figure and its axes; ImportError without the extra viz."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False)


def plain_text(text: str) -> str:
  """Returns a text for matplotlib, in which no mathematics is to be read."""
  return text.replace("$", r"\$")


def save(figure: Any, heading: str, stem: Path) -> None:
  """Writes a figure as STEM.png and STEM.svg, with a heading above all."""
  figure.suptitle(plain_text(heading))
  for suffix in (".png", ".svg"):
    figure.savefig(stem.with_suffix(suffix), dpi=110)


def _loss_limits(axis, rows):
  """Keeps a run that diverged from hiding the others."""
  drawn = [row["mean"] for row in rows if np.isfinite(row["mean"])]
  if not drawn or min(drawn) <= 0:
    return
  runs = group_by(rows, "algorithm").values()
  firsts = [run[0]["mean"] for run in runs if np.isfinite(run[0]["mean"])]
  top = 1.1 * max(firsts, default=max(drawn))
  axis.set_ylim(0.95 * min(drawn), min(top, 1.05 * max(drawn)))
  scale_by_logarithm(axis, "y", drawn)


def _draw_panel(axis, panel, points, styles, swept):
  rows = [point for point in points if point["panel"] == panel.name]
  against_workers = panel.x == "workers"
  for title, style in styles.items():
    mine = [row for row in rows if row["algorithm"] == title]
    level = len(mine) == 1 and mine[0]["x"] not in swept
    _draw_run(axis, mine, style, panel=panel, level=level)
  if against_workers:
    ticks = sorted(swept)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
  elif panel.x in (*_CLOCKS, "update"):
    scale_by_logarithm(axis, "x", [row["x"] for row in rows])
  positive = [row["mean"] for row in rows if 0 < row["mean"] < np.inf]
  if panel.y in _LOSSES:
    _loss_limits(axis, rows)
  elif panel.y == "test_accuracy" and rows:
    _spread_accuracy(axis)
  elif positive:
    axis.set_yscale("log")
    axis.set_ylim(0.3 * min(positive))
  if swept:
    when = "at the end" if against_workers else "at the most workers"
    axis.set_title(when, fontsize="medium")
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  axis.grid(alpha=0.3)


def draw(points: Rows, results: Rows, stem: Path, heading: str) -> None:
  """Draws the points of `numbers` as STEM.png and STEM.svg: means over seeds,
  with one standard deviation (a factor on logarithmic axes). A run with one
  number of workers, which no other has, is a horizontal line against workers.
  ImportError without the extra viz."""
  import matplotlib

  drawn = panels(results)
  columns = len(drawn) // 2
  figure, axes = new_figure(2, columns, 5 * columns, 8)
  titles = dict.fromkeys(point["algorithm"] for point in points)
  colors = matplotlib.colormaps["tab10" if len(titles) <= 10 else "tab20"]
  styles = {
    title: {
      "color": colors(i % colors.N),
      "marker": "osv^D*XPhd"[i % 10],
      "ls": ("-", "--")[i // colors.N % 2],
      "ms": 5,
      "label": plain_text(title),
    }
    for i, title in enumerate(titles)
  }
  sweeps = (counts for counts in _workers(results).values() if len(counts) > 1)
  swept = set().union(*sweeps)
  for axis, panel in zip(axes.flat, drawn, strict=True):
    _draw_panel(axis, panel, points, styles, swept)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(len(labels), 8)
  )
  save(figure, heading, stem)
