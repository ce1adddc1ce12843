"""Draws an experiment's figure: curves of its runs, and sweeps over workers.

The figure has the width of a journal's page, and text of eight points. Lines
differ in lightness, markers and dashes, also in a print in grey.
"""

import contextlib
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import safe_files

Row = Mapping[str, Any]
Rows = Sequence[Row]


def mean_and_std(rows: Rows, key: str) -> tuple[float, float]:
  """Returns a column's mean and sample deviation; NaN if a value is missing."""
  values = np.array([row.get(key) for row in rows], float)  # None is NaN
  with np.errstate(invalid="ignore", over="ignore"):
    std = values.std(ddof=1) if len(values) > 1 else np.nan
  return float(values.mean()), float(std)


def group_by(rows: Rows, *keys: str) -> dict[tuple[Any, ...], list[Row]]:
  """Groups rows by the values of some columns, in order of first appearance."""
  groups: dict[tuple[Any, ...], list[Row]] = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


class Panel(NamedTuple):
  """One pair of axes."""

  name: str  # of its points
  x: str  # a column of evaluations, or "workers" of results
  y: str  # column
  xlabel: str
  ylabel: str


_CLOCKS = {
  "time": ("simulated_time", "time (mean batches)"),
  "seconds": ("seconds", "seconds of training"),
}
_TRAFFIC_LABEL = "traffic (MB)"  # up and down, for runs with codecs
_ERROR_LABEL = "test error (%)"  # 100 minus the accuracy in percent
_LOSS_LABELS = {"train_loss": "training loss", "test_loss": "test loss"}
_SINCE = ", mean since\nthe last evaluation"
# Keys of a point, which are columns of figure.csv. The last two are lists with
# an entry for each seed.
_POINT_KEYS = (
  *("panel", "algorithm", "workers", "x", "mean", "std", "seeds"),
  *("values", "diverged"),
)


def _worker_counts(results: Rows) -> dict[str, set[int]]:
  """Returns title of a run -> its numbers of workers."""
  counts: dict[str, set[int]] = {}
  for row in results:
    counts.setdefault(row["algorithm"], set()).add(row["workers"])
  return counts


def _swept_counts(results: Rows) -> set[int]:
  """Returns all numbers of workers of the runs that have several."""
  sweeps = (c for c in _worker_counts(results).values() if len(c) > 1)
  return set[int]().union(*sweeps)


def has_values(results: Rows, key: str) -> bool:
  """Whether any result has a finite value of a column, such as an accuracy."""
  return any(np.isfinite(mean_and_std([row], key)[0]) for row in results)


def panels(results: Rows) -> list[Panel]:
  """Returns the panels that may be drawn.

  If a run has several numbers of workers, the panels show results against
  workers, and curves at the largest number. Otherwise they show curves of
  accuracy and test loss; without accuracy, of training and test loss.
  """
  # [1] The quality that all panels show, by what the results have.
  has_accuracy = has_values(results, "test_accuracy")
  name, y, ylabel = "accuracy", "test_accuracy", _ERROR_LABEL
  if not has_accuracy:
    y = "test_loss" if has_values(results, "test_loss") else "train_loss"
    name, ylabel = "loss", _LOSS_LABELS[y]
  keys = set(itertools.chain.from_iterable(results))
  clocks = [clock for clock, (key, _) in _CLOCKS.items() if key in keys]
  has_codec = bool({"codec", "codec_down"} & keys)
  # [2] With a sweep: results by workers, then curves.
  if clocks and _swept_counts(results):
    key, label = _CLOCKS[clocks[0]]
    traffic_panels = [
      Panel(f"{name}_by_megabytes", "megabytes", y, _TRAFFIC_LABEL, ylabel),
      Panel("megabytes", "workers", "bytes_up", "workers", "traffic up (MB)"),
    ]
    return [
      Panel(name, "workers", y, "workers", ylabel),
      Panel("gap", "workers", "gap_mean", "workers", "mean gap"),
      Panel("time", "workers", key, "workers", label),
      Panel(f"{name}_curve", "epoch", y, "epoch", ylabel),
      Panel("gap_curve", "epoch", "gap_mean", "epoch", f"gap{_SINCE}"),
      Panel(f"{name}_by_time", clocks[0], y, label, ylabel),
      *(traffic_panels if has_codec else ()),
    ]
  # [3] Without a sweep: each quality against each measure of progress.
  quality = "test_accuracy", _ERROR_LABEL
  if not has_accuracy:
    quality = "train_loss", _LOSS_LABELS["train_loss"] + _SINCE
  curves = quality, ("test_loss", _LOSS_LABELS["test_loss"])
  axes = [("epoch", "epoch"), ("update", "updates")]
  axes += [(clock, _CLOCKS[clock][1]) for clock in clocks]
  axes += [("megabytes", _TRAFFIC_LABEL)] if has_codec else []
  return [
    Panel(f"{y}_by_{x}", x, y, xlabel, ylabel)
    for y, ylabel in curves
    for x, xlabel in axes
  ]


