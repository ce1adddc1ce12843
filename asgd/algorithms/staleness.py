"""Gradients that are corrected, or scaled down, for their delay."""

import optax

from asgd import base, checks, optimizers, transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import at_server, sgd
from asgd.optimizers import OptimizerLike


def staleness_aware(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, splits: int | None = None, divisor: str = "own",
  optimizer: OptimizerLike = None
) -> Recipe:
  """Divides each gradient by its staleness: staleness-aware n-softsync.

    params <- params - (1 / c) sum_l (eta / d_l) g_l,   d_l = max(tau_l, 1)

  The sum is over the c messages of an update, from any workers, with staleness
  tau_l. With momentum, the mean updates v. Weight decay is not divided. With an
  optimizer that divides by the size of gradients, such as Adam, staleness only
  weights gradients relative to each other; it does not shorten the step.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    splits: n of n-softsync, 1 to N: c = floor(N / n). None is c = 1 (n = N).
    divisor: d_l. "own" is the staleness of the message; "mean" is n, the mean
      staleness of n-softsync, for all messages (Rudra); "none" is 1: plain
      n-softsync.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for distributed deep
    learning", IJCAI 2016, arXiv:1511.05950. The divisor "mean" is from Gupta,
    Zhang, Wang, "Model accuracy and runtime tradeoff in distributed deep
    learning" (Rudra), ICDM 2016, arXiv:1509.04210.

  Example:
    Three workers compute a gradient of 4 at the same parameters.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.staleness_aware(0.5, workers=3).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(3)]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(report.staleness, state.params)  # less 2, 2 / 1 and 2 / 2
    0 6.0
    1 4.0
    2 3.0
    >>> asgd.staleness_aware(0.5, workers=8, splits=3).every  # floor(8 / 3)
    2
  """
  every = 1 if splits is None else _messages_per_update(splits, workers)
  # A divisor acts on a message before the server's average; the mean updates
  # the velocity. d_l = tau_l is the rule of the IJCAI paper, d_l = n that of
  # Rudra.
  divisors = {
    "own": transforms.scale_by_staleness(),
    "mean": optax.scale(1 / (splits or workers)),
    "none": None,
  }
  checks.one_of("divisor", divisor, tuple(divisors))
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    at_server=divisors[divisor],
    every=every,
  )


def delay_adaptive(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, threshold: int | None = None, late: str = "scale",
  optimizer: OptimizerLike = None
) -> Recipe:
  """Delay-adaptive steps: a gradient later than a threshold counts less.

    params <- params - eta_t g,   eta_t = eta if tau_t <= T, else eta T / tau_t

  T is the concurrency, the number of gradients that are computed at a time. At
  the largest rate of the theory, eta = 1 / (4 L T) for a loss of smoothness L,
  eta_t is min(eta, 1 / (4 L tau_t)). With late = "drop", eta_t is 0 instead of
  eta T / tau_t, and the message is no update. With momentum, the scaled
  gradient updates v; weight decay is not scaled. With Adam, the scale only
  weights gradients relative to each other.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    threshold: T, in updates; None is N. T = 1 is `staleness_aware`.
    late: "scale" or "drop".

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Koloskova, Stich, Jaggi, "Sharper convergence guarantees for asynchronous
    SGD for distributed and federated learning", NeurIPS 2022, arXiv:2206.08307.
    Mishchenko, Bach, Even, Woodworth, "Asynchronous SGD beats minibatch SGD
    under arbitrary delays", NeurIPS 2022, arXiv:2206.07638.

  Example:
    Three workers compute a gradient of 4 at the same parameters. The last one
    is two updates late, which is twice the threshold.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.delay_adaptive(0.5, workers=3, threshold=1).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(3)]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(report.staleness, state.params)  # less 2, 2 and 2 / 2
    0 6.0
    1 4.0
    2 3.0
  """
  threshold = workers if threshold is None else threshold
  checks.integer("threshold", threshold)
  checks.one_of("late", late, ("scale", "drop"))
  recipe = Recipe(sgd(learning_rate, momentum, weight_decay, optimizer))
  if late == "drop":
    return recipe._replace(max_staleness=threshold)
  return recipe._replace(at_server=transforms.scale_by_staleness(threshold))


