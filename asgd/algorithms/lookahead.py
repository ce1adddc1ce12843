"""Momentum that looks ahead: Nesterov's, one momentum per worker, and DANA.

References:
  Hakimi, Barkai, Gabel, Schuster, "Taming momentum in a distributed
  asynchronous environment", 2019, arXiv:1907.11612.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from asgd import checks, optimizers, transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, velocity
from asgd.optimizers import OptimizerLike


def _momentum_of_sgd(
  optimizer: OptimizerLike, momentum: float, weight_decay: float
) -> float | None:
  """Returns the momentum of SGD, or None for another optimizer. The look-ahead
  of SGD has a closed form; others are stepped on zero gradients."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  if optimizer is None:
    return momentum
  # optax.sgd with a momentum is recognised, and uses the closed form, too.
  return optimizers.momentum_of(optimizer)


def _velocity_recipe(
  momentum: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  ahead: Callable[[Any, jax.Array], optax.Updates],
  weight_decay: float,
) -> Recipe:
  """Returns a recipe that applies weight decay, then `momentum`, and sends
  params - eta ahead(state of `momentum`, receiving worker)."""
  algorithm = transforms.velocity_lookahead(momentum, learning_rate, ahead)
  # The server adds weight decay at its own parameters, not at the look-ahead,
  # so v contains it.
  return Recipe(transforms.precede(algorithm, decay_weights(weight_decay)))


def _zero_gradient_recipe(
  learning_rate: optax.ScalarOrSchedule,
  optimizer: OptimizerLike,
  workers: int | None,
  senders: Callable[[jax.Array], Any],
) -> Recipe:
  """Returns a recipe that sends the parameters after updates on zero gradients:
  one update with the optimizer state of each worker in `senders(receiver)`.

  The optimizer has a state for each of `workers`, or one for all (None).
  """
  # A worker's state is updated only by its messages, but a schedule counts all
  # updates of the server.
  tx = optimizers.at_version(optimizer, learning_rate)
  if workers is not None:
    tx = transforms.per_worker(tx, workers)
  # `send` gets no version, so the optimizer's state counts the updates.
  if callable(learning_rate):
    tx = optimizers.counting(tx)
  return Recipe(transforms.lookahead(tx, senders))


def nag_asgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """NAG-ASGD: Nesterov's momentum at the server, asynchronously.

    v <- gamma v + g;   params <- params - eta v;   send params - eta gamma v

  There is one velocity v for all workers. The look-ahead is by one update,
  although N updates will follow before the message arrives.

  Args:
    learning_rate, workers, momentum, weight_decay: shared options.
    optimizer: its look-ahead is an update on a zero gradient.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al. 2019, NAG-ASGD.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.nag_asgd(0.5, workers=2, momentum=0.5).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> ticket = server.send(state, jnp.int32(0))
    >>> state, _ = server.receive(state, ticket, jnp.float32(4.0))
    >>> print(state.params)  # v = 4; 8 - 0.5 4
    6.0
    >>> print(server.send(state, jnp.int32(1)).params)  # 6 - 0.5 0.5 4
    5.0
  """
  del workers
  gamma = _momentum_of_sgd(optimizer, momentum, weight_decay)
  if gamma is None:
    # One update on a zero gradient, with the one state of all workers.
    return _zero_gradient_recipe(
      learning_rate, optimizer, None, lambda worker: worker[None]
    )
  return _velocity_recipe(
    velocity(gamma),
    learning_rate,
    # gamma v: what the next update adds to its own gradient.
    lambda state, worker: optax.tree.scale(gamma, state.trace),
    weight_decay,
  )


