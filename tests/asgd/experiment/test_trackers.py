"""Weights & Biases, which is not needed: a stand-in takes its place."""

import os
import sys
import types

import pytest

from asgd.experiment import cell_log, trackers

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
  monkeypatch.setenv(trackers.ASKED, "1")
  for name in ("WANDB_MODE", "WANDB_SILENT"):
    monkeypatch.setenv(name, "")  # so that it is put back afterwards
    monkeypatch.delenv(name)
  return told


def log(tmp_path):
  board = tmp_path / "exp" / "tensorboard" / "a-n2-s0"
  place = tmp_path / "exp" / "cells" / "a-n2-s0"
  place.mkdir(parents=True)
  out = cell_log.CellLog(place, board, [], {"recipe": "asgd", "workers": 2})
  out.write(ROW)
  out.close()


def test_a_cell_is_a_run_that_stays_here(calls, tmp_path):
  log(tmp_path)
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
  monkeypatch.setenv(trackers.ASKED, "0")
  log(tmp_path)
  assert calls == []


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  monkeypatch.delenv(trackers.ASKED, raising=False)
  trackers.ask(False)
  with pytest.raises(ValueError, match=r"pip install 'asgd\[wandb\]'"):
    trackers.ask(True)
  assert not trackers.asked()


@pytest.mark.parametrize("word", ["", "0", "no", "False", "1", "yes", "TRUE"])
def test_words_of_the_environment_mean_yes_or_no(word, monkeypatch):
  monkeypatch.setenv(trackers.ASKED, word)
  assert trackers.asked() == (word in ("1", "yes", "TRUE"))


def test_another_word_is_refused(monkeypatch):
  monkeypatch.setenv(trackers.ASKED, "maybe")
  with pytest.raises(ValueError, match="ASGD_WANDB='maybe': write 1, yes or"):
    trackers.ask(True)
