"""Streams as bytes, each in the smallest of its forms.

  raw      the elements
  values   dense: the elements
           sparse: positions and values of elements that are not 0
  symbols  dense: a few bits each, or 5 to a byte if they are -1, 0 and 1
           signs: one bit each, if all are -1 or 1
           sparse: positions, signs and sizes of elements that are not 0

A stream of values or symbols starts with a byte for its form. For a sparse
stream this byte contains k of the positions' code. Two numbers follow: how many
positions there are, and the bytes of their unary stream. If the codec asks for
no entropy code, the positions are words of 4 bytes, after their number.
"""

import numpy as np

from asgd.compression.packing import bits, gaps
from asgd.compression.packing.bits import BadCode
from asgd.compression.packing.layouts import RAW, VALUES, PackedStream

_DENSE, _SIGNS, _WORDS, _SPARSE = 0, 1, 2, 64  # forms; _SPARSE + k
_MOST_WORDS = 2**32  # most elements of a stream with positions in words
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)
# int8[5, 256]: digit i of each byte, as a symbol. 3^5 = 243 bytes are valid.
_DIGITS = np.arange(256)[None] // _POWERS_OF_3[:, None] % 3 - 1
_DIGITS = _DIGITS.astype(np.int8)


def pack(stream: PackedStream, numbers: np.ndarray) -> list[np.ndarray]:
  """Returns arrays; their bytes are the packed stream of dtype[count]. Raises
  ValueError for symbols beyond their levels."""
  if stream.kind == RAW:
    return [numbers]
  if stream.kind == VALUES:
    return _pack_values(stream, numbers)
  return _pack_symbols(stream, numbers)


def _prefix(number: int, *counts: int) -> np.ndarray:
  """Returns the first bytes of a stream: its form and its counts."""
  data = bytes([number]) + b"".join(map(_varint, counts))
  return np.frombuffer(data, np.uint8)


def _pack_values(stream: PackedStream, values: np.ndarray) -> list[np.ndarray]:
  """Returns the arrays of a stream of Values."""
  words = values.view(_UNSIGNED[stream.dtype.itemsize])  # bits: -0.0 is not 0
  width = 8 * stream.dtype.itemsize
  sparse = _sparse(stream, words, stream.dense_nbytes, width)
  if sparse is None:
    return [_prefix(_DENSE), words]
  parts, positions = sparse
  return [*parts, words[positions]]


def _pack_symbols(
  stream: PackedStream, symbols: np.ndarray
) -> list[np.ndarray]:
  """Returns the arrays of a stream of Symbols."""
  levels, words = stream.levels, symbols.view(_UNSIGNED[symbols.itemsize])
  width = _sparse_width(levels)
  # Without zeros, a sign is one bit.
  only_signs = levels == 1 and np.count_nonzero(words) == words.size
  dense = bits.nbytes(words.size, 1) if only_signs else stream.dense_nbytes
  sparse = _sparse(stream, words, dense, width)
  if sparse is None:
    _check_levels(stream, symbols)
    if only_signs:
      return [_prefix(_SIGNS), *bits.pack((symbols < 0).view(np.uint8), 1)]
    if levels == 1:
      small = symbols.astype(np.int8, copy=False)
      return [_prefix(_DENSE), _pack_ternary(small)]
    # Shifted to numbers from 0 to 2 levels, which need no sign.
    digits = (symbols + symbols.dtype.type(levels)).view(words.dtype)
    return [_prefix(_DENSE), *bits.pack(digits, stream.width)]
  parts, positions = sparse
  numbers = symbols[positions]
  _check_levels(stream, numbers)
  # Size - 1 in the high bits, the sign in the lowest bit. There is no size 0.
  digits = abs(numbers).view(words.dtype) - words.dtype.type(1)
  digits *= words.dtype.type(2)
  digits |= numbers < 0
  return [*parts, *bits.pack(digits, width)]


def _sparse_width(levels: int) -> int:
  """Returns the bits for sign and size of a symbol that is not 0."""
  return 1 + (levels - 1).bit_length()


def _check_levels(stream: PackedStream, symbols: np.ndarray) -> None:
  """Raises ValueError for symbols beyond the stream's levels."""
  if symbols.size:
    least, most = int(symbols.min()), int(symbols.max())
    if least < -stream.levels or most > stream.levels:
      raise ValueError(
        f"there are symbols from {least} to {most}, beyond the"
        f" {stream.levels} levels of the code"
      )


