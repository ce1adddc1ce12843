"""What an audit looks at in the traces and records of a live run."""

import collections
from collections.abc import Iterator
from typing import NamedTuple

from asgd import base
from asgd.live.deadlines import DEAD
from asgd.orders import trace


class Failure(NamedTuple):
  """One thing that was done to a process."""

  kind: str  # worker, shard, hang, term or driver
  cell: str
  index: int  # worker or shard
  holders: tuple[tuple[int, int], ...]  # (worker, holder) that died by it
  before: int  # rows of the lead's journal before it was done
  after: int  # and when it had taken effect
  # (worker, holder) it was to become: it may or may not join before it dies
  coming: tuple[int, int] | None = None


class Finding(NamedTuple):
  """One thing that was looked at."""

  what: str
  text: str
  well: bool


def _of_shard(what, index, journals):
  return what if len(journals) == 1 else f"{what} of shard {index}"


def _decisions(events):
  rows = (event for event in events if event.action != base.ROLLBACK)
  return [(*event.key, event.job, event.action) for event in rows]


def jobs(journals, jobs, consistent, missed=0) -> Iterator[Finding]:
  """Each job once at the lead, but for those that a result says were `missed`,
  and what the other shards make of it."""
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
      # A worker that dies between its parts of a message leaves one half.
      text += f" (shard 0 lost {lost[0]} tickets, this one {lost[index]})"
      well = not strange and doubled <= lost[0] and missing <= lost[index]
    yield Finding(_of_shard("jobs", index, journals), text, well)


def updates(journals, sinks, result, every, log) -> Iterator[Finding]:
  """What was acknowledged is in the parameters and in the records."""
  for index, (events, records) in enumerate(zip(journals, sinks, strict=True)):
    ledger = trace.follow(events)
    received = len(ledger.received) + ledger.undone
    text = f"{received} received, {len(records.loss)} records"
    well = len(records.loss) == received
    if ledger.rollbacks:
      text += f", {ledger.rollbacks} rollbacks undid {ledger.undone} updates"
      # Records that a shard had not written yet die with it.
      least = len(ledger.received)
      well = not log and least <= len(records.loss) <= received
    else:
      updates = int(records.update[-1]) if len(records.loss) else 0
      accepted = int(records.accepted.sum())
      text += f", {updates} updates"
      well = well and updates == accepted // every
      well = well and (index > 0 or updates == result["updates"])
    yield Finding(_of_shard("updates", index, journals), text, well)


def of_workers(events, records, plan, depth, failures, missed=0):
  """Yields Findings of a cell whose workers write records of their own jobs.

  Args:
    events: rows of all workers, by their times.
    records: columns of all workers.
    plan: of the cell.
    depth: jobs that a worker may have begun at once.
    failures: what was done to its processes, in this order.
    missed: jobs that its result says were not done.
  """
  yield from jobs([events], plan.messages, False, missed)
  received = sum(event.action == base.RECEIVE for event in events)
  exits = sum(event.action == base.LEAVE for event in events)
  text = f"{received} received, {len(records.loss)} records"
  # A worker may exit between a row and its record.
  well = received - exits <= len(records.loss) <= received
  yield Finding("updates", text, well)
  slow = DEAD * plan.run.config["live"]["late_seconds"]
  # The next driver goes back to a checkpoint, and drops the rows after it.
  drivers = [i for i, f in enumerate(failures) if f.kind == "driver"]
  last = drivers[-1] + 1 if drivers else 0
  yield from deaths(events, failures[last:], depth, slow, failures[:last])


def _not_seen(failures, counted, killed) -> str:
  """What was done to a worker that left no row in the trace, and why."""
  why: collections.Counter[str] = collections.Counter()
  for failure in failures:
    seen = any(failure is other for other in counted)
    if seen or failure.kind not in ("worker", "hang", "term"):
      continue
    if not failure.holders:
      text = "before it had joined"
    elif any(killed[key] is not failure for key in failure.holders):
      text = "to one that was hit before"
    else:
      text = "when there was no more to do"
    why[f"{failure.kind} {text}"] += 1
  return "".join(f"; {count} {text}" for text, count in sorted(why.items()))


def deaths(events, failures, depth, slow, before=()) -> Iterator[Finding]:
  """Killed workers are gone, and workers that are gone were killed or slow; or
  by failures `before` rows were dropped, in the trace or not."""
  dropped = collections.Counter(f.index for f in before if f.kind != "shard")
  # By (worker, holder): the first failure of each.
  killed = {key: f for f in reversed(failures) for key in f.holders}
  coming = {f.coming: f for f in reversed(failures) if f.coming}
  ledger: trace.Ledger[trace.Event] = trace.Ledger()
  worked, left = set(), set()  # (worker, holder)
  counted: list[Failure] = []  # of workers that are gone in the trace
  excuse: dict[int, str] = {}  # worker -> how its last ticket died
  messages_after: collections.Counter[tuple[int, int]] = collections.Counter()
  how: collections.Counter[str] = collections.Counter()
  # A worker may leave when there is nothing more to do.
  received = [row for row, e in enumerate(events) if e.action == base.RECEIVE]
  for row, event in enumerate(events[: max(received, default=0) + 1]):
    worker, action, ticket = event.worker, event.action, ledger.obey(event)
    key = worker, ledger.holders.get(worker, -1)
    failure = killed.get(key)
    if action == base.JOIN:
      excuse.pop(worker, None)
    elif action == base.RECEIVE:
      worked.add(key)
      if failure and row >= failure.after:
        messages_after[key] += 1
    elif action == base.REJECT:
      excuse[worker] = "not finite"
    elif action == base.LOST and event.time - ticket.time >= slow:
      excuse.setdefault(worker, "took too long")
    elif action == base.LEAVE:
      left.add(key)
      if failure is None and key not in worked:
        failure = coming.get(key)
      if failure and row >= failure.before:
        how[failure.kind] += 1
        counted.append(failure)
      elif excuse.get(worker) is None and dropped[worker]:
        dropped[worker] -= 1
        how["before a driver went back"] += 1
      else:
        how[excuse.get(worker, "NOT EXPLAINED")] += 1
  # What was on its way when a worker was killed still comes in.
  ghosts = [key for key, count in messages_after.items() if count > depth + 1]
  deaths = ", ".join(f"{count} {name}" for name, count in sorted(how.items()))
  text = f"{len(left)} left ({deaths or 'none'})"
  text += _not_seen(failures, counted, killed)
  for key in ghosts:
    kind, after = killed[key].kind, killed[key].after
    text += f"; worker {key[0]} worked on after {kind} at row {after}"
  well = not ghosts and not how["NOT EXPLAINED"]
  yield Finding("deaths", text, well)
