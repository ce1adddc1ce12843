"""Draws a table with its times as text, as a picture and as tracks for
Perfetto, and describes its costs in words. The numbers are from
`asgd.pipeline.analyze`.

A measured run is drawn beside its plan, in the same tracks.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import safe_files, text_table
from asgd import tracks as tracks_lib
from asgd.pipeline import analyze
from asgd.pipeline import spans as spans_lib
from asgd.pipeline import table as table_lib
from asgd.pipeline.spans import TaskSpan, Timing
from asgd.pipeline.table import (
  BACKWARD,
  FORWARD,
  INPUT,
  KNOWN,
  WEIGHT,
  Schedule,
)

# Text.


def to_text(schedule: Schedule, timing: Timing, *, columns: int = 120) -> str:
  """Returns the times as text: a line for each device, in which the width of a
  task is its duration.

  A task is its name, filled with -; a dot is idle time. If a task is too short,
  the number, or the whole name, is left out.

  >>> from asgd.pipeline import analyze
  >>> from asgd.pipeline import table as table_lib
  >>> orders = [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
  >>> table = table_lib.lay_out("two", orders, every=1, flush=True)
  >>> times = analyze.times(table, analyze.costs(2))
  >>> print(to_text(table, times, columns=80))
  # two; a column is 0.5
  0 | F0......B0--
  1 | ..F0B0--....
  <BLANKLINE>

  The makespan is `columns` letters wide, or less if all names fit into less.

  Raises:
    ValueError: if there is no room at all.
  """
  if columns < 1:
    raise ValueError(f"columns must be positive, not {columns!r}")
  run = spans_lib.planned(schedule, timing)
  blocks = collections.defaultdict(list)  # (device, start, end) -> names
  for device, _, microbatch, action, start, end in run.rows():
    if end > start:
      blocks[device, start, end].append(table_lib.label(action, microbatch))
  makespan = float(run.end.max(initial=0.0))
  min_scales = [
    len("&".join(names)) / (end - start)
    for (_, start, end), names in blocks.items()
  ]
  # As wide as asked, but no wider than the longest name needs.
  scale = min(columns / makespan, max(min_scales)) if blocks else 1.0
  grid = [["."] * round(makespan * scale) for _ in range(schedule.devices)]
  for (device, start, end), names in blocks.items():
    first, last = round(start * scale), round(end * scale)
    name = _longest_label(names, last - first)
    grid[device][first:last] = name.ljust(last - first, "-")
  index_width = len(str(schedule.devices - 1))
  lines = [f"# {schedule.name}; a column is {1 / scale:.6g}"]
  lines += [
    f"{d:>{index_width}} | {''.join(row)}" for d, row in enumerate(grid)
  ]
  return "\n".join(lines) + "\n"


def _longest_label(names, room):
  """Returns the longest form of the names that fits into `room` letters."""
  actions = [name.rstrip("0123456789") for name in names]
  texts = "&".join(names), "&".join(actions), actions[0], ""
  return next(text for text in texts if len(text) <= room)


# Words.

_WIDE = 160  # columns of times in a file


class Drawing(NamedTuple):
  """A table, its times under some costs, and the resulting facts."""

  table: Schedule
  facts: analyze.Analysis
  weights: str  # that tasks read, of `analyze.WEIGHTS`
  measured: list[TaskSpan] | None = None


def _range(column):
  """Returns the range of a column as text, `3` or `2-3`."""
  low_high = dict.fromkeys((int(column.min()), int(column.max())))
  return "-".join(map(str, low_high))


def describe(drawing: Drawing) -> str:
  """Returns a table's bubbles, memory and staleness as text, by device and by
  stage, and beside them the values of a measured run."""
  table, facts, weights, measured = drawing
  total = facts.makespan or 1.0
  flush_text = "a flush after each" if table.flush else "no flush"
  head = ["", "busy", "idle", "bubble", "peak activations", "sent"]
  rows = [
    [f"device {d}", f"{busy:.6g}", f"{idle:.6g}", f"{idle / total:.1%}"]
    + [f"{facts.peak_activations[d]:.6g}", f"{facts.sent[d]:.6g}"]
    for d, (busy, idle) in enumerate(zip(facts.busy, facts.idle, strict=True))
  ]
  devices = text_table.format_table(head, rows)
  # From there on the pipeline is full, and staleness does not change.
  steady = slice(table.microbatches // 2, None)
  head = ["", "devices", "weight versions", "stale forward", "stale backward"]
  rows = [
    [
      f"stage {stage}",
      ",".join(map(str, places)),
      str(facts.weight_versions[stage]),
      *(_range(ages[stage, steady]) for ages in facts.staleness),
    ]
    for stage, places in enumerate(table.places())
  ]
  text = (
    f"{table.name}: {table.stages} stages on {table.devices} devices,"
    f" {table.microbatches} microbatches, {table.every} in an update,"
    f" {flush_text}\n"
    f"makespan  {facts.makespan:.6g}\n"
    f"bubble    {facts.bubble_of_total:.1%} of the total (idle / devices x"
    " makespan)\n"
    f"          {facts.bubble_of_ideal:.1%} of the ideal (idle / busy)\n\n"
    f"{devices}\n{text_table.format_table(head, rows)}\n"
    "sent: activations and gradients to other devices; weights:"
    f" {weights}; stale: updates since\nthey were read, in the later half of"
    " the microbatches\n"
  )
  if measured is not None:
    text += f"\n{_describe_measured(table, facts, measured)}"
  return text


def _describe_measured(
  table: Schedule, facts: analyze.Analysis, measured: Sequence[TaskSpan]
) -> str:
  """Returns the plan's bubbles beside those of the measured run, as text."""
  tasks = spans_lib.measured(table, measured)
  plan = spans_lib.idle(spans_lib.planned(table, facts.timing), table.devices)
  run = spans_lib.idle(tasks, table.devices)
  head = ["", "planned idle", "measured", "planned bubble", "measured"]
  rows = [
    [f"device {d}", f"{plan.idle[d]:.5g}", f"{run.idle[d]:.5g}"]
    + [f"{plan.bubble[d]:.1%}", f"{run.bubble[d]:.1%}"]
    for d in range(table.devices)
  ]
  rows += [
    ["of the total", "", "", f"{plan.of_total:.1%}", f"{run.of_total:.1%}"],
    ["of the ideal", "", "", f"{plan.of_ideal:.1%}", f"{run.of_ideal:.1%}"],
  ]
  n_planned, n_measured = (
    np.isin(tasks_of.action, KNOWN).sum() for tasks_of in (table, tasks)
  )
  shortfall = ""
  if n_planned > n_measured:
    shortfall = (
      f"{n_planned - n_measured} tasks of the table were not measured\n"
    )
  # With flushes, `spans.SpanLog` keeps only the spans of the last batch.
  if table.flush:
    shortfall += (
      "measured: the last batch only; training prints the mean over all"
      " batches\n"
    )
  return (
    f"makespan  {plan.makespan:.6g} planned, {run.makespan:.6g} measured\n"
    f"{shortfall}\n{text_table.format_table(head, rows)}"
  )


def texts(drawing: Drawing) -> dict[str, str]:
  """Returns the table and its analysis as contents of files, by their names."""
  table = drawing.table
  grid = to_text(table, drawing.facts.timing, columns=_WIDE)
  return {
    "grid.txt": table_lib.to_text(table),
    "analysis.txt": f"{grid}\n{describe(drawing)}",
    "schedule.csv": table_lib.to_csv(table),
    "schedule.json": table_lib.to_json(table) + "\n",
  }


# Tracks.


def perfetto(
  schedule: Schedule, timing: Timing, measured: Sequence[TaskSpan] | None = None
) -> dict[str, Any]:
  """Returns the content of a JSON file for Perfetto: a track for each device,
  where a unit of the costs is a second. A measured run has tracks of the same
  names below those of the plan."""
  runs = _runs(schedule, timing, measured)
  tracks = tracks_lib.Tracks(dict(enumerate(runs, 1)))
  events = []
  for pid, run in enumerate(runs.values(), 1):
    for device in range(schedule.devices):
      tracks.tid(pid, f"device {device}", 100 * device)
    lanes = [tracks_lib.Lanes() for _ in range(schedule.devices)]
    for device, stage, microbatch, action, start, end in run.rows():
      # Pieces of a track may not overlap, and the tasks of a block do.
      lane = lanes[device].take(start, end)
      track = f"device {device}" + (f", beside {lane}" if lane else "")
      tid = tracks.tid(pid, track, 100 * device + lane)
      args = {"stage": stage, "microbatch": microbatch, "action": action}
      title = table_lib.label(action, microbatch)
      events.append(tracks_lib.span(title, pid, tid, start, end, args=args))
  return tracks_lib.document(tracks.ordered(events))


def _runs(schedule, timing, measured):
  runs = {"planned": spans_lib.planned(schedule, timing)}
  if measured is not None:
    runs["measured"] = spans_lib.measured(schedule, measured)
  return runs


# Picture. Lengths are in inches, sizes of letters in points.

_COLOURS = {  # from dark to light F, I, W, B: told apart in grey, too
  FORWARD: "#1a3f73",
  BACKWARD: "#e58a2e",
  INPUT: "#a83287",
  WEIGHT: "#2a8f62",
}
_WORDS = {
  FORWARD: "F forward",
  BACKWARD: "B backward",
  INPUT: "I backward of inputs",
  WEIGHT: "W backward of weights",
}
_OTHER_COLOURS = ("#6a51a3", "#8c6d31", "#636363", "#17a2b8")
_PALEST = 0.6  # how much white is in the colour of the last stage
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.95, 1.5, 0.75, 0.85  # around the axes
_MAX_NUMBERED = 6000  # number of tasks above which no numbers are written
_MAX_VECTORS = 20000  # tasks; a picture with more has pixels in an SVG, too
_DIGIT_WIDTH = 0.62  # width of a digit, as a share of its font size


def gantt(
  schedule: Schedule,
  timing: Timing,
  *paths: str | Path,
  measured: Sequence[TaskSpan] | None = None,
) -> None:
  """Draws a row for each device: tasks in the colour of their action, paler for
  later stages, with the number of their microbatch where there is room. Bubbles
  are white, and their shares are on the right. A measured run is drawn below
  the plan in each row. `paths` are files, PNG or SVG by their names.

  Raises:
    ValueError: as `spans.measured`.
    ImportError: without matplotlib.
  """
  try:
    import matplotlib
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      "pictures need matplotlib: pip install 'asgd[viz]'"
    ) from error
  runs = _runs(schedule, timing, measured)
  longest = max(len(run.start) for run in runs.values()) / schedule.devices
  width = float(np.clip(0.3 * longest, 7, 28))
  height = float(np.clip(0.45 * len(runs) * schedule.devices, 0.9, 24))
  size = width + _LEFT + _RIGHT, height + _TOP + _BOTTOM
  figure = Figure(figsize=size)
  axes = figure.add_axes(
    (_LEFT / size[0], _BOTTOM / size[1], width / size[0], height / size[1])
  )
  idle = [spans_lib.idle(run, schedule.devices) for run in runs.values()]
  end = max(part.makespan for part in idle) or 1.0
  room = width / end, height / schedule.devices
  actions = {action for run in runs.values() for action in run.action.tolist()}
  other_actions = sorted(actions - _COLOURS.keys())
  other_actions = dict(zip(other_actions, itertools.cycle(_OTHER_COLOURS)))
  all_colours = {**_COLOURS, **other_actions}.items()
  colours = {name: colour for name, colour in all_colours if name in actions}
  for position, run in enumerate(runs.values()):
    bars = _bars(run, position, len(runs))
    _draw(axes, run, bars, colours, schedule.stages, room)
  _label_axes(axes, schedule, idle, end, room[1])
  _legend(figure, colours, schedule.stages)
  # The same file for the same run: no date, and ids that are not random.
  with matplotlib.rc_context({"svg.hashsalt": "gantt"}):
    for path in map(Path, paths):
      svg = path.suffix == ".svg"
      metadata = {"Date": None} if svg else {"Software": None}
      safe_files.save_figure(figure, path, dpi=110, metadata=metadata)


