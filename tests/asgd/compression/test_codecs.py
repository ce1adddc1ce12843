"""What all codecs have in common, in a table: shapes, dtypes, odd leaves, huge
numbers, and that nothing is lost on the way."""

import functools

import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest

from asgd import compression
from asgd.compression import codec as codec_lib
from asgd.compression import leaves

pytestmark = pytest.mark.usefixtures("float64")

KEY = jax.random.key(3)
# What a codec needs outside of a run.
NEEDED = {"threshold": {"tau": 0.5}, "dgc": {"warm_up": 0}}
# Makes of them what loses nothing but what they keep.
LOSSLESS = {
  "dgc": {"momentum": 0.0},
  "demo": {"decay": 1.0},
  "adaptive_threshold": {"residual_clip": None},
}
ROUNDED = {"powersgd", "demo"}  # products of matrices are not exact


@functools.cache
def make(name, **options):
  return compression.named(name, **NEEDED.get(name, {}), **options)


@functools.cache
def lossless(name):
  """A codec that keeps all that it does not send, and one program of it:
  (state, message, key) -> (what is decoded, state)."""
  codec = make(name, **LOSSLESS.get(name, {}))
  if codec.feedback != codec_lib.OWN:
    codec = codec_lib.error_feedback(codec)

  @jax.jit
  def send(state, tree, key):
    code, state = codec.encode(state, tree, key)
    return codec.decode(code), state

  return codec.init, send


def message(seed=0, scale=1.0):
  """Every kind of leaf that there is; sums and differences of those in eighths
  are exact."""
  matrix = scale * np.tanh(kit.normal(6, 10, seed=seed))
  draw = np.random.default_rng(seed).integers
  return {
    "float32": np.float32(matrix),
    "bfloat16": matrix[0].astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(scale),
    "eighths": scale * draw(-8, 9, (4, 2, 5)) / 8,
    "eighths, a vector": scale * draw(-8, 9, 4) / 8,
  }


def assert_like(tree, like):
  assert jax.tree.structure(tree) == jax.tree.structure(like)
  for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert np.isfinite(np.asarray(a, np.float64)).all()


@pytest.mark.parametrize("name", compression.CODECS)
def test_any_leaf_comes_back_with_its_shape_and_dtype(name):
  init, send = lossless(name)
  tree = message()
  sent, state = send(init(tree), tree, KEY)
  assert_like(sent, tree)
  # A second message takes no other program, and huge numbers stay finite.
  for scale in (1e-30, 3e38):
    sent, after = send(state, message(scale=scale), KEY)
    assert_like(sent, tree)
  assert jax.tree.structure(after) == jax.tree.structure(state)
  nothing = jax.tree.map(np.zeros_like, tree)
  sent, _ = send(init(tree), nothing, KEY)
  kit.same(sent, jax.tree.map(jnp.asarray, nothing))
  assert send._cache_size() == 1


@pytest.mark.parametrize("name", compression.CODECS)
def test_workers_encode_side_by_side(name):
  codec = make(name)
  like = {"matrix": np.ones((6, 10), np.float32), "vector": np.ones(4)}
  one = jax.eval_shape(codec.init, like)
  several = [
    jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tree)
    for tree in (one, like)
  ]
  keys = jax.eval_shape(lambda: jax.random.split(KEY, 3))
  code, state = jax.eval_shape(jax.vmap(codec.encode), *several, keys)
  assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, several[0])
  out = jax.eval_shape(jax.vmap(codec.decode), code)
  assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, several[1])


@pytest.mark.parametrize("name", compression.CODECS)
def test_what_was_sent_and_what_is_kept_add_up_to_the_messages(name):
  init, send = lossless(name)
  state, wanted, total = init(message()), 0, 0
  for i in range(5):
    tree = message(i)
    sent, state = send(state, tree, jax.random.fold_in(KEY, i))
    wanted, total = wanted + eighths(tree), total + eighths(sent)
  if name == "dgc":  # vectors are sent whole
    assert not state.residual["eighths, a vector"].any()
  total += eighths(state.residual)
  kit.close(total, wanted, atol=1e-12 if name in ROUNDED else 0.0)


