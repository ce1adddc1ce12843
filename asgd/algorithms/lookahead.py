"""Momentum that looks ahead: Nesterov's, one for each worker, and DANA."""

import optax

from asgd import transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, velocity


def _looking_ahead(momentum, learning_rate, velocity_of, *first) -> Recipe:
  """Momentum that sends params - eta velocity_of, behind other transforms."""
  algorithm = transforms.velocity_lookahead(
    momentum, learning_rate, velocity_of
  )
  return Recipe(transforms.precede(algorithm, *first))


def nag_asgd(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0
) -> Recipe:
  """Nesterov's momentum at the server, asynchronously (Hakimi et al. 2019).

  One velocity for all workers; sends params - eta gamma v. The look-ahead is
  of one update, while N are to come.
  """
  del workers
  return _looking_ahead(
    velocity(momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.trace),
    decay_weights(weight_decay),
  )


def multi_asgd(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0, look_ahead=True
) -> Recipe:
  """A velocity for each worker at the server (Hakimi et al. 2019).

  Sends params - eta gamma v^i, the worker's own look-ahead; without
  `look_ahead` the parameters as they are.
  """
  factor = momentum if look_ahead else 0.0
  return _looking_ahead(
    transforms.per_worker(velocity(momentum), workers),
    learning_rate,
    lambda state, worker: optax.tree.scale(
      factor, transforms.peek(state.inner, worker).trace
    ),
    decay_weights(weight_decay),
  )


def _dana(learning_rate, workers, momentum, *first) -> Recipe:
  return _looking_ahead(
    transforms.dana_momentum(workers, momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.total),
    *first,
  )


def dana_zero(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0
) -> Recipe:
  """DANA-Zero: a velocity for each worker, and the look-ahead over all.

  Sends params - eta gamma sum_j v^j, where the parameters will be, but for new
  gradients, when every worker has sent once more (Hakimi et al. 2019).
  """
  return _dana(learning_rate, workers, momentum, decay_weights(weight_decay))


def dana_slim(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0
) -> Recipe:
  """DANA-Slim: DANA-Zero with the velocities kept by the workers.

  The server is that of plain ASGD; a message is gamma v + g. Its parameters
  are DANA-Zero's look-ahead as long as the learning rate is constant; their
  recorded gap is about twice that of DANA-Zero on the same path.
  """
  del workers
  nesterov = optax.chain(
    decay_weights(weight_decay), velocity(momentum, nesterov=True)
  )
  return Recipe(sgd(learning_rate), message=nesterov)


def dana_dc(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0, strength=2.0
) -> Recipe:
  """DANA-Zero on compensated gradients, around the look-ahead that was sent.

  `strength` is lambda of the compensation, as in `dc_asgd_c`.
  """
  compensate = transforms.delay_compensation(strength)
  first = compensate, decay_weights(weight_decay)
  return _dana(learning_rate, workers, momentum, *first)
