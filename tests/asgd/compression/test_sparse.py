"""Thresholds, top-k, random-k and DGC, by cases worked out by hand."""

import jax
import numpy as np
import pytest

from asgd import compression
from asgd.compression import user_codecs

KEY = jax.random.key(0)


def messages(codec, *trees):
  """What a server decodes of some messages, and the last state."""

  @jax.jit
  def send(state, tree):
    code, state = codec.encode(state, tree, KEY)
    return codec.decode(code), state

  state, out = codec.init(trees[0]), []
  for tree in trees:
    sent, state = send(state, tree)
    out.append(sent)
  return out, state


def test_an_element_sends_one_quantum_a_message_whatever_it_has():
  codec = compression.named("threshold", tau=0.5)
  x = np.float32([2.0, -0.5, 0.25])  # -0.5 is not beyond -tau
  sent, state = messages(codec, x, 0 * x, 0 * x, 0 * x)
  np.testing.assert_array_equal(
    sent, np.float32([[0.5, 0, 0], [0.5, 0, 0], [0.5, 0, 0], [0, 0, 0]])
  )
  np.testing.assert_array_equal(state.residual, np.float32([0.5, -0.5, 0.25]))


def test_one_threshold_is_that_of_all_leaves():
  tree = {"large": np.float32([8.0]), "small": np.float32([0.5, 0.75])}
  (sent,), _ = messages(compression.threshold(1.0), tree)
  assert (float(sent["large"][0]), sent["small"].any()) == (1.0, False)


def test_a_residual_is_clipped_to_some_quanta_now_and_then():
  codec = compression.named("threshold", tau=1.0, residual_clip=2, clip_every=2)
  x = np.float32([9.0, -9.0, 1.0])
  _, state = messages(codec, x)
  np.testing.assert_array_equal(state.residual, np.float32([8.0, -8.0, 1.0]))
  _, state = messages(codec, x, 0 * x)  # 7 and -7 are left
  np.testing.assert_array_equal(state.residual, np.float32([2.0, -2.0, 1.0]))


@pytest.mark.parametrize(
  "most, sent, factor",
  [
    (1e-2, 0, 0.5),  # too few: tau falls
    (1e-2, 1, 1.0),  # 1 of 400 is between 1e-4 and 1e-2
    (1e-2, 5, 2.0),  # too many: it grows
    (0.05, 26, 2.0),  # more than a 16th, taken for a 16th
    (0.07, 400, 1.0),  # all of them: a 16th is below 0.07
    (0.07, 26, 1.0),
  ],
)
def test_tau_follows_the_density_of_all_leaves(most, sent, factor):
  codec = compression.adaptive_threshold(0.5, most=most, decay=0.5)
  x = np.zeros(400, np.float32)
  x[:sent] = 1.0
  tree = {"some": x[:40], "others": x[40:]}
  _, state = messages(codec, tree)
  assert float(state.tau) == 0.5
  np.testing.assert_allclose(state.density, sent / 400, rtol=1e-6)
  _, state = messages(codec, tree, tree)
  assert float(state.tau) == 0.5 * factor


def test_the_default_decay_halves_a_threshold_in_20_messages():
  codec = compression.adaptive_threshold()
  zeros = np.zeros(8, np.float32)
  encode, state = jax.jit(codec.encode), codec.init(zeros)
  for _ in range(21):
    _, state = encode(state, zeros, KEY)
  np.testing.assert_allclose(state.tau, 0.5e-4, rtol=1e-5)


def test_deeplearning4j_clips_residuals_to_5_tau_every_5_messages():
  codec = compression.named("adaptive_threshold", tau=1.0, most=1.0)
  x = np.float32([100.0, -100.0, 0.5])
  zeros = 0 * x
  _, state = messages(codec, x, *[zeros] * 3)
  np.testing.assert_array_equal(state.residual, np.float32([96, -96, 0.5]))
  _, state = messages(codec, x, *[zeros] * 4)
  assert float(state.inner.tau) == 1.0
  np.testing.assert_array_equal(state.residual, np.float32([5, -5, 0.5]))
  codec = compression.named("adaptive_threshold", tau=1.0, residual_clip=None)
  _, state = messages(codec, x, *[zeros] * 4)
  assert state.residual[0] > 5 * state.inner.tau


def test_the_largest_of_each_leaf_are_sent_and_all_their_equals():
  tree = {
    "a": np.float32([1, -9, 3, 4, 0, -2, 5, 6]),
    "tiny": np.float32([1e-30]),
    "equal": np.float32([2, -2, 2, 2]),
    "few": np.float32([0, 0, 7, 0, 0, 0, 0, 0]),
  }
  (sent,), _ = messages(compression.top_k(0.25), tree)
  np.testing.assert_array_equal(
    sent["a"], np.float32([0, -9, 0, 0, 0, 0, 0, 6])
  )
  for name in ("tiny", "equal", "few"):
    np.testing.assert_array_equal(sent[name], tree[name])


