"""Clocks of two machines: what one shows when the other shows something.

A monotonic clock counts from a moment of its own on each machine, so times of
two machines cannot be subtracted. What they differ by is measured by asking:
the other machine's clock was read after the question left and before the answer
came.

  ours     asked ------------------ answered
  theirs             there                       there - answered
                                                   <= offset <= there - asked
"""

_DRIFT = 1e-4  # seconds that two clocks go apart in a second, at most


class ClockOffset:
  """What is to be added to our clock for another machine's, within bounds.

  The bounds hold whichever way is slower, and those of several questions hold
  together: the quickest answer counts most. They widen with time by the drift
  of usual clocks. Answers that contradict each other tell that a clock stood
  still or was faster than that: then the last one alone counts.
  """

  def __init__(self):
    self._low, self._high = float("-inf"), float("inf")
    self._learned = 0.0  # by our clock

  def learn(self, asked: float, there: float, answered: float) -> None:
    """Takes the other clock, and ours when it was asked and when it had
    answered; in seconds."""
    drift = _DRIFT * max(answered - self._learned, 0.0)
    low, high = there - answered, there - asked
    self._low = max(self._low - drift, low)
    self._high = min(self._high + drift, high)
    if self._low > self._high:
      self._low, self._high = low, high
    self._learned = answered

  @property
  def seconds(self) -> float:
    """The middle of the bounds; NaN before the first answer."""
    return (self._low + self._high) / 2

  @property
  def error(self) -> float:
    """How far the truth may be from that when the last answer came, in seconds;
    infinite before the first."""
    return (self._high - self._low) / 2
