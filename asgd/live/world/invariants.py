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
from asgd.live.world.broken import bits, refused, require
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


def check(
  world: World, training: Training, case: ServerCase, shards: Sequence[Shard]
) -> None:
  """Raises Broken if a finished run violates an invariant. `shards` are the
  run's shards after their last message."""
  folder, count = world.folder, training.setup.shards
  journals = [read_journal(journal_path(folder, i)) for i in range(count)]
  _check_jobs(journals, training, case)
  _check_order(journals, training, case)
  every, gated = max(case.rules.round, 1), bool(case.rules.backup)
  rows, recorded = [], []
  for index, events in enumerate(journals):
    with refused(NAMES[3], f"shard {index}: "):
      expected = trace_checks.received(events, every=every, gated=gated)
    rows.append(records.read_records(records.records_path(folder, index)))
    recorded.append(_match(index, events, rows[-1], expected))
    _check_records(index, rows[-1], [expected[i] for i in recorded[-1]])
  _check_replay(training, journals, (rows, recorded), shards)
  for shard in shards:
    _check_slots(shard)


def _check_order(
  journals: Sequence[Sequence[Event]], training: Training, case: ServerCase
) -> None:
  """Checks that each shard's rows are an allowed order."""
  for index, events in enumerate(journals):
    # In rounds a worker may start a job before its last message is received.
    # Another shard may still have a ticket open that the lead has closed.
    unlimited = index or case.rules.round
    depth = math.inf if unlimited else case.rules.depth
    with refused(NAMES[2], f"shard {index}: "):
      orders.check(events, depth=depth)
      if not index:
        jobs = {"jobs": training.setup.jobs, "owned": case.owned}
        trace_checks.check_protocol(events, case.rules, **jobs)


def _check_jobs(
  journals: Sequence[Sequence[Event]], training: Training, case: ServerCase
) -> None:
  """Checks that the lead received each job once, and each shard as the lead."""
  received = [
    [event for event in events if event.action == base.RECEIVE]
    for events in journals
  ]
  # A job that a rollback undid counts, too: it is not computed again.
  lead = sorted(event.job for event in received[0])
  jobs = list(range(training.setup.jobs))
  require(lead == jobs, NAMES[0], f"the lead received jobs {lead}")
  names = [event.key for event in received[0]]
  for index, others in enumerate(received[1:], 1):
    keys = [event.key for event in others]
    text = f"shard {index} received {keys}"
    if case.consistent:
      require(keys == names, NAMES[1], text, "and not", names)
    require(len(set(keys)) == len(keys), NAMES[0], text)
    missing = set(names) - set(keys)
    require(not missing, NAMES[1], f"shard {index} lacks {sorted(missing)}")


def _match(
  index: int,
  events: Sequence[Event],
  record: base.Records,
  expected: Sequence[Received],
) -> list[int]:
  """Returns for each record of a shard the index of its message in `expected`.

  Records and messages have the same order. Raises Broken if a message has no
  record, unless a rollback undid the message.
  """
  columns = record.time.tolist(), record.worker.tolist(), record.job.tolist()
  record_keys, out = list(zip(*columns, strict=True)), []
  kept = set(trace.follow(events).received)
  for position, (row, event, *_) in enumerate(expected):
    key = event.time, event.worker, event.job
    if len(out) < len(record_keys) and record_keys[len(out)] == key:
      out.append(position)
    else:
      text = f"shard {index} has no record of"
      require(row not in kept, NAMES[3], text, event)
  text = f"shard {index} recorded {record_keys}"
  require(len(out) == len(record_keys), NAMES[3], text)
  return out


def _check_records(
  index: int, record: base.Records, expected: Sequence[Received]
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
    same = np.array_equal(recorded, column)
    text = f"{name} {recorded.tolist()}, not {list(map(float, column))}"
    require(same, NAMES[3], f"shard {index} recorded {text}")


def _check_replay(
  training: Training,
  journals: Sequence[Sequence[Event]],
  recorded: tuple[Sequence[base.Records], Sequence[Sequence[int]]],
  shards: Sequence[Shard],
) -> None:
  """Replays the journals, and compares states and records with the run's.
  `recorded` has each shard's records and the indices of their messages."""
  traces = [trace.from_events(events) for events in journals]
  server, worker, wire = training.server, training.worker, training.wire
  common = dict(batch=training.batch, root=training.duty.root)
  if training.plan is None:
    options = {"wire": wire, "keeps_messages": True}
    host = simulator.make_host(server, worker, **options)
    simulation, record = simulator.run_whole(
      host, training.params, WORKERS, traces[0], **common
    )
    states, replayed = [simulation.server], [record]
  else:
    totals = [[event.totals for event in events] for events in journals]
    states, replayed = simulator.run_sharded(
      *(server, worker, training.params, traces),
      workers=WORKERS,
      plan=training.plan,
      totals=totals if training.setup.totals else None,
      wire=wire,
      **common,
    )
  for index, (shard, state) in enumerate(zip(shards, states, strict=True)):
    same = bits(shard.state.server) == bits(state)
    require(same, NAMES[4], f"shard {index}: the state differs")
  parts = zip(*recorded, replayed, strict=True)
  for index, (live, messages, expected) in enumerate(parts):
    for name, column, other in zip(live._fields, live, expected, strict=True):
      nan = column.dtype.kind == "f"
      same = np.array_equal(column, other[messages], equal_nan=nan)
      require(same, NAMES[4], f"shard {index}: the records' {name} differ")


def _check_slots(shard: Shard) -> None:
  """Checks that each slot of a shard has exactly one use, or is free."""
  state = shard.state
  slots, tickets = state.slots, state.tickets.values()
  counts = slots.counts
  messages = [
    *slots.free_messages,
    *slots.logged,
    *(slot for dead in slots.lost.values() for slot in dead),
    *(ticket.message for ticket in tickets),
  ]
  name = f"shard {shard.index}"
  require(
    sorted(messages) == list(range(counts.messages)),
    NAMES[5],
    f"{name}: message slots {sorted(messages)} of {counts.messages}",
  )
  used = {slot for slot, uses in slots.uses.items() if uses > 0}
  params = sorted([*slots.free_params, *used])
  require(
    params == list(range(counts.params)),
    *(NAMES[5], f"{name}: params slots {params} of {counts.params}"),
  )
