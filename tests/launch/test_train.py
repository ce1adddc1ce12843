"""The command as a user meets it: outputs, resuming, shares.

What has to be a process of its own is one: `start`. The rest is done in this
process, which has imported and compiled everything: `call`.
"""

import csv
import json
import re
import shutil
import signal
from pathlib import Path

import flax.serialization
import jax
import kit
import numpy as np
import pytest

from asgd.experiment import cell_files, folder, progress, schema, storage

pytestmark = [
  *(pytest.mark.process, pytest.mark.slow),
  pytest.mark.usefixtures("commands_as_here"),
  pytest.mark.usefixtures("no_pictures"),
]

SMALL = (
  "--config=configs/digits.py",
  "--config.only=nag_asgd,dana_zero",
  "--config.model.hidden=(8,)",
  "--config.workers=3",
  "--config.seeds=0",
  "--config.epochs=1",
  "--config.learning_rate_schedule.warmup_epochs=0.1",
  "--config.learning_rate_schedule.decay_epochs=()",
  "--config.evaluations=3",
  "--config.curvature_checks=0",
)
TINY = "--config=configs/digits.py:tiny", "--config.only=nag_asgd"
ONE = ("--jobs=1",)  # one process, which is all there is to start
# Long enough to be stopped on the way.
LONG = (
  *(a for a in SMALL if "epochs=1" not in a),
  "--config.epochs=6",
  "--config.checkpoint_seconds=0",
)
# The same, which is not to be stopped.
WHOLE = (*LONG, "--config.checkpoint_seconds=1e9")


def finish(*arguments):
  return kit.call("train", *arguments, status=0)