def _bars(run: spans_lib.Timeline, position: int, positions: int) -> np.ndarray:
  """Returns float[T, 4]: start, end, top and bottom of each task. The row of
  device d is from d to d + 1; tasks that overlap share its height."""
  lane, lanes = _lanes(run)
  height = 0.86 / positions
  bar = height / lanes
  top = run.device + 0.07 + position * height + lane * bar
  return np.stack([run.start, run.end, top, top + 0.94 * bar], 1)


def _lanes(run: spans_lib.Timeline) -> tuple[np.ndarray, np.ndarray]:
  """Returns int[T], int[T]: the lane of each task, and the number of lanes that
  its group of overlapping tasks needs."""
  lane = np.zeros(len(run.start), np.int64)
  lanes = np.ones(len(run.start), np.int64)
  group = collections.defaultdict(list)  # device -> tasks that overlap
  reach = collections.defaultdict(float)
  free: dict[int, tracks_lib.Lanes] = {}
  for task, (device, *_, start, end) in enumerate(run.rows()):
    if start >= reach[device]:
      group[device], free[device] = [], tracks_lib.Lanes()
    reach[device] = max(reach[device], end)
    lane[task] = free[device].take(start, end)
    group[device].append(task)
    lanes[group[device]] = lane[group[device]].max() + 1
  return lane, lanes


