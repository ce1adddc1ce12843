"""The line of a cell, its warnings, and the table."""

import fcntl

import kit
import pytest

from asgd.experiment import engines, folder, report
from asgd.experiment.engines import Column
from asgd.experiment.engines.mesh import MESH
from asgd.experiment.engines.simulate import SIMULATE
from asgd.experiment.progress import Silent
from asgd.experiment.signals import Stopped

ENGINES = {"simulate": SIMULATE, "mesh": MESH}


def finished(**kwargs):
  return {
    "cell": "a-n8-s0",
    "algorithm": "A",
    "engine": "simulate",
    "recipe": "asgd",
    "workers": 8,
    "seed": 0,
    "test_accuracy": 0.5,
    "test_loss": 1.0,
    "updates": 100,
    "staleness_mean": 7.0,
    "staleness_max": 9,
    "gap_mean": 1.0,
    "gap_max": 2.0,
    "effective_rate": 0.1,
    "learning_rate": 0.1,
    "rate_x_sharpness": 0.5,
    "sustained": 0.45,
    "rate_x_sharpness_limit": 0.4,
    "diverged": False,
    "accepted": 1.0,
    "simulated_time": 1.25,
    **kwargs,
  }


def mesh(**kwargs):
  row = finished(
    engine="mesh", workers=1, mesh="data 2", seconds=3.25, **kwargs
  )
  del row["simulated_time"], row["accepted"]
  return row


def said(**kwargs):
  return report.result_lines(finished(**kwargs), lambda row: "as described")


def test_the_line_of_a_cell():
  assert said() == ["a-n8-s0: accuracy 50.0 %, as described"]
  (line,) = said(test_accuracy=float("nan"))
  assert line == "a-n8-s0: test loss 1, as described"
  (line,) = said(test_accuracy=None, test_measure=0.25)
  assert line == "a-n8-s0: measure 25.0 %, as described"
  (line,) = said(test_accuracy=None, test_loss=None)
  assert line == "a-n8-s0: as described"
  (line,) = said(test_accuracy=None, test_loss=None, test_acc=0.914)
  assert line == "a-n8-s0: acc 0.914, as described"


def test_a_line_has_a_loss_once_and_no_nan():
  has_both = {"test_accuracy": 0.5, "test_loss": 0.25}
  assert engines.test_loss_text(has_both) == "test loss 0.250, "
  nan = float("nan")
  for accuracy, loss in ((nan, 0.25), (0.5, nan), (nan, nan)):
    row = {"test_accuracy": accuracy, "test_loss": loss}
    assert not engines.test_loss_text(row)


def test_a_rate_that_stays_above_the_limit_is_warned_of_with_a_remedy():
  _, warning = said(sustained=0.8)
  assert "stayed at 0.8 or more" in warning
  assert "try a learning rate of 0.05" in warning
  assert "a cure such as dana_zero" in warning
  _, warning = said(sustained=0.8, recipe="dana_zero")
  assert "cure" not in warning
  assert len(said(sustained=0.8, rate_x_sharpness_limit=float("nan"))) == 1
  assert len(said(sustained=None)) == 1


def test_divergence_is_warned_of():
  _, warning = said(diverged=True)
  assert "the loss diverged. Try a lower learning rate" in warning


def table(*results):
  return report.tabulate(results, ENGINES)[1]


def test_one_row_for_each_run_and_number_of_workers():
  rows, text = report.tabulate(
    [
      *(finished(), finished(seed=1, test_accuracy=0.7)),
      *(finished(workers=16), finished(algorithm="B", diverged=True)),
    ],
    ENGINES,
  )
  shape = [(r["algorithm"], r["workers"], r["seeds"]) for r in rows]
  assert sorted(shape) == [("A", 8, 2), ("A", 16, 1), ("B", 8, 1)]
  (first,) = (row for row in rows if row["seeds"] == 2)
  assert first["test_accuracy"] == pytest.approx(0.6)
  assert first["test_accuracy_std"] == pytest.approx(0.02**0.5)
  assert "60.0 ± 14.1" in text
  (line,) = (line for line in text.splitlines() if line.startswith("B "))
  assert line.endswith("1 of 1")
  assert text.splitlines()[0].endswith("diverged")


def test_clocks_are_called_what_they_are():
  assert "time" in table(finished()).split()
  text = table(mesh())
  assert "seconds" in text.split()
  assert "3.2" in text.split()
  assert " time " not in text


def test_runs_of_several_engines_have_the_columns_that_they_share():
  text = table(finished(), mesh(algorithm="B"))
  header, _, first, second = text.splitlines()
  for word in ("engine", "updates", "time", "seconds", "staleness", "gap"):
    assert word in header.split()
  assert "rate x sharp." not in header
  assert first.split()[4:7] == ["simulate", "100", "1.25"]
  assert "mesh" in second.split()


