"""One step on any mesh, in one process or two: the same losses."""

import functools
import json
import signal
import warnings

import flax.serialization
import jax
import kit
import numpy as np
import pytest
from kit import close

from asgd import compression, experiment
from asgd.data import text
from asgd.experiment import (
  cell_files,
  cells,
  folder,
  loop,
  schema,
  signals,
  storage,
)
from asgd.experiment import overrides as overrides_lib
from asgd.experiment.engines import Context, mesh, mesh_plan
from asgd.experiment.progress import Silent

pytestmark = pytest.mark.usefixtures("float64")  # exact enough for equalities

ENGINES = experiment.ENGINES
CELL = "gpt-n1-s0"
UPDATES = 4


@functools.cache
def pydoc():
  return text.load("pydoc")


def small():
  """A tiny GPT, of 4 updates."""
  config = kit.config_of("mesh_gpt", "tiny").to_dict()
  section = {**config["mesh"], "axes": {}, "zero": 0, "precision": "float64"}
  return {**config, "mesh": section}


def build(overrides=(), config=None):
  config = overrides_lib.override(config or small(), dict(overrides), ENGINES)
  dataset = None
  if config.get("data", {}).get("name") == "pydoc":
    dataset = pydoc()
  return experiment.build(config, engines=ENGINES, dataset=dataset)


def train(exp, place, **options):
  """Returns the result of each cell."""
  return [
    loop.train(exp, cell, place, bar=Silent(), **options) for cell in exp.cells
  ]


def records_of(place):
  columns = cell_files.read_records(place / "cells" / CELL)
  return columns["loss"], columns["norm"]


def result_of(place):
  return folder.finished_result(place / "cells" / CELL)


def problem_of(exp):
  return exp.plan(exp.cells[0]).problem


def params_of(exp, place):
  """Returns the parameters, read without knowing the mesh."""
  like = problem_of(exp).init(jax.random.key(0))
  content = cell_files.read_file(place / "cells" / CELL, "params.msgpack")
  return flax.serialization.from_bytes(like, content)


def test_skipped_updates_have_no_norm_and_are_no_updates():
  scaled = {"mesh.precision": "float16", "mesh.loss_scale.initial": 2.0**17}
  exp = build([*scaled.items(), ("mesh.axes", "data:2"), ("evaluations", 1)])
  result, _, records, _, (row,) = kit.train(exp)
  assert 0 < result["skipped"] == (~records.finite).sum() < UPDATES
  assert result["updates"] == row["update"] == UPDATES - result["skipped"]
  assert row["gradient_norm"] == records.norm[records.finite].mean()


# Any mesh.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Overrides -> the experiment, its folder and its result; made once each."""

  @functools.cache
  def make(*pairs):
    exp, place = build(pairs), tmp_path_factory.mktemp("mesh")
    (result,) = train(exp, place)
    return exp, place, result

  return make


SPLIT = ("mesh.axes", "data:2,tensor:2,pipe:2"), ("mesh.zero", 3)


@pytest.fixture
def replicas(trained):
  return trained(("mesh.axes", "data:8"))


