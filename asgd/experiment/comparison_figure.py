"""Draws the comparison of live cells with their simulations or replays.

`points` gives the numbers of the picture that `draw` makes of one cell;
`draw_race` draws the losses of several cells against time.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import figure as figure_lib
from asgd.experiment import predict
from asgd.experiment.comparison import (
  DRAWN,
  IN_ORDER,
  LIVE,
  REPLAYED,
  LiveComparison,
  curves_of,
  heading_of,
)

_BINS = 40  # of time, in which messages are counted
_POINTS = 2000  # most points of a curve
_WIDTH = 0.27  # of a bar: three kinds of runs share the space of one staleness
_HATCHES = {LIVE: "", IN_ORDER: "///", DRAWN: "...", REPLAYED: "///"}
_LOSS = "training loss, moving average\nover 1/40 of the messages"


def _edges(comparison: LiveComparison) -> np.ndarray:
  """Returns the edges of the bins of time, in seconds since the last of the
  first messages: float[_BINS + 1]. The longest run decides them, so that all
  runs share them.
  """
  columns = (run.records.time for run in comparison.runs.values())
  last_index = comparison.first_messages - 1
  longest = max(time[-1] - time[last_index] for time in columns)
  return np.linspace(0, longest, _BINS + 1)


def _series(
  comparison: LiveComparison,
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
  """Yields (panel, kind, xs, values) of the picture."""
  first_messages, edges = comparison.first_messages, _edges(comparison)
  for kind, curve in curves_of(comparison, first_messages).items():
    records = comparison.runs[kind].records
    counts = np.bincount(records.staleness[first_messages:])
    yield "staleness", kind, np.arange(len(counts)), counts / counts.sum()
    times = records.time[first_messages:] - records.time[first_messages - 1]
    # The last bin that a run reaches is not full, so it is not drawn.
    full = int(np.searchsorted(edges, times[-1], "right")) - 1
    rates = np.histogram(times, edges)[0] / edges[1]  # of equal widths
    yield "throughput", kind, edges[:full], rates[:full]
    every = len(curve.time) // _POINTS + 1
    yield "loss", kind, curve.time[::every], curve.loss[::every]


def points(comparison: LiveComparison) -> list[dict[str, Any]]:
  """Returns the picture's numbers, as rows of panel, series, x and value.

  The panels are "staleness" (share of the messages by staleness), "throughput"
  (messages per second) and "loss". The last two are by seconds since each
  worker had sent a message.
  """
  return [
    {"panel": panel, "series": kind, "x": float(x), "value": float(value)}
    for panel, kind, xs, values in _series(comparison)
    for x, value in zip(xs, values, strict=True)
  ]


def draw(comparison: LiveComparison, stem: Path) -> None:
  """Draws a comparison as STEM.png, .svg, .pdf; ImportError without `viz`."""
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
  figure, ((bars, steps, lines),) = figure_lib.new_figure(1, 3, 7.2, 2.9)
  kinds = list(comparison.runs)
  looks = _looks(kinds)
  most = 0  # staleness on the axis, without the 1 % of largest values
  for panel, kind, x, values in _series(comparison):
    run, look = comparison.runs[kind], looks[kind]
    if panel == "staleness":
      left = x + _WIDTH * (kinds.index(kind) - 1)  # the bars side by side
      face = {"color": look["color"], "hatch": _HATCHES[kind]}
      bars.bar(left, 100 * values, _WIDTH, ec="white", lw=0, label=kind, **face)
      most = max(most, x[np.cumsum(values) < 0.99].max(initial=0) + 1)
    elif panel == "throughput":
      rate = predict.rate(run, comparison.first_messages)
      label = f"{kind}: {rate:.4g} in the mean"
      edges = _edges(comparison)[: len(x) + 1]  # one more than bins
      line = {"baseline": None, "lw": 1.1, "label": label}
      steps.stairs(values, edges, **line, **look)
    else:
      label = kind
      if np.isfinite(run.accuracy):
        label += f": accuracy {100 * run.accuracy:.1f} %"
      lines.plot(x, values, label=label, **look)
  bars.set(xlabel="staleness", ylabel="messages (%)", xlim=(-0.7, most + 0.7))
  bars.locator_params("x", integer=True)
  rates = f"messages per second,\nmeans over 1/{_BINS} of the time"
  steps.set(xlabel="seconds", ylabel=rates)
  steps.set_ylim(0)
  lines.set(xlabel="seconds", ylabel=_LOSS)
  losses = [line.get_ydata() for line in lines.lines]
  figure_lib.scale_by_logarithm(lines, "y", np.concatenate(losses))
  for axis in (bars, steps, lines):
    axis.grid()
    # Above its panel: the labels of each panel have other numbers.
    axis.legend(
      loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7
    )
  figure_lib.save(figure, heading_of(comparison), stem)


def draw_race(cells: Sequence[LiveComparison], loss: float, stem: Path) -> None:
  """Draws the losses of all cells against time: STEM.png, .svg and .pdf."""
  with figure_lib.style():
    _draw_race(cells, loss, stem)


def _draw_race(
  cells: Sequence[LiveComparison], loss: float, stem: Path
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
    for kind, curve in curves_of(cell, 0).items():
      label = figure_lib.plain_text(f"{cell.name}, {kind}")
      every = max(len(curve.time) // 5, 1)  # five markers on a curve
      line = {**look, "ls": dashes[kind], "markevery": every, "label": label}
      axis.plot(*curve, **line)
  axis.axhline(loss, color="gray", lw=0.8)
  axis.set(xlabel="seconds", ylabel=_LOSS)
  drawn_losses = [line.get_ydata() for line in axis.lines]
  figure_lib.scale_by_logarithm(axis, "y", np.concatenate(drawn_losses))
  axis.grid()
  figure_lib.legend(figure, axes)
  title = "live cells, and their simulations or replays"
  figure_lib.save(figure, title, stem)
