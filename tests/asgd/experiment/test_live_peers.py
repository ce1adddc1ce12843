"""Cells of live peers: trained, stopped, gone on with, replayed."""

import json
import shutil

import kit
import pytest
from kit import TINY_RUN

from asgd import experiment
from asgd.experiment import folder, loop, replay
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.signals import Stopped
from asgd.live.faults import Fault
from asgd.live.gossip import files
from asgd.live.journal import journal_path
from asgd.live.records import records_path

TINY = {
  **TINY_RUN,
  "engine": "threads",
  "runs": {"run": {"recipe": "d_psgd"}},
  "examples": 640,  # 40 messages
}
CODED = {"recipe": "threshold_sharing", "codec": "top_k", "momentum": 0.5}
PAIRS = {"recipe": "ad_psgd"}


def train(workdir, run=None, machine=None, signals=None, **config):
  runs = {"run": run or TINY["runs"]["run"]}
  exp = experiment.build(
    {**TINY, "runs": runs, **config}, engines=experiment.ENGINES
  )
  (cell,) = exp.cells
  more = {} if signals is None else {"signals": signals}
  machine = machine or Machine(grace_seconds=60.0)
  result = loop.train(
    exp, cell, workdir, bar=Silent(), machine=machine, **more
  )
  return result, workdir / "cells" / cell.name


def rows(place):
  lines = (place / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def stop(workdir, run):
  """A cell that was stopped after its first look; returns its folder."""
  with pytest.raises(Stopped, match="stopped in"):
    train(workdir, run, signals=kit.AfterLooks(0))
  return workdir / "cells" / "run-n2-s0"


def test_a_cell_that_was_stopped_goes_on_and_replays(tmp_path):
  place = stop(tmp_path, CODED)
  journal = journal_path(place, 1)
  lines = journal.read_text().splitlines(keepends=True)
  # Rows that the checkpoint has are needed; what came after it is not.
  journal.write_text("".join(lines[:-1]))
  with pytest.raises(ValueError, match="rows where the run goes on from"):
    train(tmp_path, CODED)
  journal.write_text("".join([*lines, lines[-1]]))
  result, _ = train(tmp_path, CODED)
  assert journal.read_text().startswith("".join(lines))
  assert (result["messages"], result["missed"]) == (40, 0)
  assert [row["message"] for row in rows(place)] == [14, 26, 40]
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest
  assert (place / "links.csv").exists()
  # It is finished, and its files are what it wrote.
  again, _ = train(tmp_path, CODED)
  assert again["params_sha256"] == result["params_sha256"]
  sink = records_path(place, 0)
  sink.write_bytes(sink.read_bytes()[:-1])
  with pytest.raises(ValueError, match="records, and the trace beside it"):
    replay.replay(place)


def test_a_cell_without_a_checkpoint_begins_again(tmp_path):
  shutil.rmtree(stop(tmp_path, PAIRS) / "checkpoints")
  result, place = train(tmp_path, PAIRS)
  assert replay.replay(place).same
  assert (result["messages"], result["missed"]) == (40, 0)
  assert [row["message"] for row in rows(place)] == [13, 27, 40]


def test_a_cell_replays_with_a_peer_that_died(tmp_path):
  machine = Machine(faults=[Fault(1, 3, "kill")])
  result, place = train(tmp_path, CODED, machine)
  assert result["replaced"] == {"peer": 1}
  missed = result["missed"]
  assert missed > 0  # rounds in which it was not there
  workdir = place.parent.parent
  assert folder.incomplete(workdir, [place.name]) == (
    "workers or peers exited, and their messages are missing in"
    f" {place.name} ({missed} of 40); to train a cell again, remove its folder"
  )
  one = files.read_peer_records(place, 1)
  lost = one.residual_norm[one.job.tolist().index(5)]  # the last before it died
  assert result["residual_lost"] == pytest.approx(lost) and lost > 0
  assert replay.replay(place).recorded is not None
  assert replay.replay(place).same


@pytest.mark.parametrize(
  ("config", "match"),
  [
    ({"server": {"shards": 2}}, "config.server.shards 2 is not for the recipe"),
    ({"server": {"wire": "bfloat16"}}, "config.server.wire 'bfloat16' is not"),
    ({"live": {"devices": 2}}, "config.live.devices 2 is not for the"),
    ({"allocation": {"batch_size": "speed"}}, "'speed' is not for the recipe"),
  ],
)
def test_what_peers_do_not_have_is_refused(config, match):
  with pytest.raises(ValueError, match=match):
    experiment.build({**TINY, **config}, engines=experiment.ENGINES)


def test_faults_of_links_to_a_server_are_refused():
  exp = experiment.build(TINY, engines=experiment.ENGINES)
  with pytest.raises(ValueError, match="--fault=lose:0:3: a message of peers"):
    exp.check_machine(Machine(faults=[Fault(0, 3, "lose")]))
