"""A stage's compiled parts are those of jax.vjp, and nothing is done twice."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from kit import normal

from asgd import models
from asgd import stages as stage_lib

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures("float64"),
]


class Attention(nn.Module):
  """A transformer block: einsum inside, and functions that are jitted."""

  @nn.compact
  def __call__(self, x, train=False):
    h = nn.LayerNorm()(x)
    h = nn.MultiHeadDotProductAttention(num_heads=2)(h)
    x = x + h
    h = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
    return x + nn.Dense(x.shape[-1])(h)


def dense(params, x, extra):
  del extra
  return jnp.tanh(x @ params["w"]) @ params["v"], ()


@functools.cache
def case(name):
  """Returns fn, params, x, extra: the same fn each time, compiled once."""
  if name == "dense":
    params = {"w": normal(5, 7), "v": normal(7, 3)}
    return dense, params, normal(4, 5), ()
  if name == "attention":
    layer = (Attention(),)
    x = normal(2, 4, 8)
    params = kit.parameters(layer, x)
    return lambda p, x, e: models.apply(layer, p, x, train=True), params, x, ()
  if name == "loss":
    layers = models.cnn(4, features=(3,), hidden=8)
    x = normal(6, 8, 8, 1)
    params = kit.parameters(layers, x)

    def loss(params, x, labels):
      logits, _ = models.apply(layers, params, x, train=True)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return losses.mean(), ()

    return loss, params, x, np.arange(6) % 4
  if name == "tree":  # a mask goes along, and has no gradient

    def masked(params, x, extra):
      h = jnp.where(x["mask"], x["h"] @ params, 0.0)
      return {"h": h * extra, "mask": x["mask"], "skip": x["h"]}, ()

    x = {"h": normal(4, 3), "mask": np.eye(4, 3) > 0}
    return masked, normal(3, 3), x, np.float64(2.0)
  raise AssertionError(name)


CASES = ("dense", "attention", "loss", "tree")


@functools.partial(jax.jit, static_argnums=0)
def vjp_reference(fn, params, x, extra, gy):
  """y and the gradients, from jax.vjp."""
  leaves, tree = jax.tree.flatten(x)
  at = [i for i, v in enumerate(leaves) if np.issubdtype(v.dtype, np.inexact)]

  def of(params, moving):
    given = list(leaves)
    for i, value in zip(at, moving, strict=True):
      given[i] = value
    y = fn(params, jax.tree.unflatten(tree, given), extra)[0]
    return stage_lib.floating(y), y

  _, vjp, y = jax.vjp(of, params, [leaves[i] for i in at], has_aux=True)
  return y, *vjp(gy)


close = functools.partial(kit.close, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_all_parts_are_those_of_vjp_and_a_forward_keeps_no_weights(name):
  fn, params, x, extra = case(name)
  stage = stage_lib.compile_stage(fn, params, x, extra)
  gy = [
    normal(*y.shape, seed=i) for i, y in enumerate(stage_lib.floating(stage.y))
  ]
  y, gradient, gx = vjp_reference(fn, params, x, extra, gy)
  found, _, residuals = stage.forward(params, x, extra)
  close(found, y)
  close(stage.residuals(params, x, extra), residuals)
  close(stage.backward(params, residuals, gy), (gradient, gx))
  close(stage.recompute(params, x, extra, gy), (gradient, gx))
  found_gx, half = stage.input(params, residuals, gy)
  close(found_gx, gx)
  close(stage.weight(params, residuals, half), gradient)
  weights = jax.tree.leaves(params)
  assert not {id(leaf) for leaf in weights} & {id(leaf) for leaf in residuals}
  nbytes = sum(np.asarray(leaf).nbytes for leaf in residuals)
  assert stage.residual_bytes == nbytes
  if name == "dense":  # x, tanh and its derivative
    assert not {x.shape for x in weights} & {x.shape for x in residuals}


def flops(function, *args):
  return function.lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", ["dense", "attention", "loss"])
def test_two_halves_cost_no_more_than_the_whole(name):
  fn, params, x, extra = case(name)
  stage = stage_lib.compile_stage(fn, params, x, extra)
  y, _, residuals = stage.forward(params, x, extra)
  gy = [np.ones(y.shape)]
  _, half = stage.input(params, residuals, gy)
  whole = flops(stage.backward, params, residuals, gy)
  first = flops(stage.input, params, residuals, gy)
  second = flops(stage.weight, params, residuals, half)
  assert first + second <= 1.02 * whole
  assert min(first, second) >= 0.2 * whole  # each has its share


def test_a_backward_reads_the_weights_that_it_is_given():
  """Activations of the forward, weights of another time: PipeMare's gradient,
  written out."""
  fn, params, x, extra = case("dense")
  stage = stage_lib.compile_stage(fn, params, x, extra)
  _, _, residuals = stage.forward(params, x, extra)
  later = jax.tree.map(lambda w: w + 0.1, params)
  g = normal(4, 3, seed=5)
  gradient, (gx,) = stage.backward(later, residuals, [g])
  h = np.tanh(x @ params["w"])
  gh = g @ later["v"].T * (1 - h**2)
  close(gradient, {"w": x.T @ gh, "v": h.T @ g})
  close(gx, gh @ later["w"].T)


def test_what_follows_from_the_weights_alone_is_not_kept():
  def scaled(params, x, extra):
    del extra
    w = params / jnp.linalg.norm(params)
    return jnp.tanh(x @ w) @ w.T, ()

  params, x = normal(5, 5), normal(2, 5)
  stage = stage_lib.compile_stage(scaled, params, x, ())
  _, _, residuals = stage.forward(params, x, ())
  assert {leaf.shape for leaf in residuals} == {(2, 5)}
  gy = [np.ones((2, 5))]
  _, *wanted = vjp_reference(scaled, params, x, (), gy)
  close(stage.backward(params, residuals, gy), tuple(wanted))


def test_microbatches_are_alike():
  """A compiled program would compute something else from another tree."""
  stage = stage_lib.compile_stage(
    lambda p, x, e: (p * (e["a"] - e["b"]).sum(), ()),
    *(normal(2), (), {"a": normal(3), "b": normal(3)}),
  )
  for extra in ({"a": normal(2), "b": normal(2)}, {"A": normal(3), "b": 0.0}):
    with pytest.raises(ValueError, match="extra has shapes .* alike"):
      stage.forward(normal(2), (), extra)


def test_effects_are_of_the_forward():
  called = []

  def noisy(params, x, extra):
    del extra
    jax.debug.callback(lambda: called.append(1))
    return jnp.sin(x @ params), ()

  params, x = normal(3, 3), normal(2, 3)
  stage = stage_lib.compile_stage(noisy, params, x, ())
  y, _, residuals = stage.forward(params, x, ())
  _, half = stage.input(params, residuals, [y])
  jax.block_until_ready(stage.weight(params, residuals, half))
  jax.effects_barrier()
  assert called == [1]


def test_a_stage_without_weights_is_refused():
  with pytest.raises(ValueError, match="give its layers to the stage before"):
    stage_lib.compile_stage(lambda p, x, e: (x, ()), {}, normal(2), ())
