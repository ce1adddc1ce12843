"""Positions, as gaps in a Golomb-Rice code.

A gap is the number of other elements between a position and the previous one.
The part g >> k of a gap g is written in unary, its k low bits unchanged. The
best k is found by computing the size of the code. Unary and low bits are two
streams, so that both are read and written as complete arrays.

Index letters used in shape comments:
  N  positions
"""

from typing import NamedTuple

import numpy as np

from asgd.compression.packing import bits
from asgd.compression.packing.bits import BadCode

MOST_BITS = 40  # largest k; leaves have fewer than 2**40 elements


class CodedGaps(NamedTuple):
  """Gaps, and the parameters of their smallest code."""

  positions: np.ndarray  # int64[N]
  gaps: np.ndarray  # int64[N], 0 or more
  k: int  # low bits of a gap that are written unchanged
  unary_nbytes: int  # bytes of the unary stream

  @property
  def nbytes(self) -> int:
    """Bytes of both streams."""
    return self.unary_nbytes + bits.nbytes(self.gaps.size, self.k)


def measure(positions: np.ndarray) -> CodedGaps:
  """Returns the gaps of int64[N] positions, which ascend from 0 or more, with
  the k that needs the fewest bytes."""
  count = positions.size
  if not count:
    return CodedGaps(positions, positions, 0, 0)
  gaps = np.empty_like(positions)
  gaps[0] = positions[0]
  np.subtract(positions[1:], positions[:-1], out=gaps[1:])
  gaps[1:] -= 1  # neighbours have a gap of 0

  def coded(k):
    # A unary number n has n zeros and a 1.
    n_bits = int((gaps >> k).sum()) + count
    return CodedGaps(positions, gaps, k, -(-n_bits // 8))

  # For a geometric distribution the best 2**k is near ln 2 times the mean gap
  # (Golomb 1966); the search starts there.
  mean = (int(positions[-1]) + 1 - count) / count
  guess = min(max(int(0.69 * mean), 1).bit_length() - 1, MOST_BITS)
  best = coded(guess)
  # With few positions, bytes are rarely full, and the size has several minima.
  patience = 3 if count < 4096 else 1
  # Search to both sides of the guess, until `patience` values are no better.
  for step in (1, -1):
    k, misses = guess + step, 0
    while misses < patience and 0 <= k <= MOST_BITS:
      candidate = coded(k)
      misses = 0 if candidate.nbytes < best.nbytes else misses + 1
      best = min(best, candidate, key=lambda code: code.nbytes)
      k += step
  return best


def least_nbytes(count: int, last: int) -> int:
  """Returns a lower bound of the bytes that `measure` finds for `count`
  positions, of which only the last is known."""
  gap_sum = last + 1 - count  # sum of the gaps
  # A larger k only takes more bytes.
  largest_k = (gap_sum // count).bit_length() + 1
  # sum(gap >> k) is least if all gaps end in k ones.
  zeros = (
    max(gap_sum - count * ((1 << k) - 1), 0) >> k for k in range(largest_k + 1)
  )
  return min(count * (k + 1) + zero for k, zero in enumerate(zeros)) // 8


def encode(coded: CodedGaps) -> list[np.ndarray]:
  """Returns the unary stream and the planes of the low bits, uint8 each."""
  positions, gaps, k, unary_nbytes = coded
  if k:
    ends = np.cumsum(gaps >> k)  # position of the 1 that ends each unary number
    ends += np.arange(gaps.size)
  else:
    ends = positions  # with k = 0 the stream is the mask of the positions
  stream = np.zeros(8 * unary_nbytes, np.uint8)
  stream[ends] = 1
  low = (gaps & ((1 << k) - 1)).astype(_unsigned(k))
  return [np.packbits(stream, bitorder="little"), *bits.pack(low, k)]


def _unsigned(k: int) -> np.dtype:
  """Returns the smallest unsigned dtype with k bits."""
  return next(
    np.dtype(f"u{size}") for size in (1, 2, 4, 8) if k <= 8 * size
  )


def decode(
  data: np.ndarray, count: int, k: int, unary_nbytes: int, length: int
) -> np.ndarray:
  """Returns the int64[count] positions from untrusted uint8[n]: the unary
  stream, then the low bits. Raises BadCode for positions outside a leaf of
  `length` elements."""
  # [1] Each 1 of the unary stream ends a number. A byte after the last 1 would
  # be a second form of the same code.
  stream = np.unpackbits(data[:unary_nbytes], bitorder="little")
  ends = np.flatnonzero(stream.view(np.bool_))
  if ends.size != count or (count and ends[-1] < stream.size - 8):
    raise BadCode(f"{ends.size} positions are coded, but {count} are claimed")
  beyond_error = f"positions are coded beyond the {length} elements of the leaf"
  positions = ends  # with k = 0 the stream is the mask of the positions
  if count and k:
    # [2] Count the zeros before each 1: the sum of the unary numbers up to it.
    positions -= np.arange(count)
    # Check before the shift can overflow.
    if int(positions[-1]) << k >= length or count << k >= 1 << 62:
      raise BadCode(beyond_error)
    positions <<= k
    # [3] Add the sums of the low bits. A gap counts the elements between: the
    # step to the next position is 1 more.
    low = bits.unpack(data[unary_nbytes:], count, k, _unsigned(k))
    low = low.astype(np.int64) + 1
    positions += np.cumsum(low)
    positions -= 1  # the first position is its gap, not 1 more
  if count and positions[-1] >= length:
    raise BadCode(beyond_error)
  return positions