def agree(exp, actual_in, expected_in):
  """Asserts that two folders hold the same run, but for round-off."""
  # Records are kept in float32.
  close(records_of(actual_in), records_of(expected_in), rtol=1e-6, atol=1e-6)
  actual, expected = (params_of(exp, p) for p in (actual_in, expected_in))
  close(actual, expected, rtol=1e-9, atol=1e-9)
  actual, expected = map(result_of, (actual_in, expected_in))
  assert actual["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-9)
  assert actual["test_accuracy"] == expected["test_accuracy"]
  assert actual["state_bytes"] < expected["state_bytes"]
  losses = records_of(actual_in)[0]
  assert len(losses) == UPDATES and losses[-1] < losses[0]


def test_another_mesh_has_the_same_losses(replicas, trained):
  exp, place, _ = trained(*SPLIT)
  assert exp.plan(exp.cells[0]).mesh.size == 8
  agree(exp, place, replicas[1])


def test_what_is_left_is_whole(replicas):
  exp, place, result = replicas
  params = params_of(exp, place)
  assert storage.digest(params) == result["params_sha256"]
  assert problem_of(exp).evaluate(params).loss == result["test_loss"]
  assert result["parameters"] == sum(x.size for x in jax.tree.leaves(params))
  assert "data 8" in mesh.MESH.describe(result)
  rows = folder.read_rows(place / "cells" / CELL)
  assert [row["update"] for row in rows] == [2, 4]
  losses, norms = records_of(place)
  assert rows[1]["train_loss"] == pytest.approx(losses[2:].mean())
  assert rows[1]["gradient_norm"] == pytest.approx(norms[2:].mean())
  assert rows[0]["learning_rate"] == pytest.approx(3e-3)


# Stopping and resuming.


# Compressed from the second step on.
ONEBIT = {"name": "onebit_adam", "warm_up": 1}
POWERSGD = {"name": "powersgd", "rank": 1, "start": 1, "minimum_rate": 2.0}


LINEAR = {"data.name": "digits", "model": {"name": "mlp", "hidden": ()}}


class Asked:
  received = signal.SIGTERM


def test_a_run_goes_on_to_the_bit(trained, tmp_path):
  exp, place, undisturbed = trained(*SPLIT)
  with pytest.raises(signals.Stopped, match=f"stopped in {CELL} at message 1"):
    train(exp, tmp_path, signals=Asked)
  (result,) = train(exp, tmp_path)
  assert result["params_sha256"] == undisturbed["params_sha256"]
  np.testing.assert_array_equal(records_of(tmp_path), records_of(place))
  whole = folder.finished_result(tmp_path / "cells" / CELL)
  assert whole == json.loads(storage.to_json(result))


REDUCERS = {
  "1 bit": ONEBIT,
  "rank": POWERSGD,
  "threshold": {"name": "threshold", "tau": 1e-3},
}


@pytest.mark.parametrize("reducer", REDUCERS)
def test_deepspeed_resets_residuals_of_a_checkpoint_and_this_keeps_them(
  reducer, tmp_path
):
  """A run that is stopped after each step is that which is not."""
  flags = {
    **LINEAR,
    "optimizer": None,
    "batch_size": 8,
    "examples": 40,
    "evaluations": 1,
    "mesh.axes": "data:2",
    "compress": REDUCERS[reducer],
  }
  exp = build(flags)
  (undisturbed,) = train(exp, tmp_path / "undisturbed")
  assert undisturbed["reducer"] == REDUCERS[reducer]["name"]
  for message in range(1, 5):
    with pytest.raises(signals.Stopped, match=f"at message {message}"):
      train(exp, tmp_path / "stopped", signals=Asked)
  (result,) = train(exp, tmp_path / "stopped")
  assert result["params_sha256"] == undisturbed["params_sha256"]


def test_a_loss_that_is_not_finite(tmp_path):
  flags = {"mesh.axes": "data:1", "examples": 32, "evaluations": 1}
  exp = build({**flags, **LINEAR})
  problem = problem_of(exp)
  broken = problem._replace(
    init=lambda key: jax.tree.map(lambda x: x * np.nan, problem.init(key))
  )
  plan = exp.plan(exp.cells[0])._replace(problem=broken)
  exp.plan = lambda cell: plan
  with pytest.raises(ValueError, match=f"{CELL}: the loss of update 0 is nan"):
    train(exp, tmp_path)
  exp.config["on_nan"] = "record"
  (result,) = train(exp, tmp_path)
  assert result["diverged"] and result["updates"] == 2


# The recipes of a parameter server.


RECIPES = {
  "asgd": {"momentum": 0.9},
  "nag_asgd": {},
  "dana_zero": {},
  "dana_slim": {},
  "dc_asgd_a": {},
  "gap_aware": {},
}


def engine_of(exp, cell):
  """Starts the engine of a cell, without a folder."""
  context = Context(
    *(exp, cell, exp.plan(cell), None, None),
    *(lambda rebuild: None, [], None),
  )
  engine = exp.engine_kind(cell).start(context)
  while engine.done < engine.total:
    engine.advance(engine.total)
  return engine


def double_precision(load):
  """Lets `cells.problem.load` return a problem of float64."""

  def wide(*args, **options):
    dataset, problem = load(*args, **options)
    return dataset, problem._replace(
      init=lambda key: jax.tree.map(
        lambda x: x.astype(np.float64), problem.init(key)
      )
    )

  return wide


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_worker_in_simulation_is_a_mesh_of_one_device(recipe, monkeypatch):
  config = {
    "model": {"name": "mlp", "hidden": ()},
    "batch_size": 8,
    "examples": 48,
    "learning_rate": 0.05,
    "workers": 1,
    "runs": {
      "simulated": {"engine": "simulate", "recipe": recipe, **RECIPES[recipe]},
      "mesh": {"engine": "mesh", "recipe": recipe, **RECIPES[recipe]},
    },
    "mesh": {"axes": "data:1"},
    "seeds": (3,),
  }
  load = double_precision(cells.problem.load)
  monkeypatch.setattr(cells.problem, "load", load)
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    exp = build(config=config)
  # Rules of delays alone, and once.
  assert len(told) == (recipe in ("dc_asgd_a", "gap_aware"))
  assert all("reads staleness 0" in str(each.message) for each in told)
  simulated, on_mesh = (engine_of(exp, cell) for cell in exp.cells)
  assert simulated.done == on_mesh.done == 6
  params = on_mesh.snapshot().params
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(float)}
  close(params, simulated.snapshot().params, atol=1e-12)
  np.testing.assert_allclose(
    on_mesh.records().loss, simulated.records().loss, rtol=1e-6
  )


