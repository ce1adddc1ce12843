"""Assigns each ticket of a trace a slot in one buffer of parameters.

A ticket occupies its slot from its SEND until its last job ends; in a trace
with KEEP rows, at least until the worker's next SEND. Then a later ticket
reuses the slot. If the server sends its parameters as they are, tickets of one
version share a slot: memory is (distinct versions in flight) x parameters.

Index letters used in shape comments:
  E  rows of the trace
  U  received messages
  K  SEND and KEEP rows
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from asgd import base, compression
from asgd.orders import trace as trace_lib

# A small model has this many slots at least: cells with few workers, and seeds
# with other orders, then share a compiled program. The program of a digits MLP
# takes 1.9 s to compile.
_MIN_SLOTS = 32
_MAX_MIN_BYTES = 2**23  # of these slots

_Ints = npt.NDArray[np.int32]
_Rows = npt.NDArray[np.int64]


class NotCompiled(ValueError):
  """A trace or an algorithm needs the host engine; the message says why."""


def why_only_host(opt_state: Any, worker_state: Any, trace: base.Trace) -> str:
  """Returns why only the host engine can replay a trace; "" if the chunk and
  rounds engines can, too.

  Args:
    opt_state: the optimizer state of the server, or its shapes.
    worker_state: the state of a worker, or its shapes.
    trace: the trace that is replayed.
  """
  if compression.last_update(opt_state) is not None:
    return "the server's updates are codes (compress_down)"
  action = np.asarray(trace.action)
  if (action == base.ROLLBACK).any():
    return "the order rolls back"
  if (action == base.DROP).any() and jax.tree.leaves(worker_state):
    return "a worker with a state has messages that are dropped"
  return ""


class Sends(NamedTuple):
  """Tickets that are sent between two messages."""

  slots: _Ints  # the slot of each ticket; all are distinct
  workers: _Ints  # the worker of each ticket


class Starts(NamedTuple):
  """The jobs that workers start, in the order of their rows."""

  row: _Rows  # [K]
  end: _Rows  # [K], the row that ends the job; E if there is none
  slot: _Ints  # [K], slot of the job's ticket
  earlier_jobs: _Ints  # [K], earlier jobs on the same ticket


class TicketPlan(NamedTuple):
  """The messages of a trace, and the slots of their tickets."""

  row: _Rows  # [U], row of each RECEIVE in the trace
  slot: _Ints  # [U], slot of the message's ticket
  earlier_jobs: _Ints  # [U], earlier jobs on the same ticket; 0: it is fresh
  is_first: npt.NDArray[np.bool_]  # [U], first message of a worker that joined
  # [U], the slot written after the message; `slots` if no slot is written, or
  # several slots are
  sent_slot: _Ints
  sent_worker: _Ints  # [U], worker of the ticket in `sent_slot`
  # Number of messages received before -> tickets that `sent_slot` cannot name:
  # they need several slots, or are sent before the first message.
  sends: dict[int, Sends]
  starts: Starts
  slots: int  # number of slots in the buffer


def row_count(plan: TicketPlan, params: base.Params) -> int:
  """Returns the rows of the buffer of tickets: one for each slot, unused ones,
  and one for `sent_slot` where it names no slot."""
  nbytes = sum(x.nbytes for x in jax.tree.leaves(params))
  min_slots = _MIN_SLOTS if _MIN_SLOTS * nbytes <= _MAX_MIN_BYTES else 0
  return max(plan.slots, min_slots) + 1


def plan_tickets(trace: base.Trace, *, shared: bool) -> TicketPlan:
  """Returns the slots of a trace's tickets.

  Args:
    trace: a trace without ROLLBACK rows.
    shared: whether all tickets sent between two messages are equal
      (`Server.sends_current`).

  Raises:
    TraceError: for an end without a start, or a KEEP without a ticket.
    NotCompiled: if two messages of a worker have the same number.

  Example:
    Two workers: three versions are never in flight at once.

    >>> from asgd import orders
    >>> from asgd.simulator import tickets
    >>> trace = orders.fixed_delay(delay=1, messages=6)
    >>> plan = tickets.plan_tickets(trace, shared=True)
    >>> plan.slots, plan.slot.tolist()
    (2, [0, 0, 1, 0, 1, 0])
  """
  # [1] The starts: their end rows, and the messages received before each.
  action = np.asarray(trace.action)
  is_start = np.isin(action, trace_lib.STARTS)
  row = np.flatnonzero(is_start)
  end = _end_rows(trace, row)
  receive_rows = np.flatnonzero(action == base.RECEIVE)
  messages_before = np.searchsorted(receive_rows, row)
  # [2] Group the starts with tickets in one slot. A KEEP start belongs to the
  # group of the ticket that it keeps. With `shared`, the tickets sent between
  # two messages are one group.
  opening_start, earlier_jobs = _opening_starts(trace, row)
  if shared:
    send_starts = np.flatnonzero(action[row] == base.SEND)
    group = np.full(len(row), -1)
    _, group[send_starts] = np.unique(
      messages_before[send_starts], return_inverse=True
    )
  else:
    group = np.cumsum(action[row] == base.SEND) - 1
  group = group[opening_start]
  # [3] A slot for each group, from its first use to its last. The first use is
  # the message after which the ticket is sent: sends between two messages are
  # computed together, right after the first of the two.
  last_use = _last_uses(trace, row, end, group, opening_start)
  first_use = np.full(len(last_use), len(action))
  np.minimum.at(first_use, group, messages_before)
  first_rows = np.concatenate([[-1], receive_rows])[first_use]
  slot_of, slots = _assign_slots(first_rows, last_use)
  starts = Starts(row, end, slot_of[group].astype(np.int32), earlier_jobs)
  # [4] By message: the start that it ends, and the tickets sent after it.
  start_ending_at = np.full(len(action), -1)  # by row; -1: no start
  start_ending_at[end[end < len(action)]] = np.flatnonzero(end < len(action))
  start_of_message = start_ending_at[receive_rows]
  sent_slot, sent_worker, sends = _sends_after(
    trace, starts, messages_before, slots, len(receive_rows)
  )
  return TicketPlan(
    row=receive_rows,
    slot=starts.slot[start_of_message],
    earlier_jobs=earlier_jobs[start_of_message],
    is_first=_first_messages(trace, receive_rows),
    sent_slot=sent_slot,
    sent_worker=sent_worker,
    sends=sends,
    starts=starts,
    slots=slots,
  )


def _end_rows(trace: base.Trace, row: _Rows) -> _Rows:
  """Returns the row that ends each started job, or the number of rows; raises
  NotCompiled for jobs with the same (worker, seq)."""
  action = np.asarray(trace.action)
  end_rows = np.flatnonzero(np.isin(action, trace_lib.ENDS))
  rows = np.concatenate([row, end_rows])
  worker, seq = (np.asarray(x)[rows] for x in (trace.worker, trace.seq))
  # Sorted by (worker, seq): each start is directly before its end.
  order = np.lexsort((rows, seq, worker))
  is_start = order < len(row)
  # Whether each row has the same (worker, seq) as the previous one.
  is_same_message = np.zeros(len(order), bool)
  current, previous = order[1:], order[:-1]
  is_same_message[1:] = worker[current] == worker[previous]
  is_same_message[1:] &= seq[current] == seq[previous]
  pairs = np.flatnonzero(is_same_message)
  # Each (worker, seq) must have one start, and at most one end after it.
  if not (is_same_message == ~is_start).all():
    trace_lib.follow(trace_lib.events(trace))  # raises TraceError
    raise NotCompiled("a message's number (seq) is used twice")
  end = np.full(len(row), len(action))
  end[order[pairs - 1]] = rows[order[pairs]]
  return end


def _opening_starts(trace: base.Trace, row: _Rows) -> tuple[_Rows, _Ints]:
  """Returns for each start (the start that opened its ticket, the number of
  earlier jobs on that ticket)."""
  action, worker = np.asarray(trace.action)[row], np.asarray(trace.worker)[row]
  index = np.arange(len(row))
  if not (action == base.KEEP).any():
    return index, np.zeros(len(row), np.int32)
  # Sort by worker, then row. A start uses the ticket of the worker's last SEND
  # at or before it.
  order = np.lexsort((index, worker))
  is_send = action[order] == base.SEND
  is_first = np.ones(len(order), bool)
  is_first[1:] = worker[order][1:] != worker[order][:-1]
  if (is_first & ~is_send).any():
    trace_lib.follow(trace_lib.events(trace))  # raises TraceError
  opening = np.maximum.accumulate(np.where(is_send, index, 0))
  opening_start = np.empty(len(row), np.int64)
  earlier_jobs = np.empty(len(row), np.int32)
  opening_start[order], earlier_jobs[order] = order[opening], index - opening
  return opening_start, earlier_jobs


def _last_uses(
  trace: base.Trace,
  row: _Rows,
  end: _Rows,
  group: _Rows,
  opening_start: _Rows,
) -> _Rows:
  """Returns the last row that needs each group of tickets."""
  action = np.asarray(trace.action)
  last_use = np.zeros(group.max(initial=-1) + 1, np.int64)
  np.maximum.at(last_use, group, end)
  # In a trace with KEEP rows each worker keeps its ticket until its next SEND.
  if (action == base.KEEP).any():
    worker = np.asarray(trace.worker)[row]
    sends = np.flatnonzero(action[row] == base.SEND)
    order = sends[np.lexsort((sends, worker[sends]))]
    kept_until_row = np.full(len(row), len(action))
    same_worker = worker[order][1:] == worker[order][:-1]
    kept_until_row[order[:-1][same_worker]] = row[order[1:][same_worker]]
    np.maximum.at(last_use, group, kept_until_row[opening_start])
  return last_use


def _assign_slots(first_rows: _Rows, last_use: _Rows) -> tuple[_Rows, int]:
  """Assigns each group of tickets a slot that no other group uses from its row
  in `first_rows` to its row in `last_use`; returns (slot of each group, number
  of slots)."""
  slot_of = np.zeros(len(last_use), np.int64)
  # Groups are in the order of their first use. Slots are released in the order
  # of their last use, and the slot that was released last is taken first.
  n_slots, free_slots, n_released = 0, [], 0
  by_last_use = np.argsort(last_use, kind="stable").tolist()
  last_uses = last_use.tolist()
  for group, first_row in enumerate(first_rows.tolist()):
    while (
      n_released < len(by_last_use)
      and last_uses[by_last_use[n_released]] <= first_row
    ):
      free_slots.append(int(slot_of[by_last_use[n_released]]))
      n_released += 1
    if free_slots:
      slot_of[group] = free_slots.pop()
    else:
      slot_of[group], n_slots = n_slots, n_slots + 1
  return slot_of, n_slots


def _sends_after(
  trace: base.Trace,
  starts: Starts,
  messages_before: _Rows,
  slots: int,
  messages: int,
) -> tuple[_Ints, _Ints, dict[int, Sends]]:
  """Returns (sent_slot, sent_worker, sends) of a TicketPlan."""
  sent_slot = np.full(messages, slots, np.int32)
  sent_worker, sends = np.zeros(messages, np.int32), {}
  is_sent = np.asarray(trace.action)[starts.row] == base.SEND
  send_starts = np.flatnonzero(is_sent)
  worker, slot = np.asarray(trace.worker)[starts.row], starts.slot
  # SENDs into one slot after one message send the same ticket: use the last
  # SEND.
  keys = send_starts, slot[send_starts], messages_before[send_starts]
  send_order = send_starts[np.lexsort(keys)]
  is_last = np.ones(len(send_order), bool)
  is_last[:-1] = (
    messages_before[send_order][1:] != messages_before[send_order][:-1]
  ) | (slot[send_order][1:] != slot[send_order][:-1])
  send_order = send_order[is_last]
  positions, begins, count = np.unique(
    messages_before[send_order], return_index=True, return_counts=True
  )
  # The loop over messages writes one slot after a message. A separate program
  # writes several slots, and those before the first message.
  is_single = (count == 1) & (positions > 0)
  single, message = send_order[begins[is_single]], positions[is_single] - 1
  sent_slot[message], sent_worker[message] = slot[single], worker[single]
  has_several = ~is_single
  for position, first, size in zip(
    positions[has_several].tolist(),
    begins[has_several].tolist(),
    count[has_several].tolist(),
    strict=True,
  ):
    group = np.sort(send_order[first : first + size])
    sends[position] = Sends(slot[group], worker[group])
  return sent_slot, sent_worker, sends


def _first_messages(
  trace: base.Trace, receive_rows: _Rows
) -> npt.NDArray[np.bool_]:
  """Returns bool[U]: whether each message is the first message of a worker that
  joined."""
  is_first = np.zeros(len(receive_rows), bool)
  worker = np.asarray(trace.worker)
  for row in np.flatnonzero(np.asarray(trace.action) == base.JOIN).tolist():
    n_earlier = np.searchsorted(receive_rows, row)
    worker_messages = np.flatnonzero(
      worker[receive_rows[n_earlier:]] == worker[row]
    )
    if worker_messages.size:
      is_first[n_earlier + worker_messages[0]] = True
  return is_first


def tickets_at(
  starts: Starts, trace: base.Trace, row: int
) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
  """Returns the starts with tickets in the buffer at row `row`: the open starts
  by (worker, seq), and the latest start of each worker."""
  started_indices = np.flatnonzero(starts.row < row)
  worker, seq = (np.asarray(x)[starts.row[started_indices]] for x in trace[1:3])
  is_open = starts.end[started_indices] >= row
  keys = zip(worker[is_open].tolist(), seq[is_open].tolist(), strict=True)
  open_starts = dict(zip(keys, started_indices[is_open].tolist(), strict=True))
  return open_starts, dict(
    zip(worker.tolist(), started_indices.tolist(), strict=True)
  )


def sends_from(
  plan: TicketPlan, trace: base.Trace, row: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the slots and workers of the tickets that are sent from row `row`
  on, before the next message."""
  message = np.searchsorted(plan.row, row)
  stop = plan.row[message] if message < len(plan.row) else len(trace.time)
  starts = plan.starts
  is_sent = starts.earlier_jobs == 0
  is_sent &= (starts.row >= row) & (starts.row < stop)
  slots, first_index = np.unique(starts.slot[is_sent], return_index=True)
  return slots, np.asarray(trace.worker)[starts.row[is_sent][first_index]]
