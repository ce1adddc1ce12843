"""Leaves as bytes, each in the smallest of its forms.

  raw      the elements
  Values   dense: the elements
           sparse: positions and elements of what is not 0
  Symbols  dense: a few bits each, or 5 to a byte if they are -1, 0 and 1
           signs: 1 bit each, if all are -1 and 1
           sparse: positions of what is not 0, signs and sizes
  followed by their scales

A leaf of Values or Symbols starts with a byte, its form. In that of a sparse
one is k of the code of its positions; two numbers follow, how many there are
and how many bytes are unary.
"""

from typing import Any

import numpy as np

from asgd.compression.codec import Symbols, Values
from asgd.compression.packing import bits, gaps
from asgd.compression.packing.errors import BadCode
from asgd.compression.packing.layouts import RAW, VALUES, Field

_DENSE, _SIGNS, _SPARSE = 0, 1, 64  # forms; _SPARSE + k
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_THIRDS = np.uint8([1, 3, 9, 27, 81])  # of 5 ternary digits
_DIGITS = (np.arange(256)[None] // _THIRDS[:, None] % 3 - 1).astype(np.int8)


def pack(field: Field, leaf: Any) -> list[np.ndarray]:
  """Returns the arrays, in one piece each, whose bytes are a leaf. Raises
  ValueError for symbols beyond their levels."""
  if field.kind == RAW:
    return [_flat(leaf)]
  if field.kind == VALUES:
    return _pack_values(field, _flat(leaf.values))
  return [*_pack_symbols(field, _flat(leaf.symbols)), _flat(leaf.scales)]


def _flat(x):
  return np.ascontiguousarray(x).reshape(-1)


def _form(number, *varints):
  return np.frombuffer(
    bytes([number]) + b"".join(map(_varint, varints)), np.uint8
  )


def _pack_values(field, values):
  words = values.view(_UNSIGNED[field.dtype.itemsize])  # a -0.0 is not 0
  sparse = _sparse(words, field.dense_nbytes, 8 * field.dtype.itemsize)
  if sparse is None:
    return [_form(_DENSE), words]
  positions, form, coded = sparse
  return [form, *gaps.encode(coded), words[positions]]


def _pack_symbols(field, symbols):
  levels, words = field.levels, symbols.view(_UNSIGNED[symbols.itemsize])
  width = 1 + (levels - 1).bit_length()  # of a symbol that is not 0
  signs = levels == 1 and np.count_nonzero(words) == words.size
  dense = -(-words.size // 8) if signs else field.dense_nbytes
  sparse = _sparse(words, dense, width)
  if sparse is None:
    _check_levels(field, symbols)
    if signs:
      return [_form(_SIGNS), *bits.pack((symbols > 0).view(np.uint8), 1)]
    if levels == 1:
      return [_form(_DENSE), _ternary(symbols.astype(np.int8, copy=False))]
    digits = (symbols + symbols.dtype.type(levels)).view(words.dtype)
    return [_form(_DENSE), *bits.pack(digits, field.width)]
  positions, form, coded = sparse
  numbers = symbols[positions].astype(np.int64)
  _check_levels(field, numbers)
  digits = (abs(numbers) - 1) << 1 | (numbers < 0)
  return [form, *gaps.encode(coded), *bits.pack(digits, width)]


def _check_levels(field, symbols):
  if symbols.size:
    least, most = int(symbols.min()), int(symbols.max())
    if least < -field.levels or most > field.levels:
      raise ValueError(
        f"the symbols of {field.path} are from {least} to {most}, beyond their"
        f" {field.levels} levels"
      )


def _sparse(words, dense, width):
  """(positions, form, coded gaps) if it takes fewer bytes than `dense` to send
  what is not 0 with so many bits each; or None."""
  count = np.count_nonzero(words)
  if count:
    values = bits.nbytes(count, width)
    if values + count // 8 >= dense:
      return None
    last = words.size - 1 - int(np.argmax(words[::-1] != 0))
    if values + gaps.least_nbytes(count, last) >= dense:
      return None
  positions = _positions(words)
  coded = gaps.measure(positions)
  form = _form(_SPARSE + coded.k, count, coded.unary)
  nbytes = form.size + coded.nbytes + bits.nbytes(count, width)
  # The form of the others takes a byte.
  return (positions, form, coded) if nbytes < 1 + dense else None


def _positions(words):
  """int64 positions of what is not 0; most is, so 8 bytes are looked at in one
  piece."""
  each = 8 // words.itemsize
  whole = words.size // each * each
  pieces = words[:whole].view(np.uint64)
  hits = np.flatnonzero(pieces)
  if 4 * hits.size > pieces.size:
    return np.flatnonzero(words)
  near = np.flatnonzero(pieces[hits].view(words.dtype))
  positions = hits[near // each] * each + near % each
  rest = np.flatnonzero(words[whole:])
  return np.concatenate([positions, rest + whole]) if rest.size else positions


def _ternary(symbols):
  """5 to a byte: each fifth of them is a digit."""
  size = -(-symbols.size // 5)
  digits = np.zeros(5 * size, np.uint8)
  np.add(symbols, 1, out=digits[: symbols.size].view(np.int8))
  coded = digits[:size].copy()
  for digit, times in zip(
    digits[size:].reshape(4, size), _THIRDS[1:], strict=True
  ):
    coded += digit * times
  return coded


class Reader:
  """Bytes, taken from the front; never more than there are."""

  def __init__(self, data: np.ndarray):
    self._data = data

  @property
  def left(self) -> int:
    """Bytes."""
    return self._data.size

  def take(self, size: int) -> np.ndarray:
    """Returns the next bytes. Raises BadCode if there are not so many."""
    if size > self._data.size:
      raise BadCode(
        f"{size} bytes are needed where {self._data.size} are left"
      )
    taken, self._data = self._data[:size], self._data[size:]
    return taken

  def varint(self) -> int:
    """Returns a number of 7 bits in each byte, the lowest first."""
    number = 0
    for i in range(6):
      byte = int(self.take(1)[0])
      number |= (byte & 127) << 7 * i
      if byte < 128:
        if i and not byte:
          break
        return number
    raise BadCode("a count is written in more bytes than it takes")


def _varint(number):
  data = bytearray()
  while number > 127:
    data.append(number & 127 | 128)
    number >>= 7
  data.append(number)
  return bytes(data)


def unpack(field: Field, reader: Reader) -> Any:
  """Returns a leaf. Raises BadCode."""
  if field.kind == RAW:
    return _array(field.shape, field.dtype, reader)
  form = int(reader.take(1)[0])
  if field.kind == VALUES:
    return Values(_unpack_values(field, form, reader))
  symbols = _unpack_symbols(field, form, reader).reshape(field.shape)
  return Symbols(symbols, _array(*field.scales, reader), field.levels)


def _array(shape, dtype, reader):
  """An array that is as it was, in memory of its own."""
  nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
  data = reader.take(nbytes)
  if dtype == np.bool_ and data.size and data.max() > 1:
    raise BadCode("a truth value is neither 0 nor 1")
  x = np.empty(shape, dtype)
  x.reshape(-1).view(np.uint8)[:] = data
  return x


def _unpack_values(field, form, reader):
  if form == _DENSE:
    return _array(field.shape, field.dtype, reader)
  positions = _unpack_positions(field, form, reader)
  words = np.zeros(field.count, _UNSIGNED[field.dtype.itemsize])
  numbers = _array((positions.size,), words.dtype, reader)
  if not numbers.all():
    raise BadCode("a 0 stands among what is not 0")
  words[positions] = numbers
  return words.view(field.dtype).reshape(field.shape)


def _unpack_symbols(field, form, reader):
  count, levels, dtype = field.count, field.levels, field.dtype
  unsigned = _UNSIGNED[dtype.itemsize]
  if form == _SIGNS and levels == 1:
    data = reader.take(bits.nbytes(count, 1))
    signs = bits.unpack(data, count, 1, np.dtype(np.uint8))
    symbols = signs.view(np.int8)
    symbols <<= 1
    symbols -= 1
    return symbols.astype(dtype, copy=False)
  if form == _DENSE and levels == 1:
    return _unpack_ternary(reader.take(field.dense_nbytes), count, dtype)
  if form == _DENSE:
    data = reader.take(field.dense_nbytes)
    digits = bits.unpack(data, count, field.width, unsigned)
    if count and digits.max() > 2 * levels:
      raise BadCode(f"a symbol is beyond the {levels} levels")
    digits -= unsigned.type(levels)
    return digits.view(dtype)
  positions = _unpack_positions(field, form, reader)
  width = 1 + (levels - 1).bit_length()
  data = reader.take(bits.nbytes(positions.size, width))
  digits = bits.unpack(data, positions.size, width, np.dtype(np.uint64))
  sizes = (digits >> np.uint64(1)).view(np.int64) + 1
  if sizes.size and sizes.max() > levels:
    raise BadCode(f"a symbol is beyond the {levels} levels")
  symbols = np.zeros(count, dtype)
  symbols[positions] = np.where(digits & np.uint64(1), -sizes, sizes)
  return symbols


def _unpack_ternary(data, count, dtype):
  size = data.size
  symbols = np.empty((5, size), np.int8)
  for digits, place in zip(_DIGITS, symbols, strict=True):
    np.take(digits, data, out=place)
  if size and data.max() > 242:
    raise BadCode("a byte is no five of -1, 0 and 1")
  symbols = symbols.reshape(-1)
  if (symbols[count:] != -1).any():
    raise BadCode("there are symbols that belong to no element")
  return symbols[:count].astype(dtype, copy=False)


def _unpack_positions(field, form, reader):
  k = form - _SPARSE
  if not 0 <= k <= gaps.MOST_BITS:
    raise BadCode(f"{form} is no form of {field.path}")
  count, unary = reader.varint(), reader.varint()
  if count > field.count:
    raise BadCode(
      f"{count} elements are claimed of the {field.count} of {field.path}"
    )
  data = reader.take(unary + bits.nbytes(count, k))
  return gaps.decode(data, count, k, unary, field.count)
