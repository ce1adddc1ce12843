"""Delay compensation: a first-order guess of what the gradient would be now.

DC-ASGD (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017) expands the gradient around the parameters it was
computed at, with lambda g*g for the diagonal of the Hessian:

  g(w) ~ g + lambda g * g * (w - w_sent).

Compensate before weight decay, clipping or momentum see the gradient: the
term is quadratic in g. `g` is the mean over a batch; with summed losses
divide lambda by the batch size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks


def by_distance(
  change: Callable[[jax.Array, jax.Array], jax.Array],
) -> base.Transform:
  """A transform g <- change(g, params - sent_params), elementwise.

  It has no state; its update needs `params` and the extra arg `sent_params`.
  """

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    moved = optax.tree.sub(params, sent_params)
    return jax.tree.map(change, updates, moved), state

  return base.Transform(optax.init_empty_state, update_fn)


def delay_compensation(strength: float = 0.04) -> base.Transform:
  """DC-ASGD-c: lambda is the constant `strength`, 0 or more.

  It is 0.04 in the paper's DC-ASGD-c and 2 in the DANA papers; the right one
  depends on the size of the gradients. A worker that was sent a look-ahead
  computed on that.
  """
  checks.nonnegative("strength (lambda)", strength)
  return by_distance(lambda g, moved: g + strength * g * g * moved)


class AdaptiveCompensationState(NamedTuple):
  """State of `adaptive_delay_compensation`."""

  mean_square: optax.Updates  # like params, moving average of g * g


def adaptive_delay_compensation(
  strength: float = 2.0, *, decay: float = 0.95, eps: float = 1e-7
) -> base.Transform:
  """DC-ASGD-a: lambda is strength / sqrt(mean square + eps), elementwise.

  The mean square takes in the incoming gradient first, then it is used:
  mean_square <- decay mean_square + (1 - decay) g * g. It is not
  bias-corrected. Wrap the transform in `per_worker` for one average a worker,
  as the authors' code has it; the paper's text has one for all. `strength` is
  lambda_0, 0 or more, and `decay` m, in [0, 1). Its update needs `params` and
  the extra arg `sent_params`.
  """
  checks.nonnegative("strength (lambda)", strength)
  checks.fraction("decay", decay)

  def init_fn(params):
    return AdaptiveCompensationState(optax.tree.zeros_like(params))

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    mean_square = jax.tree.map(
      lambda m, g: decay * m + (1 - decay) * g * g, state.mean_square, updates
    )
    moved = optax.tree.sub(params, sent_params)
    updates = jax.tree.map(
      lambda g, m, d: g + strength / jnp.sqrt(m + eps) * g * g * d,
      updates,
      mean_square,
      moved,
    )
    return updates, AdaptiveCompensationState(mean_square)

  return base.Transform(init_fn, update_fn)
