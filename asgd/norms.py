"""Distances and norms of parameters that a server records for each message."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from asgd import base

_FEW_LEAVES = 100  # XLA compiles a chain of this many additions in a second
# Squares of leaves between these sizes are summed in pieces of the smaller
# size. On a CPU two sums of 25,088 squares took 14 us, one of 50,176 took 28
# us. With 200,704 squares there was no difference.
_PIECE_SIZE, _MAX_IN_PIECES = 2**15, 2**17


def rms(tree: optax.Params) -> jax.Array:
  """Root mean square over all elements of a tree.

  Args:
    tree: a tree of float arrays.

  Returns:
    float32[]; 0 for a tree without elements.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.norms import rms
    >>> print(rms([jnp.array([1.0, 1.0]), jnp.array([[5.0], [3.0]])]))
    3.0
  """
  leaves = [x for x in jax.tree.leaves(tree) if x.size]
  if not leaves:
    return jnp.zeros([], jnp.float32)
  squares = [_sum_of_squares(x) for x in leaves]
  square = _add_up(squares) if len(leaves) > _FEW_LEAVES else sum(squares)
  return jnp.sqrt(square / sum(x.size for x in leaves)).astype(jnp.float32)


def has_nonzero(tree: optax.Params) -> jax.Array:
  """Whether an element of a tree is not zero, bool[].

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.norms import has_nonzero
    >>> print(has_nonzero([jnp.zeros(2), jnp.array([0.0, -1.0])]))
    True
  """
  return jnp.stack([(x != 0).any() for x in jax.tree.leaves(tree)]).any()


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
  """Returns the sum of a leaf's squares, float32[] or wider."""
  # A float16 holds no square of 300 or of 1e-4, and no count of 65,520.
  leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
  if _PIECE_SIZE < leaf.size <= _MAX_IN_PIECES:
    pieces = jnp.array_split(leaf, -(-leaf.size // _PIECE_SIZE))
    return sum((jnp.vdot(x, x) for x in pieces), jnp.zeros([], leaf.dtype))
  # Sum over the leading axes first. XLA's CPU loops vectorize over the last
  # axis; a sum over all axes at once is one chain of additions.
  return jnp.square(leaf).sum(axis=tuple(range(leaf.ndim - 1))).sum()


def _add_up(numbers: Sequence[jax.Array]) -> jax.Array:
  """Returns the sum of `numbers`, added in their order by a loop.

  XLA would copy a chain of additions into each reader of the sum. Its compile
  time would grow with the cube of the chain's length."""
  terms = jnp.stack(numbers)

  def add(i: int, total: jax.Array) -> jax.Array:
    return total + terms[i]

  start = jnp.zeros([], terms.dtype)
  total: jax.Array = jax.lax.fori_loop(0, len(numbers), add, start)
  return total


def gap(params: optax.Params, sent_params: optax.Params) -> jax.Array:
  """Distance between the parameters and those that a message was computed on.

    gap = ||params - sent_params||_2 / sqrt(k),   k trained parameters in all

  Args:
    params: the server's parameters when the message is received.
    sent_params: like `params`. For an algorithm that looks ahead these are the
      predicted parameters that were sent.

  Returns:
    float32[], in the unit of a parameter.

  Source:
    Hakimi et al., "Taming momentum in a distributed asynchronous environment",
    2019, arXiv:1907.11612; also Barkai et al., ICLR 2020, arXiv:1909.10802.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.norms import gap
    >>> print(gap(jnp.array([8.0, 0.0]), jnp.array([7.0, 7.0])))  # sqrt(50 / 2)
    5.0
  """
  difference = jax.tree.map(
    jnp.subtract, base.weights_of(params), base.weights_of(sent_params)
  )
  return rms(difference)
