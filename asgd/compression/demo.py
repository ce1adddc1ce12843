"""Decoupled momentum: the strongest cosines of each chunk of a momentum.

A momentum changes slowly over neighbouring parameters and messages, so a few
cosines of a chunk contain most of it. The rest stays in the worker's momentum,
and is sent when it has grown.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks
from asgd.compression import leaves, selection
from asgd.compression.codec import OWN, Code, Codec, Values, power_below, zeros

# Accelerators multiply float32 in fewer bits by default.
_HIGHEST = jax.lax.Precision.HIGHEST


class DeMoState(NamedTuple):
  """State of `demo`."""

  residual: optax.Updates  # m: the momentum not yet sent, shaped like a message


def demo(k: int = 32, *, chunk: int = 64, decay: float = 0.999) -> Codec:
  """DeMo: the k largest cosines of each chunk of a decaying momentum.

    m <- beta m + g
    q = the k largest of the cosine transform of each chunk of m
    sent = the inverse transform of q; m <- m - sent

  A matrix is cut into chunks of `chunk` x `chunk` elements, a vector into
  chunks of `chunk`. If a dimension is no multiple of `chunk`, its largest
  divisor below `chunk` is used. A leaf of more dimensions is reshaped to a
  matrix, with the last dimension as columns. The transform is the orthonormal
  DCT-II.

  The server takes the sign of the sum (or of the mean) of messages:

    asgd.ssgd(rate, workers, optimizer=optax.sign_sgd)

  (The authors' code averages each cosine over the workers that sent it, and
  multiplies g by the learning rate before adding it to m.)

  Args:
    k: cosines per chunk, 1 or more; cosines as large as the k-th are sent too.
    chunk: elements of a chunk in each dimension, 1 or more.
    decay: beta, in [0, 1]; with 1 the momentum loses nothing.

  Returns:
    A Codec, by leaf. Its error feedback is m.

  Raises:
    ValueError: for a number out of its range.

  Source:
    Peng, Quesnelle, Kingma, "Decoupled momentum optimization", 2024,
    arXiv:2411.19870, algorithm 1.

  Example:
    With k=1, only the constant part of this vector is sent. The rest stays in
    the residual.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.demo(1, decay=0.5)
    >>> g = jnp.array([3.0, 3.0, 3.5, 2.5])
    >>> code, state = codec.encode(codec.init(g), g, jax.random.key(0))
    >>> print(jnp.round(codec.decode(code), 4))
    [3. 3. 3. 3.]
    >>> print(jnp.round(state.residual, 4) + 0.0)
    [ 0.   0.   0.5 -0.5]
  """
  checks.integer("k", k)
  checks.integer("chunk", chunk)
  checks.real("decay", decay, lambda x: 0 <= x <= 1, "in [0, 1]")

  def encode(state, tree, key):
    del key
    # [1] m <- beta m + g
    momentum = jax.tree.map(lambda m, g: decay * m + g, state.residual, tree)
    # [2] q: the k largest cosines of each chunk.
    code = jax.tree.map(lambda m: _encode(m, k, chunk), momentum)
    # [3] m <- m - sent. So m is also the residual.
    return code, DeMoState(optax.tree.sub(momentum, decode(code)))

  def decode(code: Code) -> optax.Updates:
    return leaves.decode_all(functools.partial(_decode, chunk), code)

  return Codec(_init, encode, decode, feedback=OWN)


def _init(like: base.Params) -> DeMoState:
  """Returns the state before the first message."""
  leaves.check(like)
  return DeMoState(zeros(like))


def _chunk_shape(
  shape: tuple[int, ...], chunk: int
) -> tuple[int, int, int, int]:
  """Returns (rows, columns) of a leaf as a matrix, then those of a chunk."""
  columns = shape[-1] if shape else 1
  rows = int(np.prod(shape[:-1], dtype=np.int64))
  # The largest divisor up to `chunk`: no chunk is padded.
  height, width = (
    max(d for d in range(1, min(chunk, length) + 1) if length % d == 0)
    for length in (rows, columns)
  )
  return rows, columns, height, width


@functools.cache
def _cosines(length: int) -> np.ndarray:
  """Returns the orthonormal DCT-II, float64[cosine, position]."""
  angles = (2 * np.arange(length) + 1) * np.pi / (2 * length)
  matrix = np.cos(np.arange(length)[:, None] * angles)
  matrix[0] /= np.sqrt(2)
  return matrix * np.sqrt(2 / length)


def _transform(
  x: jax.Array, sizes: tuple[int, int, int, int], *, inverse: bool
) -> jax.Array:
  """Transforms each chunk of a matrix into cosines, float[y, x, height, width].
  With `inverse`, transforms such cosines into the matrix in chunks, float[y,
  height, x, width]."""
  rows, columns, height, width = sizes
  vertical, horizontal = (
    jnp.asarray(_cosines(length), x.dtype) for length in (height, width)
  )
  # y, x: a chunk; h, w: an element of it; i, j: a cosine of it. The matrices
  # are orthonormal, so the inverse uses the same ones.
  if inverse:
    x = x.reshape(rows // height, columns // width, height, width)
    equation = "yxij,ih,jw->yhxw"
  else:
    x = x.reshape(rows // height, height, columns // width, width)
    equation = "yhxw,ih,jw->yxij"
  return jnp.einsum(equation, x, vertical, horizontal, precision=_HIGHEST)


def _encode(x: jax.Array, k: int, chunk: int) -> leaves.Leaf:
  """Returns the k largest cosines of each chunk of a leaf, all others as 0."""
  if not x.size:
    return leaves.as_leaf((), x)
  sizes = _chunk_shape(x.shape, chunk)
  wide = leaves.wide(x)
  unit = power_below(jnp.abs(wide).max())  # no sum overflows
  cosines = _transform(wide / unit, sizes, inverse=False)
  flat = cosines.reshape(-1, sizes[2] * sizes[3])
  # Each chunk is a row of `flat`, and has its own threshold.
  magnitudes = selection.magnitudes(flat)
  count = min(k, flat.shape[1])
  thresholds = jax.vmap(lambda row: selection.threshold(row, count))(magnitudes)
  is_sent = magnitudes >= thresholds[:, None]
  sent_values = jnp.where(is_sent, flat, 0.0).reshape(-1)
  bound = float(jnp.finfo(wide.dtype).max) / (2 * flat.shape[1])
  # Clip, so that no sum in the inverse transform overflows.
  sent_values = jnp.clip(sent_values, -bound / unit, bound / unit) * unit
  return leaves.as_leaf(Values(sent_values), x)


def _decode(chunk: int, leaf: leaves.Leaf) -> jax.Array:
  """Decodes a leaf from its cosines. Barriers keep XLA from fusing it with
  other code, which would round differently in another program."""
  sent_values = jax.lax.optimization_barrier(leaf.code.values)
  sizes = _chunk_shape(leaf.shape, chunk)
  values = _transform(sent_values, sizes, inverse=True)
  return jax.lax.optimization_barrier(values)
