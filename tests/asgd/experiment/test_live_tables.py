"""Cells of live tables: trained, stopped, gone on with, replayed."""

import json
import os
import shutil
import signal

import kit
import numpy as np
import pytest

from asgd import base, experiment
from asgd.data import documents
from asgd.experiment import (
  audit,
  comparison,
  live_files,
  live_memory,
  loop,
  replay,
)
from asgd.experiment.engines import live_hosts, live_tables
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.signals import Stopped
from asgd.live import processes
from asgd.live.faults import Fault
from asgd.live.hosts import threads
from asgd.live.journal import journal_path, read_journal
from asgd.live.tables import files

RUN = dict(recipe="table", bound=2, clock_every=2, shards=2)
TINY = {
  "problem": dict(
    name="asgd.problems.factorisation:matrix_factorisation",
    rank=2,
    generate=dict(users=20, items=12, ratings=200),
  ),
  "runs": {"run": RUN},
  "engine": "threads",
  "workers": (2,),
  "seeds": (0,),
  "batch_size": 9,
  "epochs": 2.0,  # 40 jobs
  "learning_rate": 0.5,
  "evaluations": 2,
  "curvature_checks": 0,
}


def build(**config):
  return experiment.build({**TINY, **config}, engines=experiment.ENGINES)


def train(workdir, machine=None, signals=None, **config):
  exp = build(**config)
  (cell,) = exp.cells
  more = {} if signals is None else {"signals": signals}
  machine = machine or Machine(grace_seconds=60.0)
  result = loop.train(
    exp, cell, workdir, bar=Silent(), machine=machine, **more
  )
  return result, workdir / "cells" / cell.name


def stop(workdir):
  with pytest.raises(Stopped, match="stopped in"):
    train(workdir, signals=kit.AfterLooks(0))
  return workdir / "cells" / "run-n2-s0"


def test_a_cell_that_was_stopped_goes_on_and_replays(tmp_path):
  place = stop(tmp_path)
  lines = journal_path(place, 1).read_text().splitlines(keepends=True)
  result, _ = train(tmp_path)
  assert journal_path(place, 1).read_text().startswith("".join(lines))
  assert (result["messages"], result["missed"]) == (40, 0)
  rows = (place / "metrics.jsonl").read_text().splitlines()
  assert json.loads(rows[-1])["message"] == 40
  assert result["differential_least"] >= -3
  assert (place / "staleness.csv").read_text().startswith("differential,rows")
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest
  # It is finished, and its files are what it wrote.
  again, _ = train(tmp_path)
  assert again["params_sha256"] == result["params_sha256"]
  with pytest.raises(ValueError, match="is of tables, whose shards"):
    comparison.compare(place)
  drawn = live_files.read(place)
  jobs = [end.job for _, end in live_files.ended_jobs(drawn.jobs)]
  assert len(jobs) == 40
  assert len(drawn.journals) == 2
  trace = journal_path(place, 1)
  whole = trace.read_text()
  trace.write_text("".join(whole.splitlines(keepends=True)[:-1]))
  with pytest.raises(ValueError, match="20 records, and the trace beside it"):
    replay.replay(place)
  trace.write_text(whole)
  order = files.order_path(place, 1)
  order.write_text("".join(order.read_text().splitlines(keepends=True)[:-2]))
  wrong = "run-n2-s0: .*(together|no shard has).* One of shard-.* was changed"
  with pytest.raises(ValueError, match=wrong):
    replay.replay(place)


@pytest.mark.parametrize("name", ["shard-{}.csv", "records-{}.bin"])
def test_files_that_are_not_those_of_the_checkpoint_are_refused(
  tmp_path, name
):
  place = stop(tmp_path)
  one, two = (place / name.format(i) for i in (0, 1))
  first, second = one.read_bytes(), two.read_bytes()
  one.write_bytes(second)
  two.write_bytes(first)
  with pytest.raises(ValueError, match="0.... is not the file that the chec"):
    train(tmp_path)
  assert (one.read_bytes(), two.read_bytes()) == (second, first)
  one.write_bytes(first)
  two.write_bytes(second)
  assert train(tmp_path)[0]["messages"] == 40


def test_ranges_move_and_a_cell_that_was_stopped_goes_on_with_them(tmp_path):
  run = dict(recipe="table", clock_every=2, shards=2, rebalance_every=2)
  moving = {"runs": {"run": {**run, "consistency": "bulk_synchronous"}}}
  with pytest.raises(Stopped, match="stopped in"):
    train(tmp_path, signals=kit.AfterLooks(0), **moving)
  result, place = train(tmp_path, **moving)
  assert (result["messages"], result["missed"]) == (40, 0)
  rows = read_journal(files.order_path(place, 1))
  moves = [row for row in rows if row.action == base.MOVE]
  # Of the 10 clocks of each worker, the last needs no move after it.
  assert [row.job for row in moves] == [1, 2, 3, 4]
  assert len({row.totals for row in moves}) > 1
  assert result["ranges_moved"] > 0
  assert 0 < result["rest_seconds"] < result["seconds"]
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest


