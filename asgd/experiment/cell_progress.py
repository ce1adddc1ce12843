"""progress.json: the state of a cell while it trains, for `asgd watch`.

The run loop writes this file for every engine, from the progress that engines
report anyway. It writes at most once a second, and for at most 1 % of the time.
It replaces the file as a whole, so a reader never finds half of it. The file of
a finished cell has the totals of all its records. `asgd.pages.panels` draws the
file in both cases.
"""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base, safe_files
from asgd.experiment import engines, storage
from asgd.orders.trace import ENDS, STARTS, Event, events
from asgd.pages.run_files import PROGRESS

_INTERVAL = 1.0  # least seconds between two writes
_FIRST_WRITE = 0.3  # seconds of training before the first write
# The pause between two writes is at least this factor times the duration of the
# last write.
_PAUSE_FACTOR = 100.0
# These bounds limit the size of the file, however long the run is.
_MAX_POINTS = 240  # points of the curves
_N_BINS = 128  # bins of a histogram
_GAP_RANGE = (-12.0, 4.0)  # decimal logarithms of smallest and largest gap
_MAX_LOG_LINES = 200  # lines on faults and recoveries
_MAX_SEGMENTS = 400  # segments of work
_MAX_LANES = 32  # workers, or devices, that the file shows
_MAX_CALLS = 100  # calls of `advance` that the file shows

MAX_ROWS = 800  # last rows of a trace, from which segments of work are read


class Segment(NamedTuple):
  """A period in which a worker works. Between two segments the worker waits."""

  lane: int  # index of the worker, or of the device
  kind: str  # compute, wire (transfers), or job (both)
  start: float  # seconds, or simulated time
  end: float


def segments(
  rows: Sequence[Event],
  computed: Callable[[int, int], Sequence[float]] = lambda *_: (),
  kind: str = "compute",
) -> list[Segment]:
  """Returns the segments of the jobs in the last rows of a trace.

  Args:
    rows: the rows of the trace; a job that starts before them is left out.
    computed: (worker, seq) -> times at which the worker began and ended its
      computation; the rest of the job is on the wire. The function returns ()
      if it does not know the job's computation.
    kind: the kind of the segment of a job without a known computation.

  Example:
    >>> row = Event(0.0, 3, 0, 7, base.SEND)
    >>> segments([row, row._replace(time=2.0, action=base.RECEIVE)])
    [Segment(lane=3, kind='compute', start=0.0, end=2.0)]
  """
  work: list[Segment] = []
  started: dict[tuple[int, int], float] = {}
  ends: dict[int, float] = {}  # of the last job, by worker
  last_time = rows[-1].time if rows else 0.0

  def add_job(job_key: tuple[int, int], start: float, end: float) -> None:
    """Adds the segments of the job `job_key`, which is (worker, seq)."""
    computation = computed(*job_key)
    if not computation:
      # A worker with two tickets starts the second job after the first.
      start = max(start, ends.get(job_key[0], start))
      ends[job_key[0]] = end
      work.append(Segment(job_key[0], kind, start, end))
      return
    # The simulated end of a job in progress may be later than `last_time`.
    compute_start, compute_end = (min(time, end) for time in computation)
    fetch = Segment(job_key[0], "wire", start, compute_start)
    push = Segment(job_key[0], "wire", compute_end, end)
    compute = Segment(job_key[0], "compute", compute_start, compute_end)
    work.extend((fetch, compute, push))

  for event in rows:
    if event.action in STARTS:
      started[event.key] = event.time
    elif event.action in ENDS and event.key in started:
      add_job(event.key, started.pop(event.key), event.time)
  for job_key, start in started.items():  # jobs in progress
    add_job(job_key, start, last_time)
  # A ticket that takes no time has no segment on the wire.
  return [segment for segment in work if segment.end > segment.start]


def rows_before(
  trace: base.Trace | Sequence[Event], end: int
) -> Sequence[Event]:
  """Returns the last rows of a trace before row `end`, at most `MAX_ROWS`. The
  trace may be a Trace of columns or a list of rows."""
  start = max(end - MAX_ROWS, 0)
  if isinstance(trace, base.Trace):
    return list(events(trace, start, end))
  return trace[start:end]


