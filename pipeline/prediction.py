"""Named rules that predict a stage's weights from the velocity of momentum.

A stage reads its weights w for a forward or a backward pass, and applies the
gradient some updates later. With a prediction the pass uses, instead of w, an
estimate of the weights after these updates:

    w - eta f v,   v <- gamma v + g

  name        f in a forward pass        f in a backward pass
  spectrain   floor(k / 2) + N - k - 1   floor(k / 2)
  ftpipe      gamma + ... + gamma^s      0

  N  stages
  k  the stage, 0, ..., N - 1
  s  the stage's updates between a forward pass and the use of its gradient

SpecTrain assumes that the velocity does not change, so each update moves the
weights by -eta v. FTPipe assumes that all new gradients are zero, so the
velocity decays. For SGD with momentum, FTPipe's prediction equals that of
`predict=True`, which steps the optimizer s times; the cost of FTPipe's does not
grow with s.

References:
  Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model
    parallelism on multi-GPU platform" (SpecTrain), 2018, arXiv:1809.02839.
  Eliad et al., "Fine-tuning giant neural networks on commodity hardware with
    automatic pipeline model parallelism" (FTPipe), USENIX ATC 2021.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import algorithms, base, checks, rates

SPECTRAIN, FTPIPE = NAMES = "spectrain", "ftpipe"


class Horizon(NamedTuple):
  """The factors f of one stage: how many steps eta v to predict ahead."""

  forward: float
  backward: float = 0.0


def horizons(
  name: str, staleness: Sequence[int], momentum: float
) -> list[Horizon]:
  """Returns the factors of all stages.

  Args:
    name: one of NAMES.
    staleness: s of each stage, in updates; its length is N.
    momentum: gamma, in [0, 1).

  Raises:
    ValueError: for another name.

  Example:
    >>> [tuple(h) for h in horizons("spectrain", [3, 2, 1, 0], 0.5)]
    [(3, 0), (2, 0), (2, 1), (1, 1)]
    >>> [h.forward for h in horizons("ftpipe", [3, 2, 1, 0], 0.5)]
    [0.875, 0.75, 0.5, 0.0]
  """
  checks.one_of("predict", name, NAMES)
  stages = len(staleness)
  if name == SPECTRAIN:
    return [Horizon(k // 2 + stages - k - 1, k // 2) for k in range(stages)]
  sums = (sum(momentum**j for j in range(1, s + 1)) for s in staleness)
  return [Horizon(float(factor)) for factor in sums]


def momentum_of(name: str, recipe: algorithms.Recipe, shapes: Any) -> float:
  """Returns gamma of a recipe with one velocity for all weights in its state.

  Args:
    name: one of NAMES, for the error.
    recipe: the recipe of a stage.
    shapes: the stage's parameters as jax.ShapeDtypeStruct.

  Raises:
    ValueError: for a recipe without a velocity or with several, for one with
      another `optimizer`, and for one that `algorithms.build` did not build.

  Example:
    >>> recipe = algorithms.build("asgd", 0.1, workers=1, momentum=0.5)
    >>> momentum_of("ftpipe", recipe, jax.ShapeDtypeStruct((3,), jnp.float32))
    0.5
  """
  weights = base.weights_of(shapes)
  try:
    state = jax.eval_shape(recipe.algorithm.init, weights)
    velocity = optax.tree.get(state, "trace")
  except KeyError:  # several velocities
    velocity = None
  shape_of = lambda tree: jax.tree.map(lambda x: x.shape, tree)  # noqa: E731
  if (built_from := recipe.build) and shape_of(velocity) == shape_of(weights):
    options = {**algorithms.options(built_from.name), **built_from.options}
    if options.get("optimizer") is None:
      return float(options["momentum"])
  raise ValueError(
    f"predict {checks.shown(name)} follows the velocity of SGD with momentum,"
    " of which the recipe has none, or one for each worker: set momentum=0.9 of"
    " the recipe asgd, or predict=True, which rolls any optimizer forward"
  )


class CountedState(NamedTuple):
  """State of `along_velocity`."""

  count: jax.Array  # type: ignore[assignment] # int32[], updates made
  inner: optax.OptState  # of the algorithm


def along_velocity(
  algorithm: base.Algorithm,
  learning_rate: optax.ScalarOrSchedule,
  factor: float,
) -> base.Algorithm:
  """Sends w - eta f v, with eta of the next update.

  Args:
    algorithm: an Algorithm with one velocity v in its state, an optax "trace".
    learning_rate: eta, or a schedule over the algorithm's updates.
    factor: f.

  Returns:
    An Algorithm with the updates of `algorithm` and this send rule.

  Example:
    >>> tx = optax.sgd(0.5, momentum=0.5)
    >>> algorithm = along_velocity(base.as_algorithm(tx), 0.5, 3.0)
    >>> now = jnp.float32(8.0)
    >>> update, state = algorithm.update(4.0, algorithm.init(now), now)
    >>> ahead = algorithm.send(state, now + update, worker=jnp.int32(0))
    >>> print(ahead)  # v = 4; 8 - 0.5 4, and 6 - 0.5 3 4
    0.0
  """

  def init(params):
    return CountedState(jnp.zeros([], jnp.int32), algorithm.init(params))

  def update(updates, state, params=None, **extra_args):
    updates, inner = algorithm.update(
      updates, state.inner, params, **extra_args
    )
    return updates, CountedState(state.count + 1, inner)

  def send(opt_state, params, *, worker):
    del worker
    rate = rates.at(learning_rate, opt_state.count)
    velocity = optax.tree.get(opt_state, "trace")
    return step_along(params, velocity, rate * factor)

  return base.Algorithm(init, update, send)


@functools.lru_cache(maxsize=256)
def extrapolate(
  learning_rate: optax.ScalarOrSchedule, factor: float
) -> Callable[[base.ServerState], Any]:
  """Returns the function of `stage.Part.correct` that predicts weights for a
  backward pass: server state -> parameters with the weights w - eta f v.

  Args:
    learning_rate: eta, or a schedule over the server's updates.
    factor: f.
  """

  @jax.jit
  def predict_weights(state):
    rate = rates.at(learning_rate, state.version)
    weights = base.weights_of(state.params)
    velocity = optax.tree.get(state.opt_state, "trace")
    predicted_weights = step_along(weights, velocity, rate * factor)
    return base.with_weights(state.params, predicted_weights)

  return predict_weights


def step_along(weights: Any, velocity: Any, step: Any) -> Any:
  """Returns weights - step velocity, two trees, in the dtypes of the weights.
  """
  # A float32 step would widen bfloat16 weights.
  return jax.tree.map(
    lambda w, v: (w - step * v).astype(w.dtype), weights, velocity
  )
