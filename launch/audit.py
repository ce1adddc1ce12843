"""Whether a live run is what it says: the audit that ends `launch.chaos`.

  jobs      each was received once, at the lead and at every shard
  updates   each acknowledged message is an update and a row of the records;
            without a log (config.server.log=0), how many were rolled back
  deaths    who was killed is gone in the trace and did no more work, and who is
            gone in the trace was killed, or took too long
  order     the trace is one that the protocol allows
  replay    the trace leads to the same records and parameters, to the bit
"""

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import base, orders
from asgd.runtimes import files, protocol, shard
from asgd.runtimes.deadlines import DEAD
from launch import experiment, outputs, replay


class Failure(NamedTuple):
  """One thing that was done to a process."""

  kind: str  # worker, shard, hang, term or driver
  cell: str
  index: int  # worker or shard
  holders: tuple[tuple[int, int], ...]  # (worker, holder) who died by it
  before: int  # rows of the lead's journal before it was done
  after: int  # and when it had taken effect
  coming: tuple[int, int] | None = None  # (worker, holder) it was to become: it
  # had not joined yet, and may or may not do so before it dies


class Finding(NamedTuple):
  """One thing that was looked at."""

  what: str
  found: str
  well: bool


def _jobs(journals, jobs, consistent) -> Iterator[Finding]:
  """Each job once at the lead, and what the other shards make of it."""
  lost = sum(entry.action == base.LOST for entry in journals[0])
  lead = [e.event[1:] for e in journals[0] if e.action != base.ROLLBACK]
  for index, entries in enumerate(journals):
    counts = collections.Counter(
      entry.job for entry in entries if entry.action == base.RECEIVE
    )
    missing = sum(job not in counts for job in range(jobs))
    doubled = sum(counts.values()) - len(counts)
    strange = sum(not 0 <= job < jobs for job in counts)
    found = f"{len(counts)} of {jobs} received, {doubled} twice"
    well = missing == doubled == strange == 0
    name = "jobs" if len(journals) == 1 else f"jobs of shard {index}"
    if index and consistent:
      same = lead == [e.event[1:] for e in entries if e.action != base.ROLLBACK]
      found += ", in the order of shard 0" if same else ", NOT as shard 0"
      well = well and same
    elif index:
      # A worker that dies between its parts of a message leaves one half.
      here = sum(entry.action == base.LOST for entry in entries)
      found += f" (shard 0 lost {lost} tickets, this one {here})"
      well = not strange and doubled <= lost and missing <= here
    yield Finding(name, found, well)


def _updates(folder, journals, result, every, log) -> Iterator[Finding]:
  """What was acknowledged is in the parameters and in the records."""
  for index, entries in enumerate(journals):
    name = "updates" if len(journals) == 1 else f"updates of shard {index}"
    received = sum(entry.action == base.RECEIVE for entry in entries)
    records = files.read_records(files.records_path(folder, index))
    rollbacks, undone = protocol.rolled_back(entries)
    found = f"{received} received, {len(records.loss)} records"
    well = len(records.loss) == received
    if rollbacks:
      found += f", {rollbacks} rollbacks that undid {undone} updates"
      # What a shard saw since it last looked up dies with it.
      well = not log and received - undone <= len(records.loss) <= received
    else:
      updates = int(records.update[-1]) if len(records.loss) else 0
      accepted = int(records.accepted.sum())
      found += f", {updates} updates"
      well = well and updates == accepted // every
      if index == 0:
        well = well and updates == result["updates"]
    yield Finding(name, found, well)


def _not_seen(failures, counted, killed) -> str:
  """What was done to a worker that left no row in the trace, and why."""
  why: collections.Counter[str] = collections.Counter()
  for failure in failures:
    if failure.kind not in ("worker", "hang", "term"):
      continue
    if any(failure is other for other in counted):
      continue
    if not failure.holders:
      text = "before it had joined"
    elif any(killed[key] is not failure for key in failure.holders):
      text = "to one that was hit before"
    else:
      text = "when there was no more to do"
    why[f"{failure.kind} {text}"] += 1
  return "".join(f"; {count} {text}" for text, count in sorted(why.items()))


