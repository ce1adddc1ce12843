"""Live cells of peers, tables and a coordinator: stopped, resumed, replayed."""

import json
import shutil

import jax
import kit
import numpy as np
import pytest
from kit import TINY_RUN
from kit import TINY_TABLE as TABLE

from asgd import base, experiment, simulator
from asgd.data import documents
from asgd.experiment import (
  audit,
  folder,
  live_files,
  live_memory,
  replay,
)
from asgd.experiment.engines import live_peers, live_tables
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals, Stopped
from asgd.live import worker_spec
from asgd.live.faults import Fault
from asgd.live.gossip import files as peer_files
from asgd.live.hosts import threads
from asgd.live.journal import journal_path, read_journal
from asgd.live.links import throttled_hosts
from asgd.live.records import records_path
from asgd.live.tables import files

CODED = {"recipe": "threshold_sharing", "codec": "top_k", "momentum": 0.5}
PAIRS = {"recipe": "ad_psgd"}
ARRIVALS = {"recipe": "async_threshold_sharing", "codec": "top_k"}
BATCHES = {
  "recipe": "sandblaster", "portions": 6, "push_every": 2, "shards": 2,
}
RATINGS = {
  **kit.TINY_RATINGS,
  "problem": dict(
    name="asgd.problems.factorisation:matrix_factorisation",
    rank=2,
    generate=dict(users=20, items=12, ratings=200),
  ),
}
CONFIGS = {  # by recipe; that of peers for all others
  "table": RATINGS,
  "sandblaster": {**TINY_RUN, "examples": 16 * 64, "evaluations": 3},  # 32 jobs
}
OF_PEERS = {**TINY_RUN, "examples": 640}  # 40 messages
KILLED = [(0.0, "worker", 1), (0.0, "shard", 1), (0.0, "coordinator", 0)]


def build(run, engine="threads", **config):
  base_config = CONFIGS.get(run["recipe"], OF_PEERS)
  return kit.build(base_config, engine=engine, runs={"run": run}, **config)


def train(workdir, run, machine=None, signals=NoSignals, **config):
  machine = machine or Machine(grace_seconds=60.0)
  options = {"machine": machine, "signals": signals}
  return kit.train(build(run, **config), workdir, **options)[:2]


def stop(workdir, run, looks=0, **config):
  """A cell that was stopped after some looks; returns its folder."""
  with pytest.raises(Stopped, match="stopped in"):
    train(workdir, run, signals=kit.AfterLooks(looks), **config)
  return workdir / "cells" / "run-n2-s0"


