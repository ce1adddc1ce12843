"""One's own model, data and problem, in a module outside the package."""

import functools
import shutil
import sys

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import serialization

import asgd
from asgd import base, simulator
from asgd.experiment import cell_files, code, replay

OWN = kit.ROOT / "tests" / "outside" / "own_things.py"


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory):
  """The module, importable as from the folder of a config file."""
  folder = tmp_path_factory.mktemp("outside")
  shutil.copy(OWN, folder)
  before = list(sys.path)
  code.add_folder(folder)
  yield
  sys.path[:] = before
  sys.modules.pop("own_things", None)


build = functools.partial(
  kit.build,
  {
    "runs": {"a": {"recipe": "asgd"}},
    "workers": (1,),
    "batch_size": 16,
    "examples": 96,
    "learning_rate": 0.05,
    "evaluations": 2,
    "curvature_checks": 0,
    "evaluation_examples": 32,
  },
)


def train(**config):
  return kit.train(build(**config)).result


GPT = {
  "data": {"name": "own_things:words", "tokens": "characters", "context": 8},
  "model": {"name": "own_things:gpt"},
}
CNN = {"model": {"name": "own_things:cnn", "dropout": 0.2}}
# Model, recipe, optimizer.
LIVE = {
  "cnn, DC, SGD": (CNN, {"recipe": "dc_asgd_a"}, "sgd"),
  # Muon on a GPT is compiled to other last bits if the message may be
  # overwritten: a replay must not do what the run did not.
  "gpt, DC, Muon": (GPT, {"recipe": "dc_asgd_a"}, "muon"),
}


@pytest.mark.parametrize("name", LIVE)
def test_ones_own_model_trains_live_and_is_replayed_to_the_bit(name, tmp_path):
  settings, run, optimizer = LIVE[name]
  place, result, _ = kit.train_live(
    tmp_path / "out",
    **{**settings, "runs": {"a": run}, "optimizer": optimizer},
    workers=(2,),
    examples=128,
    evaluation_examples=32,
  )
  replayed = asgd.replay(place)
  assert replayed.same
  assert replayed.recorded == result["params_sha256"]
  assert replayed.changed == []


def simulated(exp):
  """Returns the final parameters of the only cell, its plan and its keys."""
  (cell,) = exp.cells
  plan = exp.plan(cell)
  init, root = jax.random.split(jax.random.key(cell.seed))
  params = plan.problem.init(init)
  trace = plan.trace(cell.seed)
  simulation, _ = simulator.run_whole(
    *(plan.simulator(trace).simulator, params, 1, trace),
    batch=plan.job_batches(cell.seed),
    root=root,
  )
  return simulation.server.params, plan, init


def normalised(exp, batch):
  return (batch[0].astype(np.float32) - exp.dataset.mean) / exp.dataset.std


def test_one_worker_keeps_the_statistics_of_a_loop_of_flax_and_optax():
  momentum = 0.5
  exp = build(
    model={"name": "own_things:cnn", "momentum": momentum},
    learning_rate_schedule={"warmup_epochs": 0.0},
  )
  ours, plan, key = simulated(exp)
  module = sys.modules["own_things"].Cnn(10, momentum)
  batches = plan.job_batches(0)
  images = normalised(exp, batches(0, 0))
  variables = module.init(key, images, train=False)
  weights, stats = variables["params"], variables["batch_stats"]
  tx = optax.sgd(0.05)
  state = tx.init(weights)

  @jax.jit
  def step(weights, stats, state, images, labels):
    def loss(weights):
      logits, new = module.apply(
        {"params": weights, "batch_stats": stats},
        *(images, True),
        mutable=["batch_stats"],
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return losses.mean(), new["batch_stats"]

    gradient, stats = jax.grad(loss, has_aux=True)(weights)
    updates, state = tx.update(gradient, state, weights)
    return optax.apply_updates(weights, updates), stats, state

  for job in range(plan.messages):
    batch = batches(0, job)
    weights, stats, state = step(
      *(weights, stats, state, normalised(exp, batch), batch[1])
    )
  kit.close(ours.weights, weights, rtol=1e-3, atol=1e-5)
  kit.close(ours.stats, stats, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "nnx_cnn"])
