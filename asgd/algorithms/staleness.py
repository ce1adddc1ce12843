"""Gradients that are corrected for their delay, or count less for it."""

import optax

from asgd import base, optimizers, transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import at_server, decay_weights, sgd


def staleness_aware(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  splits: int | None = None,
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Divides each gradient by its staleness (Zhang et al. 2016).

  params <- params - eta mean(g / max(staleness, 1)), the mean over the messages
  of one update. `splits` is n of n-softsync: an update takes floor(N / n)
  messages, from whichever workers; None is one (n = N). Weight decay is not
  divided. An optimizer that divides by the size of gradients, as Adam, takes
  from this how much a gradient counts beside others, not how far it moves.
  """
  every = 1
  if splits is not None:
    if type(splits) is not int or not 1 <= splits <= workers:
      raise ValueError(
        f"splits must be from 1 to the {workers} workers, not {splits!r}"
      )
    every = workers // splits
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    at_server=transforms.scale_by_staleness(),
    every=every,
  )


def gap_aware(
  learning_rate,
  workers,
  *,
  momentum: float = 0.9,
  weight_decay: float = 0.0,
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Divides gradients by the elementwise gap (Barkai et al. 2020).

  g <- g / (1 + |params - sent_params| / C), with C the size of a typical update
  of each parameter (`asgd.transforms.gap_aware`). Weight decay is divided with
  the gradient; the momentum is of what is left.
  """
  del workers
  optimizers.refuse_beside(
    optimizer, momentum=(momentum, 0.9), weight_decay=(weight_decay, 0.0)
  )
  tx = optax.chain(
    decay_weights(weight_decay),
    transforms.gap_aware(
      at_server(learning_rate, momentum, optimizer=optimizer), learning_rate
    ),
  )
  return Recipe(base.as_algorithm(tx))


def dc_asgd_c(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  strength: float = 0.04,
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Delay compensation with a constant lambda (Zheng et al. 2017).

  g <- g + lambda g * g * (params - sent_params), elementwise, with lambda =
  `strength`, for each message, before clipping, weight decay and momentum.
  """
  del workers
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer),
    at_server=transforms.delay_compensation(strength),
  )


def dc_asgd_a(
  learning_rate,
  workers,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
  strength: float = 2.0,
  decay: float = 0.95,
  scope: str = "server",
  optimizer: optimizers.Optimizer | None = None,
) -> Recipe:
  """Delay compensation with an adaptive lambda (Zheng et al. 2017).

  As `dc_asgd_c`, with lambda = lambda_0 / sqrt(mean square of g + 1e-7).

  Args:
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
  return Recipe(
    sgd(learning_rate, momentum, weight_decay, optimizer), at_server=compensate
  )
