"""Nesterov's momentum for a server that updates with each message."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks


class DelayedNesterovState(NamedTuple):
  """State of `delayed_nesterov`."""

  count: jax.Array  # type: ignore[assignment]  # int32[], messages in `total`
  total: optax.Updates  # like params, sum of these messages
  velocity: optax.Updates  # like params


def delayed_nesterov(
  momentum: float = 0.9, *, every: int = 1, share: float = 0.0
) -> base.Transform:
  """Delayed Nesterov: the velocity changes only with every N-th update.

    S <- S + g
    each N-th:  v <- mu v + S / N;   S <- 0
                u = (1 - c N + c) mu v + g / N
    the others: u = c mu v + g / N

  N updates, from one that changes v to the last before the next change, add up
  to mu v + (sum of their N messages) / N: Nesterov's momentum on the mean of N
  messages. N = 1 is Nesterov's momentum.

  Args:
    momentum: mu, in [0, 1).
    every: N, updates between two changes of the velocity.
    share: c, in [0, 1 / N], the part of the velocity in each of the other
      updates.

  Returns:
    A transform that keeps S and v.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    arXiv:2401.09135, delayed Nesterov momentum.

  Example:
    >>> from asgd import transforms
    >>> tx = transforms.delayed_nesterov(0.5, every=2)
    >>> state = tx.init(0.0)
    >>> for g in (4.0, 2.0):  # 4 / 2, then v = (4 + 2) / 2, 0.5 3 + 2 / 2
    ...   u, state = tx.update(g, state)
    ...   print(u)
    2.0
    2.5
  """
  checks.fraction("momentum", momentum)
  checks.integer("every", every)
  in_range = f"from 0 to 1 / every, {1 / every:g}"
  checks.real("share", share, lambda c: 0 <= c <= 1 / every, in_range)

  def init_fn(params):
    # Two trees of zeros: a buffer cannot be donated twice.
    total, velocity = (optax.tree.zeros_like(params) for _ in range(2))
    return DelayedNesterovState(jnp.zeros([], jnp.int32), total, velocity)

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    total = optax.tree.add(state.total, updates)
    is_nth = state.count + 1 == every
    velocity = jax.tree.map(
      lambda v, s: jnp.where(
        is_nth, (momentum * v + s / every).astype(v.dtype), v
      ),
      *(state.velocity, total),
    )

    def step(g, v):
      weight = jnp.where(is_nth, 1 - share * every + share, share)
      return (weight * momentum).astype(v.dtype) * v + g / every

    next_state = DelayedNesterovState(
      jnp.where(is_nth, 0, state.count + 1),
      jax.tree.map(lambda s: jnp.where(is_nth, 0, s), total),
      velocity,
    )
    return jax.tree.map(step, updates, velocity), next_state

  return base.Transform(init_fn, update_fn)
