"""Recipes with a server that uses fresh gradients alone, and drops the others.

On every engine the server can drop a stale message when it arrives. A
simulation can also stop a computation as soon as its message would be dropped:
the order `asgd.orders.with_stops`.
"""

from collections.abc import Sequence

import optax

from asgd import checks
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import sgd
from asgd.optimizers import OptimizerLike
from asgd.orders import stops as stops_lib


def ringmaster_asgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, threshold: int | None = None, stops: bool = False,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Ringmaster ASGD: only gradients below a threshold of delay are used.

    params <- params - eta g   if the staleness is below R, else g is dropped

  Either way the worker starts again at the present parameters. With stops, a
  computation is stopped at the moment when its delay reaches R.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options;
      the paper has no momentum.
    threshold: R, in updates; None is N. R = 1 uses fresh gradients only, and a
      large R is `asgd`.
    stops: stop computations. Simulations only: a live computation runs to its
      end, and its message is dropped.

  Returns:
    A Recipe for the asynchronous order, or for `with_stops`.

  Source:
    Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: the first asynchronous SGD
    with optimal time complexity", ICML 2025, arXiv:2501.16168, algorithms 4
    (without calculation stops) and 5 (with them).

  Example:
    Two workers compute a gradient of 4 at the same parameters. With R = 1 the
    second one is too late.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.ringmaster_asgd(0.5, workers=2, threshold=1).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(2)]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(report.staleness, report.accepted, state.params)
    0 True 6.0
    1 False 6.0
  """
  threshold = workers if threshold is None else threshold
  checks.integer("threshold", threshold)
  checks.flag("stops", stops)
  recipe = Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    max_staleness=threshold - 1,
  )
  return _with_stops(recipe, stop_after=threshold) if stops else recipe


def rennala_sgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, every: int | None = None,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Rennala SGD: each update averages B gradients at the present parameters.

    params <- params - eta (1 / B) sum_b g_b,   all g_b computed at params

  No worker waits: each starts again at the present parameters when its message
  is received, and one that is fast sends several of the B gradients. A gradient
  that was computed at earlier parameters is dropped.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options;
      the paper has no momentum.
    every: B, the messages of an update; None is N.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Tyurin, Richtarik, "Optimal time complexities of parallel stochastic
    optimization methods under a fixed computation model", NeurIPS 2023,
    arXiv:2305.12387.

  Example:
    Worker 0 sends both gradients of the first update, 8 - 0.5 (4 + 2) / 2;
    worker 1's is late.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.rennala_sgd(0.5, workers=2).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> slow = server.send(state, jnp.int32(1))
    >>> for gradient in (4.0, 2.0):
    ...   ticket = server.send(state, jnp.int32(0))
    ...   state, _ = server.receive(state, ticket, jnp.float32(gradient))
    >>> state, report = server.receive(state, slow, jnp.float32(4.0))
    >>> print(state.params, report.accepted)
    6.5 False
  """
  every = workers if every is None else every
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    every=checks.integer("every", every),
    max_staleness=0,
  )


def mindflayer_sgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, every: int | None = None,
  budget: float | Sequence[float] | None = None,
  optimizer: OptimizerLike = None
) -> Recipe:
  """MindFlayer SGD: Rennala SGD with a budget of time for each computation.

    params <- params - eta (1 / B) sum_b g_b,   all g_b computed at params

  A computation of worker i that takes longer than t_i is stopped, and the
  worker begins another one at the present parameters. This helps if durations
  have a heavy tail, as in `durations.pareto`. Here an update waits for B
  gradients. In the paper it waits until each worker i has made B_i trials, and
  divides by the expected number of gradients.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options;
      the paper has no momentum.
    every: B, the messages of an update; None is N.
    budget: t_i, in the unit of the order's durations, a number for all workers
      or one for each; None is no budget, as in `rennala_sgd`. Only simulations
      take a budget: a live computation runs to its end.

  Returns:
    A Recipe for the order `with_stops`, or without a budget the asynchronous
    order.

  Source:
    Maranjyan, Omar, Richtarik, "MindFlayer SGD: efficient parallel SGD in the
    presence of heterogeneous and random worker compute times", UAI 2025,
    arXiv:2410.04285.

  Example:
    >>> import asgd
    >>> recipe = asgd.mindflayer_sgd(0.5, workers=2, every=8, budget=1.5)
    >>> recipe.every, recipe.max_staleness, recipe.order
    (8, 0, 'with_stops')
    >>> dict(recipe.order_options)
    {'budget': (1.5, 1.5)}
  """
  recipe = rennala_sgd(
    *(learning_rate, workers), momentum=momentum, weight_decay=weight_decay,
    every=every, optimizer=optimizer,
  )
  if budget is None:
    return recipe
  budgets = tuple(stops_lib.budgets_of(budget, workers))
  return _with_stops(recipe, budget=budgets)


def _with_stops(recipe: Recipe, **options: object) -> Recipe:
  """Returns a recipe for the order in which computations are stopped."""
  pairs = tuple(options.items())
  return recipe._replace(order="with_stops", order_options=pairs)