def last_lines(path: Path, size: int = 2**14) -> list[str]:
  """Returns the complete lines in the last bytes of a file, which another
  process may be writing; [] if the file does not exist."""
  try:
    with path.open("rb") as file:
      file.seek(max(path.stat().st_size - size, 0))
      is_whole = file.tell() == 0
      # A seek may also cut a character, in the first line, which is dropped.
      text = file.read().decode("utf-8", "replace")
  except FileNotFoundError:
    return []
  # The first line may be cut by the seek, the last one by its writer.
  return text.split("\n")[0 if is_whole else 1 : -1]


def _parse_row(line: str) -> Event | None:
  """Returns the row in a line of a journal; None if the line is no row."""
  try:
    return Event.parse(line)
  except ValueError:  # the header
    return None


def _parse_span(lane: int, line: str) -> Segment | None:
  """Returns the segment of a span in a line; None if the line is no span."""
  try:
    name, start, end, *_ = line.split(",")
    kind = "compute" if name == "compute" else "wire"
    return Segment(lane, kind, float(start), float(end))
  except ValueError:
    return None


def read_work(folder: Path) -> list[Segment]:
  """Returns the last segments of work in the files of a live cell.

  The spans of a worker separate its fetches, computations and pushes. The
  jobs of workers without spans are taken from the journals.
  """
  work: list[Segment] = []
  jobs: dict[tuple[int, float], Segment] = {}
  # [1] spans-W.csv of worker W, a line for each fetch, computation and push
  for path in folder.glob("spans-*.csv"):
    lane = int(path.stem.partition("-")[2])
    spans = (_parse_span(lane, line) for line in last_lines(path))
    work += filter(None, spans)
  lanes_with_spans = {segment.lane for segment in work}
  # [2] trace-S.csv of shard, peer or worker S; sorted, so the lead is first
  for path in sorted(folder.glob("trace-*.csv")):
    rows = list(filter(None, map(_parse_row, last_lines(path))))
    for job in segments(rows, kind="job"):
      # Each shard has rows of a job; only the lead's are used. A job
      # appears twice if its starts at two shards differ by 1 ms or more.
      jobs.setdefault((job.lane, round(job.start, 3)), job)
  jobs_without_spans = (
    job for job in jobs.values() if job.lane not in lanes_with_spans
  )
  return [*work, *jobs_without_spans]


