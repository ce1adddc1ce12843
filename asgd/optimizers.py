"""Optimizers: any of optax, or a user's own, as parts of recipes.

An `Optimizer` is a function from a learning rate to an optax transform, such as
`functools.partial(optax.adamw, b2=0.95)`. A recipe decides whether it runs at
the server, at each worker, or at the server for each worker.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import optax.schedules

from asgd import names, rates
from asgd.checks import line_of, shown

Optimizer = Callable[[optax.ScalarOrSchedule], optax.GradientTransformation]
OptimizerLike = Optimizer | str | Mapping[str, Any] | None  # see `named`

# Optimizers that need another transform, or more than a gradient (values, keys,
# gradients of single examples). `lbfgs` below replaces optax.lbfgs.
_EXCLUDED = ("dpsgd", "momo", "momo_adam", "noisy_sgd", "schedule_free")
_EXCLUDED += ("sophia",)


_SEARCH_ERROR = (
  "optimizer 'lbfgs' searches along a line, so it needs the loss of a batch as"
  " a function of the parameters, and a server receives only gradients: use"
  " engine='mesh', or the recipe 'sandblaster'"
)


def lbfgs(
  learning_rate: Any = None,
  *,
  memory_size: int = 10,
  scale_init_precond: bool = True,
) -> optax.GradientTransformationExtraArgs:
  """`optax.lbfgs` with its zoom line search, for updates that get a loss.

  Args:
    learning_rate: not used: the search finds the step, and tries 1 first.
    memory_size: stored pairs (difference of parameters, of gradients).
    scale_init_precond: whether the initial inverse Hessian is scaled by the
      last pair.

  Returns:
    A transform. Its update reads two extra args: `value`, the loss at the
    parameters, and `value_fn`, the loss as a function of parameters. It ignores
    others. It raises ValueError if one of the two is missing.

  Source:
    Nocedal and Wright, "Numerical optimization", algorithms 3.5, 3.6 and 7.4.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import optimizers
    >>> tx, w = optimizers.lbfgs(), jnp.array([3.0, 4.0])
    >>> f = lambda w: (w**2).sum() / 2
    >>> value, g = jax.value_and_grad(f)(w)
    >>> u, state = tx.update(g, tx.init(w), w, value=value, value_fn=f)
    >>> print(optax.apply_updates(w, u))  # the first step has length 1
    [2.4 3.2]
  """
  del learning_rate
  tx = optax.lbfgs(None, memory_size, scale_init_precond)

  def update(
    updates, state, params=None, *, value=None, value_fn=None, **extra_args
  ):
    del extra_args
    if value is None or value_fn is None:
      raise ValueError(_SEARCH_ERROR)
    return tx.update(
      *(updates, state, params),
      value=value,
      grad=updates,
      value_fn=value_fn,
    )

  return optax.GradientTransformationExtraArgs(tx.init, update)


def searches(value: str | Mapping[str, Any] | None) -> bool:
  """Whether an optimizer searches along a line; `value` as in `named`, or None.

  Example:
    >>> from asgd import optimizers
    >>> optimizers.searches("lbfgs"), optimizers.searches({"name": "adam"})
    (True, False)
  """
  return (value.get("name") if isinstance(value, Mapping) else value) == "lbfgs"


def refuse_search(value: str | Mapping[str, Any] | None) -> None:
  """Raises ValueError if an optimizer searches along a line, because a server
  computes updates from gradients alone; `value` as in `named`, or None."""
  if searches(value):
    raise ValueError(_SEARCH_ERROR)


@functools.cache
def known() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
  """Returns optax's optimizers that take a learning rate, by name.

  Example:
    >>> from asgd import optimizers
    >>> "adamw" in optimizers.known(), "momo" in optimizers.known()
    (True, False)
  """
  # A name of optax replaces the same name of optax.contrib.
  attributes = {**vars(optax.contrib), **vars(optax), "lbfgs": lbfgs}
  return types.MappingProxyType({
    name: maker
    for name, maker in sorted(attributes.items())
    if not name.startswith(("_", "scale_by")) and name not in _EXCLUDED
    if isinstance(maker, types.FunctionType | functools.partial)
    if "learning_rate" in inspect.signature(maker).parameters
  })


def named(value: str | Mapping[str, Any]) -> Optimizer:
  """Returns the optimizer that a config names.

  Args:
    value: its name, or a dict of its `name` and options. The name is one of
      `known`, or MODULE:FUNCTION.

  Returns:
    The Optimizer.

  Raises:
    ValueError: for an unknown name, with the nearest known one, and for a
      learning rate among the options.

  Example:
    >>> from asgd import optimizers
    >>> tx = optimizers.named({"name": "adamw", "b2": 0.95})(0.001)
    >>> tx.init(0.0)[0].count.item()
    0
  """
  if isinstance(value, str):
    value = {"name": value}
  if not isinstance(value, Mapping) or "name" not in value:
    raise ValueError(
      "optimizer must be a name, or a dict of a name and options, not"
      f" {shown(value)}"
    )
  options = dict(value)
  name = options.pop("name")
  maker = names.resolve("optimizer", name, known())
  if "learning_rate" in options:
    raise ValueError(
      f"optimizer {name!r} has a learning_rate among its options, but the rate"
      " is the run's: set config.learning_rate"
    )
  names.check_arguments("optimizer", name, maker, {"learning_rate", *options})

  def optimizer(learning_rate):
    arguments = {"learning_rate": learning_rate, **options}
    return names.call("optimizer", name, maker, arguments)

  # A partial of optax.sgd allows `momentum_of` to recognise plain SGD.
  if maker is optax.sgd:
    return functools.partial(maker, **options)
  vars(optimizer)["searches"] = maker is lbfgs
  return optimizer


def check(optimizer: Optimizer) -> None:
  """Raises ValueError unless a user's optimizer computes, from gradients alone,
  updates with the structure of the parameters.

  Example:
    >>> import optax
    >>> from asgd import optimizers
    >>> optimizers.check(optax.adam)  # a function of a learning rate
  """
  if not callable(optimizer):
    raise ValueError(
      "optimizer must be a name, a dict of name and options, or a function"
      f" learning rate -> optax transform, not {shown(optimizer)}"
    )
  params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
  try:
    tx = optax.with_extra_args_support(optimizer(0.1))
    loss: dict[str, Any] = {}
    if getattr(optimizer, "searches", False):
      loss = {"value": 0.0, "value_fn": lambda w: jnp.sum(w["w"])}
    # Trace only: nothing is computed.
    updates, _ = jax.eval_shape(
      lambda w: tx.update(w, tx.init(w), w, **loss), params
    )
    # A transform may return a scalar, or drop a leaf.
    structures = [jax.tree.structure(tree) for tree in (updates, params)]
  except Exception as error:  # a user's optimizer may raise anything
    raise ValueError(
      f"optimizer: an update cannot be made ({line_of(error)})"
    ) from error
  if structures[0] != structures[1]:
    raise ValueError(
      "optimizer: its update has a different structure than the gradients;"
      " return one leaf for each parameter"
    )


def resolve(value: Optimizer | str | Mapping[str, Any]) -> Optimizer:
  """Returns the optimizer of a recipe's option: a name or a dict as in `named`,
  or a function of a learning rate. Raises ValueError as `named` and `check`.

  Example:
    >>> import optax
    >>> from asgd import optimizers
    >>> optimizers.resolve(optax.adam) is optax.adam
    True
    >>> optimizers.resolve({"name": "adam", "b1": "x"})
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: optimizer: an update cannot be made (...)
  """
  if isinstance(value, str | Mapping):
    value = named(value)
  check(value)
  return value


def momentum_of(optimizer: Any) -> float | None:
  """Returns the momentum of plain SGD, 0 if it has none; None for others.

  Example:
    >>> import functools
    >>> import optax
    >>> from asgd import optimizers
    >>> optimizers.momentum_of(functools.partial(optax.sgd, momentum=0.5))
    0.5
    >>> print(optimizers.momentum_of(optax.adam))
    None
  """
  options: dict[str, Any] = {}
  if isinstance(optimizer, functools.partial) and not optimizer.args:
    optimizer, options = optimizer.func, optimizer.keywords
  if optimizer is not optax.sgd or set(options) - {"momentum", "nesterov"}:
    return None
  # A momentum that is a schedule or an array is no constant.
  momentum = options.get("momentum") or 0.0
  is_plain = isinstance(momentum, (int, float)) and not options.get("nesterov")
  return float(momentum) if is_plain else None


class _RateOfVersion(optax.schedules.StatefulSchedule):
  """A schedule that reads the extra arg `version` instead of a count."""

  def __init__(self, learning_rate):
    self._rate = learning_rate

  def init(self):
    return ()

  def update(self, state, **extra_args):
    del extra_args
    return state

  def __call__(self, state, *, version=0, **extra_args):
    del state, extra_args
    return rates.at(self._rate, version)


def at_version(
  optimizer: Any, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer with a schedule that counts the server's updates.

    u = optimizer(eta(version)),   version: number of updates of the server

  A worker knows this number from its ticket. The optimizer's own count would be
  smaller, if it runs at a worker or at the server for one worker.

  Args:
    optimizer: takes a learning rate, as in `Optimizer`.
    learning_rate: eta, a number, or a schedule over the server's updates.

  Returns:
    A transform. For a schedule, its update reads the extra arg `version`,
    int32[], which is 0 if missing.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import optimizers
    >>> tx = optimizers.at_version(optax.sgd, lambda version: 0.5**version)
    >>> g, version = jnp.float32(8.0), jnp.int32(2)
    >>> print(tx.update(g, tx.init(g), version=version)[0])  # -0.5^2 8
    -2.0
  """
  if not callable(learning_rate):
    return optax.with_extra_args_support(optimizer(learning_rate))
  # inject_hyperparams calls a StatefulSchedule with the extra args of update.
  make_transform = optax.inject_hyperparams(
    lambda learning_rate: optimizer(learning_rate)
  )
  return make_transform(learning_rate=_RateOfVersion(learning_rate))


