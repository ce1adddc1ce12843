"""One program for all stages computes what the layers compute, one by one."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from kit import normal

from asgd import models
from asgd.models import transformer
from asgd.parallel import circular

pytestmark = pytest.mark.usefixtures("quick_compilation", "float64")


def mesh(stages, data=1):
  devices = np.array(jax.devices()[: stages * data]).reshape(stages, data)
  return jax.sharding.Mesh(devices, ("stage", "data"))


def layer(params, x, key):
  """With a norm, whose derivative at nothing is none; and noise."""
  h = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  noise = jax.random.normal(key, x.shape, x.dtype)
  return x + jnp.tanh(h @ params["w"] + params["b"]) * (1 + 0.1 * noise)


def weights(count, width=5):
  return {"w": normal(count, width, width), "b": normal(count, width, seed=1)}


def one_by_one(params, x, key):
  """The layers, one after the other, on each microbatch."""

  def microbatch(h, number):
    mine = jax.random.fold_in(key, number)

    def step(h, item):
      held, depth = item
      return layer(held, h, jax.random.fold_in(mine, depth)), None

    return jax.lax.scan(step, h, (params, jnp.arange(len(params["b"]))))[0]

  return jax.vmap(microbatch)(x, jnp.arange(len(x)))


close = functools.partial(kit.close, rtol=1e-12)


# stages, layers, rounds, microbatches, data
SHAPES = [
  (4, 4, 1, 8, 1),
  (4, 4, 1, 2, 1),  # fewer microbatches than stages
  (4, 8, 2, 4, 1),  # as many as stages: nothing waits
  (2, 8, 2, 5, 1),
  (2, 12, 3, 4, 1),
  (1, 3, 1, 3, 1),
  (2, 4, 2, 4, 4),  # beside data parallelism
]


@pytest.mark.parametrize(
  ("shape", "remat"),
  [(shape, False) for shape in SHAPES] + [(SHAPES[4], True)],
  ids=str,
)
def test_it_is_the_layers_one_by_one_whatever_fills_the_slots(shape, remat):
  stages, layers, rounds, count, data = shape
  params, x = weights(layers), jnp.asarray(normal(count, 4, 5, seed=2))
  key, target = jax.random.key(3), normal(count, 4, 5, seed=4)
  grid = mesh(stages, data)
  if data > 1:
    spec = jax.sharding.PartitionSpec(None, "data")
    x = jax.device_put(x, jax.sharding.NamedSharding(grid, spec))
  run = circular.pipeline(layer, grid, rounds=rounds, remat=remat, fill=np.nan)

  def loss(apply):
    return lambda params, x: jnp.sum((apply(params, x, key) - target) ** 2)

  both = (
    jax.jit(jax.value_and_grad(loss(f), (0, 1))) for f in (run, one_by_one)
  )
  found, wanted = (f(params, x) for f in both)
  close(found, wanted)


def test_the_blocks_of_a_gpt():
  layers = transformer.gpt(7, depth=4, width=8, heads=2, context=6)
  tokens = np.arange(4 * 2 * 6).reshape(4, 2, 6) % 7
  params = models.init(layers, jax.random.key(0), tokens[0])
  params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
  block = layers[1]

  def apply_block(held, x, key):
    del key
    return block.apply({"params": held}, x)

  run = circular.pipeline(apply_block, mesh(2), rounds=2, fill=np.nan)

  @jax.jit
  def found(params):
    x, _ = jax.vmap(lambda t: models.apply(layers[:1], params[:1], t))(tokens)
    y = run(circular.stack(params[1:-1]), x)
    return jax.vmap(lambda h: models.apply(layers[-1:], params[-1:], h))(y)[0]

  @jax.jit
  def wanted(params):
    return jax.vmap(lambda t: models.apply(layers, params, t)[0])(tokens)

  close(found(params), wanted(params))


def test_axes_may_be_explicit_as_make_mesh_makes_them():
  params, x, key = weights(4), normal(3, 2, 5), jax.random.key(0)
  grid = jax.make_mesh(
    (2, 1), ("stage", "data"), (jax.sharding.AxisType.Explicit,) * 2
  )
  found = circular.pipeline(layer, grid)(params, x, key)
  close(found, circular.pipeline(layer, mesh(2))(params, x, key))


MISTAKES = {
  "a scalar": (
    lambda: circular.pipeline(layer, mesh(2))(1.0, normal(4, 4, 5)),
    r"must have one leading axis, .* not \[None\] and \[4\]",
  ),
  "axis": (
    lambda: circular.pipeline(layer, mesh(2), axis="pipe"),
    r"axes \('stage', 'data'\) and none named 'pipe'",
  ),
  "rounds": (
    lambda: circular.pipeline(layer, mesh(2), rounds=0),
    "rounds must be a positive whole number, not 0",
  ),
  "layers": (
    lambda: circular.pipeline(layer, mesh(2))(weights(3), normal(4, 4, 5)),
    "3 layers cannot be divided among 2 stages",
  ),
  "microbatches": (
    lambda: circular.pipeline(layer, mesh(4), rounds=2)(
      weights(8), normal(3, 4, 5)
    ),
    "3 microbatches are fewer than the 4 stages",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  call, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    call()
