"""One step on any mesh, in one process or two: the same losses."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest

from asgd import text
from launch import checkpoints, cli, progress, sync_figures, sync_processes
from launch import sync_experiment as experiment
from launch import train_sync as launcher

ROOT = Path(__file__).parent.parent
DEADLINE = 240  # seconds until a subprocess is taken to hang
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
UPDATES = 4


@pytest.fixture(autouse=True)
def double():
  """Exact enough for equalities; what runs for a moment compiles quickly."""
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.enable_x64(True):
    yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def pydoc():
  return text.load("pydoc")


def config_of(name, arg=None):
  names = {}
  exec((ROOT / "configs" / f"{name}.py").read_text(), names)
  return names["get_config"](arg)


def small():
  """A tiny GPT, of 4 updates."""
  config = config_of("gpt_text", "tiny").to_dict()
  return {**config, "mesh": {}, "zero": 0, "precision": "float64"}


def build(*overrides, config=None, dataset=None):
  pairs = [pair.split("=", 1) for pair in overrides]
  config = experiment.override(config or small(), pairs)
  if dataset is None and config["data"]["name"] == "pydoc":
    dataset = pydoc()
  return experiment.build(config, dataset=dataset)


def train(exp, folder):
  bar = progress.Progress(1, stream=io.StringIO())
  return launcher.train(exp, folder, bar)


def records_of(folder):
  with np.load(folder / "cells" / "s0" / "records.npz") as held:
    return held["loss"], held["norm"]


def result_of(folder):
  return json.loads((folder / "cells" / "s0" / "result.json").read_text())


def params_of(exp, folder):
  """As one who knows of no mesh loads them."""
  like = exp.problem.init(jax.random.key(0))
  content = (folder / "cells" / "s0" / "params.msgpack").read_bytes()
  return flax.serialization.from_bytes(like, content)


def close(found, wanted, tolerance=1e-9):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=tolerance, atol=tolerance
    ),
    *(found, wanted),
  )


# Any mesh.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Flags -> the experiment, its folder and its result; each is made once."""

  @functools.cache
  def make(*flags):
    exp, folder = build(*flags), tmp_path_factory.mktemp("mesh")
    (result,) = train(exp, folder)
    return exp, folder, result

  return make


@pytest.fixture
def replicas(trained):
  return trained("mesh=data:8")


def agree(exp, found_in, wanted_in):
  """Two folders hold the same run, but for round-off."""
  close(records_of(found_in), records_of(wanted_in), 1e-6)  # kept in float32
  close(params_of(exp, found_in), params_of(exp, wanted_in))
  found, wanted = map(result_of, (found_in, wanted_in))
  close(found["test_loss"], wanted["test_loss"])
  assert found["test_accuracy"] == wanted["test_accuracy"]
  assert found["state_bytes"] < wanted["state_bytes"]
  losses = records_of(found_in)[0]
  assert len(losses) == UPDATES and losses[-1] < losses[0]


SPLIT = "mesh=data:2,tensor:2,pipe:2", "zero=3"


def test_another_mesh_has_the_same_losses(replicas, trained):
  exp, place, _ = trained(*SPLIT)
  assert exp.mesh.size == 8
  agree(exp, place, replicas[1])


def test_what_is_left_is_whole(replicas):
  exp, place, result = replicas
  params = params_of(exp, place)
  assert checkpoints.digest(params) == result["params_sha256"]
  assert exp.problem.evaluate(params).loss == result["test_loss"]
  assert result["parameters"] == sum(x.size for x in jax.tree.leaves(params))
  rows = launcher.read_rows(place / "cells" / "s0")
  assert [row["update"] for row in rows] == [2, 4]
  losses, norms = records_of(place)
  assert rows[1]["train_loss"] == pytest.approx(losses[2:].mean())
  assert rows[1]["gradient_norm"] == pytest.approx(norms[2:].mean())
  assert rows[0]["learning_rate"] == pytest.approx(3e-3)


def test_results_are_written_and_drawn(replicas, tmp_path, capsys):
  exp, place, result = replicas
  rows = launcher.read_rows(place / "cells" / "s0")
  sync_figures.write(tmp_path, exp, [result, {**result, "seed": 1}], rows)
  for name in ("figure.png", "figure.svg", "table.txt", "metrics.jsonl"):
    assert (tmp_path / name).stat().st_size > 0, name
  said = capsys.readouterr().out
  assert "data 8, adamw, 4 updates of 16" in said and "mean" in said
  assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
  points = sync_figures.numbers(rows)
  assert [(p["x"], p["mean"]) for p in points[:2]] == [
    (row["update"], row["test_loss"]) for row in rows
  ]


