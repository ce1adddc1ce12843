"""Codecs of 1 bit per element: the signs of a message.

`sign` sends one scale per leaf, `onebit` two values per column.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import checks
from asgd.compression import leaves
from asgd.compression.codec import NEEDED, OPTIONAL, Codec, Symbols, power_below

SCALES = "one", "mean", "rms"
# From this many columns on, rows are added one after the other.
_MIN_COLUMNS_TO_SCAN = 32


def scale_of(x: jax.Array, scale: str) -> jax.Array:
  """Returns float32[], the magnitude of the signs of float32[L]: 1 ("one"), the
  mean of |x| ("mean") or ||x||_2 / sqrt(L) ("rms")."""
  if scale == "one":
    return jnp.float32(1)
  magnitudes = jnp.abs(x)
  unit = power_below(magnitudes.max())  # no sum or square overflows
  ratios = magnitudes / unit
  mean = ratios.mean() if scale == "mean" else jnp.sqrt((ratios**2).mean())
  return leaves.clip_to_float32(mean * unit)


def sign(scale: str = "one") -> Codec:
  """The signs of a message.

    sent_i = sign(x_i)                 "one", signSGD
    sent_i = mean_j |x_j| sign(x_i)    "mean", over a leaf, for error feedback
    sent_i = ||x||_2 / sqrt(L) sign(x_i)   "rms"

  A 0 is sent as 0. A leaf without zeros takes 1 bit per element, one with zeros
  at most 1.6.

  signSGD with majority vote is this codec, compress=dict(name="sign"), with a
  server that takes the sign of the mean of all workers' messages. That is the
  sign of the majority (0 for a tie):

    asgd.ssgd(rate, workers, optimizer=optax.sign_sgd)

  Signum is the same with an `optax.ema` as the recipe's `at_worker`.

  Args:
    scale: the factor of the signs: "one", "mean" or "rms".

  Returns:
    A Codec, by leaf. With a scale of "mean" or "rms" it needs error feedback.

  Raises:
    ValueError: for an unknown scale.

  Source:
    Bernstein et al., "signSGD: compressed optimisation for non-convex
    problems", ICML 2018, arXiv:1802.04434; with the mean: Karimireddy et al.,
    "Error feedback fixes signSGD and other gradient compression schemes", ICML
    2019, arXiv:1901.09847.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> x, key = jnp.array([3.0, -1.0, 0.0, 4.0]), jax.random.key(0)
    >>> for codec in (compression.sign(), compression.sign("mean")):
    ...   print(codec.decode(codec.encode(codec.init(x), x, key)[0]))
    [ 1. -1.  0.  1.]
    [ 2. -2.  0.  2.]
  """
  checks.one_of("scale", scale, SCALES)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Symbols, Any]:
    del key
    flat = leaves.float32(x).reshape(-1)
    # The sign of 0 is 0, a third symbol.
    symbols = jnp.sign(flat).astype(jnp.int8)
    return Symbols(symbols, scale_of(flat, scale)[None], 1), state

  feedback = OPTIONAL if scale == "one" else NEEDED
  return leaves.make_codec(encode, leaves.scaled, feedback=feedback)


def onebit() -> Codec:
  """1-bit SGD: signs, and two numbers for each column of a matrix.

    sent_ij = mean of the x_kj >= 0 of column j   if x_ij >= 0
              mean of the x_kj < 0 of column j    else

  A column is all elements with the same last index (the weights into one
  output). A leaf of at most one dimension is one column. The two values are the
  best for these signs: no others have a smaller squared error.

  Returns:
    A Codec, by leaf. It needs error feedback.

  Source:
    Seide et al., "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", Interspeech 2014.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.onebit(), jnp.array([[1.0, -1.0], [3.0, -5.0]])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))
    [[ 2. -3.]
     [ 2. -3.]]
  """
  return leaves.make_codec(_encode_columns, _decode_columns, feedback=NEEDED)


class _Sums(NamedTuple):
  """Sums and counts of each column, by sign. The sums are divided by a power of
  2, so that they do not overflow."""

  nonnegative: jax.Array  # float32[C], sum of elements that are 0 or more
  negative: jax.Array  # float32[C], sum of the others
  count: jax.Array  # type: ignore[assignment] # int32[C], of elements >= 0


def _columns(leaf: Any) -> int:
  """Returns the number of columns of a leaf."""
  return leaf.shape[-1] if len(leaf.shape) > 1 else 1


def _encode_columns(
  state: Any, x: jax.Array, key: jax.Array
) -> tuple[Symbols, Any]:
  """Encodes a leaf as `onebit`; returns its Symbols and the state."""
  del key
  matrix = leaves.float32(x).reshape(-1, _columns(x))
  # Divide by a power of 2 before adding, so that no sum overflows.
  scale_down = 1 / leaves.power_at_least(len(matrix))

  def split(x: jax.Array) -> tuple[_Sums, jax.Array]:
    at_least_0 = x >= 0
    nonnegative, negative = (
      jnp.where(side, x * scale_down, 0.0) for side in (at_least_0, ~at_least_0)
    )
    symbols = jnp.where(at_least_0, 1, -1).astype(jnp.int8)
    return _Sums(nonnegative, negative, at_least_0.astype(jnp.int32)), symbols

  if matrix.shape[1] < _MIN_COLUMNS_TO_SCAN:
    parts, symbols = split(matrix)
    sums = jax.tree.map(lambda x: x.sum(axis=0), parts)
  else:  # one pass over memory; on CPUs a reduction of columns takes three

    def add(sums: _Sums, row: jax.Array) -> tuple[_Sums, jax.Array]:
      part, symbols = split(row)
      return jax.tree.map(jnp.add, sums, part), symbols

    zeros = jnp.zeros(matrix.shape[1], jnp.float32)
    first = _Sums(zeros, zeros, zeros.astype(jnp.int32))
    sums, symbols = jax.lax.scan(add, first, matrix)
  # The two values of each column: first the means of the elements that are 0 or
  # more, of all columns, then those of the negative elements.
  means = []
  counts = sums.count, len(matrix) - sums.count
  for total, count in zip(sums[:2], counts, strict=True):
    # Sum and count have the same factor, which the division cancels.
    part = count.astype(jnp.float32) * scale_down
    means.append(leaves.clip_to_float32(leaves.divide(total, part)))
  return Symbols(symbols.reshape(-1), jnp.concatenate(means), 1), state


def _decode_columns(leaf: leaves.Leaf) -> jax.Array:
  """Returns the matrix of a leaf's signs and column values."""
  columns = _columns(leaf)
  nonnegative, negative = leaf.code.scales.reshape(2, columns)
  symbols = leaf.code.symbols.reshape(-1, columns)
  return jnp.where(symbols > 0, nonnegative, negative)
