"""Named recipes: the algorithms of the literature, composed from transforms.

A Recipe says what runs where. Most of it is the Algorithm at the server; a few
also transform messages at the worker (DANA-Slim) or average several of them
into an update (SSGD, n-softsync). The last few leave most to workers that take
several steps of their own between two messages (Downpour, parameter averaging,
EASGD, DiLoCo, FedAsync). All take the learning rate first, then the number of
workers, and most of them these two in common:

  momentum      gamma, in the form v <- gamma v + g; params <- params - eta v,
                in which v does not hold the learning rate eta;
  weight_decay  added to gradients as weight_decay * params: the server's, at
                the server, after any compensation and before the momentum.
                Gap-Aware penalises it with the gradient; in DANA-Slim, whose
                momentum is the worker's, so is the decay.

Where workers take steps of their own, the learning rate, the momentum and the
weight decay are those of these steps (Downpour's learning rate is the
server's). A learning rate that is a schedule counts the server's updates there,
too: a job is done at the rate that was in force when its ticket was sent.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import optax

from asgd import base, names, transforms
from asgd import server as server_lib
from asgd import worker as worker_lib


class Recipe(NamedTuple):
  """An algorithm and the places where its parts run."""

  algorithm: base.Algorithm  # at the server, once per update
  message: optax.GradientTransformation | None = None  # at the worker
  per_message: optax.GradientTransformation | None = None  # at the server
  every: int = 1  # messages per update
  order: str = "asynchronous"  # the protocol it is meant for
  workers: int | None = None  # most workers it can serve; None is any
  worker: Callable[[worker_lib.Loss], base.Worker] | None = None  # None: sends
  # one gradient, passed through `message`
  steps: int = 1  # batches in a job; `asgd.worker.job_batches` stacks them
  fetch_every: int = 1  # jobs on one ticket

  def make_worker(self, loss: worker_lib.Loss) -> base.Worker:
    """Builds what each of its workers does.

    Args:
      loss: of one batch.

    Raises:
      ValueError: if the recipe asks a worker that sends plain gradients for
        several steps, or gives `message` to one that does not.
    """
    if self.worker is None:
      if self.steps != 1:
        raise ValueError(
          f"a gradient worker takes one batch a job, not steps={self.steps};"
          " give the Recipe a worker, such as asgd.worker.local_worker"
        )
      return worker_lib.gradient_worker(loss, self.message)
    if self.message is not None:
      raise ValueError(
        "the Recipe has a worker of its own, which would ignore its `message`"
        " transform; put that into the worker"
      )
    return self.worker(loss)

  def server(
    self,
    *,
    gate: server_lib.Gate = server_lib.accept_all,
    statistics_decay: float = 0.9,
  ) -> base.Server:
    """Builds its server, which also owns the statistics of BatchNorm.

    Raises:
      ValueError: if the algorithm is a bare optax transform.
    """
    if not hasattr(self.algorithm, "send"):
      raise ValueError(
        "a Recipe needs an Algorithm, not an optax transform: wrap it with"
        " asgd.as_algorithm(tx)"
      )
    return server_lib.make_server(
      transforms.own_statistics(self.algorithm, statistics_decay),
      every=self.every,
      gate=gate,
      per_message=self.per_message,
      workers=self.workers,
    )


def _decay(weight_decay: float) -> optax.GradientTransformation:
  if not 0 <= weight_decay < math.inf:
    raise ValueError(f"weight_decay must be 0 or more, not {weight_decay}")
  if weight_decay == 0:
    return optax.identity()
  return optax.add_decayed_weights(weight_decay)


def _trace(
  momentum: float, *, nesterov: bool = False
) -> optax.GradientTransformation:
  if not 0 <= momentum < 1:
    raise ValueError(f"momentum must be in [0, 1), not {momentum}")
  return optax.trace(momentum, nesterov=nesterov)


def _momentum(
  momentum: float, *, nesterov: bool = False
) -> optax.GradientTransformation:
  """Momentum that keeps no state where there is none."""
  if momentum == 0:
    return optax.identity()
  return _trace(momentum, nesterov=nesterov)


def _sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float,
  weight_decay: float,
  *first: optax.GradientTransformation,
) -> base.Algorithm:
  """SGD behind any transforms of the gradient; sends what it has."""
  tx = optax.chain(
    *first,
    _decay(weight_decay),
    _momentum(momentum),
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
  """Asynchronous SGD: each message is an update, however late.

  With momentum it is the plain momentum at the server that asynchrony makes
  unstable; with one worker it is sequential SGD.

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma, at the server; 0 is none.
    weight_decay: at the server.
  """
  del workers
  return Recipe(_sgd(learning_rate, momentum, weight_decay))


def ssgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
) -> Recipe:
  """Synchronous SGD: one update on the mean of a message from every worker.

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma, at the server; 0 is none.
    weight_decay: at the server.
  """
  return Recipe(
    _sgd(learning_rate, momentum, weight_decay),
    every=workers,
    order="bulk_synchronous",
  )


def nag_asgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
) -> Recipe:
  """Nesterov's momentum at the server, asynchronously (Hakimi et al. 2019).

  One velocity for all workers; sends params - eta gamma v. The look-ahead is
  of one update, while N are to come.

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma.
    weight_decay: at the server.
  """
  del workers
  algorithm = transforms.velocity_lookahead(
    _trace(momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.trace),
  )
  return Recipe(transforms.precede(algorithm, _decay(weight_decay)))


def multi_asgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  look_ahead: bool = True,
) -> Recipe:
  """A velocity for each worker at the server (Hakimi et al. 2019).

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma.
    weight_decay: at the server.
    look_ahead: send params - eta gamma v^i, the worker's own look-ahead;
      otherwise the parameters as they are.
  """
  velocities = transforms.per_worker(_trace(momentum), workers)
  factor = momentum if look_ahead else 0.0
  algorithm = transforms.velocity_lookahead(
    velocities,
    learning_rate,
    lambda state, worker: optax.tree.scale(
      factor, transforms.peek(state.inner, worker).trace
    ),
  )
  return Recipe(transforms.precede(algorithm, _decay(weight_decay)))


def staleness_aware(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  splits: int | None = None,
) -> Recipe:
  """Divides each gradient by its staleness (Zhang et al. 2016).

  Args:
    learning_rate: alpha_0 of the paper.
    workers: lambda of the paper.
    momentum: at the server, after averaging.
    weight_decay: at the server, not divided.
    splits: n of n-softsync: update on every floor(workers / n) messages, from
      whichever workers; None updates on each message (n = workers).
  """
  every = 1
  if splits is not None:
    if not isinstance(splits, int) or not 1 <= splits <= workers:
      raise ValueError(
        f"splits must be from 1 to the {workers} workers, not {splits}"
      )
    every = workers // splits
  return Recipe(
    _sgd(learning_rate, momentum, weight_decay),
    per_message=transforms.scale_by_staleness(),
    every=every,
  )


def dc_asgd_c(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  strength: float = 0.04,
) -> Recipe:
  """Delay compensation with a constant lambda (Zheng et al. 2017).

  Args:
    learning_rate: eta.
    workers: N.
    momentum: at the server, after the compensation; 0 is none.
    weight_decay: at the server, not compensated.
    strength: lambda.
  """
  del workers
  compensate = transforms.delay_compensation(strength)
  return Recipe(_sgd(learning_rate, momentum, weight_decay, compensate))


def dc_asgd_a(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  strength: float = 2.0,
  decay: float = 0.95,
  scope: str = "server",
) -> Recipe:
  """Delay compensation with an adaptive lambda (Zheng et al. 2017).

  Args:
    learning_rate: eta.
    workers: N.
    momentum: at the server, after the compensation.
    weight_decay: at the server, not compensated.
    strength: lambda_0.
    decay: m, of the mean square.
    scope: "server" keeps one mean square, as the paper's text; "worker" one
      for each worker, as its authors' code.
  """
  compensate = transforms.adaptive_delay_compensation(strength, decay=decay)
  if scope == "worker":
    compensate = transforms.per_worker(compensate, workers)
  elif scope != "server":
    raise ValueError(f"scope must be 'server' or 'worker', not {scope!r}")
  return Recipe(_sgd(learning_rate, momentum, weight_decay, compensate))


def gap_aware(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
) -> Recipe:
  """Divides gradients by the elementwise gap (Barkai et al. 2020).

  Args:
    learning_rate: eta.
    workers: N.
    momentum: of what is left after the division; 0 is none.
    weight_decay: at the server, divided with the gradient.
  """
  del workers
  tx = optax.chain(
    _decay(weight_decay),
    transforms.gap_aware(
      None if momentum == 0 else _trace(momentum), learning_rate
    ),
    optax.scale_by_learning_rate(learning_rate),
  )
  return Recipe(base.as_algorithm(tx))


def _dana(
  learning_rate: optax.ScalarOrSchedule, workers: int, momentum: float
) -> base.Algorithm:
  return transforms.velocity_lookahead(
    transforms.dana_momentum(workers, momentum),
    learning_rate,
    lambda state, worker: optax.tree.scale(momentum, state.total),
  )


def dana_zero(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
) -> Recipe:
  """DANA-Zero: a velocity for each worker, and the look-ahead over all.

  Sends params - eta gamma sum_j v^j, where the parameters will be, but for new
  gradients, when every worker has sent once more (Hakimi et al. 2019).

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma, of each worker's velocity.
    weight_decay: at the server.
  """
  algorithm = _dana(learning_rate, workers, momentum)
  return Recipe(transforms.precede(algorithm, _decay(weight_decay)))


def dana_slim(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
) -> Recipe:
  """DANA-Slim: DANA-Zero with the velocities kept by the workers.

  The server is that of plain ASGD; a message is gamma v + g. Its parameters
  are DANA-Zero's look-ahead as long as the learning rate is constant. Weight
  decay, too, is the worker's: of the parameters it was sent. The recorded gap
  is between those parameters, about twice that of DANA-Zero on the same path.

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma, at the workers.
    weight_decay: at the workers.
  """
  del workers
  nesterov = optax.chain(_decay(weight_decay), _trace(momentum, nesterov=True))
  return Recipe(_sgd(learning_rate, 0.0, 0.0), message=nesterov)


def dana_dc(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  strength: float = 2.0,
) -> Recipe:
  """DANA-Zero on compensated gradients, around the look-ahead that was sent.

  Args:
    learning_rate: eta.
    workers: N.
    momentum: gamma, of each worker's velocity.
    weight_decay: at the server, not compensated.
    strength: lambda of the compensation, as in `dc_asgd_c`.
  """
  algorithm = _dana(learning_rate, workers, momentum)
  compensate = transforms.delay_compensation(strength)
  return Recipe(transforms.precede(algorithm, compensate, _decay(weight_decay)))


def downpour(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  weight_decay: float = 0.0,
  fetch_every: int | None = None,
  push_every: int = 1,
  local_rate: optax.ScalarOrSchedule | None = None,
  optimizer: str = "adagrad",
) -> Recipe:
  """Downpour SGD (Dean et al., "Large scale distributed deep networks", 2012).

  A worker pushes the sum of the gradients of `push_every` batches and fetches
  parameters every `fetch_every` batches; in between it takes plain gradient
  steps of its own, which the next fetch replaces. With the default of 1 and 1
  no such step is ever seen, and it is ASGD with Adagrad at the server.

  Args:
    learning_rate: the server's. Adagrad's gamma may be, in the paper, an order
      of magnitude larger than the best fixed rate: its first update moves each
      parameter by gamma, whatever the gradient.
    workers: N.
    weight_decay: at the server, of each of the gradients in a push.
    fetch_every: n_fetch, in batches, a multiple of n_push; None is n_push.
    push_every: n_push, in batches.
    local_rate: of the worker's own steps. None is the learning rate, or a tenth
      of it with Adagrad, whose gamma is no rate for a plain step.
    optimizer: of the server: "adagrad", as the paper has it, with neither an
      epsilon nor a first value in its accumulator (so not `optax.adagrad`), or
      "sgd".

  Raises:
    ValueError: for values out of range, and a fetch in the middle of a push:
      that message would belong to two tickets, and have two stalenesses.
  """
  worker_lib.check_steps(push_every, "push_every")
  fetch_every = push_every if fetch_every is None else fetch_every
  worker_lib.check_steps(fetch_every, "fetch_every")
  if fetch_every % push_every:
    above = fetch_every + push_every - fetch_every % push_every
    raise ValueError(
      f"fetch_every must be a multiple of push_every ({push_every}), not"
      f" {fetch_every}: a push is computed against one ticket, and a fetch in"
      f" the middle would give it two; use {above}"
    )
  if optimizer == "adagrad":
    # So small that it changes no square that can be told from zero.
    tiny = float(np.finfo(np.float32).tiny)
    precondition, fraction = optax.scale_by_rss(0.0, eps=tiny), 0.1
  elif optimizer == "sgd":
    precondition, fraction = optax.identity(), 1.0
  else:
    raise ValueError(f"optimizer must be 'adagrad' or 'sgd', not {optimizer!r}")
  if local_rate is None:
    local_rate = learning_rate
  else:
    _check_rate("local_rate", local_rate)
    fraction = 1.0
  tx = optax.chain(
    optax.scale(fraction), transforms.scale_by_sent_rate(local_rate)
  )
  decay = _decay(push_every * weight_decay)
  return Recipe(
    _sgd(learning_rate, 0.0, 0.0, decay, precondition),
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, steps=push_every, message="gradients"
    ),
    steps=push_every,
    fetch_every=fetch_every // push_every,
  )


def _check_rate(name: str, rate: optax.ScalarOrSchedule) -> None:
  if not callable(rate) and not 0 < rate < math.inf:
    raise ValueError(f"{name} must be positive, not {rate}")


def _local_sgd(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float,
  weight_decay: float,
  *first: optax.GradientTransformation,
  nesterov: bool = False,
) -> optax.GradientTransformation:
  """SGD of a worker, at the learning rate of its ticket."""
  return optax.chain(
    *first,
    _decay(weight_decay),
    _momentum(momentum, nesterov=nesterov),
    transforms.scale_by_sent_rate(learning_rate),
  )


def model_averaging(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  steps: int = 10,
  keep_state: bool = True,
) -> Recipe:
  """Local SGD: all workers take `steps` steps, then their models are averaged.

  Args:
    learning_rate: of the local steps.
    workers: N.
    momentum: of the local steps.
    weight_decay: of the local steps.
    steps: H, between two averages. With 1, and no momentum, it is `ssgd`.
    keep_state: a worker keeps its momentum across the average; otherwise it
      starts each job with none. The momenta are not averaged.
  """
  tx = _local_sgd(learning_rate, momentum, weight_decay)
  worker_lib.check_steps(steps)
  return Recipe(
    _sgd(1.0, 0.0, 0.0),
    every=workers,
    order="bulk_synchronous",
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, steps=steps, message="displacement", keep_state=keep_state
    ),
    steps=steps,
  )


def easgd(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  steps: int = 10,
  moving_rate: float = 0.9,
) -> Recipe:
  """Elastic averaging SGD, asynchronous (Zhang, Choromanska, LeCun 2015).

  Each worker trains parameters of its own, and every `steps` steps it and the
  server's, the centre that is evaluated, are drawn to each other. A schedule
  counts exchanges. `asgd.worker.elastic_worker` says where it differs from the
  paper.

  Args:
    learning_rate: of the local steps.
    workers: N, p of the paper.
    momentum: Nesterov's, of the local steps (EAMSGD).
    weight_decay: of the local steps.
    steps: tau, between two exchanges.
    moving_rate: beta; each exchange closes alpha = beta / N of the distance
      from either side.

  Raises:
    ValueError: for values out of range.
  """
  if not 0 < moving_rate <= 1:
    raise ValueError(f"moving_rate must be in (0, 1], not {moving_rate}")
  tx = _local_sgd(learning_rate, momentum, weight_decay, nesterov=True)
  worker_lib.check_steps(steps)
  return Recipe(
    _sgd(1.0, 0.0, 0.0),
    worker=lambda loss: worker_lib.elastic_worker(
      loss, tx, steps=steps, alpha=moving_rate / workers
    ),
    steps=steps,
  )


def diloco(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  weight_decay: float = 0.1,
  steps: int = 500,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
) -> Recipe:
  """DiLoCo (Douillard et al. 2023): AdamW inside, Nesterov momentum outside.

  All workers take `steps` steps of AdamW, each with a state that it keeps to
  itself; the mean of how far they came is the gradient of an outer step.

  Args:
    learning_rate: of the inner AdamW.
    workers: N.
    weight_decay: of the inner AdamW, decoupled from the gradient.
    steps: H, inner steps to an outer one.
    outer_rate: learning rate of the outer step. With 1, and an outer momentum
      of 0, it is parameter averaging.
    outer_momentum: of the outer step.

  Raises:
    ValueError: for values out of range.
  """
  _check_rate("outer_rate", outer_rate)
  outer = optax.chain(
    _trace(outer_momentum, nesterov=True),
    optax.scale_by_learning_rate(outer_rate),
  )
  inner = optax.chain(
    optax.scale_by_adam(),
    _decay(weight_decay),
    transforms.scale_by_sent_rate(learning_rate),
  )
  worker_lib.check_steps(steps)
  return Recipe(
    base.as_algorithm(outer),
    every=workers,
    order="bulk_synchronous",
    worker=lambda loss: worker_lib.local_worker(
      loss, inner, steps=steps, message="displacement"
    ),
    steps=steps,
  )


def fedasync(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  weight_decay: float = 0.0,
  steps: int = 10,
  mixing: float = 0.6,
  discount: str = "polynomial",
  decay: float | None = None,
  grace: int = 4,
  proximal: float = 0.0,
) -> Recipe:
  """FedAsync (Xie, Koyejo, Gupta 2019): the server mixes in whole models.

  x <- (1 - alpha_t) x + alpha_t x_new, with alpha_t = alpha s(staleness), and
  x_new where a worker came in `steps` steps of SGD from what it was sent.

  Args:
    learning_rate: of the local steps.
    workers: N.
    weight_decay: of the local steps.
    steps: H, local steps.
    mixing: alpha, in (0, 1].
    discount: s: "constant" is 1, "polynomial" (staleness + 1)^-a, "hinge" 1 up
      to a staleness of b and 1 / (a (staleness - b) + 1) beyond.
    decay: a; None is 0.5 for "polynomial" and 10 for "hinge".
    grace: b, of "hinge".
    proximal: rho, of rho / 2 ||x - x_sent||^2 added to the local loss.

  Raises:
    ValueError: for values out of range.
  """
  del workers
  makers = {
    "constant": lambda: transforms.constant_discount,
    "polynomial": lambda: transforms.polynomial_discount(
      0.5 if decay is None else decay
    ),
    "hinge": lambda: transforms.hinge_discount(
      10.0 if decay is None else decay, grace
    ),
  }
  made = names.lookup("discount", discount, makers)()
  tx = _local_sgd(
    *(learning_rate, 0.0, weight_decay),
    transforms.add_proximal_pull(proximal),
  )
  worker_lib.check_steps(steps)
  return Recipe(
    base.as_algorithm(transforms.mix_models(mixing, made)),
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, steps=steps, message="displacement"
    ),
    steps=steps,
  )


RECIPES: dict[str, Callable[..., Recipe]] = {
  recipe.__name__: recipe
  for recipe in (
    asgd,
    ssgd,
    nag_asgd,
    multi_asgd,
    staleness_aware,
    dc_asgd_c,
    dc_asgd_a,
    gap_aware,
    dana_zero,
    dana_slim,
    dana_dc,
    downpour,
    model_averaging,
    easgd,
    diloco,
    fedasync,
  )
}


def options(name: str) -> Sequence[str]:
  """Returns the names of the options that a recipe takes.

  Raises:
    ValueError: for an unknown recipe, naming the nearest.
  """
  maker = names.lookup("algorithm", name, RECIPES)
  parameters = inspect.signature(maker).parameters.values()
  return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def build(
  name: str,
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  **kwargs,
) -> Recipe:
  """Builds a recipe by name.

  Args:
    name: one of RECIPES.
    learning_rate: a positive number, or a schedule over parameter updates.
    workers: N, a positive whole number.
    **kwargs: the recipe's options.

  Returns:
    A Recipe.

  Raises:
    ValueError: for an unknown name or option (naming the nearest known one), or
      a value out of range.

  Example:
    >>> recipe = build("dana_zero", 0.1, workers=8, momentum=0.9)
    >>> server = recipe.server()
    >>> recipe.order
    'asynchronous'
  """
  maker = names.lookup("algorithm", name, RECIPES)
  transforms.check_workers(workers)
  if not callable(learning_rate) and not 0 < learning_rate < math.inf:
    raise ValueError(f"learning_rate must be positive, not {learning_rate}")
  common = {"learning_rate": learning_rate, "workers": workers}
  recipe = names.call("algorithm", name, maker, {**common, **kwargs})
  return recipe._replace(workers=workers)