# Stopping and going on.


class Asked:
  received = signal.SIGTERM


def test_a_run_goes_on_to_the_bit(trained, tmp_path):
  exp, place, undisturbed = trained(*SPLIT)
  bar = progress.Progress(1, stream=io.StringIO())
  with pytest.raises(cli.Stopped, match="stopped in s0 at update 1"):
    launcher.train(exp, tmp_path, bar, Asked)
  # And killed, some updates after the checkpoint.
  run = launcher.SyncRun(exp, exp.cells[0], tmp_path / "cells" / "s0")
  assert run.update == 1
  run.advance(2)
  run.close()
  (found,) = train(exp, tmp_path)
  assert found["params_sha256"] == undisturbed["params_sha256"]
  np.testing.assert_array_equal(records_of(tmp_path), records_of(place))
  assert train(exp, tmp_path) == [found]  # it is not trained again


def test_a_loss_that_is_not_finite(replicas, tmp_path):
  exp = replicas[0]
  broken = exp._replace(
    problem=exp.problem._replace(
      init=lambda key: jax.tree.map(lambda x: x * np.nan, exp.problem.init(key))
    )
  )
  with pytest.raises(ValueError, match="s0: the loss of update 0 is nan"):
    train(broken, tmp_path)
  config = {**exp.config, "on_nan": "record"}
  (result,) = train(broken._replace(config=config), tmp_path)
  assert result["diverged"] and result["updates"] == 1
  assert "diverged" in sync_figures.lines(result)[1]


# Several processes.


def start(*arguments, **environment):
  return subprocess.Popen(
    [sys.executable, "-m", "launch.train_sync", *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, **QUICK, **environment},
  )


def test_two_processes_agree_with_one(replicas, tmp_path):
  """With tensors that are split, and positions."""
  exp, place, wanted = replicas
  out = tmp_path / "out"
  process = start(
    *("--config=configs/gpt_text.py:tiny", "--config.precision=float64"),
    *("--config.mesh=data:2,tensor:4", "--config.sequence=True"),
    *("--num_processes=2", f"--out={out}"),
  )
  said, errors = process.communicate(timeout=DEADLINE)
  assert process.returncode == 0, errors
  assert "seed 0" in said and "[Gloo]" not in said
  assert (wanted["processes"], result_of(out)["processes"]) == (1, 2)
  agree(exp, out, place)


@pytest.fixture
def supervise(monkeypatch):
  """Supervises a program instead of this one."""
  held = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }

  def run(*lines):
    program = "import os, signal, sys\nme = sys.argv[1][-1]\n"
    monkeypatch.setattr(
      *(sys, "orig_argv", ["python", "-c", program + "\n".join(lines)])
    )
    sync_processes.supervise(2)

  yield run
  for number, handler in held.items():
    signal.signal(number, handler)


def test_all_end_when_one_dies_and_its_last_line_is_told(supervise, capfd):
  wait = "print(os.getpid(), flush=True); signal.pause()"
  for death, message in (
    (
      "print('error: no data', file=sys.stderr); sys.exit(2)",
      "process 1 of 2 failed with status 2: no data",
    ),
    (
      "os.kill(os.getpid(), signal.SIGKILL)",
      "process 1 of 2 was killed by SIGKILL: it said nothing; .*--resume",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      supervise("if me == '1':", "  " + death, wait)
    out = capfd.readouterr().out
    if out:  # it may have been ended before
      with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)


def test_signals_are_passed_on(supervise, capfd):
  with pytest.raises(SystemExit) as end:
    supervise(
      "def told(*_):",
      "  print('told', me, flush=True)",
      "  sys.exit(143)",
      "signal.signal(signal.SIGTERM, told)",
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGTERM)",
      "signal.pause()",
    )
  assert end.value.code == 143
  assert capfd.readouterr().out == "told 0\n"


def test_no_trace_of_who_is_interrupted_before_it_listens(supervise, capfd):
  with pytest.raises(SystemExit) as end:
    supervise(
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGINT)",
      "signal.pause()",
    )
  assert end.value.code == 130
  assert capfd.readouterr().err == ""


def test_who_does_not_stop_is_killed(supervise, capfd, monkeypatch):
  monkeypatch.setattr(sync_processes, "_SAVING", 0.1)
  with pytest.raises(SystemExit) as end:
    supervise(
      "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGTERM)",
      "signal.pause()",
    )
  assert end.value.code == 143
  assert "did not stop in 0.1 s and was killed" in capfd.readouterr().err


