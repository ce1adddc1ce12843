"""The results folder: what it is of, what may go on in it, and its cells."""

import fcntl
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import kit
import numpy as np
import pytest

from asgd import experiment
from asgd.experiment import cell_files, cell_log, folder, storage
from asgd.experiment.folder import FolderError

TINY = {
  "runs": {"asgd": {"recipe": "asgd"}},
  "model": {"name": "mlp", "hidden": (4,)},
  "workers": (2,),
}
build = functools.partial(kit.build, TINY)


@pytest.fixture(scope="module")
def one():
  return build()


@pytest.fixture(scope="module")
def two():
  return build(batch_size=16)


def opened(workdir, exp):
  return folder.open_folder(str(workdir), "job", exp)


def refused(workdir, exp, message):
  """Asserts that an experiment may not have a folder, which stays as it was."""
  before = {path: path.read_bytes() for path in workdir.glob("[!.]*.*")}
  with pytest.raises(FolderError, match=message):
    opened(workdir, exp)
  assert {path: path.read_bytes() for path in workdir.glob("[!.]*.*")} == before


def read(path):
  return json.loads((path / "config.json").read_text())


# Files.


def test_json_has_null_for_what_is_not_finite():
  text = storage.to_json(
    {"a": float("nan"), "b": [np.float32(np.inf), np.int32(3)], "c": (1.5,)}
  )
  assert json.loads(text) == {"a": None, "b": [None, 3], "c": [1.5]}


def test_csv_quotes_what_needs_it(tmp_path):
  storage.write_csv(
    tmp_path / "x.csv", [{"a": "x, y", "b": float("nan")}, {"a": "z", "b": 2}]
  )
  assert (tmp_path / "x.csv").read_text() == 'a,b\n"x, y",\nz,2\n'


# Which folder.


def test_the_same_experiment_finds_its_folder_and_others_are_numbered(
  tmp_path, monkeypatch, one, two
):
  monkeypatch.chdir(tmp_path)

  def numbered(*experiments):
    return [folder.open_folder(None, "job", exp).name for exp in experiments]

  assert numbered(one, two, one, two) == 2 * ["job-001", "job-002"]
  # The newest of several; and a number that another process took is left.
  (tmp_path / "runs" / "job-007").mkdir()
  content = (tmp_path / "runs" / "job-001" / "config.json").read_text()
  (tmp_path / "runs" / "job-007" / "config.json").write_text(content)
  assert numbered(one, build(epochs=2.0)) == ["job-007", "job-008"]


def test_a_folder_that_is_asked_for_is_gone_on_with(tmp_path, one):
  workdir = tmp_path / "a" / "b"
  assert opened(workdir, one) == workdir
  before = read(workdir)
  assert before["version"] == folder.VERSION
  assert before["config"]["batch_size"] == 32
  assert before["dataset"]["name"] == "digits"
  opened(workdir, one)
  assert read(workdir) == before


def test_another_experiment_is_refused(tmp_path, one, two):
  opened(tmp_path, one)
  said = r"another experiment \(config\.batch_size was 32, now 16"
  refused(tmp_path, two, said)
  other = build(runs={"asgd": {"recipe": "asgd", "momentum": 0.5}})
  refused(tmp_path, other, r"config\.runs\.asgd\.momentum was None, now 0\.5")
  refused(tmp_path, build(engine="threads"), "was 'simulate', now 'threads'")


def test_other_data_of_the_same_name_are_refused(tmp_path, one):
  opened(tmp_path, one)
  images = one.dataset.train_images.copy()
  images[0, 0, 0, 0] ^= 1
  changed = one.dataset._replace(train_images=images)
  other = build(dataset=changed)
  refused(tmp_path, other, r"dataset\.sha256 was")


def test_what_is_free_to_change_may_change(tmp_path, one):
  opened(tmp_path, one)
  other = build(on_nan="record", checkpoint_seconds=3.0)
  opened(tmp_path, other)
  assert read(tmp_path)["free"]["on_nan"] == "record"


