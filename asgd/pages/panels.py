"""The panels of a cell: curves, histograms, the workers' strip, and events.

A chart is geometry in the pixels of its viewBox; `macros.html` draws it as SVG
within the page, in the page's colours. The numbers are those of progress.json
(`asgd.experiment.cell_progress`) and of the evaluations.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd.pages.run_files import CellFiles


class Size(NamedTuple):
  """Size and margins of a chart; the margins have ticks and labels."""

  width: int = 300
  height: int = 160
  left: int = 46
  right: int = 12
  top: int = 10
  bottom: int = 34


SIZE = Size()
_WANTED_TICKS = 5  # wanted on an axis; steps of 1, 2 or 5 give 3 to 6
# Bars of a histogram. If it has fewer than 5, each is as wide as one of 5.
_MAX_BARS, _MIN_BARS = 32, 5
_RATE_SECONDS = 5.0  # seconds over which the present rate is averaged
_LOG_RATIO = 50.0  # largest / smallest value above which an axis is logarithmic
_STRIP_WIDTH = 1000  # width of a strip's viewBox, which spans its whole time


class Chart(NamedTuple):
  """A chart, in pixels from the upper left corner of its viewBox."""

  name: str
  x_label: str
  x_ticks: list[tuple[float, str]]
  y_ticks: list[tuple[float, str]]
  # A polyline's end is marked with a dot: the latest value.
  # (name, points of a polyline, its end)
  lines: list[tuple[str, str, tuple[float, float]]] = []
  bars: list[tuple[float, float, float, str]] = []  # x, width, height, text


class Lane(NamedTuple):
  """The strip of a worker."""

  name: str
  parts: list[tuple[str, float, float, str]]  # kind, x, width, text
  shares: str  # percent of the time for each sort of work


class Strip(NamedTuple):
  """The strips of workers, over one stretch of time."""

  lanes: list[Lane]
  kinds: list[str]
  begin: str
  end: str
  note: str  # how many workers have a strip; "" if all have one


class Panels(NamedTuple):
  """All panels of a cell."""

  name: str
  state: str  # a state of `run_files`, or of the page that shows the panels
  share: float  # received messages / all messages of the cell
  facts: list[tuple[str, str]]
  charts: list[Chart]
  strip: Strip | None
  events: list[tuple[str, str]]  # (seconds, line): faults, recoveries


def number(value: float | None, form: str = "{:.4g}") -> str:
  """Returns a number as text; a dash if it is not known."""
  if value is None or not math.isfinite(value):
    return "-"
  if float(value).is_integer() and abs(value) < 1e15:
    return f"{int(value):,}"
  return form.format(value)


def bytes_text(count: float) -> str:
  """Returns a count of bytes as text.

  Example:
    >>> bytes_text(1234567)
    '1.23 MB'
  """
  for unit in ("B", "kB", "MB"):
    if count < 999.5:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:.3g} GB"


def _ticks(low: float, high: float) -> list[float]:
  """Returns round numbers from `low` to `high`, in steps of 1, 2 or 5.

  Example:
    >>> _ticks(0.0, 9.0)
    [0.0, 2.0, 4.0, 6.0, 8.0]
  """
  # The step is the smallest of 1, 2, 5 times a power of ten that is at least
  # `rough`.
  rough = (high - low) / _WANTED_TICKS
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * rough)
  # 1e-9: a limit that equals a tick except for rounding has its tick.
  first_step = math.ceil(low / step - 1e-9)
  count = math.floor(high / step + 1e-9) - first_step + 1
  # 12 digits hide the rounding of 0.1 * 3.
  return [round((first_step + i) * step, 12) for i in range(count)]


def _x_pixel(value: Any, low: float, high: float) -> Any:
  """Returns the pixel of a value, or an array of them, along the x axis."""
  plot_width = SIZE.width - SIZE.left - SIZE.right
  return SIZE.left + plot_width * (value - low) / (high - low)


def _y_pixel(value: Any, low: float, high: float) -> Any:
  """Returns the pixel of a value along the y axis, which SVG counts down."""
  bottom = SIZE.height - SIZE.bottom
  return bottom - (bottom - SIZE.top) * (value - low) / (high - low)


def _range(values: npt.NDArray[Any], *, from_zero: bool) -> tuple[float, float]:
  """Returns two different limits of an axis that contains the values, and 0 if
  `from_zero`."""
  low, high = float(values.min()), float(values.max())
  low = min(low, 0.0) if from_zero else low
  # Equal limits would divide by 0 in `_x_pixel` and `_y_pixel`.
  least_range = 1e-9 * max(abs(high), abs(low))
  if high - low <= least_range:
    # A diverged loss may be so large that adding 0.5 does not change it.
    margin = max(0.5, least_range)
    low = low if from_zero else low - margin
    high = high + 1.0 if from_zero else high + margin
  return low, high


def _curves(
  name: str,
  x_label: str,
  curves: Mapping[str, Iterable[tuple[float, float]]],
  *,
  from_zero: bool,
) -> Chart | None:
  """Returns a chart of named curves; None without any finite point."""
  arrays = {}
  for label, points in curves.items():
    # JSON has null for a loss that is not finite; the curve skips it.
    rows = np.array([[x, np.nan if y is None else y] for x, y in points], float)
    rows = rows.reshape(-1, 2)
    rows = rows[np.isfinite(rows).all(1)]
    if len(rows):
      arrays[label] = rows
  if not arrays:
    return None
  all_points = np.concatenate([*arrays.values()])
  values = all_points[:, 1]
  # The axis is logarithmic if values span decades; rates start at 0.
  scale: Callable[[Any], Any] = np.asarray
  is_log = (
    not from_zero
    and values.min() > 0
    and values.max() > _LOG_RATIO * values.min()
  )
  if is_log:
    scale = np.log10
  x_range = _range(all_points[:, 0], from_zero=True)
  y_range = _range(scale(values), from_zero=from_zero)
  lines = []
  for label, rows in arrays.items():
    x, y = _x_pixel(rows[:, 0], *x_range), _y_pixel(scale(rows[:, 1]), *y_range)
    pixels = list(zip(x.tolist(), y.tolist(), strict=True))
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    lines.append((label, text, pixels[-1]))
  # Ticks are round in the axis' scale: exponents, if it is logarithmic.
  ticks = _ticks(*y_range)
  tick_texts = [
    number(10**tick if is_log else tick, "{:.3g}") for tick in ticks
  ]
  return Chart(
    name,
    x_label,
    [(_x_pixel(tick, *x_range), number(tick)) for tick in _ticks(*x_range)],
    [
      (_y_pixel(t, *y_range), text)
      for t, text in zip(ticks, tick_texts, strict=True)
    ],
    lines=lines,
  )


def _bars(
  name: str,
  x_label: str,
  counts: npt.NDArray[Any],
  labels: Sequence[str],
  ticks: Iterable[tuple[int, str]],
) -> Chart | None:
  """Returns a histogram in percent of the messages; None if it is empty.

  Args:
    name: the name of the chart.
    x_label: the label of its axis.
    counts: the count of each bar.
    labels: the label of each bar.
    ticks: (index of a bar, text).
  """
  total = int(counts.sum())
  if not total:
    return None
  shares = 100 * counts / total  # percent of all messages
  high = float(shares.max())
  # `_MIN_BARS`: a single bar is not as wide as the chart.
  n_bars = len(counts)
  x = _x_pixel(np.arange(n_bars + 1), 0, max(n_bars, _MIN_BARS))
  height = SIZE.height - SIZE.bottom - _y_pixel(shares, 0, high)
  texts = [
    f"{label}: {number(n_messages)} messages, {share:.3g} %"
    for label, n_messages, share in zip(
      labels, counts.tolist(), shares, strict=True
    )
  ]
  pixels = zip(
    x[:-1].tolist(), np.diff(x).tolist(), height.tolist(), texts, strict=True
  )
  return Chart(
    name,
    x_label,
    [(float(x[i] + x[i + 1]) / 2, text) for i, text in ticks],
    [(_y_pixel(t, 0, high), f"{number(t)} %") for t in _ticks(0.0, high)],
    bars=list(pixels),
  )


def _staleness(content: Mapping[str, Any]) -> Chart | None:
  """Returns the histogram of staleness."""
  counts, width = np.array(content["counts"], int), content["width"]
  # Merge neighbours until at most `_MAX_BARS` bars remain.
  bars_merged = max(-(-len(counts) // _MAX_BARS), 1)
  # Pad with zeros, so that the last bar merges the same number as the others.
  counts = np.append(counts, np.zeros(-len(counts) % bars_merged, int))
  counts, width = counts.reshape(-1, bars_merged).sum(1), width * bars_merged
  labels = [
    f"{i * width}" if width == 1 else f"{i * width} to {(i + 1) * width - 1}"
    for i in range(len(counts))
  ]
  step = -(-len(counts) // 6)  # about six labels fit below the axis
  ticks = [(i, f"{i * width}") for i in range(0, len(counts), step)]
  # In updates; of tables in clocks, of peers in mixes.
  return _bars("Staleness", "staleness", counts, labels, ticks)


def _gap(content: Mapping[str, Any]) -> Chart | None:
  """Returns the histogram of gaps, on a logarithmic axis."""
  # Bin 0 has the gaps of 0, clipped by `cell_progress`. `range` has exponents
  # of 10.
  counts, (low, high) = np.array(content["counts"], int), content["range"]
  edges = np.linspace(low, high, len(counts) + 1)
  zero_count, positive_bins = int(counts[0]), np.flatnonzero(counts[1:])
  name, x_label = "Gap", "RMS of the parameters' change, log scale"
  if not len(positive_bins):  # every gap is 0, as with one worker
    return _bars(name, x_label, counts[:1], ["0"], [(0, "0")])
  # Cut the empty bins at both ends.
  first, last = positive_bins[0] + 1, positive_bins[-1] + 2
  labels = [
    f"{10**a:.2g} to {10**b:.2g}"
    for a, b in itertools.pairwise(edges[first : last + 1])
  ]
  # The bar of zeros is the first; an empty bar separates it from the others.
  bar_counts, ticks = counts[first:last], []
  if zero_count:
    bar_counts = np.append([zero_count, 0], bar_counts)
    labels = ["0", "-", *labels]
    ticks = [(0, "0")]
  shift = 2 * bool(zero_count) - first  # index of a bar - index of its bin
  step = max(-(-len(bar_counts) // 4), 1)
  ticks += [
    (i + shift, f"{10 ** edges[i]:.1g}")
    for i in range(first + bool(zero_count), last, step)
  ]
  return _bars(name, x_label, bar_counts, labels, ticks)


def _strip(progress: Mapping[str, Any]) -> Strip | None:
  """Returns the workers' strip over the last stretch of time."""
  work, unit = progress["work"], progress["unit"]
  if not work:
    return None
  # lane -> start of its first segment here.
  starts: dict[int, float] = {}
  for lane, _, start, _ in work:
    starts[lane] = min(start, starts.get(lane, start))
  end = max(segment[3] for segment in work)
  # The work of a lane before its first segment is not known. So the strip
  # begins at the latest of these starts, or in the middle if a worker joined
  # late.
  earliest_start = min(starts.values())
  begin = min(max(starts.values()), (earliest_start + end) / 2)
  length = (end - begin) or 1.0
  lanes = []
  # A synchronous run reports its workers as one lane.
  is_synchronous = len(starts) == 1 and progress["workers"] > 1
  for lane in sorted(starts):
    parts, busy_seconds = [], dict.fromkeys(("compute", "wire"), 0.0)
    for _, kind, start, part_end in sorted(p for p in work if p[0] == lane):
      start = max(start, begin)  # cut at the strip's left edge
      if part_end <= start:
        continue
      # Forward, backward and their like count as compute.
      duration = part_end - start
      name = kind if kind in ("wire", "job") else "compute"
      x, width = (
        _STRIP_WIDTH * time / length for time in (start - begin, duration)
      )
      parts.append((kind, x, width, f"{kind}, {number(duration)} {unit}"))
      busy_seconds[name] = busy_seconds.get(name, 0.0) + duration
    shares = {
      name: 100 * time / length for name, time in busy_seconds.items() if time
    }
    # The rest of the time the worker waits for a ticket or a peer.
    shares["wait"] = max(100 - sum(shares.values()), 0.0)
    shares_text = ", ".join(
      f"{name} {share:.0f} %" for name, share in shares.items()
    )
    lanes.append(
      Lane("all" if is_synchronous else str(lane), parts, shares_text)
    )
  kinds = dict.fromkeys(segment[1] for segment in work)
  missing = 0 if is_synchronous else progress["workers"] - len(lanes)
  note = f"{len(lanes)} of {progress['workers']} workers" if missing > 0 else ""
  texts = [number(time, "{:.5g}") for time in (begin, end)]
  return Strip(lanes, [*kinds, "wait"], texts[0], f"{texts[1]} {unit}", note)


