"""Boards of finished cells: one for all seeds of a run and number of workers,
whatever ends in the middle."""

import event_files
import kit
import pytest

from asgd import experiment
from asgd.experiment import boards, folder
from asgd.experiment.progress import Silent

pytest.importorskip("tensorboardX")


def trained(workdir, seeds):
  """Trains so many seeds, as asgd train does before the report."""
  exp = experiment.build(
    {**kit.TINY_RUN, "engine": "simulate", "seeds": tuple(range(seeds))},
    engines=experiment.ENGINES,
  )
  folder.open_folder(str(workdir), "x", exp)
  for cell in exp.cells:
    experiment.train(exp, cell, workdir, bar=Silent())
  return exp


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
  boards.join(tmp_path, exp, folder.read_results(tmp_path))
  assert files(tmp_path) == alone  # of one seed it stays as it is
  exp = trained(tmp_path, 2)
  assert set(files(tmp_path)) == {"run-n2-s0", "run-n2-s1"}
  results = folder.read_results(tmp_path)

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(boards.event_file.EventFile, "add_scalar", killed)
    with pytest.raises(KeyboardInterrupt):
      boards.join(tmp_path, exp, results)
  assert set(files(tmp_path)) == {"run-n2-s0", "run-n2-s1"}
  live = tmp_path / "tensorboard" / "run-n2-s0" / "live"
  live.mkdir()  # a live run's rates are nowhere else
  boards.join(tmp_path, exp, results)
  assert live.is_dir()
  live.rmdir()
  check(tmp_path, 2)
  before = files(tmp_path)["run-n2"].stat().st_mtime_ns
  boards.join(tmp_path, exp, results)  # nothing is new
  assert files(tmp_path)["run-n2"].stat().st_mtime_ns == before
  exp = trained(tmp_path, 3)
  assert set(files(tmp_path)) == {"run-n2", "run-n2-s2"}
  boards.join(tmp_path, exp, folder.read_results(tmp_path))
  check(tmp_path, 3)


def test_a_mean_is_of_what_all_seeds_have():
  cells = [
    [{"message": 4, "train_loss": 1.0}, {"message": 8, "train_loss": 2.0}],
    [{"message": 6, "train_loss": 3.0}, {"message": 8, "train_loss": None}],
    [{"message": 5, "train_loss": 5.0}, {"message": 8, "train_loss": 2.0}],
  ]
  first, second = boards.means(cells)
  assert first == (5, {"train/loss": 3.0})
  assert second == (8, {})
  # One ended early.
  assert boards.means([cells[0], cells[1][:1]]) == [(5, {"train/loss": 2.0})]


def test_without_tensorboardx_boards_stay(tmp_path, monkeypatch):
  exp = trained(tmp_path, 2)
  before = files(tmp_path)
  monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
  boards.join(tmp_path, exp, folder.read_results(tmp_path))
  assert files(tmp_path) == before
