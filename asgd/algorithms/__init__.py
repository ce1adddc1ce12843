"""Named recipes: the algorithms of the literature, composed from transforms.

A `Recipe` says which part of an algorithm runs where: at the server, at the
worker (the momentum of DANA-Slim, the local steps of Downpour, parameter
averaging, EASGD, DiLoCo and FedAsync), or between (averages of messages).

    name, options --build--> Recipe --server, make_worker--> Server, Worker
                                    --peer----------------> Peer (no server)

Every recipe takes the learning rate and the number of workers, then its
options. Docstrings refer to these as the shared options:

- `learning_rate`: eta, positive, or a schedule over the server's updates. If
  workers or peers take steps, it is the rate of these steps; a peer's schedule
  counts the peer's updates;
- `workers`: N, or the number of peers, from 2;
- `momentum`: gamma, in [0, 1): v <- gamma v + g; params <- params - eta v, so
  v does not contain the learning rate. The steps with rate eta have the
  momentum;
- `weight_decay`: 0 or more: weight_decay * params is added to a gradient. The
  server adds its own parameters, after any compensation and before the
  momentum; workers and peers add theirs;
- `optimizer`: any optimizer (`asgd.optimizers.Optimizer`) instead of SGD; it
  has its own momentum and weight decay.

Building a recipe raises ValueError for a value out of its range, and for a
momentum or a weight decay next to an optimizer.

Where to begin: `recipe.py`, then `sgd.py`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from asgd import checks, names, optimizers, rates
from asgd.algorithms.added import worker_optimizer
from asgd.algorithms.fresh import (
  mindflayer_sgd,
  rennala_sgd,
  ringmaster_asgd,
)
from asgd.algorithms.gossip import (
  ad_psgd,
  async_threshold_sharing,
  choco_sgd,
  d2,
  d_psgd,
  gradient_tracking,
  local_d_psgd,
  sgp,
  threshold_sharing,
)
from asgd.algorithms.local_work import (
  downpour,
  easgd,
  fedasync,
  fedbuff,
  model_averaging,
  slowmo,
)
from asgd.algorithms.lookahead import (
  dana_dc,
  dana_slim,
  dana_zero,
  multi_asgd,
  nag_asgd,
)
from asgd.algorithms.outer_steps import async_diloco, diloco
from asgd.algorithms.recipe import Recipe, RecipeBuild
from asgd.algorithms.sgd import asgd, ssgd
from asgd.algorithms.staleness import (
  adadelay,
  dc_asgd_a,
  dc_asgd_c,
  delay_adaptive,
  gap_aware,
  staleness_aware,
)

# The families, in the order of RECIPES.
_MOMENTUM = asgd, ssgd, nag_asgd, multi_asgd
_STALENESS = (
  *(staleness_aware, delay_adaptive, adadelay),
  *(dc_asgd_c, dc_asgd_a, gap_aware),
)
_FRESH = ringmaster_asgd, rennala_sgd, mindflayer_sgd
_DANA = dana_zero, dana_slim, dana_dc
_LOCAL_WORK = (
  *(downpour, model_averaging, slowmo, easgd),
  *(diloco, async_diloco, fedasync, fedbuff, worker_optimizer),
)
RECIPES: dict[str, Callable[..., Recipe]] = {
  recipe.__name__: recipe
  for recipe in (*_MOMENTUM, *_STALENESS, *_FRESH, *_DANA, *_LOCAL_WORK)
}
_SYNCHRONOUS = (
  *(d_psgd, d2, gradient_tracking, sgp, local_d_psgd),
  *(choco_sgd, threshold_sharing),
)
# Recipes without a server.
PEER_RECIPES: dict[str, Callable[..., Recipe]] = {
  recipe.__name__: recipe
  for recipe in (ad_psgd, *_SYNCHRONOUS, async_threshold_sharing)
}
ALL = {**RECIPES, **PEER_RECIPES}
_OPTIMIZERS = {"optimizer", "outer_optimizer"}  # options that take a name, too


def options(name: str) -> dict[str, Any]:
  """Returns the options of a recipe and their defaults.

  The recipe is given by name or MODULE:FUNCTION. Raises ValueError for an
  unknown name, with the nearest known one, or a function without learning_rate
  and workers.

  Example:
    >>> options("ssgd")
    {'momentum': 0.0, 'weight_decay': 0.0, 'optimizer': None}
  """
  maker = names.resolve("algorithm", name, ALL)
  # The signature is the table of options: configs are checked against it.
  parameters = inspect.signature(maker).parameters
  common = "learning_rate", "workers"
  if not set(common) <= set(parameters):
    raise ValueError(
      f"algorithm {name!r} must take learning_rate and workers, then its"
      f" options; it takes {', '.join(parameters) or 'nothing'}"
    )
  return {k: p.default for k, p in parameters.items() if k not in common}


def build(
  name: str, learning_rate: optax.ScalarOrSchedule, workers: int, **kwargs: Any
) -> Recipe:
  """Builds one of ALL, or a user's recipe, by name.

  Args:
    name: a name of ALL, or MODULE:FUNCTION of a function (learning_rate,
      workers, **options) -> Recipe.
    learning_rate, workers: shared options.
    **kwargs: options of the recipe; `optimizer` and `outer_optimizer` may also
      be a name or a dict (see `optimizers.named`).

  Returns:
    The Recipe; its `build` holds these arguments.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, and
      for a value out of its range.

  Example:
    >>> recipe = build("dana_zero", 0.1, workers=8, momentum=0.9)
    >>> server = recipe.server()
    >>> recipe.order
    'asynchronous'
  """
  maker = names.resolve("algorithm", name, ALL)
  return _make(name, maker, learning_rate, workers, kwargs)


def _make(
  name: str,
  maker: Callable[..., Recipe],
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  options: Mapping[str, Any],
) -> Recipe:
  """Calls a recipe's maker with checked arguments, and records them."""
  checks.integer("workers", workers)
  rates.check("learning_rate", learning_rate)
  kwargs = {"learning_rate": learning_rate, "workers": workers, **options}
  # A config names an optimizer; makers take functions only.
  for key in _OPTIMIZERS & kwargs.keys():
    if kwargs[key] is not None:
      kwargs[key] = optimizers.resolve(kwargs[key])
  recipe = names.call("algorithm", name, maker, kwargs)
  # A user's MODULE:FUNCTION may return anything.
  if not isinstance(recipe, Recipe):
    raise ValueError(
      f"algorithm {name!r} must return an asgd.Recipe, not"
      f" {checks.shown(recipe)}"
    )
  recipe = recipe._replace(workers=workers)
  # `rebuild` compares these to detect a recipe that was changed by hand. The
  # last field is `build` itself.
  parts = tuple(recipe[:-1])
  recipe_build = RecipeBuild(name, maker, learning_rate, dict(options), parts)
  return recipe._replace(build=recipe_build)


