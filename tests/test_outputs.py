"""Tables, JSON, folders and progress."""

import io
import json

import numpy as np
import pytest

from launch import cell_book, figures, outputs, progress, report


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


# Whether a run diverged.


def losses(*parts):
  """The losses of so many messages each, with a little noise."""
  rng = np.random.default_rng(0)
  values = np.concatenate([np.linspace(a, b, n) for n, a, b in parts])
  return values + rng.normal(0, 0.02, len(values))


GUESS = np.log(10)


@pytest.mark.parametrize(
  ("loss", "diverged"),
  [
    # Falling, though it is above that of who guesses throughout.
    (losses((400, 3.7, 2.4)), False),
    (losses((44, 3.7, 3.2)), False),
    # Flat: it has learnt nothing, but nothing blew up.
    (losses((400, GUESS, GUESS)), False),
    (losses((400, 0.1, 0.1)), False),
    # Up and down again, to something learnt.
    (losses((50, 2.5, 5.0), (350, 5.0, 1.5)), False),
    # It ends above where it began, in the end or all the time.
    (losses((350, 2.5, 0.5), (50, 3.5, 3.5)), True),
    (losses((400, 2.5, 25.0)), True),
    (losses((400, 0.3, 0.5)), True),
    # Up, and then dead.
    (losses((50, 2.6, 6.0), (350, GUESS, GUESS)), True),
    (losses((100, 2.4, np.nan)), True),
    # Too few to tell beginning and end.
    (losses((15, 1.0, 3.0)), False),
    (np.zeros(0), False),
  ],
)
def test_a_run_has_diverged_if_it_ends_above_where_it_began(loss, diverged):
  for workers in (1, 4, 8):
    assert cell_book.has_diverged(loss, workers, 10) is diverged


# The report of runs.


def finished(**kwargs):
  return {
    **result("A", 8, 0.5, 1.0),
    "cell": "a-n8-s0",
    "test_loss": 1.0,
    "sent_accuracy": 0.5,
    "staleness_mean": 7.0,
    "staleness_max": 9,
    "gap_max": 2.0,
    "effective_rate": 0.1,
    "rate_x_sharpness": 0.5,
    "rate_x_sharpness_limit": 0.4,
    "diverged": False,
    "accepted": 1.0,
    "seconds": 33.0,
    **kwargs,
  }


def test_clocks_are_called_what_they_are():
  simulated, live = finished(), finished()
  del live["simulated_time"]
  rows, table = report._tabulate([simulated])
  assert rows[0]["simulated_time"] == 1.25
  assert " time " in table
  assert figures.time_label([simulated]) == "time (mean batches)"
  rows, table = report._tabulate([live])
  assert rows[0]["seconds"] == 33.0
  assert " seconds " in table
  assert figures.time_label([live]) == "seconds"
  found = {p["panel"]: p for p in figures.numbers([live], [])}
  assert found["time"]["mean"] == 33.0


def test_the_share_that_was_accepted_is_shown_where_some_was_not():
  assert "accepted" not in report._tabulate([finished()])[1]
  assert "accepted" not in report.line(finished())
  rows = [finished(accepted=0.75), finished(algorithm="B")]
  _, table = report._tabulate(rows)
  assert "accepted %" in table
  assert "75.0" in table
  assert "100.0" in table
  assert "75.0 % of the messages accepted" in report.line(rows[0])


def test_a_limit_that_is_not_known_is_a_dash():
  line = report.line(finished(rate_x_sharpness_limit=float("nan")))
  assert line.endswith("(stable below -)")
  assert report.line(finished()).endswith("(stable below 0.4)")
