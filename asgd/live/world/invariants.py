"""What must hold of a run in a world that has ended, however it went."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from asgd import base, simulator
from asgd.live import records
from asgd.live.journal import journal_path, read_journal
from asgd.live.shard import Shard
from asgd.live.world import scenario as scenario_lib
from asgd.live.world.cluster import Training, World
from asgd.live.world.scenario import WORKERS, Case
from asgd.orders import trace
from asgd.orders.trace import Event

NAMES = (
  "every job is received once",
  "what the lead received, every shard received",
  "the order is allowed",
  "records tell the staleness of the trace",
  "the replay has the same bits",
  "no slot is leaked",
)


class Broken(Exception):
  """An invariant does not hold."""


def _require(well, index, text):
  if not well:
    raise Broken(f"{NAMES[index]}: {text}")


def check(
  world: World, training: Training, case: Case, shards: Sequence[Shard]
) -> None:
  """Raises Broken if a finished run is not what it must be."""
  folder, count = world.folder, training.setup.shards
  journals = [read_journal(journal_path(folder, i)) for i in range(count)]
  _check_jobs(journals, training, case)
  for index, events in enumerate(journals):
    # In rounds a worker may start one more before the first is received; other
    # shards may still hold what the lead has closed.
    free = index or case.rules.round
    depth = math.inf if free else case.rules.depth
    try:
      trace.check(events, depth=depth)
    except ValueError as error:
      _require(False, 2, f"shard {index}: {error}")
  rolled_back = any(
    event.action == base.ROLLBACK for events in journals for event in events
  )
  rows = [
    records.read_records(records.records_path(folder, i)) for i in range(count)
  ]
  if not rolled_back:
    _check_records(journals, rows)
  _check_replay(training, journals, rows, shards, rolled_back)
  for shard in shards:
    _check_slots(shard)


def _in_state(events: Sequence[Event]) -> list[Event]:
  """Returns the RECEIVE rows that no rollback has undone."""
  ledger = trace.follow(events)
  return [events[row] for row in ledger.received]


def _check_jobs(journals, training, case):
  jobs = list(range(training.setup.jobs))
  received = [_in_state(events) for events in journals]
  lead = sorted(event.job for event in received[0])
  undone = any(e.action == base.ROLLBACK for e in journals[0])
  _require(undone or lead == jobs, 0, f"the lead received jobs {lead}")
  names = [event.key for event in received[0]]
  for index, others in enumerate(received[1:], 1):
    keys = [event.key for event in others]
    if case.consistent:
      _require(keys == names, 1, f"shard {index} received {keys}, not {names}")
    _require(len(set(keys)) == len(keys), 0, f"shard {index} received {keys}")
    back = any(e.action == base.ROLLBACK for e in journals[index])
    missing = set(names) - set(keys)
    _require(back or not missing, 1, f"shard {index} lacks {sorted(missing)}")


def _check_records(journals, rows):
  for index, (events, record) in enumerate(zip(journals, rows, strict=True)):
    expected = [event for event in events if event.action == base.RECEIVE]
    named = [(event.worker, event.job) for event in expected]
    there = list(zip(record.worker.tolist(), record.job.tolist(), strict=True))
    _require(there == named, 3, f"shard {index} recorded {there}, not {named}")
    _require(
      bool((np.diff(record.update) >= 0).all()),
      *(3, f"shard {index}: updates {record.update.tolist()}"),
    )
    losses = np.array([event.loss for event in expected], np.float32)
    same = np.array_equal(losses, record.loss)
    _require(same, 3, f"shard {index}: losses differ from the journal's")


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _check_replay(training, journals, rows, shards, rolled_back):
  traces = [trace.from_events(events) for events in journals]
  server, worker, workers = training.server, training.worker, WORKERS
  common = dict(batch=scenario_lib.batch, root=training.duty.root)
  if training.plan is None:
    host = simulator.make_host(server, worker)
    simulation, record = simulator.run_whole(
      host, training.params, workers, traces[0], **common
    )
    states, replayed = [simulation.server], [record]
  else:
    totals = [[event.totals for event in events] for events in journals]
    states, replayed = simulator.run_sharded(
      *(server, worker, training.params, traces),
      workers=workers,
      plan=training.plan,
      totals=totals if training.setup.totals else None,
      **common,
    )
  for index, (shard, state) in enumerate(zip(shards, states, strict=True)):
    same = _bits(shard.state.server) == _bits(state)
    _require(same, 4, f"shard {index}: the state differs")
  if rolled_back:
    return
  for index, (live, expected) in enumerate(zip(rows, replayed, strict=True)):
    for name, one, other in zip(live._fields, live, expected, strict=True):
      same = np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
      _require(same, 4, f"shard {index}: the records' {name} differ")


def _check_slots(shard):
  state = shard.state
  slots, tickets = state.slots, state.tickets.values()
  counts = slots._counts
  messages = [
    *slots.free_messages,
    *slots.logged,
    *(slot for dead in slots.dead.values() for slot in dead),
    *(ticket.message for ticket in tickets),
  ]
  of = f"shard {shard.index}"
  _require(
    sorted(messages) == list(range(counts.messages)),
    *(5, f"{of}: message slots {sorted(messages)} of {counts.messages}"),
  )
  used = {slot for slot, uses in slots.uses.items() if uses > 0}
  params = sorted([*slots.free_params, *used])
  _require(
    params == list(range(counts.params)),
    *(5, f"{of}: params slots {params} of {counts.params}"),
  )
