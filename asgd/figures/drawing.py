"""The picture of a figure: a point for each seed, beside published values."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import figure as figure_lib
from asgd.figures import figure_file
from asgd.figures.columns import PROFILES, CellTable
from asgd.figures.figure_file import Counts, Figure, PanelSpec

_GREY = "#555555"
_PANEL_INCHES = 3.4, 2.3  # width and height of a panel


def points(
  figure: Figure, table: CellTable, counts: Counts
) -> list[dict[str, Any]]:
  """Returns the numbers in the picture: a row for each seed of each point, and
  one for each published point. Points of cells that did not run are left
  out."""
  rows = []
  for panel in figure.panels:
    # The value of the cell `minus` with the same seed is subtracted.
    minus_values = _values(panel, panel.minus, table, counts)
    for series, cells_at in panel.series.items():
      for given_x, cell_name in cells_at:
        label, workers = figure_file.cell_of(cell_name, counts) or ("", None)
        for seed, x, value in _seeds(panel, given_x, (label, workers), table):
          minus_value = minus_values.get(seed, math.nan) if panel.minus else 0.0
          row = {"panel": panel.title, "series": series, "x": x}
          row |= {"cell": cell_name, "seed": seed}
          row["value"] = panel.scale * (value - minus_value)
          # A run over all numbers of workers is no single cell that diverges.
          row["diverged"] = workers is not None and table.diverged(
            label, workers, seed
          )
          rows.append(row)
    # A published point has a source, and no seed; so `draw` recognises it.
    for line in panel.published:
      for x, y in line["points"]:
        row = {"panel": panel.title, "series": line["title"], "x": x}
        row |= {"value": y, "source": line["source"]}
        rows.append(row)
  return rows


def _seeds(
  panel: PanelSpec, x: float, cell: tuple[str, int | None], table: CellTable
) -> Iterator[tuple[int, float, float]]:
  """Yields (seed, x, value) for the points of a cell."""
  label, workers = cell
  if not label:  # the experiment has no such cell at this size
    return
  # [1] A histogram: one point for each value of the profile.
  if panel.column in PROFILES and workers is not None:
    profiles = table.profiles(panel.column, label, workers)
    for seed, fractions in profiles.items():
      for value, fraction in fractions.items():
        yield seed, x + value, fraction
    return
  # [2] A curve: one point for each evaluation.
  if panel.along:
    for along, values in table.curve(panel.column, panel.along, *cell):
      for seed, value in values.items():
        yield seed, panel.xscale * along, value
    return
  # [3] One point for each seed, at the given x or at a measured one.
  if panel.xcolumn:
    xs = table.values(panel.xcolumn, label, workers).values()
    if xs:
      x = panel.xscale * float(np.mean([*xs]))
  for seed, value in table.values(panel.column, label, workers).items():
    yield seed, x, value


def _values(
  panel: PanelSpec, cell_name: str | None, table: CellTable, counts: Counts
) -> dict[int, float]:
  """Returns seed -> value of a cell; {} if there is no such cell."""
  cell = figure_file.cell_of(cell_name, counts) if cell_name else None
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
  grid_rows = -(-count // columns)  # rounded up
  # A series has the same colour and marker in every panel.
  names = dict.fromkeys(s for panel in figure.panels for s in panel.series)
  styles = figure_lib.styles(list(names))
  # Inches; a single panel is widened so that the legend fits below it.
  panel_width, panel_height = _PANEL_INCHES
  size = max(panel_width * columns, 5.6), panel_height * grid_rows + 0.9
  with figure_lib.style():
    picture, axes = figure_lib.new_figure(grid_rows, columns, *size)
    # With an odd number of panels, a grid of two columns has an empty corner.
    for axis, panel in itertools.zip_longest(axes.flat, figure.panels):
      if panel is None:
        axis.set_axis_off()
        continue
      panel_rows = [row for row in rows if row["panel"] == panel.title]
      _draw_panel(axis, panel, panel_rows, styles)
    figure_lib.legend(picture, axes)
    figure_lib.save(picture, heading, stem)


def _draw_panel(
  axis: Any,
  panel: PanelSpec,
  rows: Sequence[Mapping[str, Any]],
  styles: Mapping[str, Mapping[str, Any]],
) -> None:
  """Draws a panel: its series, its published points and its axes."""
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  axis.set_title(figure_lib.plain_text(panel.title))
  axis.grid(True)
  for name, style in styles.items():
    series_rows = [
      row for row in rows if row["series"] == name and "seed" in row
    ]
    if panel.along:
      # A curve has too many evaluations for a marker at each.
      style = {**style, "markersize": 2.5, "markevery": 0.15}
    if series_rows:
      _draw_series(axis, panel, series_rows, {**style, "label": name})
  # Published values are hollow, in the colour of the series they are `of`.
  for line in panel.published:
    xs, ys = zip(*line["points"], strict=True)
    grey_style = {"color": _GREY, "marker": ""}  # of no series
    series_style = styles.get(line.get("of", ""), grey_style)
    # mfc, lw, ms, ls: face colour, line width, marker size, line style.
    style = {"color": series_style["color"], "mfc": "none", "lw": 0.8, "ms": 5}
    style |= {"ls": line.get("line", ""), "marker": series_style["marker"]}
    if "marker" in line:
      style["marker"] = line["marker"]
    axis.plot(xs, ys, label=figure_lib.plain_text(line["title"]), **style)
  # Measured xs, such as bytes, span decades.
  if panel.xcolumn:
    figure_lib.scale_by_logarithm(axis, "x", [row["x"] for row in rows])
  # Numbers of workers double: label each of them, not decades.
  elif panel.xlog:
    axis.set_xscale("log", base=2)
    ticks = sorted({row["x"] for row in rows})
    # Drop labels that would overlap. A panel without points has no ticks.
    pairs = itertools.pairwise([*ticks, math.inf])
    ticks = [x for x, next_x in pairs if next_x > 1.3 * x]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
  if panel.yscale == "log":
    drawable = [row["value"] for row in rows if _drawable(panel, row["value"])]
    figure_lib.scale_by_logarithm(axis, "y", drawable)
  elif panel.yscale == "symlog":
    axis.set_yscale("symlog", linthresh=1)
    # 100, not 10^2
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axhline(0, color=_GREY, lw=0.6)
  if panel.ylim:
    axis.set_ylim(*panel.ylim)


def _drawable(panel: PanelSpec, value: float) -> bool:
  """Whether a value is finite, and positive on a logarithmic axis."""
  return math.isfinite(value) and (value > 0 or panel.yscale != "log")


def _draw_series(
  axis: Any,
  panel: PanelSpec,
  rows: Sequence[Mapping[str, Any]],
  style: Mapping[str, Any],
) -> None:
  """Draws the seeds of a series, and the line through their medians."""
  by_x: dict[float, list[float]] = {}
  for row in rows:
    by_x.setdefault(row["x"], []).append(row["value"])
  # A median is defined for infinite values, too.
  medians = {x: float(np.median(by_x[x])) for x in sorted(by_x)}
  drawn_medians = {x: y for x, y in medians.items() if _drawable(panel, y)}
  style = {**style, "label": figure_lib.plain_text(style["label"])}
  if drawn_medians and panel.column in PROFILES:  # bars that start and end at 0
    drawn_medians = {
      min(drawn_medians) - 1: 0.0,
      **drawn_medians,
      max(drawn_medians) + 1: 0.0,
    }
    style |= {"ds": "steps-mid", "marker": ""}
  axis.plot(list(drawn_medians), list(drawn_medians.values()), **style)
  # A curve shows medians only; the seeds of each evaluation would hide it.
  if panel.along:
    return
  color = style["color"]
  shapes = {False: {"marker": ".", "s": 6}, True: {"marker": "x", "s": 14}}
  for diverged, shape in shapes.items():
    seed_rows = [row for row in rows if row["diverged"] == diverged]
    drawable_rows = [row for row in seed_rows if _drawable(panel, row["value"])]
    positions = [(row["x"], row["value"]) for row in drawable_rows]
    if positions:
      axis.scatter(
        *zip(*positions, strict=True), color=color, alpha=0.6, **shape
      )
    infinite_xs = [row["x"] for row in seed_rows if row["value"] == math.inf]
    # y = 1 in the axes' coordinates, whatever the scale of the data is.
    if infinite_xs:  # at the upper edge
      top = {"transform": axis.get_xaxis_transform(), "clip_on": False}
      ys = [1.0] * len(infinite_xs)
      axis.scatter(infinite_xs, ys, color=color, **shape, **top)
