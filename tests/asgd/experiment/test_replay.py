"""A live cell, computed again from its traces."""

import json
import shutil

import kit
import pytest

import asgd
from asgd import base
from asgd.experiment import comparison, folder, replay, storage
from asgd.live.journal import journal_path, read_journal

# Settings of cells; a replay comes to their parameters, to the bit.
CELLS = {
  "stopped on the way": {
    "stop": (20,),
    "examples": 1152,
    "live": {"slowdown": (40, 40, 40)},  # they wait most of their time
  },
  "two shards, rounded on the wire": {
    "server": {"shards": 2, "wire": "bfloat16"}
  },
  "two shards of one order, with totals": {
    "server": {"shards": 2, "consistent": True},
    "clip_norm": 0.5,
  },
  "two devices to a worker": {"live": {"devices": 2}},
  "in rounds": {"runs": {"a": {"recipe": "ssgd"}}},
  "two tickets, local steps": {
    "order": {"name": "asynchronous", "depth": 2},
    "runs": {"a": {"recipe": "downpour"}},
  },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a cell, and its result."""
  workdir = tmp_path_factory.mktemp("trained") / "out"
  return kit.train_live(workdir, examples=576)[:2]


@pytest.fixture
def cell(trained, tmp_path):
  return shutil.copytree(trained[0], tmp_path / "cells" / trained[0].name)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_replayed_to_the_bit(name, tmp_path):
  settings = {"examples": 576, **CELLS[name]}
  place, result, _ = kit.train_live(tmp_path / "out", **settings)
  replayed = asgd.replay(place)
  assert replayed.same
  assert replayed.digest == replayed.recorded == result["params_sha256"]
  assert replayed.accuracy == result["test_accuracy"]
  assert len(replayed.records.loss) == result["messages"]
  assert (replayed.trace.action == base.RECEIVE).sum() == result["messages"]


def test_the_folder_of_one_cell_is_as_good_as_the_cell(trained):
  place, result = trained
  replayed = asgd.replay(str(place.parent.parent))
  assert replayed.name == "a-n3-s0"
  assert replayed.digest == result["params_sha256"]
  said = replay.describe(replayed)
  assert "the same parameters as the run, to the bit" in said


def test_another_result_is_told(cell):
  path = cell / "result.json"
  result = storage.read_sealed(path)
  result["params_sha256"] = "0" * 64
  storage.write_json(path, storage.sealed(result))
  replayed = asgd.replay(cell)
  assert not replayed.same
  said = replay.describe(replayed)
  assert "NOT the parameters of the run (0000000000000000)" in said
  cut = replayed._replace(messages=replayed.messages + 1)
  assert "it was cut short" in replay.describe(cut)
  elsewhere = replayed._replace(cpus=10_000)
  assert "it had 10000 CPU cores, this machine" in replay.describe(elsewhere)


def test_a_damaged_result_is_no_run_that_goes_on(cell):
  path = cell / "result.json"
  path.write_text(path.read_text()[:100])
  with pytest.raises(ValueError, match=r"result.json cannot be read or was"):
    asgd.replay(cell)


def test_a_cell_of_another_experiment_is_refused(trained, cell, tmp_path):
  config = storage.read_sealed(trained[0].parent.parent / "config.json")
  path = tmp_path / "config.json"
  storage.write_json(path, storage.sealed(config))
  assert folder.fault(cell) is None
  config["config"]["learning_rate"] = 0.5
  storage.write_json(path, storage.sealed(config))
  said = r"of another experiment \((config.)?learning_rate was 0.005, now 0.5"
  for read in (asgd.replay, comparison.compare):
    with pytest.raises(ValueError, match=said):
      read(cell)


def test_a_comparison_of_changed_records_is_refused(cell):
  path = cell / "records.npz"
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match=r"records.npz was changed, and the run"):
    comparison.compare(cell)


def test_a_damaged_archive_is_told(tmp_path):
  place = tmp_path / "cells" / "a-n1-s0"
  place.mkdir(parents=True)
  (place / "cell.npz").write_bytes(b"damaged")
  with pytest.raises(ValueError, match=r"cell.npz .*: the cell is damaged"):
    asgd.replay(place)


def test_lost_parameters_are_computed_again(cell):
  path = cell / "params.msgpack"
  content = path.read_bytes()
  path.unlink()
  message = "compute it with asgd replay .* --restore"
  with pytest.raises(ValueError, match=message):
    folder.finished_result(cell, repeatable=False)
  replayed = asgd.replay(cell)
  assert replay.restore(cell, replayed) == path
  assert path.read_bytes() == content
  assert folder.finished_result(cell, repeatable=False) is not None
  with pytest.raises(ValueError, match="nothing is restored"):
    replay.restore(cell, replayed._replace(digest="0"))


def test_a_run_that_goes_on_has_nothing_to_compare_with(cell):
  (cell / "result.json").unlink()
  path = journal_path(cell, 0)
  rows = read_journal(path)
  kit.write_journal(path, rows[: len(rows) // 2])
  replayed = asgd.replay(cell)
  assert replayed.same
  assert replayed.recorded is None
  assert "did not finish, or not yet" in replay.describe(replayed)


def test_what_cannot_be_replayed_is_refused(cell, tmp_path):
  path = journal_path(cell, 0)
  rows = read_journal(path)
  sent = next(i for i, row in enumerate(rows) if row.action == base.SEND)
  kit.write_journal(path, rows[:sent] + rows[sent + 1 :])
  with pytest.raises(ValueError, match="trace-0.csv"):
    asgd.replay(cell)
  joins = [row for row in rows if row.action == base.JOIN]
  kit.write_journal(path, joins)
  message = "has no received message, so there is nothing to replay"
  with pytest.raises(ValueError, match=message):
    asgd.replay(cell)
  path.unlink()
  with pytest.raises(ValueError, match="trace-0.csv is missing or empty, but"):
    asgd.replay(cell)
  description = cell / "cell.json"
  content = json.loads(description.read_text())
  content["dataset"]["sha256"] = "0" * 64
  description.write_text(json.dumps(content))
  kit.write_journal(path, rows)
  with pytest.raises(ValueError, match="run.s data; give .* with data_dir="):
    asgd.replay(cell)
  with pytest.raises(ValueError, match="nothing does not exist: .* folder="):
    asgd.replay(tmp_path / "nothing")
