"""Workers that take several steps of their own between two messages.

The learning rate, momentum and weight decay are those of the workers' steps
(Downpour's are the server's). A schedule counts the server's updates here, too:
a job runs at the rate that was in force when its ticket was sent. `steps` is H,
the batches in a job.
"""

import numpy as np
import optax

from asgd import base, checks, names, rates, transforms
from asgd import worker as worker_lib
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, sgd_chain, velocity
from asgd.transforms import scale_by_sent_rate


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
  weight_decay=0.0,
  fetch_every: int | None = None,
  push_every=1,
  local_rate: optax.ScalarOrSchedule | None = None,
  optimizer="adagrad",
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
    local_rate: of the worker's own steps. None is the learning rate with "sgd",
      and a tenth of it with "adagrad", as Adagrad's is too large for them.
    optimizer: of the server: "sgd", or "adagrad" as the paper has it, with
      neither an epsilon nor an initial value of the accumulator.
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
  precondition = names.lookup("optimizer", optimizer, _PRECONDITIONS)()
  fraction = 0.1 if local_rate is None and optimizer == "adagrad" else 1.0
  local_rate = learning_rate if local_rate is None else local_rate
  rates.check("local_rate", local_rate)
  tx = optax.chain(optax.scale(fraction), scale_by_sent_rate(local_rate))
  decay = decay_weights(push_every * weight_decay)
  return Recipe(
    sgd(learning_rate, 0.0, 0.0, decay, precondition),
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, steps=push_every, message="gradients"
    ),
    steps=push_every,
    fetch_every=fetch_every // push_every,
  )


# Too small to change a square that differs from zero.
_TINY = float(np.finfo(np.float32).tiny)
_PRECONDITIONS = {
  "adagrad": lambda: optax.scale_by_rss(0.0, eps=_TINY),
  "sgd": optax.identity,
}


def model_averaging(
  learning_rate,
  workers,
  *,
  momentum=0.0,
  weight_decay=0.0,
  steps=10,
  keep_state=True,
) -> Recipe:
  """Local SGD: all workers take `steps` steps, then their models are averaged.

  params <- mean over workers of where each came from `params`. With one step
  and no momentum it is `ssgd`. With `keep_state` a worker keeps its momentum
  across the average; otherwise it starts each job with none. The momenta are
  not averaged.
  """
  tx = sgd_chain(scale_by_sent_rate(learning_rate), momentum, weight_decay)
  recipe = _displacements(sgd(1.0), tx, steps, keep_state=keep_state)
  return recipe.in_rounds(workers)


def easgd(
  learning_rate,
  workers,
  *,
  momentum=0.0,
  weight_decay=0.0,
  steps=10,
  moving_rate=0.9,
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
  rate = scale_by_sent_rate(learning_rate)
  tx = sgd_chain(rate, momentum, weight_decay, nesterov=True)
  return Recipe(
    sgd(1.0),
    worker=lambda loss: worker_lib.elastic_worker(
      loss, tx, steps=steps, alpha=moving_rate / workers
    ),
    steps=steps,
  )


def diloco(
  learning_rate,
  workers,
  *,
  weight_decay=0.1,
  steps=500,
  outer_rate=0.7,
  outer_momentum=0.9,
) -> Recipe:
  """DiLoCo (Douillard et al. 2023): AdamW inside, Nesterov momentum outside.

  All workers take `steps` steps of AdamW, each with its own state of AdamW; the
  mean over workers of start minus end is the gradient of one outer step. The
  weight decay is AdamW's, decoupled from the gradient. With `outer_rate` 1 and
  `outer_momentum` 0 it is parameter averaging.
  """
  rates.check("outer_rate", outer_rate)
  outer = optax.chain(
    velocity(outer_momentum, nesterov=True),
    optax.scale_by_learning_rate(outer_rate),
  )
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
  weight_decay=0.0,
  steps=10,
  mixing=0.6,
  discount="polynomial",
  decay: float | None = None,
  grace=4,
  proximal=0.0,
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
  tx = sgd_chain(scale_by_sent_rate(learning_rate), 0.0, weight_decay, pull)
  algorithm = base.as_algorithm(transforms.mix_models(mixing, s))
  return _displacements(algorithm, tx, steps)
