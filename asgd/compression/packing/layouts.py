"""What both sides know of a code."""

import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd.compression.codec import Symbols, Values
from asgd.compression.packing import bits

RAW, SYMBOLS, VALUES = "raw", "symbols", "values"
HEADER_NBYTES = 24


class Field(NamedTuple):
  """A leaf of a code."""

  path: str  # like ['w'], for messages
  kind: str  # RAW, SYMBOLS or VALUES
  shape: tuple[int, ...]
  dtype: np.dtype
  levels: int = 0  # of SYMBOLS
  scales: tuple[tuple[int, ...], np.dtype] | None = None  # of SYMBOLS

  @property
  def count(self) -> int:
    """Elements."""
    return math.prod(self.shape)

  @property
  def scales_nbytes(self) -> int:
    """Bytes of the scales, which travel as they are."""
    if self.scales is None:
      return 0
    shape, dtype = self.scales
    return math.prod(shape) * dtype.itemsize

  @property
  def width(self) -> int:
    """Bits of a symbol, if all are packed."""
    return (2 * self.levels).bit_length()

  @property
  def dense_nbytes(self) -> int:
    """Bytes if all elements are packed."""
    if self.kind != SYMBOLS:
      return self.count * self.dtype.itemsize
    if self.levels == 1:
      return -(-self.count // 5)  # 3**5 < 2**8
    return bits.nbytes(self.count, self.width)

  @property
  def most(self) -> int:
    """Bytes that the leaf takes at most, with its scales and its form."""
    return (self.kind != RAW) + self.scales_nbytes + self.dense_nbytes


class Layout(NamedTuple):
  """The structure of a code; equal for equal codes."""

  structure: jax.tree_util.PyTreeDef  # Symbols and Values are its leaves
  fields: tuple[Field, ...]  # of its leaves
  checksum: int  # of all fields: what a message says it is of
  most: int  # bytes that a packed code takes at most


def flatten(code: Any) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
  """Returns leaves and structure; Symbols and Values are leaves."""
  return jax.tree.flatten(code, is_leaf=_is_leaf)


def _is_leaf(x):
  return isinstance(x, Symbols | Values)


def layout(code: Any) -> Layout:
  """Returns the layout of a code, a function of its structure, shapes, dtypes
  and levels alone.

  Args:
    code: a tree of arrays, `Symbols` and `Values`; or of what has their shapes
      and dtypes, as jax.eval_shape returns it.

  Raises:
    ValueError: for leaves that are no numbers, symbols that are no signed whole
      numbers or have not room for their levels, and values that are no floats.

  Example:
    >>> import numpy as np
    >>> from asgd.compression import packing
    >>> code = {"w": np.zeros((2, 3), np.float32)}
    >>> packing.layout(code).most  # 24 of them are the header
    48
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(code, _is_leaf)
  fields = tuple(field(jax.tree_util.keystr(path), x) for path, x in leaves)
  checksum = zlib.crc32("\n".join(map(_described, fields)).encode())
  most = HEADER_NBYTES + sum(each.most for each in fields)
  return Layout(structure, fields, checksum, most)


def field(path: str, leaf: Any) -> Field:
  """Returns what is known of a leaf. Raises as `layout`."""
  if isinstance(leaf, Symbols):
    shape, dtype = _of_array(path, leaf.symbols)
    levels = leaf.levels
    if not jnp.issubdtype(dtype, jnp.signedinteger):
      raise ValueError(f"the symbols of {path} must be int8, int16 or int32,"
                       f" not {dtype}")
    if not 1 <= levels <= np.iinfo(dtype).max:
      raise ValueError(
        f"the levels of {path} must be from 1 to {np.iinfo(dtype).max}, the"
        f" largest {dtype}, not {levels}"
      )
    scales = _of_array(path, leaf.scales)
    return Field(path, SYMBOLS, shape, dtype, int(levels), scales)
  if isinstance(leaf, Values):
    shape, dtype = _of_array(path, leaf.values)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      raise ValueError(
        f"the values of {path} must be floats of 16, 32 or 64 bits, not {dtype}"
      )
    return Field(path, VALUES, shape, dtype)
  return Field(path, RAW, *_of_array(path, leaf))


def _of_array(path, x):
  x = x if hasattr(x, "dtype") else np.asarray(x)
  is_number = jnp.issubdtype(x.dtype, jnp.number)
  if not is_number and not jnp.issubdtype(x.dtype, jnp.bool_):
    raise ValueError(
      f"the leaf {path} is of {x.dtype}, which is no number; send a key as"
      " jax.random.key_data(key)"
    )
  return tuple(x.shape), np.dtype(x.dtype).newbyteorder("=")


def _described(field):
  path, kind, shape, dtype, levels, scales = field
  if scales is not None:
    scales = scales[0], scales[1].name
  return f"{path} {kind} {shape} {dtype.name} {levels} {scales}"
