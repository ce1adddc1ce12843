"""Gap-awareness: a gradient counts less, the further the parameters moved.

Gap-Aware (Barkai, Hakimi, Schuster, "Gap Aware Mitigation of Gradient
Staleness", ICLR 2020) replaces staleness, which counts updates, by the
distance they covered, measured per parameter in units of a typical update.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, rates


class GapAwareState(NamedTuple):
  """State of `gap_aware`."""

  count: jax.Array  # int32[], updates made
  largest_rate: jax.Array  # float[], largest learning rate so far
  samples: jax.Array  # int32[], updates averaged into mean_square
  mean_square: optax.Updates  # like params, moving average of squared updates
  inner: optax.OptState  # of the wrapped momentum


def gap_aware(
  momentum: optax.GradientTransformation | None,
  learning_rate: optax.ScalarOrSchedule,
  *,
  decay: float = 0.999,
  eps: float = 1e-8,
) -> base.Transform:
  """Divides gradients by 1 + |params - sent_params| / C, elementwise.

  C is the size of a typical update of that parameter:
  C = eta_max (sqrt(mean square of updates) + eps), the average being
  bias-corrected and over past updates only (the velocity before this gradient
  enters it). eta_max is the largest learning rate *so far*: after a decay gaps
  shrink and the penalty fades; with the current one it would not.

  The transform goes before scaling by the learning rate, and after adding
  weight decay, which is to be penalised as well. Its update needs `params` and
  the extra arg `sent_params`.

  Args:
    momentum: what turns penalised gradients into updates, e.g. `optax.trace`;
      None for plain SGD: the average is then over the incoming gradients, this
      one included.
    learning_rate: as given to `scale_by_learning_rate`.
    decay: of the average, in [0, 1); `eps` is added to its root.
  """
  checks.fraction("decay", decay)
  inner = optax.with_extra_args_support(momentum or optax.identity())

  def init_fn(params):
    return GapAwareState(
      count=jnp.zeros([], jnp.int32),
      largest_rate=jnp.zeros([]),
      samples=jnp.zeros([], jnp.int32),
      mean_square=optax.tree.zeros_like(params),
      inner=inner.init(params),
    )

  def accumulate(state, updates):
    mean_square = jax.tree.map(
      lambda m, u: decay * m + (1 - decay) * u * u, state.mean_square, updates
    )
    return state._replace(samples=state.samples + 1, mean_square=mean_square)

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    rate = rates.at(learning_rate, state.count)
    largest = jnp.maximum(state.largest_rate, rate)
    if momentum is None:
      state = accumulate(state, updates)
    # Before the first update there is no typical size: no penalty.
    correction = 1 - decay ** jnp.maximum(state.samples, 1)
    has_size = (state.samples > 0) & (largest > 0)

    def penalise(g, m, now, sent):
      size = largest * (jnp.sqrt(m / correction) + eps)
      penalty = 1 + jnp.abs(now - sent) / jnp.where(has_size, size, 1.0)
      return jnp.where(has_size, g / penalty, g).astype(g.dtype)

    updates = jax.tree.map(
      penalise, updates, state.mean_square, params, sent_params
    )
    updates, inner_state = inner.update(
      updates, state.inner, params, sent_params=sent_params, **extra_args
    )
    if momentum is not None:
      state = accumulate(state, updates)
    state = state._replace(
      count=state.count + 1, largest_rate=largest, inner=inner_state
    )
    return updates, state

  return base.Transform(init_fn, update_fn)
