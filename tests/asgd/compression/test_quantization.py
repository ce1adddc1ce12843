"""Few levels: their means and variances, and tiny cases by hand."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

import asgd
from asgd import compression
from asgd.compression import signs

KEY = jax.random.key(0)
DRAWS = 4000


def encoded(codec, x):
  @jax.jit
  def both(x):
    code, _ = codec.encode(codec.init(x), x, KEY)
    return code.code, codec.decode(code)

  code, sent = both(x)
  return code, np.asarray(sent)


def draws(codec, x):
  """What is decoded of many codes of one message, float64[DRAWS, ...]."""

  def draw(key):
    return codec.decode(codec.encode(codec.init(x), x, key)[0])

  sent = jax.jit(jax.vmap(draw))(jax.random.split(KEY, DRAWS))
  return np.asarray(sent, np.float64)


def assert_mean(sent, x):
  """Within 5 standard errors."""
  error = np.abs(sent.mean(0) - x)
  assert (error <= 5 * sent.std(0) / DRAWS**0.5 + 1e-6).all()


def qsgd_bound(x, levels, bucket):
  rows = x.reshape(-1, bucket)
  factor = min(bucket / levels**2, bucket**0.5 / levels)
  return factor * (rows**2).sum()


@pytest.mark.parametrize("levels", [1, 4])
def test_qsgd_has_the_mean_and_the_variance_of_the_paper(levels):
  x = np.float32(kit.normal(2, 16))
  codec = compression.qsgd(levels, bucket=16)
  sent = draws(codec, x)
  assert_mean(sent, x)
  variance = ((sent - x) ** 2).sum((1, 2)).mean()
  scale = np.linalg.norm(x, axis=1, keepdims=True) / levels
  part = np.abs(x) / scale % 1
  expected = (scale**2 * part * (1 - part)).sum()
  np.testing.assert_allclose(variance, expected, rtol=0.05)
  assert expected <= qsgd_bound(x, levels, 16)
  assert (np.abs(encoded(codec, x)[0].symbols) <= levels).all()


def test_terngrad_has_the_mean_and_the_variance_of_the_paper():
  x = np.float32(kit.normal(30))
  sent = draws(compression.terngrad(sigmas=None), x)
  assert_mean(sent, x)
  size, largest = np.abs(x), np.abs(x).max()
  assert set(np.unique(np.abs(sent))) == {0.0, np.float64(np.abs(sent).max())}
  np.testing.assert_allclose(np.abs(sent).max(), largest, rtol=1e-6)
  variance = ((sent - x) ** 2).sum(1).mean()
  np.testing.assert_allclose(
    variance, (size * (largest - size)).sum(), rtol=0.05
  )


def test_terngrad_clips_at_standard_deviations():
  x = np.float32([10.0, *[0.5, -0.5] * 20])
  code, sent = encoded(compression.terngrad(2.5), x)
  np.testing.assert_allclose(code.scales, [2.5 * x.std()], rtol=1e-5)
  assert code.symbols[0] == 1
  assert_mean(
    draws(compression.terngrad(2.5), x), np.minimum(x, 2.5 * x.std())
  )


def test_random_k_has_the_mean_and_the_variance_of_the_paper():
  x = np.float32(kit.normal(20))
  sent = draws(compression.random_k(0.25), x)
  assert_mean(sent, x)
  variance = ((sent - x) ** 2).sum(1).mean()
  np.testing.assert_allclose(variance, 3 * (x**2).sum(), rtol=0.05)


def test_a_column_has_the_means_of_its_signs():
  """A column without numbers below 0 has a 0 for them; 0 counts as above."""
  x = np.float32([[1, -2, 5], [3, 0, 5], [-4, 0, 5], [-8, 6, 5]])
  code, sent = encoded(compression.onebit(), x)
  np.testing.assert_array_equal(code.scales, np.float32([2, 2, 5, -6, -2, 0]))
  np.testing.assert_array_equal(
    sent, np.float32([[2, -2, 5], [2, 2, 5], [-6, 2, 5], [-6, 2, 5]])
  )
  code, sent = encoded(compression.onebit(), np.float32([1, -2, 3]))
  np.testing.assert_array_equal(sent, np.float32([2, -2, 2]))
  wide = np.tile(x, 20)  # rows are added up one after the other
  code, sent = encoded(compression.onebit(), wide)
  np.testing.assert_array_equal(
    code.scales.reshape(2, 20, 3)[:, 7], np.float32([[2, 2, 5], [-6, -2, 0]])
  )
  np.testing.assert_array_equal(sent > 0, wide >= 0)
  kernel = np.float32(kit.normal(2, 3, 4, 5))  # of a convolution: 5 columns
  assert encoded(compression.onebit(), kernel)[0].scales.shape == (10,)


@pytest.mark.parametrize("name", signs.SCALES)
def test_signs_of_huge_numbers_have_their_size(name):
  x = np.float32([3e38, -3e38, 3e38, 0.0])
  sent = encoded(compression.sign(name), x)[1]
  size = {"one": 1.0, "mean": 0.75 * 3e38, "rms": 0.75**0.5 * 3e38}[name]
  np.testing.assert_allclose(sent, size * np.sign(x), rtol=1e-6)


def test_four_bit_floats_are_the_nearest_ones():
  largest = 1.3  # the nearest power of 2 is 1
  x = np.float32([largest, *np.linspace(-1.3, 1.3, 4001), 0.0, 1e-9])
  powers = 2.0 ** np.arange(-6, 1)
  numbers = np.concatenate([-powers, [0.0], powers])
  sent = encoded(compression.e3m0(block=x.size), x)[1]
  assert set(np.unique(sent)) == set(numbers)
  error = np.abs(numbers - np.float64(x)[:, None]).min(1)
  np.testing.assert_allclose(np.abs(sent - x), error, atol=1e-7)


def test_a_block_has_the_scale_of_its_largest():
  x = np.float32([127.0, -1.0, 0.4, 1270.0, 4.0, 6.0, 0.0])
  code, sent = encoded(compression.int8(block=3), x)
  np.testing.assert_array_equal(code.symbols, [127, -1, 0, 127, 0, 1, 0])
  np.testing.assert_array_equal(code.scales, np.float32([1.0, 10.0, 0.0]))
  np.testing.assert_array_equal(sent, np.float32([127, -1, 0, 1270, 0, 10, 0]))


def test_a_server_of_signs_goes_where_most_workers_want():
  """Three of them vote; an even vote moves nothing."""
  recipe = asgd.ssgd(0.5, 3, optimizer=optax.sign_sgd)
  server, codec = recipe.server(), compression.sign()
  state = server.init(jnp.zeros(3))
  ticket = server.send(state, jnp.int32(0))
  for gradient in ([9.0, -1.0, 2.0], [-0.1, -5.0, 0.0], [-0.1, 7.0, -3.0]):
    message = encoded(codec, np.float32(gradient))[1]
    state, _ = server.receive(state, ticket, message)
  np.testing.assert_array_equal(state.params, np.float32([0.5, 0.5, 0.0]))
