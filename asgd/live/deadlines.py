"""Deadlines of workers: one ladder.

  T = median + k MAD of the durations of the last jobs, at least `floor`

  up to T       waiting
  T to 3 T      late: the worker is only reported; its machine may be slow
  beyond 3 T    dead: its ticket is lost, its job goes to another worker, and
                the cluster replaces it

The durations are those of all workers: in a cluster of fast and slow machines
the MAD grows with the difference. Before five jobs have ended, T is `start`
seconds, which must cover compiling.
"""

import collections
import numbers
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from asgd import base
from asgd.orders.trace import STARTS, Event

_FEW = 5  # count of ended jobs from which their times are used
DEAD = 3.0  # a worker counts as dead after this multiple of T
_SIGMA = 1.4826  # MAD to standard deviation, of a normal distribution


class Ladder(NamedTuple):
  """Settings; a config has the first three."""

  k: float = 10.0  # in MADs, scaled to standard deviations
  floor: float = 2.0  # seconds
  start: float = 120.0  # seconds
  window: int = 128  # count of the latest jobs whose durations are used


MOST_SECONDS = 1e9  # seconds that a clock can count
_KEYS = {"k": "late_mads", "floor": "late_seconds", "start": "start_seconds"}


class Deadlines:
  """Watches how long jobs take."""

  def __init__(self, ladder: Ladder):
    """Raises ValueError for a setting that is no positive number up to 1e9."""
    for name, value in ladder._asdict().items():
      number = isinstance(value, numbers.Real) and not isinstance(value, bool)
      if not number or not 0 < value <= MOST_SECONDS:
        key = f" (live.{_KEYS[name]})" if name in _KEYS else ""
        raise ValueError(
          f"{name}{key} must be a positive number, at most {MOST_SECONDS:g},"
          f" not {value!r}"
        )
    self._ladder = ladder
    self._times = collections.deque(maxlen=ladder.window)
    self._late: float | None = None

  def ended(self, seconds: float) -> None:
    """Takes the duration of a job."""
    self._times.append(seconds)
    self._late = None

  @property
  def late(self) -> float:
    """T, in seconds."""
    if len(self._times) < _FEW:
      return self._ladder.start
    if self._late is None:
      median = statistics.median(self._times)
      mad = statistics.median(abs(x - median) for x in self._times)
      seconds = median + self._ladder.k * _SIGMA * mad
      self._late = max(seconds, 3 * median, self._ladder.floor)
    return self._late

  @property
  def dead(self) -> float:
    """Seconds after which a worker counts as dead."""
    return DEAD * self.late


class WorkerWatch:
  """Watches the workers of a run by the deadlines of a ladder."""

  def __init__(self, ladder: Ladder, now: float):
    self._deadlines = Deadlines(ladder)
    # When the shard started: no worker could send it a message or join before.
    self.started = now
    # Worker -> since when it has no connection.
    self._missing: dict[int, float] = {}
    self.last_alive: dict[int, float] = {}  # worker -> its last sign of life
    self.late: set[int] = set()  # workers between T and 3 T

  def ended(self, began: float, now: float) -> None:
    """Takes the start and the end of a job."""
    self._deadlines.ended(now - max(began, self.started))

  def learn(self, events: Iterable[Event]) -> None:
    """Takes the durations of a journal's jobs, after a restart: in a run that
    hangs, few further jobs end."""
    began = {}
    for event in events:
      if event.action in STARTS:
        began[event.key] = event.time
      elif event.action == base.RECEIVE:
        self._deadlines.ended(event.time - began[event.key])

  def overdue(
    self,
    begun: Mapping[int, Sequence[float]],
    present: Collection[int],
    now: float,
  ) -> list[int]:
    """Returns the workers that count as dead, and updates `late`.

    Args:
      begun: worker -> times at which its open tickets were sent.
      present: workers with a connection.
      now: seconds since the run began.
    """
    late, dead = self._deadlines.late, self._deadlines.dead
    ages = {}
    for worker, times in begun.items():
      # A worker computes its open tickets one after the other, so the time is
      # divided by their count.
      alive = self.last_alive.get(worker, self.started)
      age = (now - max(min(times, default=now), alive)) / max(len(times), 1)
      if worker in present:
        self._missing.pop(worker, None)
      else:
        age = max(age, now - self._missing.setdefault(worker, now))
      ages[worker] = age
    lost = [worker for worker, age in ages.items() if age > dead]
    for worker in lost:
      self._missing.pop(worker, None)
    self.late = {worker for worker, age in ages.items() if late < age <= dead}
    return lost
