"""Memory by formula agrees with what is counted and published."""

import math

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import models
from asgd.models import transformer
from asgd.parallel import memory


def test_the_published_sizes():
  each = memory.state(1, "adam", "mixed")
  assert each == (2, 2, 4, 8, 0)
  for billions, gigabytes in (
    *((0.32, 5.12), (1.5, 24), (17.2, 275.2), (175, 2800)),
  ):
    total = memory.state(billions * 1e9).total
    assert total / memory.GB == pytest.approx(gigabytes, rel=1e-12)


def test_bytes_of_a_parameter():
  def total(*args, **kwargs):
    return memory.state(1, *args, **kwargs).total

  assert total("adam", "float32") == 16
  assert total("momentum", "float32") == 12
  assert total("adafactor", "float32") == 8
  assert total("adam", "mixed_main_gradients") == 18
  n = 8
  found = [total(zero=zero, data=n) for zero in memory.ZERO_STAGES]
  assert found == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
  assert total(versions=4) == 16 + 2 * 3
  assert total("adam", "float32", versions=4) == 16 + 4 * 3
  split = memory.state(1e9, data=4, tensor=2, stages=5, zero=1, versions=2)
  assert split.total == 1e8 * (4 + 12 / 4 + 2)


def gpt(depth=3, width=16, heads=2, context=8, vocabulary=11):
  layers = transformer.gpt(
    vocabulary, depth=depth, width=width, heads=heads, context=context
  )
  sizes = memory.Gpt(depth, width, heads, context, vocabulary)
  params = kit.shapes_of_parameters(layers, (1, context), np.int32)
  return layers, sizes, params


@pytest.mark.parametrize(
  ("name", "tx"),
  [
    ("sgd", optax.sgd(0.1)),
    ("momentum", optax.sgd(0.1, momentum=0.9)),
    ("adagrad", optax.adagrad(0.1)),
    ("adam", optax.adam(0.1)),
  ],
)
def test_optimizers_hold_what_the_table_says(name, tx):
  _, _, params = gpt()
  found = memory.optimizer_bytes(tx, params)
  wanted = memory.state(1, name, "float32").optimizer
  counter = 4 if name == "adam" else 0
  assert found == wanted * models.count(params) + counter


def test_adafactor_is_nothing_beside_a_large_matrix():
  params = {"w": jax.ShapeDtypeStruct((4096, 2048), jnp.float32)}
  held = memory.optimizer_bytes(optax.adafactor(0.1), params)
  assert held < 0.01 * memory.bytes_of(params)


def test_cures_hold_what_their_papers_say():
  n = 8
  nothing = memory.recipe_bytes("asgd", n)
  assert nothing == (0, 0, 0)
  # A copy of what each worker was sent.
  assert memory.recipe_bytes("dc_asgd_c", n) == (0, 4 * n, 0)
  # And a mean square.
  assert memory.recipe_bytes("dc_asgd_a", n) == (4, 4 * n, 0)
  assert memory.recipe_bytes("dc_asgd_a", n, scope="worker").server >= 4 * n
  assert memory.recipe_bytes("gap_aware", n).tickets == 4 * n
  # A velocity of each worker, their sum, and at most one on its way.
  dana = memory.recipe_bytes("dana_zero", n)
  assert 4 * n + 4 <= dana.server <= 4 * n + 8 and not dana.tickets
  assert memory.recipe_bytes("dana_zero", 2 * n).server - dana.server == 4 * n
  assert memory.recipe_bytes("dana_dc", n).total == dana.server + 4 * n
  # DANA-Slim leaves it to the workers.
  assert memory.recipe_bytes("dana_slim", n) == (0, 0, 4)
  assert memory.recipe_bytes("ssgd", n).server == 4  # the sum of who has come


def test_operations_of_a_gpt():
  sizes = memory.Gpt(3, 16, 2, 8, 11)
  b, s, h, v = 5, 8, 16, 11
  lh = 3 * h
  again = 96 * b * s * lh * h * (1 + s / (6 * h) + v / (16 * lh))
  once = 72 * b * s * lh * h * (1 + s / (6 * h) + v / (12 * lh))
  assert memory.gpt_flops(sizes, b, recompute=True) == pytest.approx(again)
  assert memory.gpt_flops(sizes, b) == pytest.approx(once)


def test_products_of_a_gpt_are_those_operations():
  layers, sizes, params = gpt(depth=1)
  tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

  def loss(params, tokens):
    return models.apply(layers, params, tokens)[0].sum()

  made = jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr
  found = 0
  for eqn in made.eqns:
    if eqn.primitive.name == "dot_general":
      ((contracted, _), _) = eqn.params["dimension_numbers"]
      left = eqn.invars[0].aval.shape
      summed = math.prod(left[i] for i in contracted)
      found += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
  assert found == memory.gpt_flops(sizes, 2)


def test_activations_of_a_block():
  sizes = memory.Gpt(24, 1024, 16, 512, 50000)
  b, s, h, a, t = 3, 512, 1024, 16, 4

  def found(*args, **kwargs):
    return memory.activations(sizes, b, *args, **kwargs)

  assert found() == s * b * h * (34 + 5 * a * s / h)
  split = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
  assert found(tensor=t) == split
  assert found(kind="sequence", tensor=t) == found() / t
  assert found(kind="full") == 2 * s * b * h
  # Numbers of 4 bytes, masks of one.
  masks = 2 + a * s / h
  assert found(itemsize=4) == 2 * found() - s * b * h * masks


def test_what_jax_keeps_by_hand():
  # tanh keeps a function of its output, x @ w keeps x; w is counted apart.
  def forward(w, x):
    return jnp.tanh(x @ w)

  w = jax.ShapeDtypeStruct((5, 7), jnp.float32)
  x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  kept = memory.residual_bytes(forward, w, x)
  assert 3 * (5 + 7) * 4 <= kept <= 3 * (5 + 2 * 7) * 4


MISTAKES = {
  "optimizer": (lambda: memory.state(1, "adm"),
    "unknown optimizer 'adm'; did you mean 'adam'"),
  "precision": (lambda: memory.state(precision="fp8"),
    "unknown precision 'fp8'"),
  "zero": (lambda: memory.state(zero=4), "zero must be one of"),
  "heads": (lambda: memory.activations(memory.Gpt(1, 10, 3, 1, 1), 1),
    "heads must divide the width: 3 does not divide 10"),
  "kind": (
    lambda: memory.activations(memory.Gpt(1, 8, 1, 1, 1), 1, kind="fill"),
    "did you mean 'full'"),
  "recipe": (
    lambda: memory.recipe_bytes("dana", 4), "unknown (recipe|algorithm)"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
