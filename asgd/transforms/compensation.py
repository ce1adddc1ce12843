"""Delay compensation: estimates the gradient at the server's parameters.

DC-ASGD (Zheng et al. 2017) expands the gradient to first order around the
parameters that it was computed on, with lambda g*g for the diagonal of the
Hessian.

Compensation must come before weight decay, clipping and momentum: its term is
quadratic in the gradient g. `g` is the mean over a batch; for a sum, divide
lambda by the batch size.
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
  """Returns the transform g <- change(g, params - sent_params), elementwise.
  Both arguments of `change` are leaves, [...]."""

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    # w_{t+tau} - w_bak(m): the change since worker m's ticket.
    displacement = optax.tree.sub(params, sent_params)
    return jax.tree.map(change, updates, displacement), state

  return base.Transform(optax.init_empty_state, update_fn)  # type: ignore[arg-type]


def delay_compensation(strength: float = 0.04) -> base.Transform:
  """DC-ASGD-c: compensates gradients with a constant lambda.

    g <- g + lambda g * g * (params - sent_params),   elementwise

  Args:
    strength: lambda, 0 or more, per unit of loss. It is 0.04 in the paper's
      DC-ASGD-c and 2 in the DANA papers; the best value depends on the size of
      the gradients.

  Returns:
    A transform without a state. Its update needs `params` and the extra arg
    `sent_params`.

  Source:
    Zheng et al. 2017.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> tx = asgd.delay_compensation(0.5)
    >>> g, sent, now = jnp.array([[2.0, 2.0], [8.0, 8.0], [8.0, 6.0]])
    >>> g, _ = tx.update(g, tx.init(now), now, sent_params=sent)
    >>> print(g)  # nothing moved; 2 + 0.5 2^2 (6 - 8)
    [ 2. -2.]
  """
  checks.nonnegative("strength (lambda)", strength)
  # lambda g * g approximates the diagonal of the Hessian: this is g(w_{t+tau})
  # to first order around w_t.
  return by_distance(
    lambda g, displacement: g + strength * g * g * displacement
  )


class AdaptiveCompensationState(NamedTuple):
  """State of `adaptive_delay_compensation`."""

  mean_square: optax.Updates  # like params, moving average of g * g


def adaptive_delay_compensation(
  strength: float = 2.0, *, decay: float = 0.95, eps: float = 1e-7
) -> base.Transform:
  """DC-ASGD-a: compensates gradients with an adaptive lambda.

    MeanSquare <- m MeanSquare + (1 - m) g * g
    lambda = lambda_0 / sqrt(MeanSquare + eps)
    g <- g + lambda g * g * (params - sent_params),   all elementwise

  The mean square includes the current gradient. It starts at 0 and is not
  bias-corrected. The paper's text has one mean square for all workers. Wrap the
  transform in `per_worker` for one per worker, as in the authors' code.

  Args:
    strength: lambda_0, 0 or more.
    decay: m, in [0, 1).
    eps: added to the mean square.

  Returns:
    A transform. Its state is the mean square, like the parameters; its update
    needs `params` and the extra arg `sent_params`.

  Source:
    Zheng et al. 2017.

  Example:
    The mean square is 0.75 0 + 0.25 4^2 = 4, so lambda is 1 / 2.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> tx = asgd.adaptive_delay_compensation(1.0, decay=0.75, eps=0.0)
    >>> g, sent, now = jnp.array([4.0, 8.0, 7.0])
    >>> g, state = tx.update(g, tx.init(now), now, sent_params=sent)
    >>> print(g, state.mean_square)  # 4 + 0.5 4^2 (7 - 8)
    -4.0 4.0
  """
  checks.nonnegative("strength (lambda)", strength)
  checks.fraction("decay", decay)

  def init_fn(params):
    # MeanSquare(0) = 0, without a bias correction.
    return AdaptiveCompensationState(optax.tree.zeros_like(params))

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    # [1] MeanSquare(t): the current gradient counts in its own mean square.
    mean_square = jax.tree.map(
      lambda m, g: decay * m + (1 - decay) * g * g, state.mean_square, updates
    )
    # [2] lambda_t = lambda_0 / sqrt(MeanSquare(t) + eps). Ports that leave the
    # root out compensate a thousand times as much.
    displacement = optax.tree.sub(params, sent_params)
    updates = jax.tree.map(
      lambda g, m, d: g + strength / jnp.sqrt(m + eps) * g * g * d,
      updates,
      mean_square,
      displacement,
    )
    return updates, AdaptiveCompensationState(mean_square)

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]
