"""Spans: the measured tasks of devices, for comparison with the plan.

Seconds are those of any clock; a run begins with its first span.
"""

import collections
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd.pipeline.table import BACKWARD, FORWARD, KNOWN, Schedule, read_as

_MAX_SPANS = 200_000  # largest number of spans in a SpanLog
_MAX_NUMBER = 1e15  # largest time, and largest number, in a file


class TaskSpan(NamedTuple):
  """A task of a measured run."""

  device: int
  stage: int  # -1: none
  microbatch: int  # -1: none
  action: str
  start: float  # seconds
  end: float


class Timing(NamedTuple):
  """When the tasks of a table run."""

  start: np.ndarray  # float[T]
  end: np.ndarray  # float[T]


class Timeline(NamedTuple):
  """The tasks of a run, planned or measured, in columns sorted by start. The
  first starts at 0."""

  device: np.ndarray  # int[T]
  stage: np.ndarray  # int[T]
  microbatch: np.ndarray  # int[T]
  action: np.ndarray  # str[T]
  start: np.ndarray  # float[T]
  end: np.ndarray  # float[T]

  def rows(self) -> Iterator[tuple]:
    """Yields the tasks as tuples of Python's numbers."""
    return zip(*(column.tolist() for column in self), strict=True)


class Idle(NamedTuple):
  """How much of a run is bubble."""

  makespan: float
  busy: np.ndarray  # float[D]; overlapping times count once
  idle: np.ndarray  # float[D]
  bubble: np.ndarray  # float[D], idle / makespan
  of_total: float  # of all devices: idle / (D x makespan)
  of_ideal: float  # of all devices: idle / busy


def planned(schedule: Schedule, timing: Timing) -> Timeline:
  """Returns the timeline of a table and its times."""
  if len(timing.start) != len(schedule.time):
    raise ValueError(
      f"timing is of {len(timing.start)} tasks, and {schedule.name} has"
      f" {len(schedule.time)}: use analyze.times of this table"
    )
  return _sorted(*schedule[2:6], timing.start, timing.end)


def measured(schedule: Schedule, spans: Iterable[TaskSpan]) -> Timeline:
  """Returns the timeline of a measured run; its spans are in any order.

  Raises:
    ValueError: for spans with wrong times, or of tasks that the table lacks;
      it may lack a user's actions.
  """
  tasks = {task[1:] for task in schedule.tasks}
  return _measured(schedule, tasks, [TaskSpan(*span) for span in spans])


def _measured(
  schedule: Schedule,
  tasks: Set[tuple[int, int, int, str]],
  spans: Sequence[TaskSpan],
) -> Timeline:
  """Does what `measured` does; `tasks` are those of the table."""
  if not spans:
    raise ValueError("there is no span: nothing was measured")
  seen_tasks = set()
  devices, name = schedule.devices, schedule.name
  for span in spans:
    device, stage, microbatch, action, start, end = span
    fault = None
    if not 0 <= device < devices:
      fault = f": the table {name} has devices 0 to {devices - 1}"
    elif not (np.isfinite(span[4:]).all() and start <= end):
      fault = (
        f" is from {start!r} to {end!r}: these must be finite, and not fall"
      )
    elif action in KNOWN and span[:4] not in tasks:
      fault = f" is not in the table {name}: was another one measured?"
    elif action in KNOWN and span[:4] in seen_tasks:
      fault = (
        " was measured twice: give the spans of one pass through the table"
      )
    if fault:
      raise ValueError(
        f"{action} of stage {stage}, microbatch {microbatch} on device"
        f" {device}{fault}"
      )
    seen_tasks.add(span[:4])
  columns = [np.array(column) for column in zip(*spans, strict=True)]
  start_time = columns[4].min()
  return _sorted(*columns[:4], columns[4] - start_time, columns[5] - start_time)


def _sorted(device, stage, microbatch, action, start, end):
  order = np.lexsort((device, start))
  columns = device, stage, microbatch, action, start, end
  return Timeline(*(column[order] for column in columns))


