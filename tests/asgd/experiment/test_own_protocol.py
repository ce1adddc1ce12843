"""A protocol outside the package: one module, and a line that registers it."""

import functools
import shutil

import kit
import pytest

from asgd import base, experiment
from asgd.experiment import folder, replay, report, schema
from asgd.experiment.machine import Machine
from asgd.experiment.signals import Stopped
from asgd.live.faults import Fault
from asgd.live.journal import journal_path, read_journal

_FILE = kit.ROOT / "tests" / "outside" / "walk.py"


@pytest.fixture(scope="module")
def walk():
  return kit.load_module(_FILE, "outside_walk")  # dataclasses look it up


@pytest.fixture(autouse=True)
def registered(walk, monkeypatch):
  monkeypatch.setitem(experiment.PROTOCOLS, "walk", walk.WALK)


build = functools.partial(
  kit.build,
  {
    "problem": {"name": "golden.world:regression"},
    "runs": {"run": {"recipe": "walk"}},
    "workers": (3,),
    "batch_size": 4,
    "examples": 4 * 60,
    "learning_rate": 0.05,
    "evaluations": 3,
    "curvature_checks": 0,
  },
)


class AtRows:
  """A signal that comes once a journal has so many rows."""

  def __init__(self, place, rows):
    self._path, self._rows = journal_path(place, 0), rows

  @property
  def received(self):
    return 15 if len(read_journal(self._path)) >= self._rows else 0


def test_it_trains_and_learns(tmp_path):
  exp = build()
  result = kit.train(exp, tmp_path).result
  assert result["messages"] == result["updates"] == result["hops"] == 60
  assert result["staleness_max"] == 0
  first, *_, last = folder.read_rows(tmp_path / "cells" / "run-n3-s0")
  assert last["test_loss"] < first["test_loss"]
  columns = report.table_columns([result], exp.engines)
  assert "hops" in [column.key for column in columns]
  assert (
    exp.engine_kind(exp.cells[0]).describe(result).startswith("60 hops, time")
  )


def test_a_walk_of_one_worker_is_gradient_descent():
  exp = build(workers=(1,), examples=4 * 10)
  plain = build(run={"recipe": "asgd"}, workers=(1,), examples=4 * 10)
  kit.close(kit.train(exp).params, kit.train(plain).params, rtol=1e-5, atol=0)


def test_it_is_stopped_and_goes_on_to_the_same(tmp_path):
  whole = kit.train(build()).result
  with pytest.raises(Stopped):
    kit.train(build(), tmp_path, signals=kit.AfterLooks(1))
  resumed = kit.train(build(), tmp_path).result
  same = ("params_sha256", "simulated_time", "hops")
  assert [resumed[key] for key in same] == [whole[key] for key in same]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_in_threads_it_is_killed_stopped_and_goes_on_to_the_same(
  tmp_path, checkpoint
):
  whole = kit.train(build()).result
  faults = [Fault(1, 2, "kill"), Fault(0, 4, "slow", 2.0)]  # jobs 7 and 12
  machine = Machine(faults=faults, grace_seconds=60.0)
  out = tmp_path / "threads"
  place = out / "cells" / "run-n3-s0"
  with pytest.raises(Stopped):
    exp = build(engine="threads")
    kit.train(exp, out, machine=machine, signals=AtRows(place, 26))
  if not checkpoint:
    shutil.rmtree(place / "checkpoints")
  result = kit.train(build(engine="threads"), out).result
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
    build(run={"stay": 0})
  assert "stay" in schema.options_of("walk")
