"""Deadlines of workers: when a job is late, and when its worker is dead.

  T = median + k MAD of the durations of the last jobs,
      at least 3 medians, at least `floor` seconds

  job takes up to T    waiting
  T to 3 T             late: the worker is only reported; it may be slow
  more than 3 T        dead: its ticket is lost, its job goes to another worker,
                       and the cluster replaces it

MAD is the median of the absolute deviations from the median. The durations of
all workers count: in a cluster of fast and slow machines the MAD grows with
the difference. Before five jobs have ended, T is `start` seconds, which must
cover compiling.
"""

import collections
import numbers
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from asgd import base
from asgd.orders.trace import STARTS, Event

_MIN_JOBS = 5  # ended jobs that T can be computed from
DEAD_FACTOR = 3.0  # a worker counts as dead after this multiple of T
_MAD_TO_DEVIATION = 1.4826  # standard deviation / MAD, of normal distributions


class Ladder(NamedTuple):
  """Settings of the deadlines; a config has the first three."""

  k: float = 10.0  # in MADs, scaled to standard deviations
  floor: float = 2.0  # least T, in seconds
  start: float = 120.0  # T before five jobs have ended, in seconds
  window: int = 128  # number of latest durations that are used


MOST_SECONDS = 1e9  # seconds that a clock can count
# Field of `Ladder` -> key of a config, for errors.
_KEYS = {"k": "late_mads", "floor": "late_seconds", "start": "start_seconds"}


class Deadlines:
  """Watches how long jobs take."""

  def __init__(self, ladder: Ladder):
    """Raises ValueError for a setting that is not a number above 0 and at most
    1e9."""
    for name, value in ladder._asdict().items():
      is_number = isinstance(value, numbers.Real)
      is_number = is_number and not isinstance(value, bool)
      if not is_number or not 0 < value <= MOST_SECONDS:
        key = f" (live.{_KEYS[name]})" if name in _KEYS else ""
        raise ValueError(
          f"{name}{key} must be a positive number, at most {MOST_SECONDS:g},"
          f" not {value!r}"
        )
    self._ladder = ladder
    # Seconds of the latest jobs.
    self._durations: collections.deque[float] = collections.deque(
      maxlen=ladder.window
    )
    # T; None: to be computed.
    self._cached_late_after: float | None = None

  def add_job(self, seconds: float) -> None:
    """Adds the duration of an ended job."""
    self._durations.append(seconds)
    self._cached_late_after = None

  @property
  def late_after(self) -> float:
    """Seconds after which a job is late: T."""
    if len(self._durations) < _MIN_JOBS:
      return self._ladder.start
    if self._cached_late_after is None:
      median = statistics.median(self._durations)
      mad = statistics.median(abs(x - median) for x in self._durations)
      seconds = median + self._ladder.k * _MAD_TO_DEVIATION * mad
      # If durations are nearly equal, the MAD is near 0.
      self._cached_late_after = max(seconds, 3 * median, self._ladder.floor)
    return self._cached_late_after

  @property
  def dead_after(self) -> float:
    """Seconds of a job after which its worker counts as dead."""
    return DEAD_FACTOR * self.late_after


class WorkerWatch:
  """Watches the workers of a run by the deadlines of a ladder."""

  def __init__(self, ladder: Ladder, now: float):
    self._deadlines = Deadlines(ladder)
    # The time at which the shard started. No worker could join it, or send it
    # a message, before.
    self.started_at = now
    # Worker -> time since which the worker has no connection.
    self._missing_since: dict[int, float] = {}
    self.last_alive: dict[int, float] = {}  # worker -> its last sign of life
    self.late_workers: set[int] = set()  # silent for more than T, up to 3 T

  def add_job(self, start_time: float, now: float) -> None:
    """Adds an ended job, by its start and its end, in seconds since the run
    began."""
    # A predecessor of the shard may have started the job.
    self._deadlines.add_job(now - max(start_time, self.started_at))

  def add_journal(self, events: Iterable[Event]) -> None:
    """Adds the jobs of a journal, after a restart of the shard. If a run hangs,
    too few jobs end after the restart to compute a deadline from them."""
    start_times = {}
    for event in events:
      if event.action in STARTS:
        start_times[event.key] = event.time
      elif event.action == base.RECEIVE:
        self._deadlines.add_job(event.time - start_times[event.key])

  def find_dead(
    self,
    start_times: Mapping[int, Sequence[float]],
    present: Collection[int],
    now: float,
  ) -> list[int]:
    """Returns the workers that count as dead, and updates `late_workers`.

    Args:
      start_times: worker -> times at which its open tickets were sent.
      present: workers with a connection.
      now: seconds since the run began.
    """
    late_after = self._deadlines.late_after
    dead_after = self._deadlines.dead_after
    # Worker -> seconds without a sign of life, divided by its open tickets.
    silences = {}
    for worker, times in start_times.items():
      # A worker computes its open tickets one after the other, so the time is
      # divided by the number of tickets.
      last_sign = self.last_alive.get(worker, self.started_at)
      silent_since = max(min(times, default=now), last_sign)
      silence = (now - silent_since) / max(len(times), 1)
      if worker in present:
        self._missing_since.pop(worker, None)
      else:
        missing_since = self._missing_since.setdefault(worker, now)
        silence = max(silence, now - missing_since)
      silences[worker] = silence
    dead_workers = [
      worker for worker, silence in silences.items() if silence > dead_after
    ]
    for worker in dead_workers:  # the silence of its successor counts from 0
      self._missing_since.pop(worker, None)
    self.late_workers = {
      worker
      for worker, silence in silences.items()
      if late_after < silence <= dead_after
    }
    return dead_workers
