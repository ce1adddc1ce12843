"""The audit of a live run: it misses nothing that is not as it should be."""

import json
import shutil

import kit
import pytest

from asgd import base
from asgd.experiment import audit, replay, storage
from asgd.experiment import findings as findings_lib
from asgd.live import journal, records


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
  """A run in threads, which was stopped twice and resumed."""
  workdir = tmp_path_factory.mktemp("disturbed") / "out"
  return kit.train_live(workdir, stop=(30, 40), examples=2400)[0]


@pytest.fixture
def cell(disturbed, tmp_path):
  return shutil.copytree(disturbed, tmp_path / "cells" / disturbed.name)


@pytest.fixture
def messages(disturbed):
  """How many messages, and updates, the run had."""
  return json.loads((disturbed / "result.json").read_text())["messages"]


def entries(folder):
  return journal.read_journal(journal.journal_path(folder, 0))


def rewrite(folder, entries):
  kit.write_journal(journal.journal_path(folder, 0), entries)


def findings(folder, failures=None):
  """Yields what the audit says; workers that left were killed unless it is said
  what was done."""
  experiment, one = replay.load(folder)
  if failures is None:
    left = {
      (e.worker, e.job) for e in entries(folder) if e.action == base.LEAVE
    }
    failures = [audit.Failure("driver", one.name, 0, tuple(left), 0, 10**9)]
  return audit.findings(experiment.plan(one), folder, failures)


def finding_of(what, folder, failures=None):
  """Returns what the audit says of one thing."""
  return next(f for f in findings(folder, failures) if f.check == what)


def wrong(folder):
  """Returns what the audit finds wrong: what it looked at -> its words."""
  return {f.check: f.text for f in findings(folder) if not f.passed}


def nth(entries, action, n):
  """The number of the nth row with an action."""
  rows = [row for row, e in enumerate(entries) if e.action == action]
  return rows[n]


def test_it_finds_nothing_wrong_where_nothing_is(cell):
  found = {finding.check: finding for finding in findings(cell)}
  assert {what for what in found if not found[what].passed} == set()
  assert set(found) == {
    *("jobs", "updates", "deaths", "order", "replay", "records", "accuracy")
  }


def refused(folder, row, why):
  """What the audit finds of a row that no protocol allows."""
  path, event = journal.journal_path(folder, 0), entries(folder)[row]
  return {
    "order": f"shard 0: trace row {row} ({event.format()}): {why}",
    "replay": f"{path}, line {row + 2} ({event.format()}): {why}",
  }


def test_it_finds_a_message_that_was_not_received(cell, messages):
  rows = entries(cell)
  place = nth(rows, base.RECEIVE, -1)
  missing = rows.pop(place)
  rewrite(cell, rows)
  # The run may have been stopped once more after its last message.
  left = [e.action == base.LEAVE and e.worker == missing.worker for e in rows]
  last = left.index(True, place)
  assert wrong(cell) == {
    "jobs": f"{messages - 1} of {messages} received, 0 twice",
    "updates": (
      f"{messages - 1} received, {messages} records, {messages} updates"
    ),
    **refused(cell, last, "the worker still holds a ticket"),
  }


def test_it_finds_a_message_that_was_received_twice(cell, messages):
  rows = entries(cell)
  first, end = nth(rows, base.RECEIVE, 100), len(rows)
  sent, received = (
    next(e for e in rows if e.job == rows[first].job and e.action == action)
    for action in (base.SEND, base.RECEIVE)
  )
  rows += [
    entry._replace(time=rows[-1].time, seq=10**6) for entry in (sent, received)
  ]
  rewrite(cell, rows)
  assert wrong(cell) == {
    "jobs": f"{messages} of {messages} received, 1 twice",
    "updates": (
      f"{messages + 1} received, {messages} records, {messages} updates"
    ),
    **refused(cell, end, "the worker has left and did not join again"),
  }


def test_it_finds_messages_in_another_order(cell):
  rows = entries(cell)
  for row in range(100, len(rows) - 3):
    a, sent, b = rows[row : row + 3]
    actions = a.action, sent.action, b.action
    if (
      actions == (base.RECEIVE, base.SEND, base.RECEIVE)
      and a.worker == sent.worker != b.worker
    ):
      rows[row] = b._replace(time=a.time)
      rows[row + 2] = a._replace(time=b.time)
      break
  rewrite(cell, rows)
  found = wrong(cell)
  why = "the worker holds a ticket already"
  assert found.pop("order") == refused(cell, row + 1, why)["order"]
  assert found.pop("replay").startswith("parameters ")
  assert found == {"records": "NOT those of the replay"}