def _sparse(
  stream: PackedStream, words: np.ndarray, dense: int, width: int
) -> tuple[list[np.ndarray], np.ndarray] | None:
  """Returns (arrays that encode the positions, positions), or None unless the
  sparse form is smaller than `dense` bytes. Each nonzero element takes `width`
  bits in it, besides its position."""
  # [1] Positions as words of 4 bytes, if the codec wants no entropy code.
  if not stream.coded and stream.count <= _MOST_WORDS:
    positions = _nonzero_positions(words)
    count = positions.size
    prefix = _prefix(_WORDS, count)
    nbytes = prefix.size + 4 * count + bits.nbytes(count, width)
    if nbytes >= 1 + dense:
      return None
    return [prefix, positions.astype(np.uint32)], positions
  count = int(np.count_nonzero(words))
  # [2] With many elements, try lower bounds that are fast to compute first.
  if 16 * count > words.size:
    values = bits.nbytes(count, width)
    if values + count // 8 >= dense:
      return None
    if values + gaps.least_nbytes(count, _last_nonzero(words)) >= dense:
      return None
  # [3] The exact size, without encoding yet.
  coded = gaps.measure(_nonzero_positions(words))
  prefix = _prefix(_SPARSE + coded.k, count, coded.unary_nbytes)
  nbytes = prefix.size + coded.nbytes + bits.nbytes(count, width)
  if nbytes >= 1 + dense:
    return None
  return [prefix, *gaps.encode(coded)], coded.positions


def _last_nonzero(words: np.ndarray) -> int:
  """Returns the position of the last nonzero element; there must be one."""
  # Windows that double, from the end: the last element is usually near it.
  size, stop = 4096, words.size
  while not words[max(stop - size, 0) : stop].any():
    stop, size = stop - size, 2 * size
  start = max(stop - size, 0)
  return start + int(np.flatnonzero(words[start:stop])[-1])


