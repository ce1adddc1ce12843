"""Pipelines by flag: every schedule trains, stops, goes on and is compared."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest

from asgd import data
from launch import checkpoints, cli, outputs, pipeline_figures, progress
from launch import pipeline_experiment as experiment
from launch import train_pipeline as launcher
from pipeline import analyze, generate, schedule, spans

ROOT = Path(__file__).parent.parent
DEADLINE = 240  # seconds until a subprocess is taken to hang
STAGES, MICROBATCHES, UPDATES = 4, 8, 2
NAMES = list(generate.SCHEDULES)
CASES = {
  "stash": {"schedule": "pipedream", "recipe": "gap_aware"},
  "recomputing": {"schedule": "stale", "recompute": True, "momentum": 0.9},
  "predicted": {
    "schedule": "pipedream_2bw",
    "every": 4,
    "predict": True,
    "momentum": 0.9,
  },
  "synchronous": {"schedule": "zb_v", "recipe": "dana_slim"},
  "replicas": {
    "schedule": "pipedream",
    "replicas": (1, 1, 1, 2),
    "recipe": "dana_zero",
  },
}


def rule(device, state):
  """1F1B without a limit that knows of the others: for `custom`."""
  step = state.first("B")
  if step is None and state.held[device] < STAGES - device:
    step = state.first("F")
  return step


def small(**runs):
  return {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": (8, 8, 8)},
    "stages": STAGES,
    "microbatch_size": 4,
    "microbatches": MICROBATCHES,
    "updates": UPDATES,
    "learning_rate": 0.1,
    "evaluations": 2,
    "evaluation_examples": 50,
    "runs": runs or {"x": {"schedule": "gpipe"}},
  }


def build(*overrides, config=None):
  pairs = [pair.split("=", 1) for pair in overrides]
  return experiment.build(experiment.override(config or small(), pairs))


def train(exp, folder):
  bar = progress.Progress(1, stream=io.StringIO())
  return launcher.train(exp, folder, bar)


def params_of(run):
  return jax.device_get(run._executor.params(run.state))


def leaves(params):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


# Every schedule.


@pytest.fixture(scope="module")
def everything():
  """One experiment with all schedules, each chosen by a flag."""
  jax.devices()
  runs = {name: {"schedule": "gpipe"} for name in NAMES}
  config = small(**runs, **CASES)
  flags = [f"runs.{name}.schedule={name}" for name in NAMES]
  flags.append(f"runs.custom.rule={__name__}:rule")
  return build(*flags, config=config)


@pytest.fixture(scope="module")
def run_of(everything, tmp_path_factory):
  """label -> result, parameters and records of a run, which is made once."""
  folder = tmp_path_factory.mktemp("schedules")

  @functools.cache
  def trained(label):
    cell = experiment.Cell(label, 0)
    run = launcher.PipelineRun(everything, cell, folder / label)
    try:
      while not run.finished:
        run.advance()
      return run.result(), leaves(params_of(run)), run.trained()
    finally:
      run.close()

  return trained


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_trains_by_flag(name, everything, run_of):
  plan = everything.plans[name]
  assert plan.table.name == name
  assert plan.table.stages == STAGES
  result, _, found = run_of(name)
  assert result["messages"] == MICROBATCHES * UPDATES
  assert np.isfinite(found.loss).all()
  assert len(found.loss) == MICROBATCHES * UPDATES
  assert found.staleness.shape == (STAGES, result["updates"])
  assert 0 <= result["bubble_measured"] < 1
  assert 0 <= result["bubble_predicted"] < 1
  assert min(result["peak_bytes"]) > 0
  flushes = plan.table.flush
  assert (max(result["staleness"]) == 0) == flushes
  assert result["updates"] == plan.updates
  # The whole model, in order.
  _, first, _ = run_of("gpipe")
  _, others, _ = run_of(name)
  assert [x.shape for x in others] == [x.shape for x in first]
  if flushes:
    for one, other in zip(first, others, strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_staleness_and_versions_are_those_of_the_table(run_of):
  result, _, found = run_of("pipedream")
  assert result["staleness"] == [3, 2, 1, 0]
  assert result["weight_versions"] == [4, 3, 2, 1]
  assert found.gap[0].max() > 0 == found.gap[3].max()
  assert run_of("pipedream_2bw")[0]["weight_versions"] == [2] * 4
  assert run_of("stale")[0]["staleness"] == [6, 4, 2, 0]
  assert run_of("stale")[0]["weight_versions"] == [1] * 4


# What a config means.


def test_all_runs_are_given_the_same_microbatches(everything):
  counts = {plan.microbatches for plan in everything.plans.values()}
  assert counts == {MICROBATCHES * UPDATES}


def test_an_update_of_fewer_microbatches_takes_its_part_of_the_rate():
  exp = build(
    "runs.x.schedule=pipedream",
    "runs.x.every=2",
    "schedule.warmup_updates=1",
    "schedule.decay_updates=1.5",
  )
  plan = exp.plans["x"]
  assert plan.learning_rate == pytest.approx(0.1 * 2 / MICROBATCHES)
  assert plan.updates == 8
  assert float(plan.rate(0)) == pytest.approx(0.1 * plan.learning_rate)
  assert float(plan.rate(4)) == pytest.approx(plan.learning_rate)
  assert float(plan.rate(7)) == pytest.approx(0.1 * plan.learning_rate)
  own = build("runs.x.schedule=pipedream", "runs.x.learning_rate=0.3")
  assert own.plans["x"].rate == 0.3


def test_another_schedule_drops_what_the_old_one_was_given():
  config = small(
    x={
      "schedule": "pipedream_2bw",
      "weights": "2bw",
      "every": 4,
      "momentum": 0.5,
    }
  )
  exp = build("runs.x.schedule=zb_h1", config=config)
  assert exp.config["runs"]["x"] == {"schedule": "zb_h1", "momentum": 0.5}
  assert exp.plans["x"].weights == "latest"


def test_a_label_that_is_given_twice_is_run_once():
  assert len(build("only=x,x").cells) == 1


def test_only_chooses_the_runs_and_their_order():
  config = small(**{n: {"schedule": n} for n in ("gpipe", "stale", "zb_v")})
  exp = build("only=zb_v,gpipe", config=config)
  assert [cell.label for cell in exp.cells] == ["zb_v", "gpipe"]
  assert exp.plans["zb_v"].table.devices == 2


def test_layers_without_weights_go_with_the_next():
  assert build().plans["x"].cuts == (0, 2, 3, 4, 5)
  two = build("stages=2").plans["x"].cuts
  assert two == (0, 2, 5)  # 520 parameters, and 72 + 72 + 90
  assert build("cuts=0,2,3,4,5").plans["x"].cuts == (0, 2, 3, 4, 5)


def test_cuts_by_time_are_measured_once_and_kept(tmp_path):
  exp = build("cuts=time", "stages=2")
  assert exp.plans["x"].cuts[0] == 0 and exp.plans["x"].cuts[-1] == 5
  made = []
  assert launcher._same_cuts(exp, tmp_path, made.append) is exp
  launcher._same_cuts(exp, tmp_path, made.append)
  assert made == [exp.seconds]
  # What has been cut by them can be cut by no others.
  path = tmp_path / "layer_seconds.json"
  for damage in ('{"seconds": [', '{"seconds": [[1, 2]]}', '{"second": 1}'):
    path.write_text(damage)
    with pytest.raises(ValueError, match="what each of 5 layers takes"):
      launcher._same_cuts(exp, tmp_path, made.append)
  path.unlink()
  (tmp_path / "cells").mkdir()
  with pytest.raises(ValueError, match="put it back as it was"):
    launcher._same_cuts(exp, tmp_path, made.append)


def test_a_partitioner_places_the_stages():
  config = small(
    replicas={"schedule": "pipedream", "partition": "pipedream"},
    mixed={"schedule": "ftpipe", "partition": "mixed_pipe", "stages": 2},
    plain={"schedule": "gpipe"},
  )
  config["stages"] = 3
  # Flatten, which goes with the next, and four layers with weights.
  seconds = [[0.0, 0.0], [3.0, 6.0], [1.0, 2.0], [1.0, 1.0], [1.0, 3.0]]
  plans = experiment.build(config, seconds=seconds).plans
  # 18 seconds on three devices: no cut does better than 6.
  assert plans["replicas"].cuts == (0, 5)
  assert plans["replicas"].table.places() == [[0, 1, 2]]
  # 9 + 0 on a device, 3 + 2 + 4 on the other.
  assert plans["mixed"].table.places() == [[0], [1]]
  assert plans["plain"].table.devices == 3
  # Where a kilobyte takes twenty seconds, nobody is to have replicas.
  config["runs"]["replicas"]["bandwidth"] = 50.0
  plan = experiment.build(config, seconds=seconds).plans["replicas"]
  assert plan.cuts[:2] == (0, 2)
  assert plan.table.places() == [[0], [1], [2]]
  seconds = [[0.0, 0.0], [1.0, 3.0], [1.0, 1.0], [0.5, 0.5], [1.0, 2.0]]
  mixed = experiment.build(config, seconds=seconds).plans["mixed"]
  # 4 + 1 and 2 + 3, where no cut of a chain does better than 6 and 4.
  assert mixed.cuts == (0, 2, 3, 4, 5)
  assert mixed.table.places() == [[0], [1], [0], [1]]


def test_a_table_of_a_file_is_obeyed(tmp_path):
  made = generate.dualpipe(2, MICROBATCHES)
  path = tmp_path / "mine.CSV"
  path.write_text(schedule.to_csv(made))
  exp = build(f"runs.x.schedule={path}")
  assert exp.plans["x"].table.tasks == made.tasks
  assert exp.plans["x"].table.devices == 2
  (found,) = train(exp, tmp_path / "out")
  (wanted,) = train(build("runs.x.schedule=gpipe"), tmp_path / "gpipe")
  assert found["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-4)
  stale = generate.pipedream(STAGES, MICROBATCHES * UPDATES - 1)
  for table, overrides, said in (
    (made, ["microbatches=4", "updates=4"], "8 microbatches in an update.*=8"),
    (stale, [], "another must have them all"),
    (made, ["runs.x.stages=3"], "stages 3 are not the 2 of"),
  ):
    path.write_text(schedule.to_csv(table))
    with pytest.raises(ValueError, match=said):
      build(f"runs.x.schedule={path}", *overrides)
  with pytest.raises(ValueError, match="none.txt cannot be read: No such file"):
    build("runs.x.schedule=none.txt")


@pytest.mark.parametrize("name", ["gpipe", "stale"])
def test_what_devices_did_can_be_held_against_the_plan(name, tmp_path):
  exp = build("runs.x.schedule=" + name, "evaluations=4")
  bar = progress.Progress(1, stream=io.StringIO())
  launcher.train(exp, tmp_path, bar, way=launcher.Way(spans=True))
  place = tmp_path / "cells" / "x-s0"
  table = schedule.from_csv((place / "schedule.csv").read_text())
  found = spans.from_json((place / "spans.json").read_text())
  assert table.tasks == exp.plans["x"].table.tasks
  timing = analyze.times(table, spans.costs(table, found))
  compared = spans.compare(table, timing, found)
  assert compared.missing == 0
  # An update for each microbatch and stage: none is missing, none is twice.
  updates = [span for span in found if span.action == "update"]
  assert len(updates) == len(set(updates)) == STAGES * table.microbatches


def test_the_loss_of_a_text_falls(tmp_path):
  config = small(x={"schedule": "pipedream", "momentum": 0.9})
  config["data"] = {"name": "pydoc", "context": 8}
  config["model"] = {"name": "gpt", "depth": 1, "width": 8, "heads": 2}
  exp = build("stages=1", "updates=6", config=config)
  (result,) = train(exp, tmp_path)
  assert result["test_loss"] < np.log(exp.dataset.classes)


def test_seeds_are_runs_of_their_own(tmp_path):
  exp = build("stages=1", "seeds=0,1")
  first, second = train(exp, tmp_path)
  assert first["params_sha256"] != second["params_sha256"]


def images():
  """As CIFAR-10 is, but random."""
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (64, 32, 32, 3), np.uint8)
  labels = rng.integers(0, 10, 64, np.int32)
  return data.Dataset(
    *("cifar10", "drawn here", pixels, labels, pixels[:8], labels[:8], 10),
    *(np.full(3, 128, np.float32), np.full(3, 74, np.float32)),
  )


CONFIGS = ["pipeline_digits", "pipeline_gpt", "pipeline_cifar10"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_build_and_give_their_command(name):
  names = {}
  source = (ROOT / "configs" / f"{name}.py").read_text()
  exec(source, names)
  config = names["get_config"]()
  assert config.is_locked
  assert f"--config=configs/{name}.py" in source
  given = {}
  if config.data.name == "cifar10":
    given = {"dataset": images(), "seconds": [[1.0, 2.0]] * 11}
  exp = experiment.build(config, **given)
  assert list(exp.plans) == list(config.runs)
  assert max(plan.table.devices for plan in exp.plans.values()) == 4


# Outputs.


def test_results_stand_side_by_side(everything, tmp_path, capsys):
  labels = "gpipe", "recomputing"
  cells = tuple(experiment.Cell(label, 0) for label in labels)
  exp = everything._replace(cells=cells)
  results = train(exp, tmp_path)
  rows = [
    row
    for cell in exp.cells
    for row in launcher.read_rows(tmp_path / "cells" / cell.name)
  ]
  pipeline_figures.write(tmp_path, exp, results, rows)
  names = ("figure.png", "figure.svg", "figure.csv", "table.txt", "results.csv")
  for name in (*names, "metrics.jsonl"):
    assert (tmp_path / name).stat().st_size > 0, name
  assert "recomputing" in capsys.readouterr().out
  assert len(list((tmp_path / "tensorboard").rglob("events.out*"))) == 2
  for label, updates in (("gpipe", 2), ("recomputing", 16)):
    cell = tmp_path / "cells" / f"{label}-s0"
    own = [row for row in rows if row["cell"] == f"{label}-s0"]
    assert own[-1]["update"] == updates
    assert own[-1]["examples"] == 64
    assert sorted(row["seconds"] for row in own) == [r["seconds"] for r in own]
    result = json.loads((cell / "result.json").read_text())
    content = flax.serialization.msgpack_restore(
      (cell / "params.msgpack").read_bytes()
    )
    assert checkpoints.digest(content) == result["params_sha256"]
    with np.load(cell / "records.npz") as records:
      assert records["loss"].shape == (16,)
  # A second time, nothing is left to be done.
  assert train(exp, tmp_path) == [
    outputs.read_json(tmp_path / "cells" / cell.name / "result.json")
    for cell in exp.cells
  ]


def test_a_run_that_diverges_is_recorded_or_stops(tmp_path):
  flags = ("learning_rate=1e20", "updates=4", "stages=1")
  exp = build(*flags)
  with pytest.raises(ValueError, match="x-s0: the loss of microbatch .* lower"):
    train(exp, tmp_path / "stop")
  exp = exp._replace(config={**exp.config, "on_nan": "record"})
  (result,) = train(exp, tmp_path / "record")
  assert result["diverged"]
  assert any("diverged" in line for line in pipeline_figures.lines(result))


# Stopping and going on.


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(name, everything, tmp_path):
  exp, cell, ends = everything, experiment.Cell(name, 0), []
  for stops in (False, True):
    folder = tmp_path / str(stops)
    run = launcher.PipelineRun(exp, cell, folder)
    flights = 0
    while not run.finished:
      run._slots = 13
      run.advance()
      if stops and not run.finished:
        state = run.state
        flights += bool(state.kept and state.on_their_way)
        run.save()
        run.close()
        run = launcher.PipelineRun(exp, cell, folder)
    run.finish()
    run.close()
    ends.append((leaves(params_of(run)), run.trained(), run.rows))
    assert flights or not stops or exp.plans[name].table.flush
  for one, other in zip(*(end[0] for end in ends), strict=True):
    np.testing.assert_array_equal(one, other)
  jax.tree.map(np.testing.assert_array_equal, *(end[1] for end in ends))
  same = [[{**r, "seconds": 0} for r in end[2]] for end in ends]
  assert same[0] == same[1]


def test_tables_may_have_more_devices_than_the_machine(
  everything, run_of, tmp_path, monkeypatch
):
  two = jax.local_devices()[:2]
  monkeypatch.setattr(jax, "local_devices", lambda: two)
  run = launcher.PipelineRun(
    everything, experiment.Cell("pipedream", 0), tmp_path
  )
  while not run.finished:
    run.advance()
  run.close()
  _, wanted, _ = run_of("pipedream")
  for one, other in zip(wanted, leaves(params_of(run)), strict=True):
    np.testing.assert_array_equal(one, other)


def test_a_finished_run_without_a_result_is_finished_again(
  everything, tmp_path
):
  exp = everything._replace(cells=(experiment.Cell("gpipe", 0),))
  (first,) = train(exp, tmp_path)
  path = tmp_path / "cells" / "gpipe-s0" / "result.json"
  held = json.loads(path.read_text())
  del held["staleness"]
  path.write_text(json.dumps(held))
  assert launcher.finished_result(path.parent) is None
  path.unlink()
  (again,) = train(exp, tmp_path)
  said = pipeline_figures.lines(again)[0]
  assert "bubble unknown (predicted unknown)" in said
  assert again["params_sha256"] == first["params_sha256"]
  assert again["test_loss"] == first["test_loss"]


def test_a_checkpoint_of_other_stages_is_set_aside(tmp_path, capsys):
  """Its arrays are as many."""
  config = small()
  config["model"]["hidden"] = (8, 8, 8, 8)
  for cuts in ("0,2,3,4,6", "0,3,4,5,6"):
    exp = build(f"cuts={cuts}", config=config)
    run = launcher.PipelineRun(exp, exp.cells[0], tmp_path / "x-s0")
    if cuts == "0,2,3,4,6":
      run.advance()
      run.save()
    assert bool(run.message) == (cuts == "0,2,3,4,6")
    run.close()
  said = capsys.readouterr().err
  assert "[0, 2, 3, 4, 6]], not of ['x-s0', 'gpipe', [0, 3, 4, 5, 6]]" in said


def test_spans_of_a_finished_run_are_missed(everything, tmp_path):
  exp = everything._replace(cells=(experiment.Cell("gpipe", 0),))
  train(exp, tmp_path)
  stream = io.StringIO()
  bar = progress.Progress(1, stream=stream)
  launcher.train(exp, tmp_path, bar, way=launcher.Way(spans=True))
  assert "gpipe-s0 is finished, and no --spans were written" in (
    stream.getvalue()
  )


def test_a_signal_saves_and_stops(everything, run_of, tmp_path):
  exp = everything._replace(cells=(experiment.Cell("pipedream", 0),))
  bar = progress.Progress(1, stream=io.StringIO())
  asked = types.SimpleNamespace(received=signal.SIGTERM)
  with pytest.raises(cli.Stopped, match="--resume goes on") as stop:
    launcher.train(exp, tmp_path, bar, asked)
  assert stop.value.status == 128 + signal.SIGTERM
  (result,) = train(exp, tmp_path)
  assert result["params_sha256"] == run_of("pipedream")[0]["params_sha256"]


def command(*arguments):
  return [sys.executable, "-m", "launch.train_pipeline", *map(str, arguments)]


def start(*arguments):
  return subprocess.Popen(
    command(*arguments),
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_a_killed_run_goes_on_to_the_bit(tmp_path):
  flags = (
    "only=pipedream",
    "seeds=0",
    "stages=2",
    "updates=40",
    "checkpoint_seconds=0",
    "evaluations=20",
    "on_nan=stop",
  )
  out = tmp_path / "out"
  arguments = [
    "--config=configs/pipeline_digits.py",
    *(f"--config.{flag}" for flag in flags),
    f"--out={out}",
  ]
  process = start(*arguments)
  place = out / "cells" / "pipedream-s0"
  deadline = time.monotonic() + DEADLINE
  while not list((place / "checkpoints").glob("[0-9]*[0-9]")):
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert not (place / "result.json").exists()
  process = start(*arguments, "--resume")
  _, errors = process.communicate(timeout=DEADLINE)
  assert process.returncode == 0, errors
  found = json.loads((place / "result.json").read_text())
  names = {}
  exec((ROOT / "configs" / "pipeline_digits.py").read_text(), names)
  exp = build(*flags, config=names["get_config"]())
  (undisturbed,) = train(exp, tmp_path / "undisturbed")
  assert found["params_sha256"] == undisturbed["params_sha256"]
  assert found["test_loss"] == undisturbed["test_loss"]


# Mistakes.


def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path):
  out = tmp_path / "out"
  process = start(
    "--config=configs/pipeline_digits.py",
    "--config.runs.gpipe.schedule=gpip",
    f"--out={out}",
  )
  _, errors = process.communicate(timeout=DEADLINE)
  assert process.returncode == 2
  assert (
    errors.splitlines() == [errors.strip()]
    and "did you mean 'gpipe'?" in errors
  )
  assert not out.exists()


MISTAKES = {
  "schedule": (["runs.x.schedule=gpip"], "did you mean 'gpipe'"),
  "recipe": (["runs.x.recipe=dana_zer"], "did you mean 'dana_zero'"),
  "key": (["updatess=3"], "'updatess'; did you mean 'updates'"),
  "section": (["live.devices=3"], "unknown config key 'live'"),
  "data key": (["data.contex=3"], "'data.contex'; did you mean 'context'"),
  "label": (["runs.y.schedule=gpipe"], "unknown config key 'runs.y'"),
  "run key": (["runs.x.chunk=3"], "'runs.x.chunk'.*known"),
  "option of another": (["runs.x.chunks=3"], "'runs.x.chunks'.*gpipe"),
  "only": (["only=y"], "config.only 'y'"),
  "data's name": (["data.name=1,2"], "config.data.name must be a name, not"),
  "data": (["data.name=pydok"], "config.data.name: .* texts: pydoc, file"),
  "no file": (["data.name=file"], "config.data: .* data_dir"),
  "model": (["model.name=gpd"], "config.model: .*did you mean 'gpt'"),
  "model option": (["model.hiden=3"], "config.model: .*did you mean 'hidden'"),
  "classes": (["model.classes=3"], "config.model.classes .* drop it"),
  "image model on text": (["data.name=pydoc"], "'mlp' does not fit .*'pydoc'"),
  "text model on images": (
    ["model.name=gpt", "stages=2"],
    "'gpt' does not fit .*'digits'",
  ),
  "context": (
    ["data.name=pydoc", "model.name=gpt", "model.context=8"],
    "do not fit into a context of 8",
  ),
  "stages": (["stages=0"], "config.stages must be a whole number from 1"),
  "too many stages": (["stages=7"], "4 layers with weights.*config.stages=4"),
  "odd stages": (
    ["stages=3", "runs.x.schedule=zb_v"],
    "2 stages on each device.*config.runs.x.stages=4",
  ),
  "odd chimera": (
    ["stages=3", "runs.x.schedule=chimera"],
    "config.runs.x: stages must be even",
  ),
  "dualpipe": (
    ["microbatches=4", "runs.x.schedule=dualpipe"],
    "config.runs.x: dualpipe needs 8 microbatches",
  ),
  "devices": (
    ["runs.x.schedule=ftpipe", "runs.x.devices=0,1"],
    "config.runs.x.devices must be a device for each of 4",
  ),
  "partition": (
    ["runs.x.partition=pipedram"],
    "config.runs.x.partition must be one of pipedream, mixed_pipe",
  ),
  "partition of another": (
    ["runs.x.partition=mixed_pipe"],
    "mixed_pipe is for the schedule ftpipe, not gpipe",
  ),
  "partition and devices": (
    ["runs.x.schedule=ftpipe", "runs.x.partition=mixed_pipe"]
    + ["runs.x.devices=0,1"],
    "config.runs.x.devices follows from config.runs.x.partition",
  ),
  "bandwidth": (["runs.x.bandwidth=3"], "is for a partition: drop it"),
  "rule": (["runs.x.schedule=custom"], "config.runs.x.rule must be the place"),
  "weights": (
    ["runs.x.schedule=stale", "runs.x.weights=newest"],
    "config.runs.x: weights must be one of",
  ),
  "weights of a flush": (["runs.x.weights=2bw"], "is for asynchronous"),
  "2bw": (
    ["runs.x.schedule=pipedream", "runs.x.weights=2bw"],
    "config.runs.x: .*needs more microbatches in an update",
  ),
  "predict": (
    ["runs.x.schedule=stale", "runs.x.predict=True"],
    "config.runs.x.weights='stash'",
  ),
  "every": (
    ["runs.x.schedule=pipedream", "runs.x.every=3"],
    "config.runs.x.every 3 does not divide the 16",
  ),
  "recompute": (["runs.x.recompute=1"], "recompute must be True or False"),
  "cuts": (["cuts=0,1,2,3"], "config.cuts: 4 stages are cut at 5 layers"),
  "cuts name": (["cuts=size"], "config.cuts must be 'parameters', 'time'"),
  "cuts without weights": (["cuts=0,1,2,3,5"], "stage 0 .* has no weights"),
  "worker recipe": (["runs.x.recipe=easgd"], "do not fit; use asgd"),
  "rate": (["learning_rate=0"], "config.learning_rate must be a number, pos"),
  "own rate": (["runs.x.learning_rate=a"], "config.runs.x.learning_rate must"),
  "decay": (
    ["schedule.warmup_updates=5", "schedule.decay_updates=2"],
    "config.schedule: .*inside the warm-up",
  ),
  "seeds": (["seeds=0,0"], "config.seeds must be different"),
  "clip": (["clip_norm=-1"], "config.clip_norm must be a number"),
  "batch": (["microbatch_size=5000"], "config.microbatch_size: "),
  "on_nan": (["on_nan=go"], "config.on_nan must be 'stop' or 'record'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_key_value_and_remedy(name):
  overrides, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    build(*overrides)


def test_processes_need_no_more_gpus_than_there_are():
  launcher._check_gpus(0.5, 4, 2.0)
  with pytest.raises(ValueError, match="=1 need 4 GPUs, and Ray has 2: use"):
    launcher._check_gpus(1.0, 4, 2.0)


def test_runs_need_labels_titles_and_schedules():
  for runs, message in (
    ({}, "config.runs names no run"),
    ({"a/b": {"schedule": "gpipe"}}, "a label names a folder"),
    ({"a": {"recipe": "asgd"}}, "config.runs.a must be a dict with a schedule"),
    (
      {n: {"schedule": "gpipe", "title": "t"} for n in "ab"},
      "config.runs.b and .a have the same title",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      experiment.build({**small(), "runs": runs})


def test_a_prediction_is_the_roll_forward_of_momentum():
  """The first stage's weights are 3 updates old: it is sent p - rate v (m +
  m^2 + m^3), and the last stage's what it has."""
  config = small(x={"schedule": "pipedream", "predict": True, "momentum": 0.5})
  made = build(config=config).plans["x"].parts
  for part, factor in ((made[0], 0.5 + 0.25 + 0.125), (made[3], 0.0)):
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), part.params)
    state = part.server.init(params)
    ticket = part.server.send(state, np.int32(0))
    ones = jax.tree.map(np.ones_like, params)
    state, _ = part.server.receive(state, ticket, ones)
    sent = part.server.send(state, np.int32(0)).params
    for leaf in leaves(sent):
      np.testing.assert_allclose(leaf, -0.0125 * (1 + factor), rtol=1e-6)


def test_runs_of_one_algorithm_share_its_servers(everything):
  plans = everything.plans
  one, other = plans["gpipe"].parts, plans["zb_h1"].parts
  assert [a.server for a in one] == [b.server for b in other]
  assert plans["pipedream"].parts[0].server != one[0].server
