"""Packed codes: a header, and the leaves one after the other.

  bytes  header, in the machine's own byte order
  4      magic
  2      version of the format
  2      0
  4      checksum of the layout
  8      bytes after the header
  4      CRC-32 of all other bytes
"""

import struct
import zlib
from typing import Any

import numpy as np

from asgd.compression.packing import leaves
from asgd.compression.packing.errors import BadCode
from asgd.compression.packing.layouts import (
  HEADER_NBYTES,
  Layout,
  field,
  flatten,
)

_FORMAT = struct.Struct("=4sHHIQ")
_CRC = struct.Struct("=I")
_MAGIC, _VERSION = b"asgc", 1


def pack(layout: Layout, code: Any, buffer: Any = None) -> bytes | int:
  """Returns a code as bytes, the smallest of its forms; or writes them.

  Args:
    layout: that of the code.
    code: a tree of NumPy or jax arrays, `Symbols` and `Values`.
    buffer: uint8[n] in one piece, or what has a writable buffer of n bytes, to
      write to; with n = layout.most there is room for any code.

  Returns:
    The bytes; with a buffer how many were written to its front.

  Raises:
    ValueError: for a code of another layout, symbols beyond their levels, or a
      buffer without room for the message, to which nothing is written then.

  Example:
    >>> import numpy as np
    >>> from asgd import compression
    >>> from asgd.compression import packing
    >>> x = np.zeros(10**6, np.float32)
    >>> x[[123, 456789]] = 0.5
    >>> code = compression.Values(x)
    >>> layout = packing.layout(code)
    >>> data = packing.pack(layout, code)
    >>> len(data)
    40
    >>> np.flatnonzero(packing.unpack(layout, data).values)
    array([   123, 456789])
  """
  parts = []
  for each, leaf in zip(layout.fields, _leaves(layout, code), strict=True):
    parts += leaves.pack(each, leaf)
  parts = [part.view(np.uint8) for part in parts]
  size = sum(part.size for part in parts)
  header = _FORMAT.pack(_MAGIC, _VERSION, 0, layout.checksum, size)
  crc = zlib.crc32(header)
  for part in parts:
    crc = zlib.crc32(part, crc)
  header += _CRC.pack(crc)
  if buffer is None:
    return b"".join([header, *parts])
  data = np.frombuffer(buffer, np.uint8)
  length = HEADER_NBYTES + size
  if data.size < length:
    raise ValueError(
      f"the buffer has {data.size} bytes, the message {length}; with"
      f" {layout.most} there is room for any"
    )
  if not data.flags.writeable:
    raise ValueError("the buffer is read-only")
  data[:HEADER_NBYTES] = np.frombuffer(header, np.uint8)
  start = HEADER_NBYTES
  for part in parts:
    data[start : start + part.size] = part
    start += part.size
  return length


def _leaves(layout, code):
  """The leaves of a code, in NumPy arrays. ValueError if it is of another
  layout."""
  found, structure = flatten(code)
  if structure != layout.structure:
    raise ValueError(f"the layout is of {layout.structure}, not {structure}")
  for expected, leaf in zip(layout.fields, found, strict=True):
    given = field(expected.path, leaf)
    if given != expected:
      raise ValueError(
        f"the leaf {expected.path} is {_shown(given)}, in the layout"
        f" {_shown(expected)}"
      )
  return found


def _shown(field):
  text = f"{field.kind} {field.dtype}{list(field.shape)}"
  if field.scales is not None:
    shape, dtype = field.scales
    text += f" of {field.levels} levels with scales {dtype}{list(shape)}"
  return text


def unpack(layout: Layout, data: Any) -> Any:
  """Returns the code that was packed, the same bits, in NumPy arrays that hold
  their own memory.

  Args:
    layout: that of the code.
    data: exactly what `pack` returned: bytes, or what has a buffer of them.

  Raises:
    BadCode: for anything else. Nothing larger than the leaves of the layout is
      allocated, whatever the bytes claim.
  """
  view = memoryview(data)
  if view.nbytes < HEADER_NBYTES:
    raise BadCode(
      f"a packed code has {HEADER_NBYTES} bytes or more, not {view.nbytes}"
    )
  data = np.frombuffer(view, np.uint8)
  _check_header(layout, data)
  reader = leaves.Reader(data[HEADER_NBYTES:])
  code = []
  for each in layout.fields:
    try:
      code.append(leaves.unpack(each, reader))
    except BadCode as error:
      raise BadCode(f"the leaf {each.path} of a packed code: {error}") from None
  if reader.left:
    raise BadCode(f"{reader.left} bytes follow the last leaf of a packed code")
  return layout.structure.unflatten(code)


def _check_header(layout, data):
  magic, version, zero, checksum, size = _FORMAT.unpack_from(data)
  if magic != _MAGIC or zero:
    raise BadCode(
      f"no packed code: it starts with {bytes(data[:8])!r}, not {_MAGIC!r}"
    )
  if version != _VERSION:
    raise BadCode(
      f"a packed code of version {version}, not {_VERSION}: are all processes"
      " of the same release?"
    )
  if checksum != layout.checksum:
    raise BadCode(
      f"a packed code of another codec or other shapes: its layout is"
      f" {checksum:08x}, not {layout.checksum:08x}"
    )
  if size != data.size - HEADER_NBYTES:
    raise BadCode(
      f"a packed code of {size} bytes after its header, of which there are"
      f" {data.size - HEADER_NBYTES}"
    )
  (crc,) = _CRC.unpack_from(data, _FORMAT.size)
  body = zlib.crc32(data[HEADER_NBYTES:], zlib.crc32(data[: _FORMAT.size]))
  if crc != body:
    raise BadCode("a packed code is damaged: its CRC-32 is another")
