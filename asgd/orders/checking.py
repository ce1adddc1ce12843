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

_MAX_INDEX = np.iinfo(np.int32).max


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
    path: file of the rows, for errors.

  Raises:
    TraceError: if a row is wrong. It names the first such row, or with `path`
      the line in the file.

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
  if isinstance(trace, base.Trace) and _is_valid(trace, depth):
    return int(trace.worker.max(initial=-1)) + 1
  # The check row by row names the wrong row, and covers all actions.
  ledger: Ledger[Event] = Ledger(path=path)
  workers = 0
  for event in events(trace) if isinstance(trace, base.Trace) else trace:
    if reason := _find_violation(ledger, event, depth):
      ledger.refuse(event, reason)
    ledger.apply(event)
    workers = max(workers, event.worker + 1)
  return workers


def _is_valid(trace: base.Trace, depth: float) -> bool:
  """Checks a trace of SEND, KEEP and RECEIVE rows by NumPy. Returns True if the
  trace is valid; False if it is wrong, or if only the check row by row can
  decide."""
  time, worker, seq, job, _ = trace
  indices = np.stack([worker, job])
  if len(time) and not (time[0] >= 0 and time[-1] <= LATEST):
    return False
  if not ((time[1:] >= time[:-1]).all() and (seq >= 0).all()):
    return False
  pairs = pair(trace)
  if pairs is None or not ((indices >= 0) & (indices <= _MAX_INDEX)).all():
    return False
  starts, ends, _ = pairs
  if depth >= len(starts):
    return True
  # A worker that holds at most `depth` tickets starts its job k after its job
  # k - depth has ended. Starts and ends are sorted by worker, so job k of a
  # worker is at the position of the worker's first job plus k.
  start_worker, end_worker = worker[starts], worker[ends]
  nth_job = np.arange(len(starts)) - np.searchsorted(start_worker, start_worker)
  needing_end = np.flatnonzero(nth_job >= math.ceil(depth))
  first_end = np.searchsorted(end_worker, start_worker[needing_end])
  needed_end = first_end + nth_job[needing_end] - math.ceil(depth)
  if len(needed_end) and needed_end.max() >= len(ends):
    return False
  same_worker = end_worker[needed_end] == start_worker[needing_end]
  return bool((same_worker & (ends[needed_end] < starts[needing_end])).all())


def _find_violation(
  ledger: Ledger[Event], event: Event, depth: float
) -> str | None:
  """Returns why a protocol forbids a row that the ledger would accept; None if
  no protocol does."""
  time, worker, seq, job, action, *_ = event
  tickets = ledger.open[worker]
  if not 0 <= time <= LATEST:
    return f"time must be finite, 0 or more and at most {LATEST:g}"
  if not (0 <= worker <= _MAX_INDEX and 0 <= job <= _MAX_INDEX):
    return f"worker and job must be from 0 to {_MAX_INDEX}"
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
    earliest = next(iter(tickets))
    if action == base.RECEIVE and (seq != earliest or worker in ledger.ended):
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
