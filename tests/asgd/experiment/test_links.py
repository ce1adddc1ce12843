"""Symbolic links in a results folder: replaced by files, refused as folders."""

import shutil

import kit
import pytest

from asgd import experiment
from asgd.experiment import boards, figure, folder, overlay, report


@pytest.fixture(scope="module", autouse=True)
def small_pictures():
  """A figure is an empty one, which is quickly drawn."""

  def draw(points, results, stem, heading):
    figure.save(figure.new_figure(1, 1, 1, 1)[0], heading, stem)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(figure, "draw", draw)
    yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A tiny experiment of two seeds, and the folder of its results."""
  workdir = tmp_path_factory.mktemp("links") / "out"
  exp = kit.train_tiny(workdir, seeds=(0, 1))
  report.write(workdir, exp)
  return exp, workdir


@pytest.fixture
def copied(trained, tmp_path):
  exp, workdir = trained
  return exp, shutil.copytree(workdir, tmp_path / "out")


def linked(workdir, home):
  """Puts a link in the place of each file; returns the links."""
  home.mkdir()
  files = [path for path in workdir.iterdir() if path.is_file()]
  for path in files:
    shutil.move(path, home / path.name)
    path.symlink_to(home / path.name)
  return files


def contents(home):
  return {path.name: path.read_bytes() for path in home.iterdir()}


def test_no_output_is_written_through_a_link(copied, tmp_path):
  exp, workdir = copied
  (workdir / ".lock").unlink()
  home = tmp_path / "home"
  links = linked(workdir, home)
  assert {"figure.svg", "report.html", "config.json", "results.csv"} <= {
    path.name for path in links
  }
  for path in home.iterdir():
    path.write_bytes(path.read_bytes() + b" ")  # JSON as it was
  before = contents(home)
  folder.open_folder(str(workdir), "x", exp)
  report.write(workdir, exp)
  assert contents(home) == before
  assert not [path for path in links if path.is_symlink()]


def test_no_comparison_is_written_through_a_link(trained, tmp_path):
  _, workdir = trained
  other = shutil.copytree(workdir, tmp_path / "other")
  out, home = tmp_path / "compared", tmp_path / "home"
  overlay.write([workdir, other], out, experiment.ENGINES)
  links = linked(out, home)
  for path in home.iterdir():
    path.write_bytes(path.read_bytes() + b" ")
  before = contents(home)
  overlay.write([workdir, other], out, experiment.ENGINES)
  assert contents(home) == before
  assert not [path for path in links if path.is_symlink()]


def test_a_comparison_does_not_follow_a_link_that_appears(
  trained, tmp_path, monkeypatch
):
  _, workdir = trained
  other = shutil.copytree(workdir, tmp_path / "other")
  out, home = tmp_path / "compared", tmp_path / "home"
  home.mkdir()
  check = overlay._check_out

  def race(out):
    check(out)
    out.symlink_to(home)

  monkeypatch.setattr(overlay, "_check_out", race)
  with pytest.raises(ValueError, match="compared is a symbolic link"):
    overlay.write([workdir, other], out, experiment.ENGINES)
  assert not list(home.iterdir())


def test_a_lock_that_is_a_link_is_refused(copied, tmp_path):
  exp, workdir = copied
  home = tmp_path / "thesis.txt"
  home.write_text("years of work")
  (workdir / ".lock").unlink(missing_ok=True)
  (workdir / ".lock").symlink_to(home)
  with pytest.raises(ValueError, match="lock is a symbolic link"):
    folder.open_folder(str(workdir), "x", exp)
  assert home.read_text() == "years of work"


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_a_cell_is_trained_in_no_folder_of_a_link(copied, tmp_path, inner):
  exp, workdir = copied
  home, cell = tmp_path / "home", exp.cells[0]
  home.mkdir()
  place = workdir / "cells" / cell.name
  shutil.rmtree(place)
  if inner:
    place.mkdir()
  (place / inner).symlink_to(home)
  with pytest.raises(ValueError, match="is a symbolic link"):
    kit.train(exp, workdir)
  assert not list(home.iterdir())


def test_a_finished_cell_of_a_link_is_read_and_left_as_it_is(copied, tmp_path):
  exp, workdir = copied
  home, cell = tmp_path / "home", exp.cells[0]
  place = workdir / "cells" / cell.name
  shutil.move(place, home)
  (home / "result.json").touch()  # as a kill at its end leaves it
  place.symlink_to(home)
  before = contents(home)
  assert kit.train(exp, workdir).result["cell"] == cell.name
  assert contents(home) == before


@pytest.mark.skipif(not boards.is_available(), reason="no tensorboardX")
def test_no_board_is_joined_through_a_link(copied, tmp_path):
  exp, workdir = copied
  home, cell = tmp_path / "home", exp.cells[0]
  home.mkdir()
  (home / "events.out.tfevents.1.mine").write_text("years of work")
  board = workdir / "tensorboard" / cell.name
  shutil.rmtree(board, ignore_errors=True)
  board.symlink_to(home)
  report.write(workdir, exp)
  assert (home / "events.out.tfevents.1.mine").read_text() == "years of work"