def refuse_beside(
  optimizer: OptimizerLike, **given: tuple[Any, Any]
) -> None:
  """Raises ValueError if options of a recipe's built-in SGD, each given as
  (value, default), are changed although there is an optimizer."""
  if optimizer is None:
    return
  for name, (value, default) in given.items():
    if value != default:
      raise ValueError(
        f"{name} is an option of the recipe's built-in SGD, so {shown(value)}"
        f" has no effect with an optimizer: drop it, or set {name} in the"
        " optimizer"
      )


class CountingState(NamedTuple):
  """State of `counting`."""

  count: jax.Array  # int32[], number of updates so far
  inner: optax.OptState  # of the wrapped transform


def counting(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Counts updates, and passes the count to a transform as `version`.

  Optimizers of `at_version` need `version` from a server; without a server,
  this transform supplies it.

  Args:
    tx: its update may read the extra arg `version`, int32[].

  Returns:
    A transform.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import optimizers
    >>> tx = optimizers.at_version(optax.sgd, lambda version: 0.5**version)
    >>> tx, g = optimizers.counting(tx), jnp.float32(8.0)
    >>> state = tx.init(g)
    >>> for _ in range(3):
    ...   u, state = tx.update(g, state)
    ...   print(u)
    -8.0
    -4.0
    -2.0
  """
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return CountingState(jnp.zeros([], jnp.int32), tx.init(params))

  def update_fn(updates, state, params=None, **extra_args):
    # The count replaces a `version` that a server passes.
    extra_args["version"] = state.count
    updates, inner = tx.update(updates, state.inner, params, **extra_args)
    return updates, CountingState(state.count + 1, inner)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