def adadelay(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, strength: float = 1.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """AdaDelay: the step shrinks with the number of updates and the staleness.

    params <- params - alpha_t g,   alpha_t = (L + c sqrt(t + tau_t))^-1
    L = 1 / eta;   t = 1, 2, ... counts updates, tau_t is the staleness

  The step of momentum SGD, or of another optimizer, is scaled in the same way,
  weight decay included. With c = 0 it is `asgd`.

  Args:
    learning_rate: eta, the rate that alpha_t stays below, 1 / L of the paper,
      or a schedule over updates.
    workers, momentum, weight_decay, optimizer: shared options; the paper has no
      momentum.
    strength: c, 0 or more.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Sra, Yu, Li, Smola, "AdaDelay: delay adaptive distributed stochastic
    optimization", AISTATS 2016, arXiv:1508.05003; `strength` is the paper's c,
    the same for all parameters.

  Example:
    L = 2. The second gradient is one update late: sqrt(2 + 1).

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.adadelay(0.5, workers=2, strength=2.0).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> late, other = (server.send(state, jnp.int32(i)) for i in range(2))
    >>> for ticket in (other, late):
    ...   state, report = server.receive(state, ticket, jnp.float32(12.0))
    ...   print(f"{state.params:.3f}")  # 12 / (2 + 2), 12 / (2 + 2 sqrt(3))
    5.000
    2.804
  """
  del workers
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.0), weight_decay=(weight_decay, 0.0)
  )
  tx = optax.chain(
    at_server(learning_rate, momentum, weight_decay, optimizer),
    # Last: it scales the step, whatever the optimizer.
    transforms.scale_by_adadelay(learning_rate, strength),
  )
  return Recipe(base.as_algorithm(tx))


def _messages_per_update(splits: int, workers: int) -> int:
  """Returns c = floor(N / n), the messages per update of n-softsync; two may
  come from the same worker. Raises ValueError unless 1 <= n <= N."""
  if type(splits) is not int or not 1 <= splits <= workers:
    raise ValueError(
      f"splits must be from 1 to the {workers} workers, not {splits!r}"
    )
  return workers // splits


def gap_aware(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.9,
  weight_decay: float = 0.0, average: str | None = None,
  splits: int | None = None, optimizer: OptimizerLike = None
) -> Recipe:
  """Gap-Aware: divides gradients by the elementwise gap.

    g <- g / (1 + |params - sent_params| / C)

  C is the size of a typical update of each parameter
  (`asgd.transforms.gap_aware`). Weight decay is divided with the gradient;
  momentum is applied after the division.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    average: C is an average of "gradients" as received, or of "updates", which
      are computed from divided gradients. None is the published rule:
      "gradients" for SGD without momentum, "updates" for all others.
    splits: n of n-softsync, 1 to N: an update is the mean of floor(N / n)
      messages, each divided by the gap to its own ticket, in units of a typical
      step (`asgd.transforms.divide_by_gap`); weight decay is not divided. None:
      each message is an update, by the rule above.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Barkai, Hakimi, Schuster, "Gap-aware mitigation of gradient staleness", ICLR
    2020, arXiv:1909.10802.

  Example:
    All gradients are 4, so C = 0.5 4. The first update moves the parameter by
    2; a gradient computed before it is divided by 1 + 2 / 2.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.gap_aware(0.5, workers=2, momentum=0.0).server()
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(2)]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(f"{report.gap:.3f} {state.params:.3f}")  # less 2, and 2 / 2
    0.000 6.000
    2.000 5.000
  """
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  if splits is not None:
    every = _messages_per_update(splits, workers)
    if average is not None:
      raise ValueError(
        f"average {average!r} is for updates of one message; with splits"
        f" {splits}, C averages the parameters' steps: drop one of the two"
      )
    return Recipe(
      base.as_algorithm(
        at_server(learning_rate, momentum, weight_decay, optimizer)
      ),
      at_server=transforms.divide_by_gap(),
      every=every,
    )
  # With None the transform decides, by whether SGD has a velocity. Other
  # optimizers use "updates": -u / eta of their update u is no gradient.
  is_sgd = optimizer is None or optimizers.momentum_of(optimizer) is not None
  tx = transforms.gap_aware(
    at_server(learning_rate, momentum, optimizer=optimizer),
    learning_rate,
    average=average or (None if is_sgd else "updates"),
    # Not in the optimizer: the gap must divide the decay, too.
    weight_decay=weight_decay,
  )
  return Recipe(base.as_algorithm(tx))


