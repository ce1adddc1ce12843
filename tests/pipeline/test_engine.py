"""Pipelines as an engine: every schedule trains, stops and goes on."""

import functools
import json
import shutil
import signal
import types

import flax.serialization
import jax
import kit
import numpy as np
import pytest
from kit import same
from pipeline_experiments import (
  CASES,
  MICROBATCHES,
  STAGES,
  UPDATES,
  build_pipelines,
  host_leaves,
  plan_of,
  small_config,
  start_engine,
  to_the_end,
  train_pipelines,
)

from asgd.experiment import cell_files, checkpoint, folder, signals, storage
from asgd.experiment.machine import Machine
from asgd.pipeline import analyze, engine, schedules, spans
from asgd.pipeline import table as table_lib

pytestmark = pytest.mark.slow

NAMES = list(schedules.SCHEDULES)


def rule(device, state):
  """1F1B without a limit that knows of the others: for `custom`."""
  step = state.first("B")
  if step is None and state.in_flight[device] < STAGES - device:
    step = state.first("F")
  return step


# Every schedule.


@pytest.fixture(scope="module", autouse=True)
def two_devices():
  """Tables share two devices, for which a program is compiled; what a stage
  makes for the next one has to be moved."""
  two = jax.local_devices()[:2]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "local_devices", lambda: two)
    yield


@pytest.fixture(scope="module")
def all_schedules():
  """One experiment with all schedules, each chosen by an override."""
  runs = {name: {"schedule": "gpipe"} for name in NAMES}
  flags = {f"runs.{name}.schedule": name for name in NAMES}
  flags["runs.custom.rule"] = f"{__name__}:rule"
  return build_pipelines(flags, config=small_config(**runs, **CASES))


@pytest.fixture(scope="module")
def run_of(all_schedules):
  """label -> columns, parameters and records of a run, made once each."""

  @functools.cache
  def trained(label):
    training = to_the_end(all_schedules, label)
    return types.SimpleNamespace(
      columns=training.columns(),
      params=params_of(training),
      records=training.records(),
    )

  return trained


