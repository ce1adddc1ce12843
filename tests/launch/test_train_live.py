"""Live training as a user meets it: results, faults, resuming."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import kit
import numpy as np
import pytest

from asgd import base
from asgd.experiment import folder, progress, replay, signals, storage
from asgd.live import processes
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import records_path
from asgd.orders import trace

pytestmark = [
  *(pytest.mark.process, pytest.mark.slow),
  pytest.mark.usefixtures("commands_as_here"),
  pytest.mark.usefixtures("no_pictures"),
]

SMALL = (
  "--engine=threads",
  "--config=configs/digits.py",
  "--config.only=dana_zero",
  "--config.model.hidden=(8,)",
  "--config.workers=3",
  "--config.seeds=0",
  "--config.epochs=2",
  "--config.learning_rate_schedule.warmup_epochs=0.1",
  "--config.learning_rate_schedule.decay_epochs=()",
  "--config.evaluations=3",
  "--config.curvature_checks=0",
  "--config.checkpoint_seconds=0.3",
)
MESSAGES = 177
# Workers that wait most of their time: it can be stopped on the way.
SLOW = (*SMALL, "--config.live.slowdown=50,50,50")
SHARDS = ("--config.server.shards=2",)
CONSISTENT = (*SHARDS, "--config.server.consistent=True")


def only_cell(out):
  (cell,) = (out / "cells").iterdir()
  return cell


def entries(out, index=0):
  path = journal_path(only_cell(out), index)
  return read_journal(path) if path.exists() else []


def received(out):
  if not list(out.glob("cells/*")):
    return 0  # it has not begun
  return sum(entry.action == base.RECEIVE for entry in entries(out))


def memory(out):
  """The folder of a run's shared memory, which is there."""
  running = storage.read_json(only_cell(out) / "running.json")
  path = Path(running["memory"])
  assert path.is_dir()
  return path


def assert_replays(out, *, jobs=MESSAGES):
  """The result is whole, and what its trace says."""
  cell = only_cell(out)
  shards = storage.read_json(out / "config.json")["config"]["server"]["shards"]
  for index in range(shards):
    rows = entries(out, index)
    done = [e.job for e in rows if e.action == base.RECEIVE]
    if not index:
      assert sorted(done) == list(range(jobs))
    # Who dies between the parts of a message leaves one half.
    halves = sum(row.action == base.LOST for row in entries(out))
    assert abs(len(done) - jobs) <= halves
    assert len(set(done)) >= jobs - halves
  result, replayed = folder.finished_result(cell), replay.replay(cell)
  # What was seen of messages may be lost with what they had changed.
  undone = sum(trace.follow(entries(out, i)).undone for i in range(shards))
  assert jobs - undone <= result["messages"] <= jobs
  assert replayed.digest == result["params_sha256"]
  assert replayed.accuracy == result["test_accuracy"]
  rows = (cell / "metrics.jsonl").read_text().splitlines()
  assert json.loads(rows[-1])["message"] == jobs
  assert not (cell / "running.json").exists()
  return replayed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  out = tmp_path_factory.mktemp("finished") / "out"
  place = f"--workdir={out}"
  return out, kit.call("train", *SMALL, *CONSISTENT, place, status=0)


def test_it_leaves_what_a_simulation_leaves_and_its_trace(finished):
  out, result = finished
  for name in (
    *("figure.png", "figure.csv", "table.txt", "results.csv"),
    *("metrics.jsonl", "config.json"),
  ):
    assert (out / name).stat().st_size > 0, name
  cell = only_cell(out)
  for name in ("trace-0.csv", "trace-1.csv", "params.msgpack", "records.npz"):
    assert (cell / name).stat().st_size > 0, name
  assert f"{cell.name}: accuracy" in result.stderr
  rows = (out / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(row)["message"] for row in rows] == [59, 118, 177]
  with np.load(cell / "records.npz") as records:
    assert len(records["loss"]) == MESSAGES
  assert not list(Path("/dev/shm").glob(f"asgd-*/{cell.name}"))
  result = folder.finished_result(cell)
  assert "simulated_time" not in result
  assert result["seconds"] > 0
  assert (result["took_part"], result["rolled_back"]) == (3, 0)


def test_its_trace_is_replayed_to_the_same_parameters(finished):
  out, _ = finished
  replayed = assert_replays(out)
  result = kit.call("replay", only_cell(out), status=0)
  assert "the same parameters as the run, to the bit" in result.stdout
  assert f"{MESSAGES} receive" in result.stdout
  assert f"parameters {replayed.digest[:16]}" in result.stdout


def test_what_was_tampered_with_is_told(finished, tmp_path):
  out = shutil.copytree(finished[0], tmp_path / "out")
  path = only_cell(out) / "result.json"
  result = storage.read_sealed(path)
  result["params_sha256"] = result["params_sha256"][::-1]
  storage.write_json(path, storage.sealed(result))
  told = kit.call("replay", only_cell(out), status=1)
  assert "NOT the parameters of the run" in told.stdout
  assert told.stderr.strip() == "the replay differs from the run"
  path.write_text(path.read_text()[:100])
  told = kit.call("replay", only_cell(out), status=2)
  assert "result.json cannot be read or was changed" in told.stderr


def killed(out, *more):
  """Kills a run after its first checkpoint; returns its command line."""
  arguments = (*SLOW, *more, f"--workdir={out}")

  def saved():
    steps = out.glob("cells/*/checkpoints/[0-9]*")
    return received(out) >= 40 and any(p.name.isdigit() for p in steps)

  process = kit.start("train", *arguments, until=saved)
  process.kill()
  process.communicate()
  return arguments


