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

from asgd import checks


def by_distance(
  change: Callable[[jax.Array, jax.Array], jax.Array],
) -> optax.GradientTransformationExtraArgs:
  """A transform g <- change(g, params - sent_params), elementwise.

  It has no state; its update needs `params` and the extra arg `sent_params`.
  """

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    updates = jax.tree.map(
      lambda g, now, sent: change(g, now - sent),
      *(updates, params, sent_params),
    )
    return updates, state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )


def delay_compensation(
  strength: float = 0.04,
) -> optax.GradientTransformationExtraArgs:
  """DC-ASGD-c: lambda is the constant `strength`.

  Args:
    strength: lambda, 0 or more; 0.04 in the paper's DC-ASGD-c, 2 in the DANA
      papers. The right one depends on the size of the gradients.

  Returns:
    As `by_distance`; what the worker computed on is a look-ahead, if it was
    sent one.
  """
  checks.nonnegative("strength (lambda)", strength)
  return by_distance(lambda g, moved: g + strength * g * g * moved)


class AdaptiveCompensationState(NamedTuple):
  """State of `adaptive_delay_compensation`."""

  mean_square: optax.Updates  # like params, moving average of g * g


def adaptive_delay_compensation(
  strength: float = 2.0, *, decay: float = 0.95, eps: float = 1e-7
) -> optax.GradientTransformationExtraArgs:
  """DC-ASGD-a: lambda is strength / sqrt(mean square + eps), elementwise.

  The mean square takes in the incoming gradient first, then it is used:
  mean_square <- decay mean_square + (1 - decay) g * g. It is not
  bias-corrected. Wrap the transform in `per_worker` for one average a worker,
  as the authors' code has it; the paper's text has one for all. Its update
  needs `params` and the extra arg `sent_params`.

  Args:
    strength: lambda_0, 0 or more; 2 in the paper.
    decay: m of the paper, in [0, 1).
    eps: inside the square root.
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
    updates = jax.tree.map(
      lambda g, m, now, sent: (
        g + strength / jnp.sqrt(m + eps) * g * g * (now - sent)
      ),
      *(updates, mean_square, params, sent_params),
    )
    return updates, AdaptiveCompensationState(mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
