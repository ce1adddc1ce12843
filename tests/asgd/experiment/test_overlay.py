"""Several experiments in one figure and one page."""

import csv
import errno
import os
import shutil

import kit
import pytest

from asgd import experiment
from asgd.experiment import folder, overlay

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a tiny experiment, and a copy of it."""
  root = tmp_path_factory.mktemp("overlay")
  kit.train_tiny(root / "one")
  shutil.copytree(root / "one", root / "two")
  return root


def write(*places, out):
  return overlay.write(places, out, experiment.ENGINES)


def test_runs_of_one_name_are_told_apart_by_their_folders(trained, tmp_path):
  said = write(trained / "one", trained / "two", out=tmp_path / "out")
  assert f"{tmp_path}/out/report.html" in said
  lines = (tmp_path / "out" / "results.csv").read_text().splitlines()
  rows = list(csv.DictReader(lines))
  names = [row["algorithm"] for row in rows]
  assert [name.rpartition(" ")[2] for name in names] == ["(one)", "(two)"]
  first, second = ({**row, "algorithm": ""} for row in rows)
  assert first == second
  text = (tmp_path / "out" / "report.html").read_text()
  assert "one and two" in text
  assert (tmp_path / "out" / "figure.pdf").exists()


def test_what_cannot_be_laid_over_each_other_is_refused(trained, tmp_path):
  one = trained / "one"
  with pytest.raises(ValueError, match="one is given twice: give each"):
    write(one, one, out=tmp_path)
  with pytest.raises(ValueError, match="nothing is not the folder of an exp"):
    write(one, tmp_path / "nothing", out=tmp_path)
  with pytest.raises(ValueError, match="is an experiment's own folder"):
    write(one, trained / "two", out=one)
  empty = tmp_path / "empty"
  shutil.copytree(one, empty, ignore=shutil.ignore_patterns("cells"))
  out = tmp_path / "out"
  with pytest.raises(ValueError, match="empty holds no finished cell"):
    write(one, empty, out=out)
  with pytest.raises(ValueError, match="/one, which is an experiment's own"):
    write(one, trained / "two", out=one / "cells" / "x")
  out.mkdir()
  for name in ("report.html", "thesis.tex"):
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name}, which no comparison wrote"):
      write(one, trained / "two", out=out)
    assert [path.name for path in out.iterdir()] == [name]
    (out / name).unlink()


def test_what_is_left_out_is_told(trained, tmp_path):
  one, two, out = tmp_path / "one", trained / "two", tmp_path / "out"
  shutil.copytree(trained / "one", one)
  exp = kit.tiny(seeds=(0, 1, 2))
  folder.open_folder(str(one), "x", exp)
  path = kit.train(exp, one, 1).place / "cell.npz"
  path.write_bytes(path.read_bytes()[:-1])
  for _ in range(2):  # an earlier comparison is written over
    said = write(one, two, out=out)
    text = (out / "report.html").read_text()
    for line in (
      f"{path} was changed or cut since it was written; the cell is left out",
      f"{one}: 1 of 3 cells are finished; means and figures include only these",
    ):
      assert f"warning: {line}\n" in said
      assert line in text
    assert f"{two}: " not in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_where_it_cannot_be_written_is_named(
  trained, tmp_path, number, monkeypatch
):
  def refuse(*_):
    raise OSError(number, os.strerror(number), "x.tmp")

  monkeypatch.setattr(os, "replace", refuse)
  remedy = "make room" if number == errno.ENOSPC else "make it writable"
  with pytest.raises(ValueError, match=f"cannot write to .*/out .*{remedy} .*"):
    write(trained / "one", trained / "two", out=tmp_path / "out")
  assert not list(tmp_path.rglob("*.tmp"))
