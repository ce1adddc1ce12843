"""Spans and faults of a worker on another machine: the lead writes them.

The files of a run are on the driver's machine, as is the lead, and its times
are by the lead's clock. A worker elsewhere has another clock: it asks for the
lead's now and then, and sends spans in the lead's time. One offset moves all
spans of a job, so durations are exact. Their starts are exact to half of the
quickest question, half a millisecond where a call of Ray takes one.

Spans that a lead has not acknowledged go to its successor, so a lead that exits
loses none; those that it wrote last are then in the file twice.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from asgd.live.faults import Fault
from asgd.live.spans import Span

_FIRST = 5  # questions for the lead's clock before there is anything to tell
_ASK = 5.0  # seconds between two questions after that
_PAUSE = 0.2  # seconds between two tries
_SECONDS = 60.0  # for an answer
_MOMENT = 1.0  # for one that can do without: a lead that is being replaced
_LEAVE = 10.0  # seconds, at the end, for spans that the lead does not have
_DRIFT = 1e-4  # seconds that two clocks drift apart in a second, at most


class ClockOffset:
  """The offset of another machine's clock from ours, within bounds.

  A monotonic clock counts from another moment on each machine. The other clock
  was read after the question left and before the answer came:

    ours     asked ------------------ answered
    theirs             there                       there - answered
                                                     <= offset <= there - asked

  The bounds of several questions hold together: the quickest answer counts
  most. They widen by the drift of usual clocks. If answers contradict each
  other, a clock stood still or drifted more: then the last one alone counts.
  """

  def __init__(self):
    self._low, self._high = float("-inf"), float("inf")
    self._learned = 0.0  # by our clock

  def learn(self, asked: float, there: float, answered: float) -> None:
    """Takes the time of the other clock, and ours at the question and at the
    answer; in seconds."""
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
    """Half the width of the bounds at the last answer, in seconds; infinite
    before the first."""
    return (self._high - self._low) / 2


class FarNotes:
  """Sends the spans and faults of one worker to the lead's actor."""

  def __init__(
    self,
    worker: int,
    find_lead: Callable[[], Any],
    *,
    clock: Callable[[], float],
    wait: Callable[[float], None] = time.sleep,
  ):
    """`find_lead` returns the actor of the lead, and raises ValueError while
    there is none; `clock` is that of the worker's spans, in seconds."""
    import ray

    self._ray, self._worker, self._find_lead = ray, worker, find_lead
    self._clock, self._wait = clock, wait
    self._lead: Any = None
    self._offset, self._asked = ClockOffset(), float("-inf")
    self._job: list[Span] = []  # by the worker's clock
    self._untold: list[Span] = []  # by the lead's
    self._told: tuple[Any, list[Span]] | None = None  # a call, and what it says

  def span(self, span: Span) -> None:
    """Takes a span of the worker; a push ends a job, and its spans are sent.
    The lead is waited for only while its clock is not known."""
    self._job.append(span)
    if span.name != "push":
      return
    if self._clock() - self._asked > _ASK:
      self._ask_time()
    offset = self._offset.seconds
    self._untold += [
      span._replace(start=span.start + offset, end=span.end + offset)
      for span in self._job
    ]
    self._job.clear()
    self._tell()

  def fault(self, fault: Fault) -> None:
    """Returns when the lead has written a fault, which may end this process."""
    while self._call("write_fault", fault) is None:
      self._wait(_PAUSE)

  def close(self) -> None:
    """Waits a moment until the lead has written all spans."""
    end = self._clock() + _LEAVE
    while self._told or self._untold:
      self._tell()
      if self._clock() > end:
        return
      if self._told:
        self._ray.wait([self._told[0]], timeout=_PAUSE)
      elif self._untold:  # there is no lead
        self._wait(_PAUSE)

  def _ask_time(self):
    """Learns the offset of the lead's clock."""
    known = self._offset.error < float("inf")
    left = 1 if known else _FIRST
    while left:
      asked = self._clock()
      there = self._call("clock", seconds=_MOMENT)
      if there is not None:
        self._offset.learn(asked, there[0], self._clock())
        left -= 1
      elif known:
        return  # the lead is being replaced: there is time for that
      else:
        self._wait(_PAUSE)
    self._asked = self._clock()

  def _actor(self):
    if self._lead is None:
      with contextlib.suppress(ValueError):
        self._lead = self._find_lead()
    return self._lead

  def _call(self, name, *args, seconds=_SECONDS):
    """Returns (answer,) of the lead, None if it does not answer now."""
    if self._actor() is None:
      return None
    return self._answer(self._lead.call.remote(name, args), seconds)

  def _answer(self, ref, seconds=_SECONDS):
    try:
      return (self._ray.get(ref, timeout=seconds),)
    except self._ray.exceptions.RayTaskError:
      raise  # such as a full disk, which another lead has as well
    except self._ray.exceptions.RayError:
      self._lead = None
      return None

  def _tell(self):
    """Sends spans in the order of jobs: one call after the other."""
    if self._told:
      ref, spans = self._told
      if not self._ray.wait([ref], timeout=0)[0]:
        return
      self._told = None
      if self._answer(ref) is None:
        self._untold = spans + self._untold
    if self._untold and self._actor() is not None:
      spans, self._untold = self._untold, []
      ref = self._lead.call.remote("write_spans", (self._worker, spans))
      self._told = ref, spans
