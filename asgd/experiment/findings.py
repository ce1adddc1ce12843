"""Findings of an audit: checks of the traces and records of a live run."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import base
from asgd.live.deadlines import DEAD_FACTOR
from asgd.orders import trace

Journal = Sequence[trace.Event]


class Failure(NamedTuple):
  """A failure that `asgd chaos` injected into a process."""

  kind: str  # worker, shard, hang, term or driver
  cell: str
  party: int  # index of the worker or shard
  # (worker, incarnation) that it ended
  incarnations: tuple[tuple[int, int], ...]
  before: int  # rows of the lead's journal before the failure
  after: int  # rows when it had taken effect
  # (worker, incarnation) of a process that had not joined yet, and may still
  # join before it ends.
  possible_incarnation: tuple[int, int] | None = None


class Finding(NamedTuple):
  """The result of one check."""

  what: str  # name of the check
  text: str
  well: bool  # whether the check passed


def _of_shard(what: str, index: int, journals: Sequence[Any]) -> str:
  """Returns the name of a check of one of several shards."""
  return what if len(journals) == 1 else f"{what} of shard {index}"


def _decisions(events: Journal) -> list[tuple[int, ...]]:
  """Returns a journal's rows without times and rollbacks."""
  rows = (event for event in events if event.action != base.ROLLBACK)
  return [(*event.key, event.job, event.action) for event in rows]


def jobs(
  journals: Sequence[Journal], jobs: int, consistent: bool, missed: int = 0
) -> Iterator[Finding]:
  """Checks that the lead and the other shards received each job once.

  Args:
    journals: the journal of each shard.
    jobs: the number of jobs of the cell.
    consistent: whether all shards have the lead's order.
    missed: jobs that no worker did, as the result says.
  """
  # Tickets that a shard gave up, by shard.
  lost = [sum(e.action == base.LOST for e in events) for events in journals]
  for index, events in enumerate(journals):
    received = [e.job for e in events if e.action == base.RECEIVE]
    unique, expected = set(received), set(range(jobs))
    missing, strange = len(expected - unique), len(unique - expected)
    doubled = len(received) - len(unique)
    text = f"{len(unique)} of {jobs} received, {doubled} twice"
    if missed:
      text += f", {missed} missed by its result"
    well = missing == missed and doubled == strange == 0
    if index and consistent:
      same = _decisions(journals[0]) == _decisions(events)
      text += ", in the order of shard 0" if same else ", NOT as shard 0"
      well = well and same
    elif index:
      # A worker that fails between two parts of a message leaves a part only,
      # so without the lead's order a shard may miss or repeat as many messages
      # as tickets were lost.
      text += f" (shard 0 lost {lost[0]} tickets, this one {lost[index]})"
      well = not strange and doubled <= lost[0] and missing <= lost[index]
    yield Finding(_of_shard("jobs", index, journals), text, well)


def updates(
  journals: Sequence[Journal],
  sinks: Sequence[base.Records],
  result: Mapping[str, Any],
  every: int,
  log: int,
) -> Iterator[Finding]:
  """Checks that acknowledged messages are in the parameters and the records.

  Args:
    journals: the journal of each shard.
    sinks: records of each shard.
    result: the result of the cell.
    every: messages in one update.
    log: config.server.log; 0 allows rollbacks.
  """
  for index, (events, records) in enumerate(zip(journals, sinks, strict=True)):
    ledger = trace.follow(events)
    received = len(ledger.received) + ledger.undone
    text = f"{received} received, {len(records.loss)} records"
    well = len(records.loss) == received
    if ledger.rollbacks:
      text += f", {ledger.rollbacks} rollbacks undid {ledger.undone} updates"
      # Records that a failed shard had not written yet are lost.
      least = len(ledger.received)
      well = not log and least <= len(records.loss) <= received
    else:
      updates = int(records.update[-1]) if len(records.loss) else 0
      accepted = int(records.accepted.sum())
      text += f", {updates} updates"
      # `every` accepted messages are one update; the rest waits for others.
      well = well and updates == accepted // every
      well = well and (index > 0 or updates == result["updates"])
    yield Finding(_of_shard("updates", index, journals), text, well)


