"""Results of others: folders that can only be read, and the code they name."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import kit
import pytest

import asgd
from asgd import experiment
from asgd.experiment import audit, code, folder, overlay, replay, storage
from asgd.problems import own
from launch import timeline

pytestmark = pytest.mark.usefixtures("blank_pictures")

NOBODY = 65534  # a user without rights
MODULE = """
import optax
import asgd

def careful(learning_rate, workers, *, optimizer=optax.sgd):
  return asgd.Recipe(asgd.as_algorithm(optimizer(learning_rate)))

def signs(learning_rate):
  return optax.sign_sgd(learning_rate)

def halved(peak_value):
  return optax.constant_schedule(peak_value / 2)

def dataset(data_dir=None):
  from asgd import data
  return data.load("digits", data_dir)
"""
CONFIG = """
from ml_collections import ConfigDict

def get_config():
  return ConfigDict(dict(
    runs=dict(
      own=dict(
        recipe="foreign_module:careful",
        optimizer="foreign_module:signs",
        learning_rate_schedule=dict(name="foreign_module:halved"),
      ),
    ),
    model=dict(name="mlp", hidden=(8,)),
    workers=(2,), batch_size=16, examples=768, learning_rate=0.02,
    evaluations=3, curvature_checks=0, evaluation_examples=32,
  ))
"""


def forget():
  sys.modules.pop("foreign_module", None)


@pytest.fixture(scope="module")
def trained():
  """A folder with a live run and a simulated one, of a config with a module of
  its own; any user can reach it."""
  root, before = Path(tempfile.mkdtemp()), list(sys.path)
  root.chmod(0o755)
  (root / "foreign_module.py").write_text(MODULE)
  (root / "config.py").write_text(CONFIG)
  for engine in ("threads", "simulate"):
    train(root, engine, status=0)
  sys.path[:] = before
  forget()
  yield root
  shutil.rmtree(root)


def train(root, engine, *arguments, status):
  return kit.call(
    *("train", f"--config={root / 'config.py'}", f"--engine={engine}"),
    *(f"--workdir={root / engine}", "--jobs=1", *arguments),
    status=status,
  )


def snapshot(place):
  """What is in a folder, and when it was changed."""
  return {
    str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
    for path in sorted(place.rglob("*"))
  }


@pytest.fixture
def read_only(trained, tmp_path, monkeypatch):
  """The folder, which this user may only read; written files go elsewhere."""
  elsewhere = Path(tempfile.mkdtemp())
  elsewhere.chmod(0o777)
  monkeypatch.setattr(sys, "path", [*sys.path, str(trained)])
  monkeypatch.setattr(kit, "ROOT", elsewhere)
  monkeypatch.chdir(elsewhere)
  paths = [trained, *trained.rglob("*")]
  modes = {path: path.stat().st_mode for path in paths}
  for path in paths:
    path.chmod(modes[path] & ~0o222 | 0o444)
  before = snapshot(trained)
  with contextlib.ExitStack() as stack:
    stack.callback(shutil.rmtree, elsewhere)
    stack.callback(lambda: [p.chmod(mode) for p, mode in modes.items()])
    if os.geteuid() == 0:  # whom modes do not bind
      os.seteuid(NOBODY)
      stack.callback(os.seteuid, 0)
    yield trained
  assert snapshot(trained) == before
  forget()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "simulate"])
def test_the_same_command_prints_the_results_of_a_read_only_folder(
  read_only, engine
):
  result = train(read_only, engine, status=0)
  assert f"nothing is written: {read_only / engine} is read-only" in (
    result.stdout
  )
  table = (read_only / engine / "table.txt").read_text()
  assert table.splitlines()[-1] in result.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "simulate"])
def test_a_cell_that_a_read_only_folder_lacks_is_refused_with_a_remedy(
  read_only, engine
):
  result = train(read_only, engine, "--config.seeds=1", status=2)
  kit.assert_one_line(
    result, f"-s1 is not finished, and {read_only / engine} cannot be written"
  )
  assert "make it writable to train the cell, or choose another" in (
    result.stderr
  )


@pytest.mark.slow
def test_a_read_only_folder_is_replayed_drawn_and_compared(read_only):
  live, simulated = read_only / "threads", read_only / "simulate"
  result = kit.call("replay", live, "--trust", status=0)
  assert "the same parameters as the run, to the bit" in result.stdout
  timeline.main(str(live))
  assert Path("runs/timeline-001/timeline.json").stat().st_size
  for number, places in enumerate(([live, "--trust"], [live, simulated]), 1):
    kit.call("compare", *places, status=0)
    made = Path(f"runs/compare-{number:03d}")
    assert list(made.rglob("*.csv"))
  (place,) = (live / "cells").iterdir()
  exp, cell = replay.load(place, trust=True)
  findings = list(audit.findings(exp.plan(cell), place))
  # An audit runs no code of another user, and says so.
  asks = {"replay"} if os.geteuid() != os.getuid() else set()
  assert {found.check for found in findings if not found.passed} == asks


@pytest.fixture
def trap(trained, tmp_path, monkeypatch):
  """Code at the place of the folder's own, which says that it was run."""
  marker, module = tmp_path / "was run", trained / "foreign_module.py"
  text = module.read_text()
  module.write_text(f"open({str(marker)!r}, 'w').close()\n{text}")
  monkeypatch.setattr(sys, "path", [*sys.path, str(trained)])
  forget()
  yield marker
  module.write_text(text)
  forget()


