"""Gap-awareness: a gradient counts less, the farther the parameters moved.

Staleness counts updates since the ticket. The gap is the distance by which they
moved the parameters; here it is measured per parameter, in units of a typical
update.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, norms, rates


class GapAwareState(NamedTuple):
  """State of `gap_aware`."""

  count: jax.Array  # type: ignore[assignment] # int32[], updates made
  largest_rate: jax.Array  # float[], largest learning rate so far
  samples: jax.Array  # int32[], squares averaged into mean_square
  # A: like params, moving average of the squares of gradients or updates
  mean_square: optax.Updates
  inner: optax.OptState  # of the wrapped optimizer


# Values of `average`: the squares of gradients or of updates are averaged.
GRADIENTS, UPDATES = AVERAGES = "gradients", "updates"


def gap_aware(
  optimizer: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule, *, average: str | None = None,
  weight_decay: float = 0.0, decay: float = 0.999, eps: float = 1e-8,
) -> base.Transform:
  """Gap-Aware: an optimizer that divides gradients by their gap.

    g <- (g + weight_decay params) / (1 + |params - sent_params| / C)
    C = eta_max (sqrt(A / (1 - decay^t)) + eps)
    A <- decay A + (1 - decay) s * s,   all elementwise

  C is the size of a typical update of a parameter. eta_max is the largest
  learning rate *so far*: when the rate decays, gaps shrink and the penalty
  fades. With the current rate in place of eta_max the penalty would not fade.
  `average` selects s:

  "gradients": s is the received gradient, without weight decay and penalty. A
    is updated before its use, so t counts this gradient. It is the published
    rule for SGD without momentum.
  "updates": s is u, the update that the optimizer makes of the penalised
    gradient, divided by -eta; for SGD, u is the velocity. A is updated after
    its use, so t counts earlier updates, and the very first one is not
    penalised. It is the published rule for an optimizer with momentum. (The
    authors' code counts the velocity before the first update, 0, as a sample;
    this one does not.)

  Decoupled weight decay inside the optimizer is not penalised.

  Args:
    optimizer: the complete optimizer, learning rate included.
    learning_rate: eta, as given to the optimizer.
    average: "gradients" or "updates". None is the published rule: "updates" for
      an optimizer with a state of the size of the parameters, such as a
      velocity, otherwise "gradients". An optimizer without such a state, and
      with an update that is not -eta times the gradient, as `optax.sign_sgd`,
      needs "updates".
    weight_decay: 0 or more; weight_decay * params is added to a gradient, and
      penalised with it.
    decay: the decay of the average, in [0, 1).
    eps: added to the root of the average.

  Returns:
    A transform. Its update needs `params` and the extra arg `sent_params`.

  Source:
    Barkai, Hakimi, Schuster, "Gap-aware mitigation of gradient staleness", ICLR
    2020, arXiv:1909.10802; the code of FTPipe (Eliad et al., USENIX ATC 2021,
    pipe/pipeline/gap_aware), by authors of the same group.

  Example:
    All gradients are 4, so C is 0.5 * 4 = 2.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import transforms
    >>> tx = transforms.gap_aware(optax.sgd(0.5), 0.5)
    >>> sent, now, g = jnp.array([8.0, 6.0, 4.0])
    >>> update, state = tx.update(g, tx.init(sent), sent, sent_params=sent)
    >>> print(update)
    -2.0
    >>> update, state = tx.update(g, state, now, sent_params=sent)
    >>> print(f"{update:.3f}")  # -0.5 * 4 / (1 + |6 - 8| / 2)
    -1.000
  """
  if average is not None:
    checks.one_of("average", average, AVERAGES)
  checks.nonnegative("weight_decay", weight_decay)
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
    """Adds the squares of updates / rate to the average. At a rate of 0 it adds
    nothing, because the quotient is undefined."""
    has_rate = rate > 0
    scale = 1 / jnp.where(has_rate, rate, 1.0)

    def add(m, u):
      s = u * scale.astype(u.dtype)  # or -s, as only s * s is used
      return jnp.where(has_rate, decay * m + (1 - decay) * s * s, m)

    return state._replace(
      samples=state.samples + has_rate,  # t, of the bias correction
      mean_square=jax.tree.map(add, state.mean_square, updates),
    )

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    rate = rates.at(learning_rate, state.count)
    # eta_max: the rate of this update counts.
    largest_rate = jnp.maximum(state.largest_rate, rate)
    average_kind = average or _published_average(inner, params)
    # [1] Published rule without momentum: average the gradient before its use.
    # At a rate of 1 the sample is the gradient itself.
    if average_kind == GRADIENTS:
      state = accumulate(state, updates, jnp.ones([]))
    # Weight decay comes before the division, so it is penalised, too.
    if not checks.is_zero(weight_decay):
      updates = optax.tree.add_scale(updates, weight_decay, params)
    # [2] Divide by the gap, in units of a typical update.
    penalise = _penalty(state.samples, largest_rate, decay, eps)
    updates = jax.tree.map(
      penalise, updates, state.mean_square, params, sent_params
    )
    # [3] Apply the optimizer; its velocity holds penalised gradients.
    updates, inner_state = inner.update(
      updates, state.inner, params, sent_params=sent_params, **extra_args
    )
    # [4] Published rule with momentum: average the update after its use.
    if average_kind == UPDATES:
      state = accumulate(state, updates, rate)
    state = state._replace(
      count=state.count + 1, largest_rate=largest_rate, inner=inner_state
    )
    return updates, state

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]


class DivideByGapState(NamedTuple):
  """State of `divide_by_gap`."""

  samples: jax.Array  # int32[], t: steps averaged into mean_square
  mean_square: optax.Updates  # A: like params
  last: optax.Params  # the parameters at the last message


def divide_by_gap(*, decay: float = 0.999, eps: float = 1e-8) -> base.Transform:
  """Gap-Aware for updates by several messages: divides each by its own gap.

    g <- g / (1 + |params - sent_params| / C)
    C = sqrt(A / (1 - decay^t)) + eps
    A <- decay A + (1 - decay) u * u,   all elementwise

  u is the step of the parameters between two messages, if there was one. So C
  is the size of a typical step at the rates so far, and the transform needs no
  optimizer. As the `at_server` transform of a server that averages several
  messages, it divides each message before the mean. `gap_aware` would get one
  ticket, the oldest, for all these messages. Before the first step there is no
  penalty.

  Args:
    decay: the decay of the average, in [0, 1).
    eps: added to the root of the average.

  Returns:
    A transform. Its update needs `params` and the extra arg `sent_params`.

  Source:
    Barkai, Hakimi, Schuster, "Gap-aware mitigation of gradient staleness", ICLR
    2020, arXiv:1909.10802. The average of steps is that of the code of FTPipe
    (Eliad et al., USENIX ATC 2021) for Adam.

  Example:
    The parameter moved from 8 to 6 since one ticket, and not since the other.

    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx, gradient = transforms.divide_by_gap(), jnp.float32(4.0)
    >>> sent, now = jnp.array([8.0, 6.0])
    >>> state = tx.init(sent)
    >>> for ticket in (sent, now):
    ...   g, state = tx.update(gradient, state, now, sent_params=ticket)
    ...   print(f"{g:.3f}")  # 4 / (1 + |6 - 8| / 2), and 4
    2.000
    4.000
  """
  checks.fraction("decay", decay)

  def init_fn(params):
    last_params = jax.tree.map(jnp.asarray, params)
    zeros = optax.tree.zeros_like(last_params)
    return DivideByGapState(jnp.zeros([], jnp.int32), zeros, last_params)

  def update_fn(updates, state, params=None, *, sent_params, **extra_args):
    del extra_args
    # [1] If the parameters moved since the last message, the step is a sample.
    steps = optax.tree.sub(params, state.last)
    has_moved = norms.has_nonzero(steps)
    mean_square = jax.tree.map(
      lambda m, u: jnp.where(has_moved, decay * m + (1 - decay) * u * u, m),
      *(state.mean_square, steps),
    )
    n_samples = state.samples + has_moved
    # [2] Divide by the gap, in units of a typical step, which includes the
    # rate.
    penalise = _penalty(n_samples, jnp.ones([]), decay, eps)
    updates = jax.tree.map(penalise, updates, mean_square, params, sent_params)
    return updates, DivideByGapState(n_samples, mean_square, params)

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]


def _penalty(
  n_samples: jax.Array, largest_rate: jax.Array, decay: float, eps: float
) -> Callable[..., jax.Array]:
  """Returns a function (gradient, mean square, parameters, sent parameters) ->
  gradient / (1 + gap / C)."""
  # Without a sample there is no typical size, and no penalty.
  correction = 1 - decay ** jnp.maximum(n_samples, 1)
  has_size = (n_samples > 0) & (largest_rate > 0)

  def penalise(g, m, current, sent):
    # C, and then G = 1 + |params - sent_params| / C, elementwise: one number
    # per leaf would lose the method's advantage.
    size = largest_rate * (jnp.sqrt(m / correction) + eps)
    penalty = 1 + jnp.abs(current - sent) / jnp.where(has_size, size, 1.0)
    return jnp.where(has_size, g / penalty, g).astype(g.dtype)

  return penalise


def _published_average(
  optimizer: optax.GradientTransformation, params: base.Params
) -> str:
  """Returns the published average for an optimizer: UPDATES if its state grows
  with the parameters, otherwise GRADIENTS."""

  # With one more axis on each parameter, the velocity of a scalar parameter has
  # an axis, too. A count remains a scalar, whatever the parameters are.
  def add_axis(p):
    return jax.ShapeDtypeStruct((2, *jnp.shape(p)), jnp.result_type(p))

  state = jax.eval_shape(optimizer.init, jax.tree.map(add_axis, params))
  grows = any(leaf.ndim for leaf in jax.tree.leaves(state))
  return UPDATES if grows else GRADIENTS
