"""A command that ends with fewer cells than it was asked for says so in its
last line, and ends with a status of its own."""

import shutil

import kit
import pytest

from asgd.experiment import cell_files, folder, identities

pytestmark = [
  *(pytest.mark.process, pytest.mark.slow),
  pytest.mark.usefixtures("commands_as_here"),
  pytest.mark.usefixtures("no_pictures"),
]
INCOMPLETE = 3
FIGURE = f"""
def get_config():
  return {kit.TINY_RUN | {"runs": {x: {"recipe": "asgd"} for x in "ab"}}}

def get_figure():
  claims = [dict(name="c", says="s", kind="bound", column="gap_mean")]
  claims[0].update(of="a", above=0)
  panel = dict(title="t", column="gap_mean", xlabel="x", ylabel="y")
  panel["series"] = dict(a=[(1, "a")])
  paper = dict(title="t", paper="p", about="a", tuned="nothing")
  return dict(paper, claims=claims, panels=[panel])
"""


@pytest.fixture
def path(tmp_path):
  """A figure's file, whose config has two runs of a cell each."""
  path = tmp_path / "mine.py"
  path.write_text(FIGURE)
  return path


def assert_incomplete(result, *said):
  """Asserts that the last line of a command is of its missing cells."""
  last = result.stderr.splitlines()[-1]
  assert last.startswith("error: only 1 of the 2 requested cells are")
  for text in said:
    assert text in last


@pytest.mark.parametrize("jobs", [1, 2])
def test_cells_that_another_command_trains_are_missing(tmp_path, path, jobs):
  workdir = tmp_path / "out"
  arguments = f"--config={path}", f"--workdir={workdir}", "--jobs=1"
  kit.call("train", *arguments, "--cells=1/2", status=0)  # all it was asked for
  if jobs == 2:  # each process is given a cell
    shutil.rmtree(workdir / "cells" / "a-n2-s0")
  place = workdir / "cells" / "b-n2-s0"
  place.mkdir()
  with cell_files.locked_cell(place):
    locked = *arguments[:2], f"--jobs={jobs}"
    result = kit.call("train", *locked, status=INCOMPLETE)
  assert_incomplete(result, "without b-n2-s0 (it has no result); run the same")
  assert f"{place} is in use by another process" in result.stderr
  assert "so far 1 of 2 cells" in result.stdout
  kit.call("train", *arguments, status=0)
  files = sorted(workdir.glob("cells/*/*"))
  assert [file.name for file in files] == 2 * ["cell.npz"]
  before = [file.stat().st_mtime_ns for file in files]
  result = kit.call("train", *arguments, status=0)
  assert [file.stat().st_mtime_ns for file in files] == before
  assert "cells" not in result.stdout.split("\n\n")[1]


def test_cells_whose_result_does_not_count_are_missing(
  tmp_path, path, monkeypatch
):
  foreign = "config.batch_size was 16, now 32"

  def of_b(description, written):
    return foreign if description["cell"]["label"] == "b" else ""

  monkeypatch.setattr(identities, "difference_from", of_b)
  arguments = f"--config={path}", f"--workdir={tmp_path / 'out'}", "--jobs=1"
  result = kit.call("train", *arguments, status=INCOMPLETE)
  assert_incomplete(result, "without b-n2-s0", f"experiment ({foreign})")
  kit.call("train", *arguments, "--config.only=a", status=0)


def test_a_figure_without_all_of_its_cells_is_not_judged(
  tmp_path, path, monkeypatch
):
  monkeypatch.setattr("asgd.figures.drawing.draw", lambda *args: None)
  workdir = tmp_path / "out"
  place = workdir / "cells" / "b-n2-s0"
  arguments = f"--config={path}", f"--workdir={workdir}", "--jobs=1"
  kit.call("train", *arguments, status=0)
  (place / "cell.npz").unlink()
  with cell_files.locked_cell(place):
    result = kit.call("reproduce", path, f"--workdir={workdir}", status=3)
  assert_incomplete(result, "without b-n2-s0")
  assert not (workdir / "mine.json").exists()
  kit.call("reproduce", path, f"--workdir={workdir}", status=0)
  assert (workdir / "mine.json").exists()


def test_several_that_are_missing_are_counted_and_some_are_named(tmp_path):
  names = [f"a-n{count}-s0" for count in range(1, 7)]
  said = "only 0 of the 6 requested cells are finished, without"
  said += " a-n1-s0, a-n2-s0, a-n3-s0, ... (it has no result); run the same"
  said += " command again to resume"
  assert folder.incomplete(tmp_path, names) == said
  assert folder.incomplete(tmp_path, []) == ""