def test_random_elements_are_so_many_and_other_ones_each_time():
  x = np.arange(1, 101, dtype=np.float32)
  codec = compression.random_k(0.07)
  chosen = set()
  encode = jax.jit(codec.encode)
  for i in range(3):
    code, _ = encode(codec.init(x), x, jax.random.key(i))
    sent = np.asarray(codec.decode(code))
    places = np.flatnonzero(sent)
    np.testing.assert_allclose(sent[places], x[places] * (100 / 7), rtol=1e-6)
    assert places.size == 7
    chosen.add(tuple(places))
  assert len(chosen) == 3


def test_dgc_sends_velocities_and_forgets_what_it_sent():
  """Nesterov's form, gamma 0.5; the vector has plain momentum."""
  codec = compression.dgc(0.5, momentum=0.5, nesterov=True, warm_up=0)
  tree = {"w": np.float32([[4.0, 1.0]]), "b": np.float32([2.0])}
  (first, second), state = messages(codec, tree, tree)
  # u = 0.5 g, v = u + g = [6, 1.5]; then u = [2, 0.75], v = [6, 1.5 + 1.75].
  np.testing.assert_array_equal(first["w"], np.float32([[6.0, 0.0]]))
  np.testing.assert_array_equal(second["w"], np.float32([[6.0, 0.0]]))
  np.testing.assert_array_equal(state.velocity["w"], np.float32([[0, 0.75]]))
  np.testing.assert_array_equal(state.residual["w"], np.float32([[0, 3.25]]))
  # u = 1, 1 + 2 is sent; then u = 0.5 (1 + 2).
  assert (float(first["b"][0]), float(second["b"][0])) == (3.0, 3.5)
  assert not state.residual["b"].any()


def test_lin_2018_clips_to_a_share_of_the_runs_workers():
  codec = compression.dgc(1.0, momentum=0.0, clip_norm=10.0, warm_up=0)
  codec = compression.fitted(codec, workers=4, epoch=None)
  tree = {"w": np.float32([[30.0, 0.0]]), "b": np.float32([40.0])}
  (sent,), _ = messages(codec, tree)  # to 10 / sqrt(4)
  np.testing.assert_allclose(sent["w"], [[3.0, 0.0]], rtol=1e-6)
  np.testing.assert_allclose(sent["b"], [4.0], rtol=1e-6)


@pytest.mark.parametrize(
  "options",
  [{"warm_up": 4}, {}, {"warm_up": 1, "epoch": 8}],
  ids=["epochs", "default", "messages"],
)
def test_lin_2018_becomes_sparse_over_4_epochs(options):
  """75 %, 93.75 %, 98.4375 % and 99.6 % are an epoch each, of 2 messages."""
  codec = compression.dgc(0.001, momentum=0.0, **options)
  codec = compression.fitted(codec, workers=3, epoch=2)
  x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
  sent, _ = messages(codec, *[x] * 10)
  counts = [int(np.count_nonzero(each)) for each in sent]
  assert counts == [256, 256, 64, 64, 16, 16, 4, 4, 1, 1]


def test_dgc_is_never_sparser_than_its_density():
  codec = compression.dgc(0.01, momentum=0.0, warm_up=1, epoch=4)
  x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
  sent, _ = messages(codec, *[x] * 5)
  counts = [int(np.count_nonzero(each)) for each in sent]
  assert counts == [64, 16, 4, 3, 3]  # 1/256 is below 0.01


@pytest.mark.parametrize(
  "options, epoch, words",
  [
    ({"warm_up": 0, "clip_norm": 1.0}, 9, "dgc needs workers=, the number"),
    ({}, 9, "dgc needs epoch=, the messages of a worker"),
    ({}, None, "dgc needs epoch=, the messages of a worker"),
  ],
)
def test_dgc_says_what_it_has_to_know_of_a_run(options, epoch, words):
  codec, x = compression.dgc(**options), np.ones((4, 4), np.float32)
  if epoch is None:  # data without an end
    codec = compression.fitted(codec, workers=2, epoch=None)
  with pytest.raises(ValueError, match=words):
    messages(codec, x)


def test_what_is_composed_of_a_codec_is_fitted_as_it_is():
  plain = compression.dgc(0.1, clip_norm=1.0, workers=4, epoch=5)
  x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
  for compose in (
    lambda codec: compression.clip(codec, 2.0),
    compression.in_words,
    lambda codec: user_codecs.checked(codec, "'mine'"),
  ):
    codec = compose(compression.dgc(0.1, clip_norm=1.0))
    codec = compression.fitted(codec, workers=4, epoch=5)
    sent, _ = messages(codec, x, x)
    wanted, _ = messages(compose(plain), x, x)
    np.testing.assert_array_equal(sent, wanted)
