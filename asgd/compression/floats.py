"""Fewer bits for each number: bfloat16, float16, int8 and 4-bit floats."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from asgd import checks
from asgd.compression import leaves
from asgd.compression.codec import NEEDED, Codec, Symbols

_INT8_LEVELS = 127  # number of levels on either side of 0
_E3M0_LEVELS = 7  # number of magnitudes other than 0
_MANTISSA_BITS = 23  # stored bits of a float32


def _cast(dtype: Any) -> Codec:
  """Makes a codec that sends numbers in another dtype; numbers out of its range
  become its largest."""

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    del key
    return leaves.narrow(leaves.wide(x), dtype).reshape(-1), state

  def decode(leaf: leaves.Leaf) -> jax.Array:
    # Widening is exact, so worker and server decode the same bits.
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return leaf.code.astype(wide)

  return leaves.make_codec(encode, decode)


def bf16() -> Codec:
  """Rounds to bfloat16: float32's exponent, 8 bits of precision.

  Returns:
    A Codec, by element.

  Source:
    none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.bf16(), jnp.array([1.0, 1.001, -1.01])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))  # multiples of 2^-7
    [ 1.         1.        -1.0078125]
  """
  return _cast(jnp.bfloat16)


def fp16() -> Codec:
  """Rounds to float16: 11 bits of precision, from 6e-8 to 65504.

  Larger numbers are sent as 65504, smaller numbers as 0.

  Returns:
    A Codec, by element.

  Source:
    none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.fp16(), jnp.array([1.0, 1e9, -1e-9])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))
    [ 1.0000e+00  6.5504e+04 -0.0000e+00]
  """
  return _cast(jnp.float16)


def int8(*, block: int = 256) -> Codec:
  """Blocks of integers from -127 to 127, with a scale for each block.

    scale = max |x_i| / 127 of the block, rounded up to 17 bits
    sent_i = scale round(x_i / scale)

  Args:
    block: elements that share a scale, in the order of the leaf.

  Returns:
    A Codec, by leaf.

  Raises:
    ValueError: for a block that is no positive integer.

  Source:
    Dettmers, "8-bit approximations for parallelism in deep learning", ICLR
    2016, arXiv:1511.04561, with other number types. A scale for each block:
    Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022,
    arXiv:2110.02861.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.int8(), jnp.array([254.0, -2.0, 3.5])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(code.code.symbols, code.code.scales, codec.decode(code))
    [127  -1   2] [2.] [254.  -2.   4.]
  """
  checks.integer("block", block)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Symbols, Any]:
    del key
    rows = leaves.blocks(leaves.float32(x), block)
    largest = jnp.abs(rows).max(axis=1)
    scales = leaves.exact_scale(largest / _INT8_LEVELS, _INT8_LEVELS)
    symbols = jnp.round(leaves.divide(rows, scales[:, None]))
    # exact_scale limits scales, so the largest elements may be over 127 scales.
    symbols = jnp.clip(symbols, -_INT8_LEVELS, _INT8_LEVELS)
    return leaves.symbols_of(symbols, x.size, scales, _INT8_LEVELS), state

  decode = functools.partial(leaves.products, size=block)
  return leaves.make_codec(encode, decode)


def e3m0(*, block: int = 256) -> Codec:
  """4-bit floats: a sign, 3 bits of exponent, no mantissa.

    sent_i = sign(x_i) times the nearest of 0 and scale 2^-6, ..., 2^-1, 1
    scale: the power of 2 nearest to max |x_i| of the block

  Args:
    block: elements that share a scale, in the order of the leaf.

  Returns:
    A Codec, by leaf. Its errors are up to a third of an element, so it needs
    error feedback. The paper uses none, because its messages sum many steps.

  Raises:
    ValueError: for a block that is no positive integer.

  Source:
    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    arXiv:2501.18512, which sends displacements in this format; the blocks are
    this library's.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.e3m0(), jnp.array([1.0, 0.4, -0.7, 0.001])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(code.code.symbols, codec.decode(code))
    [ 7  6 -6  0] [ 1.   0.5 -0.5  0. ]
  """
  checks.integer("block", block)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Symbols, Any]:
    del key
    rows = leaves.blocks(leaves.float32(x), block)
    # Symbol s stands for 2^(s - 1) units, so a unit is 2^-6 of the scale.
    largest_power = _nearest_power(jnp.abs(rows).max(axis=1))
    units_per_scale = 2 ** (_E3M0_LEVELS - 1)
    units = leaves.exact_scale(largest_power / units_per_scale, units_per_scale)
    ratio = leaves.divide(jnp.abs(rows), units[:, None])
    bits = jax.lax.bitcast_convert_type(ratio, jnp.int32)
    # Adding half a mantissa moves 1.5 and more to the next power of 2. A
    # float32 has the exponent e as the bits e + 127.
    exponent = (bits + (1 << _MANTISSA_BITS - 1) >> _MANTISSA_BITS) - 127
    level = jnp.clip(exponent + 1, 1, _E3M0_LEVELS)
    # Below half a unit, 0 is the nearest.
    level = jnp.where(ratio >= 0.5, level, 0)
    symbols = jnp.where(rows < 0, -level, level)
    return leaves.symbols_of(symbols, x.size, units, _E3M0_LEVELS), state

  def decode(leaf: leaves.Leaf) -> jax.Array:
    symbols = leaves.blocks(leaf.code.symbols, block).astype(jnp.int32)
    # Shifted integers are exact powers of 2 on all devices; exp2 may round.
    size = jnp.where(symbols == 0, 0, 1 << jnp.maximum(jnp.abs(symbols) - 1, 0))
    numbers = jnp.where(symbols < 0, -size, size).astype(jnp.float32)
    return (numbers * leaf.code.scales[:, None]).reshape(-1)[: leaf.size]

  return leaves.make_codec(encode, decode, feedback=NEEDED)


def _nearest_power(x: jax.Array) -> jax.Array:
  """Returns the power of 2 that is nearest to a float32; 0 for 0."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  # Round the mantissa away; a carry raises the exponent.
  bits = bits + (1 << _MANTISSA_BITS - 1) & ~((1 << _MANTISSA_BITS) - 1)
  bits = jnp.minimum(bits, 254 << _MANTISSA_BITS)  # 255 would be infinity
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
