"""The command as a user meets it: outputs, resuming, mistakes."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest

from launch import checkpoints

ROOT = Path(__file__).parent.parent
DEADLINE = 240  # seconds until a subprocess is taken to hang
SMALL = (
  "--config=configs/simulate_digits.py",
  "--config.only=nag_asgd,dana_zero",
  "--config.workers=3",
  "--config.seeds=0",
  "--config.epochs=1",
  "--config.schedule.warmup_epochs=0.1",
  "--config.schedule.decay_epochs=()",
  "--config.evaluations=3",
)
# Long enough to be stopped on the way.
LONG = (
  *SMALL[:1],
  "--config.only=dana_zero",
  *SMALL[2:4],
  "--config.epochs=30",
  *SMALL[5:],
  "--config.checkpoint_seconds=0",
)


def command(*arguments):
  return [sys.executable, "-m", "launch.simulate", *map(str, arguments)]


def run(*arguments, cwd=ROOT):
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  return subprocess.run(
    command(*arguments),
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
    timeout=DEADLINE,
    check=False,
  )


def finish(*arguments):
  result = run(*arguments)
  assert result.returncode == 0, result.stderr
  return result


def read(path):
  return json.loads(path.read_text())


def only_cell(out):
  (cell,) = (out / "cells").iterdir()
  return cell


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  out = tmp_path_factory.mktemp("finished") / "out"
  return out, finish(*SMALL, f"--out={out}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  out = tmp_path_factory.mktemp("undisturbed") / "out"
  finish(*LONG, f"--out={out}")
  return read(only_cell(out) / "result.json")


def test_it_says_where_everything_is_and_it_is_there(finished):
  out, result = finished
  for name in (
    "figure.png",
    "figure.svg",
    "figure.csv",
    "table.txt",
    "results.csv",
    "metrics.jsonl",
    "config.json",
  ):
    assert (out / name).stat().st_size > 0, name
  for line in result.stdout.splitlines()[-5:]:
    places = [w for w in line.split() if str(out) in w]
    assert places, line
    for place in places:
      assert Path(place.strip(",;")).exists(), line
  boards = list((out / "tensorboard").rglob("events.out*"))
  assert len(boards) == 2
  assert all(board.stat().st_size > 0 for board in boards)


def test_no_bar_is_drawn_where_there_is_no_terminal(finished):
  _, result = finished
  assert "\r" not in result.stderr
  for cell in ("nag_asgd-n3-s0", "dana_zero-n3-s0"):
    (line,) = (x for x in result.stderr.splitlines() if x.startswith(cell))
    for word in ("accuracy", "staleness", "gap", "effective learning rate"):
      assert word in line


def read_rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def test_metrics_have_a_row_for_each_evaluation(finished):
  out, _ = finished
  rows = read_rows(out / "metrics.jsonl")
  assert [row["message"] for row in rows] == 2 * [29, 58, 87]
  for cell in (out / "cells").iterdir():
    own = read_rows(cell / "metrics.jsonl")
    assert own == [row for row in rows if row["cell"] == cell.name]
    result = read(cell / "result.json")
    assert own[-1]["test_accuracy"] == result["test_accuracy"]


def test_records_and_result_agree(finished):
  out, _ = finished
  for cell in (out / "cells").iterdir():
    records, result = np.load(cell / "records.npz"), read(cell / "result.json")
    assert len(records["loss"]) == result["messages"] == 87
    assert result["staleness_max"] == records["staleness"].max()
    np.testing.assert_allclose(
      result["gap_mean"], records["gap"].mean(), rtol=1e-6
    )
    # Three workers always have two others in flight.
    assert 1.9 < result["staleness_mean"] <= 2


def test_the_csv_holds_the_numbers_of_the_figure_and_the_table(finished):
  out, _ = finished
  points = read_csv(out / "figure.csv")
  assert {point["panel"] for point in points} == {
    *("accuracy", "gap", "time"),
    *("accuracy_curve", "gap_curve", "accuracy_by_time"),
  }
  table = (out / "table.txt").read_text()
  for row in read_csv(out / "results.csv"):
    (point,) = (
      p
      for p in points
      if (p["panel"], p["algorithm"]) == ("accuracy", row["algorithm"])
    )
    assert point["mean"] == row["test_accuracy"]
    (line,) = re.findall(rf"^{row['algorithm']} .*", table, re.MULTILINE)
    printed = float(line.split()[2])
    assert printed == pytest.approx(100 * float(row["test_accuracy"]), abs=0.06)


def test_evaluating_changes_nothing(finished, tmp_path):
  out, _ = finished
  other = tmp_path / "out"
  finish(
    *(a for a in SMALL if "evaluations" not in a),
    "--config.evaluations=11",
    "--config.curvature_checks=11",
    f"--out={other}",
  )
  for cell in (out / "cells").iterdir():
    a, b = (read(o / "cells" / cell.name / "result.json") for o in (out, other))
    assert a["params_sha256"] == b["params_sha256"]
    with (
      np.load(cell / "records.npz") as x,
      np.load(other / "cells" / cell.name / "records.npz") as y,
    ):
      for column in x.files:
        np.testing.assert_array_equal(x[column], y[column])


@pytest.mark.parametrize(
  "name", ["result.json", "records.npz", "metrics.jsonl"]
)
def test_what_is_lost_of_a_finished_cell_is_made_again(finished, name):
  out, _ = finished
  path = out / "cells" / "dana_zero-n3-s0" / name
  result = read(path.with_name("result.json"))
  before = path.read_bytes()
  path.write_bytes(before[: len(before) // 2])
  finish(*SMALL, "--resume", f"--out={out}")
  again = read(path.with_name("result.json"))
  assert {**again, "seconds": result["seconds"]} == result
  if name == "metrics.jsonl":
    assert path.read_bytes() == before


def test_the_final_parameters_are_readable(finished):
  out, _ = finished
  for cell in (out / "cells").iterdir():
    state = flax.serialization.msgpack_restore(
      (cell / "params.msgpack").read_bytes()
    )
    leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
    assert (
      checkpoints.digest(leaves) == read(cell / "result.json")["params_sha256"]
    )


def test_the_resolved_config_is_kept(finished):
  out, _ = finished
  config = read(out / "config.json")
  assert config["config"]["workers"] == [3]
  assert config["config"]["algorithms"]["nag_asgd"]["recipe"] == "nag_asgd"
  assert config["free"]["data source"] == "scikit-learn (embedded)"


def test_a_finished_experiment_is_refused_and_resumed_to_nothing_new(finished):
  out, _ = finished
  before = {p: p.stat().st_mtime_ns for p in out.glob("cells/*/*")}
  again = run(*SMALL, f"--out={out}")
  assert again.returncode == 2
  assert "holds this experiment already; add --resume" in again.stderr
  other = run(*SMALL, "--config.batch_size=8", f"--out={out}")
  assert other.returncode == 2
  assert "batch_size was 16, now 8" in other.stderr
  finish(*SMALL, "--resume", f"--out={out}")
  assert before == {p: p.stat().st_mtime_ns for p in out.glob("cells/*/*")}


def start_and_wait(out, checkpoints):
  """Starts LONG and waits until that many checkpoints have been made."""
  process = subprocess.Popen(
    command(*LONG, f"--out={out}"),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  seen = set()
  end = time.monotonic() + DEADLINE
  while len(seen) < checkpoints:
    assert process.poll() is None, process.stdout.read()
    assert time.monotonic() < end
    seen |= {
      path.name
      for path in out.glob("cells/*/checkpoints/*")
      if path.name.isdigit()
    }
  return process


def assert_same(out, undisturbed):
  result = read(only_cell(out) / "result.json")
  differing = {
    key for key, value in undisturbed.items() if result[key] != value
  }
  assert differing <= {"seconds"}, differing
  rows = (only_cell(out) / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(row)["message"] for row in rows] == [890, 1780, 2670]


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_kill_and_resume_is_the_undisturbed_run(
  tmp_path, undisturbed, checkpoints
):
  out = tmp_path / "out"
  process = start_and_wait(out, checkpoints)
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not (only_cell(out) / "result.json").exists()
  finish(*LONG, "--resume", f"--out={out}")
  assert_same(out, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_is_the_undisturbed_run(
  tmp_path, undisturbed, number
):
  out = tmp_path / "out"
  process = start_and_wait(out, 1)
  process.send_signal(number)
  output, _ = process.communicate(timeout=DEADLINE)
  assert process.returncode == 128 + number
  assert "--resume goes on from there" in output
  assert "Traceback" not in output
  finish(*LONG, "--resume", f"--out={out}")
  assert_same(out, undisturbed)


def newest_checkpoint(out):
  steps = [
    p for p in (only_cell(out) / "checkpoints").iterdir() if p.name.isdigit()
  ]
  return max(steps, key=lambda path: int(path.name))


def truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def largest_array_file(step):
  files = [p for p in (step / "arrays").rglob("*") if p.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def flip(path):
  """Changes one bit in the middle of a file, of the same length."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(bytes(content))


