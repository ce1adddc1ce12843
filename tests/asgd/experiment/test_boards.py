"""Curves on boards: what is in a file, and what a full disk does; one board for
all seeds of a run; Weights & Biases, of which a stand-in takes the place."""

import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import event_files
import kit
import pytest

from asgd.experiment import boards, cell_log, folder

pytest.importorskip("tensorboardX")


def test_a_file_begins_with_its_version_and_the_step_from_which_it_counts(
  tmp_path,
):
  board = boards.open_board(tmp_path / "a" / "b", purge_step=7)
  board.add_scalar("loss", 0.5, 9)
  board.close()
  (path,) = (tmp_path / "a" / "b").iterdir()
  assert path.name.startswith("events.out.tfevents.")
  version, purge, loss = event_files.read(path)
  assert version.file_version == "brain.Event:2"
  assert (purge.step, purge.session_log.status) == (7, 1)  # START
  assert loss.step == 9
  (value,) = loss.summary.value
  assert (value.tag, value.simple_value) == ("loss", 0.5)


def test_a_full_disk_is_an_error_of_the_caller(tmp_path):
  board = boards.open_board(tmp_path)
  board.close()
  with Path("/dev/full").open("wb", buffering=0) as board._file:
    for _ in range(20):  # more than the queue of a thread would hold
      with pytest.raises(OSError) as caught:
        board.add_scalar("loss", 0.5, 9)
      assert caught.value.errno == errno.ENOSPC


FULL = """
import contextlib, resource, sys
from pathlib import Path
import numpy as np
from asgd.experiment import cell_log, checkpoint

place = Path(sys.argv[1])
place.mkdir()
log = cell_log.CellLog(place, place / "board", [])
checkpoints = checkpoint.Checkpoints(place / "checkpoints")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with contextlib.suppress(OSError):
  for message in range(1000):
    log.write({"message": message, **{f"loss {i}": 0.5 for i in range(20)}})
tree = {i: np.random.default_rng(i).normal(size=5000) for i in range(20)}
try:
  checkpoints.save(1, tree, {})
except ValueError as error:
  print(error)
with contextlib.suppress(OSError):
  log.close()
checkpoints.close()
"""


@pytest.mark.process
def test_a_full_disk_has_one_line_also_when_python_ends(tmp_path):
  result = subprocess.run(
    [sys.executable, "-c", FULL, str(tmp_path / "cell")],
    cwd=kit.ROOT,
    capture_output=True,
    text=True,
    timeout=kit.DEADLINE,
  )
  assert result.returncode == 0, result.stderr
  assert result.stderr == ""
  (line,) = result.stdout.splitlines()
  assert line.startswith(f"cannot write a checkpoint to {tmp_path}")
  assert line.endswith("make room and run the same command again to resume")


def trained(workdir, seeds):
  """Trains so many seeds, as asgd train does before the report."""
  return kit.train_tiny(workdir, seeds=tuple(range(seeds)))


def files(workdir):
  """The event files of a folder by their boards."""
  place = workdir / "tensorboard"
  return {
    path.parent.relative_to(place).as_posix(): path
    for path in sorted(place.rglob("events.out*"))
  }


def curve(path, tag):
  """Returns message -> value of a curve."""
  return {
    event.step: value.simple_value
    for event in event_files.read(path)
    for value in event.summary.value
    if value.tag == tag
  }


def check(workdir, seeds):
  """Whether there is one board, with the means of these seeds."""
  ((name, path),) = files(workdir).items()
  assert name == "run-n2"
  rows = [
    folder.read_rows(workdir / "cells" / f"run-n2-s{seed}")
    for seed in range(seeds)
  ]
  for tag, key in (("test/loss", "test_loss"), ("run/epoch", "epoch")):
    expected = {
      own[0]["message"]: sum(row[key] for row in own) / seeds
      for own in zip(*rows, strict=True)
    }
    assert curve(path, tag) == pytest.approx(expected, rel=1e-6)
  settings = {
    key: value
    for event in event_files.read(path)
    for one in event.summary.value
    if one.tag == "_hparams_/session_start_info"
    for key, value in settings_of(one).items()
  }
  assert settings["seeds"] == " ".join(map(str, range(seeds)))
  assert settings["recipe"] == "asgd"
  assert "seed" not in settings
  assert not list(workdir.glob(".tensorboard*"))


def settings_of(value):
  from tensorboardX.proto import plugin_hparams_pb2

  data = plugin_hparams_pb2.HParamsPluginData.FromString(
    value.metadata.plugin_data.content
  )
  hparams = data.session_start_info.hparams
  return {key: hparams[key].string_value for key in hparams}


