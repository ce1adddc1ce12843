"""Invariants of a finished run of a parameter server in a simulated world."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from asgd import base, orders, simulator
from asgd.live import records
from asgd.live.journal import journal_path, read_journal
from asgd.live.shard import Shard
from asgd.live.world import trace_checks
from asgd.live.world.broken import bits, breaks_on_value_error, require
from asgd.live.world.hosts import World
from asgd.live.world.scenario import WORKERS, ServerCase, Training
from asgd.live.world.trace_checks import Received
from asgd.orders import trace
from asgd.orders.trace import Event

# Invariants of docs/simulated_world.md, in its order.
NAMES = (
  "every job is received once",
  "what the lead received, every shard received",
  "the order is allowed",
  "records agree with the trace",
  "the replay has the same bits",
  "no slot is leaked, or used twice",
  "no slot is read without its stamp",
  "it ends in bounded time",
  "no error without a reason",
)
_ONCE, _ALL_SHARDS, _ORDER, _RECORDS, _REPLAY, _SLOTS = NAMES[:6]


def check(
  world: World, training: Training, case: ServerCase, shards: Sequence[Shard]
) -> None:
  """Checks the first six of NAMES; raises Broken if the run violates one.

  The world checks stamps, bounded time and reasons of errors during the run.

  Args:
    world: the simulated world; its folder contains the journals and records.
    training: the problem and the settings of the run.
    case: the rules of the run.
    shards: the run's shards after their last message, in the order of their
      indices.
  """
  folder, n_shards = world.folder, training.setup.shards
  journals = [read_journal(journal_path(folder, i)) for i in range(n_shards)]
  # [1] Journals: jobs and order.
  _check_jobs(journals, training, case)
  _check_order(journals, training, case)
  # [2] Records, against values that the journals imply.
  messages_per_update = max(case.rules.round, 1)
  drops_stale = bool(case.rules.backup)
  shard_records, indices_by_shard = [], []
  for shard_index, events in enumerate(journals):
    with breaks_on_value_error(_RECORDS, f"shard {shard_index}: "):
      expected = trace_checks.received_messages(
        events,
        messages_per_update=messages_per_update,
        drops_stale=drops_stale,
      )
    record = records.read_records(records.records_path(folder, shard_index))
    message_indices = _match_records(shard_index, events, record, expected)
    _check_records(shard_index, record, [expected[i] for i in message_indices])
    shard_records.append(record)
    indices_by_shard.append(message_indices)
  # [3] The replay. It also checks parameters and norms, which [2] does not.
  _check_replay(training, journals, (shard_records, indices_by_shard), shards)
  # [4] The shared memory.
  for shard in shards:
    _check_slots(shard)


def _check_order(
  journals: Sequence[Sequence[Event]], training: Training, case: ServerCase
) -> None:
  """Checks that the rules allow the order of each shard's rows."""
  for shard_index, events in enumerate(journals):
    # Open jobs per worker are limited only at the lead, and only without
    # rounds. In rounds the server receives messages at the end of the round, so
    # a worker may start a job while its last message waits. A shard other than
    # the lead may have a ticket open that the lead has closed.
    has_no_limit = shard_index or case.rules.round
    depth = math.inf if has_no_limit else case.rules.depth
    with breaks_on_value_error(_ORDER, f"shard {shard_index}: "):
      orders.check(events, depth=depth)
      if not shard_index:  # the lead alone decides which jobs start
        trace_checks.check_protocol(
          events, case.rules, jobs=training.setup.jobs, owned=case.owned
        )


def _check_jobs(
  journals: Sequence[Sequence[Event]], training: Training, case: ServerCase
) -> None:
  """Checks that the lead received each job once, and that every other shard
  received the lead's messages."""
  received = [
    [event for event in events if event.action == base.RECEIVE]
    for events in journals
  ]
  # A job that a rollback undid counts, too: it is not computed again.
  lead_jobs = sorted(event.job for event in received[0])
  jobs = list(range(training.setup.jobs))
  require(lead_jobs == jobs, _ONCE, f"the lead received jobs {lead_jobs}")
  lead_keys = [event.key for event in received[0]]  # (worker, seq)
  for shard_index, follower_events in enumerate(received[1:], 1):
    keys = [event.key for event in follower_events]
    text = f"shard {shard_index} received {keys}"
    if case.consistent:
      require(keys == lead_keys, _ALL_SHARDS, text, "and not", lead_keys)
    require(len(set(keys)) == len(keys), _ONCE, text)
    # Without `consistent` a follower may have received a message for a ticket
    # that the lead counts as lost.
    missing = set(lead_keys) - set(keys)
    require(
      not missing, _ALL_SHARDS, f"shard {shard_index} lacks {sorted(missing)}"
    )


