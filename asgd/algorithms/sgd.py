"""SGD at the server, asynchronous and synchronous, and the parts it is made of.

The other families of recipes are composed of the same parts.
"""

import optax

from asgd import base, checks
from asgd.algorithms.recipe import Recipe


def decay_weights(weight_decay: float) -> optax.GradientTransformation:
  """Adds weight_decay * params to gradients; nothing for 0."""
  checks.nonnegative("weight_decay", weight_decay)
  if weight_decay == 0:
    return optax.identity()
  return optax.add_decayed_weights(weight_decay)


def velocity(
  momentum: float, *, nesterov: bool = False
) -> optax.GradientTransformation:
  """v <- momentum v + g; its update is v, or momentum v + g for Nesterov's."""
  checks.fraction("momentum", momentum)
  return optax.trace(momentum, nesterov=nesterov)


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  *first: optax.GradientTransformation,
) -> base.Algorithm:
  """SGD behind any transforms of the gradient, without look-ahead."""
  tx = optax.chain(
    *first,
    decay_weights(weight_decay),
    velocity(momentum) if momentum else optax.identity(),
    optax.scale_by_learning_rate(learning_rate),
  )
  return base.as_algorithm(tx)


def asgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
) -> Recipe:
  """Asynchronous SGD: each message is an update, whatever its staleness.

  params <- params - eta v, with v <- gamma v + g.

  With one worker it is sequential SGD. With many, momentum at the server makes
  it unstable (Hakimi et al. 2019).

  Args:
    momentum: gamma, at the server; 0 is none.
    weight_decay: at the server.
  """
  del workers
  return Recipe(sgd(learning_rate, momentum, weight_decay))


def ssgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
) -> Recipe:
  """Synchronous SGD: one update on the mean of a message from every worker.

  Args:
    momentum: gamma, at the server; 0 is none.
    weight_decay: at the server.
  """
  return Recipe(
    sgd(learning_rate, momentum, weight_decay),
    every=workers,
    order="bulk_synchronous",
  )
