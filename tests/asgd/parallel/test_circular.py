"""One program for all stages computes what the layers compute, one by one."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from kit import normal

from asgd.parallel import circular, meshes

pytestmark = pytest.mark.usefixtures("quick_compilation", "float64")


def pipe_mesh(stages, data=1, kind=jax.sharding.AxisType.Auto):
  return jax.make_mesh(
    (stages, data),
    ("pipe", "data"),
    axis_types=(kind, kind),
    devices=jax.devices()[: stages * data],
  )


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


# stages, layers, rounds, microbatches, data
SHAPES = [
  (4, 4, 1, 2, 1),  # fewer microbatches than stages
  (4, 8, 2, 4, 1),  # as many as stages: nothing waits
  (2, 12, 3, 4, 1),
  (1, 3, 1, 3, 1),
  (2, 4, 2, 4, 4),  # beside data parallelism
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_layers_one_by_one_whatever_fills_the_slots(
  shape, monkeypatch
):
  monkeypatch.setattr(circular, "_EMPTY", np.nan)
  stages, layers, rounds, count, data = shape
  params, x = weights(layers), jnp.asarray(normal(count, 4, 5, seed=2))
  key, target = jax.random.key(3), normal(count, 4, 5, seed=4)
  grid = pipe_mesh(stages, data)
  if data > 1:
    spec = jax.sharding.PartitionSpec(None, "data")
    x = jax.device_put(x, jax.sharding.NamedSharding(grid, spec))
  elif rounds == 1:  # axes as jax.make_mesh makes them
    grid = pipe_mesh(stages, kind=jax.sharding.AxisType.Explicit)
  # One that waits computes forwards again, too.
  block = jax.checkpoint(layer) if rounds == 3 else layer
  run = circular.pipeline(block, grid, rounds=rounds)

  def loss(apply):
    return lambda params, x: jnp.sum((apply(params, x, key) - target) ** 2)

  both = (
    jax.jit(jax.value_and_grad(loss(f), (0, 1))) for f in (run, one_by_one)
  )
  actual, expected = (f(params, x) for f in both)
  kit.close(actual, expected, rtol=1e-12)


MISTAKES = {
  "a scalar": (
    lambda: circular.pipeline(layer, pipe_mesh(2))(1.0, normal(4, 4, 5)),
    r"must have one leading axis, .* not \[None\] and \[4\]",
  ),
  "axis": (
    lambda: circular.pipeline(layer, meshes.make({"stage": 2})),
    r"axes \('stage',\) and none named 'pipe'",
  ),
  "rounds": (
    lambda: circular.pipeline(layer, pipe_mesh(2), rounds=0),
    "rounds must be a positive whole number, not 0",
  ),
  "layers": (
    lambda: circular.pipeline(layer, pipe_mesh(2))(weights(3), normal(4, 4, 5)),
    "3 layers cannot be divided among 2 stages",
  ),
  "microbatches": (
    lambda: circular.pipeline(layer, pipe_mesh(4), rounds=2)(
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