def params_of(training):
  """Returns the arrays of an engine's parameters, on the host."""
  return host_leaves(training.snapshot().params)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_trains_by_name(name, all_schedules, run_of):
  plan = plan_of(all_schedules, name)
  assert plan.table.name == name
  assert plan.table.stages == STAGES
  columns, records = run_of(name).columns, run_of(name).records
  assert columns["messages"] == MICROBATCHES * UPDATES
  assert np.isfinite(records.loss).all()
  assert len(records.loss) == MICROBATCHES * UPDATES
  assert records.staleness.shape == (STAGES, columns["updates"])
  assert 0 <= columns["bubble_measured"] < 1
  assert 0 <= columns["bubble_predicted"] < 1
  assert min(columns["stage_peak_bytes"]) > 0
  assert columns["peak_bytes"] == max(columns["stage_peak_bytes"])
  flushes = plan.table.flush
  assert (columns["staleness_max"] == 0) == flushes
  assert columns["updates"] == plan.updates
  # The whole model, in order.
  first, params = run_of("gpipe").params, run_of(name).params
  assert [x.shape for x in params] == [x.shape for x in first]
  if flushes:
    for one, other in zip(first, params, strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_staleness_and_versions_are_those_of_the_table(run_of):
  dream, stale = run_of("pipedream"), run_of("stale").columns
  assert dream.columns["stage_staleness"] == [3, 2, 1, 0]
  assert dream.columns["weight_versions"] == [4, 3, 2, 1]
  assert dream.records.gap[0].max() > 0 == dream.records.gap[3].max()
  assert run_of("pipedream_2bw").columns["weight_versions"] == [2] * 4
  assert stale["stage_staleness"] == [6, 4, 2, 0]
  assert stale["weight_versions"] == [1] * 4


def test_what_a_run_stashes_stands_in_its_row(run_of):
  dream, ftpipe = run_of("pipedream").columns, run_of("ftpipe").columns
  assert (dream["weights"], ftpipe["weights"]) == ("stash", "latest")
  assert ftpipe["weight_versions"] == [1] * 4
  assert dream["recompute"] == [0] * 4
  assert ftpipe["recompute"] == [1, 1, 1, 0]
  assert run_of("recomputing").columns["recompute"] == [1] * 4
  # Inputs in the place of activations, but not at the last stage.
  kept = zip(ftpipe["stage_peak_bytes"], dream["stage_peak_bytes"], strict=True)
  assert [mine < other for mine, other in kept] == [True] * 3 + [False]


def test_all_runs_are_given_the_same_microbatches(all_schedules):
  plans = [all_schedules.plan(cell) for cell in all_schedules.cells]
  assert {plan.messages for plan in plans} == {MICROBATCHES * UPDATES}
  batches = [plan.problem.batches(0, 1)(0, 11) for plan in plans]
  for batch in batches[1:]:
    same(batch, batches[0])


def test_seeds_are_runs_of_their_own(all_schedules):
  first, second = (
    params_of(start_engine(all_schedules, "gpipe", seed=seed))
    for seed in (0, 1)
  )
  assert (first[1] != second[1]).all()  # of the first kernel


def test_a_norm_is_that_of_all_stages():
  """A synchronous schedule clips as if the model were in one piece."""
  one = {"schedule": "gpipe", "stages": 1}
  others = {name: {"schedule": name} for name in ("gpipe", "one_f_one_b")}
  config = small_config(one=one, **others) | {"clip_norm": 0.3}
  exp = build_pipelines(config=config)
  whole = params_of(to_the_end(exp, "one"))
  counts = [x.size for x in whole]
  for name in others:
    plan, training = plan_of(exp, name), to_the_end(exp, name)
    assert plan.together
    for theirs, mine in zip(whole, params_of(training), strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    # An update of all stages together is as long as the clipped gradient is.
    norms = training.records().update_norm
    sizes = [
      sum(x.size for x in jax.tree.leaves(part.params)) for part in plan.parts
    ]
    assert sum(sizes) == sum(counts)
    length = np.sqrt(np.sum(np.square(norms[:, 0]) * np.array(sizes)))
    first = float(plan.learning_rate) * 0.3
    np.testing.assert_allclose(length, first, rtol=1e-4)


# Outputs.


def written(folder, result):
  """Returns the parameters that a finished cell has in its files."""
  cell = folder / "cells" / result["cell"]
  content = cell_files.read_file(cell, "params.msgpack")
  return flax.serialization.msgpack_restore(content)


@pytest.fixture(scope="module")
def finished(all_schedules, tmp_path_factory):
  """A folder of two cells, and their results by schedule."""
  workdir, labels = tmp_path_factory.mktemp("finished"), ("gpipe", "stale")
  machine = Machine(spans=True)
  results = train_pipelines(all_schedules, workdir, labels, machine=machine)
  return workdir, dict(zip(labels, results, strict=True))


@pytest.mark.parametrize("name, updates", [("gpipe", 2), ("stale", 16)])
def test_files_of_a_cell_are_what_was_trained(name, updates, finished):
  workdir, results = finished
  result = results[name]
  cell = workdir / "cells" / result["cell"]
  rows = folder.read_rows(cell)
  assert (rows[-1]["update"], rows[-1]["examples"]) == (updates, 64)
  seconds = [row["seconds"] for row in rows]
  assert sorted(seconds) == seconds
  read = folder.finished_result(cell)
  assert read == json.loads(storage.to_json(result))
  assert storage.digest(written(workdir, result)) == read["params_sha256"]
  assert cell_files.read_records(cell)["loss"].shape == (16,)
  assert "bubble" in engine.PIPELINE.describe(result)


@pytest.mark.parametrize("name", ["gpipe", "stale"])
def test_what_devices_did_can_be_held_against_the_plan(
  name, all_schedules, finished
):
  cell = finished[0] / "cells" / f"{name}-n1-s0"
  table = table_lib.from_csv((cell / "schedule.csv").read_text())
  tasks = spans.from_json((cell / "spans.json").read_text())
  assert table.tasks == plan_of(all_schedules, name).table.tasks
  assert {span[:4] for span in tasks} >= {task[1:] for task in table.tasks}
  cost = analyze.measured_costs(table, tasks)
  assert analyze.analyze(table, cost).makespan > 0
  # An update for each microbatch and stage: none is missing, none is twice.
  updates = [span for span in tasks if span.action == "update"]
  assert len(updates) == len(set(updates)) == STAGES * table.microbatches


def test_a_run_that_diverges_is_recorded_or_stops(tmp_path):
  flags = {"learning_rate": 1e20, "examples": 128, "pipeline.stages": 1}
  exp = build_pipelines(flags)
  with pytest.raises(ValueError, match="the loss of microbatch .* lower"):
    train_pipelines(exp, tmp_path / "stop")
  exp = build_pipelines({**flags, "on_nan": "record"})
  (result,) = train_pipelines(exp, tmp_path / "record")
  assert result["diverged"]


# Stopping and going on.


class Store:
  """What `Context.restore` and `Engine.save` share, without files."""

  def __init__(self, training):
    _, tree, notes = training.save()
    names, _ = checkpoint._leaves_by_name(jax.device_get(tree))
    arrays = {name: np.array(leaf) for name, leaf in names.items()}
    self.saved = checkpoint.Restored(arrays, json.loads(json.dumps(notes)))

  def restore(self, rebuild):
    return rebuild(self.saved)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(
  name, all_schedules, run_of
):
  training, flights = start_engine(all_schedules, name), 0
  # Calls of 13 slots, so that they end in the middle of what is on its way.
  while training.done < training.total:
    training._pace.steps = 13
    training.advance(training.total)
    if training.done < training.total:
      state = training._state
      flights += {"kept", "x"} <= {kind for kind, *_ in state.entries}
      store = Store(training)
      training.close()
      training = start_engine(all_schedules, name, restore=store.restore)
  assert flights or plan_of(all_schedules, name).table.flush
  expected = run_of(name)
  same(params_of(training), expected.params)
  same(training.records(), expected.records)


def test_tables_may_have_more_devices_than_the_machine(
  all_schedules, run_of, monkeypatch
):
  monkeypatch.setattr(jax, "local_devices", jax.devices)
  training = to_the_end(all_schedules, "pipedream")
  assert len(set(training._executor.devices.values())) == STAGES
  same(params_of(training), run_of("pipedream").params)


def test_a_finished_run_without_a_result_is_finished_again(
  all_schedules, finished, tmp_path
):
  before, results = finished
  workdir = shutil.copytree(before, tmp_path / "out")
  path = workdir / "cells" / "gpipe-n1-s0" / "cell.npz"
  path.unlink()
  assert folder.finished_result(path.parent) is None
  (again,) = train_pipelines(all_schedules, workdir, ["gpipe"])
  for key in ("params_sha256", "test_loss"):
    assert again[key] == results["gpipe"][key]


def test_a_checkpoint_of_other_stages_is_set_aside(tmp_path, capsys):
  """Its arrays are as many."""
  first, other = [0, 2, 5], [0, 3, 5]
  for cuts in (first, other):
    given = {"pipeline.stages": 2, "pipeline.cuts": cuts}
    store = checkpoint.Checkpoints(tmp_path / "checkpoints")
    training = start_engine(build_pipelines(given), "x", restore=store.restore)
    assert not training.done
    if cuts is first:
      training.advance(training.total)
      store.save(*training.save())
    store.close()
  said = capsys.readouterr().err
  assert "[0, 2, 5]], not of ['x-n1-s0', 'gpipe', [0, 3, 5" in said


def test_a_signal_saves_and_stops(all_schedules, run_of, tmp_path):
  asked = types.SimpleNamespace(received=signal.SIGTERM)
  with pytest.raises(signals.Stopped, match="same command again") as stop:
    train_pipelines(all_schedules, tmp_path, ["pipedream"], signals=asked)
  assert stop.value.signal_number == signal.SIGTERM
  (result,) = train_pipelines(all_schedules, tmp_path, ["pipedream"])
  same(host_leaves(written(tmp_path, result)), run_of("pipedream").params)


def test_processes_need_no_more_gpus_than_there_are():
  engine._check_gpus(0.5, 4, 2.0)
  with pytest.raises(ValueError, match="=1 need 4 GPUs, and Ray has 2: use"):
    engine._check_gpus(1.0, 4, 2.0)


class Dies:
  """A bar that ends all when it has been told of some updates."""

  def __init__(self, updates):
    self._left = updates

  def skip(self, messages):
    """Counts nothing."""

  def update(self, cell, progress):
    """Ends all, once it is time."""
    self._left -= 1
    if not self._left:
      raise MemoryError("killed")


def test_what_ends_between_checkpoints_goes_on_to_the_bit(run_of, tmp_path):
  """That a command may be killed at any time is in launch/test_train."""
  config = small_config(stash=CASES["stash"]) | {"checkpoint_seconds": 0}
  exp = build_pipelines(config=config)
  for plan in map(exp.plan, exp.cells):
    assert plan.updates > 4
  cell = tmp_path / "cells" / "stash-n1-s0"
  with pytest.raises(MemoryError, match="killed"):
    train_pipelines(exp, tmp_path, bar=Dies(3))
  assert list(cell.glob("checkpoints/[0-9]*[0-9]"))
  assert not (cell / "cell.npz").exists()
  (result,) = train_pipelines(exp, tmp_path)
  same(host_leaves(written(tmp_path, result)), run_of("stash").params)


def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path):
  workdir = tmp_path / "out"
  result = kit.call(
    "train",
    "--config=configs/pipeline_digits.py",
    "--config.runs.gpipe.schedule=gpip",
    f"--workdir={workdir}",
  )
  kit.assert_one_line(result, "did you mean 'gpipe'?")
  assert not workdir.exists()