def rebuild(
  recipe: Recipe, learning_rate: optax.ScalarOrSchedule, workers: int
) -> Recipe:
  """Returns a recipe for another learning rate and number of workers.

  A recipe that fits already is returned unchanged. Otherwise `build` is called
  again with the recipe's options. Raises ValueError if the recipe does not fit
  and was made or changed by hand.

  Example:
    >>> recipe = build("easgd", 0.1, workers=8, moving_rate=0.5)
    >>> recipe = rebuild(recipe, 0.2, workers=4)
    >>> recipe.workers, recipe.build.learning_rate, recipe.build.options
    (4, 0.2, {'moving_rate': 0.5})
  """
  recipe_build = recipe.build
  fits_workers = recipe.workers in (None, workers)
  if recipe_build is None and fits_workers:
    return recipe
  if recipe_build is not None:
    rate = recipe_build.learning_rate
    # A schedule is compared by identity, a number by value.
    if fits_workers and (rate is learning_rate or rate == learning_rate):
      return recipe
    if is_as_built(recipe):
      options = recipe_build.options
      return _make(
        recipe_build.name, recipe_build.maker, learning_rate, workers, options
      )
  raise ValueError(
    f"the Recipe was made or changed by hand for {recipe.workers} workers, but"
    f" {workers} are needed, at learning rate {checks.shown(learning_rate)}:"
    " enter it in asgd.RECIPES and build it by its name"
  )


def is_as_built(recipe: Recipe) -> bool:
  """Whether a recipe was built by its name and not changed by hand since."""
  if recipe.build is None:
    return False
  # Identity, not equality: fields may hold arrays, and == of arrays is no bool.
  pairs = zip(recipe.build.parts, recipe[:-1], strict=True)
  return all(part is field for part, field in pairs)


def recipe_function(name: str) -> Callable[..., Recipe]:
  """Returns one of ALL as a function that checks like `build`.

  Example:
    >>> recipe_function("dana_zero")(0.1, workers=8).workers
    8
  """

  @functools.wraps(ALL[name])
  def recipe(learning_rate, workers, **options):
    return build(name, learning_rate, workers, **options)

  return recipe