def eighths(tree):
  """The leaves that are in eighths, in one vector."""
  return np.concatenate([
    np.ravel(x) for key, x in tree.items() if key.startswith("eighths")
  ])


def test_a_codec_says_whether_it_is_unbiased():
  """test_quantization.py shows that they are; with a residual none is."""
  unbiased = {"identity", "qsgd", "random_k"}  # terngrad clips
  assert {x for x in compression.CODECS if make(x).unbiased} == unbiased
  assert compression.terngrad(sigmas=None).unbiased
  for name in unbiased:
    assert not make(name, error_feedback=True).unbiased
    assert not make(name, clip=1.0).unbiased


def test_what_a_codec_cannot_be_is_said_in_a_line():
  for name, options, words in [
    ("treshold", {}, "did you mean 'threshold'? known: adaptive_threshold,"),
    ("threshold", {"tau": 0}, "tau must be a positive finite number, not 0"),
    ("threshold", {}, "needs the argument 'tau'"),
    ("threshold", {"tau": 1e-50}, "tau must be from"),
    ("threshold", {"tau": 1.0, "residual_clip": 0.5}, "must be at least 1"),
    ("threshold", {"tau": "x"}, "a positive finite number, not 'x'"),
    ("adaptive_threshold", {"least": 0.5, "most": 0.1}, "exchange them"),
    ("adaptive_threshold", {"decay": 1}, "decay must be in [0, 1)"),
    ("top_k", {"density": 0}, "in (0, 1], not 0: it is the part of"),
    ("top_k", {"density": 1.5}, "density must be in (0, 1], not 1.5"),
    ("top_k", {"sparsity": 0.9}, "takes no argument 'sparsity'"),
    ("dgc", {"momentum": 1}, "momentum must be in [0, 1), not 1"),
    ("dgc", {"warm_up": -1}, "warm_up must be"),
    ("dgc", {"epoch": 0}, "epoch must be"),
    ("dgc", {"error_feedback": True}, "error_feedback: dgc already has error"),
    ("dgc", {"error_feedback": 1.5}, "must be True, False or None"),
    ("qsgd", {"levels": 0}, "levels must be a positive whole number, not 0"),
    ("qsgd", {"levels": 2**15}, "levels must be at most 32767"),
    ("terngrad", {"sigmas": -1}, "a positive finite number, not -1"),
    ("sign", {"scale": "sum"}, "scale must be one of one, mean, rms"),
    ("powersgd", {"rank": 0}, "rank must be a positive whole number"),
    ("demo", {"decay": 1.5}, "decay must be in [0, 1], not 1.5"),
    ("demo", {"decay": True}, "decay must be in [0, 1], not True"),
    (None, {}, "a codec needs a name, not None: leave the codec out"),
    (3, {}, "unknown codec 3; known: adaptive_threshold"),
    ("int8", {"block": 0}, "block must be a positive whole number"),
    ("bf16", {"entropy_coding": 0}, "must be True or False, not 0"),
    ("top_k", {"clip": 0}, "clip must be a positive finite number, not 0"),
    ("onebit_adam", {"warm_up": 3}, "engine mesh"),
    ("kit:normal", {}, "must return a compression.Codec, not array("),
  ]:
    with pytest.raises(ValueError) as info:
      compression.named(name, **options)
    assert words in str(info.value)
    assert len(str(info.value)) < 600
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", compression.CODECS)
def test_whole_numbers_are_refused(name):
  tree = {"w": np.zeros(3), "table": np.zeros(3, np.int32)}
  if name == "identity":
    return
  with pytest.raises(ValueError, match=r"\['table'\] has dtype int32"):
    make(name).init(tree)


def own(level=1.0):
  """A codec of one's own."""
  return compression.threshold(level)


