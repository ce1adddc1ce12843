"""Packed codes: a header, and the streams of the leaves.

  bytes  header, in the machine's byte order
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

import jax
import numpy as np

from asgd import checks, wire
from asgd.compression.packing import streams
from asgd.compression.packing.bits import BadCode
from asgd.compression.packing.layouts import HEADER_NBYTES, CodeLayout

# "=": no padding between the numbers.
_FORMAT = struct.Struct("=4sHHIQ")
_CRC = struct.Struct("=I")  # of the bytes before and after it
_MAGIC, _VERSION = b"asgc", 1


def pack(layout: CodeLayout, code: Any, buffer: Any = None) -> bytes | int:
  """Packs a code in the smallest of its forms. Returns the bytes or writes
  them.

  Args:
    layout: the layout of the code.
    code: a tree of NumPy or jax arrays, `Symbols` and `Values`.
    buffer: uint8[n] in one piece, or an object with a writable buffer of n
      bytes, to write to; n = layout.most is enough for any code.

  Returns:
    The bytes; with a buffer, how many bytes were written to its front.

  Raises:
    ValueError: for a code of another layout, symbols beyond their levels, or a
      buffer that is too small; then nothing is written.

  Example:
    >>> import numpy as np
    >>> from asgd import compression
    >>> from asgd.compression import packing
    >>> x = np.zeros(10**6, np.float32)
    >>> x[[123, 456789]] = 0.5
    >>> code = compression.Values(x)
    >>> layout = packing.layout(code)
    >>> len(packing.pack(layout, code))
    40
  """
  arrays = [x.reshape(-1) for x in _arrays(layout, code)]
  parts = []
  # Small arrays of one kind are joined to one stream.
  for stream in layout.streams:
    pieces = [arrays[i] for i in stream.fields]
    # A large array is alone in its stream, and is not copied.
    joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    try:
      parts += streams.pack(stream, joined)
    except ValueError as error:
      raise ValueError(f"{_names(layout, stream)}: {error}") from None
  parts = [part.view(np.uint8) for part in parts]
  size = sum(part.size for part in parts)
  header = _FORMAT.pack(_MAGIC, _VERSION, 0, layout.checksum, size)
  # The CRC runs over header and parts without joining them.
  crc = zlib.crc32(header)
  for part in parts:
    crc = zlib.crc32(part.data, crc)
  header += _CRC.pack(crc)
  if buffer is None:
    return b"".join([header, *(part.data for part in parts)])
  data = np.frombuffer(buffer, np.uint8)
  # Check the buffer before the first byte is written.
  length = HEADER_NBYTES + size
  if data.size < length:
    raise ValueError(
      f"the buffer has {data.size} bytes, but the message {length}; a buffer of"
      f" {layout.most} is enough for any"
    )
  if not data.flags.writeable:
    raise ValueError("the buffer is read-only")
  data[:HEADER_NBYTES] = np.frombuffer(header, np.uint8)
  start = HEADER_NBYTES
  for part in parts:
    data[start : start + part.size] = part
    start += part.size
  return length


def _arrays(layout: CodeLayout, code: Any) -> list[np.ndarray]:
  """Returns a code's arrays as NumPy arrays; ValueError for another layout."""
  arrays, structure = jax.tree.flatten(code)
  if structure != layout.structure:
    raise ValueError(
      f"the layout is of {checks.shown(layout.structure)}, not of"
      f" {checks.shown(structure)}"
    )
  arrays = wire.checked_leaves(layout.fields, arrays)
  return [np.ascontiguousarray(x) for x in jax.device_get(arrays)]


def _names(layout: CodeLayout, stream: Any) -> str:
  """Returns a text that names the leaves of a stream, for errors."""
  paths = [layout.fields[i].path for i in stream.fields]
  if len(paths) == 1:
    return f"the leaf {paths[0]}"
  return f"the {len(paths)} leaves from {paths[0]} to {paths[-1]}"


