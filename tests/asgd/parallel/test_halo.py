"""Images that are split by rows: each device computes its part of the whole."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import models
from asgd.parallel import halo, meshes

IMAGES = P(None, "rows")


pytestmark = pytest.mark.usefixtures("float64")


def split(function, devices, in_specs, out_specs):
  """Runs a function on rows of what it is given, or on tiles."""
  shape = devices if isinstance(devices, dict) else {"rows": devices}
  mesh = meshes.make(shape)
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
  monkeypatch.setattr(halo, "_LAYERS", (One,))
  layers = (One(CONVOLUTIONS[name]),)
  x = kit.normal(2, 8, 8, 3)
  params = kit.parameters(layers, x)
  wanted = jax.jit(lambda: models.apply(layers, params, x)[0])()

  def rows(x):
    return halo.apply(layers, params, x)[0]

  kit.close(split(rows, 4, IMAGES, IMAGES)(x), wanted, rtol=1e-12)


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
  x, labels = kit.normal(4, 8, 6, 3), np.arange(4) % 3
  return layers, kit.parameters(layers, x), x, labels


TILES = {"rows": 2, "columns": 2}


def test_a_tile_has_the_corners_of_its_neighbours():
  x = jnp.arange(1, 17).reshape(1, 4, 4, 1)

  def ask(x):
    return halo.exchange(halo.exchange(x, 1, 0), 1, 1, "columns")

  spec = P(None, "rows", "columns")
  found = split(ask, TILES, spec, spec)(x)[0, :, :, 0]
  assert found[3:, 4:].tolist() == [  # of rows 2 and 3, columns 2 and 3
    [6, 7, 8, 0],
    [10, 11, 12, 0],
    [14, 15, 16, 0],
  ]


@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("wide", {"rows": 4}),
    ("wide", TILES),
    ("local", {"columns": 2}),
    ("local", TILES),
  ],
)
def test_a_model_of_tiles_has_the_loss_and_gradients_of_the_whole(name, axes):
  layers = MODELS[name]
  x, labels = kit.normal(4, 8, 4, 3), np.arange(4) % 3
  params = kit.parameters(layers, x)

  def whole(params, x):
    return cross_entropy(models.apply(layers, params, x)[0], labels)

  def part(params, x):
    return cross_entropy(halo.apply(layers, params, halo.tile(x))[0], labels)

  specs = halo.partition(params, tuple(axes))
  run = split(jax.value_and_grad(part), axes, (specs, P()), (P(), specs))
  kit.close(
    run(params, x), jax.jit(jax.value_and_grad(whole))(params, x), rtol=1e-12
  )


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
  program = jax.make_jaxpr(run)(params, x).jaxpr
  sent = [
    name
    for name in (eqn.primitive.name for eqn in kit.equations(program))
    if name.startswith(("ppermute", "psum", "all_", "reduce_scatter"))
  ]
  # Backward, the first layer's input needs no gradient: only the second's row.
  assert sent == ["ppermute"] * (2 + 1 + 1)


def apply_by_rows(layers, x, devices=4):
  params = kit.parameters(layers, x)

  def part(params, x):
    return halo.apply(layers, params, halo.tile(x))[0]

  return split(part, devices, (P(), P()), P())(params, x)


def refused(layers, *shape, devices=4):
  return lambda: apply_by_rows(layers, kit.normal(*shape), devices)


MISTAKES = {
  "rows": (refused(MODELS["resnet"], 1, 6, 6, 3),
    r"shape \(1, 6, 6, 3\) have no rows that can be divided among the 4"),
  "columns": (refused(MODELS["local"], 1, 4, 5, 3, devices=TILES),
    r"shape \(1, 2, 5, 3\) have no columns that can be divided among the 2"),
  "stride": (refused(MODELS["resnet"], 1, 12, 6, 3),
    r"stride 2 and padding \(1, 1\) makes 6 rows of 12, .* as 3 on each"),
  "halo": (refused((halo.Local(2, 7), models.Head(3)), 1, 8, 8, 3),
    "has 2 rows, and its neighbour needs 3"),
  "layer": (refused(models.mlp(3), 1, 8, 8, 3),
    "a Flatten cannot be split into tiles; these can: Stem, BasicBlock"),
  "norm": (refused((models.Stem(2, "batch"),), 1, 8, 8, 3),
    "BatchNorm are not kept by tiles; use norm='group'"),
  "dilation": (
    lambda: split(
      lambda x: halo.convolve(nn.Conv(2, (3, 3), kernel_dilation=2), x),
      *(4, IMAGES, IMAGES),
    )(kit.normal(1, 8, 8, 3)),
    "without dilation"),
  "features": (lambda: halo.locally_connected(3, features=(4, 0)),
    "each of features must be a positive whole number, not 0"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