def _paler(colours: Sequence[str], share: float | np.ndarray) -> np.ndarray:
  """Returns float[..., 3]: colours mixed with the share `share` of white."""
  from matplotlib.colors import to_rgba_array

  rgb = to_rgba_array(colours)[:, :3]
  mixed: np.ndarray = rgb + (1 - rgb) * np.asarray(share)[..., None]
  return mixed


def _draw(
  axes: Any,
  run: spans_lib.Timeline,
  bars: np.ndarray,
  colours: Mapping[str, str],
  stages: int,
  room: tuple[float, float],
) -> None:
  """Draws the bars of a run, and numbers on them."""
  from matplotlib.collections import PolyCollection

  # Later stages have paler colours.
  share = _PALEST * np.maximum(run.stage, 0) / max(stages - 1, 1)
  fill = _paler([colours[action] for action in run.action.tolist()], share)
  left, right, top, bottom = bars.T
  corners: Any = bars[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]
  is_dense = len(bars) > _MAX_VECTORS
  axes.add_collection(
    PolyCollection(
      corners,
      facecolors=fill,
      edgecolors="white",
      linewidths=0 if is_dense else 0.4,
      rasterized=is_dense,
    )
  )
  if len(bars) > _MAX_NUMBERED:
    return
  # Luminance (Rec. 601) decides between white and black digits.
  is_dark = fill @ [0.299, 0.587, 0.114] < 0.6
  width_points = 72 * room[0] * (right - left)
  height_points = 72 * room[1] * (bottom - top)
  x, y = (left + right) / 2, (top + bottom) / 2
  style = {"ha": "center", "va": "center_baseline", "clip_on": True}
  for task, number in enumerate(run.microbatch.tolist()):
    text = str(number)
    widest = (width_points[task] - 1) / _DIGIT_WIDTH / len(text)
    size = min(9.0, 0.8 * height_points[task], widest)
    if number >= 0 and size >= 4:
      colour = "white" if is_dark[task] else "black"
      axes.text(x[task], y[task], text, fontsize=size, color=colour, **style)


