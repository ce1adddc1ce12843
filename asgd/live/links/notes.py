"""Spans and faults of a worker on another machine: the lead writes them.

The files of a run are on the driver's machine, as is the lead, and its times
are by the lead's clock. A worker elsewhere has another clock: it asks for the
lead's now and then, and sends spans in the lead's time. One offset moves all
spans of a job, so durations are exact. Their starts are exact to half of the
quickest question, half a millisecond where a call of Ray takes one.

Spans that a lead has not acknowledged go to its successor, so a lead that exits
loses none; those that it wrote last are then in the file twice.
"""

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from asgd.live.faults import Fault
from asgd.live.spans import Span

_FIRST = 5  # questions for the lead's clock before the first note
_ASK = 5.0  # seconds between two questions after that
_PAUSE = 0.2  # seconds between two tries
_SECONDS = 60.0  # for an answer
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
    self._clock, self._wait, self._lead = clock, wait, None
    self._offset, self._asked = ClockOffset(), float("-inf")
    self._job: list[Span] = []  # by the worker's clock
    self._pool = futures.ThreadPoolExecutor(1, "notes")
    self._sent: list[futures.Future[None]] = []
    self._over = False

  def span(self, span: Span) -> None:
    """Takes a span of the worker; a push ends a job, and its spans are sent
    while the worker continues. Raises the lead's error about earlier ones."""
    self._job.append(span)
    if span.name == "push":
      self._sent = [call for call in self._sent if not _has_ended(call)]
      self._sent.append(self._pool.submit(self._send, self._job))
      self._job = []

  def fault(self, fault: Fault) -> None:
    """Returns when the lead has written a fault, which may end this process."""
    self._call("write_fault", fault)

  def close(self) -> None:
    """Waits a moment until the lead has written all spans."""
    futures.wait(self._sent, _LEAVE)
    self._sent = [call for call in self._sent if not _has_ended(call)]
    self._over = True
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _send(self, job):
    """Has the lead write the spans of a job, in its time."""
    if self._clock() - self._asked > _ASK:
      for _ in range(1 if self._offset.error < float("inf") else _FIRST):
        asked = self._clock()
        there = self._call("clock")
        self._offset.learn(asked, there, self._clock())
      self._asked = self._clock()
    offset = self._offset.seconds
    spans = [
      span._replace(start=span.start + offset, end=span.end + offset)
      for span in job
    ]
    self._call("write_spans", self._worker, spans)

  def _call(self, name, *args):
    """Returns the answer of the lead, or of its successor if it exits."""
    while not self._over:
      try:
        self._lead = self._lead or self._find_lead()
        ref = self._lead.call.remote(name, args)
        return self._ray.get(ref, timeout=_SECONDS)
      except self._ray.exceptions.RayTaskError:
        raise  # such as a full disk, which another lead has as well
      except (ValueError, self._ray.exceptions.RayError):
        self._lead = None
        self._wait(_PAUSE)
    raise futures.CancelledError


def _has_ended(call):
  return call.done() and call.result() is None