def test_a_message_holds_the_statistics_of_its_batch(name):
  exp = build(model={"name": f"own_things:{name}"})
  problem = exp.problem_of(exp.runs["a"])
  assert problem.pieces is None
  params = problem.init(jax.random.key(0))
  assert isinstance(params, base.Variables)
  batch, key = problem.batches(0, 1)(0, 0), jax.random.key(1)
  moved = params._replace(stats=jax.tree.map(lambda x: x + 1, params.stats))
  loss = jax.jit(problem.loss)
  value, aux = loss(params, batch, key)
  again, same = loss(moved, batch, key)
  assert value == again
  kit.close(aux.stats, same.stats, atol=1e-4)
  assert problem.evaluate(params).loss != problem.evaluate(moved).loss
  assert problem.statistics_decay == 0.9


@pytest.mark.parametrize("name", ["cnn", "nnx_cnn"])
def test_dropout_draws_from_the_key_in_training_alone(name):
  exp = build(model={"name": f"own_things:{name}", "dropout": 0.5})
  problem = exp.problem_of(exp.runs["a"])
  params = problem.init(jax.random.key(0))
  batch, loss = problem.batches(0, 1)(0, 0), jax.jit(problem.loss)
  first, again, other = (
    loss(params, batch, jax.random.key(seed))[0] for seed in (1, 1, 2)
  )
  assert first == again != other
  assert problem.evaluate(params) == problem.evaluate(params)


def test_a_model_in_one_piece_trains_on_a_mesh_of_data(tmp_path):
  run = {"engine": "mesh", "recipe": "asgd"}
  exp = build(**CNN, runs={"a": run}, mesh={"axes": {"data": 2}})
  result, place, *_ = kit.train(exp, tmp_path)
  saved = cell_files.read_file(place, "params.msgpack")
  assert set(serialization.msgpack_restore(saved)) == {"weights", "stats"}
  assert np.isfinite(result["test_loss"])


def test_layers_of_ones_own_can_be_cut():
  model = {"name": "own_things:layers", "momentum": 0.0}
  exp = build(model=model)
  assert len(exp.problem_of(exp.runs["a"]).pieces.layers) == 2
  assert np.isfinite(train(model=model)["test_loss"])


def test_what_cuts_layers_refuses_a_model_in_one_piece():
  words = "own_things:cnn'.*has no layers to divide.*the axis 'data' alone"
  with pytest.raises(ValueError, match=words) as caught:
    build(**CNN, engine="mesh", mesh={"axes": {"tensor": 2}})
  assert "\n" not in str(caught.value)


DATA = {
  "two outputs": ({"name": "own_things:numbers", "outputs": 2}, "mlp"),
  "one's own model": ({"name": "own_things:numbers"}, "own_things:mlp"),
  "signs": ({"name": "own_things:signs", "examples": 48}, "own_things:mlp"),
  "diabetes": ({"name": "diabetes"}, "mlp"),
}


@pytest.mark.parametrize("name", DATA)
def test_what_data_are_says_what_is_learnt(name):
  section, model = DATA[name]
  result = train(
    data=section,
    model={"name": model},
    runs={"a": {"recipe": "asgd", "momentum": 0.5}},
    examples=800,
  )
  if name == "signs":
    assert result["test_accuracy"] > 0.7
    assert "test_measure" not in result
  else:
    assert np.isnan(result["test_accuracy"])
    assert result["test_measure"] > 0  # R^2
  assert not result["diverged"]


def test_a_problem_of_ones_own(tmp_path):
  settings = {
    "problem": {"name": "own_things:fit", "size": 4},
    "data": {},
    "model": {"name": "mlp"},
    "runs": {"a": {"recipe": "dana_zero"}, "b": {"batch_size": 8}},
    "only": ["a"],
  }
  settings["runs"]["b"]["recipe"] = "asgd"
  place, result, _ = kit.train_live(
    tmp_path / "out", **settings, workers=(2,), examples=320
  )
  assert 0 < result["test_loss"] < 0.9
  replayed = asgd.replay(place)
  assert replayed.same
  assert np.isnan(replayed.accuracy)
  assert f"test loss {result['test_loss']:.4g}, " in replay.describe(replayed)
  exp = build(**{**settings, "only": []})
  assert exp.dataset_identity["name"] == "own_things:fit"
  sizes = {len(exp.problem_of(run).probe) for run in exp.runs.values()}
  assert sizes == {16, 8}


