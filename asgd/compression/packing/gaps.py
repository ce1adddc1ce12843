"""Positions, as gaps in a Golomb-Rice code.

The gap before a position is how many others lie between it and the one before.
Of a gap g, g >> k is written in unary and the k low bits as they are; the
best k is found by computing what the code takes with it. Unary and low bits are
two streams, so that both are read and written as whole arrays.

Index letters used in shape comments:
  N  positions
"""

from typing import NamedTuple

import numpy as np

from asgd.compression.packing import bits
from asgd.compression.packing.errors import BadCode

MOST_BITS = 40  # k at most; leaves have fewer than 2**40 elements


class Gaps(NamedTuple):
  """Gaps, and how they are coded in the fewest bytes."""

  gaps: np.ndarray  # int64[N]
  k: int
  unary: int  # bytes of the unary stream

  @property
  def nbytes(self) -> int:
    """Bytes of both streams."""
    return self.unary + bits.nbytes(self.gaps.size, self.k)


def measure(positions: np.ndarray) -> Gaps:
  """Returns the gaps of int64[N] positions, which ascend from 0 or more, with
  the k that makes them the fewest bytes."""
  count = positions.size
  if not count:
    return Gaps(positions, 0, 0)
  gaps = np.diff(positions, prepend=-1)
  gaps -= 1

  def coded(k):
    return Gaps(gaps, k, -(-(int((gaps >> k).sum()) + count) // 8))

  # Among numbers of geometric distribution the best 2**k is near ln 2 of the
  # mean (Golomb 1966); others are looked for from there.
  mean = (int(positions[-1]) + 1 - count) / count
  k = min(max(int(0.69 * mean), 1).bit_length() - 1, MOST_BITS)
  best = coded(k)
  for step in (1, -1):
    while 0 <= best.k + step <= MOST_BITS:
      other = coded(best.k + step)
      if other.nbytes >= best.nbytes:
        break
      best = other
  return best


def least_nbytes(count: int, last: int) -> int:
  """Returns a number of bytes below which `measure` never comes, for so many
  positions of which the last is known."""
  rest = last + 1 - count  # sum of the gaps
  unary = (max(rest - count * ((1 << k) - 1), 0) >> k for k in range(42))
  return min(count * (k + 1) + u for k, u in enumerate(unary)) // 8


def encode(coded: Gaps) -> list[np.ndarray]:
  """Returns the unary stream and the planes of the low bits, uint8 each."""
  gaps, k, unary = coded
  ends = np.cumsum(gaps >> k)  # of each unary number, a 1 after zeros
  ends += np.arange(gaps.size)
  stream = np.zeros(8 * unary, np.uint8)
  stream[ends] = 1
  low = (gaps & ((1 << k) - 1)).astype(_unsigned(k))
  return [np.packbits(stream, bitorder="little"), *bits.pack(low, k)]


def _unsigned(k):
  """The least unsigned dtype that has so many bits."""
  return next(
    np.dtype(f"u{size}") for size in (1, 2, 4, 8) if k <= 8 * size
  )


def decode(
  data: np.ndarray, count: int, k: int, unary: int, length: int
) -> np.ndarray:
  """Returns the int64[count] positions, from uint8[unary + low bits] that are
  believed in nothing. Raises BadCode if they are no positions in a leaf of so
  many elements."""
  stream = np.unpackbits(data[:unary], bitorder="little")
  ends = np.flatnonzero(stream.view(np.bool_))
  if ends.size != count or (count and ends[-1] < stream.size - 8):
    raise BadCode(f"{ends.size} positions are coded where {count} are claimed")
  if not count:
    return ends
  ends -= np.arange(count)  # sums of the unary numbers
  if int(ends[-1]) << k >= length:
    raise BadCode(f"positions are coded beyond the {length} of the leaf")
  ends <<= k
  low = bits.unpack(data[unary:], count, k, _unsigned(k))
  steps = low.astype(np.int64)
  steps += 1
  ends += np.cumsum(steps)
  ends -= 1
  if ends[-1] >= length:
    raise BadCode(f"positions are coded beyond the {length} of the leaf")
  return ends