def dc_asgd_c(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, strength: float = 0.04,
  optimizer: OptimizerLike = None
) -> Recipe:
  """DC-ASGD-c: delay compensation with a constant lambda.

    g <- g + lambda g * g * (params - sent_params),   elementwise

  Each message is compensated, before weight decay and momentum.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options;
      the paper has no momentum.
    strength: lambda, 0 or more, per unit of loss; choose it for the size of the
      gradients.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Zheng et al., "Asynchronous stochastic gradient descent with delay
    compensation", ICML 2017, arXiv:1609.08326.

  Example:
    The loss w^2 / 2 has the gradient w. A worker computes it at 1; another
    worker's gradient of 1 then moves the parameter to 0.5. With lambda = 1 = 1
    / g^2 the compensated gradient, 1 + 1 (0.5 - 1), is the one at 0.5.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> server = asgd.dc_asgd_c(0.5, workers=2, strength=1.0).server()
    >>> state = server.init(jnp.float32(1.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(2)]:
    ...   state, _ = server.receive(state, ticket, jnp.float32(1.0))
    ...   print(state.params)  # 1 - 0.5 1, 0.5 - 0.5 0.5
    0.5
    0.25
  """
  del workers
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    # Before weight decay and momentum: the term is quadratic in g.
    at_server=transforms.delay_compensation(strength),
  )


def dc_asgd_a(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, momentum: float = 0.0,
  weight_decay: float = 0.0, strength: float = 2.0, decay: float = 0.95,
  scope: str = "server", optimizer: OptimizerLike = None
) -> Recipe:
  """DC-ASGD-a: delay compensation with an adaptive lambda.

    MeanSquare <- m MeanSquare + (1 - m) g * g
    lambda = lambda_0 / sqrt(MeanSquare + 1e-7)
    g <- g + lambda g * g * (params - sent_params),   all elementwise

  Each message is compensated, before weight decay and momentum.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options;
      the paper has no momentum.
    strength: lambda_0, 0 or more.
    decay: m, in [0, 1).
    scope: "server" keeps one mean square, as in the paper's text; "worker"
      keeps one for each worker, as in the authors' code.

  Returns:
    A Recipe for the asynchronous order.

  Source:
    Zheng et al., "Asynchronous stochastic gradient descent with delay
    compensation", ICML 2017, arXiv:1609.08326.

  Example:
    The mean square is 0.5 4^2 = 8, then 0.5 8 + 0.5 8^2 = 36, so lambda is
    0.75 / 6. The late gradient of 8 becomes 8 + 0.125 8^2 (6 - 8) = -8.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> recipe = asgd.dc_asgd_a(0.5, workers=2, strength=0.75, decay=0.5)
    >>> server = recipe.server()
    >>> state = server.init(jnp.float32(8.0))
    >>> tickets = [server.send(state, jnp.int32(i)) for i in range(2)]
    >>> for ticket, gradient in zip(tickets, (4.0, 8.0)):
    ...   state, _ = server.receive(state, ticket, jnp.float32(gradient))
    ...   print(f"{state.params:.3f}")  # 8 - 0.5 4, 6 + 0.5 8
    6.000
    10.000
  """
  compensate = transforms.adaptive_delay_compensation(strength, decay=decay)
  if scope == "worker":
    # As in the authors' `dcasgda_updater.h`.
    compensate = transforms.per_worker(compensate, workers)
  elif scope != "server":
    raise ValueError(f"scope must be 'server' or 'worker', not {scope!r}")
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer), at_server=compensate
  )
