"""Draws the comparison of live cells with their simulations or replays.

`points` gives the numbers of the picture that `draw` makes of one cell;
`draw_losses` draws the losses of several cells against time.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import figure as figure_lib
from asgd.experiment import predict
from asgd.experiment.comparison import (
  IN_ORDER,
  LIVE,
  REPLAYED,
  RESAMPLED,
  LiveComparison,
  heading,
  loss_curves,
)

_BINS = 40  # time bins, in which messages are counted
_POINTS = 2000  # largest number of points of a curve
# Width of a bar: three kinds of runs share the space of one staleness.
_BAR_WIDTH = 0.27
_HATCHES = {LIVE: "", IN_ORDER: "///", RESAMPLED: "...", REPLAYED: "///"}
_LOSS = "training loss, moving average\nover 1/40 of the messages"


def _edges(comparison: LiveComparison) -> np.ndarray:
  """Returns the edges of the time bins, float[_BINS + 1], in seconds. They
  count from message number `first_messages`; by then every worker has sent a
  message. All runs have the same bins: those of the longest run.
  """
  columns = (run.records.time for run in comparison.runs.values())
  last_index = comparison.first_messages - 1
  longest = max(time[-1] - time[last_index] for time in columns)
  return np.linspace(0, longest, _BINS + 1)


def _series(
  comparison: LiveComparison,
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
  """Yields (panel, kind of run, xs, values) of each series of the picture."""
  first_messages, edges = comparison.first_messages, _edges(comparison)
  for kind, curve in loss_curves(comparison, first_messages).items():
    records = comparison.runs[kind].records
    counts = np.bincount(records.staleness[first_messages:])
    yield "staleness", kind, np.arange(len(counts)), counts / counts.sum()
    times = records.time[first_messages:] - records.time[first_messages - 1]
    # The last bin that a run reaches is not full, so it is not drawn.
    full_bins = int(np.searchsorted(edges, times[-1], "right")) - 1
    # edges[0] is 0, so edges[1] is the width of each bin.
    rates = np.histogram(times, edges)[0] / edges[1]
    yield "throughput", kind, edges[:full_bins], rates[:full_bins]
    stride = len(curve.time) // _POINTS + 1
    yield "loss", kind, curve.time[::stride], curve.loss[::stride]


def points(comparison: LiveComparison) -> list[dict[str, Any]]:
  """Returns the picture's numbers, as rows of panel, series, x and value.

  The panels are "staleness" (share of the messages by staleness), "throughput"
  (messages per second) and "loss". The x of the last two is the time in seconds
  after every worker has sent its first message.
  """
  return [
    {"panel": panel, "series": kind, "x": float(x), "value": float(value)}
    for panel, kind, xs, values in _series(comparison)
    for x, value in zip(xs, values, strict=True)
  ]


def draw(comparison: LiveComparison, stem: Path) -> None:
  """Draws a comparison as STEM.png, .svg and .pdf. Raises ImportError if the
  extra `viz` is not installed."""
  with figure_lib.style():
    _draw(comparison, stem)


def _looks(kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Returns colour and dashes of each kind of run, without a marker."""
  styles = figure_lib.styles(list(kinds))
  keys = "color", "ls"
  return {
    kind: {key: style[key] for key in keys} for kind, style in styles.items()
  }


def _draw(comparison: LiveComparison, stem: Path) -> None:
  """Draws the three panels of a comparison."""
  figure, axes = figure_lib.new_figure(1, 3, 7.2, 2.9)
  staleness_axis, rate_axis, loss_axis = axes[0]
  kinds = list(comparison.runs)
  looks = _looks(kinds)
  # End of the axis: the 1 % of messages with the largest staleness is left out.
  staleness_limit = 0
  for panel, kind, x, values in _series(comparison):
    run, look = comparison.runs[kind], looks[kind]
    if panel == "staleness":
      width = _BAR_WIDTH
      centres = x + width * (kinds.index(kind) - 1)  # bars side by side
      bar = {"color": look["color"], "hatch": _HATCHES[kind], "label": kind}
      staleness_axis.bar(centres, 100 * values, width, ec="white", lw=0, **bar)
      kept_staleness = x[np.cumsum(values) < 0.99]
      staleness_limit = max(staleness_limit, kept_staleness.max(initial=0) + 1)
    elif panel == "throughput":
      rate = predict.rate(run, comparison.first_messages)
      label = f"{kind}: {rate:.4g} in the mean"
      edges = _edges(comparison)[: len(x) + 1]  # n bins have n + 1 edges
      options = {"baseline": None, "lw": 1.1, **look}
      rate_axis.stairs(values, edges, label=label, **options)
    else:
      label = kind
      if np.isfinite(run.accuracy):
        label += f": accuracy {100 * run.accuracy:.1f} %"
      loss_axis.plot(x, values, label=label, **look)
  limits = -0.7, staleness_limit + 0.7
  staleness_axis.set(xlabel="staleness", ylabel="messages (%)", xlim=limits)
  staleness_axis.locator_params("x", integer=True)
  rates = f"messages per second,\nmeans over 1/{_BINS} of the time"
  rate_axis.set(xlabel="seconds", ylabel=rates)
  rate_axis.set_ylim(0)
  loss_axis.set(xlabel="seconds", ylabel=_LOSS)
  losses = [line.get_ydata() for line in loss_axis.lines]
  figure_lib.scale_by_logarithm(loss_axis, "y", np.concatenate(losses))
  for axis in (staleness_axis, rate_axis, loss_axis):
    axis.grid()
    # Each panel has its own legend, above it, because its labels contain the
    # panel's numbers.
    axis.legend(
      loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7
    )
  figure_lib.save(figure, heading(comparison), stem)


def draw_losses(
  cells: Sequence[LiveComparison], target_loss: float, stem: Path
) -> None:
  """Draws the losses of all cells against time, and a horizontal line at
  `target_loss`: STEM.png, .svg and .pdf."""
  with figure_lib.style():
    _draw_losses(cells, target_loss, stem)


def _draw_losses(
  cells: Sequence[LiveComparison], target_loss: float, stem: Path
) -> None:
  """Draws one axis with a curve for each cell and kind of run."""
  figure, axes = figure_lib.new_figure(1, 1, 5, 3.4)
  axis = axes.item()
  # A cell has a colour and a marker, a kind of run has dashes.
  looks = figure_lib.styles([cell.name for cell in cells])
  kinds = dict.fromkeys(kind for cell in cells for kind in cell.runs)
  dashes = {kind: look["ls"] for kind, look in _looks(kinds).items()}
  for cell in cells:
    look = looks[cell.name]
    for kind, curve in loss_curves(cell, 0).items():
      label = figure_lib.plain_text(f"{cell.name}, {kind}")
      stride = max(len(curve.time) // 5, 1)  # five markers on a curve
      options = {**look, "ls": dashes[kind], "markevery": stride}
      axis.plot(*curve, label=label, **options)
  axis.axhline(target_loss, color="gray", lw=0.8)
  axis.set(xlabel="seconds", ylabel=_LOSS)
  drawn_losses = [line.get_ydata() for line in axis.lines]
  figure_lib.scale_by_logarithm(axis, "y", np.concatenate(drawn_losses))
  axis.grid()
  figure_lib.legend(figure, axes)
  title = "live cells, and their simulations or replays"
  figure_lib.save(figure, title, stem)