def _nonzero_positions(words: np.ndarray) -> np.ndarray:
  """Returns int64 positions of nonzero elements. Most elements are 0, so 8
  bytes are compared at once."""
  per_word = 8 // words.itemsize  # elements in 8 bytes
  aligned = words.size // per_word * per_word
  pieces = words[:aligned].view(np.uint64)
  # NumPy searches bools several times faster than numbers.
  hits = (pieces != 0).nonzero()[0]
  # Too many hits: comparing each element is faster then.
  if 4 * hits.size > pieces.size:
    return (words != 0).nonzero()[0]
  # Positions among the elements of the hits alone, then among all elements.
  positions = (pieces[hits].view(words.dtype) != 0).nonzero()[0]
  if per_word > 1:
    positions = hits[positions // per_word] * per_word + positions % per_word
  else:
    positions = hits
  tail = words[aligned:].nonzero()[0]  # fewer than 8 bytes at the end
  return np.concatenate([positions, tail + aligned]) if tail.size else positions


def _pack_ternary(symbols: np.ndarray) -> np.ndarray:
  """Packs 5 symbols into a byte; digit i is from the i-th fifth of the
  array."""
  size = -(-symbols.size // 5)
  digits = np.zeros(5 * size, np.uint8)
  np.add(symbols, 1, out=digits[: symbols.size].view(np.int8))
  coded, *others = digits.reshape(5, size)
  for digit, power in zip(others, _POWERS_OF_3[1:], strict=True):
    coded += digit * power
  return coded


def _varint(number: int) -> bytes:
  """Returns a number in 7 bits of each byte, the lowest first."""
  data = bytearray()
  while number > 127:
    data.append(number & 127 | 128)
    number >>= 7
  data.append(number)
  return bytes(data)


class Reader:
  """Reads bytes from the front, never more than there are."""

  def __init__(self, data: np.ndarray):
    self._data = data

  @property
  def unread(self) -> int:
    """Number of unread bytes."""
    return self._data.size

  def take(self, size: int) -> np.ndarray:
    """Returns the next bytes. Raises BadCode if there are fewer."""
    if size > self._data.size:
      raise BadCode(f"{size} bytes are needed, but {self.unread} are left")
    data, self._data = self._data[:size], self._data[size:]
    return data

  def array(self, count: int, dtype: np.dtype) -> np.ndarray:
    """Returns the next elements, in a newly allocated array."""
    data = self.take(count * dtype.itemsize)
    x = np.empty(count, dtype)
    x.view(np.uint8)[:] = data
    return x

  def number(self) -> int:
    """Returns a number written in 7 bits of each byte, the lowest first."""
    number = 0
    # 6 bytes hold 42 bits; damaged data must not make it read on.
    for i in range(6):
      byte = int(self.take(1)[0])
      number |= (byte & 127) << 7 * i
      if byte < 128:
        return number
    raise BadCode("a count takes more than 6 bytes")


def unpack(stream: PackedStream, reader: Reader) -> np.ndarray:
  """Returns the stream, dtype[count]. Raises BadCode for invalid bytes."""
  count, dtype = stream.count, stream.dtype
  # [1] The form: the first byte, which a raw stream does not have.
  form = _DENSE if stream.kind == RAW else int(reader.take(1)[0])
  # [2] All elements unchanged.
  if form == _DENSE and stream.kind in (RAW, VALUES):
    x = reader.array(count, dtype)
    if dtype == np.bool_ and count and x.view(np.uint8).max() > 1:
      raise BadCode("a truth value is neither 0 nor 1")
    return x
  # [3] Positions, and the elements there.
  if form == _WORDS and not stream.coded:
    return _unpack_elements(stream, _unpack_words(stream, reader), reader)
  if form >= _SPARSE:
    positions = _unpack_gaps(stream, form - _SPARSE, reader)
    return _unpack_elements(stream, positions, reader)
  if stream.kind == VALUES or form > _SIGNS or form and stream.levels > 1:
    raise BadCode(f"{form} is no form of a stream of {stream.kind}")
  # [4] Symbols in a few bits each.
  if form == _SIGNS:
    data = reader.take(bits.nbytes(count, 1))
    signs = bits.unpack(data, count, 1, np.dtype(np.uint8))
    return _to_signs(signs.view(np.int8)).astype(dtype, copy=False)
  data = reader.take(stream.dense_nbytes)
  if stream.levels == 1:
    return _unpack_ternary(data, count, dtype)
  unsigned = _UNSIGNED[dtype.itemsize]
  digits = bits.unpack(data, count, stream.width, unsigned)
  _check_digits(stream, digits, 2 * stream.levels)
  digits -= unsigned.type(stream.levels)
  return digits.view(dtype)


def _check_digits(stream: PackedStream, digits: np.ndarray, most: int) -> None:
  """Raises BadCode for a digit that stands for no level."""
  if digits.size and digits.max() > most:
    raise BadCode(f"a symbol is beyond the {stream.levels} levels")


def _to_signs(negative: np.ndarray) -> np.ndarray:
  """Replaces 0 by 1, and 1 by -1, in place."""
  negative *= -2
  negative += 1
  return negative


def _unpack_ternary(
  data: np.ndarray, count: int, dtype: np.dtype
) -> np.ndarray:
  """Unpacks the 5 symbols of each byte."""
  symbols = np.empty((5, data.size), np.int8)
  for digits, row in zip(_DIGITS, symbols, strict=True):
    row[:] = digits[data]
  symbols, unused = np.split(symbols.reshape(-1), [count])
  # 3^5 = 243 values are valid; unused digits are written as 0, symbol -1.
  if (data > 242).any() or (unused != -1).any():
    raise BadCode("a byte is no five of -1, 0 and 1")
  return symbols.astype(dtype, copy=False)


def _unpack_words(stream: PackedStream, reader: Reader) -> np.ndarray:
  """Returns positions written as words; BadCode unless they ascend."""
  count = reader.number()
  if count > stream.count:
    raise BadCode(f"{count} elements are claimed, of {stream.count}")
  positions = reader.array(count, np.dtype(np.uint32)).astype(np.int64)
  if (np.diff(positions) <= 0).any():
    raise BadCode("positions do not ascend")
  if count and positions[-1] >= stream.count:
    raise BadCode(
      f"positions are beyond the {stream.count} elements of the leaf"
    )
  return positions


def _unpack_gaps(stream: PackedStream, k: int, reader: Reader) -> np.ndarray:
  """Returns positions written as coded gaps."""
  if k > gaps.MOST_BITS:
    raise BadCode(f"{_SPARSE + k} is no form of a stream of {stream.kind}")
  count, unary = reader.number(), reader.number()
  if count > stream.count:
    raise BadCode(f"{count} elements are claimed, of {stream.count}")
  data = reader.take(unary + bits.nbytes(count, k))
  return gaps.decode(data, count, k, unary, stream.count)


def _unpack_elements(
  stream: PackedStream, positions: np.ndarray, reader: Reader
) -> np.ndarray:
  """Reads the elements at `positions`. Returns all elements; others are 0."""
  count, unsigned = positions.size, _UNSIGNED[stream.dtype.itemsize]
  if stream.kind == VALUES:
    numbers = reader.array(count, unsigned)
    # One code has one form: a packed 0 would be a second one.
    if not numbers.all():
      raise BadCode("a sparse value is 0")
  else:
    width = _sparse_width(stream.levels)
    data = reader.take(bits.nbytes(count, width))
    digits = bits.unpack(data, count, width, unsigned)
    _check_digits(stream, digits, 2 * stream.levels - 1)
    # As `_pack_symbols` writes them: size - 1, then the sign.
    magnitudes = digits >> unsigned.type(1)
    magnitudes += unsigned.type(1)
    digits &= unsigned.type(1)
    magnitudes.view(stream.dtype)[:] *= _to_signs(digits.view(stream.dtype))
    numbers = magnitudes
  words = np.zeros(stream.count, unsigned)
  words[positions] = numbers
  return words.view(stream.dtype)