def rows(place):
  lines = (place / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def check_finished(workdir, run, result):
  """A cell that has ended is replayed, and not trained again."""
  replayed = replay.replay(workdir / "cells" / "run-n2-s0")
  assert replayed.recorded is not None and replayed.same
  again, _ = train(workdir, run)
  assert again["params_sha256"] == result["params_sha256"]


MISTAKES = (
  (PAIRS, {"server": {"shards": 2}}, "config.server.shards 2 is not for the"),
  (PAIRS, {"server": {"wire": "bfloat16"}}, "config.server.wire 'bfloat16' "),
  (PAIRS, {"order": {"name": "backup_tasks"}},
   "config.order.name 'backup_tasks' .* a copy of a late job needs"),
  (PAIRS, {"order": {"name": "backup_workers", "backup": 1}},
   "config.order.name 'backup_workers' .* each peer would decide alone"),
  (PAIRS, {"live": {"devices": 3}}, "config.live.devices 3 must divide"),
  (TABLE, {"server": {"shards": 2}}, r"write config\.runs\.run\.shards=2"),
  (TABLE, {"server": {"wire": "bfloat16"}}, r"config\.server\.wire 'bfloat"),
  ({**TABLE, "shards": 21}, {}, r"run\.shards must be at most"),
  (BATCHES, {"server": {"shards": 2}}, "write config.runs.run.shards=2"),
  (BATCHES, {"server": {"wire": "bfloat16"}}, "it would change what is comp"),
  (BATCHES, {"live": {"devices": 3}}, "config.live.devices 3 must divide"),
  (TABLE, {"live": {"devices": 7}}, "config.live.devices 7 must divide"),
  ({**BATCHES, "loading": 1.0}, {}, "config.runs.run.loading 1.0 is not for"),
  ({**BATCHES, "restart": 2.0}, {}, "config.runs.run.restart 2.0 is not for"),
)


test_one_line_for_what_they_do_not_have = kit.refuses(
  [((a, b), why) for a, b, why in MISTAKES],
  lambda value: build(value[0], **value[1]), longest=600,
)


@pytest.mark.parametrize(
  ("run", "why"),
  [
    (PAIRS, "peers send a message once"),
    (TABLE, "a worker of tables repeats"),
    (BATCHES, "a coordinator calls its workers"),
  ],
)
def test_faults_of_links_to_a_server_are_refused(run, why):
  exp = build(run)
  with pytest.raises(ValueError, match=f"--fault=lose:0:3: {why}"):
    exp.check_machine(Machine(faults=[Fault(0, 3, "lose")]))


# Workers and peers of several devices.


@pytest.mark.parametrize(
  ("run", "parallel"),
  [
    ({"recipe": "d_psgd"}, "tensor"),
    ({"recipe": "table", "consistency": "bulk_synchronous"}, "data"),
    (BATCHES, "data"),
  ],
)
def test_a_group_of_devices_computes_what_one_device_does(
  run, parallel, tmp_path
):
  live = {"devices": 2, "parallel": parallel}
  shared, _ = train(tmp_path / "two", run, batch_size=8, live=live)
  replayed = replay.replay(tmp_path / "two" / "cells" / "run-n2-s0")
  assert replayed.same and replayed.recorded == shared["params_sha256"]
  alone, _ = train(tmp_path / "one", run, batch_size=8)
  assert shared["messages"] == alone["messages"]
  for column in ("train_loss", "test_loss"):  # sums have another order
    assert shared[column] == pytest.approx(alone[column], rel=1e-4)


@pytest.mark.parametrize("key", ["batch_size", "steps"])
def test_peers_get_work_by_their_measured_speed(key, tmp_path, monkeypatch):
  seconds = 1.0, 3.0  # of equal jobs of peers 0 and 1
  measure = lambda spec, worker, jobs, wait: seconds[worker]  # noqa: E731
  monkeypatch.setattr(worker_spec.WorkerSpec, "measure", measure)
  run, given = {"recipe": "d_psgd"}, [24, 8]
  if key == "steps":
    run, given = {"recipe": "local_d_psgd", "steps": 4}, [6, 2]
  place = stop(tmp_path / "cut", run, allocation={key: "speed"})
  measured, _ = train(tmp_path / "cut", run, allocation={key: "speed"})
  fields = json.loads((place / "allocation.json").read_text())
  assert given in [fields["batch_sizes"], fields["steps"]]
  replayed = replay.replay(place)
  assert replayed.same and replayed.recorded == measured["params_sha256"]
  # The same training as with these numbers, as rounds have one order.
  numbers, _ = train(tmp_path / "given", run, allocation={key: given})
  assert numbers["params_sha256"] == measured["params_sha256"]


def test_the_work_of_a_peer_is_divided_among_its_devices():
  exp = build({"recipe": "d_psgd"}, live={"devices": 2})
  plan = exp.plan(exp.cells[0])
  spec = live_peers.make_spec(plan, 0, (), copies=False)
  state = spec.peer.init(spec.params)
  job = spec.steps.send(state, np.int32(0))
  work = simulator.compile_work(plan.worker, plan.devices)
  arguments = job.ticket, spec.batch(0, 0), spec.root, np.int32(0)
  _, message, _ = work(spec.worker.init(spec.params), *arguments)
  devices = {d for leaf in jax.tree.leaves(message) for d in leaf.devices()}
  assert devices == {*jax.local_devices()[:2]}


# Peers.


def test_peers_that_were_stopped_go_on_and_replay(tmp_path):
  place = stop(tmp_path, CODED)
  journal = journal_path(place, 1)
  lines = journal.read_text().splitlines(keepends=True)
  # Rows that the checkpoint has are needed; what came after it is not.
  journal.write_text("".join(lines[:-1]))
  with pytest.raises(ValueError, match="rows where the run resumes from"):
    train(tmp_path, CODED)
  journal.write_text("".join([*lines, lines[-1]]))
  result, _ = train(tmp_path, CODED)
  assert journal.read_text().startswith("".join(lines))
  assert (result["messages"], result["missed"]) == (40, 0)
  assert [row["message"] for row in rows(place)] == [14, 26, 40]
  assert (place / "links.csv").exists()
  check_finished(tmp_path, CODED, result)
  sink = records_path(place, 0)
  sink.write_bytes(sink.read_bytes()[:-1])
  with pytest.raises(ValueError, match="records, and the trace beside it"):
    replay.replay(place)


def test_peers_without_a_checkpoint_begin_again(tmp_path):
  shutil.rmtree(stop(tmp_path, PAIRS) / "checkpoints")
  result, place = train(tmp_path, PAIRS)
  assert replay.replay(place).same
  assert (result["messages"], result["missed"]) == (40, 0)
  assert [row["message"] for row in rows(place)] == [13, 27, 40]


def test_peers_of_arrivals_that_were_stopped_go_on_with_one_that_died(tmp_path):
  stop(tmp_path, ARRIVALS)
  machine = Machine(faults=[Fault(1, 9, "kill")], grace_seconds=60.0)
  result, place = train(tmp_path, ARRIVALS, machine)
  # Another peer has done the lost job.
  assert (result["messages"], result["missed"]) == (40, 0)
  assert replay.replay(place).same
  # All have added the same messages, in different orders.
  assert result["consensus"] < 1e-6


def test_peers_replay_with_one_that_died(tmp_path):
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
  one = peer_files.read_peer_records(place, 1)
  lost = one.residual_norm[one.job.tolist().index(5)]  # the last before it died
  assert result["residual_lost"] == pytest.approx(lost) and lost > 0
  assert replay.replay(place).recorded is not None
  assert replay.replay(place).same


# Tables.


def test_tables_that_were_stopped_go_on_and_replay(tmp_path):
  place = stop(tmp_path, TABLE)
  lines = journal_path(place, 1).read_text().splitlines(keepends=True)
  result, _ = train(tmp_path, TABLE)
  assert journal_path(place, 1).read_text().startswith("".join(lines))
  assert (result["messages"], result["missed"]) == (40, 0)
  assert rows(place)[-1]["message"] == 40
  assert result["differential_least"] >= -3
  assert (place / "staleness.csv").read_text().startswith("differential,rows")
  check_finished(tmp_path, TABLE, result)
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
  wrong = "run-n2-s0: .*(together|no shard has).* A file shard-.* was changed"
  with pytest.raises(ValueError, match=wrong):
    replay.replay(place)


@pytest.mark.parametrize(
  ("name", "rows"),
  [("shard-{}.csv", lambda data: data.count(b"\n")), ("records-{}.bin", len)],
)
def test_files_that_are_not_those_of_the_checkpoint_are_refused(
  tmp_path, name, rows
):
  place = stop(tmp_path, TABLE)
  paths = [place / name.format(i) for i in (0, 1)]
  # The file with fewer rows is replaced: the other has as many as are checked.
  fewer, other = sorted(paths, key=lambda path: rows(path.read_bytes()))
  before = fewer.read_bytes()
  fewer.write_bytes(other.read_bytes())
  with pytest.raises(ValueError, match=f"{fewer.name} is not the file that"):
    train(tmp_path, TABLE)
  assert fewer.read_bytes() == other.read_bytes()
  fewer.write_bytes(before)
  assert train(tmp_path, TABLE)[0]["messages"] == 40


def test_ranges_move_and_a_cell_that_was_stopped_goes_on_with_them(tmp_path):
  run = dict(recipe="table", clock_every=2, shards=2, rebalance_every=2)
  run = {**run, "consistency": "bulk_synchronous"}
  stop(tmp_path, run)
  result, place = train(tmp_path, run)
  assert (result["messages"], result["missed"]) == (40, 0)
  order = read_journal(files.order_path(place, 1))
  moves = [row for row in order if row.action == base.MOVE]
  # Of the 10 clocks of each worker, the last needs no move after it.
  assert [row.job for row in moves] == [1, 2, 3, 4]
  assert len({row.totals for row in moves}) > 1
  assert result["ranges_moved"] > 0
  assert 0 < result["rest_seconds"] < result["seconds"]
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest


def test_tables_without_a_checkpoint_begin_again_and_a_worker_dies(tmp_path):
  shutil.rmtree(stop(tmp_path, TABLE) / "checkpoints")
  machine = Machine(faults=[Fault(1, 5, "kill")])
  result, place = train(tmp_path, TABLE, machine)
  assert result["replaced"] == {"worker": 1, "shard": 0}
  assert result["done_again"] == 2
  failure = audit.Failure("worker", place.name, 1, ((1, 0),), 0, 10**9)
  exp = build(TABLE)
  plan = exp.plan(exp.cells[0])
  found = list(audit.findings(plan, place, [failure]))
  assert all(finding.passed for finding in found), found
  assert {"jobs", "updates", "deaths", "replay", "records"} <= {
    finding.check for finding in found
  }
  assert (result["messages"], result["missed"]) == (40, 0)
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest


@pytest.mark.parametrize("run", [CODED, PAIRS, TABLE, BATCHES])
def test_calls_over_a_network_take_its_time_and_replay(tmp_path, run):
  result, place = train(tmp_path, run, network={"latency": 1e-3, "up": 1e6})
  messages = 32 if run is BATCHES else 40
  assert (result["messages"], result.get("missed", 0)) == (messages, 0)
  replayed = replay.replay(place)
  assert replayed.recorded == replayed.digest
  # Of 20 messages of a worker, 10 of tables, each is 1 ms on its way; of pairs
  # perhaps one alone is.
  last = read_journal(journal_path(place, 0))[-1].time
  assert last > (1e-3 if run is PAIRS else 10e-3)


def test_counts_of_topics_are_exact_whoever_dies(tmp_path, monkeypatch):
  words = {"documents": 60, "side": 3, "length": 20}
  made = []

  class Killed(threads.ThreadHosts):
    """Their second shard dies as a worker is replaced."""

    def start(self, kind, index, make):
      if (kind, index) in made and kind == "worker":
        self.kill("shard", 1)
      made.append((kind, index))
      return super().start(kind, index, make)

  monkeypatch.setattr(throttled_hosts, "ThreadHosts", Killed)
  exp = build(
    TABLE,
    problem=dict(name="asgd.problems.topics:lda", topics=4, words=words),
    batch_size=3,
    epochs=4.0,
  )
  machine = Machine(grace_seconds=60.0, faults=[Fault(1, 5, "kill")])
  trained = kit.train(exp, tmp_path, machine=machine)
  result, params = trained.result, trained.params
  assert result["replaced"] == {"worker": 1, "shard": 1}
  data, counted = documents.generated(**words), np.zeros((9, 4), int)
  counts = zip(
    *(data.train_words, params["assignments"], data.train_lengths), strict=True
  )
  for words, of, length in counts:
    np.add.at(counted, (words[:length], of[:length]), 1)
  np.testing.assert_array_equal(params["words"], counted)
  np.testing.assert_array_equal(params["totals"][0], counted.sum(0))
  assert params["words"].sum() == data.train_lengths.sum()


def test_what_is_said_of_a_cell_of_tables():
  result = {"order": "ssp", "train_loss": 0.5, "test_loss": 0.25}
  result |= {"differential_mean": -1.5, "differential_least": -3}
  result |= {"seconds": 2.0, "bytes_up": 10**6, "bytes_down": 0}
  plain = {"rows_held_back": 0, "rows_dropped": 0, "done_again": 0, "missed": 0}
  words = "ssp, loss 0.5 (test 0.25), clock differential -1.50 (least -3), 2 s"
  assert live_tables.describe(result | plain) == f"{words}, 1 MB"
  untested = live_tables.describe(result | plain | {"test_loss": np.nan})
  assert untested == f"{words}, 1 MB".replace(" (test 0.25)", "")
  more = {"rows_held_back": 1200, "rows_dropped": 3, "done_again": 1}
  assert live_tables.describe(result | plain | more) == (
    f"{words}, 1 MB, filters held back 1,200 rows and dropped 3, 1 job"
    " redone because workers failed"
  )


def test_tables_end_without_a_worker_that_is_not_replaced(tmp_path):
  machine = Machine(faults=[Fault(1, 5, "kill")])
  result, place = train(tmp_path, TABLE, machine, live={"refill": False})
  assert (result["messages"], result["missed"]) == (24, 16)
  assert rows(place)[-1]["message"] == 40
  assert replay.replay(place).same


# A coordinator.


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
  _, place = train(
    tmp_path_factory.mktemp("simulated"), BATCHES, engine="simulate"
  )
  return kit.iterates(place)


def same(one, other):
  """Two runs have the same iterates, as far as both have come."""
  count = min(len(one), len(other))
  assert count > 3
  assert one[:count] == other[:count]


def test_threads_come_to_the_bits_of_a_simulation(simulated, tmp_path):
  result, place = train(tmp_path, BATCHES)
  same(kit.iterates(place), simulated)
  assert result["messages"] == 32
  assert result["replaced"] == {"worker": 0, "shard": 0}
  check_finished(tmp_path, BATCHES, result)
  assert live_memory.read_running(place) is None


def test_killed_parties_change_no_iterate(simulated, tmp_path):
  machine = Machine(faults=[Fault(0, 4, "kill")])
  run = {**BATCHES, "failures": KILLED}
  result, place = train(tmp_path, run, machine, live={"spans": True})
  same(kit.iterates(place), simulated)
  assert result["replaced"] == {"worker": 2, "shard": 1}
  assert replay.replay(place).same
  words = experiment.ENGINES["threads"].describe(result)
  assert words.endswith("; 2 workers and 1 shard replaced")
  assert (place / "spans-1.csv").exists()
  assert (place / "faults.csv").read_text() == "0,4,kill,0.0\n"


@pytest.mark.parametrize("left", ["memory", "checkpoint", "nothing"])
def test_batches_that_were_stopped_go_on(simulated, tmp_path, left):
  place = stop(tmp_path, BATCHES, looks=1)
  before = journal_path(place, 0).read_text()
  running = live_memory.read_running(place)
  if left != "memory":
    shutil.rmtree(running.memory)
  if left == "nothing":
    shutil.rmtree(place / "checkpoints")
  result, _ = train(tmp_path, BATCHES)
  same(kit.iterates(place), simulated)
  assert result["messages"] == 32
  assert replay.replay(place).same
  assert [row["message"] for row in rows(place)] == [11, 21, 32]
  if left == "checkpoint":
    assert journal_path(place, 0).read_text().startswith(before)


def test_files_that_were_cut_are_refused(tmp_path):
  journal = journal_path(stop(tmp_path, BATCHES, looks=1), 0)
  journal.write_text("".join(journal.read_text().splitlines(True)[:2]))
  with pytest.raises(ValueError, match="rows where the run resumes from"):
    train(tmp_path, BATCHES)
  live_memory.remove_leftover(journal.parent)