def _label_axes(
  axes: Any,
  schedule: Schedule,
  idle: Sequence[spans_lib.Idle],
  end: float,
  room: float,
) -> None:
  """Writes around the axes; `room` is the height of a row."""
  size = float(np.clip(72 * room * 0.6 / len(idle), 2, 9))
  devices = range(schedule.devices)
  axes.set(xlim=(0, end), ylim=(schedule.devices, 0))
  axes.set_xlabel("seconds" if len(idle) > 1 else "time")  # measured or not
  axes.set_yticks([device + 0.5 for device in devices])
  axes.set_yticklabels([f"device {device}" for device in devices])
  axes.tick_params(axis="y", length=0, labelsize=min(size * len(idle), 9))
  axes.spines[["top", "right", "left"]].set_visible(False)
  for device in range(1, schedule.devices):
    axes.axhline(device, color="#dddddd", lw=0.4, zorder=0)
  beside_axes = {"transform": axes.get_yaxis_transform(), "va": "center"}
  prefixes = ("planned ", "measured ") if len(idle) > 1 else ("",)
  title_lines = [
    f"{schedule.name}: {schedule.stages} stages on {schedule.devices} devices,"
    f" {schedule.microbatches} microbatches"
  ]
  for position, (prefix, part) in enumerate(zip(prefixes, idle, strict=True)):
    for device in devices:
      height = device + (position + 0.5) / len(idle)
      text = f"{prefix}{part.bubble[device]:.1%}"
      axes.text(1.01, height, text, fontsize=size, **beside_axes)
    title_lines.append(
      f"{prefix}makespan {part.makespan:.5g}; bubble {part.of_total:.1%} of the"
      f" total, {part.of_ideal:.1%} of the ideal"
    )
  above_axes = {"transform": axes.transAxes, "va": "bottom"}
  axes.text(1.01, 1, "bubble", fontsize=9, **above_axes)
  title = "\n".join(title_lines).replace("$", r"\$")
  axes.set_title(title, fontsize=10, loc="left")


def _legend(figure: Any, colours: Mapping[str, str], stages: int) -> None:
  """Draws the colour of each action, and those of the first and last stage."""
  from matplotlib.patches import Patch

  labels = {_WORDS.get(action, action): c for action, c in colours.items()}
  if stages > 1:
    (pale,) = _paler(["#404040"], _PALEST)
    labels |= {"stage 0": "#404040", f"stage {stages - 1}": pale}
  handles = [Patch(color=c, label=label) for label, c in labels.items()]
  style = {"loc": "lower center", "frameon": False, "handlelength": 1.0}
  figure.legend(handles=handles, ncols=len(handles), fontsize=9, **style)
