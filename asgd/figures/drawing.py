"""The picture of a figure: a point for each seed, beside published values."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import figure as figure_lib
from asgd.figures import figure_file
from asgd.figures.columns import PROFILES, CellTable
from asgd.figures.figure_file import Counts, Figure, PanelSpec

_GREY = "#555555"
_PANEL = 3.4, 2.3  # width and height of a panel, inches


def points(
  figure: Figure, table: CellTable, counts: Counts
) -> list[dict[str, Any]]:
  """Returns the numbers in the picture: a row for each seed of each point, and
  one for each published point. Points of cells that did not run are left
  out."""
  rows = []
  for panel in figure.panels:
    # Subtract the values of the same seed.
    base = _values(panel, panel.minus, table, counts)
    for series, places in panel.series.items():
      for place, spot in places:
        label, workers = figure_file.cell_of(spot, counts) or ("", None)
        for seed, x, value in _seeds(panel, place, (label, workers), table):
          base_value = base.get(seed, math.nan) if panel.minus else 0.0
          row = {"panel": panel.title, "series": series, "x": x, "cell": spot}
          row |= {"seed": seed, "value": panel.scale * (value - base_value)}
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


def _seeds(panel, x, cell, table):
  """Yields (seed, x, value) for the points of a cell."""
  label, workers = cell
  if not label:
    return
  if panel.column in PROFILES:
    profiles = table.profiles(panel.column, label, workers)
    for seed, fractions in profiles.items():
      for value, fraction in fractions.items():
        yield seed, x + value, fraction
    return
  if panel.along:
    for along, values in table.curve(panel.column, panel.along, *cell):
      for seed, value in values.items():
        yield seed, panel.xscale * along, value
    return
  if panel.xcolumn:
    own = table.values(panel.xcolumn, label, workers).values()
    x = panel.xscale * float(np.mean([*own])) if own else x
  for seed, value in table.values(panel.column, label, workers).items():
    yield seed, x, value


def _values(panel, spot, table, counts):
  """Returns seed -> value of a cell; nothing if this size lacks it."""
  cell = figure_file.cell_of(spot, counts) if spot else None
  return table.values(panel.column, *cell) if cell else {}


def draw(
  figure: Figure, rows: Sequence[Mapping[str, Any]], stem: Path, heading: str
) -> None:
  """Draws `points` as STEM.png, .svg and .pdf.

  Each series has its seeds as points and a line through their medians, or bars
  if it is a histogram. Diverged seeds are crosses, at the upper edge if they
  are infinite. Published points are hollow. Raises ImportError without the
  extra viz."""
  count = len(figure.panels)
  columns = min(count, 2)
  lines = -(-count // columns)
  names = dict.fromkeys(s for panel in figure.panels for s in panel.series)
  styles = figure_lib.styles(list(names))
  size = max(_PANEL[0] * columns, 5.6), _PANEL[1] * lines + 0.9
  with figure_lib.style():
    picture, axes = figure_lib.new_figure(lines, columns, *size)
    for axis, panel in itertools.zip_longest(axes.flat, figure.panels):
      if panel is None:
        axis.set_axis_off()
        continue
      own = [row for row in rows if row["panel"] == panel.title]
      _draw_panel(axis, panel, own, styles)
    figure_lib.legend(picture, axes)
    figure_lib.save(picture, heading, stem)


def _draw_panel(axis, panel: PanelSpec, rows, styles):
  """Draws a panel: its series, its published points and its axes."""
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  axis.set_title(figure_lib.plain_text(panel.title))
  axis.grid(True)
  for name, style in styles.items():
    own = [row for row in rows if row["series"] == name and "seed" in row]
    if panel.along:
      style = {**style, "markersize": 2.5, "markevery": 0.15}
    if own:
      _draw_series(axis, panel, own, {**style, "label": name})
  for known in panel.published:
    xs, ys = zip(*known["points"], strict=True)
    like = styles.get(known.get("of"), {"color": _GREY, "marker": ""})
    style = {"color": like["color"], "mfc": "none", "lw": 0.8, "ms": 5}
    style |= {"ls": known.get("line", ""), "marker": like["marker"]}
    if "marker" in known:
      style["marker"] = known["marker"]
    axis.plot(xs, ys, label=figure_lib.plain_text(known["title"]), **style)
  if panel.xcolumn:
    xs = [row["x"] for row in rows]
    figure_lib.scale_by_logarithm(axis, "x", xs)
  elif panel.xlog:
    axis.set_xscale("log", base=2)
    ticks = sorted({row["x"] for row in rows})
    following = [*ticks[1:], math.inf]  # drop labels that would overlap
    ticks = [x for x, y in zip(ticks, following, strict=True) if y > 1.3 * x]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
  if panel.yscale == "log":
    drawn = [row["value"] for row in rows if _drawable(panel, row["value"])]
    figure_lib.scale_by_logarithm(axis, "y", drawn)
  elif panel.yscale == "symlog":
    axis.set_yscale("symlog", linthresh=1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axhline(0, color=_GREY, lw=0.6)
  if panel.ylim:
    axis.set_ylim(*panel.ylim)


def _drawable(panel, value):
  """Whether a value is finite, and positive on a logarithmic axis."""
  return math.isfinite(value) and (value > 0 or panel.yscale != "log")


def _draw_series(axis, panel, rows, style):
  """Draws the seeds of a series, and the line through their medians."""
  by_x: dict[float, list[float]] = {}
  for row in rows:
    by_x.setdefault(row["x"], []).append(row["value"])
  # A median is defined for infinite values, too.
  middles = {x: float(np.median(by_x[x])) for x in sorted(by_x)}
  kept = {x: y for x, y in middles.items() if _drawable(panel, y)}
  style = {**style, "label": figure_lib.plain_text(style["label"])}
  if kept and panel.column in PROFILES:  # bars that start and end at 0
    kept = {min(kept) - 1: 0.0, **kept, max(kept) + 1: 0.0}
    style |= {"ds": "steps-mid", "marker": ""}
  axis.plot(list(kept), list(kept.values()), **style)
  if panel.along:
    return
  color = style["color"]
  shapes = {False: {"marker": ".", "s": 6}, True: {"marker": "x", "s": 14}}
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
