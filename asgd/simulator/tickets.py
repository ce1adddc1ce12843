"""Where the tickets of a trace lie, found for all messages at once.

A compiled program keeps the parameters that were sent in rows of one buffer. A
ticket needs a row from its SEND until the last job on it has ended, so a row is
used again. Tickets of one version share a row if the server sends its
parameters as they are: memory is (distinct versions in flight) x parameters.

Index letters used in shape comments:
  E  rows of the trace
  U  received messages
  K  SEND and KEEP rows
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.orders import trace as trace_lib

_Ints = npt.NDArray[np.int32]
_Rows = npt.NDArray[np.int64]


class NotCompiled(ValueError):
  """A trace or an algorithm needs the host engine; the message says why."""


class Sends(NamedTuple):
  """Tickets that are sent between two messages."""

  slots: _Ints  # [K], distinct
  workers: _Ints  # [K]


class Starts(NamedTuple):
  """The jobs that workers start, in the order of their rows."""

  row: _Rows  # [K]
  end: _Rows  # [K], the row that ends the job; E if there is none
  slot: _Ints  # [K], of its ticket
  kept: _Ints  # [K], jobs before it on the same ticket


class TicketPlan(NamedTuple):
  """The messages of a trace, and the rows (slots) of their tickets."""

  row: _Rows  # [U], of each RECEIVE in the trace
  slot: _Ints  # [U], of the message's ticket
  kept: _Ints  # [U], jobs before it on the same ticket; 0: it is fresh
  first: npt.NDArray[np.bool_]  # [U], the first of a worker that joined
  put: _Ints  # [U], slot of the one ticket sent after the message; S if none
  to: _Ints  # [U], the worker that it is sent to
  sends: dict[int, Sends]  # by messages before them; where `put` has none
  starts: Starts
  slots: int  # S


def plan_tickets(trace: base.Trace, *, shared: bool) -> TicketPlan:
  """Returns where each ticket of a trace lies.

  Args:
    trace: of a server that is never rolled back.
    shared: whether all tickets sent between two messages are equal
      (`Server.sends_current`).

  Raises:
    TraceError: for a row without a meaning.
    NotCompiled: for a message's number that is used twice.

  Example:
    Two workers: three versions are never in flight at once.

    >>> from asgd import orders
    >>> from asgd.simulator import tickets
    >>> trace = orders.fixed_delay(delay=1, messages=6)
    >>> plan = tickets.plan_tickets(trace, shared=True)
    >>> plan.slots, plan.slot.tolist()
    (2, [0, 0, 1, 0, 1, 0])
  """
  action = np.asarray(trace.action)
  started = np.isin(action, trace_lib.STARTS)
  row = np.flatnonzero(started)
  end = _ends(trace, row)
  received = np.flatnonzero(action == base.RECEIVE)
  before = np.searchsorted(received, row)  # messages before each start
  base_of, kept = _kept(trace, row)
  if shared:
    sent = np.flatnonzero(action[row] == base.SEND)
    group = np.full(len(row), -1)
    _, group[sent] = np.unique(before[sent], return_inverse=True)
  else:
    group = np.cumsum(action[row] == base.SEND) - 1
  group = group[base_of]
  last = _last_uses(trace, row, end, group, base_of)
  begun = np.full(len(last), len(action))
  np.minimum.at(begun, group, before)
  slot_of, slots = _color(np.concatenate([[-1], received])[begun], last)
  starts = Starts(row, end, slot_of[group].astype(np.int32), kept)
  job = np.full(len(action), -1)
  job[end[end < len(action)]] = np.flatnonzero(end < len(action))
  of = job[received]
  put, to, sends = _puts(trace, starts, before, slots, len(received))
  first = _first_messages(trace, received)
  columns = received, starts.slot[of], kept[of], first, put, to
  return TicketPlan(*columns, sends, starts, slots)


def _ends(trace, row):
  """Returns the row that ends each started job, or the number of rows; raises
  NotCompiled for jobs with the same (worker, seq)."""
  action = np.asarray(trace.action)
  ended = np.flatnonzero(np.isin(action, trace_lib.ENDS))
  both = np.concatenate([row, ended])
  worker, seq = (np.asarray(x)[both] for x in (trace.worker, trace.seq))
  order = np.lexsort((both, seq, worker))
  is_start = order < len(row)
  same = np.zeros(len(order), bool)  # the same message as the one before
  at, before = order[1:], order[:-1]
  same[1:] = (worker[at] == worker[before]) & (seq[at] == seq[before])
  pairs = np.flatnonzero(same)
  # A message is one start, and at most one end after it.
  if not (same == ~is_start).all():
    trace_lib.follow(trace_lib.events(trace))  # raises TraceError
    raise NotCompiled("a message's number (seq) is used twice")
  end = np.full(len(row), len(action))
  end[order[pairs - 1]] = both[order[pairs]]
  return end


def _kept(trace, row):
  """Returns for each start (the start that opened its ticket, the number of
  earlier jobs on that ticket)."""
  action, worker = np.asarray(trace.action)[row], np.asarray(trace.worker)[row]
  index = np.arange(len(row))
  if not (action == base.KEEP).any():
    return index, np.zeros(len(row), np.int32)
  order = np.lexsort((index, worker))
  sent = action[order] == base.SEND
  new = np.ones(len(order), bool)
  new[1:] = worker[order][1:] != worker[order][:-1]
  if (new & ~sent).any():
    trace_lib.follow(trace_lib.events(trace))  # raises TraceError
  at = np.maximum.accumulate(np.where(sent, index, 0))
  base_of, kept = np.empty(len(row), np.int64), np.empty(len(row), np.int32)
  base_of[order], kept[order] = order[at], index - at
  return base_of, kept


def _last_uses(trace, row, end, group, base_of):
  """The last row that needs each group of tickets."""
  action = np.asarray(trace.action)
  last = np.zeros(group.max(initial=-1) + 1, np.int64)
  np.maximum.at(last, group, end)
  if (action == base.KEEP).any():  # held until the worker's next one is sent
    worker = np.asarray(trace.worker)[row]
    sent = np.flatnonzero(action[row] == base.SEND)
    order = sent[np.lexsort((sent, worker[sent]))]
    until = np.full(len(row), len(action))
    same = worker[order][1:] == worker[order][:-1]
    until[order[:-1][same]] = row[order[1:][same]]
    np.maximum.at(last, group, until[base_of])
  return last


def _color(begun, last):
  """Gives each group of tickets a slot that is free from row `begun` to `last`;
  returns the slots and how many they are."""
  slot_of = np.zeros(len(last), np.int64)
  slots, free, ended = 0, [], 0
  ending = np.argsort(last, kind="stable").tolist()
  ends = last.tolist()
  for group, start in enumerate(begun.tolist()):
    while ended < len(ending) and ends[ending[ended]] <= start:
      free.append(int(slot_of[ending[ended]]))
      ended += 1
    if free:
      slot_of[group] = free.pop()
    else:
      slot_of[group], slots = slots, slots + 1
  return slot_of, slots


def _puts(trace, starts, before, slots, messages):
  """Returns (put, to, sends) of a TicketPlan."""
  put = np.full(messages, slots, np.int32)
  to, sends = np.zeros(messages, np.int32), {}
  is_sent = np.asarray(trace.action)[starts.row] == base.SEND
  sent = np.flatnonzero(is_sent)
  worker, slot = np.asarray(trace.worker)[starts.row], starts.slot
  # The last of those that share a slot after the same message.
  order = sent[np.lexsort((sent, slot[sent], before[sent]))]
  last = np.ones(len(order), bool)
  last[:-1] = (before[order][1:] != before[order][:-1]) | (
    slot[order][1:] != slot[order][:-1]
  )
  order = order[last]
  positions, at, count = np.unique(
    before[order], return_index=True, return_counts=True
  )
  alone = (count == 1) & (positions > 0)
  one = order[at[alone]]
  put[positions[alone] - 1], to[positions[alone] - 1] = slot[one], worker[one]
  several = ~alone
  for position, begin, size in zip(
    positions[several].tolist(),
    at[several].tolist(),
    count[several].tolist(),
    strict=True,
  ):
    some = np.sort(order[begin : begin + size])
    sends[position] = Sends(slot[some], worker[some])
  return put, to, sends


def _first_messages(trace, received):
  """Which messages are the first of a worker that joined."""
  first = np.zeros(len(received), bool)
  worker = np.asarray(trace.worker)
  for row in np.flatnonzero(np.asarray(trace.action) == base.JOIN).tolist():
    later = np.searchsorted(received, row)
    mine = np.flatnonzero(worker[received[later:]] == worker[row])
    if mine.size:
      first[later + mine[0]] = True
  return first
