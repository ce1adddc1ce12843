"""Whether a live run is what it says: the audit that ends `asgd chaos`.

jobs      each was received once, at the lead and at every shard
updates   each acknowledged message is an update and a row of the records;
          without a log (config.server.log=0), how many were rolled back
deaths    workers that were killed are gone in the trace and did no more work,
          and workers that are gone in the trace were killed, or took too long
order     the trace is one that the protocol allows
replay    the trace leads to the same records and parameters, to the bit
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import base, orders
from asgd.experiment import replay as replay_lib
from asgd.experiment import storage
from asgd.experiment.engines.coordinated import CoordinatedPlan
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.engines.tables import TablePlan
from asgd.live.deadlines import DEAD
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import read_records, records_path
from asgd.live.tables import files as table_files
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


def _jobs(journals, jobs, consistent) -> Iterator[Finding]:
  """Each job once at the lead, and what the other shards make of it."""
  lost = [sum(e.action == base.LOST for e in events) for events in journals]
  for index, events in enumerate(journals):
    received = [e.job for e in events if e.action == base.RECEIVE]
    unique, expected = set(received), set(range(jobs))
    missing, strange = len(expected - unique), len(unique - expected)
    doubled = len(received) - len(unique)
    text = f"{len(unique)} of {jobs} received, {doubled} twice"
    well = missing == doubled == strange == 0
    if index and consistent:
      same = _decisions(journals[0]) == _decisions(events)
      text += ", in the order of shard 0" if same else ", NOT as shard 0"
      well = well and same
    elif index:
      # A worker that dies between its parts of a message leaves one half.
      text += f" (shard 0 lost {lost[0]} tickets, this one {lost[index]})"
      well = not strange and doubled <= lost[0] and missing <= lost[index]
    yield Finding(_of_shard("jobs", index, journals), text, well)


def _updates(journals, sinks, result, every, log) -> Iterator[Finding]:
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


def _deaths(events, failures, depth, slow, before=()) -> Iterator[Finding]:
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


def _replay(folder, result, records, data_dir) -> Iterator[Finding]:
  """The trace leads to the same."""
  replayed = replay_lib.replay(folder, data_dir=data_dir)
  live = result["params_sha256"]
  digests = f"parameters {replayed.digest[:12]}, live {live[:12]}"
  yield Finding("replay", digests, replayed.digest == live)
  if records is not None:
    well = all(
      np.array_equal(live_column, column, equal_nan=True)
      for live_column, column in zip(records, replayed.records, strict=True)
    )
    text = "the same" if well else "NOT those of the replay"
    yield Finding("records", text, well)
  score, name = replayed.evaluation, "accuracy"
  again, accuracy = score.accuracy, result["test_accuracy"]
  if accuracy is not None:
    text = f"{100 * again:.2f} %, live {100 * accuracy:.2f} %"
  else:  # of a task without
    name, again, accuracy = "test loss", score.loss, result["test_loss"]
    text = f"{again:.4g}, live {accuracy:.4g}"
  well = replayed.digest != live or again == accuracy
  yield Finding(name, text, well)


def _of_coordinator(
  folder, events, records, result, data_dir
) -> Iterator[Finding]:
  """Of a run of a coordinator: each job counts once, whoever did copies of it;
  the driver that goes on drops rows, so deaths cannot be counted."""
  received = sum(event.action == base.RECEIVE for event in events)
  counted = records.job[records.accepted]
  twice = len(counted) - len(np.unique(counted))
  text = f"{received} received, {len(counted)} counted, {twice} twice"
  yield Finding("jobs", text, not twice and received == len(records.loss))
  try:
    orders.check(events)
  except ValueError as error:
    yield Finding("order", str(error), False)
  else:
    yield Finding("order", "obeys the protocol", True)
  try:
    yield from _replay(folder, result, None, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)


def _of_tables(folder, plan, result, failures, data_dir):
  """Of tables, whose shards have orders of their own (`asgd.live.tables`)."""
  try:
    events = [*trace.events(table_files.read_trace(folder, plan.workers))]
    parts = [
      table_files.read_table_records(folder, w) for w in range(plan.workers)
    ]
  except (ValueError, OSError) as error:
    yield Finding("files", str(error), False)
    return
  yield from _jobs([events], plan.messages, False)
  received = sum(event.action == base.RECEIVE for event in events)
  records = table_files.by_time(parts).plain
  lives = sum(event.action == base.LEAVE for event in events)
  text = f"{received} received, {len(records.loss)} records"
  # A worker may die between a row and its record.
  well = received - lives <= len(records.loss) <= received
  yield Finding("updates", text, well)
  slow = DEAD * plan.run.config["live"]["late_seconds"]
  # The next driver goes back to a checkpoint, and drops the rows after it.
  drivers = [i for i, f in enumerate(failures) if f.kind == "driver"]
  last = drivers[-1] + 1 if drivers else 0
  parts = failures[last:], plan.settings.clock_every, slow, failures[:last]
  yield from _deaths(events, *parts)
  try:
    records = records if len(records.loss) == received else None
    yield from _replay(folder, result, records, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)


def findings(
  plan: ServerPlan | CoordinatedPlan | TablePlan,
  folder: Path,
  failures: Sequence[Failure] = (),
  *,
  data_dir: str | None = None,
) -> Iterator[Finding]:
  """Yields what there is to say of a finished cell, after these failures."""
  result = storage.read_json(folder / "result.json")
  if result is None:
    yield Finding("result", f"{folder} has no result.json", False)
    return
  config = plan.run.config
  if isinstance(plan, TablePlan):
    yield from _of_tables(folder, plan, result, failures, data_dir)
    return
  server = config["server"]
  try:
    # As they are: what is wrong with them is for the findings to say.
    shards = range(server["shards"])
    journals = [read_journal(journal_path(folder, i)) for i in shards]
    sinks = [read_records(records_path(folder, i)) for i in shards]
  except (ValueError, OSError) as error:
    yield Finding("files", str(error), False)
    return
  if isinstance(plan, CoordinatedPlan):
    yield from _of_coordinator(folder, journals[0], sinks[0], result, data_dir)
    return
  rules = plan.rules()
  consistent = server["consistent"] and server["shards"] > 1
  yield from _jobs(journals, plan.messages, consistent)
  every, log = plan.recipe.every, server["log"]
  yield from _updates(journals, sinks, result, every, log)
  # No ladder is shorter, see `asgd.live.deadlines`.
  slow = DEAD * config["live"]["late_seconds"]
  yield from _deaths(journals[0], failures, rules.depth, slow)
  wrong = []
  for index, events in enumerate(journals):
    # In rounds a worker may start one more before the first is received; other
    # shards may still hold what the lead has closed.
    depth = len(events) if index or rules.round else rules.depth
    try:
      orders.check(events, depth=depth)
    except ValueError as error:
      wrong.append(f"shard {index}: {error}")
  yield Finding("order", "; ".join(wrong) or "obeys the protocol", not wrong)
  rollbacks = any(e.action == base.ROLLBACK for e in itertools.chain(*journals))
  try:
    records = None if rollbacks else sinks[0]
    yield from _replay(folder, result, records, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)