def _rates(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
  """Returns (seconds, messages per second) between points."""
  previous, rates = (0.0, 0.0), []
  # A rollback lowers the count of messages: no rate is shown across it.
  for seconds, message, *_ in points:
    if seconds > previous[0] and message >= previous[1]:
      rate = (message - previous[1]) / (seconds - previous[0])
      rates.append((seconds, rate))
    previous = seconds, message
  return rates


def _facts(cell: CellFiles) -> list[tuple[str, str]]:
  """Returns names and values of the numbers above the charts."""
  progress = cell.progress
  points, total = progress["points"], progress["total"]
  n_received, (bytes_up, bytes_down) = progress["messages"], progress["bytes"]
  facts = [("messages", f"{n_received:,} of {total:,}")]
  # While the cell is trained the present rate, afterwards the mean rate.
  recent = [p for p in points if p[0] >= points[-1][0] - _RATE_SECONDS]
  if cell.result or len(recent) < 2:
    recent = [[0.0, 0], *points[-1:]]
  seconds = recent[-1][0] - recent[0][0]
  if seconds > 0:
    rate = (recent[-1][1] - recent[0][1]) / seconds
    facts.append(("messages/s", number(rate, "{:.3g}")))
  if points:
    facts.append(("loss", number(points[-1][2])))
  # The final evaluation, or the last one so far.
  row = cell.result or (cell.rows[-1] if cell.rows else {})
  for key, name in (("test_loss", "test loss"), ("test_accuracy", "accuracy")):
    if row.get(key) is not None:
      percent = key == "test_accuracy"
      value = f"{100 * row[key]:.1f} %" if percent else number(row[key])
      facts.append((name, value))
  staleness = progress["staleness"]
  counts = np.array(staleness["counts"], float)
  # Bins wider than 1 do not give an exact mean.
  if counts.sum() and staleness["width"] == 1:
    mean = np.arange(len(counts)) @ counts / counts.sum()
    facts.append(("staleness", number(mean, "{:.3g}")))
  if bytes_up or bytes_down:
    facts.append(
      ("bytes up, down", f"{bytes_text(bytes_up)}, {bytes_text(bytes_down)}")
    )
  number_format = "{:.1f}" if progress["seconds"] >= 10 else "{:.3g}"
  facts.append(("seconds", number(progress["seconds"], number_format)))
  return facts


def cell_panels(cell: CellFiles) -> Panels:
  """Returns the panels of a cell; without charts if its progress.json is
  missing or was damaged."""
  try:
    return _progress_panels(cell)
  # A damaged file must not end the page of all other cells.
  except (LookupError, TypeError, ValueError, ArithmeticError):
    return Panels(cell.name, cell.state, 0.0, [], [], None, [])


def _progress_panels(cell: CellFiles) -> Panels:
  """Returns the panels of a cell with a valid progress.json."""
  progress, points = cell.progress, cell.progress["points"]
  tests = [(row.get("message"), row.get("test_loss")) for row in cell.rows]
  losses = {"train": [(p[1], p[2]) for p in points], "test": tests}
  charts = [
    _curves("Rate", "seconds", {"messages/s": _rates(points)}, from_zero=True),
    _curves("Loss", "messages", losses, from_zero=False),
    _staleness(progress["staleness"]),
    _gap(progress["gap"]),
  ]
  # The points have bytes since the last point; the chart shows their sum.
  sent_points, total = [], 0.0
  for _, message, _, _, nbytes in points:
    sent_points.append((message, total := total + nbytes / 1e6))
  if total:
    charts.append(
      _curves("Bytes", "messages", {"MB sent": sent_points}, from_zero=True)
    )
  events = [(f"{time:.1f} s", line) for time, line in progress["events"]]
  return Panels(
    cell.name,
    cell.state,
    progress["messages"] / max(progress["total"], 1),
    _facts(cell),
    [chart for chart in charts if chart],
    _strip(progress),
    events[::-1],  # the newest first
  )
