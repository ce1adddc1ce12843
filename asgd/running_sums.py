"""Running sums of trees: sums that follow the changes of their terms.

Rounding errors of such a sum never decay. In bfloat16 they would become as
large as the sum, so a sum is in float32 at least.
"""

from typing import Any

import jax
import jax.numpy as jnp


def zeros(like: Any) -> Any:
  """Returns the sum of no terms: float32[...] or wider.

  Args:
    like: a tree of arrays of floats, the shapes and dtypes of a term.
  """
  return jax.tree.map(
    lambda x: jnp.zeros(jnp.shape(x), _dtype(jnp.result_type(x))), like
  )


def change(total: Any, new: Any, old: Any) -> Any:
  """Returns total + (new - old), the sum after a term has changed.

  Args:
    total: as from `zeros`.
    new: the term as it is stored from now on, a tree of floats.
    old: the term as it was stored.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import running_sums
    >>> term = jnp.bfloat16(3.0)
    >>> total = running_sums.change(running_sums.zeros(term), term, 0 * term)
    >>> print(total, total.dtype)
    3.0 float32
  """
  return jax.tree.map(
    lambda t, n, o: t + (_as_stored(n) - _as_stored(o)), total, new, old
  )


def _dtype(dtype: Any) -> Any:
  """Returns the dtype of a sum of terms of a dtype."""
  return jnp.promote_types(dtype, jnp.float32)


def _as_stored(x: jax.Array) -> jax.Array:
  """Returns float[...] in the dtype of a sum, rounded to the dtype of `x`. XLA
  may skip the rounding of a result that it uses at once."""
  x = jnp.asarray(x)
  wide = _dtype(x.dtype)
  if wide == x.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  info = jnp.finfo(x.dtype)
  return jax.lax.reduce_precision(x.astype(wide), info.nexp, info.nmant)
