"""PowerSGD: messages of low rank, by one step of power iteration each.

A leaf of two dimensions or more is a matrix [out, in]: its last dimension holds
the outputs, all others together the inputs. Leaves that would not become
smaller, such as vectors, are sent in full.

Index letters used in shape comments:
  m  outputs of a leaf
  n  inputs, all other dimensions
  r  the rank
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import NEEDED, Codec, power_below, zeros
from asgd.compression.reducers import MOST_STEPS, Reducer

# Accelerators multiply float32 in fewer bits by default.
_HIGHEST = jax.lax.Precision.HIGHEST
_SEED = 0x504F5752  # of the first Q, the same at all workers


def powersgd(rank: int = 2) -> Codec:
  """PowerSGD at one worker, for a server that applies messages one by one.

    P <- M Q;   P <- an orthonormal basis of its columns
    Q <- M^T P;   sent = P Q^T

  M is a leaf as a matrix [m, n], with the residual of `error_feedback` added. Q
  is random at first and kept from message to message, so each message continues
  the power iteration.

  In the paper P and Q are means over workers in step: that is
  `powersgd_reducer`, for data parallel training. Here each worker has a
  separate Q, so the server's sum of N messages has a rank of up to N r. As in
  the paper, momentum is applied at the server, after decompression.

  Args:
    rank: r. A leaf with r (m + n) >= m n is sent in full.

  Returns:
    A Codec, by leaf. It needs error feedback.

  Raises:
    ValueError: for a rank that is no positive integer.

  Source:
    Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient
    compression for distributed optimization", NeurIPS 2019, arXiv:1905.13727,
    algorithm 1.

  Example:
    A matrix of rank 1 is sent exactly, up to rounding.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> x = jnp.outer(jnp.array([1.0, 2.0, -1.0]), jnp.array([1.0, 0.0, 3.0]))
    >>> codec = compression.powersgd(rank=1)
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(jnp.round(codec.decode(code), 4) + 0.0)
    [[ 1.  0.  3.]
     [ 2.  0.  6.]
     [-1.  0. -3.]]
  """
  checks.integer("rank", rank)

  def encode(state: Any, x: jax.Array, key: jax.Array) -> tuple[Any, Any]:
    del key
    if not _is_low_rank(x, rank):
      return x.reshape(-1), state
    return _factors(x, state)

  def init(like: Any, number: int) -> Any:
    return _first_factor(like, number, rank) if _is_low_rank(like, rank) else ()

  return leaves.make_codec(encode, _decode, init, feedback=NEEDED)


class PowerSGDState(NamedTuple):
  """State of `powersgd_reducer`, of one device."""

  count: jax.Array  # type: ignore[assignment] # int32[], steps
  residual: Any  # e, like a gradient: the part of M_w that g left out
  inner: tuple[Any, ...]  # Q of each leaf, [n, r]; () if its mean is exact


def powersgd_reducer(
  rank: int = 2, *, minimum_rate: float = 1.0, start: int = 0
) -> Reducer:
  """PowerSGD of data parallel training: factors are averaged, not matrices.

    M_w = g_w + e_w
    P <- mean_w M_w Q;   P <- an orthonormal basis of its columns
    Q <- mean_w M_w^T P;   g <- P Q^T;   e_w <- M_w - g

  All devices have the same P and Q, and the same gradient g, of rank r for a
  matrix. The optimizer runs after the reducer. As in the paper, the optimizer
  has the momentum, and weight decay is not compressed.

  Args:
    rank: r. The mean of a leaf with r (m + n) >= m n is exact.
    minimum_rate: the mean of a leaf with m n / (r (m + n)) below it is exact,
      too. Above 0; the authors' code and PyTorch's hook use 2.
    start: steps at the beginning with exact means; they do not change Q.

  Returns:
    A Reducer, which has error feedback.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient
    compression for distributed optimization", NeurIPS 2019, arXiv:1905.13727,
    algorithms 1 and 2, in the order of the authors' code: a worker keeps the
    part of its matrix that is missing in the mean.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> reducer = compression.powersgd_reducer(rank=1)
    >>> g = jnp.ones((2, 3, 3)) * jnp.array([1.0, 3.0]).reshape(2, 1, 1)
    >>> state = jax.vmap(reducer.init)(g)
    >>> mean, state = jax.vmap(  # over two devices
    ...   lambda s, g: reducer.reduce(s, g, jax.random.key(0), "data"),
    ...   axis_name="data",
    ... )(state, g)
    >>> print(jnp.round(mean[0, 0], 4), jnp.round(state.residual[1, 0], 4))
    [2. 2. 2.] [1. 1. 1.]
  """
  checks.integer("rank", rank)
  checks.positive("minimum_rate", minimum_rate)
  checks.integer("start", start, 0, most=MOST_STEPS)

  def init(like: base.Params) -> PowerSGDState:
    leaves.check(like)
    indexed_leaves = enumerate(jax.tree.leaves(like))
    inner = (
      _first_factor(x, i, rank) if _is_low_rank(x, rank, minimum_rate) else ()
      for i, x in indexed_leaves
    )
    return PowerSGDState(jnp.int32(0), zeros(like), tuple(inner))

  def compressed(state, tree, axis):
    residuals = jax.tree.leaves(state.residual)
    grads, structure = jax.tree.flatten(tree)
    rows: list[tuple[Any, ...]] = []  # (mean, e_w, Q) of each leaf
    for g, e, q in zip(grads, residuals, state.inner, strict=True):
      # A leaf without Q is averaged exactly.
      if isinstance(q, tuple):
        rows.append((jax.lax.pmean(g, axis), e, q))
        continue
      total = g + e  # M_w
      code, q = _factors(total, q, axis)
      # g <- P Q^T is the same on all devices; e_w <- M_w - g is not.
      mean = leaves.narrow(_product(*code), g.dtype).reshape(g.shape)
      rows.append((mean, total - mean, q))
    means, residual = (
      jax.tree.unflatten(structure, [row[i] for row in rows]) for i in range(2)
    )
    inner = tuple(row[2] for row in rows)
    return means, PowerSGDState(state.count, residual, inner)

  def reduce(state, tree, key, axis):
    del key
    state = state._replace(count=state.count + 1)
    if not start:
      return compressed(state, tree, axis)
    return jax.lax.cond(
      state.count > start,
      lambda: compressed(state, tree, axis),
      lambda: (jax.lax.pmean(tree, axis), state),
    )

  return Reducer(init, reduce)


def _is_low_rank(like: Any, rank: int, minimum_rate: float = 1.0) -> bool:
  """Whether factors are smaller than a leaf, `minimum_rate` times at least."""
  size = math.prod(like.shape)
  if len(like.shape) < 2 or not size:
    return False
  outputs = like.shape[-1]
  factors = rank * (outputs + size // outputs)  # r (m + n), both factors
  return factors < size and size >= minimum_rate * factors


def _first_factor(like: Any, index: int, rank: int) -> jax.Array:
  """Returns Q of the first message, [n, r]: the same at each worker."""
  inputs = math.prod(like.shape[:-1])
  key = jax.random.fold_in(jax.random.key(_SEED), index)
  dtype = jnp.promote_types(like.dtype, jnp.float32)
  return jax.random.normal(key, (inputs, rank), dtype)


def _factors(
  x: jax.Array, q: jax.Array, axis: str | None = None
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Returns ((P [m, r], Q [n, r]) of a leaf, or of its mean over an axis; Q for
  the next message)."""

  def mean(y: jax.Array) -> jax.Array:
    return y if axis is None else jax.lax.pmean(y, axis)

  transposed = x.reshape(-1, x.shape[-1]).astype(q.dtype)  # M^T, [n, m]
  largest = jnp.abs(transposed).max()
  if axis is not None:
    # All devices must divide by the same power of 2.
    largest = jax.lax.pmax(largest, axis)
  unit = power_below(largest)  # no product overflows
  transposed = transposed / unit
  # [1] P <- mean of M Q: r columns are sent instead of the matrix.
  p = mean(jnp.matmul(transposed.T, q, precision=_HIGHEST))
  # [2] P <- an orthonormal basis of its columns.
  p, _ = jnp.linalg.qr(p)  # [m, r]; orthonormal also if P is 0
  # [3] Q <- mean of M^T P. In units of `unit`, it starts the next iteration.
  q = mean(jnp.matmul(transposed, p, precision=_HIGHEST))
  bound = float(jnp.finfo(q.dtype).max) / (2 * q.shape[1])
  # Clip, so that no sum in P Q^T overflows.
  sent_q = jnp.clip(q, -bound / unit, bound / unit) * unit
  return (p, sent_q), q


def _product(p: jax.Array, q: jax.Array) -> jax.Array:
  """Returns M^T = Q P^T, [n, m]. Barriers keep XLA from fusing it with other
  code, so that the numbers are the same in any program."""
  p, q = jax.lax.optimization_barrier((p, q))
  product = jnp.matmul(q, p.T, precision=_HIGHEST)
  return jax.lax.optimization_barrier(product)


def _decode(leaf: leaves.Leaf) -> jax.Array:
  # The code of a leaf is one array (sent in full), or (P, Q).
  if not isinstance(leaf.code, tuple):
    return leaf.code
  return _product(*leaf.code)