def test_processes_end_when_all_have(supervise, capfd):
  supervise("print('Rank', me)", "print('a word', file=sys.stderr)")
  found = capfd.readouterr()
  assert (found.out, found.err) == ("Rank 0\n", "a word\n")


def test_a_process_ends_with_its_supervisor():
  ours, theirs = os.pipe()
  process = subprocess.Popen(
    [
      *(sys.executable, "-c"),
      "import signal\nfrom launch import sync_processes\n"
      "assert sync_processes._watch_supervisor()\nsignal.pause()\n",
    ],
    cwd=ROOT,
    env={**os.environ, **QUICK, "ASGD_LIFELINE": str(ours)},
    pass_fds=(ours,),
  )
  os.close(ours)
  os.close(theirs)
  assert process.wait(DEADLINE) == -signal.SIGTERM


def test_nobody_comes():
  process = start(
    *("--config=configs/gpt_text.py:tiny", "--config.mesh=data:2"),
    *("--num_processes=2", "--process_id=1", "--coordinator=127.0.0.1:9"),
    "--start_seconds=0.5",
  )
  _, errors = process.communicate(timeout=DEADLINE)
  assert process.returncode == 2
  (line,) = errors.splitlines()
  assert line.startswith("error: process 1 of 2 waited 0.5 s at --coordinator=")


# Configs, and mistakes.


@pytest.mark.parametrize("name", ["gpt_text", "resnet_images"])
def test_the_configs_build_and_give_their_command(name):
  config = config_of(name)
  assert config.is_locked
  source = (ROOT / "configs" / f"{name}.py").read_text()
  assert f"--config=configs/{name}.py" in source
  experiment.check(experiment.resolve(config))
  exp = build(config=config_of(name, "tiny"))
  assert exp.mesh.size == 8
  with pytest.raises(ValueError, match="known: tiny"):
    config_of(name, "tine")


def test_a_mesh_may_be_written_in_many_ways():
  for value in ("data:2,tensor:4", "tensor=4,data=2", {"tensor": 4, "data": 2}):
    found = experiment.resolve({"mesh": value})["mesh"]
    assert list(found.items()) == [("data", 2), ("tensor", 4)]
  assert experiment.resolve({"mesh": "rows:2"})["mesh"] == {
    "data": 1,
    "rows": 2,
  }
  assert build("mesh=data:-1,tensor:2").mesh.shape["data"] == 4
  assert experiment.devices_of(experiment.resolve({})) is None


def test_another_optimizer_drops_the_options_of_the_old():
  found = experiment.override(small(), [("optimizer.name", "lamb")])
  assert found["optimizer"] == {"name": "lamb"}
  found = experiment.override(small(), [("optimizer.b1", "0.8")])
  assert found["optimizer"]["weight_decay"] == 0.1