def digits(recipe, axes):
  """Returns (losses, parameters) of a tiny run on a mesh."""
  run = {"recipe": recipe} if isinstance(recipe, str) else recipe
  mesh = {"axes": axes}
  trained = kit.train(kit.tiny(engine="mesh", runs={"run": run}, mesh=mesh))
  return trained.records.loss, trained.params


def test_islands_of_one_step_are_data_parallel():
  """Without momentum the mean of models is the model after a mean step."""
  expected = digits("asgd", {"data": 4})
  averaging = {"recipe": "model_averaging", "steps": 1}
  for axes in ({"data": 4}, {"data": 2, "island": 2}, {"data": 1}):
    actual = digits(averaging, axes)
    close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["slowmo", "diloco"])
def test_the_devices_of_an_island_divide_its_examples(recipe):
  recipe = {"recipe": recipe, "steps": 2}
  alone = digits(recipe, {"data": 2})
  divided = digits(recipe, {"data": 2, "island": 2})
  assert len(alone[0]) == 12  # of 24 batches
  close(divided, alone, rtol=1e-4, atol=1e-5)


test_recipes_and_settings_without_islands_are_refused = kit.refuses(
  (
    ({"recipe": "easgd"}, "easgd.* take local steps, and the 2 islands"),
    ({"recipe": "asgd", "axes": {"island": 2}}, "island is for recipes whose"),
    ({"recipe": "diloco", "zero": 1}, "local steps need zero=0, not 1"),
    ({"recipe": "diloco", "axes": {"data": 2, "tensor": 2}},
     "local steps need a mesh of the axis 'data' and 'island' alone"),
  ),
  lambda settings: kit.tiny(
    engine="mesh",
    runs={"run": {"recipe": settings["recipe"]}},
    mesh={"axes": {"data": 2}}
    | {key: value for key, value in settings.items() if key != "recipe"},
  ),
)


# Several processes.


@pytest.mark.process
@pytest.mark.usefixtures("commands_without_pictures")
def test_two_processes_agree_with_one(replicas, tmp_path):
  """With tensors that are split, and positions."""
  exp, place, expected = replicas
  workdir = tmp_path / "out"
  ended = kit.launch(
    *("train", "--config=configs/mesh_gpt.py:tiny"),
    "--config.mesh.precision=float64",
    "--config.mesh.axes=data:2,tensor:2",
    "--config.mesh.zero=0",
    "--config.mesh.sequence=True",
    "--num_processes=2",
    f"--workdir={workdir}",
    status=0,
  )
  assert "GPT, AdamW" in ended.stdout and "[Gloo]" not in ended.stdout
  assert (expected["processes"], result_of(workdir)["processes"]) == (1, 2)
  agree(exp, workdir, place)


