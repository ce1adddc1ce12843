"""SGD at the server, asynchronous and synchronous, and parts of recipes."""

from typing import Any

import optax

from asgd import base, checks, optimizers
from asgd.algorithms.recipe import Recipe
from asgd.optimizers import OptimizerLike


def decay_weights(weight_decay: float) -> optax.GradientTransformation:
  """Adds weight_decay * params to gradients; weight_decay is 0 or more."""
  checks.nonnegative("weight_decay", weight_decay)
  # optax's transform requires `params`; an update without decay does not.
  if checks.is_zero(weight_decay):
    return optax.identity()
  return optax.add_decayed_weights(weight_decay)


def velocity(
  momentum: float, *, nesterov: bool = False
) -> optax.GradientTransformation:
  """Momentum, in [0, 1), in the form that does not contain the learning rate.

    v <- momentum v + g;   the update is v
    Nesterov: the update is momentum v + g, with the new v

  Example:
    >>> tx = velocity(0.5)
    >>> v, state = tx.update(4.0, tx.init(0.0))
    >>> print(tx.update(2.0, state)[0])  # 0.5 4 + 2
    4.0
    >>> tx = velocity(0.5, nesterov=True)
    >>> print(tx.update(4.0, tx.init(0.0))[0])  # 0.5 4 + 4
    6.0
  """
  checks.fraction("momentum", momentum)
  # `trace` adds g in full, as the papers do; optax.ema would add (1 - gamma) g.
  return optax.trace(momentum, nesterov=nesterov)


def sgd_chain(
  scale: optax.GradientTransformation,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  *preceding: optax.GradientTransformation,
  nesterov: bool = False,
) -> optax.GradientTransformation:
  """SGD after the `preceding` transforms: weight decay, momentum, then `scale`,
  which multiplies by minus the learning rate.

  Example:
    >>> tx = sgd_chain(optax.scale(-0.5), 0.5, 0.25, optax.clip(1.0))
    >>> print(tx.update(4.0, tx.init(8.0), 8.0)[0])  # -0.5 (1 + 0.25 8)
    -1.5
  """
  is_plain = checks.is_zero(momentum)
  return optax.chain(
    *preceding,
    decay_weights(weight_decay),
    # Without momentum there is no velocity to store.
    optax.identity() if is_plain else velocity(momentum, nesterov=nesterov),
    # Last: v does not contain eta, so a schedule does not rescale it.
    scale,
  )


def at_server(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  optimizer: Any = None,
) -> optax.GradientTransformation:
  """Returns the complete update of a server: SGD, or `optimizer`."""
  if optimizer is not None:
    # A schedule counts the optimizer's updates: one for each server version.
    tx: optax.GradientTransformation = optimizer(learning_rate)
    return tx
  scale = optax.scale_by_learning_rate(learning_rate)
  return sgd_chain(scale, momentum, weight_decay)


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  optimizer: Any = None,
) -> base.Algorithm:
  """The Algorithm of SGD, or of another optimizer, without look-ahead.
  ValueError for a momentum or a weight decay next to an optimizer."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.0), weight_decay=(weight_decay, 0.0)
  )
  tx = at_server(learning_rate, momentum, weight_decay, optimizer)
  return base.as_algorithm(tx)


def asgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """Asynchronous SGD: each message is an update, whatever its staleness.

    v <- gamma v + g;   params <- params - eta v

  All workers share one velocity v. With many workers, momentum is unstable.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al., "Taming momentum in a distributed asynchronous environment",
    2019, arXiv:1907.11612. Its baseline ASGD has no momentum.

  Example:
    A gradient of 2 arrives one update late, after another worker's of 4.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.asgd(0.5, workers=2, momentum=0.5).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> late, other = (server.send(state, jnp.int32(i)) for i in range(2))
    >>> state, _ = server.receive(state, other, jnp.float32(4.0))
    >>> print(state.params)  # v = 4; 8 - 0.5 4
    6.0
    >>> state, report = server.receive(state, late, jnp.float32(2.0))
    >>> print(state.params)  # v = 0.5 4 + 2 = 4; 6 - 0.5 4
    4.0
    >>> print(report.staleness, report.gap)  # one update, |6 - 8|
    1 2.0
  """
  del workers  # the server has no state per worker
  return Recipe(sgd(learning_rate, momentum, weight_decay, optimizer))


def ssgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """Synchronous SGD: one update on the mean of a message from every worker.

    v <- gamma v + (1 / N) sum_i g^i;   params <- params - eta v

  Args:
    learning_rate, momentum, weight_decay, optimizer: shared options.
    workers: N, the messages of an update.

  Returns:
    A Recipe for the bulk synchronous order.

  Source:
    none: it is SGD on batches that are N times as large. Chen et
    al., "Revisiting distributed synchronous SGD", 2016, arXiv:1604.00981,
    compare it with asynchronous SGD.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.ssgd(0.5, workers=2)
    >>> server = recipe.server()
    >>> state = server.init(jnp.float32(8.0))
    >>> tickets = [server.send(state, jnp.int32(i)) for i in range(2)]
    >>> for ticket, gradient in zip(tickets, (4.0, 2.0)):
    ...   state, _ = server.receive(state, ticket, jnp.float32(gradient))
    ...   print(state.params)  # 8 - 0.5 (4 + 2) / 2, after both messages
    8.0
    6.5
    >>> recipe.order
    'bulk_synchronous'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # The server averages N messages, then updates v with the mean.
  return Recipe(algorithm).in_rounds(workers)
