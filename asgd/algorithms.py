"""Named recipes: the algorithms of the literature, composed from transforms.

A Recipe says what runs where. Most of it is the Algorithm at the server; a few
also transform messages at the worker (DANA-Slim) or average several of them
into an update (SSGD, n-softsync). All take the learning rate first, then the
number of workers, and these two in common:

  momentum      gamma, in the form v <- gamma v + g; params <- params - eta v,
                in which v does not hold the learning rate eta;
  weight_decay  added to gradients as weight_decay * params: the server's, at
                the server, after any compensation and before the momentum.
                Gap-Aware penalises it with the gradient; in DANA-Slim, whose
                momentum is the worker's, so is the decay.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import optax

from asgd import base, names, transforms
from asgd import server as server_lib


class Recipe(NamedTuple):
  """An algorithm and the places where its parts run."""

  algorithm: base.Algorithm  # at the server, once per update
  message: optax.GradientTransformation | None = None  # at the worker
  per_message: optax.GradientTransformation | None = None  # at the server
  every: int = 1  # messages per update
  order: str = "asynchronous"  # the protocol it is meant for
  workers: int | None = None  # most workers it can serve; None is any

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


def _momentum(momentum: float) -> optax.GradientTransformation:
  """Momentum that keeps no state where there is none."""
  return optax.identity() if momentum == 0 else _trace(momentum)


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
  """Synchronous SGD: one update on the mean of a message from every worker."""
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
  """Delay compensation with a constant lambda (Zheng et al. 2017)."""
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
  """Divides gradients by the elementwise gap (Barkai et al. 2020)."""
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
  """DANA-Zero on compensated gradients, around the look-ahead that was sent."""
  algorithm = _dana(learning_rate, workers, momentum)
  compensate = transforms.delay_compensation(strength)
  return Recipe(transforms.precede(algorithm, compensate, _decay(weight_decay)))


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
