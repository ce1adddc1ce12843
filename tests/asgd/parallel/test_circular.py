"""One program for all stages computes what the layers compute, one by one."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kit import normal

from asgd.parallel import circular, meshes

pytestmark = pytest.mark.usefixtures("float64")


def pipeline(layer, stages, data=1, rounds=1):
  """Returns (params, x, key) -> y, of params with leaves [L, ...]."""
  mesh = meshes.make({"pipe": stages, "data": data})
  run = jax.shard_map(
    circular.pipeline(layer, rounds=rounds),
    mesh=mesh,
    in_specs=(P(None, "pipe"), P(), P()),
    out_specs=P(),
    axis_names={"pipe"},  # others are XLA's to use
    check_vma=False,
  )

  def call(params, x, key):
    def chunk(leaf):
      return leaf.reshape(rounds, -1, *leaf.shape[1:])

    if data > 1:
      sharding = jax.sharding.NamedSharding(mesh, P(None, "data"))
      x = jax.lax.with_sharding_constraint(x, sharding)
    return run(jax.tree.map(chunk, params), x, key)

  return jax.jit(call)


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


def squares(apply, params, x, key, target):
  return jnp.sum((apply(params, x, key) - target) ** 2)


def gradient_of(apply):
  """Returns a compiled loss and its gradient."""
  loss = functools.partial(squares, apply)
  return jax.jit(jax.value_and_grad(loss, (0, 1)))


WANTED = gradient_of(one_by_one)  # of as many layers always: compiled once
LAYERS = 12
# stages, rounds, microbatches, data
SHAPES = [
  (4, 1, 2, 1),  # fewer microbatches than stages
  (4, 3, 4, 1),  # as many as stages: nothing waits
  (1, 1, 4, 1),
  (2, 2, 4, 4),  # beside data parallelism
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_layers_one_by_one_whatever_fills_the_slots(
  shape, monkeypatch
):
  monkeypatch.setattr(circular, "_EMPTY", np.nan)
  stages, rounds, count, data = shape
  # One that waits computes forwards again, too.
  block = jax.checkpoint(layer) if stages == 2 else layer
  found = gradient_of(pipeline(block, stages, data, rounds))
  given = weights(LAYERS), normal(count, 4, 5, seed=2)
  given += jax.random.key(3), normal(count, 4, 5, seed=4)
  kit.close(found(*given), WANTED(*given), rtol=1e-12)


MISTAKES = {
  "rounds": (lambda: circular.pipeline(layer, rounds=0),
    "rounds must be a positive whole number, not 0"),
  "microbatches": (
    lambda: pipeline(layer, 4, rounds=2)(
      weights(8), normal(3, 4, 5), jax.random.key(0)
    ),
    "3 microbatches are fewer than the 4 stages"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
