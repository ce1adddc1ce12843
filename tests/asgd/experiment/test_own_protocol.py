"""A protocol outside the package: one module, and a line that registers it."""

import importlib.util
import shutil
import sys

import kit
import numpy as np
import pytest

from asgd import base, experiment
from asgd.experiment import folder, loop, replay, report, schema
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.signals import Stopped
from asgd.live.faults import Fault
from asgd.live.journal import journal_path, read_journal

_FILE = kit.ROOT / "tests" / "outside" / "walk.py"


@pytest.fixture(scope="module")
def walk():
  spec = importlib.util.spec_from_file_location("outside_walk", _FILE)
  module = importlib.util.module_from_spec(spec)
  sys.modules["outside_walk"] = module  # dataclasses look it up
  spec.loader.exec_module(module)
  return module


@pytest.fixture(autouse=True)
def registered(walk, monkeypatch):
  monkeypatch.setitem(experiment.PROTOCOLS, "walk", walk.WALK)


def build(run=None, **config):
  return experiment.build(
    {
      "problem": {"name": "golden.world:regression"},
      "runs": {"run": {"recipe": "walk", **(run or {})}},
      "workers": (3,),
      "batch_size": 4,
      "examples": 4 * 60,
      "learning_rate": 0.05,
      "evaluations": 3,
      "curvature_checks": 0,
      **config,
    },
    engines=experiment.ENGINES,
  )


def train(exp, workdir, **options):
  (cell,) = exp.cells
  return loop.train(exp, cell, workdir, bar=Silent(), **options)


class Once:
  """A signal that comes at the second look."""

  looks = 0

  @property
  def received(self):
    self.looks += 1
    return 15 if self.looks == 2 else 0


class AtRows:
  """A signal that comes once a journal has so many rows."""

  def __init__(self, place, rows):
    self._path, self._rows = journal_path(place, 0), rows

  @property
  def received(self):
    return 15 if len(read_journal(self._path)) >= self._rows else 0


def test_it_trains_and_learns(tmp_path):
  exp = build()
  result = train(exp, tmp_path)
  assert result["messages"] == result["updates"] == result["hops"] == 60
  assert result["staleness_max"] == 0
  first, *_, last = folder.read_rows(tmp_path / "cells" / "run-n3-s0")
  assert last["test_loss"] < first["test_loss"]
  columns = report.columns_of([result], exp.engines)
  assert "hops" in [column.key for column in columns]
  assert exp.kind(exp.cells[0]).describe(result).startswith("60 hops, time")


def test_a_walk_of_one_worker_is_gradient_descent():
  exp = build(workers=(1,), examples=4 * 10)
  kept = []
  train(exp, None, ended=lambda *what: kept.extend(what))
  ours = kept[1]
  exp = build({"recipe": "asgd"}, workers=(1,), examples=4 * 10)
  kept.clear()
  train(exp, None, ended=lambda *what: kept.extend(what))
  for mine, theirs in zip(ours.values(), kept[1].values(), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_it_is_stopped_and_goes_on_to_the_same(tmp_path):
  whole = train(build(), tmp_path / "whole")
  with pytest.raises(Stopped):
    train(build(), tmp_path / "parts", signals=Once())
  resumed = train(build(), tmp_path / "parts")
  same = ("params_sha256", "simulated_time", "hops")
  assert [resumed[key] for key in same] == [whole[key] for key in same]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_in_threads_it_is_killed_stopped_and_goes_on_to_the_same(
  tmp_path, checkpoint
):
  whole = train(build(), tmp_path / "whole")
  faults = [Fault(1, 2, "kill"), Fault(0, 4, "slow", 2.0)]  # jobs 7 and 12
  machine = Machine(faults=faults, grace_seconds=60.0)
  out = tmp_path / "threads"
  place = out / "cells" / "run-n3-s0"
  with pytest.raises(Stopped):
    exp = build(engine="threads")
    train(exp, out, machine=machine, signals=AtRows(place, 26))
  if not checkpoint:
    shutil.rmtree(place / "checkpoints")
  result = train(build(engine="threads"), out)
  assert result["hops"] == whole["hops"]
  assert result["params_sha256"] == whole["params_sha256"]
  assert result["replaced"] == {"worker": 1}
  rows = [tuple(row)[1:] for row in read_journal(journal_path(place, 0))]
  assert ((1, 2, 7, base.LOST) in [row[:4] for row in rows]) == checkpoint
  assert replay.replay(place).same


def test_what_it_has_no_use_for_is_refused_with_its_reason():
  with pytest.raises(ValueError, match="gate.max_staleness 2 is not for the re"
    ".*: nothing is ever stale; leave it out"):
    build(gate={"max_staleness": 2})
  with pytest.raises(ValueError, match="engine 'mesh' does not run: use"
    " engine='simulate' or 'threads'"):
    build(engine="mesh")
  with pytest.raises(ValueError, match="stay must be a whole number from 1"):
    build({"stay": 0})
  assert "stay" in schema.options_of("walk")
