"""Shared parts of codecs: a code for each leaf, and exact decoding.

A server decodes in another program than the worker that keeps a residual. A
compiler may fuse a product with the sum that uses it (a fused multiply-add
rounds once, not twice), and then the two programs differ. So the product of a
symbol and its scale is made exact: a scale has so few bits that the product
fits into a float32. Then the two programs agree to the bit.

Index letters used in shape comments:
  L  elements of a leaf
  B  blocks of a leaf
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base
from asgd.compression.codec import OPTIONAL, Code, Codec, Symbols

_LARGEST = float(np.finfo(np.float32).max)
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaf:
  """The code of a leaf of a message, with the leaf's shape and dtype."""

  code: Any  # arrays, Symbols or Values
  shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})

  @property
  def size(self) -> int:
    """Elements of the leaf."""
    return math.prod(self.shape)


def _is_leaf(x: Any) -> bool:
  return isinstance(x, Leaf)


def check(like: base.Params) -> None:
  """Raises ValueError, naming the path, for a leaf (an array, or its shape and
  dtype) that is not floating point."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(like):
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
      name = jax.tree_util.keystr(path) or "the message"
      raise ValueError(
        f"{name} has dtype {dtype}, but codecs take floating point only: keep"
        " it out of the trained parameters, or cast it"
      )


def make_codec(
  encode: Callable[[Any, jax.Array, jax.Array], tuple[Any, Any]],
  decode: Callable[[Leaf], jax.Array],
  init: Callable[[Any, int], Any] = lambda like, number: (),
  *,
  unbiased: bool = False,
  feedback: str = OPTIONAL,
  delta: float | None = None,
) -> Codec:
  """Makes a codec from functions of one leaf.

  Args:
    encode: (state of the leaf, leaf, key of the leaf) -> (code, state); not
      called for leaves without elements.
    decode: Leaf -> its elements, in any shape. Their float dtype is at least as
      wide as the leaf's. Not called for leaves without elements.
    init: (shape and dtype of the leaf, its index) -> state.
    unbiased, feedback, delta: see `Codec`.
  """

  def init_all(like: base.Params) -> Any:
    check(like)
    leaves = jax.tree.leaves(like)
    return tuple(
      init(x, i) if x.size else () for i, x in enumerate(leaves)
    )

  def encode_all(state, tree, key):
    leaves, structure = jax.tree.flatten(tree)
    codes, states = [], []
    for i, (inner, x) in enumerate(zip(state, leaves, strict=True)):
      code: Any = ()
      if x.size:
        # A key per leaf, so that leaves draw independently.
        code, inner = encode(inner, x, jax.random.fold_in(key, i))
      codes.append(as_leaf(code, x))
      states.append(inner)
    return jax.tree.unflatten(structure, codes), tuple(states)

  return Codec(
    init_all,
    encode_all,
    functools.partial(decode_all, decode),
    unbiased=unbiased,
    feedback=feedback,
    delta=delta,
  )


def as_leaf(code: Any, like: jax.Array) -> Leaf:
  """Returns a code as a Leaf, with the shape and dtype of `like`."""
  return Leaf(code, tuple(like.shape), jnp.result_type(like).name)


def leaves_of(code: Code) -> list[Leaf]:
  """Returns the leaves of a code."""
  return jax.tree.leaves(code, is_leaf=_is_leaf)


def decode_all(decode: Callable[[Leaf], jax.Array], code: Code) -> Any:
  """Returns a tree of decoded leaves, in their shapes and dtypes."""

  def decode_leaf(leaf: Leaf) -> jax.Array:
    if not leaf.size:
      return jnp.zeros(leaf.shape, leaf.dtype)
    return narrow(decode(leaf), leaf.dtype).reshape(leaf.shape)

  return jax.tree.map(decode_leaf, code, is_leaf=_is_leaf)


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float[...] to a dtype that is not wider; larger numbers become its
  largest. XLA may compute with excess precision; `reduce_precision` forces the
  rounding."""
  info = jnp.finfo(dtype)
  if jnp.finfo(x.dtype).bits > info.bits:
    # Clip first: rounding would turn larger numbers into infinity.
    x = jnp.clip(x, float(info.min), float(info.max))
    x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
  return x.astype(dtype)


