"""Chaos: what is killed is counted, and the audit misses nothing."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asgd import base
from asgd.runtimes import files, protocol
from launch import audit, experiment

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
    *("--mtbf=1", "--seconds=4", "--seed=1"),
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
  assert audit.rolled_back(rows[:4]) == (0, 0)
  assert audit.rolled_back(rows[:5]) == (1, 2)
  assert audit.rolled_back(rows) == (2, 4)


# Mistakes: (arguments, what the one line says).
MISTAKES = {
  "kind": (["--kinds=wroker"], "--kinds=wroker: did you mean 'worker'"),
  "threads": (["--runtime=threads"], "use --kinds=driver, or --runtime=ray"),
  "config": (["--config.epocs=3"], "did you mean 'epochs'"),
}


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
