"""Tables, JSON, folders and progress."""

import io
import json

import numpy as np
import pytest

from launch import figures, outputs, progress


def test_json_has_null_for_what_is_not_finite():
  text = outputs.to_json(
    {"a": float("nan"), "b": [np.float32(np.inf), np.int32(3)], "c": (1.5,)}
  )
  assert json.loads(text) == {"a": None, "b": [None, 3], "c": [1.5]}


def test_a_table_is_aligned():
  table = outputs.format_table(["name", "n"], [["a", "10"], ["longer", "3"]])
  assert table.splitlines() == [
    "name     n",
    "----------",
    "a       10",
    "longer   3",
  ]


def test_csv_quotes_what_needs_it(tmp_path):
  outputs.write_csv(
    tmp_path / "x.csv", [{"a": "x, y", "b": float("nan")}, {"a": "z", "b": 2}]
  )
  assert (tmp_path / "x.csv").read_text() == 'a,b\n"x, y",\nz,2\n'


def test_folders_are_numbered_and_the_newest_of_its_kind_is_resumed(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  one, two = {"config": {"x": 1}}, {"config": {"x": 2}}

  def make(identity, resume=False):
    folder = outputs.open_folder(None, "job", identity, resume=resume)
    outputs.release()
    return folder.name

  assert [make(one), make(two), make(one)] == ["job-001", "job-002", "job-003"]
  assert make(one, resume=True) == "job-003"
  assert make(two, resume=True) == "job-002"
  with pytest.raises(ValueError, match=r"job-003, config\.x was 1, now 3"):
    make({"config": {"x": 3}}, resume=True)


def test_there_may_be_nothing_to_resume_yet(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = outputs.open_folder(None, "job", {"config": 1}, resume=True)
  assert folder.name == "job-001"


def test_what_a_kill_at_the_start_leaves_is_no_obstacle(tmp_path):
  (tmp_path / ".lock").touch()
  (tmp_path / "config.json.tmp").touch()
  outputs.open_folder(str(tmp_path), "job", {"config": 1}, resume=False)
  assert json.loads((tmp_path / "config.json").read_text()) == {"config": 1}


def test_a_folder_in_use_is_refused(tmp_path):
  out = str(tmp_path / "out")
  outputs.open_folder(out, "job", {"config": 1}, resume=False)
  with pytest.raises(ValueError, match="in use by another process"):
    outputs.open_folder(out, "job", {"config": 1}, resume=True)


@pytest.fixture(autouse=True)
def release():
  """Gives up the locks that a process holds to its end."""
  yield
  outputs.release()


def test_what_is_free_to_change_may_change_on_resuming(tmp_path):
  out = str(tmp_path / "out")
  identity = {"config": {"x": 1}, "free": {"on_nan": "stop"}}
  outputs.open_folder(out, "job", identity, resume=False)
  outputs.release()
  identity["free"]["on_nan"] = "record"
  outputs.open_folder(out, "job", identity, resume=True)
  identity["config"]["x"] = 2
  with pytest.raises(ValueError, match=r"config\.x was 1, now 2"):
    outputs.open_folder(out, "job", identity, resume=True)


def test_a_broken_config_json_is_named(tmp_path):
  (tmp_path / "config.json").write_text('{"config"')
  with pytest.raises(ValueError, match=r"config\.json cannot be read"):
    outputs.open_folder(str(tmp_path), "job", {}, resume=True)


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_gets_a_bar_with_loss_staleness_and_gap():
  stream = Terminal()
  bar = progress.Progress(10, stream=stream)
  bar.update("asgd-n8-s0", 10, 0.25, 7.0, 0.001)
  bar.line("a line that stays")
  bar.close()
  text = stream.getvalue()
  assert "\r" in text
  for word in ("asgd-n8-s0", "loss 0.250", "staleness 7.0", "gap 0.001"):
    assert word in text
  assert "a line that stays\n" in text


def test_anything_else_gets_plain_lines():
  stream = io.StringIO()
  bar = progress.Progress(40, stream=stream, seconds=0)
  bar.skip(10)
  bar.update("asgd-n8-s0", 10, 0.25, 7.0, 0.001)
  bar.close()
  assert stream.getvalue() == (
    " 50% asgd-n8-s0: loss 0.250 staleness 7.0 gap 0.001\n"
  )


def result(algorithm, workers, accuracy, gap):
  return {
    "algorithm": algorithm,
    "workers": workers,
    "test_accuracy": accuracy,
    "gap_mean": gap,
    "simulated_time": 10.0 / workers,
  }


def test_the_points_of_the_figure_are_means_over_seeds():
  results = [
    result("A", 8, 0.5, 1.0),
    result("A", 8, 0.7, 3.0),
    result("A", 16, 0.4, 5.0),
  ]
  curves = [{**row, "epoch": 1.0, "time": 4.0} for row in results]
  points = figures.numbers(results, curves)
  found = {(p["panel"], p["x"]): p for p in points}
  first = found["accuracy", 8]
  assert first["mean"] == pytest.approx(0.6)
  assert first["std"] == pytest.approx(np.sqrt(0.02))
  assert first["seeds"] == 2
  assert found["gap", 16]["mean"] == 5.0
  assert found["time", 8]["mean"] == 1.25
  assert found["accuracy_by_time", 4.0]["mean"] == 0.4
  # Curves are drawn at each algorithm's largest number of workers.
  assert found["gap_curve", 1.0]["workers"] == 16
