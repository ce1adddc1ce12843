"""Scaling by staleness: a gradient counts less, the later it comes.

Staleness-aware ASGD (Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for
Distributed Deep Learning", IJCAI 2016) divides the learning rate of each
gradient by its staleness.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def inverse(staleness: jax.Array) -> jax.Array:
  """1 / staleness, and 1 for a fresh gradient (Zhang et al. 2016)."""
  return 1.0 / jnp.maximum(staleness, 1)


def scale_by_staleness(
  factor: Callable[[jax.Array], jax.Array] = inverse,
) -> optax.GradientTransformationExtraArgs:
  """Multiplies updates by a function of their staleness.

  As the `per_message` transform of a server that averages n messages it scales
  each of them by its own staleness, which is n-softsync of the paper.

  Args:
    factor: int32[] -> float[].

  Returns:
    A stateless transform whose update needs the extra arg `staleness`.
  """

  def update_fn(updates, state, params=None, *, staleness, **extra_args):
    del params, extra_args
    scale = factor(staleness)
    updates = jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)
    return updates, state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )
