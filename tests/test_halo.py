"""Images that are split by rows: each device computes its part of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import models
from asgd.parallel import halo, meshes

IMAGES = P(None, "rows")


@pytest.fixture(autouse=True)
def double(quick_compilation):
  with jax.enable_x64(True):
    yield


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


def close(found, wanted):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
    *(found, wanted),
  )


def drawn(layers, x):
  """Parameters; cheaper than models.init, and no bias is 0."""
  key = jax.random.key(0)
  shapes = jax.eval_shape(lambda: models.init(layers, key, x))
  return jax.tree.map(lambda p: normal(*p.shape, seed=p.size) / 3, shapes)


def split(function, devices, in_specs, out_specs):
  """Runs a function on rows of what it is given."""
  mesh = meshes.make({"rows": devices})
  return jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  )


def test_a_halo_is_what_the_neighbours_have():
  x = jnp.arange(1, 9).reshape(1, 8, 1, 1)
  ask = functools.partial(halo.exchange, before=2, after=1)
  found = split(ask, 4, IMAGES, IMAGES)(x)
  assert found.ravel().reshape(4, 5).tolist() == [
    [0, 0, 1, 2, 3],
    [1, 2, 3, 4, 5],
    [3, 4, 5, 6, 7],
    [5, 6, 7, 8, 0],
  ]


class One(nn.Module):
  """A module as a layer."""

  module: nn.Module

  @nn.compact
  def __call__(self, x, *, train):
    del train
    return self.module.clone(parent=self, name="local")(x)


CONVOLUTIONS = {
  "five": nn.Conv(4, (5, 3), (1, 2), padding="SAME"),
  "even": nn.Conv(4, (4, 4), 2, padding="SAME"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_rows_is_that_of_the_whole(name, monkeypatch):
  monkeypatch.setattr(halo, "_KNOWN", (One,))
  layers = (One(CONVOLUTIONS[name]),)
  x = normal(2, 8, 8, 3)
  params = drawn(layers, x)
  wanted = jax.jit(lambda: models.apply(layers, params, x)[0])()

  def rows(x):
    return halo.apply(layers, params, x)[0]

  close(split(rows, 4, IMAGES, IMAGES)(x), wanted)


def cross_entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean()


MODELS = {
  "resnet": (
    models.Stem(4, "group", 2),
    models.BasicBlock(8, 2, groups=2),
    models.Head(3),
  ),
  "wide": (
    models.Stem(4),
    models.WideBlock(8, 2, groups=2),
    models.Head(3, "group", 2),
  ),
  "local": halo.locally_connected(3, features=(4, 6)),
}


def problem(name):
  layers = MODELS[name]
  x, labels = normal(4, 8, 6, 3), np.arange(4) % 3
  return layers, drawn(layers, x), x, labels


@pytest.mark.parametrize("name", ["wide", "local"])
def test_a_model_of_rows_has_the_loss_and_gradients_of_the_whole(name):
  layers, params, x, labels = problem(name)

  def whole(params, x):
    return cross_entropy(models.apply(layers, params, x)[0], labels)

  def part(params, x):
    x = halo.rows(x)
    return cross_entropy(halo.apply(layers, params, x)[0], labels)

  specs = halo.partition(params)
  run = split(jax.value_and_grad(part), 4, (specs, P()), (P(), specs))
  close(run(params, x), jax.jit(jax.value_and_grad(whole))(params, x))


def primitives(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from primitives(inner)


def test_locally_connected_layers_send_their_boundary_alone():
  """Two rows up and down in the first layer, one in the second, which halves
  the image, and as many back."""
  layers, params, x, _ = problem("local")
  layers, params = layers[:-1], params[:-1]
  specs = halo.partition(params)

  def part(params, x):
    return jax.vjp(lambda p: halo.apply(layers, p, x)[0].sum(), params)[1](
      meshes.vary(jnp.ones(()), "rows")
    )

  run = split(part, 4, (specs, IMAGES), (specs,))
  sent = [
    name
    for name in primitives(jax.make_jaxpr(run)(params, x).jaxpr)
    if name.startswith(("ppermute", "psum", "all_", "reduce_scatter"))
  ]
  # Backward, the first layer's input needs no gradient: only the second's row.
  assert sent == ["ppermute"] * (2 + 1 + 1)


def quick(layers, x, devices=4):
  params = drawn(layers, x)

  def part(params, x):
    return halo.apply(layers, params, halo.rows(x))[0]

  return split(part, devices, (P(), P()), P())(params, x)


MISTAKES = {
  "rows": (
    lambda: quick(MODELS["resnet"], normal(1, 6, 6, 3)),
    r"shape \(1, 6, 6, 3\) have no rows that can be divided among the 4",
  ),
  "stride": (
    lambda: quick(MODELS["resnet"], normal(1, 12, 6, 3)),
    r"stride 2 and padding \(1, 1\) makes 6 rows of 12, .* as 3 on each",
  ),
  "halo": (
    lambda: quick((halo.Local(2, 7), models.Head(3)), normal(1, 8, 8, 3)),
    "has 2 rows, and its neighbour needs 3",
  ),
  "layer": (
    lambda: quick(models.mlp(3), normal(1, 8, 8, 3)),
    "a Flatten cannot be split by rows; these can: Stem, BasicBlock",
  ),
  "norm": (
    lambda: quick((models.Stem(2, "batch"),), normal(1, 8, 8, 3)),
    "BatchNorm are not kept by rows; use norm='group'",
  ),
  "dilation": (
    lambda: split(
      lambda x: halo.convolve(nn.Conv(2, (3, 3), kernel_dilation=2), x),
      *(4, IMAGES, IMAGES),
    )(normal(1, 8, 8, 3)),
    "without dilation",
  ),
  "features": (
    lambda: halo.locally_connected(3, features=(4, 0)),
    "each of features must be a positive whole number, not 0",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  mistake, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    mistake()
