"""SGD at the server, asynchronous and synchronous, and the parts of recipes."""

import optax

from asgd import base, checks, optimizers
from asgd.algorithms.recipe import Recipe


def decay_weights(weight_decay: float) -> optax.GradientTransformation:
  """Adds weight_decay * params to gradients; nothing for 0."""
  checks.nonnegative("weight_decay", weight_decay)
  if weight_decay == 0:
    return optax.identity()
  return optax.add_decayed_weights(weight_decay)


def velocity(momentum, *, nesterov=False) -> optax.GradientTransformation:
  """v <- momentum v + g; its update is v, or momentum v + g for Nesterov's."""
  checks.fraction("momentum", momentum)
  return optax.trace(momentum, nesterov=nesterov)


def sgd_chain(
  scale, momentum=0.0, weight_decay=0.0, *first, nesterov=False
) -> optax.GradientTransformation:
  """SGD behind other transforms; `scale` multiplies by the learning rate."""
  return optax.chain(
    *first,
    decay_weights(weight_decay),
    velocity(momentum, nesterov=nesterov) if momentum else optax.identity(),
    scale,
  )


def at_server(
  learning_rate, momentum=0.0, weight_decay=0.0, optimizer=None
) -> optax.GradientTransformation:
  """What a server runs: SGD, or the optimizer that it was given."""
  if optimizer is not None:
    return optimizer(learning_rate)
  scale = optax.scale_by_learning_rate(learning_rate)
  return sgd_chain(scale, momentum, weight_decay)


def sgd(learning_rate, momentum=0.0, weight_decay=0.0, optimizer=None):
  """The Algorithm of SGD, or of another optimizer, at the server."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.0), weight_decay=(weight_decay, 0.0)
  )
  tx = at_server(learning_rate, momentum, weight_decay, optimizer)
  return base.as_algorithm(tx)


def asgd(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Asynchronous SGD: each message is an update, whatever its staleness.

  params <- params - eta v, with v <- gamma v + g. With one worker it is
  sequential SGD; with many, momentum makes it unstable (Hakimi et al. 2019).
  """
  del workers
  return Recipe(sgd(learning_rate, momentum, weight_decay, optimizer))


def ssgd(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Synchronous SGD: one update on the mean of a message from every worker."""
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  return Recipe(algorithm).in_rounds(workers)
