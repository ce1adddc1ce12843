"""Cells that a coordinator drives, live: as simulated, stopped, replayed."""

import csv
import json
import shutil

import kit
import pytest
from kit import TINY_RUN

from asgd import experiment
from asgd.experiment import live_memory, loop, replay
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.signals import Stopped
from asgd.live.faults import Fault
from asgd.live.journal import journal_path

RUN = {"recipe": "sandblaster", "portions": 6, "push_every": 2, "shards": 2}
KILLED = [(0.0, "worker", 1), (0.0, "shard", 1), (0.0, "coordinator", 0)]


def build(engine="threads", run=None, **config):
  return experiment.build(
    {
      **TINY_RUN,
      "engine": engine,
      "examples": 16 * 64,  # 32 messages
      "evaluations": 3,
      **config,
      "runs": {"run": {**RUN, **(run or {})}},
    },
    engines=experiment.ENGINES,
  )


def train(workdir, *args, machine=None, signals=None, **config):
  exp = build(*args, **config)
  (cell,) = exp.cells
  more = {} if signals is None else {"signals": signals}
  result = loop.train(
    exp, cell, workdir, bar=Silent(), machine=machine or Machine(), **more
  )
  return result, workdir / "cells" / cell.name


def iterates(place):
  """The rows of iterates.csv without their times, which only grow."""
  rows = list(csv.DictReader((place / "iterates.csv").read_text().split()))
  times = [float(row.pop("time")) for row in rows]
  assert times == sorted(times)
  return rows


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
  _, place = train(tmp_path_factory.mktemp("simulated"), "simulate")
  return iterates(place)


def same(one, other):
  """Two runs have the same iterates, as far as both have come."""
  count = min(len(one), len(other))
  assert count > 3
  assert one[:count] == other[:count]


def test_threads_come_to_the_bits_of_a_simulation(simulated, tmp_path):
  result, place = train(tmp_path)
  same(iterates(place), simulated)
  assert result["messages"] == 32
  assert result["replaced"] == {"worker": 0, "shard": 0}
  assert replay.replay(place).recorded is not None
  assert replay.replay(place).same
  again, _ = train(tmp_path)  # it is finished
  assert again["params_sha256"] == result["params_sha256"]
  assert live_memory.read(place) is None


def test_killed_processes_change_no_iterate(simulated, tmp_path):
  machine = Machine(faults=[Fault(0, 4, "kill")])
  result, place = train(
    tmp_path, run={"failures": KILLED}, machine=machine, live={"spans": True}
  )
  same(iterates(place), simulated)
  assert result["replaced"] == {"worker": 2, "shard": 1}
  assert replay.replay(place).same
  words = experiment.ENGINES["threads"].describe(result)
  assert words.endswith("; 2 workers and 1 shard replaced")
  assert (place / "spans-1.csv").exists()
  assert (place / "faults.csv").read_text() == "0,4,kill,0.0\n"


@pytest.mark.parametrize("left", ["memory", "checkpoint", "nothing"])
def test_a_cell_that_was_stopped_goes_on(simulated, tmp_path, left):
  with pytest.raises(Stopped, match="stopped in"):
    train(tmp_path, signals=kit.AfterLooks(1))
  place = tmp_path / "cells" / "run-n2-s0"
  before = journal_path(place, 0).read_text()
  running = live_memory.read(place)
  if left != "memory":
    shutil.rmtree(running.memory)
  if left == "nothing":
    shutil.rmtree(place / "checkpoints")
  result, _ = train(tmp_path)
  same(iterates(place), simulated)
  assert result["messages"] == 32
  assert replay.replay(place).same
  lines = (place / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [row["message"] for row in rows] == [11, 21, 32]
  if left == "checkpoint":
    assert journal_path(place, 0).read_text().startswith(before)


def test_files_that_were_cut_are_refused(tmp_path):
  with pytest.raises(Stopped):
    train(tmp_path, signals=kit.AfterLooks(1))
  journal = journal_path(tmp_path / "cells" / "run-n2-s0", 0)
  journal.write_text("".join(journal.read_text().splitlines(True)[:2]))
  with pytest.raises(ValueError, match="rows where the run goes on from"):
    train(tmp_path)
  live_memory.forget(journal.parent)


@pytest.mark.parametrize(
  ("run", "config", "why"),
  [
    ({}, {"server": {"shards": 2}}, "write config.runs.run.shards=2"),
    ({}, {"server": {"wire": "bfloat16"}}, "it would change what is computed"),
    ({}, {"live": {"devices": 2}}, "config.live.devices 2 is not for"),
    ({"loading": 1.0}, {}, "config.runs.run.loading 1.0 is not for"),
    ({"restart": 2.0}, {}, "config.runs.run.restart 2.0 is not for"),
  ],
)
def test_one_line_for_what_it_cannot_do(run, config, why):
  with pytest.raises(ValueError, match=why) as told:
    build("threads", run, **config)
  assert len(str(told.value)) < 600
  assert "\n" not in str(told.value)


def test_faults_of_links_are_refused():
  exp = build()
  with pytest.raises(ValueError, match="--fault=lose:0:3: a worker of a coord"):
    exp.check_machine(Machine(faults=[Fault(0, 3, "lose")]))
