"""The picture of a figure: every seed a point, beside what others published."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import figure as figure_lib
from asgd.experiment.claims import figure_file
from asgd.experiment.claims.columns import Table
from asgd.experiment.claims.figure_file import Counts, Figure, Panel

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which differ in grey and for the colour-blind.
_COLORS = (
  *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
  *("#000000", "#7F7F7F", "#8C564B", "#B8A800", "#4B0082", "#A50F15"),
)
_MARKERS = "osv^D*XPhd"
_GREY = "#555555"
# The same numbers give the same file.
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def points(
  figure: Figure, table: Table, counts: Counts
) -> list[dict[str, Any]]:
  """Returns the numbers in the picture: a row for each seed of each point, and
  one for each published point. Points that were not run are left out."""
  rows = []
  for panel in figure.panels:
    base = _values(panel, panel.minus, table, counts)
    for series, places in panel.series.items():
      for x, spot in places:
        label, workers = figure_file.cell_of(spot, counts) or ("", None)
        for seed, value in _values(panel, spot, table, counts).items():
          less = base.get(seed, math.nan) if panel.minus else 0.0
          row = {"panel": panel.title, "series": series, "x": x, "cell": spot}
          row |= {"seed": seed, "value": panel.scale * (value - less)}
          row["diverged"] = workers is not None and table.diverged(
            label, workers, seed
          )
          rows.append(row)
    for known in panel.published:
      for x, y in known["points"]:
        row = {"panel": panel.title, "series": known["title"], "x": x}
        row |= {"value": y, "source": known["source"]}
        rows.append(row)
  return rows


def _values(panel, spot, table, counts):
  cell = figure_file.cell_of(spot, counts) if spot else None
  return table.values(panel.column, *cell) if cell else {}


def draw(
  figure: Figure, rows: Sequence[Mapping[str, Any]], stem: Path, heading: str
) -> None:
  """Draws `points` as STEM.png, .svg and .pdf: of each series the seeds as
  points, diverged ones as crosses (at the upper edge if they are infinite), and
  a line through their medians; published points are hollow. ImportError without
  the extra viz."""
  import matplotlib

  count = len(figure.panels)
  columns = min(count, 2)
  lines = -(-count // columns)
  size = 5.2 * columns, 4.0 * lines + 0.9
  # The same names of parts each time; text as text, which is smaller.
  style = {"svg.hashsalt": figure.name, "svg.fonttype": "none"}
  with matplotlib.rc_context(style):
    picture, axes = figure_lib.new_figure(lines, columns, *size)
    names = dict.fromkeys(s for panel in figure.panels for s in panel.series)
    styles = {
      name: (_COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)])
      for i, name in enumerate(names)
    }
    for axis, panel in zip(axes.flat, figure.panels, strict=False):
      own = [row for row in rows if row["panel"] == panel.title]
      _draw_panel(axis, panel, own, styles)
    for axis in axes.flat[count:]:
      axis.set_axis_off()
    labels = {}
    for axis in axes.flat[:count]:
      for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        labels.setdefault(label, handle)
    where = {"loc": "outside lower center", "fontsize": "small"}
    picture.legend(labels.values(), labels, ncols=4, **where)
    picture.suptitle(figure_lib.plain_text(heading), fontsize="medium")
    for suffix in SUFFIXES:
      path = stem.with_suffix(suffix)
      picture.savefig(path, dpi=110, metadata=_NO_DATE.get(suffix))


def _draw_panel(axis, panel: Panel, rows, styles):
  drawn = [row["value"] for row in rows if _drawable(panel, row["value"])]
  for name, (color, marker) in styles.items():
    own = [row for row in rows if row["series"] == name and "seed" in row]
    if own:
      _draw_series(axis, panel, own, name, color, marker)
  for known in panel.published:
    xs, ys = zip(*known["points"], strict=True)
    color = styles.get(known.get("of"), (_GREY, "o"))[0]
    style = {"mfc": "none", "mec": color, "color": color, "lw": 0.9}
    style |= {"ls": known.get("line", ""), "marker": known.get("marker", "s")}
    axis.plot(xs, ys, label=figure_lib.plain_text(known["title"]), **style)
  if panel.xlog:
    axis.set_xscale("log", base=2)
    ticks = sorted({row["x"] for row in rows})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
  if panel.yscale == "log":
    figure_lib.scale_by_logarithm(axis, "y", drawn)
  elif panel.yscale == "symlog":
    axis.set_yscale("symlog", linthresh=1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axhline(0, color=_GREY, lw=0.8)
  if panel.ylim:
    axis.set_ylim(*panel.ylim)
  axis.set_title(figure_lib.plain_text(panel.title), fontsize="medium")
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  axis.grid(alpha=0.3)


def _drawable(panel, value):
  return math.isfinite(value) and (value > 0 or panel.yscale != "log")


def _draw_series(axis, panel, rows, name, color, marker):
  by_x: dict[float, list[float]] = {}
  for row in rows:
    by_x.setdefault(row["x"], []).append(row["value"])
  xs = sorted(by_x)
  middles = [float(np.median(by_x[x])) for x in xs]
  kept = [
    (x, y) for x, y in zip(xs, middles, strict=True) if _drawable(panel, y)
  ]
  label = figure_lib.plain_text(name)
  line = {"color": color, "lw": 1.3, "label": label}
  if kept:
    axis.plot(*zip(*kept, strict=True), marker=marker, ms=5, **line)
  shapes = {False: {"marker": ".", "s": 14}, True: {"marker": "x", "s": 26}}
  for diverged, shape in shapes.items():
    own = [row for row in rows if row["diverged"] == diverged]
    inside = [row for row in own if _drawable(panel, row["value"])]
    where = [(row["x"], row["value"]) for row in inside]
    if where:
      axis.scatter(*zip(*where, strict=True), color=color, alpha=0.6, **shape)
    above = [row["x"] for row in own if row["value"] == math.inf]
    if above:  # at the upper edge
      top = {"transform": axis.get_xaxis_transform(), "clip_on": False}
      axis.scatter(above, [1.0] * len(above), color=color, **shape, **top)