def test_the_table_and_results_csv_have_the_same_counts():
  sent = {"codec": "top_k", "bytes_down": 1, "compression_up": 2.0}
  seeds = [
    finished(**sent, seed=i, bytes_up=nbytes, compression_down=1.0)
    for i, nbytes in enumerate((1_000_000, 3_000_000))
  ]
  (row,), text = report.tabulate(seeds, ENGINES)
  header, _, line = text.splitlines()[:3]
  assert row["bytes_up"] == 3_000_000
  assert line[header.index("MB up") :].split()[0] == "3"


def test_the_share_that_was_accepted_is_shown_where_some_was_not():
  assert "accepted" not in table(finished())
  assert "diverged" not in table(finished())
  text = table(finished(accepted=0.75), finished(algorithm="B"))
  assert "accepted %" in text
  assert "accepted %" in table(finished(accepted=0.0))
  assert "75.0" in text
  assert "100.0" in text


def test_a_measure_of_the_task_is_shown_where_there_is_one():
  assert "measure" not in table(finished())
  assert "measure %" in table(finished(test_measure=0.25))


def test_tables_and_coordinators_have_columns_of_their_own():
  unknown = dict.fromkeys(("gap_mean", "effective_rate", "rate_x_sharpness"))
  rows = {"differential_mean": -1.5, "fresh_reads": 0.5, "bytes_up": 2e6}
  plain = finished(algorithm="B")
  header, _, first, second = table(finished(**rows), plain).splitlines()
  assert header.endswith("clock diff.  fresh %  MB up  MB down")
  assert first.split()[-4:] == ["-1.50", "50.0", "2", "-"]
  assert second.split()[-4:] == ["-", "-", "-", "-"]
  batch = {"evaluations_of_batch": 60, "gradient_norm": 0.25}
  header, _, line = table(finished(**unknown, **batch)).splitlines()
  assert line.split()[-3:] == ["100", "60", "0.25"]
  assert "gradient norm" in header
  # What none of the runs has is left out.
  assert "gap" not in header.split()
  assert "rate x sharp." not in header


def test_a_value_that_is_a_list_or_a_word_is_shown_as_it_is():
  column = Column("x", "x")
  assert report._cell_text(column, [{"x": [3, 2]}, {"x": [3, 2]}]) == "3 2"
  assert report._cell_text(column, [{"x": "stash"}]) == "stash"
  assert report._cell_text(column, [{"x": True}]) == "yes"
  assert report._cell_text(column, [{"x": 4}, {"x": 5}]) == "5"
  assert report._cell_text(column, [{}]) == "-"


def test_a_seed_without_a_value_does_not_hide_those_of_others():
  seeds = finished(staleness_max=7), finished(seed=1, staleness_max=None)
  (row,), header, ((*cells, _),) = report.table_rows(seeds, ENGINES)
  assert cells[header.index("max")] == "7" and row["staleness_max"] == 7


def test_what_was_not_tested_has_the_loss_of_training():
  nan = {"test_accuracy": None, "test_loss": None, "train_loss": 0.25}
  headers = [c.header for c in report.table_columns([finished(**nan)], ENGINES)]
  assert headers[:4] == ["run", "workers", "mean train loss", "time"]
  # Of an engine that has a column of it that is the one.
  headers = [c.header for c in report.table_columns([mesh(**nan)], ENGINES)]
  assert headers.count("train loss") == 1
  assert "mean train loss" not in headers


# When an experiment ends.


def test_commands_write_the_report_of_a_folder_one_after_the_other(
  tmp_path, monkeypatch
):
  exp = kit.train_tiny(tmp_path)
  locked = []

  def write_tables(out, *_):
    with (out / ".lock").open() as file, pytest.raises(BlockingIOError):
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    locked.append(out)
    return ""

  monkeypatch.setattr(report, "write_tables", write_tables)
  report.write(tmp_path, exp)
  assert locked == [tmp_path]


def test_an_experiment_that_is_stopped_has_a_report_of_what_is_finished(
  tmp_path, capsys
):
  exp = kit.tiny(seeds=(0, 1))
  folder.open_folder(str(tmp_path), "x", exp)
  before = sorted(tmp_path.iterdir())
  with pytest.raises(Stopped), report.report_at_end(tmp_path, exp, Silent()):
    raise Stopped("stopped", 15)
  assert sorted(tmp_path.iterdir()) == before  # no cell is finished
  for done in (1, 2):
    with pytest.raises(Stopped), report.report_at_end(tmp_path, exp, Silent()):
      kit.train(exp, tmp_path, done - 1)
      raise Stopped("stopped", 15)
    said = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert f"{done} of 2 cells finished" in page
    part = "so far 1 of 2 cells"
    texts = said, page, (tmp_path / "table.txt").read_text()
    assert [part in text for text in texts] == 3 * [done == 1]
    assert "report.html" in said