def of_workers(
  events: Journal,
  records: base.Records,
  plan: Any,
  depth: int,
  failures: Sequence[Failure],
  missed: int = 0,
) -> Iterator[Finding]:
  """Yields findings of a cell in which each worker records its jobs.

  Args:
    events: rows of all workers, by their times.
    records: columns of all workers.
    plan: the plan of the cell.
    depth: jobs that a worker may have open at once.
    failures: injected into the cell's processes, in this order.
    missed: jobs that no worker did, as the result says.
  """
  yield from jobs([events], plan.messages, False, missed)
  received = sum(event.action == base.RECEIVE for event in events)
  exits = sum(event.action == base.LEAVE for event in events)
  text = f"{received} received, {len(records.loss)} records"
  # A worker may exit between a row and its record.
  well = received - exits <= len(records.loss) <= received
  yield Finding("updates", text, well)
  slow = DEAD_FACTOR * plan.run.config["live"]["late_seconds"]
  # The next driver rolls back to a checkpoint, and drops the rows after it.
  drivers = [i for i, f in enumerate(failures) if f.kind == "driver"]
  last = drivers[-1] + 1 if drivers else 0
  yield from deaths(events, failures[last:], depth, slow, failures[:last])


def _not_seen(
  failures: Sequence[Failure],
  counted: Sequence[Failure],
  killed: Mapping[tuple[int, int], Failure],
) -> str:
  """Returns a text on failures of workers without a LEAVE in the trace, and
  why there is none."""
  why: collections.Counter[str] = collections.Counter()
  for failure in failures:
    # By identity: two failures of one worker may be equal.
    has_leave = any(failure is other for other in counted)
    if has_leave or failure.kind not in ("worker", "hang", "term"):
      continue
    if not failure.incarnations:
      text = "before it had joined"
    elif any(killed[key] is not failure for key in failure.incarnations):
      text = "after another failure"
    else:
      text = "after the last job"
    why[f"{failure.kind} {text}"] += 1
  return "".join(f"; {count} {text}" for text, count in sorted(why.items()))


def deaths(
  events: Journal,
  failures: Sequence[Failure],
  depth: int,
  slow: float,
  before: Sequence[Failure] = (),
) -> Iterator[Finding]:
  """Checks that killed workers left in the trace and did no more work, and that
  workers that left were killed or slow.

  Args:
    events: rows of the trace.
    failures: injected since the last rollback of a driver.
    depth: jobs that a worker may have open at once.
    slow: seconds after which a lost ticket counts as slow.
    before: failures before that rollback; their rows may be in the trace.
  """
  # [1] The failures that explain a LEAVE: by worker, by incarnation.
  dropped = collections.Counter(f.party for f in before if f.kind != "shard")
  # By (worker, incarnation): the first failure of each.
  killed = {key: f for f in reversed(failures) for key in f.incarnations}
  possible_incarnations = {
    failure.possible_incarnation: failure for failure in reversed(failures)
  }
  ledger: trace.Ledger[trace.Event] = trace.Ledger()
  worked, leavers = set(), set()  # (worker, incarnation)
  counted: list[Failure] = []  # with a LEAVE in the trace
  excuse: dict[int, str] = {}  # worker -> why its last ticket was lost
  messages_after: collections.Counter[tuple[int, int]] = collections.Counter()
  how: collections.Counter[str] = collections.Counter()
  # [2] Follow the trace. After the last message a worker may leave without a
  # reason.
  received = [row for row, e in enumerate(events) if e.action == base.RECEIVE]
  for row, event in enumerate(events[: max(received, default=0) + 1]):
    worker, action, ticket = event.worker, event.action, ledger.apply(event)
    key = worker, ledger.incarnations.get(worker, -1)
    failure = killed.get(key)
    if action == base.JOIN:
      excuse.pop(worker, None)
    elif action == base.RECEIVE:
      worked.add(key)
      if failure and row >= failure.after:
        messages_after[key] += 1
    elif action == base.REJECT:
      excuse[worker] = "not finite"
    elif action == base.LOST and ticket and event.time - ticket.time >= slow:
      excuse.setdefault(worker, "took too long")
    elif action == base.LEAVE:
      leavers.add(key)
      if failure is None and key not in worked:
        # Perhaps it was killed before its JOIN was written.
        failure = possible_incarnations.get(key)
      if failure and row >= failure.before:
        how[failure.kind] += 1
        counted.append(failure)
      elif excuse.get(worker) is None and dropped[worker]:
        dropped[worker] -= 1
        how["before a driver rolled back"] += 1
      else:
        how[excuse.get(worker, "NOT EXPLAINED")] += 1
  # [3] Messages that a worker had sent before it was killed still arrive.
  ghosts = [key for key, count in messages_after.items() if count > depth + 1]
  deaths = ", ".join(f"{count} {name}" for name, count in sorted(how.items()))
  text = f"{len(leavers)} left ({deaths or 'none'})"
  text += _not_seen(failures, counted, killed)
  for key in ghosts:
    kind, after = killed[key].kind, killed[key].after
    text += f"; worker {key[0]} worked on after {kind} at row {after}"
  well = not ghosts and not how["NOT EXPLAINED"]
  yield Finding("deaths", text, well)
