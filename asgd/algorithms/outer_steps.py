"""DiLoCo and its asynchronous form: outer steps on displacements."""

import optax

from asgd import base, checks, optimizers, rates, transforms
from asgd.algorithms.local_work import displacement_recipe
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import at_server, decay_weights, velocity
from asgd.optimizers import OptimizerLike


def diloco(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  weight_decay: float = 0.1, steps: int = 500, outer_rate: float = 0.7,
  outer_momentum: float = 0.9, optimizer: OptimizerLike = None,
  outer_optimizer: OptimizerLike = None
) -> Recipe:
  """DiLoCo: AdamW at the workers, Nesterov's momentum at the server.

    worker: x^i <- params;   H steps of AdamW on x^i;   send params - x^i
    server: D = (1 / N) sum_i (params - x^i);   v <- mu v + D
            params <- params - eta_outer (mu v + D)

  Each worker keeps its state of AdamW. With eta_outer = 1 and mu = 0 DiLoCo is
  parameter averaging.

  Args:
    learning_rate: the learning rate of AdamW, positive, or a schedule over the
      server's updates.
    workers: N, the messages of an outer step.
    weight_decay: AdamW's, 0 or more, decoupled from the gradient.
    steps: H, batches of a worker per outer step.
    outer_rate: eta_outer, positive, or a schedule over the server's updates.
    outer_momentum: mu, in [0, 1).
    optimizer: the optimizer of the workers, instead of AdamW.
    outer_optimizer: the optimizer of the server, instead of Nesterov's
      momentum.

  Returns:
    A Recipe for the bulk synchronous order, with jobs of H batches.

  Source:
    Douillard et al., "DiLoCo: distributed low-communication training of
    language models", 2023, arXiv:2311.08105.

  Example:
    Two workers use SGD, from 8 to 6 and from 8 to 4: D = (2 + 4) / 2 = v.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> recipe = asgd.diloco(
    ...   0.5, workers=2, steps=1, optimizer=optax.sgd,
    ...   outer_rate=0.5, outer_momentum=0.5,
    ... )
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> for i, batch in enumerate((4.0, 8.0)):
    ...   ticket = server.send(state, jnp.int32(i))
    ...   own = worker.init(ticket.params)
    ...   own, message, _ = worker.work(own, ticket, jnp.float32(batch), key)
    ...   state, _ = server.receive(state, ticket, message)
    >>> print(state.params)  # 8 - 0.5 (0.5 3 + 3)
    5.75
  """
  rates.check("outer_rate", outer_rate)
  checks.fraction("outer_momentum", outer_momentum)
  optimizers.refuse_beside(
    outer_optimizer, outer_momentum=(outer_momentum, 0.9)
  )
  if outer_optimizer is not None:
    # The server treats a displacement as a gradient: D points uphill.
    outer = at_server(outer_rate, optimizer=outer_optimizer)
  else:
    outer = optax.chain(
      velocity(outer_momentum, nesterov=True),
      optax.scale_by_learning_rate(outer_rate),
    )
  inner = _inner_optimizer(learning_rate, weight_decay, optimizer)
  # "kept": a worker's moments of AdamW persist between rounds.
  recipe = displacement_recipe(base.as_algorithm(outer), inner, steps)
  return recipe.in_rounds(workers)


def _inner_optimizer(
  learning_rate: optax.ScalarOrSchedule, weight_decay: float,
  optimizer: OptimizerLike
) -> optax.GradientTransformation:
  """Returns the workers' AdamW, or the optimizer that replaces it."""
  optimizers.refuse_beside(optimizer, weight_decay=(weight_decay, 0.1))
  if optimizer is not None:
    return optimizers.at_version(optimizer, learning_rate)
  return optax.chain(
    # AdamW: decay is added after Adam's scaling, before the rate.
    optax.scale_by_adam(),
    decay_weights(weight_decay),
    transforms.scale_by_sent_rate(learning_rate),
  )


def async_diloco(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  weight_decay: float = 0.1, steps: int = 500, outer_rate: float = 0.7,
  outer_momentum: float = 0.9, momentum_every: int | None = None,
  momentum_share: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """Asynchronous DiLoCo: each message is an outer step; momentum is delayed.

    worker: x^i <- params;   H steps of AdamW on x^i;   send D = params - x^i
    server: S <- S + D
            each M-th D:  v <- mu v + S / M;   S <- 0
                          params <- params - eta_outer (a mu v + D / M)
            the others:   params <- params - eta_outer (c mu v + D / M)

  with a = 1 - c M + c (`asgd.transforms.delayed_nesterov`). No worker waits for
  another. M messages computed on the same parameters make together one outer
  step of `diloco` with M workers. The paper's dynamic local updates give faster
  workers more steps: set `allocation.steps` of a config to "speed".

  Args:
    learning_rate: the learning rate of AdamW, positive, or a schedule over the
      server's updates.
    workers: N.
    weight_decay: AdamW's, 0 or more, decoupled from the gradient.
    steps: H, batches per message.
    outer_rate: eta_outer, positive, or a schedule over the server's updates.
    outer_momentum: mu, in [0, 1).
    momentum_every: M, messages between two changes of v; None is N.
    momentum_share: c, in [0, 1 / M].
    optimizer: the optimizer of the workers, instead of AdamW.

  Returns:
    A Recipe for the asynchronous order, with jobs of H batches.

  Source:
    Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    arXiv:2401.09135.

  Example:
    Two workers send 2, then 4: 8 - 0.5 2 / 2; v = (2 + 4) / 2, so the second
    subtracts 0.5 (0.5 3 + 4 / 2). Both together are `diloco` of two workers.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.async_diloco(
    ...   0.1, workers=2, outer_rate=0.5, outer_momentum=0.5
    ... )
    >>> server = recipe.server()
    >>> state = server.init(jnp.float32(8.0))
    >>> tickets = [server.send(state, jnp.int32(i)) for i in range(2)]
    >>> for ticket, displacement in zip(tickets, (2.0, 4.0)):
    ...   state, _ = server.receive(state, ticket, jnp.float32(displacement))
    ...   print(state.params)
    7.5
    5.75
  """
  rates.check("outer_rate", outer_rate)
  checks.fraction("outer_momentum", outer_momentum)
  every = workers if momentum_every is None else momentum_every
  checks.integer("momentum_every", every)
  outer = optax.chain(
    transforms.delayed_nesterov(
      outer_momentum, every=every, share=momentum_share
    ),
    optax.scale_by_learning_rate(outer_rate),
  )
  inner = _inner_optimizer(learning_rate, weight_decay, optimizer)
  return displacement_recipe(base.as_algorithm(outer), inner, steps)
