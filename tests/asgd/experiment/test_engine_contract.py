"""The contract of all engines.

A cell that was stopped and resumed has the same bits as one that was not. Where
real time decides (threads, ray), it has the bits of its trace. A signal saves
and stops. A value that is not finite stops the cell with one line, or is
recorded. Rows, results and records have common columns. An evaluation changes
nothing. A cell in another process has the same bits.
"""

import copy
import csv
import multiprocessing
import signal

import jax
import kit
import numpy as np
import pytest

from asgd import experiment
from asgd.experiment import (
  cell_files,
  cells,
  folder,
  replay,
  report,
  storage,
)
from asgd.experiment.engines import NonFiniteResult
from asgd.experiment.machine import Machine
from asgd.experiment.signals import Stopped
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
PROCESS = pytest.mark.process
# The driver of ray is one process, its workers are others.
IN_PROCESS = [name for name in ENGINES if name != "ray"]
# Real time decides what a run of these computes; a trace says what that was.
LIVE = ("threads", "ray")

# What a config of an engine has beside TINY_RUN.
CONFIGS = {
  "simulate": {},
  "threads": {},
  "ray": {"compress": {"name": "qsgd", "levels": 3}},
  "mesh": {"mesh": {"axes": {"data": 2}}},
  "pipeline": {"pipeline": {"stages": 2, "microbatches": 4}},
}

engines = pytest.mark.parametrize(
  "engine",
  [
    pytest.param(name, marks=PROCESS) if name == "ray" else name
    for name in ENGINES
  ],
)


@pytest.fixture(scope="module")
def machine():
  shared = Machine(grace_seconds=60.0)
  yield shared
  shared.close()


def build(engine, **config):
  return kit.tiny(**{"engine": engine, **CONFIGS[engine], **config})


def train(exp, workdir, machine, **options):
  return kit.train(exp, workdir, machine=machine, **options).result


def place_of(exp, workdir):
  (cell,) = exp.cells
  return workdir / "cells" / cell.name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, machine):
  """engine -> (experiment, its folder, result): trained once."""
  finished = {}

  def get(engine):
    if engine not in finished:
      exp = build(engine)
      workdir = tmp_path_factory.mktemp(engine)
      finished[engine] = exp, workdir, train(exp, workdir, machine)
    return finished[engine]

  return get


def assert_same(engine, workdir, exp, undisturbed):
  """The cell of a folder came to what it should have come to."""
  place = place_of(exp, workdir)
  result = folder.finished_result(place)
  assert result is not None
  if engine in LIVE:
    assert replay.replay(place).digest == result["params_sha256"]
    return
  _, whole, _ = undisturbed(engine)
  expected = place_of(exp, whole)
  assert kit.lasting(result) == kit.lasting(folder.finished_result(expected))
  for ours, theirs in zip(
    folder.read_rows(place), folder.read_rows(expected), strict=True
  ):
    assert kit.lasting(ours) == kit.lasting(theirs)
  read = cell_files.read_file
  assert read(place, "params.msgpack") == read(expected, "params.msgpack")
  ours, theirs = map(cell_files.read_records, (place, expected))
  assert ours.keys() == theirs.keys()
  for column in ours.keys() - kit.TIMES:
    np.testing.assert_array_equal(ours[column], theirs[column])


# Resuming.


@pytest.mark.parametrize(
  ("engine", "looks"),
  [
    *((engine, 1) for engine in IN_PROCESS),
    ("simulate", 2),
    ("threads", 2),
    pytest.param("ray", 1, marks=PROCESS),
  ],
)
def test_a_signal_saves_and_stops_and_the_same_call_goes_on_to_the_same(
  engine, looks, tmp_path, machine, undisturbed
):
  whole, _, _ = undisturbed(engine)  # what it compiled is used again
  exp = copy.copy(whole)
  exp.config = {**whole.config, "checkpoint_seconds": 0.0}
  start = ENGINES[engine].start

  def in_small_steps(context):
    """An engine that looks up after each few messages."""
    running = start(context)
    advance = running.advance
    if engine not in LIVE:
      running.advance = lambda until: advance(min(until, running.done + 3))
      running._pace = Slow()
    return running

  exp.engines = {
    **ENGINES,
    engine: ENGINES[engine]._replace(start=in_small_steps),
  }
  with pytest.raises(Stopped) as caught:
    train(exp, tmp_path, machine, signals=kit.AfterLooks(looks))
  assert caught.value.signal_number == signal.SIGTERM
  line = str(caught.value)
  assert line.startswith("stopped in run-n")
  assert line.endswith("; run the same command again to resume")
  place = place_of(exp, tmp_path)
  assert folder.finished_result(place) is None
  if engine not in LIVE:  # whose messages are in journals, not in checkpoints
    assert any(p.name.isdigit() for p in (place / "checkpoints").iterdir())
  train(whole, tmp_path, machine)
  assert_same(engine, tmp_path, whole, undisturbed)


@engines
def test_a_finished_cell_is_not_trained_again(engine, undisturbed):
  exp, workdir, result = undisturbed(engine)
  place = place_of(exp, workdir)
  before = {p: p.stat().st_mtime_ns for p in place.iterdir()}
  again = train(build(engine), workdir, Machine())
  for key in ("params_sha256", "messages", "test_accuracy"):
    assert again[key] == result[key]
  assert {p: p.stat().st_mtime_ns for p in place.iterdir()} == before


