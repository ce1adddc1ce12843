"""Codecs that send the largest elements of each leaf, or random ones.

The largest are selected in each leaf, not in the message: a global threshold
would leave out layers with small gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks
from asgd.compression import leaves, selection
from asgd.compression.codec import NEEDED, Codec, Values


def check_density(density: float) -> None:
  """Raises ValueError for a density that is not in (0, 1]."""
  remedy = ": it is the part of the elements that is sent, such as 0.001"
  checks.portion("density", density, remedy)


def count_of(density: float, size: int) -> int:
  """Returns how many of `size` elements to send at a density, at least 1."""
  return min(max(round(density * size), 1), size)


def largest(x: jax.Array, k: Any) -> jax.Array:
  """Returns bool[L], a mask of the k largest elements of float[L] by magnitude.
  Elements as large as the k-th are included, so there may be more than k."""
  magnitudes = selection.magnitudes(x)
  return magnitudes >= selection.threshold(magnitudes, k)


def masked(x: jax.Array, mask: jax.Array) -> Values:
  """Returns the elements in a mask as Values, with 0 for all others."""
  return Values(jnp.where(mask, x, jnp.zeros([], x.dtype)))


def decode(leaf: leaves.Leaf) -> jax.Array:
  """Returns the elements of a leaf, float[L]."""
  return leaf.code.values


def top_k(density: float = 0.001) -> Codec:
  """The k largest elements of each leaf by magnitude, unchanged.

    sent_i = r_i if |r_i| is among the k largest of its leaf, else 0
    k = density L, at least 1

  All elements as large as the k-th are sent, so the result does not depend on
  their order.

  Args:
    density: the share of each leaf's elements that is sent, in (0, 1].

  Returns:
    A Codec, by leaf. It needs error feedback.

  Raises:
    ValueError: for a density out of its range.

  Source:
    Aji, Heafield, "Sparse communication for distributed gradient descent",
    EMNLP 2017, arXiv:1704.05021. The paper has one threshold for all leaves, or
    one for each.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.top_k(0.5), jnp.array([1.0, -4.0, 2.0, 0.5])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))
    [ 0. -4.  2.  0.]
  """
  check_density(density)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Values, Any]:
    del key
    flat = x.reshape(-1)
    return masked(flat, largest(flat, count_of(density, x.size))), state

  # The k largest hold at least the k/L-th part of ||x||^2.
  return leaves.make_codec(encode, decode, feedback=NEEDED, delta=density)


def random_k(density: float = 0.001, *, scaled: bool = True) -> Codec:
  """k random elements of each leaf.

    sent_i = L / k x_i with probability k / L, else 0,   of exactly k elements
    k = density L, at least 1

  Its mean is the message; E ||sent - x||^2 = (L / k - 1) ||x||^2.

  Args:
    density: the share of each leaf's elements that is sent, in (0, 1].
    scaled: whether values are multiplied by L / k. Unscaled values need error
      feedback.

  Returns:
    A Codec, by leaf. (If the random numbers of two elements are equal at the
    border, which happens once in 2^31 / L messages, both are sent.)

  Raises:
    ValueError: for a density out of its range.

  Source:
    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018,
    arXiv:1809.07599; scaled: Wangni et al., "Gradient sparsification for
    communication-efficient distributed optimization", NeurIPS 2018.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.random_k(0.25), jnp.ones(4)
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(jnp.sort(codec.decode(code)))
    [0. 0. 0. 4.]
  """
  check_density(density)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Values, Any]:
    flat, k = x.reshape(-1), count_of(density, x.size)
    # 31 random bits per element; the k largest are the sample.
    sample_keys = jax.random.bits(key, flat.shape, jnp.uint32) >> 1
    # `threshold` needs numbers below the largest of the type.
    sample_keys = jnp.minimum(
      sample_keys.astype(jnp.int32), np.iinfo(np.int32).max - 1
    )
    values = masked(flat, sample_keys >= selection.threshold(sample_keys, k))
    if scaled and k < x.size:
      wide = leaves.wide(values.values)
      # Clip before scaling by L / k, so that it cannot overflow.
      bound = float(jnp.finfo(wide.dtype).max) * (1 - 1e-6) * k / x.size
      wide = jnp.clip(wide, -bound, bound) * (x.size / k)
      values = Values(leaves.narrow(wide, x.dtype))
    return values, state

  if scaled:  # E ||sent - x||^2 = (L / k - 1) ||x||^2
    delta = 2 - 1 / density  # positive only for a density above 1/2
    return leaves.make_codec(encode, decode, unbiased=True, delta=delta)
  return leaves.make_codec(encode, decode, feedback=NEEDED, delta=density)
