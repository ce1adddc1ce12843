"""Spans and faults of a worker on another machine: the lead writes them.

The files of a run are on the driver's machine, as is the lead. Times in the
files are by the lead's clock; the worker's machine has another clock. The
worker asks for the lead's time now and then, and converts its spans. One offset
moves all spans of a job, so durations are exact. The error of a start is at
most half the time of the quickest answer: 0.5 ms if a Ray call takes 1 ms.

If a lead exits before it has acknowledged spans, the worker sends them to its
successor. If the lead had written them, they are in the file twice.
"""

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from asgd.live.faults import Fault
from asgd.live.spans import Span

_FIRST_QUESTIONS = 5  # for the lead's time, before the first spans
_ASK_SECONDS = 5.0  # between two questions after that
_PAUSE = 0.2  # seconds between two tries
_ANSWER_SECONDS = 60.0  # until a call counts as failed
_CLOSE_SECONDS = 10.0  # at the end, for spans that the lead does not have
_MAX_DRIFT = 1e-4  # seconds by which two clocks drift apart in a second


class ClockOffset:
  """The offset of another machine's clock from the local one, within bounds.

  A monotonic clock counts from another moment on each machine. The other clock
  was read after the question left and before the answer arrived:

    local clock     asked ------------------ answered
    other clock               other_time

    other_time - answered <= offset <= other_time - asked

  The offset satisfies the bounds of all questions, so the quickest answer
  counts most. Older bounds widen by the usual drift between clocks. If answers
  contradict each other, a clock stood still or drifted more. Then only the last
  answer counts.
  """

  def __init__(self) -> None:
    self._low, self._high = float("-inf"), float("inf")
    self._last_answer_time = 0.0  # by the local clock

  def add_answer(
    self, asked: float, other_time: float, answered: float
  ) -> None:
    """Adds the answer to a question.

    Args:
      asked: local time of the question, in seconds.
      other_time: time of the other clock, in seconds.
      answered: local time of the answer, in seconds.
    """
    # [1] The bounds so far may be wrong by the drift since the last answer.
    drift = _MAX_DRIFT * max(answered - self._last_answer_time, 0.0)
    low, high = other_time - answered, other_time - asked
    # [2] Intersect them with the bounds of this answer.
    self._low = max(self._low - drift, low)
    self._high = min(self._high + drift, high)
    # [3] An empty intersection: one of the clocks jumped.
    if self._low > self._high:
      self._low, self._high = low, high
    self._last_answer_time = answered

  @property
  def seconds(self) -> float:
    """Other clock minus local clock: the middle of the bounds; NaN before the
    first answer."""
    return (self._low + self._high) / 2

  @property
  def error(self) -> float:
    """Half the width of the bounds at the last answer, in seconds; infinite
    before the first."""
    return (self._high - self._low) / 2


class RemoteNotes:
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
    import ray  # workers on the driver's machine run without it

    self._ray, self._worker, self._find_lead = ray, worker, find_lead
    self._clock, self._wait = clock, wait
    self._lead: Any = None  # the lead's actor; None: to be looked up
    self._offset = ClockOffset()
    self._last_question_time = float("-inf")  # by the worker's clock
    self._job_spans: list[Span] = []  # of the present job, by its clock
    # One thread: the spans of jobs are sent in their order.
    self._pool = futures.ThreadPoolExecutor(1, "notes")
    self._calls: list[futures.Future[None]] = []  # not ended yet
    self._closed = False

  def add_span(self, span: Span) -> None:
    """Adds a span of the worker. A push is a job's last span: with it the job's
    spans are sent, in another thread. Raises the error by which the lead failed
    to write earlier spans."""
    self._job_spans.append(span)
    if span.name == "push":
      self._drop_ended_calls()
      self._calls.append(self._pool.submit(self._send, self._job_spans))
      self._job_spans = []

  def send_fault(self, fault: Fault) -> None:
    """Sends a fault, and returns when the lead has written it: the fault may
    then end this process."""
    self._call("write_fault", fault)

  def close(self) -> None:
    """Waits until the lead has written all spans, for `_CLOSE_SECONDS` at most.
    Raises the error by which the lead failed to write some."""
    futures.wait(self._calls, _CLOSE_SECONDS)
    try:
      self._drop_ended_calls()
    finally:
      # Ends the tries of a call to a lead that has no successor.
      self._closed = True
      self._pool.shutdown(wait=False, cancel_futures=True)

  def _drop_ended_calls(self) -> None:
    """Drops the calls that have ended. Raises the error of a call that
    failed."""
    ended_calls = [call for call in self._calls if call.done()]
    for call in ended_calls:
      call.result()
    self._calls = [call for call in self._calls if call not in ended_calls]

  def _send(self, job_spans: list[Span]) -> None:
    """Converts the spans of a job to the lead's time, and sends them to the
    lead, which writes them."""
    if self._clock() - self._last_question_time > _ASK_SECONDS:
      has_answer = self._offset.error < float("inf")
      for _ in range(1 if has_answer else _FIRST_QUESTIONS):
        asked = self._clock()
        lead_time = self._call("clock")
        self._offset.add_answer(asked, lead_time, self._clock())
      self._last_question_time = self._clock()
    offset = self._offset.seconds
    spans = [
      span._replace(start=span.start + offset, end=span.end + offset)
      for span in job_spans
    ]
    self._call("write_spans", self._worker, spans)

  def _call(self, name: str, *args: Any) -> Any:
    """Returns the answer of the lead, or of its successor if the lead exits."""
    while not self._closed:
      try:
        self._lead = self._lead or self._find_lead()
        ref = self._lead.call.remote(name, args)
        return self._ray.get(ref, timeout=_ANSWER_SECONDS)
      except self._ray.exceptions.RayTaskError as error:
        # Such as a full disk, which the successor would have as well.
        raise error.cause from error
      except (ValueError, self._ray.exceptions.RayError):
        # There is no lead now: the supervisor starts its successor.
        self._lead = None
        self._wait(_PAUSE)
    raise futures.CancelledError