class Slow:
  """A pace of few steps, whatever they take."""

  steps = 3

  def begin(self):
    return self.steps

  def end(self):
    return 1e-3


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, undisturbed):
  """Folders of cells that another process trained, by engine."""
  places, configs = {}, []
  for engine in IN_PROCESS:
    exp, _, _ = undisturbed(engine)
    (cell,) = exp.cells
    places[engine] = tmp_path_factory.mktemp(engine)
    config = cells.single_cell_config(exp.runs[cell.label], cell)
    configs.append((config, places[engine]))
  child = multiprocessing.get_context("spawn").Process(
    target=_train_here, args=(configs, jax.config.jax_num_cpu_devices)
  )
  child.start()
  child.join(300)
  assert child.exitcode == 0
  return places


@pytest.mark.process
@pytest.mark.parametrize("engine", IN_PROCESS)
def test_a_cell_in_another_process_is_the_same_cell(
  engine, elsewhere, undisturbed
):
  exp, _, _ = undisturbed(engine)
  assert_same(engine, elsewhere[engine], exp, undisturbed)


def _train_here(configs, devices):
  # As in this process, so that XLA divides its sums in the same way.
  jax.config.update("jax_num_cpu_devices", devices)
  for config, workdir in configs:
    train(kit.build(config), workdir, Machine())


# What is not finite.


EXPLODING = {"runs": {"run": {"recipe": "asgd", "momentum": 0.9}}}
EXPLODING |= {"learning_rate": 1e30}


@engines
def test_what_is_not_finite_stops_with_one_line_or_is_recorded(
  engine, tmp_path, machine
):
  exp = build(engine, **EXPLODING)
  with pytest.raises(NonFiniteResult) as caught:
    train(exp, tmp_path, machine)
  line, place = str(caught.value), place_of(exp, tmp_path)
  assert line.startswith(f"{place.name}: ")
  assert "\n" not in line
  # A pipeline names the run's own: its rate depends on the schedule.
  assert "--config.learning_rate" in line or (
    "--config.runs.run.learning_rate" in line
  )
  assert folder.finished_result(place) is None
  if engine in LIVE:
    # It keeps its memory, as it may go on with on_nan="record".
    exp.engine_kind(exp.cells[0]).clean(place)
    return
  exp.config["on_nan"] = "record"
  assert train(exp, tmp_path, machine)["diverged"] is True
  assert folder.read_rows(place)[-1]["diverged"] is True
  assert folder.finished_result(place) is not None


# What there is in the end.


ROW = {
  *("cell", "algorithm", "engine", "workers", "seed", "message", "update"),
  *("epoch", "examples", "learning_rate", "train_loss", "test_loss"),
  *("test_accuracy", "diverged"),
}
RESULT = {
  *("cell", "label", "algorithm", "engine", "recipe", "workers", "seed"),
  *("messages", "updates", "evaluations", "examples", "learning_rate"),
  *("train_loss", "test_loss", "test_accuracy", "diverged"),
  *("epoch", "sent_accuracy", "params_sha256", "rate_x_sharpness"),
  *("rate_x_sharpness_limit", "sustained", "wall_seconds"),
}


@engines
def test_rows_result_and_records_have_the_common_columns(engine, undisturbed):
  exp, workdir, result = undisturbed(engine)
  place, (cell,) = place_of(exp, workdir), exp.cells
  rows = folder.read_rows(place)
  assert len(rows) == result["evaluations"] == 3
  assert [row["message"] for row in rows] == sorted(
    {row["message"] for row in rows}
  )
  for row in rows:
    assert row.keys() >= ROW
    assert ("time" in row) != ("seconds" in row)
    assert row["diverged"] is False
    assert row["epoch"] > 0
    assert row["examples"] == 16 * row["message"]
    assert np.isfinite([row["train_loss"], row["test_loss"]]).all()
  assert result.keys() >= RESULT
  assert result["messages"] == exp.plan(cell).messages == 24
  assert result["engine"] == engine
  assert (result["workers"], result["seed"]) == (cell.workers, cell.seed)
  assert result["test_accuracy"] == rows[-1]["test_accuracy"]
  records = cell_files.read_records(place)
  assert len(records["loss"]) == 24
  for name, column in records.items():
    assert column.shape[-1] == 24, name  # maybe for each stage
  assert np.isfinite(records["loss"]).all()
  if engine not in LIVE:
    assert {path.name for path in place.iterdir()} == {"cell.npz"}
  assert folder.finished_result(place).keys() == result.keys()


@engines
def test_its_line_and_its_table_can_be_written(engine, undisturbed):
  exp, workdir, result = undisturbed(engine)
  kind = ENGINES[engine]
  line, *_ = report.result_lines(result, kind.describe)
  assert line.startswith(result["cell"])
  assert "\n" not in line
  rows, text = report.tabulate([result], ENGINES)
  assert len(text.splitlines()) == 3
  storage.write_csv(workdir / "results.csv", rows)
  with (workdir / "results.csv").open() as file:
    (row,) = csv.DictReader(file)
  assert float(row["test_accuracy"]) == result["test_accuracy"]


@pytest.mark.parametrize("engine", [e for e in ENGINES if e not in LIVE])
def test_evaluating_changes_nothing(engine, tmp_path, machine, undisturbed):
  _, _, expected = undisturbed(engine)
  exp = build(engine, evaluations=6, curvature_checks=2)
  result = train(exp, tmp_path, machine)
  assert result["evaluations"] == 6
  assert result["params_sha256"] == expected["params_sha256"]
  assert np.isfinite(result["rate_x_sharpness"])


@engines
def test_a_library_call_needs_no_folder_or_says_so(
  engine, machine, undisturbed
):
  if engine in LIVE:
    pytest.skip("the folder is where its journals are")
  exp, _, _ = undisturbed(engine)
  assert train(exp, None, machine)["messages"] == 24
