"""Scaling by staleness: a gradient counts less, the staler it is."""

import jax
import jax.numpy as jnp
import optax

from asgd import base


def scale_by_staleness() -> base.Transform:
  """Divides updates by their staleness, if it is 2 or more.

    g <- g / max(staleness, 1)

  As the `at_server` transform of a server that averages several messages, it
  scales each message by its own staleness: the paper's n-softsync.

  Returns:
    A transform without a state, whose update needs the extra arg `staleness`,
    int32[].

  Source:
    Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for distributed deep
    learning", IJCAI 2016, arXiv:1511.05950.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> tx = asgd.scale_by_staleness()
    >>> for staleness in (0, 1, 4):
    ...   g, _ = tx.update(
    ...     jnp.float32(8.0), tx.init(None), staleness=jnp.int32(staleness)
    ...   )
    ...   print(g)
    8.0
    8.0
    2.0
  """

  def update_fn(updates, state, params=None, *, staleness, **extra_args):
    del params, extra_args
    # alpha(tau) / alpha_0 = 1 / tau; the paper does not divide if tau = 0.
    scale = 1.0 / jnp.maximum(staleness, 1)
    updates = jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)
    return updates, state

  return base.Transform(optax.init_empty_state, update_fn)  # type: ignore[arg-type]
