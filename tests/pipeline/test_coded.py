"""Codes between stages: by hand, without an error, and in fewer bytes."""

import jax
import jax.numpy as jnp
import kit
import pytest

from asgd import compression, stages
from asgd.pipeline import coded


def test_a_stage_decodes_what_it_gets_and_encodes_what_it_sends():
  """y = 2 x of x = 5, rounded down to multiples of 4. The gradient of x = 5 is
  that of the code: gx = 2 gy, and the gradient of the weight is x gy."""
  codec = compression.identity()._replace(
    encode=lambda state, tree, key: (
      jax.tree.map(lambda x: 4 * jnp.floor(x / 4), tree),
      state,
    )
  )
  weight, x = jnp.float32(2.0), jnp.float32(5.0)
  plain = stages.compile_stage(lambda w, x, e: (w * x, ()), weight, x, ())
  both = coded.with_codec(plain, codec, x, last=False)
  is_finite = jnp.bool_(True)
  y, _, residuals = both.forward(weight, [[is_finite, x], []], ())
  assert y == [[True, 8.0], []]
  gradient, gx = both.backward(weight, residuals, [is_finite, jnp.float32(7.0)])
  assert (gradient, gx) == (35.0, [True, 12.0])
  halves = both.input(weight, residuals, [is_finite, jnp.float32(7.0)])
  assert halves[0] == [True, 12.0]
  # The last stage's output is the loss, and the first has no input.
  end = coded.with_codec(plain, codec, x, last=True)
  assert end.forward(weight, [[is_finite, x], []], ())[0] == 10.0


@pytest.mark.parametrize("codec", ["sign", "qsgd", "terngrad", "int8", "fp16"])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_not_finite_at_the_next_stage(codec, value):
  x = jnp.ones(4)
  plain = stages.compile_stage(lambda w, x, e: ((w * x).sum(), ()), x, x, ())
  codec = compression.as_codec(codec)
  encode, _ = coded._wire(codec, [x])
  stage = coded.with_codec(plain, codec, x, last=True)
  assert jnp.isfinite(stage.forward(x, [encode([x]), []], ())[0])
  code = [encode([x.at[1].set(value)]), []]
  assert not jnp.isfinite(stage.forward(x, code, ())[0])


@pytest.mark.parametrize(
  ("codec", "share"), [("bf16", 1.99), ({"name": "qsgd", "levels": 127}, 3.5)]
)
def test_entries_between_stages_are_small(codec, share):
  x = jnp.ones((64, 32))
  plain = stages.compile_stage(lambda w, x, e: (w * x, ()), x[0], x, ())
  codec = compression.as_codec(codec)
  y = coded.with_codec(plain, codec, (), last=False).forward(x[0], x, ())[0]
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(y)) <= x.nbytes / share


def params(compress=None, **pipeline):
  pipeline = {"stages": 2, "microbatches": 4, **pipeline}
  exp = kit.tiny(
    engine="pipeline",
    workers=(1,),
    pipeline=pipeline,
    compress=compress,
  )
  return kit.train(exp).params


@pytest.mark.parametrize(
  "options",
  [{}, {"schedule": "one_f_one_b", "recompute": True}, {"schedule": "zb_h1"}],
)
def test_a_codec_without_an_error_changes_no_pipeline(options):
  expected = params(**options)
  kit.close(params("identity", **options), expected, rtol=1e-5, atol=1e-6)
  # Eight bits of mantissa move the parameters a little.
  rounded = params("bf16", **options)
  kit.close(rounded, expected, rtol=0.05, atol=0.01)
  pairs = zip(jax.tree.leaves(rounded), jax.tree.leaves(expected), strict=True)
  assert any((x != y).any() for x, y in pairs)


test_codecs_with_a_memory_are_refused = kit.refuses(
  [("top_k", "^config.compress: stages send activations of different")],
  lambda name: kit.tiny(engine="pipeline", workers=(1,), compress=name),
)
