"""Scaling by staleness: a gradient counts less, the staler it is."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, rates


def scale_by_discount(
  discount: Callable[[jax.Array], jax.Array],
) -> base.Transform:
  """Weights updates by a function of their staleness.

    g <- s(staleness) g

  As the `at_server` transform of a server that averages several messages, it
  weights each message by its staleness before the mean: FedBuff's buffer.

  Args:
    discount: s, int32[] -> float[], such as `polynomial_discount`.

  Returns:
    A transform without a state. Its update needs the extra arg `staleness`,
    int32[].

  Source:
    Nguyen et al., "Federated learning with buffered asynchronous aggregation",
    AISTATS 2022, arXiv:2106.06639.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.scale_by_discount(transforms.polynomial_discount(0.5))
    >>> g, _ = tx.update(8.0, tx.init(None), staleness=jnp.int32(3))
    >>> print(g)  # 8 / sqrt(3 + 1)
    4.0
  """

  def update_fn(updates, state, params=None, *, staleness, **extra_args):
    del params, extra_args
    return _scale(updates, discount(staleness)), state

  return base.Transform(optax.init_empty_state, update_fn)  # type: ignore[arg-type]


def _scale(updates: optax.Updates, scale: jax.Array) -> optax.Updates:
  """Returns the updates times `scale`, float[]; dtypes do not change."""
  scaled: optax.Updates = jax.tree.map(
    lambda g: g * scale.astype(jnp.result_type(g)), updates
  )
  return scaled


def scale_by_staleness(grace: float = 1) -> base.Transform:
  """Divides stale updates by their staleness.

    g <- g / max(staleness / b, 1)

  With b = 1, the default, an update of staleness 2 or more is divided by its
  staleness. As the `at_server` transform of a server that averages several
  messages, this is the paper's n-softsync: each message is divided by its own
  staleness. With b = the number of workers it is the rule of
  `asgd.delay_adaptive`.

  Args:
    grace: b, positive, the largest staleness at which nothing is divided.

  Returns:
    A transform without a state. Its update needs the extra arg `staleness`,
    int32[].

  Source:
    Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for distributed deep
    learning", IJCAI 2016, arXiv:1511.05950. A larger b: Mishchenko, Bach, Even,
    Woodworth, "Asynchronous SGD beats minibatch SGD under arbitrary delays",
    NeurIPS 2022, arXiv:2206.07638.

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
  checks.positive("grace", grace)
  # alpha(tau) / alpha_0 = 1 / tau; the paper does not divide if tau = 0.
  return scale_by_discount(
    lambda staleness: 1.0 / jnp.maximum(1.0 * staleness / grace, 1.0)
  )


class AdaDelayState(NamedTuple):
  """State of `scale_by_adadelay`."""

  count: jax.Array  # type: ignore[assignment]  # int32[], updates so far


def scale_by_adadelay(
  learning_rate: optax.ScalarOrSchedule, strength: float = 1.0
) -> base.Transform:
  """AdaDelay: the step shrinks with the number of updates and the staleness.

    u <- u / (1 + c eta sqrt(t + staleness)),   t = 1, 2, ...

  After an optimizer with the rate eta, the rate of update t becomes
  (1 / eta + c sqrt(t + staleness))^-1.

  Args:
    learning_rate: eta, the optimizer's, a number or a schedule over updates.
    strength: c, 0 or more; 0 changes nothing.

  Returns:
    A transform that counts the updates. Its update needs the extra arg
    `staleness`, int32[].

  Source:
    Sra, Yu, Li, Smola, "AdaDelay: delay adaptive distributed stochastic
    optimization", AISTATS 2016, arXiv:1508.05003; `strength` is the paper's c,
    the same for all parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.scale_by_adadelay(0.5, strength=1.0)
    >>> u, _ = tx.update(8.0, tx.init(None), staleness=jnp.int32(3))
    >>> print(u)  # 8 / (1 + 0.5 sqrt(1 + 3))
    4.0
  """
  checks.nonnegative("strength", strength)

  def init_fn(params):
    del params
    return AdaDelayState(jnp.zeros([], jnp.int32))

  def update_fn(updates, state, params=None, *, staleness, **extra_args):
    del params, extra_args
    # The rate of this update, at the count that the optimizer's schedule reads.
    rate = rates.at(learning_rate, state.count)
    count = state.count + 1
    # 1.0 makes a float, of the default dtype, of the integers.
    root = jnp.sqrt(1.0 * (count + staleness))
    scale = 1.0 / (1.0 + strength * rate * root)
    return _scale(updates, scale), AdaDelayState(count)

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]
