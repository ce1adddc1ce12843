"""Chaos: what is killed is counted, and the audit misses nothing."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from asgd import base
from asgd.runtimes import files, protocol
from launch import audit, experiment
from launch import chaos as chaos_lib

if not flags.FLAGS.is_parsed():
  flags.FLAGS(["test"])

ROOT = Path(__file__).parent.parent
DEADLINE = 240  # seconds until a subprocess is taken to hang
CONFIG = (
  "--config=configs/simulate_digits.py",
  "--config.only=dana_zero",
  "--config.workers=3",
  "--config.seeds=0",
  "--config.epochs=10",
  "--config.evaluations=2",
  "--config.curvature_checks=0",
  "--config.live.slowdown=40,40,40",  # they wait most of their time
)
MESSAGES = 888


def chaos(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "launch.chaos", *map(str, arguments)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=DEADLINE,
    check=False,
  )


def injected(result):
  """How often what was done, as the line that counts says."""
  (line,) = re.findall(r"^injected: (.*)$", result.stdout, re.MULTILINE)
  return {kind: int(n) for n, kind in re.findall(r"(\d+) (\w+)", line)}


def said(result):
  """The same, as it was said when it was done."""
  return re.findall(r"^chaos: (\w+): ", result.stderr, re.MULTILINE)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
  """A run in threads, whose process was killed."""
  out = tmp_path_factory.mktemp("disturbed") / "out"
  return out, chaos(
    *CONFIG,
    *("--runtime=threads", "--kinds=driver", f"--out={out}"),
    *("--mtbf=1", "--seconds=1", "--seed=1"),
  )


def test_a_process_is_killed_and_nothing_is_lost(disturbed):
  out, result = disturbed
  assert result.returncode == 0, result.stdout + result.stderr
  assert injected(result)["driver"] == len(said(result)) >= 1
  assert f"{MESSAGES} of {MESSAGES} received, 0 twice" in result.stdout
  assert "FAILED" not in result.stdout
  assert "the audit found nothing wrong" in result.stdout
  assert "Traceback" not in result.stderr


def test_processes_are_killed_and_nothing_is_lost(tmp_path):
  pytest.importorskip("ray")
  result = chaos(
    *CONFIG,
    *("--kinds=worker,shard,term", f"--out={tmp_path / 'out'}"),
    *("--mtbf=1", "--seconds=5", "--config.epochs=5"),
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert sum(injected(result).values()) == len(said(result)) >= 1
  assert "FAILED" not in result.stdout
  assert "(raylet)" not in result.stdout + result.stderr
  assert "Traceback" not in result.stderr


# What the audit finds in a run that is not what it should be.


@pytest.fixture
def cell(disturbed, tmp_path):
  out = shutil.copytree(disturbed[0], tmp_path / "out")
  (folder,) = (out / "cells").iterdir()
  return folder


def entries(folder):
  return files.read_journal(files.journal_path(folder, 0))


def rewrite(folder, entries):
  lines = [protocol.HEADER + "\n", *map(protocol.format_entry, entries)]
  files.journal_path(folder, 0).write_text("".join(lines))


def looked_at(folder, failures=None):
  """Returns what the audit says, by what it looked at."""
  held = json.loads((folder.parent.parent / "config.json").read_text())
  config = {**held["config"], **held["free"]}
  config = {k: v for k, v in config.items() if k in experiment.DEFAULTS}
  exp = experiment.build(config)
  (one,) = exp.cells
  if failures is None:  # whoever left was killed
    left = {
      (e.worker, e.job) for e in entries(folder) if e.action == base.LEAVE
    }
    failures = [audit.Failure("driver", one.name, 0, tuple(left), 0, 10**9)]
  found = audit.findings(exp, one, folder, failures)
  return {finding.what: finding for finding in found}


def wrong(folder, failures=None):
  found = looked_at(folder, failures).values()
  return {finding.what for finding in found if not finding.well}


def nth(entries, action, n):
  """The number of the nth row with an action."""
  rows = [row for row, e in enumerate(entries) if e.action == action]
  return rows[n]


def test_it_finds_nothing_wrong_where_nothing_is(cell):
  found = looked_at(cell)
  assert {what for what in found if not found[what].well} == set()
  assert set(found) == {
    *("jobs", "updates", "deaths", "order", "replay", "records", "accuracy")
  }


def test_it_finds_a_message_that_was_not_received(cell):
  rows = entries(cell)
  del rows[nth(rows, base.RECEIVE, -1)]
  rewrite(cell, rows)
  assert {"jobs", "updates", "replay"} <= wrong(cell)


def test_it_finds_a_message_that_was_received_twice(cell):
  rows = entries(cell)
  first = nth(rows, base.RECEIVE, 200)
  sent, received = (
    next(e for e in rows if e.job == rows[first].job and e.action == action)
    for action in (base.SEND, base.RECEIVE)
  )
  rows += [
    entry._replace(time=rows[-1].time, seq=10**6) for entry in (sent, received)
  ]
  rewrite(cell, rows)
  assert {"jobs", "updates", "replay"} <= wrong(cell)


def test_it_finds_messages_in_another_order(cell):
  rows = entries(cell)
  for row in range(200, len(rows) - 3):
    a, b = rows[row], rows[row + 2]
    if {a.action, b.action} == {base.RECEIVE} and a.worker != b.worker:
      times = a.time, b.time
      rows[row], rows[row + 2] = (
        b._replace(time=times[0]),
        a._replace(time=times[1]),
      )
      break
  rewrite(cell, rows)
  assert wrong(cell) & {"replay", "order"}


def test_it_finds_a_record_that_is_not_there_or_not_true(cell):
  path = files.records_path(cell, 0)
  content = path.read_bytes()
  path.write_bytes(content[: -files.RECORD.itemsize])
  assert {"updates", "records"} <= wrong(cell)
  table = np.frombuffer(content, files.RECORD).copy()
  table["gap"][7] *= 1.0001
  path.write_bytes(table.tobytes())
  assert wrong(cell) == {"records"}


def test_it_finds_an_update_that_was_rolled_back(cell):
  rows = entries(cell)
  last = rows[-1]
  rows.append(last._replace(job=len(rows) - 20, action=base.ROLLBACK, seq=-1))
  rewrite(cell, rows)
  found = looked_at(cell)
  assert not found["updates"].well  # there was a log
  undone = sum(row.action == base.RECEIVE for row in rows[-21:-1])
  assert f"1 rollbacks that undid {undone} updates" in found["updates"].found


def test_it_finds_parameters_that_are_not_those_of_the_trace(cell):
  path = cell / "result.json"
  result = json.loads(path.read_text())
  result["params_sha256"] = "0" * 64
  path.write_text(json.dumps(result))
  assert wrong(cell) == {"replay"}


def test_it_finds_who_left_for_no_reason(cell):
  found = looked_at(cell, [])["deaths"]
  assert not found.well
  assert "NOT EXPLAINED" in found.found


def test_it_finds_who_worked_on_after_it_was_killed(cell):
  failure = audit.Failure("worker", cell.name, 2, ((2, 0),), 10, 10)
  left = [e for e in entries(cell) if e.action == base.LEAVE]
  others = tuple((e.worker, e.job) for e in left if e.worker != 2 or e.job)
  driver = audit.Failure("driver", cell.name, 0, others, 0, 10**9)
  found = looked_at(cell, [failure, driver])["deaths"]
  assert not found.well
  assert "worker 2 worked on after worker at row 10" in found.found


def left_by(entries, failures):
  """What the audit says of deaths, of rows (worker, job, action)."""
  rows = [
    protocol.Entry(float(i), *row) for i, row in enumerate(entries)
  ]
  (finding,) = audit._deaths(rows, failures, 1, 1e9)
  return finding


def test_a_term_is_counted_as_one_whether_or_not_it_had_joined():
  join, leave = base.JOIN, base.LEAVE
  send, receive = base.SEND, base.RECEIVE
  trace = [(0, 0, join), (1, 0, join)]
  trace += [(0, 0, send), (0, 0, receive), (0, 0, leave)]  # rows 2 to 4
  trace += [(0, 1, join), (0, 1, leave), (0, 2, join)]  # rows 5 to 7
  trace += [(1, 1, send), (1, 1, receive)]

  def term(worker, holder, before, **more):
    holders = ((worker, holder),) if holder is not None else ()
    return audit.Failure("term", "a", worker, holders, before, before, **more)

  known = term(0, 0, 3)
  unborn = term(0, None, 5, coming=(0, 1))
  found = left_by(trace, [known, unborn])
  assert found.well
  assert found.found == "2 left (2 term)"
  # One that died before it had joined leaves no row; the next has its number.
  found = left_by(trace[:5] + trace[8:], [known, unborn])
  assert found.found == "1 left (1 term); 1 term before it had joined"
  again = audit.Failure("hang", "a", 0, ((0, 0),), 3, 3)
  late = term(1, 0, 9)
  found = left_by(trace[:5] + trace[8:], [known, again, late])
  assert found.well
  assert found.found == (
    "1 left (1 term); 1 hang to one that was hit before; 1 term when there was"
    " no more to do"
  )
  # Who has worked under that number was not the one.
  worked = [*trace[:6], (0, 2, send), (0, 2, receive), *trace[6:]]
  assert not left_by(worked, [known, unborn]).well


def test_it_finds_that_there_is_no_result(cell):
  (cell / "result.json").unlink()
  assert wrong(cell) == {"result"}


def test_rollbacks_count_what_they_undo_once():
  def entry(action, job=0):
    return protocol.Entry(0.0, 0, job, action)

  rows = [
    *(entry(base.RECEIVE), entry(base.SEND), entry(base.RECEIVE)),
    *(entry(base.RECEIVE), entry(base.ROLLBACK, 1)),
    *(entry(base.RECEIVE), entry(base.ROLLBACK, 0)),
  ]
  assert protocol.rolled_back(rows[:4]) == (0, 0)
  assert protocol.rolled_back(rows[:5]) == (1, 2)
  assert protocol.rolled_back(rows) == (2, 4)


# Mistakes: (arguments, what the one line says).
MISTAKES = {
  "kind": (["--kinds=wroker"], "--kinds=wroker: did you mean 'worker'"),
  "threads": (["--runtime=threads"], "use --kinds=driver, or --runtime=ray"),
  "config": (["--config.epocs=3"], "did you mean 'epochs'"),
}


# The same, without a process of their own.
WRONG_FLAGS = [
  ("patience", "-1", "--patience=-1 must be positive and finite"),
  ("seconds", "nan", "--seconds=nan must be positive and finite"),
  ("seconds", "0", "--seconds=0 must be positive and finite"),
  ("mtbf", "nan", "--mtbf=nan must be positive and finite"),
  ("mtbf", "inf", "--mtbf=inf must be positive and finite"),
  ("fault", ["kill:0:3"], "--fault=kill:0:3: .* give it to launch.serve"),
  ("kinds", "driver,,worker", "--kinds=driver,,worker has a comma too many"),
  ("kinds", "", "--kinds is empty; choose of worker,shard"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FLAGS)
def test_flags_that_cannot_be_are_named(name, value, message):
  with (
    flagsaver.as_parsed(**{name: value}),
    pytest.raises(ValueError, match=message),
  ):
    chaos_lib._check_flags()
    chaos_lib._check_kinds("ray")


def test_it_says_what_was_done_and_what_was_never_tried():
  failures = [
    audit.Failure(kind, "a", 0, (), 0, 0) for kind in ("term", "worker", "term")
  ]
  some = chaos_lib.summary(["term", "worker"], failures)
  assert some == "injected: 1 worker, 2 term"
  first, second = chaos_lib.summary(chaos_lib.KINDS, failures).splitlines()
  assert first == some
  assert second.startswith("never tried: shard, hang, driver; give it more")
  none = chaos_lib.summary(["driver"], [])
  assert none.startswith("injected: nothing\nnever tried: driver;")


class Still:
  """A victim that works when the test says so; each kill of it takes long."""

  def __init__(self, clock):
    self.clock, self.done, self.process = clock, [], self
    self.returncode = None
    self.down = 0.0  # until when

  def poll(self):
    if self.clock.now > 500.0:
      self.returncode = 0
    return self.returncode

  def check(self):
    pass

  def working(self):
    return self.clock.now >= self.down

  def fail(self, kind, rng):
    del rng
    if not self.working():
      return False
    self.done.append(kind)
    if kind == "driver":
      self.clock.now += 20.0  # until its processes have gone
      self.down = self.clock.now + 15.0  # until it works again
    return True


class Clock:
  now = 0.0

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds


def test_a_driver_that_starts_again_takes_no_time_of_the_others(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(chaos_lib, "time", clock)
  victim = Still(clock)
  with flagsaver.as_parsed(seconds="60", mtbf="2"):
    chaos_lib._inject(victim, chaos_lib.KINDS, random.Random(0))
  # Thirty are expected, give or take; each kind comes before any comes again.
  assert 15 <= len(victim.done) <= 45
  assert set(victim.done[:5]) == set(chaos_lib.KINDS)
  assert victim.done.count("driver") >= 4


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, name):
  arguments, message = MISTAKES[name]
  result = chaos(*CONFIG, *arguments, f"--out={tmp_path / 'out'}")
  assert result.returncode == 2, result.stderr
  assert message in result.stderr
  assert len(result.stderr.strip().splitlines()) == 1, result.stderr
  assert not (tmp_path / "out").exists()


def test_a_run_that_hangs_is_ended_and_told(tmp_path):
  result = chaos(
    *CONFIG,
    *("--runtime=threads", "--kinds=driver", "--patience=0.01"),
    f"--out={tmp_path / 'out'}",
  )
  assert result.returncode == 1
  assert "nothing has happened for 0.01 s" in result.stderr
  assert "has hung" in result.stderr
