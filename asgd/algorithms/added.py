"""Workers that keep the optimizer, and a server that only adds."""

import optax

from asgd.algorithms.local_work import displacement_recipe, local_optimizer
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import sgd
from asgd.optimizers import OptimizerLike


def worker_optimizer(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, steps: int = 1, optimizer: OptimizerLike = None
) -> Recipe:
  """Each worker takes its optimizer's step, and the server adds the update.

    worker: x^i <- params;   H times v^i <- gamma v^i + g^i;
            x^i <- x^i - eta v^i;   send u^i = x^i - params
    server: params <- params + u^i

  The server has no state and does no work beside the addition; the state of the
  optimizer stays at its worker. Without momentum and with H = 1 it is `asgd`.
  `model_averaging` takes the mean of such updates in rounds.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
      Weight decay is computed from the worker's parameters.
    steps: H, batches in an update.

  Returns:
    A Recipe for the asynchronous order, with jobs of H batches.

  Raises:
    ValueError: for a value out of its range.

  Source:
    the code of Zhang, Choromanska, LeCun, "Deep learning with elastic averaging
    SGD", NIPS 2015 (github.com/sixin-zh/mpiT, asyncsgd/optim-downpour.lua), for
    SGD without momentum.

  Example:
    Worker 0 sends -0.5 4, then with v = 0.5 4 + 2 another -0.5 4.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.worker_optimizer(0.5, workers=2, momentum=0.5)
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> own = worker.init(state.params)
    >>> for batch in (4.0, 2.0):
    ...   ticket = server.send(state, jnp.int32(0))
    ...   own, message, _ = worker.work(own, ticket, jnp.float32(batch), key)
    ...   state, _ = server.receive(state, ticket, message)
    ...   print(state.params)
    6.0
    4.0
  """
  del workers  # the server adds updates of any number of workers
  tx = local_optimizer(optimizer, learning_rate, momentum, weight_decay)
  # A displacement is the start minus the end: SGD with rate 1 subtracts it.
  return displacement_recipe(sgd(1.0), tx, steps)