MISTAKES = {
  "key": (["updatess=3"], "'updatess'; did you mean 'updates'"),
  "data key": (["data.contex=3"], "'data.contex'; did you mean 'context'"),
  "axis": (["mesh=date:8"], "unknown axis 'date' of config.mesh; did you mean"),
  "mesh": (["mesh=8"], "config.mesh must be a dict of axes"),
  "mesh text": (["mesh=data:two"], "as in data:2,tensor:4, not 'data:two'"),
  "twice": (["mesh=data:2,data:4"], "names an axis twice"),
  "size": (["mesh=data:0"], "config.mesh.data must be a whole number from 1"),
  "two left": (["mesh=data:-1,tensor:-1"], "only one axis can be -1"),
  "left": (["mesh=data:-1,tensor:3"], "config.mesh: 8 devices cannot be"),
  "too few": (["mesh=data:16"], r"data 16 needs 16 .* there are 8 \(cpu\)"),
  "devices": (
    ["mesh=data:4", "devices=2"],
    "config.devices 2 are fewer than the 4 of config.mesh data 4",
  ),
  "batch": (
    ["mesh=data:8", "accumulate=4"],
    "config.batch_size 16 cannot be divided into 32 pieces .*multiple of 32",
  ),
  "microbatches": (
    ["mesh=data:8,pipe:1", "microbatches=4"],
    "makes pieces of 2 .*config.microbatches 4 does not.*multiple of 32",
  ),
  "no pipe": (
    ["microbatches=2"],
    "config.microbatches 2 is for the axis 'pipe",
  ),
  "no tensor": (["mesh=data:2", "sequence=True"], "is for the axis 'tensor'"),
  "heads": (
    ["mesh=tensor:2", "model.heads=1"],
    "config.model.heads 1 cannot be divided among config.mesh.tensor 2",
  ),
  "blocks": (
    ["mesh=data:2,pipe:4"],
    "config.mesh .*2 blocks cannot be divided",
  ),
  "rounds": (
    ["mesh=pipe:2", "microbatches=1", "model.depth=4", "rounds=2"],
    "config.mesh .*1 microbatches are fewer than the 2 stages",
  ),
  "axes": (
    ["mesh=data:2,rows:2,tensor:2"],
    "data, and tensor and pipe, or rows",
  ),
  "rows of a text": (["mesh=rows:2"], "a Embed cannot be split by rows"),
  "positions": (
    ["mesh=tensor:8", "sequence=True", "data.context=9"],
    "9 positions cannot be divided among the 8",
  ),
  "zero": (["zero=4"], "config.zero must be 0, 1, 2 or 3"),
  "form": (["form=pmapp"], "config.form: unknown form 'pmapp'; did you mean"),
  "pmap": (
    ["form=pmap", "mesh=tensor:2"],
    "config.form: the form 'pmap' is for",
  ),
  "precision": (["precision=float8"], "config.precision: .*did you mean"),
  "optimizer": (
    ["optimizer=adamm"],
    "config.optimizer.name: .*'adamm'; did you",
  ),
  "option": (["optimizer.beta=3"], "'optimizer.beta' .optimizer 'adamw'"),
  "option's value": (["optimizer.b1=a"], "config.optimizer"),
  "two rates": (["optimizer.learning_rate=3"], "is config.learning_rate"),
  "rate": (["learning_rate=0"], "config.learning_rate must be a number, pos"),
  "decay": (["schedule.decay_updates=1"], "config.schedule: .*the warm-up"),
  "loss scale": (
    ["loss_scale={'start': 3}"],
    "unknown config key 'loss_scale.",
  ),
  "loss scale's": (["loss_scale={'factor': 1}"], "config.loss_scale: factor"),
  "batch of the data": (
    ["data.name=digits", "model.name=mlp", "batch_size=5000"],
    "config.batch_size: ",
  ),
  "model": (["model.name=gpd"], "config.model: .*did you mean 'gpt'"),
  "model and data": (["model.name=mlp"], "'mlp' does not fit .*'pydoc'"),
  "on_nan": (["on_nan=go"], "config.on_nan must be 'stop' or 'record'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_key_value_and_remedy(name):
  overrides, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    build(*overrides)


def test_double_precision_has_to_be_on():
  with (
    jax.enable_x64(False),
    pytest.raises(ValueError, match="jax_enable_x64"),
  ):
    build()


FLAGS = {
  "none": (["--num_processes=0"], "must be 1 or more, not 0"),
  "alone": (["--num_processes=2", "--process_id=0"], "go together"),
  "number": (
    ["--num_processes=2", "--process_id=2", "--coordinator=a:1"],
    "must be from 0 to 1 with --num_processes=2, not 2",
  ),
  "place": (
    ["--num_processes=2", "--process_id=1", "--coordinator=a"],
    "--coordinator must be HOST:PORT, not 'a'",
  ),
  "auto": (["--process_id=1", "--coordinator=auto"], "drop it"),
  "patience": (["--start_seconds=0"], "--start_seconds must be positive"),
}


@pytest.fixture
def flag_values():
  held = cli.flags.FLAGS
  names = ("num_processes", "process_id", "coordinator", "start_seconds")
  before = {name: held[name].default for name in names}
  held.mark_as_parsed()
  yield held
  for name, value in before.items():
    setattr(held, name, value)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_do_not_go_together(name, flag_values):
  given, message = FLAGS[name]
  for flag in given:
    key, value = flag.removeprefix("--").split("=")
    flag_values[key].parse(value)
  with pytest.raises(ValueError, match=message):
    sync_processes.way()


def test_who_supervises(flag_values):
  assert not sync_processes.way().supervises
  flag_values["num_processes"].parse("2")
  assert sync_processes.way().supervises
  flag_values["coordinator"].parse("auto")
  assert sync_processes.way() == sync_processes.Way(2, auto=True)
  with pytest.raises(ValueError, match="the 3 devices .* cannot be divided"):
    sync_processes.devices_of_each(3, 2)
  with pytest.raises(ValueError, match="4,096 for each .* at most 2,048"):
    sync_processes.devices_of_each(8192, 2)