def figure_points(results: Rows, curves: Rows) -> list[dict[str, Any]]:
  """Returns the points of the figure.

  Curves are drawn for a run's largest number of workers. Beside sweeps, a run
  with one number of workers, which no sweep has, is a horizontal line.

  Args:
    results: rows of cells.
    curves: rows of evaluations.

  Returns:
    Rows with the keys `_POINT_KEYS`: means over seeds, and each seed's values.
  """
  largest = {title: max(c) for title, c in _worker_counts(results).items()}
  swept = _swept_counts(results)
  # The n-th evaluations of all seeds are a point, if some messages apart, too.
  curve_rows = [
    {**row, "number": number}
    for rows in group_by(curves, "cell").values()
    for number, row in enumerate(rows)
    if row["workers"] == largest[row["algorithm"]]
    and (not swept or row["workers"] in swept)
  ]
  by_result = group_by(results, "algorithm", "workers")
  by_evaluation = group_by(curve_rows, "algorithm", "workers", "number")
  diverged = {row.get("cell") for row in results if row.get("diverged")}
  points = []
  for panel in panels(results):
    groups = by_result if panel.x == "workers" else by_evaluation
    for (title, workers, *_), rows in groups.items():
      if not any(panel.y in row and panel.x in row for row in rows):
        continue  # the engine does not measure this time or staleness
      x, _ = mean_and_std(rows, panel.x)
      mean, std = mean_and_std(rows, panel.y)
      values = [mean_and_std([row], panel.y)[0] for row in rows]
      # Evaluations are marked for NaN only; results for a rising loss, too.
      flags = [
        bool(row.get("diverged")) or row.get("cell") in diverged for row in rows
      ]
      point = panel.name, title, workers, x, mean, std, len(rows), values, flags
      points.append(dict(zip(_POINT_KEYS, point, strict=True)))
  return points


def _has_information(panel: Panel, rows: Rows, points: Rows) -> bool:
  """Whether a panel shows something that others do not.

  Its values must differ; the runs' sweeps must not be all equal; and its x must
  not be proportional to the epochs with one factor for all runs.
  """
  finite = [p for p in rows if np.isfinite([p["x"], p["mean"]]).all()]
  if len({p["x"] for p in finite}) < 2 or len({p["mean"] for p in finite}) < 2:
    return False
  if panel.x == "workers":
    rows_by_run = group_by(finite, "algorithm").values()
    sweeps = [{p["x"]: round(p["mean"], 9) for p in run} for run in rows_by_run]
    sweeps = [sweep for sweep in sweeps if len(sweep) > 1]
    return len(sweeps) == 1 or any(sweep != sweeps[0] for sweep in sweeps)
  if panel.x == "epoch":
    return True
  # The panel of the same quality against epochs has one of these names.
  by_epoch = f"{panel.y}_by_epoch", f"{panel.name.partition('_')[0]}_curve"
  # By run: values of the last point, as points are in the order of messages.
  last_epochs: dict[str, float] = {}
  last_x: dict[str, float] = {}
  for point in points:
    if point["panel"] in by_epoch:
      last_epochs[point["algorithm"]] = point["x"]
    elif point["panel"] == panel.name:
      last_x[point["algorithm"]] = point["x"]
  ratios = [x / last_epochs[r] for r, x in last_x.items() if last_epochs.get(r)]
  return not ratios or max(ratios) > 1.02 * min(ratios)


