"""pipeline.train: layers of one's own are trained as on one device."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from linear import criterion

import asgd
from asgd import call_options, pipeline
from asgd.pipeline import schedules
from asgd.pipeline.engine import PIPELINE
from asgd.pipeline.facade import read_layers

X = np.float32(kit.normal(32, 3))
DATA = X, X.sum(1)
LAYERS = nn.Dense(4), nn.tanh, nn.Dense(1)


# An update of several microbatches has another rate than the one given here.
CHANGED = asgd.asgd(0.1, workers=1)._replace(
  at_server=asgd.scale_by_staleness()
)


def batch(worker, job):
  del worker
  rows = np.random.default_rng(job).integers(32, size=8)
  return X[rows], DATA[1][rows]


train = functools.partial(
  *(pipeline.train, LAYERS, criterion, batch),
  messages=16,
  microbatches=4,
  progress=False,
)


def test_typed_options_are_those_of_pipelines():
  makers = map(inspect.signature, schedules.SCHEDULES.values())
  settings = {name for maker in makers for name in maker.parameters}
  settings |= {*PIPELINE.sections["pipeline"].keys}
  # Named by `train`, given by what it names, or options of a call.
  settings -= {"stages", "schedule", "microbatches", "devices", "batches"}
  settings -= {"rule", "flush", "name"}  # of `custom`, which takes functions
  calls = {*call_options.RunOptions._fields, *call_options.CONFIG_KEYS}
  calls = calls - {"messages", "workers"} | {"compress"}
  typed = {*pipeline.facade.TrainOptions.__annotations__}
  assert typed == settings | calls


def test_a_flush_schedule_trains_as_one_device_does(tmp_path):
  recipe = asgd.asgd(0.01, workers=1, momentum=0.5)
  arguments = {"schedule": "gpipe", "every": 8, "folder": tmp_path}
  arguments["evaluate"] = lambda params: float(params[0]["bias"][0])
  result = train(recipe, **arguments)
  model = nn.Sequential(LAYERS)
  drawn = jax.jit(lambda key: asgd.models.init(read_layers(LAYERS), key, X[:1]))
  first, _, last = drawn(jax.random.split(jax.random.key(0))[0])
  params = {"layers_0": first, "layers_2": last}
  tx = optax.sgd(0.04, 0.5)
  state = tx.init(params)

  @jax.jit
  @jax.grad
  def gradient(params, batch):
    return criterion(model.apply({"params": params}, batch[0]), batch)

  for update in range(4):
    jobs = [batch(0, 4 * update + k) for k in range(4)]
    grads = [gradient(params, each) for each in jobs]
    mean = jax.tree.map(lambda *parts: sum(parts) / 4, *grads)
    updates, state = tx.update(mean, state)
    params = optax.apply_updates(params, updates)
  expected = params["layers_0"], params["layers_2"]
  trained = result.params[0], result.params[2]
  kit.close(trained, expected, rtol=1e-4, atol=1e-5)
  assert [row["message"] for row in result.evaluations] == [8, 16]
  again = train(recipe, **arguments)  # it is finished
  kit.same(again.params, result.params)
  kit.same(again.records._asdict(), result.records._asdict())
  assert again.evaluations == result.evaluations


@pytest.mark.parametrize(
  ("layers", "criterion"),
  [
    ((LAYERS[0], nn.relu, LAYERS[2]), criterion),
    (LAYERS, lambda y, batch: abs(y[:, 0] - batch[1]).mean()),
  ],
)
def test_a_folder_of_other_layers_is_refused(layers, criterion, tmp_path):
  options = {"messages": 8, "folder": tmp_path, "progress": False}
  recipe = asgd.asgd(0.01, workers=1)
  train(recipe, messages=8, folder=tmp_path)
  with pytest.raises(ValueError, match="holds another experiment"):
    pipeline.train(layers, criterion, batch, recipe, **options)


def test_an_asynchronous_schedule_takes_any_recipe_and_optimizer():
  rate = optax.linear_schedule(0.02, 0.01, 16)
  recipe = asgd.dc_asgd_c(rate, workers=1, optimizer=optax.adam)
  result = train(recipe, schedule="pipedream")
  assert np.isfinite(result.records.loss).all()
  assert result.records.staleness.max() == 1


def test_a_recipe_changed_by_hand_is_taken_where_it_fits():
  result = train(CHANGED, schedule="pipedream")
  assert np.isfinite(result.records.loss).all()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"layers": ()}, "a tuple of flax modules and functions"),
    ({"layers": (nn.Dense(1), 3)}, "layer 1 must be"),
    ({"messages": 18}, "use 16 or 20"),
    ({"every": 6}, "use 4 or 8"),
    ({"stages": 3}, "stages"),
    ({"schedul": "gpipe"}, "unknown argument 'schedul'; did you"),
    ({"recipe": asgd.easgd(0.1, workers=2)}, "plain gradients"),
    ({"recipe": asgd.ringmaster_asgd(0.1, workers=2)}, "drop late gradients"),
    ({"workers": 4}, "workers=4, but a pipeline is one worker with stages=2"),
    ({"criterion": lambda y, batch: y}, "must be a scalar"),
    ({"recipe": CHANGED, "schedule": "gpipe"}, "made or changed by hand"),
  ],
)
def test_a_mistake_is_one_line(changes, words):
  arguments = {"recipe": asgd.asgd(0.1, workers=1), **train.keywords}
  arguments |= {"layers": LAYERS, "criterion": criterion, "data": batch}
  with pytest.raises(ValueError) as info:
    pipeline.train(**{**arguments, **changes})
  assert words in str(info.value) and "\n" not in str(info.value)


LINEAR = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
SCALE = jnp.full(4, 2.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
  """A module as Equinox has them: a tree that is called."""

  weight: jax.Array

  def __call__(self, x):
    return x * self.weight


@pytest.mark.parametrize(
  "layer",
  [
    LINEAR,
    LINEAR.__call__,
    nnx.Sequential(LINEAR, nnx.relu),
    functools.partial(LINEAR),
    lambda x: LINEAR(x),
    jax.jit(lambda x: LINEAR(x)),
    Affine(SCALE),
  ],
)
def test_weights_of_nnx_and_equinox_layers_are_refused_not_frozen(layer):
  kernel = np.array(LINEAR.kernel[...])
  layers = nn.Dense(4), layer, nn.Dense(1)
  recipe = asgd.asgd(0.1, workers=1)
  with pytest.raises(ValueError, match="layer 1 .* not be trained") as info:
    pipeline.train(layers, criterion, batch, recipe, messages=16)
  assert "\n" not in str(info.value)
  kit.same(np.array(LINEAR.kernel[...]), kernel)


@pytest.mark.parametrize(
  "layer",
  [
    nn.tanh,
    jax.nn.relu,
    functools.partial(jnp.multiply, SCALE),
    lambda x: x * SCALE,
    jax.jit(lambda x: nn.relu(x) * SCALE),
  ],
)
def test_functions_may_use_arrays_as_constants(layer):
  (read,) = read_layers((layer,))
  x = jnp.arange(4.0)
  kit.same(read.apply({}, x, train=True), layer(x))


class Normal(nn.Module):
  """A module with BatchNorm."""

  momentum: float = 0.0

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(4)(x)
    norm = nn.BatchNorm(not train, momentum=self.momentum)
    return nn.Dense(1)(norm(x))


class NormalAlways(nn.Module):
  """A module with BatchNorm that is always in training."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.BatchNorm(False)(nn.Dense(4)(x)))