def test_a_cell_without_a_checkpoint_begins_again_and_a_worker_dies(tmp_path):
  shutil.rmtree(stop(tmp_path) / "checkpoints")
  machine = Machine(faults=[Fault(1, 5, "kill")])
  result, place = train(tmp_path, machine)
  assert result["replaced"] == {"worker": 1, "shard": 0}
  assert result["done_again"] == 2
  failure = audit.Failure("worker", place.name, 1, ((1, 0),), 0, 10**9)
  plan = build().plan(build().cells[0])
  found = list(audit.findings(plan, place, [failure]))
  assert all(finding.well for finding in found), found
  assert {"jobs", "updates", "deaths", "replay", "records"} <= {
    finding.what for finding in found
  }
  assert (result["messages"], result["missed"]) == (40, 0)
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest


@pytest.mark.parametrize(
  ("config", "match"),
  [
    ({"server": {"shards": 2}}, r"write config\.runs\.run\.shards=2"),
    ({"server": {"wire": "bfloat16"}}, r"config\.server\.wire 'bfloat16' is n"),
    ({"runs": {"run": {**RUN, "shards": 21}}}, r"run\.shards must be at most"),
  ],
)
def test_what_live_tables_do_not_have_is_refused(config, match):
  with pytest.raises(ValueError, match=match):
    exp = experiment.build({**TINY, **config}, engines=experiment.ENGINES)
    exp.plan(exp.cells[0])


def test_faults_of_links_are_refused(tmp_path):
  exp = experiment.build(TINY, engines=experiment.ENGINES)
  machine = Machine(faults=[Fault(0, 1, "lose")])
  with pytest.raises(ValueError, match="fault=lose:0:1: what a worker of"):
    experiment.THREADS.check_machine(
      exp, [exp.plan(exp.cells[0])], machine
    )


class KillShard:
  """Kills shard 1 of a cell once some jobs are received, as a signal that never
  comes."""

  def __init__(self, folder):
    self._folder, self.killed = folder, False

  @property
  def received(self):
    if not self.killed and self._jobs() > 8:
      self.kill()
      self.killed = True
    return 0

  def kill(self):
    pids = processes.pids(live_memory.read(self._folder).memory)
    os.kill(pids["shard"][1], signal.SIGKILL)

  def _jobs(self):
    paths = self._folder.glob("records-*.bin")
    places = [int(path.stem.removeprefix("records-")) for path in paths]
    return sum(
      len(files.read_table_records(self._folder, w).loss) for w in places
    )


def test_counts_of_topics_are_exact_whoever_dies(tmp_path, monkeypatch):
  hosts, params = [], []

  def make(**options):
    hosts.append(threads.ThreadHosts(**options))
    return hosts[0]

  monkeypatch.setattr(live_hosts, "ThreadHosts", make)
  words = {"documents": 60, "side": 3, "length": 20}
  exp = build(
    problem=dict(name="asgd.problems.topics:lda", topics=4, words=words),
    batch_size=3,
    epochs=4.0,
  )
  (cell,) = exp.cells
  killer = KillShard(tmp_path / "cells" / cell.name)
  killer.kill = lambda: hosts[0].kill("shard", 1)
  result = loop.train(
    *(exp, cell, tmp_path),
    bar=Silent(),
    machine=Machine(grace_seconds=60.0, faults=[Fault(1, 5, "kill")]),
    signals=killer,
    ended=lambda _, trained, __: params.append(trained),
  )
  assert result["replaced"] == {"worker": 1, "shard": 1}
  (params,) = params
  data, counted = documents.generated(**words), np.zeros((9, 4), int)
  rows = zip(
    *(data.train_words, params["assignments"], data.train_lengths), strict=True
  )
  for words, of, length in rows:
    np.add.at(counted, (words[:length], of[:length]), 1)
  np.testing.assert_array_equal(params["words"], counted)
  np.testing.assert_array_equal(params["totals"][0], counted.sum(0))
  assert params["words"].sum() == data.train_lengths.sum()


@pytest.mark.process
@pytest.mark.slow
def test_a_worker_and_a_shard_of_ray_are_killed_and_nothing_is_lost(tmp_path):
  pytest.importorskip("ray")
  killer = KillShard(tmp_path / "cells" / "run-n4-s0")
  # One is slow, and the others wait for it: there is time to kill a shard.
  faults = [Fault(1, 5, "kill"), Fault(0, 6, "slow", 5.0)]
  machine = Machine(grace_seconds=60.0, faults=faults)
  try:
    result, place = train(
      *(tmp_path, machine, killer),
      engine="ray",
      workers=(4,),
      runs={"run": {**RUN, "rebalance_every": 2}},
    )
  finally:
    machine.close()
  assert killer.killed
  assert result["replaced"] == {"worker": 1, "shard": 1}
  assert result["rest_seconds"] > 0  # after 4 and 8 of 10 jobs
  assert (result["messages"], result["missed"]) == (40, 0)
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest


def test_what_is_said_of_a_cell():
  result = {"order": "ssp", "train_loss": 0.5, "test_loss": 0.25}
  result |= {"differential_mean": -1.5, "differential_least": -3}
  result |= {"seconds": 2.0, "bytes_up": 10**6, "bytes_down": 0}
  plain = {"rows_held_back": 0, "rows_dropped": 0, "done_again": 0, "missed": 0}
  words = "ssp, loss 0.5 (test 0.25), clock differential -1.50 (least -3), 2 s"
  assert live_tables.describe(result | plain) == f"{words}, 1 MB"
  more = {"rows_held_back": 1200, "rows_dropped": 3, "done_again": 1}
  assert live_tables.describe(result | plain | more) == (
    f"{words}, 1 MB, filters held back 1,200 rows and dropped 3, 1 job done"
    " again as workers died"
  )