@pytest.mark.process
def test_a_process_that_waits_in_vain_ends_with_one_line():
  ended = kit.launch(
    *("train", "--config=configs/mesh_gpt.py:tiny"),
    "--config.mesh.axes=data:2",
    "--num_processes=2",
    "--process_id=1",
    "--coordinator=127.0.0.1:9",
    "--start_seconds=0.5",
  )
  start = "error: process 1 of 2 waited 0.5 s at --coordinator="
  kit.assert_one_line(ended, start)


TWO_ENGINES = """
def get_config():
  return {
    "runs": {
      "mesh": {"engine": "mesh", "precision": "float64"},
      "other": {"engine": "simulate", "recipe": "asgd"},
    },
  }
"""


def test_float64_is_of_all_runs_or_of_none(tmp_path):
  path = tmp_path / "two.py"
  path.write_text(TWO_ENGINES)
  arguments = f"--config={path}", f"--workdir={tmp_path / 'out'}"
  result = kit.call("train", *arguments)
  words = "config.mesh.precision float64 must be that of all"
  kit.assert_one_line(result, words)


# Configs, and mistakes.


def resolve(axes):
  config = {"runs": {"x": {}}, "engine": "mesh", "mesh": {"axes": axes}}
  return schema.resolve(config, ENGINES)


def test_a_mesh_may_be_written_in_many_ways():
  for value in ("data:2,tensor:4", "tensor=4,data=2", {"tensor": 4, "data": 2}):
    axes = resolve(value).config["mesh"]["axes"]
    assert list(axes.items()) == [("data", 2), ("tensor", 4)]
  assert resolve("rows:2").config["mesh"]["axes"] == {"data": 1, "rows": 2}
  exp = build({"mesh.axes": "data:-1,tensor:2"})
  assert exp.plan(exp.cells[0]).mesh.shape["data"] == 4
  (run,) = resolve({}).runs.values()
  assert mesh_plan.required_devices(run) is None


def test_another_optimizer_drops_the_options_of_the_old():
  config = overrides_lib.override(small(), {"optimizer.name": "lamb"}, ENGINES)
  assert config["optimizer"] == {"name": "lamb"}
  config = overrides_lib.override(small(), {"optimizer.b1": 0.8}, ENGINES)
  assert config["optimizer"]["weight_decay"] == 0.1
  for value in ("lamb", {"name": "lamb"}):
    resolved = schema.resolve({**small(), "optimizer": value}, ENGINES)
    assert resolved.config["optimizer"] == {"name": "lamb"}