def after(messages, act, monkeypatch):
  """Lets something happen once a run has received so many messages more."""
  update, left = progress.ProgressBar.update, [messages]

  def counting(self, cell, news):
    update(self, cell, news)
    if left[0] > 0 >= left[0] - news.messages:
      act()
    left[0] -= news.messages

  monkeypatch.setattr(progress.ProgressBar, "update", counting)


def assert_gone_back(result, out, shards):
  """Asserts that the run resumed from its checkpoint, by log and trace."""
  assert re.search(
    r"resuming at message \d+, from the checkpoint of message \d+: \d+ updates",
    result.stderr,
  )
  replayed = assert_replays(out)
  undone = [trace.follow(entries(out, i)).undone for i in range(shards)]
  assert folder.finished_result(only_cell(out))["rolled_back"] == sum(undone)
  rollbacks = [
    entry.job for entry in entries(out) if entry.action == base.ROLLBACK
  ]
  assert len(rollbacks) == 1
  assert rollbacks[0] > 0  # not to the beginning
  assert (replayed.trace.action == base.ROLLBACK).sum() == 1


def test_killed_and_interrupted_it_the_same_command_goes_on(
  tmp_path, monkeypatch
):
  out, copy = tmp_path / "out", tmp_path / "copy"
  arguments = killed(out)
  before = received(out)
  assert memory(out)
  shutil.copytree(out, copy)
  with monkeypatch.context() as patch:
    after(40, lambda: signal.raise_signal(signal.SIGINT), patch)
    stopped = kit.call("train", *arguments, status=128 + signal.SIGINT)
  output = stopped.stderr
  going = f"resuming at message {before}, from shared memory"
  assert going in output, output
  (line,) = (x for x in output.splitlines() if x.startswith("stopped in"))
  assert f"at message {received(out)}; run the same command again" in line
  assert "Traceback" not in output
  held = memory(out)
  kit.call("train", *arguments, status=0)
  assert_replays(out)
  actions = [entry.action for entry in entries(out)]
  joined = [e.worker for e in entries(out) if e.action == base.JOIN]
  # Once in each of three starts; once more if its job took too long.
  assert min(map(joined.count, range(3))) >= 3
  assert actions.count(base.ROLLBACK) == 0
  # All had handed in what they did when it was interrupted, but not before.
  assert 1 <= actions.count(base.LOST) <= 3 + len(joined) - 9
  assert not held.exists()
  # What was copied before has no memory, and its checkpoint.
  again = kit.call("train", *arguments[:-1], f"--workdir={copy}", status=0)
  assert_gone_back(again, copy, 1)


def test_what_the_memory_held_goes_back_to_the_checkpoint(tmp_path):
  out = tmp_path / "out"
  arguments = killed(out, *SHARDS)
  shutil.rmtree(memory(out))
  assert_gone_back(kit.call("train", *arguments, status=0), out, 2)


def test_what_is_not_all_there_is_not_gone_on_with(tmp_path, monkeypatch):
  out = tmp_path / "out"
  arguments = (*SLOW, f"--workdir={out}")
  with monkeypatch.context() as patch:
    after(40, lambda: records_path(only_cell(out), 0).unlink(), patch)
    broken = kit.call("train", *arguments, status=2)
  (line,) = (x for x in broken.stderr.splitlines() if x.startswith("error"))
  assert "records-0.bin is gone: it was deleted while the run wrote it" in line
  held = memory(out)
  again = kit.call("train", *arguments, status=2)
  assert "records-0.bin has 0 records where the run had" in again.stderr
  assert len(again.stderr.splitlines()) == 1
  journal_path(only_cell(out), 0).unlink()
  again = kit.call("train", *arguments, status=2)
  assert "trace-0.csv is missing or empty, but" in again.stderr
  assert held.is_dir()
  shutil.rmtree(held)


def of_ray(process, program):
  """The process of Ray that a command has started."""
  for pid in processes.descendants(process.pid):
    with contextlib.suppress(OSError):
      if os.readlink(f"/proc/{pid}/exe").endswith(f"/{program}"):
        return pid
  raise AssertionError(f"no {program}")


@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_when_ray_itself_is_killed_one_line_says_so_and_nothing_is_left(
  tmp_path, program
):
  pytest.importorskip("ray")
  out = tmp_path / "out"
  arguments = (*SLOW, "--engine=ray", "--config.workers=1", f"--workdir={out}")
  process = kit.start("train", *arguments, until=lambda: received(out))
  started = processes.descendants(process.pid)
  os.kill(of_ray(process, program), signal.SIGKILL)
  output, _ = process.communicate(timeout=kit.DEADLINE)
  assert process.returncode == 2, output
  *_, line = output.strip().splitlines()
  assert line.startswith("error: Ray's own process (")
  assert line.endswith(signals.RERUN)
  assert "Raylet is terminated" not in output
  assert "Traceback" not in output
  end = time.monotonic() + kit.DEADLINE
  while left := [pid for pid in started if runs(pid)]:
    assert time.monotonic() < end, left
    time.sleep(0.02)


def runs(pid):
  try:
    return processes.process_stat(pid)[0] not in "ZX"
  except OSError:
    return False


def test_a_folder_without_a_live_run_has_no_trace(tmp_path):
  result = kit.call("replay", tmp_path)
  kit.assert_one_line(result, "is not the folder of a cell")