def drawn_panels(results: Rows, points: Rows) -> list[Panel]:
  """Returns the panels with information; the first panel if none has any."""
  all_panels = panels(results)
  by_panel = group_by(points, "panel")
  return [
    panel
    for panel in all_panels
    if _has_information(panel, by_panel.get((panel.name,), []), points)
  ] or all_panels[:1]


_PANEL_INCHES = 2.4, 1.95  # width and height of a panel, in inches
# Sorted by lightness, from 0 to 64 percent. From Paul Tol's palettes for all
# kinds of colour vision (https://sronpersonalpages.nl/~pault/).
COLORS = "#000000", "#332288", "#882255", "#117733", "#CC6677", "#44AA99"
MARKERS, DASHES = "osv^D*PhdX", ("-", "--", "-.", (0, (1, 1)))
_STYLE: dict[Any, Any] = {  # matplotlib's names of its settings
  "font.size": 8,
  "axes.titlesize": 8,
  "axes.linewidth": 0.6,
  "legend.fontsize": 7.5,
  "legend.title_fontsize": 7,
  "lines.linewidth": 1.1,
  "lines.markersize": 3.5,
  "grid.linewidth": 0.5,
  "grid.alpha": 0.3,
  "pdf.fonttype": 42,  # keeps text as text
  "svg.hashsalt": "figure",  # makes files of equal figures equal
}


@contextlib.contextmanager
def style() -> Iterator[None]:
  """Sets the common style of figures, with text of eight points, in a block."""
  import matplotlib

  with matplotlib.rc_context(_STYLE):
    yield