AXES, DEVICES = "mesh.axes", "mesh.devices"
MISTAKES = (
  ({"mesh.acumulate": 3}, "acumulate'; did you mean 'accumulate'"),
  ({"data.contex": 3}, "'data.contex'; did you mean 'context'"),
  ({AXES: "date:8"}, "unknown axis 'date' of config.mesh.axes; did"),
  ({AXES: 8}, "config.mesh.axes must be a dict of axes"),
  ({AXES: "data:two"}, "as in data:2,tensor:4, not 'data:two'"),
  ({AXES: "data:2,data:4"}, "names an axis twice"),
  ({AXES: "data:0"}, "config.mesh.axes.data must be a whole number"),
  ({AXES: "data:-1,tensor:-1"}, "only one axis can be -1"),
  ({AXES: "data:-1,tensor:3"}, "config.mesh.axes: 8 devices cannot be"),
  ({AXES: "data:16"}, r"data 16 needs 16 .* there are 8 \(cpu\)"),
  ({AXES: "data:4", DEVICES: 2},
   "config.mesh.devices 2 are fewer than the 4 of config.mesh.axes data 4"),
  ({AXES: "data:8", "mesh.accumulate": 4},
   "config.batch_size 16 cannot be divided into 32 pieces .*multiple of 32"),
  ({AXES: "data:8,pipe:1", "mesh.microbatches": 4},
   "makes pieces of 2 .*config.mesh.microbatches 4 does not.*multiple of 32"),
  ({"mesh.microbatches": 2},
   "config.mesh.microbatches 2 is for the axis 'pipe"),
  ({AXES: "data:2", "mesh.sequence": True}, "is for the axis 'tensor'"),
  ({AXES: "tensor:2", "model.heads": 1},
   "config.mesh.axes .*: 1 heads cannot be divided among the 2 devices"),
  ({AXES: "data:2,pipe:4"}, "config.mesh.axes .*2 blocks cannot be divided"),
  ({AXES: "pipe:2", "mesh.microbatches": 1, "model.depth": 4, "mesh.rounds": 2},
   "config.mesh.axes .*1 microbatches are fewer than the 2 stages"),
  ({AXES: "data:2,rows:2,tensor:2"}, "data, and tensor and pipe, or"),
  ({AXES: "rows:2"}, "a Embed cannot be split into tiles"),
  ({AXES: "tensor:8", "mesh.sequence": True, "data.context": 9},
   "9 positions cannot be divided among the 8"),
  ({"mesh.zero": 4}, "config.mesh.zero must be a whole number from 0"),
  ({"mesh.form": "pmapp"}, "config.mesh.form must be .* or 'pmap'"),
  ({"mesh.form": "pmap", AXES: "tensor:2"},
   "config.mesh.form: the form 'pmap' .*"),
  ({"mesh.precision": "float8"}, "config.mesh.precision .*did you"),
  ({"optimizer": "adamm"}, "config.optimizer: .*'adamm'; did you"),
  ({"optimizer.beta": 3},
   "config.optimizer: optimizer 'adamw' takes no argument 'beta'"),
  ({"optimizer.b1": "a"}, "config.optimizer"),
  ({"mesh.loss_scale": {"start": 3}}, "unknown config key 'mesh.loss_scale."),
  ({"mesh.loss_scale": {"factor": 1}}, "config.mesh.loss_scale: factor"),
  ({"data.name": "digits", "model.name": "mlp", "batch_size": 5000},
   "batch_size"),
  ({"model.name": "gpd"}, "config.model: .*did you mean 'gpt'"),
  ({"compress": "int8", "optimizer": "lbfgs"},
   "config.compress 'int8' is not for config.optimizer 'lbfgs', .* drop"),
  ({"compress": "treshold"}, "config.compress: .*did you mean 'thres"),
  ({"compress": {"name": "top_k", "density": 2}},
   r"config.compress.density must be in \(0, 1\], not 2"),
  ({"compress": "int8", "mesh.zero": 1, AXES: "data:2"},
   "config.compress: compressed gradients need zero=0, not 1"),
  ({"compress": "int8", AXES: "data:2,tensor:2"},
   "config.compress: compressed gradients .*'tensor'"),
  ({"compress": {"name": "onebit_adam", "warmup": 3}},
   "config.compress: .*'warmup'; did you mean 'warm_up'"),
  ({"compress": {"name": "onebit_adam", "warm_up": 0}},
   "config.compress.warm_up must be a positive whole number, not 0"),
  ({"optimizer.learning_rate": 3}, "set config.learning_rate"),
  ({"learning_rate": 0}, "config.learning_rate must be a number above"),
  ({"learning_rate_schedule.decay_examples": (16,)},
   "config.learning_rate_schedule: .*the warm-up"),
  ({"model.name": "mlp"}, "'mlp' does not fit .*'pydoc'"),
  ({"on_nan": "go"}, "config.on_nan must be 'stop' or 'record'"),
)


test_a_mistake_names_key_value_and_remedy = kit.refuses(MISTAKES, build)


SIZES = []


def sized():
  """A codec that writes down the run that it is fitted to."""
  codec = compression.identity()

  def for_run(workers, epoch):
    SIZES.append((workers, epoch))
    return codec

  return codec._replace(for_run=for_run)


def test_a_codec_has_the_devices_and_the_steps_of_an_epoch():
  exp = build({"compress": f"{__name__}:sized", AXES: "data:2"})
  plan = exp.plan(exp.cells[0])
  assert SIZES[-1] == (2, plan.problem.batches_per_epoch)


def test_a_large_whole_number_may_be_the_clip_norm():
  exp = build({"clip_norm": 10**20})
  assert exp.plan(exp.cells[0]).run.config["clip_norm"] == 10**20


def test_float64_has_to_be_on():
  with (
    jax.enable_x64(False),
    pytest.raises(ValueError, match="jax_enable_x64"),
  ):
    build()