class _Totals:
  """Sums and histograms over messages."""

  def __init__(self) -> None:
    self.messages = self.bytes_up = self.bytes_down = 0
    # Bin b counts the staleness from b * width to (b + 1) * width - 1.
    self.width = 1
    self.staleness = np.zeros(_N_BINS, np.int64)  # int64[_N_BINS]
    self.gap = np.zeros(_N_BINS, np.int64)  # int64[_N_BINS], logarithmic bins

  def add(self, rows: Any) -> int:
    """Adds records to the totals. A missing column counts as 0. Returns the
    bytes of the records' messages, up and down together."""
    bytes_up, bytes_down = (
      int(np.sum(getattr(rows, name, 0))) for name in ("bytes_up", "bytes_down")
    )
    self.messages += len(rows.loss)
    self.bytes_up += bytes_up
    self.bytes_down += bytes_down
    if hasattr(rows, "staleness"):
      self._add_delays(rows)
    return bytes_up + bytes_down

  def _add_delays(self, rows: Any) -> None:
    """Counts staleness and gaps in their bins."""
    # A column may have several values for a message; each counts.
    staleness = np.maximum(rows.staleness.ravel(), 0)
    while staleness.max(initial=0) >= self.width * _N_BINS:
      # Bins of twice the width: two bins become one.
      self.width *= 2
      pairs = self.staleness.reshape(-1, 2).sum(1)
      self.staleness = np.append(pairs, np.zeros_like(pairs))
    self.staleness += np.bincount(staleness // self.width, minlength=_N_BINS)
    gap = rows.gap.ravel()
    # Gaps of 0 and huge ones count in the outer bins. The factor 0.99 prevents
    # that rounding moves a gap beyond the last edge.
    smallest, largest = 10 ** _GAP_RANGE[0], 10 ** _GAP_RANGE[1]
    gap = np.clip(gap[np.isfinite(gap)], smallest, 0.99 * largest)
    self.gap += np.histogram(np.log10(gap), _N_BINS, _GAP_RANGE)[0]

  def content(self) -> dict[str, Any]:
    """Returns the totals as plain data, without empty bins at the end."""
    bins = np.trim_zeros(self.staleness, "b").tolist()
    return {
      "messages": self.messages,
      "bytes": [self.bytes_up, self.bytes_down],
      "staleness": {"width": self.width, "counts": bins},
      "gap": {"range": _GAP_RANGE, "counts": self.gap.tolist()},
    }


class _Point(NamedTuple):
  """A point of the curves: the mean over the messages since the last one."""

  seconds: float  # of training, at the last of the messages
  message: float  # messages received by then
  loss: float
  staleness: float
  nbytes: float  # sent, both ways


class _Losses(NamedTuple):
  """The rows of an engine that gives no records while it trains."""

  loss: npt.NDArray[Any]  # float[k], of the k new messages


def _halved(points: list[_Point]) -> list[_Point]:
  """Merges each two neighbouring points into one, with their means."""
  merged_points: list[_Point] = []
  previous_message = 0.0
  for first, second in zip(points[::2], points[1::2], strict=False):
    # A mean is weighted by the messages that its point stands for.
    weights = first.message - previous_message, second.message - first.message
    weight_sum = max(sum(weights), 1)
    loss, staleness = (
      (weights[0] * a + weights[1] * b) / weight_sum
      for a, b in zip(first[2:4], second[2:4], strict=True)
    )
    nbytes = first.nbytes + second.nbytes
    point = second._replace(loss=loss, staleness=staleness, nbytes=nbytes)
    merged_points.append(point)
    previous_message = second.message
  # If the count is odd, the last point has no partner, and stays as it is.
  return merged_points + points[2 * len(merged_points) :]


def _read_earlier_attempt(
  path: Path, last_message: int
) -> tuple[list[_Point], list[Any]]:
  """Returns (points up to `last_message`, all log lines) of an earlier attempt.
  Both are empty if the file is missing or damaged."""
  content = storage.read_json(path) or {}
  try:
    # JSON has no NaN: `_rounded_rows` wrote null for it.
    rows = [
      [math.nan if x is None else x for x in point]
      for point in content["points"]
    ]
    points = [_Point(*map(float, row)) for row in rows]
    # The engine repeats the messages after its checkpoint.
    return [p for p in points if p.message <= last_message], list(
      content["events"]
    )
  except (KeyError, TypeError, ValueError):
    return [], []


class ProgressFile:
  """Writes progress.json of one cell."""

  def __init__(
    self,
    cell_folder: Path,
    about: Mapping[str, Any],
    engine: engines.Engine,
    lines: list[str] | None = None,
  ):
    """Continues the file of an earlier attempt at the cell.

    Args:
      cell_folder: the folder of the cell.
      about: name, engine and workers of the cell.
      engine: the engine of the cell.
      lines: the list to which the caller appends printed lines. Each write
        moves the lines into the file and empties the list.
    """
    self._path, self._engine = cell_folder / PROGRESS, engine
    self._lines = [] if lines is None else lines
    self._about = {**about, "total": engine.total, "unit": engine.unit}
    self._points, self._log = _read_earlier_attempt(self._path, engine.done)
    # The clock continues at the last point: time between attempts is excluded.
    seconds = self._points[-1].seconds if self._points else 0.0
    self._clock_start = time.monotonic() - seconds
    # In real time, as `advance` sets the cell's clock back after the start-up.
    self._next_write = time.monotonic() + _FIRST_WRITE
    # Time on the engine's clock at the last message; None: it has no clock. A
    # resumed cell without further messages ends at the last point.
    self._engine_seconds = seconds if engine.done else None
    self._totals, self._message = _Totals(), engine.done
    if engine.done:
      self._totals.add(engine.records())
      self._log.append([seconds, f"resumed at message {engine.done}"])
    self._unwritten_rows: list[Any] = []  # rows of records since the last point
    # An engine that reports no work has one lane, with the calls of `advance`.
    self._calls: collections.deque[Segment]
    self._calls = collections.deque(maxlen=_MAX_CALLS)

  def advance(self, until: int) -> engines.Progress:
    """Advances the engine, counts its progress, and returns it."""
    start = time.monotonic() - self._clock_start
    progress: engines.Progress = self._engine.advance(until)
    if progress.seconds is not None:
      # Records of several writers are not read in order of time: never go back.
      seconds = max(progress.seconds, self._engine_seconds or 0.0)
      self._engine_seconds = seconds
      # The start-up of the workers does not count: the clock continues here.
      self._clock_start = time.monotonic() - seconds
    elif progress.messages:
      self._engine_seconds = None
    end = time.monotonic() - self._clock_start
    if progress.messages:
      self._unwritten_rows.append(progress.rows or _Losses(progress.loss))
      self._calls.append(Segment(0, "compute", start, end))
    if time.monotonic() >= self._next_write:
      self._write(end)
    return progress

  def finish(self) -> None:
    """Writes the file of a finished cell, with the totals of all records."""
    seconds = self._engine_seconds
    if seconds is None:
      seconds = time.monotonic() - self._clock_start
    self._add_point(seconds)
    # During training an engine may report losses alone. Records are complete
    # only now, so all totals are counted again.
    self._totals = _Totals()
    self._totals.add(self._engine.records())
    self._write(seconds)

  def _add_point(self, seconds: float) -> None:
    """Adds a point for the rows since the last point, if there are any."""
    rows, self._unwritten_rows = self._unwritten_rows, []
    if not rows:
      return
    losses = _joined_column(rows, "loss")
    staleness = _joined_column(rows, "staleness")
    nbytes = sum(map(self._totals.add, rows))
    self._message += len(losses)
    means = engines.mean(losses), engines.mean(staleness)
    self._points.append(_Point(seconds, self._message, *means, nbytes))
    if len(self._points) > _MAX_POINTS:
      self._points = _halved(self._points)

  def _write(self, seconds: float) -> None:
    """Writes the file."""
    write_began = time.monotonic()
    # [1] The curves, and the lines since the last write.
    self._add_point(seconds)
    self._log += [[seconds, line] for line in self._lines]
    self._lines.clear()
    self._log = self._log[-_MAX_LOG_LINES:]
    # [2] The last segments of work, of the first workers.
    work = self._engine.work() or list(self._calls)
    work = [segment for segment in work if segment.lane < _MAX_LANES]
    work.sort(key=lambda segment: segment.end)
    content = {
      **self._about,
      "seconds": seconds,
      **self._totals.content(),
      "points": _rounded_rows(self._points),
      "work": _rounded_rows(work[-_MAX_SEGMENTS:]),
      "events": _rounded_rows(self._log),
    }
    with contextlib.suppress(OSError):  # the run does not need this file
      safe_files.write(self._path, json.dumps(content, allow_nan=False))
    # [3] Pause so long that writes take at most 1 % of the time.
    write_ended = time.monotonic()
    write_seconds = write_ended - write_began
    pause = max(_INTERVAL, _PAUSE_FACTOR * write_seconds)
    self._next_write = write_ended + pause


def _joined_column(parts: Sequence[Any], column: str) -> npt.NDArray[Any]:
  """Returns a column of several records, joined; empty if they lack it."""
  columns = [np.ravel(getattr(records, column, ())) for records in parts]
  return np.concatenate(columns)


def _rounded_rows(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
  """Returns rows with floats of four digits after the point; None stands for a
  float that is not finite."""

  def rounded(value: Any) -> Any:
    if not isinstance(value, float):
      return value
    return round(value, 4) if math.isfinite(value) else None

  return [list(map(rounded, row)) for row in rows]
