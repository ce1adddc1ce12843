"""What a worker on another machine writes down: the lead does it for it.

The files of a run are on the driver's machine, as is the lead, and its times
are by the lead's clock. A worker elsewhere keeps its own clock, asks now and
then what the lead's shows, and tells the lead what it did when in the lead's
time. All stretches of a job are moved by one offset, so how long they took is
exact. When they began is exact to half of the quickest of its questions, which
is half a millisecond where a call of Ray takes one.

A lead that dies loses nothing of this: what it has not acknowledged is told to
its successor. What it wrote as it died is then there twice.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from asgd.live.clocks import ClockOffset
from asgd.live.faults import Fault
from asgd.live.spans import Span

_FIRST = 5  # questions for the lead's clock before there is anything to tell
_ASK = 5.0  # seconds between two questions after that
_PAUSE = 0.2  # seconds between two tries
_SECONDS = 60.0  # for an answer
_MOMENT = 1.0  # for one that can do without: a lead that is being replaced
_LEAVE = 10.0  # seconds, at the end, to tell what was not told


class FarNotes:
  """Tells the lead's actor what one worker did."""

  def __init__(
    self,
    worker: int,
    find_lead: Callable[[], Any],
    *,
    clock: Callable[[], float],
    wait: Callable[[float], None] = time.sleep,
  ):
    """`find_lead` returns the actor that is the lead now, and raises ValueError
    while there is none; the clock is the one that the worker's stretches of
    time are by, in seconds."""
    import ray

    self._ray, self._worker, self._find_lead = ray, worker, find_lead
    self._clock, self._wait = clock, wait
    self._lead: Any = None
    self._offset, self._asked = ClockOffset(), float("-inf")
    self._job: list[Span] = []  # by the worker's clock
    self._untold: list[Span] = []  # by the lead's
    self._told: tuple[Any, list[Span]] | None = None  # a call, and what it says

  def span(self, span: Span) -> None:
    """Takes a stretch of the worker's time; a push ends a job, and the lead is
    told. It is waited for only while its clock is not known."""
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
    """Has a fault written down; returns when it is, as it may end this
    process."""
    while self._call("write_fault", fault) is None:
      self._wait(_PAUSE)

  def close(self) -> None:
    """Waits a moment for what was told to be written."""
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
    """Learns what the lead's clock shows."""
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
    """Returns (answer,) of the lead, None if it cannot be had now."""
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
    """Tells what there is, one call after the other: in the order of jobs."""
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
