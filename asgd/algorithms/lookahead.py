"""Momentum that looks ahead: Nesterov's, one for each worker, and DANA."""

import jax.numpy as jnp
import numpy as np
import optax

from asgd import optimizers, transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, velocity

_Optimizer = optimizers.Optimizer | None


def _own(optimizer, momentum, weight_decay):
  """Returns (momentum, None) where an update on a zero gradient is known in
  closed form, as with SGD, else (None, the optimizer)."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  if optimizer is None:
    return momentum, None
  known = optimizers.momentum_of(optimizer)
  return known, None if known is not None else optimizer


def _looking_ahead(momentum, learning_rate, velocity_of, weight_decay):
  """Momentum that sends params - eta velocity_of, behind weight decay."""
  algorithm = transforms.velocity_lookahead(
    momentum, learning_rate, velocity_of
  )
  return Recipe(transforms.precede(algorithm, decay_weights(weight_decay)))


def _rolled(learning_rate, optimizer, workers, others) -> Recipe:
  """Any optimizer, with a state for each of `workers` (None: one for all), that
  sends parameters rolled forward on zero gradients of the `others`."""
  tx = optimizers.at_version(optimizer, learning_rate)
  if workers is not None:
    tx = transforms.per_worker(tx, workers)
  if callable(learning_rate):
    tx = optimizers.counting(tx)
  return Recipe(transforms.lookahead(tx, others))


def nag_asgd(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  optimizer: _Optimizer = None,
) -> Recipe:
  """Nesterov's momentum at the server, asynchronously (Hakimi et al. 2019).

  One velocity for all workers; sends params - eta gamma v. The look-ahead is
  of one update, while N are to come. Of another optimizer it is an update on a
  zero gradient.
  """
  del workers
  momentum, optimizer = _own(optimizer, momentum, weight_decay)
  if optimizer is not None:
    return _rolled(learning_rate, optimizer, None, lambda worker: worker[None])
  return _looking_ahead(
    velocity(momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.trace),
    weight_decay,
  )


def multi_asgd(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  look_ahead: bool = True,
  optimizer: _Optimizer = None,
) -> Recipe:
  """A velocity for each worker at the server (Hakimi et al. 2019).

  Sends params - eta gamma v^i, the worker's own look-ahead; without
  `look_ahead` the parameters as they are. Another optimizer, too, has a state
  for each worker.
  """
  momentum, optimizer = _own(optimizer, momentum, weight_decay)
  if optimizer is not None:
    count = 1 if look_ahead else 0
    return _rolled(
      *(learning_rate, optimizer, workers),
      lambda worker: jnp.repeat(worker, count),
    )
  factor = momentum if look_ahead else 0.0
  return _looking_ahead(
    transforms.per_worker(velocity(momentum), workers),
    learning_rate,
    lambda state, worker: optax.tree.scale(
      factor, transforms.peek(state.inner, worker).trace
    ),
    weight_decay,
  )


def _dana(learning_rate, workers, momentum, weight_decay, optimizer) -> Recipe:
  momentum, optimizer = _own(optimizer, momentum, weight_decay)
  if optimizer is not None:
    everyone = np.arange(workers, dtype=np.int32)
    return _rolled(learning_rate, optimizer, workers, lambda _: everyone)
  return _looking_ahead(
    transforms.dana_momentum(workers, momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.total),
    weight_decay,
  )


def dana_zero(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  optimizer: _Optimizer = None,
) -> Recipe:
  """DANA-Zero: a velocity for each worker, and the look-ahead over all.

  Sends params - eta gamma sum_j v^j, where the parameters will be, but for new
  gradients, when every worker has sent once more (Hakimi et al. 2019). Of
  another optimizer there is a state for each worker, and what is sent is the
  parameters after an update of each on a zero gradient: N updates a ticket.
  """
  return _dana(learning_rate, workers, momentum, weight_decay, optimizer)


def dana_slim(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  optimizer: _Optimizer = None,
) -> Recipe:
  """DANA-Slim: DANA-Zero with the velocities kept by the workers.

  The server is that of plain ASGD; a message is gamma v + g. Its parameters
  are DANA-Zero's look-ahead as long as the learning rate is constant; their
  recorded gap is about twice that of DANA-Zero on the same path. Of another
  optimizer see `asgd.transforms.slim`; its learning rate is in the message.
  """
  del workers
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  if optimizer is not None:
    own = optimizers.at_version(optimizer, learning_rate)
    return Recipe(sgd(1.0), at_worker=transforms.slim(own))
  nesterov = optax.chain(
    decay_weights(weight_decay), velocity(momentum, nesterov=True)
  )
  return Recipe(sgd(learning_rate), at_worker=nesterov)


def dana_dc(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  strength: float = 2.0,
  optimizer: _Optimizer = None,
) -> Recipe:
  """DANA-Zero on compensated gradients, around the look-ahead that was sent.

  `strength` is lambda of the compensation, as in `dc_asgd_c`.
  """
  recipe = _dana(learning_rate, workers, momentum, weight_decay, optimizer)
  return recipe._replace(at_server=transforms.delay_compensation(strength))