def multi_asgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, look_ahead: bool = True,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Multi-ASGD: the server keeps a velocity for each worker.

    v^i <- gamma v^i + g^i;   params <- params - eta v^i
    send params - eta gamma v^i

  Args:
    learning_rate, momentum, weight_decay: shared options.
    workers: N, the number of velocities at the server.
    look_ahead: False sends the current parameters.
    optimizer: has a state for each worker; its look-ahead is an update on a
      zero gradient.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al. 2019, Multi-ASGD.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.multi_asgd(0.5, workers=2, momentum=0.5).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> ticket = server.send(state, jnp.int32(0))
    >>> state, _ = server.receive(state, ticket, jnp.float32(4.0))
    >>> for worker in range(2):  # 6 - 0.5 0.5 4, and 6 as v^1 = 0
    ...   print(server.send(state, jnp.int32(worker)).params)
    5.0
    6.0
  """
  checks.flag("look_ahead", look_ahead)
  gamma = _momentum_of_sgd(optimizer, momentum, weight_decay)
  if gamma is None:
    # Without a look-ahead the slice is empty: no update is made.
    return _zero_gradient_recipe(
      learning_rate, optimizer, workers, lambda i: i[None][: int(look_ahead)]
    )
  factor = gamma if look_ahead else 0.0
  return _velocity_recipe(
    transforms.per_worker(velocity(gamma), workers),
    learning_rate,
    # gamma v^i of the receiver alone, as if no other worker sent a message.
    lambda state, worker: optax.tree.scale(
      factor, transforms.peek(state.inner, worker).trace
    ),
    weight_decay,
  )


def _dana(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  momentum: float,
  weight_decay: float,
  optimizer: OptimizerLike,
) -> Recipe:
  """Returns the recipe that DANA-Zero and DANA-DC share."""
  gamma = _momentum_of_sgd(optimizer, momentum, weight_decay)
  if gamma is None:
    # One update of each worker's state, in the order of the workers.
    all_workers = np.arange(workers, dtype=np.int32)
    return _zero_gradient_recipe(
      learning_rate, optimizer, workers, lambda _: all_workers
    )
  return _velocity_recipe(
    transforms.dana_momentum(workers, gamma),
    learning_rate,
    # gamma v^0 = gamma sum_j v^j: the momentum part of the next message of
    # every worker. It is the same for all receivers.
    lambda state, worker: optax.tree.scale(gamma, state.total),
    weight_decay,
  )


def dana_zero(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """DANA-Zero: a velocity for each worker, and a look-ahead over all of them.

    v^i <- gamma v^i + g^i;   params <- params - eta v^i
    send params - eta gamma sum_j v^j

  The look-ahead is the parameters after one more message of every worker, if
  all new gradients were zero.

  Args:
    learning_rate, momentum, weight_decay: shared options.
    workers: N, the number of velocities at the server.
    optimizer: has a state for each worker. Its look-ahead is an update of each
      state on a zero gradient: N updates per ticket.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al. 2019, DANA-Zero.

  Example:
    Worker 0 sends a gradient of 4, then worker 1 one of 8.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.dana_zero(0.5, workers=2, momentum=0.5).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for worker, gradient in ((0, 4.0), (1, 8.0)):
    ...   ticket = server.send(state, jnp.int32(worker))
    ...   state, _ = server.receive(state, ticket, jnp.float32(gradient))
    ...   ahead = server.send(state, jnp.int32(worker)).params
    ...   print(state.params, ahead)  # 6 - 0.25 4, 2 - 0.25 (4 + 8)
    6.0 5.0
    2.0 -1.0
  """
  return _dana(learning_rate, workers, momentum, weight_decay, optimizer)


def dana_slim(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """DANA-Slim: DANA-Zero with the velocities at the workers.

    worker: v^i <- gamma v^i + g^i;   send u^i = gamma v^i + g^i
    server: params <- params - eta u^i,   and sends params

  The server is that of ASGD. Its parameters equal DANA-Zero's look-ahead while
  the learning rate is constant. The recorded gap is about twice DANA-Zero's.

  Args:
    learning_rate, workers, momentum: shared options.
    weight_decay: added by a worker, computed from the sent parameters.
    optimizer: one at each worker (`asgd.transforms.slim`). Messages already
      contain its learning rate.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al. 2019, DANA-Slim.

  Example:
    The gradients are those of `dana_zero`'s example. This server's parameters
    equal the ones that DANA-Zero's server sends.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.dana_slim(0.5, workers=2, momentum=0.5)
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> for i, batch in ((0, 4.0), (1, 8.0)):  # u = 1.5 g, as v is new
    ...   ticket = server.send(state, jnp.int32(i))
    ...   own = worker.init(ticket.params)
    ...   own, u, _ = worker.work(own, ticket, jnp.float32(batch), key)
    ...   state, _ = server.receive(state, ticket, u)
    ...   print(u, state.params)
    6.0 5.0
    12.0 -1.0
  """
  del workers
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  if optimizer is not None:
    # The worker's optimizer applies the learning rate, so the server's is 1:
    # Theta <- Theta - u^i, with eta in u^i.
    tx = optimizers.at_version(optimizer, learning_rate)
    return Recipe(sgd(1.0), at_worker=transforms.slim(tx))
  # u^i = gamma v^i + g^i is the update of Nesterov's momentum in optax's form.
  nesterov = optax.chain(
    decay_weights(weight_decay), velocity(momentum, nesterov=True)
  )
  # Theta <- Theta - eta u^i, without a velocity at the server.
  return Recipe(sgd(learning_rate), at_worker=nesterov)


def dana_dc(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, strength: float = 2.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """DANA-DC: DANA-Zero on gradients with delay compensation.

    g^i <- g^i + lambda g^i * g^i * (params - sent_params),   elementwise

  Compensation precedes the update of `dana_zero`. The server sends
  look-aheads, so even a gradient without staleness is compensated.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: see `dana_zero`.
    strength: lambda, 0 or more, per unit of loss; see `dc_asgd_c`.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Hakimi et al. 2019, DANA-DC.

  Example:
    A worker's gradient of 4 leaves v = 4 and the parameter 6; the look-ahead 5
    is sent. The next gradient, 2, becomes 2 + 0.5 2^2 (6 - 5) = 4.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.dana_dc(0.5, workers=2, momentum=0.5, strength=0.5)
    >>> server = recipe.server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for gradient in (4.0, 2.0):
    ...   ticket = server.send(state, jnp.int32(0))
    ...   state, _ = server.receive(state, ticket, jnp.float32(gradient))
    ...   print(ticket.params, state.params)  # 6 - 0.5 (0.5 4 + 4)
    8.0 6.0
    5.0 3.0
  """
  # `at_server` transforms a gradient before DANA's momentum sees it. Its
  # `sent_params` are the look-ahead that the worker received (theta^i).
  recipe = _dana(learning_rate, workers, momentum, weight_decay, optimizer)
  return recipe._replace(at_server=transforms.delay_compensation(strength))