def _deaths(entries, failures, depth, slow) -> Iterator[Finding]:
  """Who was killed is gone, and who is gone was killed or took too long."""
  killed: dict[tuple[int, int], Failure] = {}
  coming: dict[tuple[int, int], Failure] = {}
  for failure in failures:
    for key in failure.holders:
      killed.setdefault(key, failure)
    if failure.coming:
      coming.setdefault(failure.coming, failure)
  worked: set[tuple[int, int]] = set()
  counted: list[Failure] = []  # who of them is gone in the trace
  holder: dict[int, int] = {}  # worker -> number
  opened: dict[tuple[int, int], float] = {}
  excuse: dict[int, str] = {}  # worker -> how its last ticket died
  left: set[tuple[int, int]] = set()
  done_dead: collections.Counter[tuple[int, int]] = collections.Counter()
  how: collections.Counter[str] = collections.Counter()
  # Who has no more to do may go.
  last = max(
    (r for r, e in enumerate(entries) if e.action == base.RECEIVE), default=0
  )
  for row, entry in enumerate(entries[: last + 1]):
    when, worker, job, action = entry.event
    key = worker, holder.get(worker, -1)
    failure = killed.get(key)
    if action == base.JOIN:
      holder[worker] = job
      excuse.pop(worker, None)
    elif action in (base.SEND, base.KEEP):
      opened[worker, job] = when
    elif action == base.RECEIVE:
      worked.add(key)
      if failure and row >= failure.after:
        done_dead[key] += 1
    elif action == base.REJECT:
      excuse[worker] = "not finite"
    elif action == base.LOST:
      if when - opened.pop((worker, job)) >= slow:
        excuse.setdefault(worker, "took too long")
    elif action == base.LEAVE:
      left.add(key)
      if failure is None and key not in worked:
        failure = coming.get(key)
      if failure and row >= failure.before:
        how[failure.kind] += 1
        counted.append(failure)
      else:
        how[excuse.get(worker, "NOT EXPLAINED")] += 1
  # What was on its way when a worker was killed still comes in.
  ghosts = [key for key, count in done_dead.items() if count > depth + 1]
  deaths = ", ".join(f"{count} {name}" for name, count in sorted(how.items()))
  found = f"{len(left)} left ({deaths or 'nobody'})"
  found += _not_seen(failures, counted, killed)
  for worker, number in ghosts:
    failure = killed[worker, number]
    found += f"; worker {worker} worked on after {failure.kind} at"
    found += f" row {failure.after}"
  well = not ghosts and not how["NOT EXPLAINED"]
  yield Finding("deaths", found, well)


def _same(a: base.Records, b: base.Records) -> bool:
  return all(
    np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
    for x, y in zip(a, b, strict=True)
  )


def _replay(folder, result, rollbacks, data_dir) -> Iterator[Finding]:
  """The trace leads to the same."""
  replayed = replay.run(folder, data_dir=data_dir)
  live = result["params_sha256"]
  found = f"parameters {replayed.digest[:12]}, live {live[:12]}"
  yield Finding("replay", found, replayed.digest == live)
  if not rollbacks:
    records = files.read_records(files.records_path(folder, 0))
    well = _same(records, replayed.records)
    found = "the same" if well else "NOT those of the replay"
    yield Finding("records", found, well)
  accuracies = replayed.accuracy, result["test_accuracy"]
  found = "{:.2f} %, live {:.2f} %".format(*(100 * x for x in accuracies))
  well = replayed.digest != live or accuracies[0] == accuracies[1]
  yield Finding("accuracy", found, well)


def findings(
  exp: experiment.Experiment,
  cell: experiment.Cell,
  folder: Path,
  failures: Sequence[Failure] = (),
  *,
  data_dir: str | None = None,
) -> Iterator[Finding]:
  """Yields what there is to say of a finished cell.

  Args:
    exp: the experiment.
    cell: which one.
    folder: of the cell.
    failures: what was done to it on purpose.
    data_dir: as for `replay.run`.
  """
  result = outputs.read_json(folder / "result.json")
  if result is None:
    yield Finding("result", f"{folder} has no result.json", False)
    return
  try:
    _, journals = replay.load(folder)
  except ValueError as error:
    yield Finding("journals", str(error), False)
    return
  server, rules = exp.config["server"], experiment.rules(exp, cell)
  every = experiment.recipe(exp, cell).every
  consistent = server["consistent"] and server["shards"] > 1
  yield from _jobs(journals, experiment.messages(exp, cell), consistent)
  yield from _updates(folder, journals, result, every, server["log"])
  # No ladder is shorter, see `asgd.runtimes.deadlines`.
  slow = DEAD * exp.config["live"]["late_seconds"]
  yield from _deaths(journals[0], failures, rules.depth, slow)
  wrong = []
  for index, entries in enumerate(journals):
    # In rounds a worker may start one more before the first is received; other
    # shards may still hold what the lead has closed.
    depth = len(entries) if index or rules.round else rules.depth
    try:
      orders.check(shard.entries_to_trace(entries), depth=depth)
    except ValueError as error:
      wrong.append(f"shard {index}: {error}")
  yield Finding("order", "; ".join(wrong) or "obeys the protocol", not wrong)
  rollbacks = any(protocol.rolled_back(entries)[0] for entries in journals)
  try:
    yield from _replay(folder, result, rollbacks, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)
