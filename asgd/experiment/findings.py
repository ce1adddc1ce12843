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
  # (worker, incarnation) pairs that the failure ended
  incarnations: tuple[tuple[int, int], ...]
  rows_before: int  # rows of the lead's journal before the failure
  rows_after: int  # rows when the failure had taken effect
  # (worker, incarnation) of a process that had not joined yet, and may have
  # joined before it ended.
  possible_incarnation: tuple[int, int] | None = None


class Finding(NamedTuple):
  """The result of one check."""

  check: str  # name of the check
  text: str
  passed: bool  # whether the check passed


def _shard_check_name(check: str, index: int, journals: Sequence[Any]) -> str:
  """Returns the name of a check of one of several shards."""
  return check if len(journals) == 1 else f"{check} of shard {index}"


def _decisions(events: Journal) -> list[tuple[int, ...]]:
  """Returns a journal's rows without times and rollbacks."""
  rows = (event for event in events if event.action != base.ROLLBACK)
  return [(*event.key, event.job, event.action) for event in rows]


def jobs(
  journals: Sequence[Journal], n_jobs: int, consistent: bool, missed: int = 0
) -> Iterator[Finding]:
  """Checks that the lead and the other shards received each job once.

  Args:
    journals: the journal of each shard.
    n_jobs: the number of jobs of the cell.
    consistent: whether all shards have the lead's order.
    missed: jobs that no worker did, according to the result.
  """
  # int[S]: the number of tickets that each shard gave up.
  lost_tickets = [
    sum(e.action == base.LOST for e in events) for events in journals
  ]
  for index, events in enumerate(journals):
    received = [e.job for e in events if e.action == base.RECEIVE]
    unique, expected = set(received), set(range(n_jobs))
    missing, unexpected = len(expected - unique), len(unique - expected)
    duplicates = len(received) - len(unique)
    text = f"{len(unique)} of {n_jobs} received, {duplicates} twice"
    if missed:
      text += f", {missed} missed by its result"
    passed = missing == missed and duplicates == unexpected == 0
    if index and consistent:
      is_same = _decisions(journals[0]) == _decisions(events)
      text += ", in the order of shard 0" if is_same else ", NOT as shard 0"
      passed = passed and is_same
    elif index:
      # A worker may fail when only some shards have its message. Without the
      # lead's order, a shard may then miss as many messages as it lost tickets,
      # and repeat as many as the lead lost.
      lead_lost, lost = lost_tickets[0], lost_tickets[index]
      text += f" (shard 0 lost {lead_lost} tickets, this one {lost})"
      passed = not unexpected and duplicates <= lead_lost and missing <= lost
    yield Finding(_shard_check_name("jobs", index, journals), text, passed)


def updates(
  journals: Sequence[Journal],
  shard_records: Sequence[base.Records],
  result: Mapping[str, Any],
  messages_per_update: int,
  log_slots: int,
) -> Iterator[Finding]:
  """Checks that acknowledged messages are in the parameters and the records.

  Args:
    journals: the journal of each shard.
    shard_records: the records of each shard.
    result: the result of the cell.
    messages_per_update: messages in one update.
    log_slots: config.server.log; 0 allows rollbacks.
  """
  pairs = zip(journals, shard_records, strict=True)
  for index, (events, records) in enumerate(pairs):
    ledger = trace.follow(events)
    received = len(ledger.received) + ledger.undone
    text = f"{received} received, {len(records.loss)} records"
    passed = len(records.loss) == received
    if ledger.rollbacks:
      text += f", {ledger.rollbacks} rollbacks undid {ledger.undone} updates"
      # Records that a failed shard had not written yet are lost.
      least_records = len(ledger.received)
      passed = not log_slots and least_records <= len(records.loss) <= received
    else:
      n_updates = int(records.update[-1]) if len(records.loss) else 0
      accepted = int(records.accepted.sum())
      text += f", {n_updates} updates"
      # The last accepted messages may be too few for another update.
      passed = passed and n_updates == accepted // messages_per_update
      passed = passed and (index > 0 or n_updates == result["updates"])
    yield Finding(_shard_check_name("updates", index, journals), text, passed)


def worker_findings(
  events: Journal,
  records: base.Records,
  plan: Any,
  depth: int,
  failures: Sequence[Failure],
  missed: int = 0,
) -> Iterator[Finding]:
  """Yields findings of a cell in which each worker records its jobs.

  Args:
    events: rows of all workers, sorted by time.
    records: the records of all workers.
    plan: the plan of the cell.
    depth: jobs that a worker may have open at once.
    failures: injected into the cell's processes, in this order.
    missed: jobs that no worker did, according to the result.
  """
  yield from jobs([events], plan.messages, False, missed)
  received = sum(event.action == base.RECEIVE for event in events)
  exits = sum(event.action == base.LEAVE for event in events)
  text = f"{received} received, {len(records.loss)} records"
  # A worker may exit between a row and its record.
  passed = received - exits <= len(records.loss) <= received
  yield Finding("updates", text, passed)
  slow = DEAD_FACTOR * plan.run.config["live"]["late_seconds"]
  # The driver that follows a killed one drops the rows after its checkpoint.
  drivers = [i for i, f in enumerate(failures) if f.kind == "driver"]
  first_kept = drivers[-1] + 1 if drivers else 0
  yield from deaths(
    events, failures[first_kept:], depth, slow, failures[:first_kept]
  )