def test_seeds_workers_and_runs_may_be_added(tmp_path, one):
  opened(tmp_path, one)
  more = build(seeds=(3, 1), workers=(4,))
  opened(tmp_path, more)
  runs = {"dana": {"recipe": "dana_zero", "workers": (2,)}}
  opened(tmp_path, build(runs=runs))
  config = read(tmp_path)["config"]
  assert config["seeds"] == [0, 3, 1]
  assert config["workers"] == [2, 4]
  assert list(config["runs"]) == ["asgd", "dana"]
  runs["dana"]["workers"] = (8, 2)
  opened(tmp_path, build(runs=runs))
  assert read(tmp_path)["config"]["runs"]["dana"]["workers"] == [2, 8]
  # What it was before is still the same experiment.
  opened(tmp_path, one)


def test_a_choice_of_runs_is_of_the_same_experiment(tmp_path):
  runs = {"a": {"recipe": "asgd"}, "b": {"recipe": "dana_zero"}}
  opened(tmp_path, build(runs=runs, only="a"))
  assert list(read(tmp_path)["config"]["runs"]) == ["a"]
  opened(tmp_path, build(runs=runs))
  assert list(read(tmp_path)["config"]["runs"]) == ["a", "b"]
  opened(tmp_path, build(runs=runs, only="b"))


def test_what_a_kill_at_the_start_leaves_is_no_obstacle(tmp_path, one):
  (tmp_path / ".lock").touch()
  (tmp_path / "config.json.tmp").touch()
  opened(tmp_path, one)
  assert read(tmp_path)["config"]["workers"] == [2]


def test_a_folder_of_something_else_is_left_alone(tmp_path, one):
  (tmp_path / "thesis.tex").write_text("mine")
  refused(tmp_path, one, "not empty and holds no experiment")
  with pytest.raises(FolderError, match="thesis.tex is a file; choose another"):
    opened(tmp_path / "thesis.tex", one)


@pytest.mark.parametrize(
  "content", ['{"config"', "[]", '{"config": 3}', "", "[" * 10**5]
)
def test_a_broken_config_json_is_named(tmp_path, one, content):
  (tmp_path / "config.json").write_text(content)
  refused(tmp_path, one, r"config\.json cannot be read")


@pytest.mark.parametrize(
  "old, new",
  [
    ('"workers": [', '"workers": [1'),  # as if it had had them from the start
    ('"dataset"', '"database"'),
    ('"asgd": {', '"asga": {'),
    ('"seeds": [', '"seeds": [['),
    ("checksum", "checkSum"),
  ],
)
def test_a_config_json_that_was_changed_is_named(tmp_path, one, old, new):
  path = opened(tmp_path, one) / "config.json"
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  refused(tmp_path, one, r"config\.json cannot .*: put it back")


@pytest.mark.parametrize("version", [None, 0, folder.VERSION + 1])
def test_a_folder_of_another_version_is_refused(tmp_path, one, version):
  opened(tmp_path, one)
  value = {**read(tmp_path), "version": version, "checksum": "?"}
  (tmp_path / "config.json").write_text(json.dumps(value))
  refused(tmp_path, one, f"is of version {version} of the layo")


# Measurements.


def measured(one, **values):
  return experiment.Experiment(
    *(one.config, one.engines, one.runs, one.dataset),
    *(one.problem_of(one.runs["asgd"]), values),
  )


def test_measurements_are_those_of_the_beginning(tmp_path, one):
  opened(tmp_path, one)
  assert folder.read_measurements(tmp_path) is None
  opened(tmp_path, measured(one, cost=1.5))
  opened(tmp_path, measured(one, cost=2.5))
  assert folder.read_measurements(tmp_path) == {"cost": 1.5}


def test_measurements_that_are_lost_are_told(tmp_path, one):
  opened(tmp_path, measured(one, cost=1.5))
  path = tmp_path / "measurements.json"
  for text in ("{", path.read_text().replace("1.5", "1.6")):
    path.write_text(text)
    with pytest.raises(FolderError, match="measurements.json cannot be read"):
      folder.read_measurements(tmp_path)
  path.unlink()
  (tmp_path / "cells").mkdir()
  with pytest.raises(FolderError, match="measurements.json is missing"):
    opened(tmp_path, measured(one, cost=2.5))


# Cells.


def test_a_cell_says_what_it_is_of(tmp_path, one):
  (cell,) = one.cells
  place = tmp_path / "cells" / cell.name
  with folder.hold_cell(place, one, cell):
    said = folder.read_cell(place)
  assert said["cell"] == cell._asdict()
  again = kit.build(said["config"])
  assert again.cells == (cell,)
  with pytest.raises(FolderError, match="is not the folder of a cell"):
    folder.read_cell(tmp_path)


