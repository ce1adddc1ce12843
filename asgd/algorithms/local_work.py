"""Workers that take several local steps between two messages.

Learning rate, momentum and weight decay are those of the workers' steps (for
Downpour: of the server). A schedule counts the server's updates: a job runs at
the rate of its ticket's version. `steps` is H, the batches in a job. No two
jobs of EASGD or FedAsync may share a ticket.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks, optimizers, rates, transforms
from asgd import worker as worker_lib
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import (
  at_server,
  decay_weights,
  sgd,
  sgd_chain,
  velocity,
)
from asgd.optimizers import OptimizerLike


def local_optimizer(
  optimizer: Any, learning_rate: optax.ScalarOrSchedule,
  momentum: float = 0.0, weight_decay: float = 0.0,
  *preceding: optax.GradientTransformation, **options: Any
) -> optax.GradientTransformation:
  """Returns a worker's optimizer: the transforms `preceding`, then `optimizer`
  or SGD."""
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.0), weight_decay=(weight_decay, 0.0)
  )
  # A worker does not count the server's updates: the rate is that of the
  # ticket's version, for all steps of a job.
  if optimizer is not None:
    tx = optimizers.at_version(optimizer, learning_rate)
    return optax.chain(*preceding, tx)
  scale = transforms.scale_by_sent_rate(learning_rate)
  return sgd_chain(scale, momentum, weight_decay, *preceding, **options)


def displacement_recipe(
  algorithm: base.Algorithm,
  tx: optax.GradientTransformation,
  steps: int,
  *,
  optimizer_state: str = worker_lib.KEPT,
) -> Recipe:
  """Returns a recipe with workers that send the start minus the end of a job:
  the change of the parameters, negated."""
  checks.integer("steps", steps)
  checks.one_of("optimizer_state", optimizer_state, worker_lib.STATES)

  def worker(loss):
    return worker_lib.local_worker(
      loss, tx, steps=steps, message="displacement",
      optimizer_state=optimizer_state,
    )

  # An averaged state starts at the server, and travels in the tickets.
  is_averaged = optimizer_state == worker_lib.AVERAGED
  initial_state = tx.init if is_averaged else None
  return Recipe(algorithm, worker=worker, steps=steps, carried=initial_state)


def downpour(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  weight_decay: float = 0.0, fetch_every: int | None = None,
  push_every: int = 1, local_rate: optax.ScalarOrSchedule | None = None,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Downpour SGD: workers push sums of gradients to a server with Adagrad.

    worker: if t mod n_fetch = 0:   x <- params
            x <- x - eta_local g;   d <- d + g;   t <- t + 1
            if t mod n_push = 0:   send d;   d <- 0
    server: S <- S + d * d;   params <- params - eta d / sqrt(S),  elementwise

  t counts the batches of a worker. A fetch discards the worker's local steps
  and keeps d; d is lost when the worker leaves or the run ends. With n_fetch =
  n_push = 1, the default, Downpour is ASGD with Adagrad at the server.

  A job is gcd(n_fetch, n_push) batches. If that is fewer than n_push, the jobs
  between two pushes send zeros, which are no update and count no bytes. The
  staleness of a push counts the updates since its last ticket. If each job
  pushes, only the updates of other workers count.

  Args:
    learning_rate: eta, the server's. Adagrad's first update moves each
      parameter by eta, whatever the gradient.
    workers: N.
    weight_decay: 0 or more; the server adds weight_decay * params to a push,
      once for each of its gradients.
    fetch_every: n_fetch, in batches; None is n_push, or the order's fetch_every
      (in jobs) if it has one. With a value here, an order with a fetch_every or
      a cache is refused.
    push_every: n_push, in batches.
    local_rate: eta_local. None is the learning rate if the server has SGD, and
      otherwise a tenth of it, because Adagrad's is too large.
    optimizer: the optimizer of the server. None is the paper's Adagrad, with
      neither an epsilon nor an initial value of the accumulator S.

  Returns:
    A Recipe for the asynchronous order, with jobs of gcd(n_fetch, n_push)
    batches.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012, the section
    on Downpour SGD, and the pseudo-code of its appendix.

  Example:
    A worker pushes gradients of 4 and 2, then of 5 and 3.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.downpour(0.5, workers=2, push_every=2)
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> own = worker.init(state.params)
    >>> for job in ([4.0, 2.0], [5.0, 3.0]):
    ...   ticket = server.send(state, jnp.int32(0))
    ...   own, d, _ = worker.work(own, ticket, jnp.array(job), key)
    ...   state, _ = server.receive(state, ticket, d)
    ...   print(d, f"{state.params:.3f}")  # 8 - 0.5 6 / 6, less 0.5 8 / 10
    6.0 7.500
    8.0 7.100
  """
  checks.integer("push_every", push_every)
  fetch_every = push_every if fetch_every is None else fetch_every
  checks.integer("fetch_every", fetch_every)
  # Both intervals are whole numbers of jobs, so that fetches and pushes happen
  # only between jobs.
  steps = math.gcd(fetch_every, push_every)
  # SGD at the server needs no smaller local rate. Adagrad's first steps move
  # each parameter by eta, however small the gradient is.
  has_sgd = optimizer and optimizers.momentum_of(optimizer) is not None
  local_fraction = 0.1 if local_rate is None and not has_sgd else 1.0
  local_rate = learning_rate if local_rate is None else local_rate
  rates.check("local_rate", local_rate)
  local_scale = transforms.scale_by_sent_rate(local_rate)
  tx = optax.chain(optax.scale(local_fraction), local_scale)
  server = optax.chain(
    # A push sums push_every gradients, so it needs their weight decay, too.
    decay_weights(push_every * weight_decay),
    at_server(learning_rate, optimizer=optimizer or _adagrad),
  )
  job_options: Any = {"steps": steps, "push_every": push_every // steps}
  return Recipe(
    base.as_algorithm(server),
    # d sums gradients without a rate: with eta_local in d, the server would
    # multiply by two rates.
    worker=lambda loss: worker_lib.local_worker(
      loss, tx, message="gradients", **job_options
    ),
    fetch_every=fetch_every // steps,
    **job_options,
  )


# An epsilon too small to change the root of any square that is not zero.
_TINY = float(np.finfo(np.float32).tiny)


def _adagrad(
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
  """Adagrad as in the paper of Downpour: S starts at 0, without an epsilon."""
  scale = optax.scale_by_learning_rate(learning_rate)
  return optax.chain(optax.scale_by_rss(0.0, eps=_TINY), scale)


def model_averaging(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, steps: int = 10,
  optimizer_state: str = worker_lib.KEPT, optimizer: OptimizerLike = None
) -> Recipe:
  """Local SGD: all workers take local steps, then the server averages models.

    worker: x^i <- params;   H times v^i <- gamma v^i + g^i;
            x^i <- x^i - eta v^i
    server: params <- (1 / N) sum_i x^i

  With one step and no momentum it is `ssgd`; with one step and averaged states
  it is `ssgd` for every linear optimizer, such as momentum.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    steps: H, batches between averages.
    optimizer_state: a worker's momentum, or other state, at the start of a job:
      "kept" from its last job, "reset", or "averaged" over the workers. An
      averaged state travels with the parameters, both ways.

  Returns:
    A Recipe for the bulk synchronous order, with jobs of H batches.

  Source:
    Stich, "Local SGD converges fast and communicates little", ICLR 2019,
    arXiv:1805.09767. `optimizer_state` is from Wang, Tantia, Ballas, Rabbat,
    "SlowMo", ICLR 2020, arXiv:1910.00643.

  Example:
    From 8, one worker steps to 5 and the other to 6.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.model_averaging(0.5, workers=2, steps=2)
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> for i, job in enumerate(([4.0, 2.0], [3.0, 1.0])):
    ...   ticket = server.send(state, jnp.int32(i))
    ...   own = worker.init(ticket.params)
    ...   own, message, _ = worker.work(own, ticket, jnp.array(job), key)
    ...   state, _ = server.receive(state, ticket, message)
    ...   print(own.local, state.params)  # (5 + 6) / 2 after both
    5.0 8.0
    6.0 5.5
  """
  tx = local_optimizer(optimizer, learning_rate, momentum, weight_decay)
  # A displacement is the start minus the end, so SGD with rate 1 on the mean
  # displacement sets the mean of the models.
  recipe = displacement_recipe(
    sgd(1.0), tx, steps, optimizer_state=optimizer_state
  )
  return recipe.in_rounds(workers)


def slowmo(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, steps: int = 12, slow_rate: float = 1.0,
  slow_momentum: float = 0.5, optimizer_state: str = worker_lib.RESET,
  optimizer: OptimizerLike = None
) -> Recipe:
  """SlowMo: parameter averaging with a slow momentum at the server.

    worker: x^i <- params;   H times v^i <- gamma v^i + g^i;
            x^i <- x^i - eta v^i
    server: u <- beta u + (params - (1 / N) sum_i x^i) / eta
            params <- params - alpha eta u

  With beta = 0 and alpha = 1 it is `model_averaging`.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    steps: H, batches between averages.
    slow_rate: alpha, positive.
    slow_momentum: beta, in [0, 1).
    optimizer_state: see `model_averaging`.

  Returns:
    A Recipe for the bulk synchronous order, with jobs of H batches.

  Source:
    Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient
    distributed SGD with slow momentum", ICLR 2020, arXiv:1910.00643, algorithm
    1.

  Example:
    Both workers step from 8 to 6, so that u = 2 / 0.5, and then 0.5 4 + 4.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.slowmo(0.5, workers=2, steps=1)
    >>> server = recipe.server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for _ in range(2):
    ...   for i in range(2):
    ...     ticket = server.send(state, jnp.int32(i))
    ...     state, _ = server.receive(state, ticket, jnp.float32(2.0))
    ...   print(state.params)  # 8 - 0.5 4, 6 - 0.5 6
    6.0
    3.0
  """
  checks.positive("slow_rate", slow_rate)
  checks.fraction("slow_momentum", slow_momentum)
  optimizers.refuse_beside(optimizer, momentum=(momentum, 0.9))
  momentum = momentum if optimizer is None else 0.0
  tx = local_optimizer(optimizer, learning_rate, momentum, weight_decay)

  def inverse_rate(count):
    """Returns 1 / eta, or 0 if eta is 0: then no worker has moved."""
    rate = rates.at(learning_rate, count)
    return jnp.where(rate > 0, 1 / jnp.where(rate > 0, rate, 1.0), 0.0)

  # u is in units of eta, so that a schedule does not rescale the slow momentum.
  slow_update = optax.chain(
    optax.scale_by_schedule(inverse_rate),  # [1] (params - mean x^i) / eta
    velocity(slow_momentum),  # [2] u <- beta u + [1]
    optax.scale(slow_rate),  # [3] alpha u
    optax.scale_by_learning_rate(learning_rate),  # [4] -alpha eta u
  )
  recipe = displacement_recipe(
    base.as_algorithm(slow_update), tx, steps, optimizer_state=optimizer_state
  )
  return recipe.in_rounds(workers)


def easgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, steps: int = 10, moving_rate: float = 0.9,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Elastic averaging SGD, asynchronous (EASGD; with momentum, EAMSGD).

    d = alpha (x^i - x);   x^i <- x^i - d;   x <- x + d,   alpha = beta / N

  Each worker trains its own parameters x^i. Every `steps` steps, x^i and the
  server's parameters x move towards each other; x is evaluated.
  `asgd.worker.elastic_worker` lists the differences from the paper.

  Args:
    learning_rate, workers, weight_decay, optimizer: shared options.
    momentum: the momentum of the workers, Nesterov's.
    steps: batches between two exchanges of a worker (the paper's tau).
    moving_rate: beta, in (0, 1]: an exchange moves each side by alpha = beta /
      N of the distance.

  Returns:
    A Recipe for the asynchronous order, with jobs of `steps` batches.

  Source:
    Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS
    2015, arXiv:1412.6651, algorithms 1 (EASGD) and 2 (EAMSGD).

  Example:
    A worker steps from 8 to 6; alpha = 1 / 2 draws both halfway to each other.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.easgd(0.5, workers=2, steps=1, moving_rate=1.0)
    >>> worker = recipe.make_worker(lambda w, batch: w * batch)  # g = batch
    >>> server, key = recipe.server(), jax.random.key(0)
    >>> state = server.init(jnp.float32(8.0))
    >>> ticket = server.send(state, jnp.int32(0))
    >>> own, message, _ = worker.work(
    ...   worker.init(ticket.params), ticket, jnp.float32(4.0), key
    ... )
    >>> state, _ = server.receive(state, ticket, message)
    >>> print(own.local, state.params)  # d = 0.5 (6 - 8); 6 - d, 8 + d
    7.0 7.0
  """
  checks.portion("moving_rate", moving_rate)
  checks.integer("steps", steps)
  rate_options = learning_rate, momentum, weight_decay
  tx = local_optimizer(optimizer, *rate_options, nesterov=True)
  # The message is -d = alpha (x - x^i), and SGD with rate 1 subtracts it.
  # `mixes`: the message depends on the ticket's parameters, so no two jobs
  # share a ticket.
  return Recipe(
    sgd(1.0),
    # With alpha = beta / N, an exchange of every worker moves x by about beta.
    worker=lambda loss: worker_lib.elastic_worker(
      loss, tx, steps=steps, alpha=moving_rate / workers
    ),
    steps=steps,
    mixes=True,
  )


def fedasync(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  weight_decay: float = 0.0, steps: int = 10, mixing: float = 0.6,
  discount: str = "polynomial", decay: float | None = None, grace: int = 4,
  proximal: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """FedAsync: the server mixes in a worker's model, less if it is stale.

    x <- (1 - alpha_t) x + alpha_t x_new,   alpha_t = alpha s(staleness)

  x_new are a worker's parameters after `steps` steps of SGD from the sent
  parameters.

  Args:
    learning_rate, workers, weight_decay, optimizer: shared options.
    steps: batches of a job.
    mixing: alpha, in (0, 1].
    discount: the name of s: "constant" is 1, "polynomial" is
      (staleness + 1)^-a, "hinge" is 1 / (a max(staleness - b, 0) + 1).
    decay: a, positive. None is 0.5 for "polynomial" and 10 for "hinge".
    grace: b, the staleness up to which "hinge" is 1.
    proximal: rho, 0 or more: rho / 2 ||x - x_sent||^2 is added to the local
      loss.

  Returns:
    A Recipe for the asynchronous order, with jobs of `steps` batches.

  Source:
    Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019,
    arXiv:1903.03934, algorithm 1.

  Example:
    Two workers step from 8 to 4 and send 8 - 4. The later one counts half, as
    s(1) = (1 + 1)^-1.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.fedasync(0.5, workers=2, mixing=0.5, decay=1.0).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(2)]:
    ...   state, _ = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(state.params)  # 0.5 8 + 0.5 4, 0.75 6 + 0.25 4
    6.0
    5.5
  """
  del workers
  discount_of_staleness = transforms.make_discount(discount, decay, grace)
  # The pull is towards the ticket's parameters, before weight decay.
  pull = transforms.add_proximal_pull(proximal)
  tx = local_optimizer(optimizer, learning_rate, 0.0, weight_decay, pull)
  # A displacement is x_sent - x_new; `mix_models` computes x_new from it and
  # the ticket's parameters, so no two jobs may share a ticket.
  algorithm = base.as_algorithm(
    transforms.mix_models(mixing, discount_of_staleness)
  )
  return displacement_recipe(algorithm, tx, steps)._replace(mixes=True)


def fedbuff(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  weight_decay: float = 0.0, steps: int = 10, every: int | None = None,
  outer_rate: float = 1.0, outer_momentum: float = 0.0, decay: float = 0.5,
  optimizer: OptimizerLike = None
) -> Recipe:
  """FedBuff: the server averages a buffer of stale displacements, then steps.

    worker: x^i <- params;   H steps of SGD on x^i;   send params - x^i
    server: for each K messages, from any workers, with staleness tau_k:
            D = (1 / K) sum_k s(tau_k) (params - x^i)_k;   v <- mu v + D
            params <- params - eta_outer v,   s(tau) = (tau + 1)^-a

  Args:
    learning_rate, workers, weight_decay, optimizer: shared options.
    steps: H, batches of a job.
    every: K, the messages of an update; None is N.
    outer_rate: eta_outer, positive, or a schedule over the server's updates.
    outer_momentum: mu, in [0, 1).
    decay: a, positive.

  Returns:
    A Recipe for the asynchronous order, with jobs of H batches.

  Source:
    Nguyen et al., "Federated learning with buffered asynchronous aggregation",
    AISTATS 2022, arXiv:2106.06639, without differential privacy.

  Example:
    Workers 0 and 1 send 4 each, and fill a buffer of two: 8 - (4 + 4) / 2. Then
    worker 1's old displacement of 4 counts half, as s(1) = (1 + 1)^-1.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.fedbuff(0.1, workers=2, decay=1.0).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> old = server.send(state, jnp.int32(1))
    >>> for ticket in [server.send(state, jnp.int32(0)), old, old, old]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(report.staleness, state.params)
    0 8.0
    0 4.0
    1 4.0
    1 2.0
  """
  rates.check("outer_rate", outer_rate)
  checks.fraction("outer_momentum", outer_momentum)
  every = workers if every is None else every
  discount_of_staleness = transforms.polynomial_discount(decay)
  tx = local_optimizer(optimizer, learning_rate, 0.0, weight_decay)
  recipe = displacement_recipe(sgd(outer_rate, outer_momentum), tx, steps)
  # Each displacement is weighted before the mean, by its own staleness.
  weigh = transforms.scale_by_discount(discount_of_staleness)
  return recipe._replace(at_server=weigh, every=checks.integer("every", every))
