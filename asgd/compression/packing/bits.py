"""Small integers in a few bits each.

A number of, say, 7 bits is cut into parts of 4, 2 and 1 bits. The same part of
all numbers is a plane. A plane is folded in half until its bytes are full: its
second half moves into the high bits of the first. (Single bits are packed 8
neighbours to a byte.) So all work is on complete arrays of bytes, 32 or 64 of
which a processor handles at once.
"""

import numpy as np


class BadCode(ValueError):
  """Bytes that are no valid packed code of a layout."""


def _part_widths(width: int) -> list[int]:
  """Returns the bits of each plane of numbers of `width` bits, lowest first."""
  return [8] * (width // 8) + [part for part in (4, 2, 1) if width & part]


def nbytes(count: int, width: int) -> int:
  """Returns the bytes of `count` numbers of `width` bits; each plane takes full
  bytes."""
  return sum(-(-count * part // 8) for part in _part_widths(width))


def pack(numbers: np.ndarray, width: int) -> list[np.ndarray]:
  """Returns the planes, each uint8[m], of unsigned numbers [n] below
  2**width."""
  planes, shift = [], 0  # shift: bits below the current part
  for part in _part_widths(width):
    plane = numbers >> numbers.dtype.type(shift) if shift else numbers
    plane = plane.astype(np.uint8, copy=False)
    # Mask the bits above this part; the last part has none above it.
    if part < 8 and shift + part < width:
      plane = plane & np.uint8((1 << part) - 1)
    shift += part
    planes.append(_fold(plane, part))
  return planes


def _fold(plane: np.ndarray, part: int) -> np.ndarray:
  """Folds uint8[n], with `part` bits used in each, into full bytes."""
  if part == 1:
    return np.packbits(plane, bitorder="little")
  while part < 8:
    # An odd plane has no partner for the last byte of its first half.
    half = -(-plane.size // 2)
    folded = plane[:half].copy()
    # Faster than <<, which NumPy computes byte by byte.
    folded[: plane.size - half] |= plane[half:] * np.uint8(1 << part)
    plane, part = folded, 2 * part
  return plane


def unpack(
  data: np.ndarray, count: int, width: int, dtype: np.dtype
) -> np.ndarray:
  """Returns the numbers, dtype[count] (unsigned), from the planes in
  uint8[nbytes(count, width)]. Raises BadCode if unused bits are set."""
  # Numbers of 0 bits have no plane: all are 0.
  numbers, shift = np.zeros(0 if width else count, dtype), 0
  for part in _part_widths(width):
    size = -(-count * part // 8)
    plane, data = _unfold(data[:size], count, part), data[size:]
    plane = plane.astype(dtype, copy=False)
    if shift:
      numbers |= plane * dtype.type(1 << shift)
    else:  # copy, as the first plane may be a view of `data`
      numbers = plane.copy() if part == 8 and dtype.itemsize == 1 else plane
    shift += part
  return numbers


def _unfold(plane: np.ndarray, count: int, part: int) -> np.ndarray:
  """Returns uint8[count] of a folded plane."""
  if part == 1:
    numbers = np.unpackbits(plane, bitorder="little")
    _check_unused(bool(numbers[count:].any()))
    return numbers[:count]
  sizes = [count]  # of the plane before each fold
  while part << len(sizes) <= 8:
    sizes.append(-(-sizes[-1] // 2))
  # Undo the last fold first. Its bytes have two numbers of `width` bits each.
  for i in range(len(sizes) - 2, -1, -1):
    width, size, half = part << i, sizes[i], plane.size
    numbers = np.empty(size, np.uint8)
    np.bitwise_and(plane, np.uint8((1 << width) - 1), out=numbers[:half])
    high = plane[: size - half]
    np.right_shift(high, np.uint8(width), out=numbers[half:])
    _check_unused(size < 2 * half and plane[-1] >> width)
    plane = numbers
  return plane


def _check_unused(is_set: bool) -> None:
  """Raises BadCode if bits after the last number are set."""
  if is_set:
    raise BadCode("bits that belong to no number are set")