def _match_records(
  shard_index: int,
  events: Sequence[Event],
  record: base.Records,
  expected: Sequence[Received],
) -> list[int]:
  """Returns for each record of a shard the index of its message in `expected`.
  Records and messages have the same order.

  Raises:
    Broken: if a message has no record, unless a rollback undid the message; or
      if a record has no message.
  """
  columns = record.time.tolist(), record.worker.tolist(), record.job.tolist()
  record_keys = list(zip(*columns, strict=True))
  positions: list[int] = []
  # Rows of messages that no later ROLLBACK undid.
  applied_rows = set(trace.follow(events).received)
  for position, (row, event, *_) in enumerate(expected):
    key = event.time, event.worker, event.job
    next_keys = record_keys[len(positions) : len(positions) + 1]
    if next_keys == [key]:
      positions.append(position)
    else:
      text = f"shard {shard_index} has no record of"
      require(row not in applied_rows, _RECORDS, text, event)
  text = f"shard {shard_index} recorded {record_keys}"
  require(len(positions) == len(record_keys), _RECORDS, text)
  return positions


def _check_records(
  shard_index: int, record: base.Records, expected: Sequence[Received]
) -> None:
  """Checks a shard's records against the values that its trace implies."""
  columns: dict[str, Any] = {
    "staleness": [message.staleness for message in expected],
    "accepted": [message.accepted for message in expected],
    "update": [message.update for message in expected],
    "loss": np.array([message.event.loss for message in expected], np.float32),
  }
  for name, column in columns.items():
    recorded = getattr(record, name)
    are_equal = np.array_equal(recorded, column)
    text = f"{name} {recorded.tolist()}, not {list(map(float, column))}"
    require(are_equal, _RECORDS, f"shard {shard_index} recorded {text}")


def _check_replay(
  training: Training,
  journals: Sequence[Sequence[Event]],
  recorded: tuple[Sequence[base.Records], Sequence[Sequence[int]]],
  shards: Sequence[Shard],
) -> None:
  """Replays the journals, and compares states and records with the run's.

  Args:
    training: the problem and the settings of the run.
    journals: the rows of each shard.
    recorded: (the records of each shard, for each record the index of its
      message among all RECEIVE rows of the shard's journal).
    shards: the run's shards after their last message.
  """
  # [1] Replay with the simulator: one server, or one for each shard.
  traces = [trace.from_events(events) for events in journals]
  server, worker, wire = training.server, training.worker, training.wire
  common = dict(batch=training.batch, root=training.spec.root)
  states: Sequence[base.ServerState]
  replayed: Sequence[base.Records]
  if training.plan is None:
    host = simulator.make_host(server, worker, wire=wire, keeps_messages=True)
    simulation, record = simulator.run_whole(
      host, training.params, WORKERS, traces[0], **common
    )
    states, replayed = [simulation.server], [record]
  else:
    # A message's row contains totals over all shards, such as norms.
    totals = [[event.totals for event in events] for events in journals]
    states, replayed = simulator.run_sharded(
      *(server, worker, training.params, traces),
      workers=WORKERS,
      plan=training.plan,
      totals=totals if training.setup.totals else None,
      wire=wire,
      **common,
    )
  # [2] Compare states, then records. The replay also has records of messages
  # that a rollback undid. The indices select the records that the run wrote.
  for index, (shard, state) in enumerate(zip(shards, states, strict=True)):
    are_equal = bits(shard.state.server) == bits(state)
    require(are_equal, _REPLAY, f"shard {index}: the state differs")
  parts = zip(*recorded, replayed, strict=True)
  for index, (record, message_indices, replayed_record) in enumerate(parts):
    for name in record._fields:
      column = getattr(record, name)
      replayed_column = getattr(replayed_record, name)
      are_equal = np.array_equal(
        *(column, replayed_column[message_indices]),
        equal_nan=column.dtype.kind == "f",
      )
      require(are_equal, _REPLAY, f"shard {index}: the records' {name} differ")


def _check_slots(shard: Shard) -> None:
  """Checks that each message slot of a shard has exactly one state, and that
  each slot of parameters is either free or in use."""
  state = shard.state
  slots, tickets = state.slots, state.tickets.values()
  counts = slots.counts
  # A message slot has one of four states: free, in the log, reserved for a lost
  # ticket, reserved for an open ticket.
  message_slots = [
    *slots.free_messages,
    *slots.log_slots,
    *(slot for lost_slots in slots.lost_slots.values() for slot in lost_slots),
    *(ticket.message_slot for ticket in tickets),
  ]
  name = f"shard {shard.index}"
  require(
    sorted(message_slots) == list(range(counts.messages)),
    _SLOTS,
    f"{name}: message slots {sorted(message_slots)} of {counts.messages}",
  )
  # Tickets of the same version may share a slot of parameters.
  used_slots = {slot for slot, uses in slots.uses.items() if uses > 0}
  params_slots = sorted([*slots.free_params, *used_slots])
  require(
    params_slots == list(range(counts.params)),
    *(_SLOTS, f"{name}: params slots {params_slots} of {counts.params}"),
  )
