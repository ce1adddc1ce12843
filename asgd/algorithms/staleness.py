"""Gradients that are corrected for their delay, or count less for it."""

import optax

from asgd import base, transforms
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import decay_weights, sgd, velocity


def staleness_aware(
  learning_rate, workers, *, momentum=0.0, weight_decay=0.0, splits=None
) -> Recipe:
  """Divides each gradient by its staleness (Zhang et al. 2016).

  params <- params - eta mean(g / max(staleness, 1)), the mean over the messages
  of one update. `splits` is n of n-softsync: an update takes floor(N / n)
  messages, from whichever workers; None is one (n = N). Weight decay is not
  divided.
  """
  every = 1
  if splits is not None:
    if type(splits) is not int or not 1 <= splits <= workers:
      raise ValueError(
        f"splits must be from 1 to the {workers} workers, not {splits!r}"
      )
    every = workers // splits
  return Recipe(
    sgd(learning_rate, momentum, weight_decay),
    per_message=transforms.scale_by_staleness(),
    every=every,
  )


def gap_aware(
  learning_rate, workers, *, momentum=0.9, weight_decay=0.0
) -> Recipe:
  """Divides gradients by the elementwise gap (Barkai et al. 2020).

  g <- g / (1 + |params - sent_params| / C), with C the size of a typical update
  of each parameter (`asgd.transforms.gap_aware`). Weight decay is divided with
  the gradient; the momentum is of what is left.
  """
  del workers
  tx = optax.chain(
    decay_weights(weight_decay),
    transforms.gap_aware(
      None if momentum == 0 else velocity(momentum), learning_rate
    ),
    optax.scale_by_learning_rate(learning_rate),
  )
  return Recipe(base.as_algorithm(tx))


def dc_asgd_c(
  learning_rate, workers, *, momentum=0.0, weight_decay=0.0, strength=0.04
) -> Recipe:
  """Delay compensation with a constant lambda (Zheng et al. 2017).

  g <- g + lambda g * g * (params - sent_params), elementwise, with lambda =
  `strength`, before weight decay and momentum.
  """
  del workers
  compensate = transforms.delay_compensation(strength)
  return Recipe(sgd(learning_rate, momentum, weight_decay, compensate))


def dc_asgd_a(
  learning_rate,
  workers,
  *,
  momentum=0.0,
  weight_decay=0.0,
  strength=2.0,
  decay=0.95,
  scope="server",
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
  return Recipe(sgd(learning_rate, momentum, weight_decay, compensate))