@pytest.mark.parametrize(
  "damage",
  [
    lambda step: truncate(largest_array_file(step)),
    lambda step: flip(largest_array_file(step)),
    lambda step: truncate(next((step / "meta").glob("metadata*"))),
  ],
  ids=["truncated", "flipped", "meta"],
)
def test_a_damaged_checkpoint_is_not_used_and_it_says_so(
  tmp_path, undisturbed, damage
):
  out = tmp_path / "out"
  process = start_and_wait(out, 2)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=DEADLINE)
  step = newest_checkpoint(out)
  damage(step)
  result = finish(*LONG, "--resume", f"--out={out}")
  assert f"checkpoint {step} is damaged and is not used" in result.stderr
  assert (only_cell(out) / f"damaged-{step.name}").is_dir()
  assert_same(out, undisturbed)


# Mistakes: (arguments, what the one line says).
MISTAKES = {
  "algorithm": (
    ["--config.algorithms.asgd.recipe=asgdd"],
    "unknown algorithm 'asgdd'; did you mean 'asgd'",
  ),
  "config key": (
    ["--config.epocs=3"],
    "unknown config key 'epocs'; did you mean 'epochs'",
  ),
  "nested config key": (
    ["--config.algorithms.asg.momentum=1"],
    "unknown config key 'algorithms.asg'; did you mean 'asgd'",
  ),
  "flag": (["--ouput=x"], "Unknown command line flag 'ouput'"),
  "no workers": (["--config.workers=0"], "workers must be"),
  "negative workers": (["--config.workers=-4"], "workers must be"),
  "batch": (
    ["--config.batch_size=5000"],
    "larger than the 1437 training examples",
  ),
  "type": (
    ["--config.epochs=many"],
    "config.epochs must be a number, not 'many'",
  ),
  "nested option": (
    ["--config.algorithms.asgd.momentun=0.9"],
    "did you mean 'momentum'",
  ),
  "title": (
    ["--config.algorithms.asgd.title=DC-ASGD"],
    "have the same title 'DC-ASGD'",
  ),
  "label": (["--config.only=dana"], "did you mean 'dana_zero'"),
  "no config file": (["--config=configs/nope.py"], "there is no such file"),
  "stray word": (["digits"], "unexpected argument 'digits'"),
  "no data": (
    ["--config=configs/simulate_cifar10.py", "--data_dir=/nonexistent"],
    "/nonexistent",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, name):
  arguments, message = MISTAKES[name]
  first = "--config=configs/simulate_digits.py"
  if not arguments[0].startswith("--config="):
    arguments = [first, *arguments]
  out = tmp_path / "out"
  result = run(*arguments, f"--out={out}")
  assert result.returncode == 2, result.stderr
  assert message in result.stderr
  assert len(result.stderr.strip().splitlines()) == 1, result.stderr
  assert result.stdout == ""
  assert not out.exists()


def test_a_nan_stops_with_one_line_and_keeps_what_was_finished(tmp_path):
  out = tmp_path / "out"
  explode = (
    *SMALL[:1],
    *SMALL[2:],
    "--config.learning_rate=1e30",
    "--config.algorithms.dc_asgd.learning_rate=0.01",
    "--config.only=dc_asgd,nag_asgd",
    "--config.on_nan=stop",
  )
  result = run(*explode, f"--out={out}")
  assert result.returncode == 2
  (line,) = (x for x in result.stderr.splitlines() if x.startswith("error:"))
  assert "nag_asgd-n3-s0: the loss is" in line
  assert "lower --config.learning_rate" in line
  assert "Traceback" not in result.stderr
  assert (out / "cells" / "dc_asgd-n3-s0" / "result.json").exists()
  assert not (out / "cells" / "nag_asgd-n3-s0" / "result.json").exists()
  # The remedy that the line names works, and goes on in the same folder.
  explode = [a.replace("on_nan=stop", "on_nan=record") for a in explode]
  recorded = finish(*explode, "--resume", f"--out={out}")
  assert "1 of 1 diverged" in recorded.stdout
  assert read(out / "cells" / "nag_asgd-n3-s0" / "result.json")["diverged"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
  out = tmp_path / "out"
  out.mkdir()
  (out / "thesis.tex").write_text("mine")
  result = run(*SMALL, f"--out={out}")
  assert result.returncode == 2
  assert "is not empty and holds no experiment" in result.stderr
  assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_the_readme_and_ci_run_the_same_test_command():
  ci = [
    line
    for line in (ROOT / ".ci" / "run").read_text().splitlines()
    if line and not line.startswith(("#", "set ", "cd "))
  ]
  readme = (ROOT / "README.md").read_text()
  assert "\n".join(ci) in readme