class InTraining(nn.Module):
  """A module that computes more in training: a skip or a dropout."""

  skips: bool

  @nn.compact
  def __call__(self, x, train=True):
    first = nn.Dense(4)(x)
    y = nn.Dense(4)(first)
    if train and not self.skips:
      y = nn.Dropout(0.1, deterministic=False)(y)
    y = nn.Dense(4)(y)
    return nn.Dense(1)(y + first if train and self.skips else y)


class OfList(nn.Module):
  """A module that cannot be hashed."""

  sizes: list

  @nn.compact
  def __call__(self, x):
    for size in self.sizes:
      x = nn.Dense(size)(x)
    return x


@pytest.mark.parametrize("schedule", ["pipedream", "gpipe"])
def test_a_sequential_of_a_list_trains_as_one_of_a_tuple(schedule):
  recipe = asgd.asgd(0.02, workers=1)
  options = {"messages": 16, "progress": False, "schedule": schedule}
  layers = nn.Dense(4), nn.relu, nn.Dense(1)
  of_list, of_tuple = (
    pipeline.train(nn.Sequential(each), criterion, batch, recipe, **options)
    for each in ([*layers], layers)
  )
  kit.same(of_list.params, of_tuple.params)


@pytest.mark.parametrize(
  "model",
  [
    OfList([4, 1]),
    (nn.Dense(4), OfList([2, 1])),
    (nn.Dense(4), nn.BatchNorm(momentum=0.0), nn.Dropout(0.1), nn.Dense(1)),
    Normal(),
    nn.Sequential([LAYERS[0], nn.Dropout(0.1, deterministic=False), LAYERS[2]]),
  ],
)
def test_modes_and_lists_of_modules_are_trained(model):
  recipe = asgd.asgd(0.02, workers=1)
  options = {"messages": 16, "progress": False}
  result = pipeline.train(model, criterion, batch, recipe, **options)
  assert np.isfinite(result.records.loss).all()


@pytest.mark.parametrize(
  ("model", "words"),
  [
    (NormalAlways(), "takes no argument train.*: add it, as nn.BatchNorm"),
    (Normal(momentum=0.9), "momentum 0.9, but .* averages: set momentum=0.0"),
    ((nn.Dense(4), nn.BatchNorm(), nn.Dense(1)), "set momentum=0.0, or train"),
    (nn.Sequential([LAYERS[0], nn.BatchNorm(), LAYERS[2]]), "as a tuple, each"),
    (InTraining(skips=True), "what follows Dense_2 needs more than its output"),
    (InTraining(skips=False), "it calls other submodules in training than in"),
  ],
)
def test_a_module_that_cannot_be_trained_is_one_line(model, words):
  recipe = asgd.asgd(0.02, workers=1)
  with pytest.raises(ValueError, match=words) as info:
    pipeline.train(model, criterion, batch, recipe, messages=16)
  assert "\n" not in str(info.value)
