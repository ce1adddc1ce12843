"""Pipelines as an engine: every schedule trains, stops and goes on."""

import collections
import functools
import json
import signal
import types
from pathlib import Path

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
  train_pipelines,
)

from asgd.experiment import cell_files, checkpoint, folder, signals, storage
from asgd.experiment.machine import Machine
from pipeline import analyze, engine, schedules, spans
from pipeline import table as table_lib

pytestmark = [
  pytest.mark.slow,
]

ROOT = Path(__file__).parents[2]
NAMES = list(schedules.SCHEDULES)


def rule(device, state):
  """1F1B without a limit that knows of the others: for `custom`."""
  step = state.first("B")
  if step is None and state.in_flight[device] < STAGES - device:
    step = state.first("F")
  return step


# Every schedule.


@pytest.fixture(scope="module")
def all_schedules():
  """One experiment with all schedules, each chosen by an override."""
  runs = {name: {"schedule": "gpipe"} for name in NAMES}
  flags = {f"runs.{name}.schedule": name for name in NAMES}
  flags["runs.custom.rule"] = f"{__name__}:rule"
  return build_pipelines(flags, config=small_config(**runs, **CASES))


Trained = collections.namedtuple("Trained", "columns, params, records")


@pytest.fixture(scope="module")
def run_of(all_schedules):
  """label -> columns, parameters and records of a run, made once each."""

  @functools.cache
  def trained(label):
    training = start_engine(all_schedules, label, machine=Machine())
    while training.done < training.total:
      training.advance(training.total)
    params = host_leaves(training.snapshot().params)
    return Trained(training.columns(), params, training.records())

  return trained


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_trains_by_name(name, all_schedules, run_of):
  plan = plan_of(all_schedules, name)
  assert plan.table.name == name
  assert plan.table.stages == STAGES
  columns, params, records = run_of(name)
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
  first = run_of("gpipe").params
  assert [x.shape for x in params] == [x.shape for x in first]
  if flushes:
    for one, other in zip(first, params, strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_staleness_and_versions_are_those_of_the_table(run_of):
  columns, _, records = run_of("pipedream")
  assert columns["stage_staleness"] == [3, 2, 1, 0]
  assert columns["weight_versions"] == [4, 3, 2, 1]
  assert records.gap[0].max() > 0 == records.gap[3].max()
  assert run_of("pipedream_2bw").columns["weight_versions"] == [2] * 4
  assert run_of("stale").columns["stage_staleness"] == [6, 4, 2, 0]
  assert run_of("stale").columns["weight_versions"] == [1] * 4


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


@pytest.mark.parametrize("name", ["gpipe", "stale"])
def test_what_devices_did_can_be_held_against_the_plan(name, tmp_path):
  exp = build_pipelines({"runs.x.schedule": name, "evaluations": 4})
  train_pipelines(exp, tmp_path, machine=Machine(spans=True))
  place = tmp_path / "cells" / "x-n1-s0"
  table = table_lib.from_csv((place / "schedule.csv").read_text())
  tasks = spans.from_json((place / "spans.json").read_text())
  assert table.tasks == plan_of(exp).table.tasks
  assert {span[:4] for span in tasks} >= {task[1:] for task in table.tasks}
  cost = analyze.measured_costs(table, tasks)
  assert analyze.analyze(table, cost).makespan > 0
  # An update for each microbatch and stage: none is missing, none is twice.
  updates = [span for span in tasks if span.action == "update"]
  assert len(updates) == len(set(updates)) == STAGES * table.microbatches


def test_the_loss_of_a_text_falls(tmp_path):
  config = small_config(x={"schedule": "pipedream", "momentum": 0.9})
  config["data"] = {"name": "pydoc", "context": 8}
  config["model"] = {"name": "gpt", "depth": 1, "width": 8, "heads": 2}
  exp = build_pipelines({"pipeline.stages": 1, "examples": 192}, config=config)
  (result,) = train_pipelines(exp, tmp_path)
  assert result["test_loss"] < np.log(exp.dataset.classes)


def test_seeds_are_runs_of_their_own(tmp_path):
  exp = build_pipelines({"pipeline.stages": 1, "seeds": (0, 1)})
  first, second = train_pipelines(exp, tmp_path)
  assert first["params_sha256"] != second["params_sha256"]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_norm_is_that_of_all_stages(schedule):
  """A synchronous schedule clips as if the model were in one piece."""
  config = small_config(x={"schedule": schedule})
  ends = []
  for stages in (1, 4):
    flags = {"pipeline.stages": stages, "clip_norm": 0.3}
    exp = build_pipelines(flags, config=config)
    assert plan_of(exp).together
    training = start_engine(exp, "x", machine=Machine())
    while training.done < training.total:
      training.advance(training.total)
    ends.append(training)
  one, four = (host_leaves(training.snapshot().params) for training in ends)
  for whole, part in zip(one, four, strict=True):
    np.testing.assert_allclose(part, whole, rtol=0, atol=2e-6)
  # An update of all stages together is as long as the clipped gradient is.
  plan, norms = plan_of(exp), ends[1].records().update_norm
  counts = [len(x.ravel()) for x in one]
  first = float(plan.learning_rate) * 0.3
  sizes = [
    sum(x.size for x in jax.tree.leaves(part.params)) for part in plan.parts
  ]
  assert sum(sizes) == sum(counts)
  length = np.sqrt(np.sum(np.square(norms[:, 0]) * np.array(sizes)))
  np.testing.assert_allclose(length, first, rtol=1e-4)


# Outputs.


def test_files_of_a_cell_are_what_was_trained(all_schedules, tmp_path):
  labels = "gpipe", "recomputing"
  results = train_pipelines(all_schedules, tmp_path, labels)
  for result, updates in zip(results, (2, 16), strict=True):
    cell = tmp_path / "cells" / result["cell"]
    rows = folder.read_rows(cell)
    assert rows[-1]["update"] == updates
    assert rows[-1]["examples"] == 64
    seconds = [row["seconds"] for row in rows]
    assert sorted(seconds) == seconds
    written = folder.finished_result(cell)
    content = flax.serialization.msgpack_restore(
      cell_files.read_file(cell, "params.msgpack")
    )
    assert storage.digest(content) == written["params_sha256"]
    assert written == json.loads(storage.to_json(result))
    assert cell_files.read_records(cell)["loss"].shape == (16,)
    assert "bubble" in engine.PIPELINE.describe(result)


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
    names, _ = checkpoint._names(jax.device_get(tree))
    arrays = {name: np.array(leaf) for name, leaf in names.items()}
    self.saved = checkpoint.Restored(arrays, json.loads(json.dumps(notes)))

  def restore(self, rebuild):
    return rebuild(self.saved)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(
  name, all_schedules, run_of
):
  training, flights = start_engine(all_schedules, name, machine=Machine()), 0
  # Calls of 13 slots, so that they end in the middle of what is on its way.
  while training.done < training.total:
    training._pace.steps = 13
    training.advance(training.total)
    if training.done < training.total:
      state = training._state
      flights += {"kept", "x"} <= {kind for kind, *_ in state.entries}
      store = Store(training)
      training.close()
      training = start_engine(
        all_schedules, name, machine=Machine(), restore=store.restore
      )
  assert flights or plan_of(all_schedules, name).table.flush
  expected = run_of(name)
  same(host_leaves(training.snapshot().params), expected.params)
  same(training.records(), expected.records)


def test_tables_may_have_more_devices_than_the_machine(
  all_schedules, run_of, monkeypatch
):
  two = jax.local_devices()[:2]
  monkeypatch.setattr(jax, "local_devices", lambda: two)
  training = start_engine(all_schedules, "pipedream", machine=Machine())
  while training.done < training.total:
    training.advance(training.total)
  same(host_leaves(training.snapshot().params), run_of("pipedream").params)


def test_a_finished_run_without_a_result_is_finished_again(
  all_schedules, tmp_path
):
  (first,) = train_pipelines(all_schedules, tmp_path, ["gpipe"])
  path = tmp_path / "cells" / "gpipe-n1-s0" / "cell.npz"
  path.unlink()
  assert folder.finished_result(path.parent) is None
  (again,) = train_pipelines(all_schedules, tmp_path, ["gpipe"])
  assert again["params_sha256"] == first["params_sha256"]
  assert again["test_loss"] == first["test_loss"]


def test_a_checkpoint_of_other_stages_is_set_aside(tmp_path, capsys):
  """Its arrays are as many."""
  config = small_config()
  config["model"]["hidden"] = (8, 8, 8, 8)
  for cuts in ([0, 2, 3, 4, 6], [0, 3, 4, 5, 6]):
    exp = build_pipelines({"pipeline.cuts": cuts}, config=config)
    store = checkpoint.Checkpoints(tmp_path / "checkpoints")
    training = start_engine(exp, "x", machine=Machine(), restore=store.restore)
    if cuts == [0, 2, 3, 4, 6]:
      training.advance(training.total)
      assert training.done
      store.save(*training.save())
    else:
      assert not training.done
    store.close()
  said = capsys.readouterr().err
  assert "[0, 2, 3, 4, 6]], not of ['x-n1-s0', 'gpipe', [0, 3, 4" in said


def test_a_signal_saves_and_stops(all_schedules, run_of, tmp_path):
  asked = types.SimpleNamespace(received=signal.SIGTERM)
  with pytest.raises(signals.Stopped, match="same command again") as stop:
    train_pipelines(all_schedules, tmp_path, ["pipedream"], signals=asked)
  assert stop.value.signal_number == signal.SIGTERM
  (result,) = train_pipelines(all_schedules, tmp_path, ["pipedream"])
  params = flax.serialization.msgpack_restore(
    cell_files.read_file(tmp_path / "cells" / result["cell"], "params.msgpack")
  )
  same(host_leaves(params), run_of("pipedream").params)


def test_processes_need_no_more_gpus_than_there_are():
  engine._check_gpus(0.5, 4, 2.0)
  with pytest.raises(ValueError, match="=1 need 4 GPUs, and Ray has 2: use"):
    engine._check_gpus(1.0, 4, 2.0)


@pytest.mark.process
def test_a_killed_command_goes_on_to_the_bit(
  tmp_path, commands_as_here, no_pictures
):
  flags = {
    "only": "pipedream",
    "seeds": 0,
    "pipeline.stages": 2,
    "examples": 1536,
    "checkpoint_seconds": 0,
    "evaluations": 12,
    "on_nan": "stop",
  }
  workdir = tmp_path / "out"
  arguments = [
    "--config=configs/pipeline_digits.py",
    *(f"--config.{key}={value}" for key, value in flags.items()),
    f"--workdir={workdir}",
  ]
  place = workdir / "cells" / "pipedream-n1-s0"
  saved = functools.partial(place.glob, "checkpoints/[0-9]*[0-9]")
  process = kit.start("train", *arguments, until=lambda: list(saved()))
  process.kill()
  process.communicate()
  assert not (place / "cell.npz").exists()
  kit.call("train", *arguments, status=0)
  result = folder.finished_result(place)
  names = {}
  exec((ROOT / "configs" / "pipeline_digits.py").read_text(), names)
  exp = build_pipelines(
    {**flags, "checkpoint_seconds": 30}, names["get_config"]()
  )
  (undisturbed,) = train_pipelines(exp, tmp_path / "undisturbed")
  assert result["params_sha256"] == undisturbed["params_sha256"]
  assert result["test_loss"] == undisturbed["test_loss"]


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
