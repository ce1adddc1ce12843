"""A GPT in layers: shapes, causality, dropout, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

from asgd import models, problems
from asgd.models import transformer

pytestmark = pytest.mark.slow

TOKENS, CONTEXT = 11, 6
EXAMPLE = jax.ShapeDtypeStruct((1, CONTEXT), jnp.int32)


def make(**options):
  options = {"depth": 2, "width": 8, "heads": 2, "context": CONTEXT, **options}
  layers = transformer.gpt(TOKENS, **options)
  params = kit.parameters(layers, EXAMPLE)
  return layers, jax.tree.map(np.float32, params)


def tokens(seed=0, length=CONTEXT):
  rng = np.random.default_rng(seed)
  return rng.integers(0, TOKENS, (3, length)).astype(np.int32)


@partial(jax.jit, static_argnums=0, static_argnames=("train", "first"))
def run(layers, params, x, **options):
  return models.apply(layers, params, x, **options)[0]


def logits(layers, params, x, **options):
  return np.asarray(run(layers, params, x, **options))


def test_layers_and_shapes():
  layers, params = make(depth=3)
  kinds = [type(layer).__name__ for layer in layers]
  assert kinds == ["Embed", "Block", "Block", "Block", "Unembed"]
  out = jax.eval_shape(partial(run, layers), params, tokens())
  assert out.shape == (3, CONTEXT, TOKENS)
  # A block: two norms, four maps of attention, two of the MLP.
  width = 8
  block = 4 * width + 4 * (width * width + width) + 8 * width**2 + 5 * width
  assert models.count(params[1]) == block
  assert models.count(params[0]) == (TOKENS + CONTEXT) * width
  assert models.count(params[-1]) == TOKENS * width + 2 * width


def test_the_same_tokens_at_another_position_are_another_matter():
  layers, params = make()
  same = logits(layers, params, np.zeros((3, CONTEXT), np.int32))
  assert np.abs(np.diff(same[0], axis=0)).max() > 0


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one():
  layers, params = make()
  x = tokens()
  whole = logits(layers, params, x)
  np.testing.assert_allclose(
    logits(layers, params, x[:, :4]), whole[:, :4], rtol=0, atol=1e-6
  )


def test_at_first_all_tokens_are_as_likely():
  layers, _ = make()
  params = models.init(layers, jax.random.key(0), EXAMPLE)
  losses = -jax.nn.log_softmax(logits(layers, params, tokens()))
  assert abs(float(losses.mean()) - np.log(TOKENS)) < 0.1


MISTAKES = {
  "classes": ({"classes": 0}, "classes must be a positive whole number, not 0"),
  "depth": ({"depth": 1.5}, "depth must be a positive whole number, not 1.5"),
  "width": ({"width": True}, "width must be a positive whole number, not True"),
  "heads": ({"heads": 3}, "3 does not divide 128"),
  "context": ({"context": -1}, "context must be a positive whole number"),
  "deep": ({"depth": 10**9}, "depth must be at most 200, not 1000000000"),
  "wide": ({"width": 10**9}, "width must be at most 1000000, not 1000000000"),
  "many": ({"heads": 10**9}, "heads must be at most 1000000, not 1000000000"),
  "long": ({"context": 10**9}, "context must be at most 1000000, not"),
  "text": ({"dropout": "1"}, r"dropout must be in \[0, 1\), not '1'"),
  "dropout": ({"dropout": 1}, r"dropout must be in \[0, 1\), not 1"),
}


test_a_mistake_is_refused = kit.refuses(
  MISTAKES, lambda options: transformer.gpt(**{"classes": TOKENS, **options})
)


def test_more_positions_than_the_context_are_refused():
  layers, params = make()
  with pytest.raises(ValueError, match="7 positions .* context of 6"):
    logits(layers, params, tokens(length=CONTEXT + 1))


def test_models_know_it_by_its_name():
  assert models.build("gpt", 7, depth=1) == transformer.gpt(7, depth=1)
  with pytest.raises(ValueError, match="did you mean 'depth'"):
    models.build("gpt", 7, deph=1)
  assert problems.Pieces._fields[0] == "layers"
