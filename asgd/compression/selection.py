"""The k-th largest of many numbers, by counting.

Sorting millions of numbers is slow, especially on CPUs. Counting the numbers
above a bound is as fast as memory. So counts narrow a bracket around the k-th
number, by interpolation and bisection. For many numbers, a sorted sample gives
the first bounds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_SAMPLE = 4096  # numbers in the sample
_MAX_UNSAMPLED = 1 << 16  # up to this many numbers, no sample is sorted
_DEVIATIONS = 3.0  # margin around the k-th, in deviations of its sample rank
_PATTERNS_PER_DOUBLING = 1 << 23  # bit patterns from a float32 to its double
_INTEGER_DTYPES = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def magnitudes(x: jax.Array) -> jax.Array:
  """Returns the bit patterns of |x|, integers in the same order: int32[L] for
  float[L] of 16 or 32 bits, int64[L] for float64."""
  words = jax.lax.bitcast_convert_type(x, _INTEGER_DTYPES[x.dtype.itemsize])
  patterns = words & jnp.iinfo(words.dtype).max  # without the sign bit
  return patterns.astype(jnp.promote_types(words.dtype, jnp.int32))


class _Bracket(NamedTuple):
  """A bracket: at least k numbers are >= `low`, fewer than k are >= `high`."""

  low: jax.Array
  high: jax.Array
  count_at_low: jax.Array  # count of numbers >= `low`
  count_at_high: jax.Array  # count of numbers >= `high`
  passes: jax.Array  # counts made so far


def threshold(numbers: jax.Array, k: Any) -> jax.Array:
  """Returns a number such that k of the given numbers are at least as large.

    count(numbers >= threshold) = k

  If the k-th and the next largest number are equal, the threshold is that
  number, and more than k numbers are >= threshold.

  Args:
    numbers: int32 or int64 [L], 0 or more, below the largest of the type.
    k: int32[], from 1 to L.

  Returns:
    A number of that type, not necessarily one of `numbers`.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.compression import selection
    >>> numbers = jnp.array([40, 10, 0, 30, 10])
    >>> 10 < selection.threshold(numbers, 2) <= 30
    Array(True, dtype=bool)
    >>> print(selection.threshold(numbers, 3))  # 10 twice: four reach it
    10
  """
  dtype, size = numbers.dtype, numbers.size
  k = jnp.asarray(k, jnp.int32)
  guesses = _guesses(numbers, k) if size > _MAX_UNSAMPLED else ()

  def probe(bracket: _Bracket) -> jax.Array:
    """Returns the next number to count at, strictly inside the bracket."""
    low, high = bracket.low, bracket.high
    # Bisection always ends; interpolation is faster near the end.
    middle = low + (high - low) // 2
    inside = jnp.maximum(bracket.count_at_low - bracket.count_at_high, 1)
    fraction = (bracket.count_at_low - k) / inside
    interpolated = low + ((high - low) * fraction).astype(dtype)
    # Alternate, and interpolate only in a bracket where patterns are about
    # linear in the numbers.
    is_near = high - low < _PATTERNS_PER_DOUBLING
    interpolates = (bracket.passes % 2 == 1) & is_near
    candidate = jnp.where(interpolates, interpolated, middle)
    # If most numbers are 0, the k-th may be 0: test 1 first.
    candidate = jnp.where(low == 0, jnp.ones_like(low), candidate)
    # The first two passes use the sample's guesses, if they are inside.
    for i, guess in enumerate(guesses):
      fits = (guess > low) & (guess < high)
      candidate = jnp.where((bracket.passes == i) & fits, guess, candidate)
    return jnp.clip(candidate, low + 1, high - 1)

  def narrow(bracket: _Bracket) -> _Bracket:
    """Moves one end of the bracket to a number inside, by one count."""
    candidate = probe(bracket)
    # One pass over memory.
    count = (numbers >= candidate).sum(dtype=jnp.int32)
    enough = count >= k
    return _Bracket(
      jnp.where(enough, candidate, bracket.low),
      jnp.where(enough, bracket.high, candidate),
      jnp.where(enough, count, bracket.count_at_low),
      jnp.where(enough, bracket.count_at_high, count),
      bracket.passes + 1,
    )

  def is_wide(bracket: _Bracket) -> jax.Array:
    # The loop ends when k numbers are >= low, or low is the k-th largest.
    return (bracket.high - bracket.low > 1) & (bracket.count_at_low != k)

  # All L numbers are >= 0; none is >= the largest + 1.
  low, zero = jnp.zeros([], dtype), jnp.int32(0)
  first = _Bracket(low, numbers.max() + 1, jnp.int32(size), zero, zero)
  return jax.lax.while_loop(is_wide, narrow, first).low


def _guesses(numbers: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns two numbers: probably fewer than k numbers are >= the first, and
  more than k are >= the second."""
  size = numbers.size
  sample = jnp.sort(numbers[:: -(-size // _SAMPLE)])
  expected = k * (sample.size / size)  # rank in the sample of the k-th number
  # The rank is about Poisson, with a deviation of sqrt(expected).
  margin = _DEVIATIONS * jnp.sqrt(expected) + 2

  def largest(rank):
    index = sample.size - jnp.round(rank).astype(jnp.int32)
    return sample[jnp.clip(index, 0, sample.size - 1)]

  return largest(expected - margin), largest(expected + margin)
