"""Workers that take several steps of their own between two messages.

The learning rate, momentum and weight decay are those of the workers' steps
(Downpour's are the server's). A schedule counts the server's updates here, too:
a job runs at the rate that was in force when its ticket was sent. `steps` is H,
the batches in a job.
"""

import numpy as np
import optax

from asgd import base, checks, optimizers, rates, transforms
from asgd import worker as worker_lib
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, sgd_chain, velocity
from asgd.transforms import scale_by_sent_rate

_Optimizer = optimizers.Optimizer | None


def _of_worker(
  optimizer, learning_rate, momentum=0.0, weight_decay=0.0, *first, **options
):
  """What a worker runs in its steps: SGD behind the transforms `first`, or the
  optimizer that it was given."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.0), weight_decay=(weight_decay, 0.0)
  )
  if optimizer is not None:
    return optax.chain(*first, optimizers.at_version(optimizer, learning_rate))
  scale = scale_by_sent_rate(learning_rate)
  return sgd_chain(scale, momentum, weight_decay, *first, **options)


def _displacements(algorithm, tx, steps, *, keep_state=True) -> Recipe:
  """A recipe of workers that send the start minus the end of their steps."""
  checks.whole("steps", steps)

  def worker(loss):
    return worker_lib.local_worker(
      loss, tx, steps=steps, message="displacement", keep_state=keep_state
    )

  return Recipe(algorithm, worker=worker, steps=steps)


def downpour(
  learning_rate,
  workers,
  *,
  weight_decay: float = 0.0,
  fetch_every: int | None = None,
  push_every: int = 1,
  local_rate: optax.ScalarOrSchedule | None = None,
  optimizer: _Optimizer = None,
) -> Recipe:
  """Downpour SGD (Dean et al., "Large scale distributed deep networks", 2012).

  A worker pushes the sum of the gradients of `push_every` batches and fetches
  parameters every `fetch_every` batches; in between it takes plain gradient
  steps of its own, which the next fetch discards. With 1 and 1, the default, it
  is ASGD with Adagrad at the server.

  Args:
    learning_rate: the server's. Adagrad's first update moves each parameter by
      it, whatever the gradient.
    weight_decay: at the server, of each of the gradients in a push.
    fetch_every: n_fetch, in batches, a multiple of n_push; None is n_push.
    push_every: n_push, in batches.
    local_rate: of the worker's own steps. None is the learning rate if the
      server has SGD, and else a tenth of it, as Adagrad's is too large.
    optimizer: of the server. None is Adagrad as the paper has it, with neither
      an epsilon nor an initial value of the accumulator.
  """
  checks.whole("push_every", push_every)
  fetch_every = push_every if fetch_every is None else fetch_every
  checks.whole("fetch_every", fetch_every)
  if fetch_every % push_every:
    above = fetch_every + push_every - fetch_every % push_every
    raise ValueError(
      f"fetch_every must be a multiple of push_every ({push_every}), not"
      f" {fetch_every}: a push is computed against one ticket, and a fetch in"
      f" the middle would give it two; use {above}"
    )
  plain = optimizer and optimizers.momentum_of(optimizer) is not None
  fraction = 0.1 if local_rate is None and not plain else 1.0
  local_rate = learning_rate if local_rate is None else local_rate
  rates.check("local_rate", local_rate)
  tx = optax.chain(optax.scale(fraction), scale_by_sent_rate(local_rate))
  server = optax.chain(
    decay_weights(push_every * weight_decay),
    (optimizer or _adagrad)(learning_rate),
  )
  return Recipe(
    base.as_algorithm(server),
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, steps=push_every, message="gradients"
    ),
    steps=push_every,
    fetch_every=fetch_every // push_every,
  )


# Too small to change a square that differs from zero.
_TINY = float(np.finfo(np.float32).tiny)


def _adagrad(learning_rate):
  scale = optax.scale_by_learning_rate(learning_rate)
  return optax.chain(optax.scale_by_rss(0.0, eps=_TINY), scale)


def model_averaging(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  steps: int = 10,
  keep_state: bool = True,
  optimizer: _Optimizer = None,
) -> Recipe:
  """Local SGD: all workers take `steps` steps, then their models are averaged.

  params <- mean over workers of where each came from `params`. With one step
  and no momentum it is `ssgd`. With `keep_state` a worker keeps its momentum
  across the average; otherwise it starts each job with none. The momenta, or
  what else an optimizer keeps, are not averaged.
  """
  tx = _of_worker(optimizer, learning_rate, momentum, weight_decay)
  recipe = _displacements(sgd(1.0), tx, steps, keep_state=keep_state)
  return recipe.in_rounds(workers)


def easgd(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  steps: int = 10,
  moving_rate: float = 0.9,
  optimizer: _Optimizer = None,
) -> Recipe:
  """Elastic averaging SGD, asynchronous (Zhang, Choromanska, LeCun 2015).

  Each worker trains parameters x^i of its own. Every `steps` steps, x^i and the
  server's parameters x, which are evaluated, are drawn to each other:
  d = alpha (x^i - x); x^i <- x^i - d; x <- x + d. A schedule counts exchanges.
  `asgd.worker.elastic_worker` lists the differences from the paper. The
  momentum is Nesterov's (EAMSGD). `moving_rate` is beta, in (0, 1]: each
  exchange closes alpha = beta / N of the distance from either side.
  """
  if not 0 < moving_rate <= 1:
    raise ValueError(f"moving_rate must be in (0, 1], not {moving_rate}")
  checks.whole("steps", steps)
  tx = _of_worker(
    optimizer, learning_rate, momentum, weight_decay, nesterov=True
  )
  return Recipe(
    sgd(1.0),
    worker=lambda loss: worker_lib.elastic_worker(
      loss, tx, steps=steps, alpha=moving_rate / workers
    ),
    steps=steps,
    mixes=True,
  )


def diloco(
  learning_rate,
  workers,
  *,
  weight_decay: float = 0.1,
  steps: int = 500,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
  optimizer: _Optimizer = None,
  outer_optimizer: _Optimizer = None,
) -> Recipe:
  """DiLoCo (Douillard et al. 2023): AdamW inside, Nesterov momentum outside.

  All workers take `steps` steps of AdamW, each with its own state of AdamW; the
  mean over workers of start minus end is the gradient of one outer step. The
  weight decay is AdamW's, decoupled from the gradient. With `outer_rate` 1 and
  `outer_momentum` 0 it is parameter averaging.

  Args:
    optimizer: of the workers, instead of AdamW.
    outer_optimizer: of the server, instead of Nesterov's momentum; its learning
      rate is `outer_rate`.
  """
  rates.check("outer_rate", outer_rate)
  optimizers.refuse_beside(optimizer, weight_decay=(weight_decay, 0.1))
  optimizers.refuse_beside(
    outer_optimizer, outer_momentum=(outer_momentum, 0.9)
  )
  if outer_optimizer is not None:
    outer = outer_optimizer(outer_rate)
  else:
    outer = optax.chain(
      velocity(outer_momentum, nesterov=True),
      optax.scale_by_learning_rate(outer_rate),
    )
  if optimizer is not None:
    inner = optimizers.at_version(optimizer, learning_rate)
  else:
    inner = optax.chain(
      optax.scale_by_adam(),
      decay_weights(weight_decay),
      scale_by_sent_rate(learning_rate),
    )
  recipe = _displacements(base.as_algorithm(outer), inner, steps)
  return recipe.in_rounds(workers)


def fedasync(
  learning_rate,
  workers,
  *,
  weight_decay: float = 0.0,
  steps: int = 10,
  mixing: float = 0.6,
  discount: str = "polynomial",
  decay: float | None = None,
  grace: int = 4,
  proximal: float = 0.0,
  optimizer: _Optimizer = None,
) -> Recipe:
  """FedAsync (Xie, Koyejo, Gupta 2019): the server mixes in whole models.

  x <- (1 - alpha_t) x + alpha_t x_new, with alpha_t = alpha s(staleness), and
  x_new where a worker came in `steps` steps of SGD from what it was sent.

  Args:
    mixing: alpha, in (0, 1].
    discount: s: "constant" is 1, "polynomial" (staleness + 1)^-a, "hinge" 1 up
      to a staleness of b = `grace` and 1 / (a (staleness - b) + 1) beyond.
    decay: a; None is 0.5 for "polynomial" and 10 for "hinge".
    proximal: rho, of rho / 2 ||x - x_sent||^2 added to the local loss.
  """
  del workers
  s = transforms.make_discount(discount, decay, grace)
  pull = transforms.add_proximal_pull(proximal)
  tx = _of_worker(optimizer, learning_rate, 0.0, weight_decay, pull)
  algorithm = base.as_algorithm(transforms.mix_models(mixing, s))
  return _displacements(algorithm, tx, steps)._replace(mixes=True)
