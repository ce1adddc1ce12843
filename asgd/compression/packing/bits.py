"""Small whole numbers in a few bits each.

A number of, say, 7 bits is cut into parts of 4, 2 and 1 bits; each part of all
numbers is a plane, which is folded in half until its bytes are full: the second
half goes into the high bits of the first. So all work is on whole arrays of
bytes, with the few instructions that processors do to 32 or 64 of them at once.
"""

import numpy as np

from asgd.compression.packing.errors import BadCode


def _parts(width: int) -> list[int]:
  """Bits of the planes of numbers with so many bits, from the lowest."""
  return [8] * (width // 8) + [part for part in (4, 2, 1) if width & part]


def nbytes(count: int, width: int) -> int:
  """Returns the bytes that so many numbers of so many bits take: each plane is
  a whole number of bytes."""
  return sum(-(-count * part // 8) for part in _parts(width))


def pack(numbers: np.ndarray, width: int) -> list[np.ndarray]:
  """Returns the planes, each uint8[m], of unsigned numbers [n] below
  2**width."""
  planes, shift = [], 0
  for part in _parts(width):
    plane = numbers >> shift if shift else numbers
    plane = plane.astype(np.uint8, copy=False)
    if part < 8 and shift + part < width:
      plane = plane & np.uint8((1 << part) - 1)
    shift += part
    planes.append(_fold(plane, part))
  return planes


def _fold(plane, part):
  while part < 8:
    half = -(-plane.size // 2)
    folded = plane[:half].copy()
    folded[: plane.size - half] |= plane[half:] << np.uint8(part)
    plane, part = folded, 2 * part
  return plane


def unpack(
  data: np.ndarray, count: int, width: int, dtype: np.dtype
) -> np.ndarray:
  """Returns so many numbers of so many bits, as dtype[count], an unsigned one
  that holds them, from uint8[nbytes(count, width)]. Raises BadCode if bits that
  belong to no number are set."""
  numbers, shift, start = None, 0, 0
  for part in _parts(width):
    size = -(-count * part // 8)
    plane = _unfold(data[start : start + size], count, part)
    plane = plane.astype(dtype, copy=False)
    if shift:
      numbers |= plane << dtype.type(shift)
    else:  # `data` is not to be changed
      numbers = plane if part < 8 or dtype.itemsize > 1 else plane.copy()
    shift, start = shift + part, start + size
  return np.zeros(count, dtype) if numbers is None else numbers


def _unfold(plane, count, part):
  """uint8[count], from the folded plane."""
  folds = []  # sizes, part
  size = count
  while part < 8:
    folds.append((size, part))
    size, part = -(-size // 2), 2 * part
  for size, part in reversed(folds):
    numbers = np.empty(size, np.uint8)
    half = plane.size
    np.bitwise_and(plane, np.uint8((1 << part) - 1), out=numbers[:half])
    np.right_shift(
      plane[: size - half], np.uint8(part), out=numbers[half:]
    )
    if size < 2 * half and plane[-1] >> part:
      raise BadCode("bits that belong to no number are set")
    plane = numbers
  return plane