def unpack(layout: CodeLayout, data: Any) -> Any:
  """Returns the packed code, equal to the bit, in new NumPy arrays. `data` is
  the result of `pack`: bytes, or an object with a buffer of them. Raises
  BadCode for anything else. Invalid counts in the bytes never make `unpack`
  allocate more than the leaves of the layout."""
  try:
    view = memoryview(data)
  except (TypeError, ValueError, BufferError):
    raise BadCode(
      f"a packed code is bytes, not of the type {type(data).__name__}"
    ) from None
  if not view.c_contiguous:
    raise BadCode("a packed code is bytes without gaps, not a strided buffer")
  if view.nbytes < HEADER_NBYTES:
    raise BadCode(
      f"a packed code has {HEADER_NBYTES} bytes or more, not {view.nbytes}"
    )
  data = np.frombuffer(view, np.uint8)
  # Check the CRC before any count is used.
  _check_header(layout, data)
  reader = streams.Reader(data[HEADER_NBYTES:])
  arrays: list[Any] = [None] * len(layout.fields)
  for stream in layout.streams:
    try:
      joined = streams.unpack(stream, reader)
    except BadCode as error:
      names = _names(layout, stream)
      raise BadCode(f"a packed code, {names}: {error}") from None
    # Cut the stream into its arrays; large ones are views.
    start = 0
    for i in stream.fields:
      field = layout.fields[i]
      arrays[i] = joined[start : start + field.count].reshape(field.shape)
      start += field.count
  if reader.unread:
    raise BadCode(
      f"{reader.unread} bytes follow the last leaf of a packed code"
    )
  return layout.structure.unflatten(arrays)


def first_length(data: Any) -> int:
  """Returns the length of the first of several packed codes that follow one
  another in uint8[n] or bytes. Raises BadCode if the data are shorter than
  that. The code itself is not checked.

  Example:
    >>> import numpy as np
    >>> from asgd.compression import packing
    >>> code = np.zeros(2, np.float32)
    >>> data = 2 * packing.pack(packing.layout(code), code)
    >>> len(data), packing.first_length(data)
    (64, 32)
  """
  available = len(data)
  if available < HEADER_NBYTES:
    raise BadCode(
      f"a packed code has {HEADER_NBYTES} bytes or more, not {available}"
    )
  *_, size = _FORMAT.unpack_from(memoryview(data))
  # A received count may have any value.
  if size > available - HEADER_NBYTES:
    raise BadCode(
      f"a packed code claims {size} bytes after its header, but there are"
      f" {available - HEADER_NBYTES}"
    )
  return HEADER_NBYTES + size


def _check_header(layout: CodeLayout, data: np.ndarray) -> None:
  """Raises BadCode unless the header, and the CRC of all bytes, are valid."""
  magic, version, zero, checksum, size = _FORMAT.unpack_from(data.data)
  if magic != _MAGIC or zero:
    raise BadCode(
      f"no packed code: it starts with {bytes(data[:8])!r}, not {_MAGIC!r}"
    )
  if version != _VERSION:
    raise BadCode(
      f"a packed code has version {version}, not {_VERSION}: start all"
      " processes from the same release"
    )
  if checksum != layout.checksum:
    raise BadCode(
      f"a packed code of another codec or other shapes: its layout is"
      f" {checksum:08x}, not {layout.checksum:08x}"
    )
  if size != data.size - HEADER_NBYTES:
    raise BadCode(
      f"a packed code claims {size} bytes after its header, but there are"
      f" {data.size - HEADER_NBYTES}"
    )
  (crc,) = _CRC.unpack_from(data.data, _FORMAT.size)
  actual_crc = zlib.crc32(data[: _FORMAT.size].data)
  actual_crc = zlib.crc32(data[HEADER_NBYTES:].data, actual_crc)
  if crc != actual_crc:
    raise BadCode("a packed code is damaged: its CRC-32 differs")
