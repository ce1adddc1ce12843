"""Checks that a trace can be replayed: finds the rows that protocols forbid."""

import math
from collections.abc import Iterable

import numpy as np

from asgd import base
from asgd.orders.trace import (
  BEGUN,
  ENDS,
  LATEST,
  NO_SEQ,
  PUTS,
  STARTS,
  TAKES,
  Event,
  Ledger,
  events,
  pair,
)

_MOST = np.iinfo(np.int32).max


def check(
  trace: base.Trace | Iterable[Event],
  depth: float = 1,
  *,
  path: object = None,
) -> int:
  """Checks that a trace can be replayed and returns its number of workers, N.

  Args:
    trace: columns, or rows.
    depth: tickets that a worker may hold at once.
    path: of the rows' file, for errors.

  Raises:
    TraceError: for the first wrong row, naming it (of a file, its line).

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=1, messages=3)
    >>> orders.check(trace)
    2
    >>> try:
    ...   orders.check(trace._replace(worker=trace.worker * 0))
    ... except orders.trace.TraceError as error:
    ...   print(f"row {error.row}: {error.why}")
    row 1: the worker has begun that number (seq) before
  """
  if isinstance(trace, base.Trace) and _is_right(trace, depth):
    return int(trace.worker.max(initial=-1)) + 1
  # The check row by row names the wrong row, and covers all actions.
  ledger: Ledger[Event] = Ledger(path=path)
  workers = 0
  for event in events(trace) if isinstance(trace, base.Trace) else trace:
    if why := _forbidden(ledger, event, depth):
      ledger.refuse(event, why)
    ledger.apply(event)
    workers = max(workers, event.worker + 1)
  return workers


def _is_right(trace: base.Trace, depth: float) -> bool:
  """Whether a trace of SEND, KEEP and RECEIVE rows is right, by NumPy: False
  also where only the check row by row can decide."""
  time, worker, seq, job, _ = trace
  whole = np.stack([worker, job])
  if len(time) and not (time[0] >= 0 and time[-1] <= LATEST):
    return False
  if not ((time[1:] >= time[:-1]).all() and (seq >= 0).all()):
    return False
  pairs = pair(trace)
  if pairs is None or not ((whole >= 0) & (whole <= _MOST)).all():
    return False
  starts, ends, _ = pairs
  if depth >= len(starts):
    return True
  # The ticket `depth` before in the worker's order has ended.
  of_start, of_end = worker[starts], worker[ends]
  place = np.arange(len(starts)) - np.searchsorted(of_start, of_start)
  later = np.flatnonzero(place >= math.ceil(depth))
  first = np.searchsorted(of_end, of_start[later])
  ended = first + place[later] - math.ceil(depth)
  if len(ended) and ended.max() >= len(ends):
    return False
  mine = of_end[ended] == of_start[later]
  return bool((mine & (ends[ended] < starts[later])).all())


def _forbidden(
  ledger: Ledger[Event], event: Event, depth: float
) -> str | None:
  """Returns why a protocol forbids a row that the ledger would accept, or
  None."""
  time, worker, seq, job, action, *_ = event
  tickets = ledger.open[worker]
  if not 0 <= time <= LATEST:
    return f"time must be finite, 0 or more and at most {LATEST:g}"
  if not (0 <= worker <= _MOST and 0 <= job <= _MOST):
    return f"worker and job must be from 0 to {_MOST}"
  if time < ledger.time:
    return f"time is before that of the last row, {ledger.time}"
  if action in STARTS:
    if worker in ledger.ended:
      return "the worker has left and did not join again"
    if seq < ledger.next_seq.get(worker, 0):
      return BEGUN
    if len(tickets) >= depth:
      return "the worker holds a ticket already"
  elif action in ENDS and seq in tickets:
    if tickets[seq].job != job:
      return "that job was not sent to the worker"
    first = next(iter(tickets))
    if action == base.RECEIVE and (seq != first or worker in ledger.ended):
      return "the worker's jobs end in their order"
  elif action in (base.JOIN, base.LEAVE) and tickets:
    return "the worker still holds a ticket"
  elif action in (*PUTS, *TAKES, base.MIX) and worker in ledger.ended:
    return "the peer has left and did not join again"
  elif action in TAKES:
    if job == worker:  # `job` is the other peer
      return "a peer is not its own neighbour"
    if seq <= ledger.taken.get((worker, job), NO_SEQ):
      return "the peer has taken that message, or a later one, already"
  return None