def idle(run: Timeline, devices: int) -> Idle:
  """Returns how much of a run is bubble."""
  makespan, busy = float(run.end.max(initial=0.0)), np.zeros(devices)
  order = np.argsort(run.device, kind="stable")
  cuts = np.searchsorted(run.device[order], np.arange(1, devices))
  for device, rows in enumerate(np.split(order, cuts)):
    start, end = run.start[rows], run.end[rows]
    # A task that overlaps an earlier one counts from the end of that task.
    reach = np.maximum.accumulate([0.0, *end])[:-1]
    busy[device] = np.maximum(end - np.maximum(start, reach), 0.0).sum()
  idle_seconds, total = makespan - busy, makespan or 1.0
  of_total = float(idle_seconds.sum() / (total * devices))
  of_ideal = float(idle_seconds.sum() / busy.sum()) if busy.any() else 0.0
  bubble = idle_seconds / total
  return Idle(makespan, busy, idle_seconds, bubble, of_total, of_ideal)


class SpanLog:
  """The last spans of a run of several calls. The log joins the calls: the time
  between two calls, such as that of an evaluation, is no bubble. For a
  synchronous schedule the log has the spans of one pass through the table."""

  def __init__(self, schedule: Schedule):
    self.spans: collections.deque[TaskSpan] = collections.deque(
      maxlen=_MAX_SPANS
    )
    self._schedule, self._end = schedule, 0.0
    # Computed once: a table may have 100,000 tasks, and a call runs a hundred.
    self._tasks = {task[1:] for task in schedule.tasks}
    self._busy = self._device_seconds = 0.0  # seconds of all devices

  def add(self, call_spans: Sequence[TaskSpan]) -> None:
    """Adds the spans of a call, by time of start."""
    if not call_spans:
      return
    schedule = self._schedule
    call = idle(_measured(schedule, self._tasks, call_spans), schedule.devices)
    self._busy += float(call.busy.sum())
    self._device_seconds += schedule.devices * call.makespan
    if schedule.flush:
      self.spans.clear()
    # The time between two calls is cut out.
    shift = self._end - call_spans[0].start if self.spans else 0.0
    self._end = max(span.end for span in call_spans) + shift
    self.spans.extend(
      span._replace(start=span.start + shift, end=span.end + shift)
      for span in call_spans
    )

  def last(
    self, most: int, end: float
  ) -> Iterator[tuple[int, str, float, float]]:
    """Yields (device, forward, backward or compute, start, end) of the last
    tasks, by a clock at which the log ends at `end`."""
    names = {FORWARD: "forward", BACKWARD: "backward"}
    shift = end - self._end
    for span in itertools.islice(reversed(self.spans), most):
      times = span.start + shift, span.end + shift
      yield span.device, names.get(span.action, "compute"), *times

  def bubble(self) -> float:
    """Returns idle / total of all calls, NaN before the first."""
    if not self._device_seconds:
      return float("nan")
    return 1 - self._busy / self._device_seconds


def to_json(spans: Iterable[TaskSpan]) -> str:
  """Returns spans as a JSON object; `spans` holds the rows."""
  rows = [
    (*map(int, span[:3]), str(span[3]), *map(float, span[4:])) for span in spans
  ]
  return json.dumps({"columns": TaskSpan._fields, "spans": rows})


def from_json(text: str) -> list[TaskSpan]:
  """Reads the text of `to_json`; a ValueError names the first wrong row."""
  try:
    rows = list(json.loads(text)["spans"])
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
      f"not spans in JSON ({type(error).__name__}: {error}); it must be an"
      ' object like {"spans": [[0, 0, 0, "F", 0.0, 0.5]]}'
    ) from None
  for number, row in enumerate(rows):
    if not (isinstance(row, list) and len(row) == 6 and _is_span(*row)):
      raise ValueError(
        f"span {number} {json.dumps(row)} must be"
        f" [{', '.join(TaskSpan._fields)}]: three whole numbers, a name, two"
        " seconds, none of them above 1e15"
      )
  return [TaskSpan(*row) for row in rows]


def read(path: Path) -> list[TaskSpan]:
  """Reads a file of `to_json`; raises ValueError, naming it, or OSError."""
  return read_as(from_json, path)


def _is_span(
  device: Any, stage: Any, microbatch: Any, action: Any, start: Any, end: Any
) -> bool:
  """Returns whether values of a file can be the fields of a TaskSpan."""
  integers = device, stage, microbatch
  return (
    {type(number) for number in integers} == {int}
    and isinstance(action, str)
    and action.isprintable()
    and {type(start), type(end)} <= {int, float}
    # NaN is for `measured` to name.
    and not any(
      abs(number) > _MAX_NUMBER for number in (*integers, start, end)
    )
  )
