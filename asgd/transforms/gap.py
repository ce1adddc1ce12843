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
  # like params, moving average of the squares of updates over learning rates
  mean_square: optax.Updates
  inner: optax.OptState  # of the wrapped optimizer


def gap_aware(
  optimizer: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  *,
  decay: float = 0.999,
  eps: float = 1e-8,
) -> base.Transform:
  """Gap-Aware: an optimizer that counts a gradient less, the larger its gap.

    g <- g / (1 + |params - sent_params| / C),   elementwise
    C = eta_max (sqrt(A / (1 - decay^t)) + eps)
    A <- decay A + (1 - decay) u * u,   after the update number t

  C is the size of a typical update of that parameter. It is read off the
  updates eta u that the optimizer made, whatever it is: with SGD, u is the
  velocity. The average is over past updates only, so the first one of all is
  not penalised. eta_max is the largest learning rate *so far*: after a decay
  gaps shrink and the penalty fades; with the current one it would not.

  Weight decay that is added to gradients before this transform is penalised as
  well; an optimizer's own, decoupled from gradients, is not. (The authors' code
  without momentum averages incoming gradients, where updates are penalised
  ones.)

  Args:
    optimizer: the whole of it, learning rate included.
    learning_rate: eta, as given to the optimizer.
    decay: of the average, in [0, 1).
    eps: added to the root of the average.

  Returns:
    A transform whose update needs `params` and the extra arg `sent_params`.

  Raises:
    ValueError: for a decay out of its range.

  Source:
    Barkai, Hakimi, Schuster, "Gap-aware mitigation of gradient staleness", ICLR
    2020, arXiv:1909.10802.

  Example:
    After an update of 0.5 4 = 2, C is 2.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import transforms
    >>> tx = transforms.gap_aware(optax.sgd(0.5), 0.5)
    >>> sent, now, g = jnp.array([8.0, 6.0, 4.0])
    >>> update, state = tx.update(g, tx.init(sent), sent, sent_params=sent)
    >>> print(update)
    -2.0
    >>> update, state = tx.update(g, state, now, sent_params=sent)
    >>> print(f"{update:.3f}")  # -0.5 4 / (1 + |6 - 8| / 2)
    -1.000
  """
  checks.fraction("decay", decay)
  inner = optax.with_extra_args_support(optimizer)

  def init_fn(params):
    return GapAwareState(
      count=jnp.zeros([], jnp.int32),
      largest_rate=jnp.zeros([]),
      samples=jnp.zeros([], jnp.int32),
      mean_square=optax.tree.zeros_like(params),
      inner=inner.init(params),
    )

  def accumulate(state, updates, rate):
    """Takes in an update; one at a learning rate of 0 has no size."""
    moves = rate > 0
    scale = 1 / jnp.where(moves, rate, 1.0)

    def add(m, u):
      size = u * scale.astype(u.dtype)
      return jnp.where(moves, decay * m + (1 - decay) * size * size, m)

    return state._replace(
      samples=state.samples + moves,
      mean_square=jax.tree.map(add, state.mean_square, updates),
    )

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    rate = rates.at(learning_rate, state.count)
    largest = jnp.maximum(state.largest_rate, rate)
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
    state = accumulate(state, updates, rate)._replace(
      count=state.count + 1, largest_rate=largest, inner=inner_state
    )
    return updates, state

  return base.Transform(init_fn, update_fn)
