"""What every model of sequences promises: the GPT and the LSTM."""

import functools

import jax
import kit
import numpy as np
import pytest

from asgd import models

pytestmark = pytest.mark.slow

TOKENS, CONTEXT = 11, 6
X = np.random.default_rng(0).integers(0, TOKENS, (3, CONTEXT), np.int32)
OPTIONS = {
  "gpt": {"width": 8, "heads": 2, "context": CONTEXT},
  "lstm": {"width": 5},
}
of_all = pytest.mark.parametrize("name", OPTIONS)


def make(name, **options):
  layers = models.build(name, TOKENS, **OPTIONS[name], **options)
  params = kit.parameters(layers, jax.ShapeDtypeStruct((1, CONTEXT), X.dtype))
  return layers, jax.tree.map(np.float32, params)


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=("train", "first")
)
def logits(layers, params, x, **options):
  return models.apply(layers, params, x, **options)[0]


@of_all
def test_a_token_changes_nothing_before_it(name):
  layers, params = make(name, depth=2)
  before = logits(layers, params, X)
  for t in range(CONTEXT):
    changed = X.copy()
    changed[:, t] = (changed[:, t] + 1) % TOKENS
    after = logits(layers, params, changed)
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    differs = np.abs(after[:, t:] - before[:, t:]).max((0, 2))
    assert (differs > 0).all(), t


@of_all
def test_slices_draw_what_the_whole_draws(name):
  layers, params = make(name, depth=2, dropout=0.5)
  draw = functools.partial(logits, train=True, key=jax.random.key(1))
  whole, y = draw(layers, params, X), X
  for start, end in ((0, 2), (2, 4)):
    y = draw(layers[start:end], params[start:end], y, first=start)
  np.testing.assert_allclose(y, whole, rtol=0, atol=1e-5)
  assert (draw(layers, params, X) == whole).all()
  other = draw(layers, params, X, key=jax.random.key(2))
  assert np.abs(other - whole).max() > 0.01
  # Nothing is dropped.
  assert np.abs(logits(layers, params, X) - whole).max() > 0.01


@of_all
def test_it_computes_in_the_dtype_of_its_parameters(name, float64):
  layers, params = make(name)
  run = functools.partial(logits, layers)
  assert jax.eval_shape(run, kit.double(params), X).dtype == np.float64