@pytest.mark.slow
def test_a_comparison_imports_no_code_that_a_folder_names(
  trained, trap, tmp_path
):
  whole = tmp_path / "whole"
  shutil.copytree(trained / "simulate", whole)
  written = storage.read_sealed(whole / "config.json")
  written["config"]["seeds"] = [0, 1]
  written["config"]["data"]["name"] = "foreign_module:dataset"
  storage.write_json(whole / "config.json", storage.sealed(written))
  (place,) = (whole / "cells").iterdir()
  described = folder.read_cell(place)
  described["config"]["data"]["name"] = "foreign_module:dataset"
  members = storage.read_archive(place / "cell.npz")
  members["cell.json"] = storage.to_json(described).encode()
  storage.write_archive(place / "cell.npz", members)
  places = whole, trained / "threads"
  said = overlay.write(places, tmp_path / "out", experiment.ENGINES)
  assert f"{whole}: 1 of 2 cells are finished" in said
  assert not trap.exists()


@pytest.mark.slow
def test_a_replay_asks_before_it_runs_code_of_another_user(
  trained, trap, tmp_path, monkeypatch
):
  owner = os.geteuid()
  monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
  place = trained / "threads"
  refused = f"made by another user .uid {owner}.*foreign_module.*--trust"
  for call in (replay.replay, asgd.replay):
    with pytest.raises(ValueError, match=refused):
      call(place)
  for words in (["replay"], ["compare", f"--out={tmp_path / 'out'}"]):
    result = kit.call(words[0], place, *words[1:])
    kit.assert_one_line(result, "then add --trust")
  assert not trap.exists()
  assert kit.call("replay", place, "--trust", status=0)
  assert trap.exists()


def test_a_replay_of_ones_own_folder_asks_nothing(tmp_path):
  code.check_trusted(tmp_path, {"data": {"name": "own_module:make"}})


def test_titles_are_no_code(tmp_path, monkeypatch):
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  run = {"recipe": "asgd", "title": "ours:best"}
  code.check_trusted(tmp_path, {"runs": {"a": run}})
  for named in ({"a": {**run, "recipe": "m:f"}}, {"a": {"x": [{"y": "m:f"}]}}):
    with pytest.raises(ValueError, match="m:f.*--trust"):
      code.check_trusted(tmp_path, {"runs": named})


def test_functions_of_a_training_call_are_asked_for_too(tmp_path, monkeypatch):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  described = storage.read_json(place / "cell.json")
  described["dataset"] = {"name": own.Objects.name, "loss": "os:getcwd"}
  storage.write_json(place / "cell.json", described)
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  with pytest.raises(ValueError, match="os:getcwd.*--trust"):
    asgd.replay(place)


def test_each_file_that_says_what_a_cell_is_counts(tmp_path, monkeypatch):
  place = tmp_path / "cells" / "a-n1-s0"
  place.mkdir(parents=True)
  lstat, mine = Path.lstat, os.geteuid()

  def of_another(whose):
    def look(path):
      found = lstat(path)
      uid = mine + (path == whose)
      return os.stat_result([*found[:4], uid, *found[5:]])

    return look

  for path in (tmp_path / "config.json", place / "cell.json"):
    path.touch()
    with monkeypatch.context() as patch:
      patch.setattr(Path, "lstat", of_another(path))
      with pytest.raises(ValueError, match=f"uid {mine + 1}"):
        code.check_trusted(place, {"x": "m:f"})
    path.unlink()