def test_a_codec_of_ones_own_is_named_by_its_function():
  codec = compression.named(f"{__name__}:own", level=2.0)
  x = jnp.array([3.0])
  code, state = codec.encode(codec.init(x), x, KEY)
  assert (float(codec.decode(code)[0]), float(state.residual[0])) == (2.0, 1.0)


def faulty(fault):
  """Codecs of one's own that go wrong."""
  right = compression.identity()
  return right._replace(**{
    "decode": {"decode": lambda code: (code, code)},
    "shape": {"decode": lambda code: code["w"]},
    "fails": {"decode": lambda code: code.nosuch},
    "zero": {"encode": lambda state, tree, key: 1 // 0},
    "alone": {"encode": lambda state, tree, key: tree},
    "state": {"encode": lambda state, tree, key: (tree, tree)},
    "init": {"init": lambda like: like["nosuch"]},
  }[fault])


@pytest.mark.parametrize(
  ("fault", "words"),
  [
    ("decode", "leaf ['w'] is missing, and should be float32[3]"),
    ("shape", "leaf ['w'] is missing"),
    ("fails", "decode fails (AttributeError: 'dict' object has no attribute"),
    ("zero", "encode fails (ZeroDivisionError: "),
    ("zero", "; encode takes (state, message, key) and returns (code, state)"),
    ("alone", "encode fails (ValueError: not enough values to unpack"),
    ("state", "the state of encode must have the structure"),
    ("init", "init fails (KeyError: 'nosuch'); init takes"),
  ],
)
@pytest.mark.parametrize("feedback", [False, True])
def test_a_faulty_codec_of_ones_own_is_named(fault, words, feedback):
  name = f"{__name__}:faulty"
  codec = compression.named(name, fault=fault, error_feedback=feedback)
  with pytest.raises(ValueError) as info:
    compression.shapes(codec, {"w": np.zeros(3, np.float32)})
  text = str(info.value)
  assert text.startswith(f"codec '{name}': ") and words in text
  assert "\n" not in text and len(text) < 600


def test_a_message_is_clipped_before_the_residual_is_added():
  codec = compression.named("threshold", tau=8.0, clip=5.0)
  x = np.array([30.0, 40.0])
  state = codec.init(x)
  for kept in ([3.0, 4.0], [6.0, 8.0], [9.0 - 8.0, 12.0 - 8.0]):
    code, state = codec.encode(state, x, KEY)
    np.testing.assert_allclose(state.residual, kept, rtol=1e-6)
  np.testing.assert_array_equal(codec.decode(code), [8.0, 8.0])


@pytest.mark.parametrize(
  "values, wanted",
  [
    ([1.5e38, 2e38], [3.0, 4.0]),  # whose squares no float32 holds
    ([3e-30, 4e-30], [3e-30, 4e-30]),
    ([0.0, 0.0], [0.0, 0.0]),
  ],
)
def test_a_norm_is_that_of_any_numbers(values, wanted):
  tree = [np.float32(values), np.zeros((0,), np.float32)]
  clipped = codec_lib.clipped(tree, 5.0)
  np.testing.assert_allclose(clipped[0], np.float32(wanted), rtol=1e-6)
  assert codec_lib.clipped([], 5.0) == []


@pytest.mark.parametrize("levels", [1, 7, 127, 2**15 - 1])
def test_a_scale_times_a_level_is_exact(levels):
  x = np.float32([1e-38, 1e-20, 0.1, 1.0, 12345.678, 3.4e38])
  scales = np.asarray(leaves.exact_scale(x, levels), np.float64)
  assert (scales[1:-1] >= x[1:-1]).all()
  assert (scales[:-1] <= x[:-1] * (1 + levels / 2**22)).all()
  for level in {1, levels // 2, levels}:
    product = scales * level
    assert (np.float64(np.float32(product)) == product).all()
    assert np.isfinite(np.float32(product)).all()