def test_it_finds_a_record_that_is_not_there_or_not_true(cell, messages):
  path = records.records_path(cell, 0)
  content = path.read_bytes()
  path.write_bytes(content[: -records.RECORD.itemsize])
  assert wrong(cell) == {
    "updates": (
      f"{messages} received, {messages - 1} records, {messages - 1} updates"
    ),
    "records": "NOT those of the replay",
  }
  path.write_bytes(content)
  rows = records.read_records(path)
  rows.gap[7] *= 1.0001
  path.unlink()
  records.FileSink(path).append(rows)
  assert wrong(cell) == {"records": "NOT those of the replay"}
  byte = 2 * records.RECORD.itemsize + 10
  path.write_bytes(content[:byte] + b"?" + content[byte + 1 :])
  assert f"{path}, record 2 was changed" in wrong(cell)["files"]


def test_it_finds_an_update_that_was_rolled_back(cell):
  rows = entries(cell)
  last = rows[-1]
  rows.append(last._replace(job=len(rows) - 20, action=base.ROLLBACK, seq=-1))
  rewrite(cell, rows)
  found = finding_of("updates", cell)
  assert not found.passed  # there was a log
  undone = sum(row.action == base.RECEIVE for row in rows[-21:-1])
  assert f"1 rollbacks undid {undone} updates" in found.text


def test_it_finds_parameters_that_are_not_those_of_the_trace(cell):
  path = cell / "result.json"
  result = storage.read_sealed(path)
  result["params_sha256"] = "0" * 64
  storage.write_json(path, storage.sealed(result))
  (words,) = wrong(cell).values()
  assert words.startswith("parameters ")
  assert words.endswith("live 000000000000")


def test_it_finds_who_left_for_no_reason(cell):
  rows = entries(cell)[: nth(entries(cell), base.RECEIVE, -1)]
  count = sum(row.action == base.LEAVE for row in rows)
  assert count
  found = finding_of("deaths", cell, [])
  assert not found.passed
  assert found.text == f"{count} left ({count} NOT EXPLAINED)"


def test_it_finds_who_worked_on_after_it_was_killed(cell):
  rows = entries(cell)
  # On a busy machine a worker may do nothing before the first stop.
  before_stop = rows[10 : nth(rows, base.LEAVE, 0)]
  received = [e.worker for e in before_stop if e.action == base.RECEIVE]
  worker = max(received, key=received.count)
  failure = audit.Failure("worker", cell.name, worker, ((worker, 0),), 10, 10)
  left = [e for e in rows if e.action == base.LEAVE]
  others = tuple((e.worker, e.job) for e in left if e.worker != worker or e.job)
  driver = audit.Failure("driver", cell.name, 0, others, 0, 10**9)
  found = finding_of("deaths", cell, [failure, driver])
  assert not found.passed
  assert f"worker {worker} worked on after worker at row 10" in found.text


def left_by(entries, failures):
  """What the audit says of deaths, of rows (worker, job, action)."""
  rows = [kit.row(float(i), *row) for i, row in enumerate(entries)]
  (finding,) = findings_lib.deaths(rows, failures, 1, 1e9)
  return finding


def test_a_term_is_counted_as_one_whether_or_not_it_had_joined():
  join, leave = base.JOIN, base.LEAVE
  send, receive = base.SEND, base.RECEIVE
  trace = [(0, 0, join), (1, 0, join)]
  trace += [(0, 0, send), (0, 0, receive), (0, 0, leave)]  # rows 2 to 4
  trace += [(0, 1, join), (0, 1, leave), (0, 2, join)]  # rows 5 to 7
  trace += [(1, 1, send), (1, 1, receive)]

  def term(worker, incarnation, before, **more):
    incarnations = ((worker, incarnation),) if incarnation is not None else ()
    rows = before, before
    return audit.Failure("term", "a", worker, incarnations, *rows, **more)

  known = term(0, 0, 3)
  unborn = term(0, None, 5, possible_incarnation=(0, 1))
  found = left_by(trace, [known, unborn])
  assert found.passed
  assert found.text == "2 left (2 term)"
  # One that died before it had joined leaves no row; the next has its number.
  found = left_by(trace[:5] + trace[8:], [known, unborn])
  assert found.text == "1 left (1 term); 1 term before it had joined"
  again = audit.Failure("hang", "a", 0, ((0, 0),), 3, 3)
  late = term(1, 0, 9)
  found = left_by(trace[:5] + trace[8:], [known, again, late])
  assert found.passed
  assert found.text == (
    "1 left (1 term); 1 hang after another failure; 1 term after the last job"
  )
  # Who has worked under that number was not the one.
  worked = [*trace[:6], (0, 2, send), (0, 2, receive), *trace[6:]]
  assert not left_by(worked, [known, unborn]).passed


def test_it_finds_that_there_is_no_result(cell):
  (cell / "result.json").unlink()
  assert wrong(cell) == {"result": f"{cell} has no result.json"}