def in_use(place, exp):
  """Asserts that the cell's folder is held."""
  said = "in use by another process"
  with pytest.raises(cell_files.CellInUse, match=said):
    folder.hold_cell(place, exp, exp.cells[0]).__enter__()


LOCKS = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
  fcntl.flock(file, fcntl.LOCK_EX)
  print("locked", flush=True)
  sys.stdin.read()
"""


@pytest.mark.process
def test_a_cell_in_use_is_refused_and_free_afterwards(tmp_path, one):
  (cell,) = one.cells
  with folder.hold_cell(tmp_path, one, cell):
    in_use(tmp_path, one)
  assert not (tmp_path / ".lock").exists()
  with subprocess.Popen(
    [sys.executable, "-c", LOCKS, str(tmp_path / ".lock")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline() == b"locked\n"
    in_use(tmp_path, one)
  with folder.hold_cell(tmp_path, one, cell):
    pass


def test_the_only_cell_of_a_folder(tmp_path):
  assert folder.only_cell(tmp_path) == tmp_path
  (tmp_path / "cells" / "a-n1-s0").mkdir(parents=True)
  assert folder.only_cell(tmp_path) == tmp_path / "cells" / "a-n1-s0"
  (tmp_path / "cells" / "a-n1-s1").mkdir()
  with pytest.raises(FolderError, match=r"has 2 cells: .*a-n1-s0, a-n1-s1"):
    folder.only_cell(tmp_path)


ROW = {
  "message": 3,
  "update": 3,
  "train_loss": 1.0,
  "test_loss": 1.0,
  "test_accuracy": 0.5,
}
SEALED = storage.sealed(ROW)


def test_rows_so_far_are_without_one_that_was_cut_short(tmp_path):
  assert cell_log.read_rows_so_far(tmp_path) == []
  path, line = tmp_path / "metrics.jsonl", storage.to_lines([SEALED])
  path.write_text(2 * line)
  assert cell_log.read_rows_so_far(tmp_path) == [ROW, ROW]
  path.write_text(2 * line[:-5])
  assert cell_log.read_rows_so_far(tmp_path) == []
  path.write_text((2 * line)[:-5])
  assert cell_log.read_rows_so_far(tmp_path) == [ROW]


@pytest.mark.parametrize(
  "line",
  [
    *('{"message": "x"}', "[]", "{", storage.to_json(ROW)),
    storage.to_json({**SEALED, "test_loss": 1.5}),
    storage.to_json(SEALED).replace("c", "\x0b"),  # ends a line, for some
  ],
)
def test_rows_so_far_that_no_run_wrote_are_refused(tmp_path, line):
  lines = 2 * storage.to_lines([SEALED])
  (tmp_path / "metrics.jsonl").write_text(f"{lines}{line}\n{lines}")
  with pytest.raises(FolderError, match=r"metrics.jsonl, line 3 is no eval"):
    cell_log.read_rows_so_far(tmp_path)


def test_a_log_starts_with_the_rows_that_are_kept(tmp_path):
  log = cell_log.CellLog(tmp_path, tmp_path / "board", [ROW])
  log.write({**ROW, "message": 6})
  log.close()
  assert [row["message"] for row in folder.read_rows(tmp_path)] == [3, 6]
  assert list((tmp_path / "board").glob("events.out*"))


FILES = ("cell.json", "metrics.jsonl", "records.npz", "params.msgpack")


class Columns(NamedTuple):
  loss: np.ndarray = np.arange(3.0)
  worker: np.ndarray = np.array([1, 0, 1])


def finish(workdir, label="a", workers=2, seed=0, *, packs=False, **result):
  """Writes the files of a finished cell."""
  name = f"{label}-n{workers}-s{seed}"
  place = workdir / "cells" / name
  (place / "checkpoints" / "3").mkdir(parents=True)
  (place / "cell.json").write_text(
    f'{{"version": {folder.VERSION}, "cell": "this"}}'
  )
  (place / "metrics.jsonl").write_text(f"rows of {name}")
  result |= {"cell": name, "label": label, "workers": workers, "seed": seed}
  result |= {"engine": "simulate", "loss": 0.5, "gap": float("nan")}
  params = {"w": np.ones(3)}
  cell_files.finish(place, result, Columns(), params, as_archive=packs)
  return place


@pytest.mark.parametrize("kind", ["was changed", "is missing", "cut"])
@pytest.mark.parametrize("name", ["result.json", *FILES])
def test_a_result_counts_only_if_all_of_its_cell_is_as_written(
  tmp_path, name, kind
):
  place = finish(tmp_path)
  for repeatable in (False, True):
    assert folder.finished_result(place, repeatable=repeatable)["loss"] == 0.5
  path = place / name
  if kind == "is missing":
    path.unlink()
  elif kind == "cut":
    path.write_bytes(path.read_bytes()[:-2])
  else:
    kit.flip(path)
  assert folder.finished_result(place) is None
  # A run in real time cannot be repeated.
  what = kind.replace("cut", "was changed")
  message = f"^{path} {what}, and the run has ended.* Restore it"
  with pytest.raises(FolderError, match=message):
    folder.finished_result(place, repeatable=False)
  (place / "running.json").touch()  # it has its memory still
  assert folder.finished_result(place, repeatable=False) is None


def test_a_finished_cell_is_one_file_that_numpy_reads(tmp_path):
  place = finish(tmp_path / "one", packs=True)
  loose = finish(tmp_path / "many")
  assert [path.name for path in place.iterdir()] == ["cell.npz"]
  result = folder.finished_result(place)
  assert (result["loss"], result["gap"]) == (0.5, None)
  assert result == folder.finished_result(loose)
  assert folder.read_cell(place)["cell"] == "this"
  for name in ("cell.json", "metrics.jsonl", "params.msgpack"):
    assert cell_files.read_file(place, name) == (loose / name).read_bytes()
  with np.load(place / "cell.npz") as file:
    assert file["params.msgpack"] == (loose / "params.msgpack").read_bytes()
    for records in (file, *map(cell_files.read_records, (place, loose))):
      for name, column in Columns()._asdict().items():
        np.testing.assert_array_equal(records[name], column)


def test_any_byte_of_it_that_changed_is_seen(tmp_path):
  place = finish(tmp_path, packs=True)
  path = place / "cell.npz"
  content = path.read_bytes()
  for at in range(0, len(content), 7):
    damaged = bytearray(content)
    damaged[at] ^= 1
    path.write_bytes(damaged)
    assert folder.finished_result(place) is None, at
  for short in (b"", content[:-1], content + b"0"):
    path.write_bytes(short)
    assert folder.finished_result(place) is None
  path.write_bytes(content)
  assert folder.finished_result(place) is not None
  moved = place.rename(place.with_name("b-n2-s0"))
  assert folder.finished_result(moved) is None


def test_what_a_kill_left_beside_it_is_removed(tmp_path):
  place = finish(tmp_path, packs=True)
  for name in (*FILES, "result.json", "cell.npz.tmp", ".lock"):
    (place / name).write_text("half")
  (place / "checkpoints" / "3").mkdir(parents=True)
  (place / "spans.json").write_text("kept")
  with (place / ".lock").open("w") as lock:  # another process is at it
    fcntl.flock(lock, fcntl.LOCK_EX)
    cell_files.remove_leftovers(place)
    assert (place / "result.json").exists()
  cell_files.remove_leftovers(place)
  names = {path.name for path in place.iterdir()}
  assert names == {"cell.npz", "spans.json"}
  live = finish(tmp_path, "live")  # which keeps its files
  (live / ".lock").touch()
  cell_files.remove_leftovers(live)
  names = {path.name for path in live.iterdir()}
  assert names == {*FILES, "result.json", "checkpoints"}


@pytest.mark.parametrize(
  "name", [*FILES, "progress.json", "result.json", "checkpoints"]
)
def test_the_last_file_that_a_kill_left_beside_it_is_removed(tmp_path, name):
  place = finish(tmp_path, packs=True)
  if name == "checkpoints":
    (place / name).mkdir()
  else:
    (place / name).write_text("half")
  cell_files.remove_leftovers(place)
  assert [path.name for path in place.iterdir()] == ["cell.npz"]


def test_a_folder_in_the_way_of_its_file_is_named(tmp_path):
  place = tmp_path / "cells" / "a-n2-s0"
  (place / "cell.npz").mkdir(parents=True)
  with pytest.raises(FolderError, match=r"cell.npz is a folder.*: remove it"):
    folder.finished_result(place)


@pytest.mark.parametrize("gone", ["cell.json", "result.json", "all"])
def test_an_archive_without_its_files_is_none(tmp_path, gone):
  place = finish(tmp_path, packs=True)
  path = place / "cell.npz"
  members = storage.read_archive(path)
  kept = {k: v for k, v in members.items() if gone not in (k, "all")}
  storage.write_archive(path, kept)
  assert folder.finished_result(place) is None
  assert folder.fault(place).startswith(f"{path} was changed or cut since")
  assert folder.faults(tmp_path) == [folder.fault(place)]
  content = b"no zip file"
  digest = hashlib.sha256(content).hexdigest()
  path.write_bytes(content + digest.encode())
  assert folder.finished_result(place) is None
  with pytest.raises(FolderError, match="cell.npz .*: the cell is damaged"):
    folder.read_cell(place)


def trained(workdir, exp, *, packs):
  """Writes what a run leaves of the one cell of an experiment."""
  (cell,) = exp.cells
  place = folder.open_folder(str(workdir), "x", exp) / "cells" / cell.name
  with folder.hold_cell(place, exp, cell):
    (place / "metrics.jsonl").touch()
    result = {"cell": place.name, "label": cell.label, "engine": "simulate"}
    result |= {"workers": cell.workers, "seed": cell.seed}
    cell_files.finish(place, result, Columns(), {}, as_archive=packs)
  return place


@pytest.mark.parametrize("packs", [True, False])
def test_a_cell_of_another_experiment_does_not_count(tmp_path, one, two, packs):
  ours = trained(tmp_path / "ours", one, packs=packs)
  theirs = trained(tmp_path / "theirs", two, packs=packs)
  assert folder.finished_result(ours) is not None
  assert folder.fault(ours) is None
  shutil.rmtree(ours)
  shutil.copytree(theirs, ours)
  assert folder.finished_result(ours) is None
  assert folder.read_results(tmp_path / "ours") == []
  said = r"is of another experiment \(config.batch_size was 16, now 32\)"
  assert re.search(said, folder.fault(ours))
  (cell,) = one.cells
  if packs:  # it is trained again
    with folder.hold_cell(ours, one, cell):
      pass
  else:
    with pytest.raises(FolderError, match=said + ".*: remove .* to train the"):
      folder.finished_result(ours, repeatable=False)
    with (
      pytest.raises(FolderError, match=r"cell.json is of another experiment"),
      folder.hold_cell(ours, one, cell),
    ):
      pass


def test_other_files_among_the_cells_are_not_looked_at(tmp_path, one):
  trained(tmp_path, one, packs=True)
  (tmp_path / "cells" / ".DS_Store").touch()
  assert len(folder.read_results(tmp_path)) == 1
  assert folder.faults(tmp_path) == []


def test_a_cell_that_has_not_ended_has_no_result(tmp_path):
  assert folder.finished_result(tmp_path / "nothing", repeatable=False) is None
  place = finish(tmp_path)
  (place / "result.json").unlink()
  (place / "params.msgpack").unlink()
  assert folder.finished_result(place, repeatable=False) is None


def test_a_result_of_another_cell_does_not_count(tmp_path):
  place = finish(tmp_path).rename(tmp_path / "b-n2-s0")
  assert folder.finished_result(place) is None


def test_results_go_by_workers_then_run_then_seed(tmp_path, one):
  opened(tmp_path, one)
  path = tmp_path / "config.json"
  value = storage.read_sealed(path)
  value["config"]["runs"] = {
    label: {"engine": "simulate"} for label in ("z", "a")
  }
  storage.write_json(path, storage.sealed(value))
  order = [(1, "a", 0), (2, "z", 0), (2, "z", 1), (2, "a", 0), (10, "z", 0)]
  for workers, label, seed in reversed(order):
    place = finish(tmp_path, label, workers, seed)
    entry = {"engine": "simulate", "recipe": "asgd", "title": label}
    own = {"cell": {"label": label}, "config": {"runs": {label: entry}}}
    storage.write_json(
      place / "cell.json", {**own, "dataset": value["dataset"]}
    )
    result = storage.read_sealed(place / "result.json")
    cell_files.finish(place, result, Columns(), {}, as_archive=False)
  results = folder.read_results(tmp_path)
  assert [(r["workers"], r["label"], r["seed"]) for r in results] == order
