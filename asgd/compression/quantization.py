"""Random rounding to few levels, unbiased: QSGD and TernGrad."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from asgd import checks
from asgd.compression import leaves
from asgd.compression.codec import Codec, Symbols, power_below

_MOST_LEVELS = 2**15 - 1  # the largest int16


def _round(
  x: jax.Array, scales: jax.Array, levels: int, key: jax.Array
) -> jax.Array:
  """Returns integers, float32[B, size]; their mean over keys is x / scales."""
  ratio = leaves.divide(jnp.abs(x), scales[:, None])
  lower_level = jnp.floor(ratio)
  uniform = jax.random.uniform(key, x.shape, jnp.float32)
  # Round up with the probability of the fraction: the mean is exact. The
  # minimum is for rounding errors of the ratio, and for scales that were
  # clipped to float32, so that ratios are above `levels`.
  level = jnp.minimum(lower_level + (uniform < ratio - lower_level), levels)
  return jnp.where(x < 0, -level, level)


def qsgd(levels: int = 7, *, bucket: int = 512) -> Codec:
  """QSGD: the norm of each bucket, and random levels with the right mean.

    a_i = s |x_i| / ||x||_2,   l_i = floor(a_i) + 1 with probability
                               a_i - floor(a_i), else floor(a_i)
    sent_i = ||x||_2 sign(x_i) l_i / s

  The mean of the sent values is x. For a bucket of n elements
  E ||sent - x||^2 <= min(n / s^2, sqrt(n) / s) ||x||^2. The scale ||x||_2 / s
  is rounded up to so few bits that its products with levels are exact. This
  happens before the draws, so the mean stays right.

  Args:
    levels: s, from 1 to 32767; 7 are four bits with the sign.
    bucket: n, elements that share a norm, in the order of the leaf; the last
      bucket of a leaf may have fewer.

  Returns:
    A Codec, by leaf, unbiased.

  Raises:
    ValueError: for a number out of its range.

  Source:
    Alistarh et al., "QSGD: communication-efficient SGD via gradient
    quantization and encoding", NIPS 2017, arXiv:1610.02132.

  Example:
    The norm is 5, so 3 / 5 and 4 / 5 are levels of s = 5: nothing is random.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.qsgd(5), jnp.array([3.0, -4.0])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(code.code.symbols, codec.decode(code))
    [ 3 -4] [ 3. -4.]
  """
  checks.integer("levels", levels, 1, _MOST_LEVELS)
  checks.integer("bucket", bucket)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Symbols, Any]:
    rows = leaves.blocks(leaves.float32(x), bucket)
    power_of_two = power_below(jnp.abs(rows).max(axis=1))  # no square overflows
    norms = jnp.sqrt(jnp.square(rows / power_of_two[:, None]).sum(axis=1))
    # ||x||_2 / s, so that a level is x / scale: a_i = |x_i| / scale.
    scales = leaves.clip_to_float32(norms / levels * power_of_two)
    scales = leaves.exact_scale(scales, levels)
    signed_levels = _round(rows, scales, levels, key)
    return leaves.symbols_of(signed_levels, x.size, scales, levels), state

  decode = functools.partial(leaves.products, size=bucket)
  # Leaves with fewer elements than a bucket have a smaller error.
  delta = 1 - min(bucket / levels**2, bucket**0.5 / levels)
  # With few levels the bound allows errors larger than the message.
  delta = delta if delta > 0 else None
  return leaves.make_codec(encode, decode, unbiased=True, delta=delta)


def terngrad(sigmas: float | None = 2.5) -> Codec:
  """TernGrad: each leaf as -1, 0 and 1, times its largest magnitude.

    x <- x clipped to +-2.5 sigma,   sigma its standard deviation
    s = max |x_i|,   b_i = 1 with probability |x_i| / s, else 0
    sent_i = s sign(x_i) b_i

  The mean of the sent values is the clipped x; their variance E ||sent - x||^2
  is sum_i |x_i| (s - |x_i|). Each worker has a separate scale s. The paper
  shares the largest one, because its messages are summed on their way.

  Args:
    sigmas: where a leaf is clipped, in its standard deviations; above 0. None:
      no clipping, and the mean is x.

  Returns:
    A Codec, by leaf. It is unbiased without clipping.

  Raises:
    ValueError: for sigmas that are not above 0.

  Source:
    Wen et al., "TernGrad: ternary gradients to reduce communication in
    distributed deep learning", NIPS 2017, arXiv:1705.07878.

  Example:
    An element of the largest magnitude is sent with certainty, a 0 as 0.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.terngrad(), jnp.array([2.0, -2.0, 0.0])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))
    [ 2. -2.  0.]
  """
  if sigmas is not None:
    checks.positive("sigmas", sigmas)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Symbols, Any]:
    row = leaves.float32(x).reshape(1, -1)
    largest = jnp.abs(row).max(axis=1)
    if sigmas is not None:
      power_of_two = power_below(largest)  # no square overflows
      sigma = jnp.std(row / power_of_two[:, None], axis=1)
      # One element, or equal ones, have a deviation of 0: do not clip.
      bound = leaves.clip_to_float32(sigmas * sigma * power_of_two)
      bound = jnp.where(sigma > 0, bound, largest)
      row = jnp.clip(row, -bound[:, None], bound[:, None])
      largest = jnp.minimum(largest, bound)
    scales = leaves.exact_scale(largest, 1)  # s; b_i is one level
    signed_levels = _round(row, scales, 1, key)
    return leaves.symbols_of(signed_levels, x.size, scales, 1), state

  return leaves.make_codec(encode, leaves.scaled, unbiased=sigmas is None)
