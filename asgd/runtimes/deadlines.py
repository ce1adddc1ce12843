"""When a worker is late, and when it is taken for dead: one ladder.

  T = median + k MAD of the times that jobs took lately, at least `floor`

  up to T       waiting
  T to 3 T      late: said, and nothing done; it may be a slow machine
  beyond 3 T    dead: its ticket dies, its job goes to another worker, and who
                watches over the workers replaces it

The times are of all workers together: in a cluster of fast and slow machines
the MAD grows with the difference. Before five jobs have ended, T is `start`,
which must cover compiling.
"""

import collections
import statistics
from typing import NamedTuple

_FEW = 5  # jobs that must have ended before their times mean something
DEAD = 3.0  # times T
_SIGMA = 1.4826  # MAD to standard deviation, of a normal distribution


class Ladder(NamedTuple):
  """Settings."""

  k: float = 10.0  # in MADs, scaled to standard deviations
  floor: float = 2.0  # seconds
  start: float = 120.0  # seconds
  window: int = 128  # jobs looked back at


class Deadlines:
  """Watches how long jobs take."""

  def __init__(self, ladder: Ladder):
    """Starts knowing nothing.

    Raises:
      ValueError: for settings that are not positive.
    """
    for name, value in ladder._asdict().items():
      if not value > 0:
        raise ValueError(f"{name} must be positive, not {value!r}")
    self._ladder = ladder
    self._times = collections.deque(maxlen=ladder.window)
    self._late: float | None = None

  def ended(self, seconds: float) -> None:
    """A job took so long."""
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
    """When a worker is given up, in seconds."""
    return DEAD * self.late