def float32(x: jax.Array) -> jax.Array:
  """Returns finite numbers as float32; larger ones become its largest."""
  if x.dtype == jnp.float64:
    x = jnp.clip(x, -_LARGEST, _LARGEST)
  return x.astype(jnp.float32)


def clip_to_float32(x: jax.Array) -> jax.Array:
  """Returns float32 numbers; infinities from rounding become its largest."""
  return jnp.clip(x, -_LARGEST, _LARGEST)


def blocks(x: jax.Array, size: int) -> jax.Array:
  """Cuts a leaf, float[...], into blocks: float[B, size]. Zeros fill up the
  last block; a leaf with fewer than `size` elements is one block."""
  x = x.reshape(-1)
  size = min(size, x.size)
  n_missing = -x.size % size  # elements that the last block lacks
  return (jnp.pad(x, (0, n_missing)) if n_missing else x).reshape(-1, size)


def symbols_of(
  numbers: jax.Array, size: int, scales: jax.Array, levels: int
) -> Symbols:
  """Returns the first `size` integers of `numbers` as Symbols with float32[...]
  scales. The integers have any dtype and are from -levels to levels."""
  # Packing stores fewer bits; these are the dtypes in memory.
  dtype = jnp.int8 if levels < 2**7 else jnp.int16
  symbols = numbers.reshape(-1)[:size].astype(dtype)
  return Symbols(symbols, scales.reshape(-1), levels)


def products(leaf: Leaf, size: int) -> jax.Array:
  """Returns float32[L]: the Symbols of a leaf times the scale of their block,
  for `blocks` of `size` elements."""
  symbols = blocks(leaf.code.symbols, size)
  numbers = symbols.astype(jnp.float32) * leaf.code.scales[:, None]
  return numbers.reshape(-1)[: leaf.size]


def scaled(leaf: Leaf) -> jax.Array:
  """Returns float32[L], the Symbols of a leaf times its one scale."""
  return leaf.code.symbols.astype(jnp.float32) * leaf.code.scales


def wide(x: jax.Array) -> jax.Array:
  """Returns an array as float32, or unchanged if its dtype is wider."""
  # bfloat16 and float16 become float32; float64 stays.
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def exact_scale(x: jax.Array, levels: int) -> jax.Array:
  """Returns scales, float32[...]; a product of a scale and a symbol is exact.

  Scales are rounded up to so few bits that the product with any integer up to
  `levels` is a float32. No scale is above 2^126, because its inverse must be a
  normal number. No product is above the largest float32.

  Args:
    x: float[...], 0 or more. Numbers below the smallest float32 become 0.
    levels: 1 or more, below 2^23.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.compression import leaves
    >>> print(leaves.exact_scale(jnp.array([0.75, 1.0 + 2.0**-23]), 127))
    [0.75      1.0000153]
  """
  # A product of two integers has the bits of both: scale and symbol together
  # must fit into the 24 bits of a float32.
  n_dropped_bits = levels.bit_length()
  mask = (1 << n_dropped_bits) - 1
  single_precision = float32(x)
  bits = jax.lax.bitcast_convert_type(single_precision, jnp.int32)
  bits += single_precision.astype(x.dtype) < x  # undo rounding a float64 down
  # Round the bits up, to a multiple of 2^n_dropped_bits.
  bits = (bits + mask) & ~mask
  bound = np.float32(min(_LARGEST / levels, 2.0**126)).view(np.int32)
  bound &= ~np.int32(mask)  # the bound has as few bits as a scale
  # Bits of positive floats are ordered as the numbers are.
  bits = jnp.minimum(bits, bound)
  scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
  # XLA may flush subnormal numbers to 0, in one program and not in another.
  return jnp.where(scale < _TINY, 0.0, scale)


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns x / scale, or 0 if the scale is 0."""
  # The inner `where` avoids 0 / 0, a NaN that jax_debug_nans would report.
  return jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1.0), 0.0)


def power_at_least(count: int) -> float:
  """Returns the smallest power of 2 that is at least `count`."""
  return float(1 << (count - 1).bit_length())

