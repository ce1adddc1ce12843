"""Shipped configs at their tiny size, trained by the command and counted."""

import math

import kit
import numpy as np
import pytest

from asgd import data
from asgd.experiment import folder
from asgd.experiment.engines import parameter_server

SHAPES = {"fashion": (28, 28, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}


@pytest.fixture
def drawn_images(monkeypatch):
  """Random images instead of those that have to be installed."""
  real = data.load

  def fake(name, *, data_dir=None):
    if name not in SHAPES:
      return real(name, data_dir=data_dir)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (512, *SHAPES[name]), np.uint8)
    labels = rng.integers(0, 10, 512, np.int32)
    channels = SHAPES[name][-1]
    return data.Dataset(
      *(name, "drawn here", images, labels, images[:32], labels[:32]),
      *(10, np.full(channels, 128, np.float32)),
      np.full(channels, 74, np.float32),
    )

  monkeypatch.setattr(data, "load", fake)


@pytest.fixture
def no_limits(monkeypatch):
  """No run measures its limit of curvature, a fifth of a tiny run's time;
  test_diagnosis measures those of recipes."""
  plan_type = parameter_server.ServerPlan
  monkeypatch.setattr(plan_type, "curvature_limit", math.nan)


def written(workdir):
  """Returns what there is in the folders of cells, and when it was written."""
  paths = sorted(workdir.glob("cells/*/**/*"))
  return {path: path.stat().st_mtime_ns for path in paths}


def train(workdir, *arguments, status=0):
  """Runs asgd train with some arguments: each cell of each run counts, each run
  is in the table, and the call ends with a status."""
  arguments = *arguments, f"--workdir={workdir}", "--jobs=1"
  kit.call("train", *arguments, status=status)
  check(workdir)


def train_twice(workdir, *arguments):
  """Does what `train` does, and then the same call, which trains nothing."""
  train(workdir, *arguments)
  before = written(workdir)
  train(workdir, *arguments)
  assert written(workdir) == before


def check(workdir):
  """Asserts that all cells of a folder count, and all its runs have some."""
  assert folder.faults(workdir) == []
  results = folder.read_results(workdir)
  names = {path.name for path in (workdir / "cells").iterdir()}
  assert {row["cell"] for row in results} == names
  runs = folder.read_identity(workdir)["config"]["runs"]
  assert {row["label"] for row in results} == set(runs)
  table = (workdir / "table.txt").read_text()
  assert "so far" not in table
  lines = table.splitlines()
  for label, entry in runs.items():
    title = entry.get("title", label)
    assert any(line.startswith(title) for line in lines), title