@pytest.mark.parametrize(
  ("tokens", "classes"),
  [("characters", 9), ("bytes", 256), ("own_things:lengths", 9)],
)
def test_a_text_of_ones_own_with_a_tokenizer(tokens, classes):
  section = {"name": "own_things:words", "tokens": tokens, "context": 8}
  exp = build(data=section, model={"name": "own_things:gpt"})
  assert exp.dataset.classes == classes
  batch = exp.problem_of(exp.runs["a"]).batches(0, 1)(0, 0)
  assert batch.shape == (16, 9)
  assert jnp.asarray(batch).max() < classes


def data_of(function, **others):
  return {"data": {"name": f"own_things:{function}"}, **others}


def test_a_loss_of_ones_own_may_be_a_number_alone():
  losses = []
  for function in ("fit", "scalar"):
    exp = build(**problem_of(function))
    problem = exp.problem_of(exp.runs["a"])
    params = problem.init(jax.random.key(0))
    batch = problem.batches(0, 1)(0, 0)
    losses.append(problem.loss(params, batch, jax.random.key(1)))
  assert losses[0] == losses[1]


def model_of(function):
  return {"model": {"name": f"own_things:{function}"}}


def problem_of(function, **others):
  return {"problem": {"name": f"own_things:{function}"}, **others}


MISTAKES = (
  ({"model.name": "nowhere_at_all:f"},
   "^config.model: model 'nowhere_at_all:f': .* its folder must be that of"),
  (model_of("mpl"), "has no 'mpl'; did you mean 'mlp'"),
  ({"model.name": "own_things:mlp", "model.widht": 3},
   "^config.model: .* takes no argument 'widht'; did you mean 'width'"),
  (model_of("sigmoid"), "^config.model: .* returned 3; return a"),
  (model_of("asks"),
   "^config.model: .* apply needs an argument 'mask', which has no value"),
  (model_of("stumbles"),
   "^config.model: model 'own_things:stumbles' fails .RuntimeError: no such"),
  (model_of("seven"),
   r"^config.model 'own_things:seven' does not fit .*'digits': the model's"
   r" output is of shape \(16, 7\), but 10 classes need \(16, 10\)"),
  (model_of("mixed"),
   "^config.model 'own_things:mixed': Mixed has BatchNorm layers with several"),
  (model_of("layers"),
   "^config.model 'own_things:layers': its layers have BatchNorm with momentum"
   " 0.9, .* set momentum=0.0"),
  (model_of("keeps"),
   "^config.model 'own_things:keeps': Sequential has BatchNorm, .*no argument"
   " train"),
  ({**data_of("numbers"), **model_of("cnn")},
   "^config.model 'own_things:cnn': Cnn does not take examples float32"),
  ({"data.name": "own_things:signs", "data.exampels": 3},
   "^unknown config key 'data.exampels'; did you mean 'examples'"),
  (data_of("streams"),
   "^config.data: dataset 'own_things:streams': train_x is generator, which"
   " cannot be indexed .* give numbers"),
  (data_of("uneven"), "train_x has 4 examples and train_y 3 labels"),
  (data_of("one_array"), "return arrays .train_x, train_y, "),
  (data_of("outside"), "labels are 0 to 3, but must be 0 to 2"),
  (data_of("signs", batch_size=100),
   "^config.data: batch_size 100 is larger than the 64 training examples"),
  ({"data.name": "own_things:signs", "data.augment": True},
   "^config.data: augment is for images"),
  ({"data.name": "digits", "data.tokenizer": "bytes"},
   "^config.data.tokenizer 'bytes' is for the texts pydoc, file"),
  (problem_of("fit", model={"name": "cnn"}),
   "^config.problem.name 'own_things:fit' already gives data and model: drop"
   " config.model"),
  ({"problem.name": "quadratic"},
   "^config.problem.name must be MODULE:FUNCTION, not 'quadratic'"),
  (problem_of("failing"),
   "^config.problem: the loss fails on the first batch, .*KeyError: 'v'"),
  (problem_of("moving"),
   "^config.problem: .* gave two different batches for one job; make it a fun"),
  (problem_of("other_tables"),
   r"^config.problem: keyed.keys\(batch\) must return .*'w'.*, not .*'v'"),
  (problem_of("no_size"), "takes no argument batch_size"),
  ({"problem.name": "own_things:numbers"},
   "^config.problem: .*takes no argument batch_size"),
)


test_what_is_wrong_with_it_is_told_in_a_line = kit.refuses(
  MISTAKES, lambda config: build(**kit.nested(config)), longest=700
)