def styles(titles: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Returns title -> colour, marker and dashes, which also differ in grey."""
  # Few lines get colours far apart; many repeat them, with other dashes.
  count = min(len(titles), len(COLORS))
  indices = np.linspace(0, len(COLORS) - 1, count).round().astype(int)
  return {
    title: {
      "color": COLORS[indices[i % count]],
      "marker": MARKERS[i % len(MARKERS)],
      "ls": DASHES[(i + i // count) % len(DASHES)],
    }
    for i, title in enumerate(titles)
  }


def new_figure(rows: int, columns: int, width: float, height: float) -> Any:
  """Returns an empty figure and its axes; ImportError without the extra viz."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False)


def legend(figure: Any, axes: Any, title: str = "") -> None:
  """Adds one legend of the lines of all panels, below them."""
  handles: dict[str, Any] = {}
  for axis in axes.flat:
    labelled_handles = zip(*axis.get_legend_handles_labels(), strict=True)
    for handle, label in labelled_handles:
      handles.setdefault(label, handle)
  if not handles:
    return
  entry_width = 0.4 + 0.06 * max(map(len, handles))  # inches: a line, then text
  figure.legend(
    handles.values(),
    handles,
    loc="outside lower center",
    ncols=min(max(int(figure.get_figwidth() / entry_width), 1), len(handles)),
    title=title,
    handlelength=2.6,
    frameon=False,
  )


def plain_text(text: str) -> str:
  """Returns a text in which matplotlib finds no mathematics."""
  return text.replace("$", r"\$")


def save(figure: Any, heading: str, stem: Path) -> None:
  """Writes a figure as STEM.png, .svg and .pdf, with a heading at its top."""
  figure.suptitle(plain_text(heading), fontsize="medium")
  # The layout is computed once instead of for each file, which saves half of
  # the time.
  figure.draw_without_rendering()
  figure.set_layout_engine(None)
  # Without dates, equal figures give equal files.
  dates = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
  for suffix, metadata in dates.items():
    path = stem.with_suffix(suffix)
    safe_files.save_figure(figure, path, dpi=200, metadata=metadata)


def scale_by_logarithm(axis: Any, direction: str, values: Any) -> bool:
  """Makes an axis logarithmic if its values span a factor of five or more.

  Tick labels become numbers such as 1,000, and the axis label gets the ending
  ", log scale".

  Args:
    axis: an `Axes` of matplotlib.
    direction: "x" or "y".
    values: the values that are drawn along this direction.

  Returns:
    Whether the axis is logarithmic.
  """
  from matplotlib import ticker

  values = np.asarray(values, float)
  values = values[np.isfinite(values) & (values > 0)]
  if not values.size or values.max() < 5 * values.min():
    return False
  axis.set(**{f"{direction}scale": "log"})
  low, high = getattr(axis, f"get_{direction}lim")()
  # Ticks at 1, 2 and 5 times a power of ten; on long axes at powers only.
  subs = (1, 2, 5) if high < 300 * low else (1,)
  axis_side = getattr(axis, f"{direction}axis")
  axis_side.set_major_locator(ticker.LogLocator(subs=subs))
  if low >= 1e-4:
    axis_side.set_major_formatter(lambda value, _: f"{value:,.7g}")
  axis_side.set_minor_formatter(ticker.NullFormatter())
  name = axis_side.get_label_text()
  if name:
    axis_side.set_label_text(f"{name}, log scale")
  return True


def _displayed(panel: Panel, values: Any) -> np.ndarray:
  """Returns the values to draw: accuracy as error in percent, bytes as MB."""
  values = np.asarray(values, float)
  by_column = {"test_accuracy": 100 * (1 - values), "bytes_up": values / 1e6}
  return by_column.get(panel.y, values)


def _draw_run(
  axis: Any,
  rows: Rows,
  style: Mapping[str, Any],
  *,
  panel: Panel,
  flat: bool,
  shift: float,
) -> None:
  """Draws one run: a curve with a band, or means with the seeds' points.

  Args:
    axis: an `Axes` of matplotlib.
    rows: the run's points.
    style: the style of its lines.
    panel: the panel of the axis.
    flat: whether the run is a horizontal line.
    shift: factor on x of the seeds' points, which keeps runs apart.
  """
  rows = [row for row in rows if np.isfinite(row["mean"])]
  if not rows:
    return
  # Arrays of P points; `values` has an array of seeds for each point.
  x = np.array([row["x"] for row in rows], float)
  mean = _displayed(panel, [row["mean"] for row in rows])
  values = [_displayed(panel, row["values"]) for row in rows]
  lows, highs = np.array([[seeds.min(), seeds.max()] for seeds in values]).T
  color = style["color"]
  shade = {"color": color, "alpha": 0.15, "lw": 0}
  if flat:
    axis.axhline(mean[0], **{**style, "marker": ""})  # else cut at both ends
    axis.axhspan(lows[0], highs[0], **shade)
    return
  if panel.x != "workers":
    stride = max(len(x) // 5, 1)
    axis.plot(x, mean, markevery=stride, **style)
    axis.fill_between(x, lows, highs, **shade)
    rows, values = rows[-1:], values[-1:]  # crosses at the end of a curve only
  else:
    axis.plot(x, mean, **style)
  crosses = {"color": color, "marker": "x", "ls": "", "ms": 5, "mew": 1.2}
  for row, seeds in zip(rows, values, strict=True):
    diverged = np.array(row["diverged"])
    xs = np.full(len(seeds), row["x"] * shift)
    if panel.x == "workers" and len(seeds) > 1:
      dots = {"color": color, "marker": ".", "ls": "", "ms": 3, "alpha": 0.7}
      axis.plot(xs[~diverged], seeds[~diverged], **dots)
    axis.plot(xs[diverged], seeds[diverged], **crosses)


def _limit_loss_axis(axis: Any, rows: Rows) -> None:
  """Limits the axis to the first losses, so that a run that diverged does not
  flatten the others."""
  losses = [row["mean"] for row in rows if np.isfinite(row["mean"])]
  if not losses or min(losses) <= 0:
    return
  runs = group_by(rows, "algorithm").values()
  firsts = [run[0]["mean"] for run in runs if np.isfinite(run[0]["mean"])]
  top = 1.1 * max(firsts, default=max(losses))
  axis.set_ylim(0.95 * min(losses), min(top, 1.05 * max(losses)))


def _draw_panel(
  axis: Any,
  panel: Panel,
  points: Rows,
  styles: Mapping[str, Mapping[str, Any]],
  swept: set[int],
) -> None:
  """Draws the runs of a panel, and its axes."""
  rows = [row for row in points if row["panel"] == panel.name]
  against_workers = panel.x == "workers"
  middle_index = (len(styles) - 1) / 2
  for i, (title, style) in enumerate(styles.items()):
    run = [row for row in rows if row["algorithm"] == title]
    flat = len(run) == 1 and run[0]["x"] not in swept and against_workers
    # 2 % to the right of the previous run, on a logarithmic axis.
    shift = 2 ** (0.03 * (i - middle_index)) if against_workers else 1
    _draw_run(axis, run, style, panel=panel, flat=flat, shift=shift)
  axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
  if against_workers:
    ticks = sorted(swept)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("workers, log scale")
  elif panel.x in (*_CLOCKS, "update", "megabytes"):
    scale_by_logarithm(axis, "x", [row["x"] for row in rows])
  if panel.y in _LOSS_LABELS:
    _limit_loss_axis(axis, rows)
  means = _displayed(panel, [row["mean"] for row in rows])
  scale_by_logarithm(axis, "y", means)
  if swept:
    axis.set_title(_panel_title(panel, rows))
  axis.grid()


def _panel_title(panel: Panel, rows: Rows) -> str:
  """Returns the title of a panel: the number of workers that it shows."""
  if panel.x == "workers":
    return "at the end"
  counts = {row["workers"] for row in rows}
  if len(counts) == 1:
    return f"at {counts.pop()} workers"
  return "at the most workers of each run"


def _legend_notes(points: Rows, shown_panels: Sequence[Panel]) -> str:
  """Returns the meaning of the drawn lines, bands, dots and crosses."""
  seeds = max((point["seeds"] for point in points), default=1)
  texts, diverged = [], any(any(point["diverged"]) for point in points)
  if seeds > 1:
    note = ", diverged ones too" if diverged else ""
    texts.append(f"lines: mean of {seeds} seeds{note}")
    if any(panel.x == "workers" for panel in shown_panels):
      texts.append("dots: seeds")
    if any(panel.x != "workers" for panel in shown_panels):
      texts.append("bands: lowest to highest seed")
  if diverged:
    texts.append("crosses: seeds that diverged")
  return "; ".join(texts)


def draw(points: Rows, results: Rows, stem: Path, heading: str) -> None:
  """Draws the points of `figure_points` as STEM.png, .svg and .pdf.

  The figure has the panels of `drawn_panels`. Sweeps over workers have dots for
  seeds; curves have a band from the lowest to the highest seed. Raises
  ImportError without the extra viz.
  """
  shown_panels, swept = drawn_panels(results, points), _swept_counts(results)
  columns = 2 if len(shown_panels) in (2, 4) else min(len(shown_panels), 3)
  n_rows = -(-len(shown_panels) // columns)
  titles = list(dict.fromkeys(point["algorithm"] for point in points))
  with style():
    panel_width, panel_height = _PANEL_INCHES
    width, height = max(panel_width * columns, 3.5), panel_height * n_rows + 0.9
    figure, axes = new_figure(n_rows, columns, width, height)
    labelled = {
      title: {**line_style, "label": plain_text(title)}
      for title, line_style in styles(titles).items()
    }
    for axis, panel in itertools.zip_longest(axes.flat, shown_panels):
      if panel is None:
        axis.set_axis_off()
      else:
        _draw_panel(axis, panel, points, labelled, swept)
    # A character of the legend's title is 0.065 inches wide.
    notes = _legend_notes(points, shown_panels)
    lines = textwrap.wrap(notes, int(width / 0.065))
    legend(figure, axes, "\n".join(lines))
    save(figure, heading, stem)
