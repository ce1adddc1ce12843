"""Gap-awareness: a gradient counts less, the further the parameters moved.

Staleness counts updates; the gap is the distance that they covered, measured
for each parameter in units of a typical update.
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
  samples: jax.Array  # int32[], squares averaged into mean_square
  # like params, moving average of the squares of gradients or updates
  mean_square: optax.Updates
  inner: optax.OptState  # of the wrapped optimizer


GRADIENTS, UPDATES = AVERAGES = "gradients", "updates"


def gap_aware(
  optimizer: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule, *, average: str | None = None,
  weight_decay: float = 0.0, decay: float = 0.999, eps: float = 1e-8,
) -> base.Transform:
  """Gap-Aware: an optimizer that counts a gradient less, the larger its gap.

    g <- (g + weight_decay params) / (1 + |params - sent_params| / C)
    C = eta_max (sqrt(A / (1 - decay^t)) + eps)
    A <- decay A + (1 - decay) s * s,   all elementwise

  C is the size of a typical update of that parameter. eta_max is the largest
  learning rate *so far*: after a decay of it gaps shrink and the penalty fades;
  with the current rate it would not. s is one of two:

  "gradients": the gradient as it arrived, without weight decay and penalty. A
    takes it in before A is used, so t counts this one. It is the published rule
    for SGD without momentum.
  "updates": u, of the update -eta u that the optimizer made, penalties
    included; with SGD u is the velocity. A takes it in after the update, so t
    counts the ones before, and the first one of all is not penalised. It is the
    published rule for an optimizer with momentum. (The authors' code counts the
    velocity before the first update, 0, as a sample; here it is none.)

  An optimizer's own weight decay, decoupled from gradients, is not penalised.

  Args:
    optimizer: the whole of it, learning rate included.
    learning_rate: eta, as given to the optimizer.
    average: "gradients" or "updates"; None is the published rule: "gradients"
      unless the optimizer keeps a state of the size of the parameters, such as
      a velocity. One without such a state whose update is not -eta times the
      gradient, as `optax.sign_sgd`, needs "updates".
    weight_decay: 0 or more; weight_decay * params is added to a gradient, and
      penalised with it.
    decay: of the average, in [0, 1).
    eps: added to the root of the average.

  Returns:
    A transform whose update needs `params` and the extra arg `sent_params`.

  Source:
    Barkai, Hakimi, Schuster, "Gap-aware mitigation of gradient staleness", ICLR
    2020, arXiv:1909.10802; the code of FTPipe (Eliad et al., USENIX ATC 2021,
    pipe/pipeline/gap_aware), by authors of the same group.

  Example:
    Gradients are 4, and so C is 0.5 4 = 2.

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
    """Averages in updates over their learning rate; at 0 they have no size."""
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
    kind = average or _published(inner, params)
    if kind == GRADIENTS:
      state = accumulate(state, updates, jnp.ones([]))
    if not checks.is_zero(weight_decay):
      updates = optax.tree.add_scale(updates, weight_decay, params)
    # Before there is a sample, there is no typical size: no penalty.
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
    if kind == UPDATES:
      state = accumulate(state, updates, rate)
    state = state._replace(
      count=state.count + 1, largest_rate=largest, inner=inner_state
    )
    return updates, state

  return base.Transform(init_fn, update_fn)


def _published(
  optimizer: optax.GradientTransformation, params: base.Params
) -> str:
  """Returns what the published rule averages: UPDATES of an optimizer whose
  state grows with the parameters, GRADIENTS of any other."""

  def larger(p):
    return jax.ShapeDtypeStruct((2, *jnp.shape(p)), jnp.result_type(p))

  state = jax.eval_shape(optimizer.init, jax.tree.map(larger, params))
  grows = any(leaf.ndim for leaf in jax.tree.leaves(state))
  return UPDATES if grows else GRADIENTS