def cells(workdir):
  return sorted((workdir / "cells").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("finished") / "out"
  place = f"--workdir={workdir}"
  return workdir, finish(*SMALL, *ONE, place)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("undisturbed") / "out"
  finish(*WHOLE, *ONE, f"--workdir={workdir}")
  return workdir


# What there is in the end.


def test_it_says_where_everything_is_and_it_is_there(finished):
  workdir, result = finished
  for name in (
    "figure.png",
    "figure.svg",
    "figure.csv",
    "table.txt",
    "results.csv",
    "metrics.jsonl",
    "config.json",
  ):
    assert (workdir / name).stat().st_size > 0, name
  for line in result.stdout.splitlines()[-5:]:
    places = [w for w in line.split() if str(workdir) in w]
    assert places, line
    for place in places:
      assert Path(place.strip(",;")).exists(), line
  boards = list((workdir / "tensorboard").rglob("events.out*"))
  assert len(boards) == 2
  assert all(board.stat().st_size > 0 for board in boards)


def test_no_bar_is_drawn_where_there_is_no_terminal(finished):
  _, result = finished
  assert "\r" not in result.stderr
  for cell in ("nag_asgd-n3-s0", "dana_zero-n3-s0"):
    (line,) = (x for x in result.stderr.splitlines() if x.startswith(cell))
    for word in ("accuracy", "staleness", "gap", "effective learning rate"):
      assert word in line


def test_the_resolved_config_is_kept(finished):
  workdir, _ = finished
  config = storage.read_json(workdir / "config.json")
  assert config["config"]["workers"] == [3]
  assert config["config"]["runs"]["nag_asgd"]["recipe"] == "nag_asgd"
  assert config["free"]["data source"] == "UCI optical digits (embedded)"


def read_rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def test_metrics_have_a_row_for_each_evaluation(finished):
  workdir, _ = finished
  rows = read_rows(workdir / "metrics.jsonl")
  assert [row["message"] for row in rows] == 2 * [29, 58, 87]
  for cell in cells(workdir):
    own = folder.read_rows(cell)
    assert own == [row for row in rows if row["cell"] == cell.name]
    result = folder.finished_result(cell)
    assert own[-1]["test_accuracy"] == result["test_accuracy"]


def test_records_and_result_agree(finished):
  workdir, _ = finished
  for cell in cells(workdir):
    records = np.load(cell / "cell.npz")
    result = folder.finished_result(cell)
    assert len(records["loss"]) == result["messages"] == 87
    assert result["staleness_max"] == records["staleness"].max()
    np.testing.assert_allclose(
      result["gap_mean"], records["gap"].mean(), rtol=1e-6
    )
    # Three workers always have two others in flight.
    assert 1.9 < result["staleness_mean"] <= 2


def test_the_csv_holds_the_numbers_of_the_figure_and_the_table(finished):
  workdir, _ = finished
  points = read_csv(workdir / "figure.csv")
  assert {point["panel"] for point in points} == {
    f"{y}_by_{x}"
    for y in ("test_accuracy", "test_loss")
    for x in ("epoch", "update", "time")
  }
  table = (workdir / "table.txt").read_text()
  for row in read_csv(workdir / "results.csv"):
    last = [
      p
      for p in points
      if (p["panel"], p["algorithm"])
      == ("test_accuracy_by_epoch", row["algorithm"])
    ][-1]
    assert last["mean"] == row["test_accuracy"]
    (line,) = re.findall(rf"^{row['algorithm']} .*", table, re.MULTILINE)
    printed = float(line.split()[2])
    assert printed == pytest.approx(100 * float(row["test_accuracy"]), abs=0.06)


def test_the_final_parameters_are_readable(finished):
  workdir, _ = finished
  for cell in cells(workdir):
    state = flax.serialization.msgpack_restore(
      cell_files.read_file(cell, "params.msgpack")
    )
    leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
    result = folder.finished_result(cell)
    assert storage.digest(leaves) == result["params_sha256"]


# The same cells in other ways.


def bits(workdir):
  return {
    cell.name: folder.finished_result(cell)["params_sha256"]
    for cell in cells(workdir)
  }


def test_a_command_checks_its_config_once(monkeypatch, tmp_path):
  checked, resolve = [], schema.resolve

  def count(config, engines):
    checked.append(config)
    return resolve(config, engines)

  monkeypatch.setattr(schema, "resolve", count)
  finish(*TINY, *ONE, f"--workdir={tmp_path}")
  assert len(checked) == 1


def test_shares_of_the_cells_are_together_the_whole(finished, tmp_path):
  workdir, _ = finished
  other = tmp_path / "out"
  for share in ("1/2", "2/2"):
    result = finish(*SMALL, *ONE, f"--cells={share}", f"--workdir={other}")
    assert len(cells(other)) == int(share[0])
    incomplete = "so far 1 of 2 cells: means are over the seeds"
    assert (incomplete in result.stdout) == (share == "1/2")
  assert bits(other) == bits(workdir)
  ours, theirs = (o / "metrics.jsonl" for o in (other, workdir))
  assert ours.read_text() == theirs.read_text()


def test_a_finished_experiment_is_left_alone_and_may_grow(finished, tmp_path):
  workdir = tmp_path / "out"
  shutil.copytree(finished[0], workdir)
  before = {p: p.stat().st_mtime_ns for p in workdir.glob("cells/*/*")}
  # The other way to write flags, too.
  spaced = [w for a in SMALL for w in a.split("=", 1)]
  finish(*spaced, "--jobs", "1", "--workdir", workdir)
  assert before == {p: p.stat().st_mtime_ns for p in workdir.glob("cells/*/*")}
  other = *SMALL, "--config.batch_size=8", f"--workdir={workdir}"
  refused = kit.call("train", *other, status=2)
  assert "batch_size was 16, now 8" in refused.stderr
  more = [a.replace("seeds=0", "seeds=0,1") for a in SMALL]
  result = finish(*more, *ONE, f"--workdir={workdir}")
  assert len(cells(workdir)) == 4
  assert before.items() <= {
    p: p.stat().st_mtime_ns for p in workdir.glob("cells/*/*")
  }.items()
  assert "2 seeds" in result.stdout


def test_what_is_lost_of_a_finished_cell_is_made_again(finished, tmp_path):
  workdir = tmp_path / "out"
  shutil.copytree(finished[0], workdir)
  path = workdir / "cells" / "dana_zero-n3-s0" / "cell.npz"
  result = folder.finished_result(path.parent)
  before = path.read_bytes()
  path.write_bytes(before[: len(before) // 2])
  told = finish(*SMALL, *ONE, f"--workdir={workdir}")
  assert f"{path} was changed or cut since it was written" in told.stderr
  again = folder.finished_result(path.parent)
  assert {**again, "wall_seconds": result["wall_seconds"]} == result
  rows = storage.read_archive(path, "metrics.jsonl")
  theirs = finished[0] / "cells" / path.parent.name / path.name
  assert rows == storage.read_archive(theirs, "metrics.jsonl")


# Stopping and resuming.


def start_and_wait(workdir, checkpoints):
  """Starts LONG and waits until that many checkpoints have been made."""
  seen = set()

  def saved():
    paths = workdir.glob("cells/*/checkpoints/*")
    seen.update(path for path in paths if path.name.isdigit())
    return len(seen) >= checkpoints

  place = f"--workdir={workdir}"
  return kit.start("train", *LONG, *ONE, place, until=saved)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """A folder whose first cell has two checkpoints and is not finished."""
  workdir = tmp_path_factory.mktemp("killed") / "out"
  process = start_and_wait(workdir, 2)
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not list(workdir.glob("cells/*/cell.npz"))
  return workdir


def assert_same(workdir, undisturbed):
  assert [c.name for c in cells(workdir)] == [
    c.name for c in cells(undisturbed)
  ]
  for ours, theirs in zip(cells(workdir), cells(undisturbed), strict=True):
    result, expected = map(folder.finished_result, (ours, theirs))
    differing = {key for key in expected if result[key] != expected[key]}
    assert differing <= {"wall_seconds"}, differing
    read = cell_files.read_file
    assert read(ours, "metrics.jsonl") == read(theirs, "metrics.jsonl")


def test_a_kill_and_the_same_command_are_the_undisturbed_run(
  tmp_path, killed, undisturbed
):
  workdir = tmp_path / "out"
  shutil.copytree(killed, workdir)
  finish(*LONG, *ONE, f"--workdir={workdir}")
  assert_same(workdir, undisturbed)


def assert_stopped(status, output, number):
  assert status == 128 + number, output
  assert "run the same command again to resume" in output
  assert "Traceback" not in output


def test_an_interrupt_saves_and_the_same_command_goes_on(tmp_path, undisturbed):
  workdir = tmp_path / "out"
  process = start_and_wait(workdir, 1)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=kit.DEADLINE)
  assert_stopped(process.returncode, output, signal.SIGINT)
  finish(*LONG, *ONE, f"--workdir={workdir}")
  assert_same(workdir, undisturbed)


def test_a_signal_to_two_processes_saves_and_two_go_on_to_the_same_bits(
  tmp_path, undisturbed, monkeypatch
):
  workdir = tmp_path / "out"
  place, told = f"--workdir={workdir}", []

  def update(self, cell, news):
    """As soon as a process tells of its messages."""
    if not told:
      signal.raise_signal(signal.SIGTERM)
    told.append(cell)

  with monkeypatch.context() as patch:
    patch.setattr(progress.ProgressBar, "update", update)
    result = kit.call("train", *LONG, "--jobs=2", place)
  assert_stopped(result.returncode, result.stderr, signal.SIGTERM)
  assert "stopping: all training so far is saved first" in result.stderr
  result = finish(*LONG, "--jobs=2", place)
  assert_same(workdir, undisturbed)
  for cell in bits(workdir):
    assert f"{cell}: accuracy" in result.stderr
  for name in ("metrics.jsonl", "figure.csv"):
    assert (workdir / name).read_text() == (undisturbed / name).read_text()


def test_a_nan_stops_with_one_line_and_keeps_what_was_finished(tmp_path):
  workdir = tmp_path / "out"
  explode = (
    *(a for a in SMALL if "only" not in a),
    *ONE,
    "--config.learning_rate=1e30",
    "--config.runs.dc_asgd.learning_rate=0.01",
    "--config.only=dc_asgd,nag_asgd",
    "--config.on_nan=stop",
  )
  result = kit.call("train", *explode, f"--workdir={workdir}")
  assert result.returncode == 2
  (line,) = (x for x in result.stderr.splitlines() if x.startswith("error:"))
  assert "nag_asgd-n3-s0: the loss is" in line
  assert "lower --config.learning_rate" in line
  assert "Traceback" not in result.stderr
  assert (workdir / "cells" / "dc_asgd-n3-s0" / "cell.npz").exists()
  assert not (workdir / "cells" / "nag_asgd-n3-s0" / "cell.npz").exists()
  # The remedy that the line names works, and the run resumes in its folder.
  explode = [a.replace("on_nan=stop", "on_nan=record") for a in explode]
  recorded = finish(*explode, f"--workdir={workdir}")
  assert re.search(r" diverged\n-+\n(?s:.*) 1 of 1\n", recorded.stdout)
  broken = folder.finished_result(workdir / "cells" / "nag_asgd-n3-s0")
  assert broken["diverged"]