def _unseen_failures(
  failures: Sequence[Failure],
  explained: Sequence[Failure],
  killed: Mapping[tuple[int, int], Failure],
) -> str:
  """Returns a text on failures of workers without a LEAVE in the trace, and
  why there is none."""
  counts: collections.Counter[str] = collections.Counter()
  for failure in failures:
    # By identity: two failures of one worker may be equal.
    has_leave = any(failure is other for other in explained)
    if has_leave or failure.kind not in ("worker", "hang", "term"):
      continue
    if not failure.incarnations:
      reason = "before it had joined"
    elif any(killed[key] is not failure for key in failure.incarnations):
      reason = "after another failure"
    else:
      reason = "after the last job"
    counts[f"{failure.kind} {reason}"] += 1
  return "".join(f"; {n} {reason}" for reason, n in sorted(counts.items()))


def deaths(
  events: Journal,
  failures: Sequence[Failure],
  depth: int,
  slow: float,
  earlier_failures: Sequence[Failure] = (),
) -> Iterator[Finding]:
  """Checks that the trace has a LEAVE and no later work of killed workers, and
  that workers with a LEAVE were killed or slow.

  Args:
    events: rows of the trace.
    failures: injected since the last rollback of a driver.
    depth: jobs that a worker may have open at once.
    slow: age in seconds from which a ticket may be lost because the shard took
      its worker for dead; the worker may then leave.
    earlier_failures: failures before that rollback; the trace may have their
      rows.
  """
  # [1] The failures that explain a LEAVE: by worker, by incarnation.
  parties = (f.party for f in earlier_failures if f.kind != "shard")
  earlier_kills = collections.Counter(parties)
  # By (worker, incarnation): the first failure of each.
  killed = {key: f for f in reversed(failures) for key in f.incarnations}
  possible_kills = {f.possible_incarnation: f for f in reversed(failures)}
  ledger: trace.Ledger[trace.Event] = trace.Ledger()
  worked, leavers = set(), set()  # (worker, incarnation)
  explained: list[Failure] = []  # with a LEAVE in the trace
  loss_reasons: dict[int, str] = {}  # worker -> why its last ticket was lost
  # (worker, incarnation) -> messages received after its failure.
  messages_after: collections.Counter[tuple[int, int]] = collections.Counter()
  explanations: collections.Counter[str] = collections.Counter()  # of LEAVEs
  # [2] Follow the trace. After the last message a worker may leave without a
  # reason.
  received = [row for row, e in enumerate(events) if e.action == base.RECEIVE]
  for row, event in enumerate(events[: max(received, default=0) + 1]):
    worker, action, ticket = event.worker, event.action, ledger.apply(event)
    incarnation = worker, ledger.incarnations.get(worker, -1)
    failure = killed.get(incarnation)
    if action == base.JOIN:
      loss_reasons.pop(worker, None)
    elif action == base.RECEIVE:
      worked.add(incarnation)
      if failure and row >= failure.rows_after:
        messages_after[incarnation] += 1
    elif action == base.REJECT:
      loss_reasons[worker] = "not finite"
    elif action == base.LOST and ticket and event.time - ticket.time >= slow:
      loss_reasons.setdefault(worker, "took too long")
    elif action == base.LEAVE:
      leavers.add(incarnation)
      if failure is None and incarnation not in worked:
        # Perhaps the worker was killed before its JOIN was written.
        failure = possible_kills.get(incarnation)
      if failure and row >= failure.rows_before:
        explanations[failure.kind] += 1
        explained.append(failure)
      elif loss_reasons.get(worker) is None and earlier_kills[worker]:
        earlier_kills[worker] -= 1
        explanations["before a driver rolled back"] += 1
      else:
        explanations[loss_reasons.get(worker, "NOT EXPLAINED")] += 1
  # [3] Messages that a worker had sent before it was killed still arrive.
  still_active = [key for key, n in messages_after.items() if n > depth + 1]
  reasons = ", ".join(f"{n} {why}" for why, n in sorted(explanations.items()))
  text = f"{len(leavers)} left ({reasons or 'none'})"
  text += _unseen_failures(failures, explained, killed)
  for incarnation in still_active:
    kind, row = killed[incarnation].kind, killed[incarnation].rows_after
    text += f"; worker {incarnation[0]} worked on after {kind} at row {row}"
  passed = not still_active and not explanations["NOT EXPLAINED"]
  yield Finding("deaths", text, passed)
