"""The layout of a code, which sender and receiver know."""

import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import wire
from asgd.compression.codec import Symbols, Values
from asgd.compression.packing import bits

RAW, SYMBOLS, VALUES = "raw", "symbols", "values"  # kinds of an array
HEADER_NBYTES = 24  # see `messages`
# Elements from which on an array is a separate stream. A stream costs 0.1 to
# 0.2 ms and some bytes besides its content: 160 arrays of 15,625 took 18 ms
# with a stream each; as one stream, 1.3 ms and a tenth fewer bytes.
LARGE = 2**16


class CodeField(NamedTuple):
  """An array of a code."""

  path: str  # like ['w'].symbols, for errors
  shape: tuple[int, ...]
  dtype: np.dtype
  kind: str  # RAW, SYMBOLS or VALUES
  levels: int = 0  # of SYMBOLS
  coded: bool = True  # whether positions use an entropy code

  @property
  def count(self) -> int:  # type: ignore[override]
    """Number of elements."""
    return math.prod(self.shape)


class PackedStream(NamedTuple):
  """Arrays of one kind, packed together: a single large array, or all small
  ones with the same dtype and levels."""

  kind: str
  dtype: np.dtype
  levels: int
  coded: bool
  fields: tuple[int, ...]  # indices of CodeLayout.fields
  count: int  # type: ignore[assignment] # elements of all fields

  @property
  def width(self) -> int:
    """Bits of a symbol in the dense form."""
    return (2 * self.levels).bit_length()

  @property
  def dense_nbytes(self) -> int:
    """Bytes of the dense form."""
    if self.kind != SYMBOLS:
      return self.count * self.dtype.itemsize
    if self.levels == 1:
      return -(-self.count // 5)  # 3**5 < 2**8
    return bits.nbytes(self.count, self.width)


class CodeLayout(NamedTuple):
  """The structure of a code; equal for equal codes."""

  structure: jax.tree_util.PyTreeDef
  fields: tuple[CodeField, ...]  # in jax.tree.leaves order
  streams: tuple[PackedStream, ...]  # in the order in which they are packed
  checksum: int  # of the fields; it identifies the layout in the header
  most: int  # largest size of a packed code, in bytes


def layout(code: Any) -> CodeLayout:
  """Returns the layout of a code, which depends only on its structure, shapes,
  dtypes and levels.

  Args:
    code: a tree of arrays, `Symbols` and `Values`, or of their structs.

  Raises:
    ValueError: for leaves that are not numbers, symbols of a dtype that is no
      signed integer or too small for their levels, and values that are not
      floats of 16 bits or more.

  Example:
    >>> import numpy as np
    >>> from asgd.compression import packing
    >>> code = {"w": np.zeros((2, 3), np.float32)}
    >>> packing.layout(code).most  # 24 of them are the header
    48
  """
  fields = []
  for path, leaf in jax.tree.leaves_with_path(code, is_leaf=_is_leaf):
    packing: tuple[Any, ...] = (RAW,)  # kind, levels, coded
    if isinstance(leaf, Symbols):
      packing = SYMBOLS, leaf.levels, leaf.coded
    elif isinstance(leaf, Values):
      packing = VALUES, 0, leaf.coded
    for subpath, x in jax.tree.leaves_with_path(leaf):
      name = jax.tree_util.keystr(path + subpath)
      fields.append(_field(name, x, *packing))
      packing = (RAW,)  # the first array is packed; scales are sent unchanged
  # The checksum must not depend on the process, as hash() does.
  lines = (
    f"{path} {shape} {dtype.name} {kind} {levels}" + " words" * (not coded)
    for path, shape, dtype, kind, levels, coded in fields
  )
  checksum = zlib.crc32("\n".join(lines).encode())
  streams = _streams(fields)
  # A stream that is not raw has a byte for its form, and is never larger than
  # its dense form.
  most = HEADER_NBYTES + sum(
    (stream.kind != RAW) + stream.dense_nbytes for stream in streams
  )
  structure = jax.tree.structure(code)
  return CodeLayout(structure, tuple(fields), streams, checksum, most)


def _is_leaf(x: Any) -> bool:
  return isinstance(x, Symbols | Values)


def _field(
  path: str, x: Any, kind: str, levels: int = 0, coded: bool = True
) -> CodeField:
  """Returns the field of an array; ValueError for a dtype that does not fit."""
  shape, dtype = wire.shape_and_dtype(path, x)
  if kind == SYMBOLS:
    if not jnp.issubdtype(dtype, jnp.signedinteger) or dtype.itemsize > 4:
      raise ValueError(f"{path} must be int8, int16 or int32, not {dtype}")
    largest = int(jnp.iinfo(dtype).max)
    if not 1 <= levels <= largest:
      raise ValueError(
        f"the levels of {path} must be from 1 to {largest}, the largest"
        f" {dtype}, not {levels}"
      )
  is_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
  if kind == VALUES and not is_float:
    raise ValueError(
      f"{path} must be floats of 16, 32 or 64 bits, not {dtype}; outside of"
      " Values such arrays are sent unchanged"
    )
  return CodeField(path, shape, dtype, kind, int(levels), bool(coded))


def _streams(fields: list[CodeField]) -> tuple[PackedStream, ...]:
  """Groups fields into streams; a raw or large array is a separate stream."""
  # (kind, dtype, levels, coded, index if separate) -> indices
  groups: dict[tuple[Any, ...], list[int]] = {}
  for i, field in enumerate(fields):
    # Small arrays with the same key share one stream.
    separate = field.kind == RAW or field.count >= LARGE
    packing = field.kind, field.dtype, field.levels, field.coded
    key = *packing, i if separate else None
    groups.setdefault(key, []).append(i)
  return tuple(
    PackedStream(
      *(kind, dtype, levels, coded, tuple(indices)),
      count=sum(fields[i].count for i in indices),
    )
    for (kind, dtype, levels, coded, _), indices in groups.items()
  )
