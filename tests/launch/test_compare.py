"""The command that lays live cells beside their simulations."""

import csv
import json
import subprocess

import kit
import pytest

from asgd.experiment import live_files


@pytest.fixture(scope="module")
def trained(tmp_path_factory, commands_as_here, commands_without_pictures):
  """A live run of two workers, and what was said when it was compared."""
  out = tmp_path_factory.mktemp("trained") / "out"
  done = kit.call(
    "compare",
    "--config=configs/straggler_digits.py",
    "--config.workers=2",
    "--config.model.hidden=(16,)",
    "--config.batch_size=64",
    "--config.epochs=6",
    "--config.live.slowdown=1,2",
    f"--workdir={out}",
    status=0,
  )
  return out, done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_in_order_the_simulation_is_the_live_run(trained):
  out, said = trained
  place = out / "cells" / "asgd-n2-s0"
  text = (place / "compare-table.csv").read_text()
  rows = csv.DictReader(text.splitlines())
  ratios = {row["quantity"]: row["in order, ratio"] for row in rows}
  assert float(ratios["messages/s"]) == pytest.approx(1, rel=0.05)
  assert "times faster" in said
  for name in ("compare.csv", "compare.png", "compare.svg"):
    assert (place / name).stat().st_size
    assert (out / name).stat().st_size
  for name in ("asgd-n2-s0", "ssgd-n2-s0"):
    assert f"{name}: live, and simulated" in said


@pytest.mark.process
@pytest.mark.slow
def test_a_live_run_in_threads_writes_its_spans(trained):
  out, _ = trained
  read = live_files.read(out / "cells" / "asgd-n2-s0")
  messages = sum(len(spans) for spans in read.spans.values()) / 3
  assert messages == len(read.records[0].loss) > 0
  for spans in read.spans.values():
    names = [span.name for span in spans]
    assert names == ["fetch", "compute", "push"] * (len(names) // 3)
    ends = [(span.start, span.end) for span in spans]
    flat = [moment for piece in ends for moment in piece]
    assert flat == sorted(flat)


@pytest.mark.process
@pytest.mark.slow
def test_a_timeline_of_it(trained, tmp_path):
  out, _ = trained
  file = tmp_path / "timeline.json"
  place = out / "cells" / "asgd-n2-s0"
  kit.call("timeline", place, f"--out={file}", status=0)
  events = json.loads(file.read_text())["traceEvents"]
  ends = {}
  for event in events:
    if event["ph"] == "X":
      assert event["ts"] >= ends.get(event["tid"], 0)
      ends[event["tid"]] = event["ts"] + event["dur"]
  assert len(ends) == 3  # two workers and the shard


@pytest.mark.process
@pytest.mark.slow
def test_the_board_is_beside_that_of_the_evaluations(trained):
  out, _ = trained
  pytest.importorskip("tensorboardX")
  assert list((out / "tensorboard" / "asgd-n2-s0" / "live").iterdir())


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["{}"], "--config to train one|holds no finished live cell"),
    ([], "no run is named"),
    (["{}", "--config=configs/straggler_digits.py"], "has its own config:"),
    (["--config=configs/digits.py"], "no run of this config is live"),
    (["{}/cells/nope"], "does not exist"),
    (["{}", "{}"], "is given twice: give each folder once"),
    (["{}", "{}/cells"], "is not the folder of an experiment"),
    (["{}", "{}/x", "--config=configs/digits.py"], "has its own config: drop"),
    (["{}", "--out={}/file"], "/file is a file, or is below one; choose"),
    (["{}", "--out={}/file/x"], "file/x is a file, or is below one; choose"),
  ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
  (tmp_path / "cells").mkdir()
  (tmp_path / "file").touch()
  arguments = [argument.format(tmp_path) for argument in arguments]
  done = kit.call("compare", *arguments, status=2)
  (line,) = done.stderr.strip().splitlines()
  assert any(text in line for text in message.split("|")), line


@pytest.mark.parametrize("status", [2, 3])
def test_a_training_that_is_refused_has_said_why(monkeypatch, status):
  def run(command):
    return subprocess.CompletedProcess(command, status)

  monkeypatch.setattr(subprocess, "run", run)
  straggler = "--config=configs/straggler_digits.py", "--engine=threads"
  assert kit.call("compare", *straggler, status=status).stderr == ""