def test_seeds_have_one_board_also_after_more_are_added(tmp_path, monkeypatch):
  exp = trained(tmp_path, 1)
  alone = files(tmp_path)
  cell_log.join(tmp_path, exp, folder.read_results(tmp_path))
  assert files(tmp_path) == alone  # of one seed it stays as it is
  exp = trained(tmp_path, 2)
  assert set(files(tmp_path)) == {"run-n2-s0", "run-n2-s1"}
  results = folder.read_results(tmp_path)

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(boards.EventFile, "add_scalar", killed)
    with pytest.raises(KeyboardInterrupt):
      cell_log.join(tmp_path, exp, results)
  assert set(files(tmp_path)) == {"run-n2-s0", "run-n2-s1"}
  live = tmp_path / "tensorboard" / "run-n2-s0" / "live"
  live.mkdir()  # a live run's rates are nowhere else
  cell_log.join(tmp_path, exp, results)
  assert live.is_dir()
  live.rmdir()
  check(tmp_path, 2)
  before = files(tmp_path)["run-n2"].stat().st_mtime_ns
  cell_log.join(tmp_path, exp, results)  # nothing is new
  assert files(tmp_path)["run-n2"].stat().st_mtime_ns == before
  exp = trained(tmp_path, 3)
  assert set(files(tmp_path)) == {"run-n2", "run-n2-s2"}
  cell_log.join(tmp_path, exp, folder.read_results(tmp_path))
  check(tmp_path, 3)


def test_a_mean_is_of_what_all_seeds_have():
  cells = [
    [{"message": 4, "train_loss": 1.0}, {"message": 8, "train_loss": 2.0}],
    [{"message": 6, "train_loss": 3.0}, {"message": 8, "train_loss": None}],
    [{"message": 5, "train_loss": 5.0}, {"message": 8, "train_loss": 2.0}],
  ]
  first, second = cell_log.mean_curves(cells)
  assert first == (5, {"train/loss": 3.0})
  assert second == (8, {})
  # One ended early.
  assert cell_log.mean_curves([cells[0], cells[1][:1]]) == [
    (5, {"train/loss": 2.0})
  ]


def test_without_tensorboardx_boards_stay(tmp_path, monkeypatch):
  exp = trained(tmp_path, 2)
  before = files(tmp_path)
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  cell_log.join(tmp_path, exp, folder.read_results(tmp_path))
  assert files(tmp_path) == before


# Weights & Biases.

ROW = {
  **dict(workers=2, seed=0, message=3, update=3, diverged=False, cell="a"),
  **dict(test_loss=0.5, train_loss=1.0, staleness_mean=float("nan")),
}


@pytest.fixture
def calls(monkeypatch):
  """What the stand-in was told."""
  told = []
  run = types.SimpleNamespace(
    log=lambda values, step: told.append(("log", values, step)),
    finish=lambda: told.append(("finish",)),
  )

  def init(**options):
    told.append(("init", options))
    return run

  monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
  monkeypatch.setenv(boards.WANDB_VARIABLE, "1")
  for name in ("WANDB_MODE", "WANDB_SILENT"):
    monkeypatch.setenv(name, "")  # so that it is put back afterwards
    monkeypatch.delenv(name)
  return told


def log_of_wandb(tmp_path):
  board = tmp_path / "exp" / "tensorboard" / "a-n2-s0"
  place = tmp_path / "exp" / "cells" / "a-n2-s0"
  place.mkdir(parents=True)
  out = cell_log.CellLog(place, board, [], {"recipe": "asgd", "workers": 2})
  out.write(ROW)
  out.close()


def test_a_cell_is_a_run_that_stays_here(calls, tmp_path):
  log_of_wandb(tmp_path)
  (_, options), logged, finished = calls
  assert options["name"] == "a-n2-s0"
  assert (options["group"], options["id"]) == ("exp", "exp-a-n2-s0")
  assert options["dir"] == str(tmp_path / "exp")
  assert options["config"] == {"recipe": "asgd", "workers": 2}
  values = {"run/update": 3, "test/loss": 0.5, "train/loss": 1.0}
  assert logged == ("log", values, 3)
  assert finished == ("finish",)
  assert os.environ["WANDB_MODE"] == "offline"


def test_it_is_written_only_if_it_is_asked_for(calls, tmp_path, monkeypatch):
  monkeypatch.setenv(boards.WANDB_VARIABLE, "0")
  log_of_wandb(tmp_path)
  assert calls == []


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  monkeypatch.delenv(boards.WANDB_VARIABLE, raising=False)
  boards.request_wandb(False)
  with pytest.raises(ValueError, match=r"pip install 'asgd\[wandb\]'"):
    boards.request_wandb(True)
  assert not boards.is_wandb_wanted()


@pytest.mark.parametrize("word", ["", "0", "no", "False", "1", "yes", "TRUE"])
def test_words_of_the_environment_mean_yes_or_no(word, monkeypatch):
  monkeypatch.setenv(boards.WANDB_VARIABLE, word)
  assert boards.is_wandb_wanted() == (word in ("1", "yes", "TRUE"))


def test_another_word_is_refused(monkeypatch):
  monkeypatch.setenv(boards.WANDB_VARIABLE, "maybe")
  with pytest.raises(ValueError, match="ASGD_WANDB='maybe': write 1, yes or"):
    boards.request_wandb(True)
