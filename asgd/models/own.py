"""Users' models: a flax module, an nnx module, a pair (init, apply) or a
transformed function of Haiku.

Such a model cannot be cut into stages. Statistics of BatchNorm follow the rule
of this library: a message holds those of its batch, and the server averages
them in. Flax averages by itself, new = m old + (1 - m) batch. So the batch's
statistics are (new - m old) / (1 - m), and the server uses the momentum m. With
one worker the statistics are then those of a loop of flax and optax.

Haiku's state has no such rule: it may contain any values. A message holds the
state after its batch, which replaces the server's state (momentum 0).
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from asgd import base, checks

# Arguments that switch a model to training, and their values in training.
_MODES = {"train": True, "training": True, "is_training": True}
_MODES |= {"deterministic": False, "use_running_average": False}
_KEYS = "key", "rng"
_STATE = "state"  # name of the second argument of apply in Haiku's form
_FORMS = (
  "a flax.linen Module, a tuple of layers, a pair (init, apply), a transformed"
  " function of Haiku or, with an argument rngs, a flax.nnx Module"
)
DECAY = 0.9  # default momentum with which the server averages statistics


class ModelError(ValueError):
  """A model cannot be trained in its current form."""


class Model(NamedTuple):
  """A model that cannot be cut into stages, as two functions."""

  # (key, example) -> weights, or base.Variables of them and statistics
  init: Callable[..., optax.Params]
  # (params, x, train, key or None) -> (output, the batch's own statistics)
  apply: Callable[..., tuple[jax.Array, Any]]
  # example -> the server's momentum: weight of the old statistics in an update
  decay: Callable[[Any], float] = lambda example: DECAY
  # Variables in the form of the model's package -> params of this model
  inward: Callable[[Any], optax.Params] = lambda variables: variables
  # (params of this model, example) -> variables in the package's form
  outward: Callable[[optax.Params, Any], Any] = lambda params, example: params


def as_model(value: Any) -> Any:
  """Returns the result of a user's function: layers unchanged, other models as
  a Model. Raises ValueError if the result is not a model."""
  if isinstance(value, Model):
    return value
  if isinstance(value, nn.Module):
    return _model_of_linen(value)
  # Test for layers before a pair: a flax module is callable, too.
  if isinstance(value, list | tuple) and value:
    if all(isinstance(each, nn.Module) for each in value):
      for layer in value:
        if "train" not in inspect.signature(type(layer).__call__).parameters:
          raise ValueError(
            "a model of layers calls each as layer(x, train=...), but"
            f" {type(layer).__name__} takes no train; add it, or return one"
            " Module"
          )
      return tuple(value)
    if len(value) == 2 and all(map(callable, value)):
      return _model_of_pair(*value)
  init, apply = getattr(value, "init", None), getattr(value, "apply", None)
  if callable(init) and callable(apply):
    return _model_of_pair(init, apply)
  raise ValueError(f"it returned {checks.shown(value)}; return {_FORMS}")


def _argument_names(
  call: Callable[..., Any], count: int, callee: str
) -> list[str]:
  """Returns the names of a function's arguments after the first `count`. Raises
  ValueError if one of them needs a value that no caller has."""
  parameters = list(inspect.signature(call).parameters.values())
  takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
  if len(parameters) < count and not takes_any_number:
    raise ValueError(
      f"{callee} takes {len(parameters)} arguments, but needs {count} or more"
    )
  variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
  remaining = [p for p in parameters[count:] if p.kind not in variable]
  for p in remaining:
    if p.default is p.empty and p.name not in (*_MODES, *_KEYS):
      raise ValueError(
        f"{callee} needs an argument {p.name!r}, which has no value here: only"
        f" a batch is passed, and {', '.join((*_MODES, *_KEYS))} by name"
      )
  return [p.name for p in remaining]


def _mode_arguments(arguments: Collection[str], train: bool) -> dict[str, Any]:
  """Returns the keywords that switch a model to training or evaluation."""
  return {
    name: value is train for name, value in _MODES.items() if name in arguments
  }


def _batch_statistics(before: Any, after: Any, momentum: float) -> Any:
  """Returns the batch's statistics, computed from flax's running statistics
  before and after the batch."""
  return jax.tree.map(
    lambda old, new: (new - momentum * old) / (1 - momentum), before, after
  )


def _common_momentum(momenta: set[float], name: str) -> float:
  """Returns the momentum that all layers have. Raises ModelError if there are
  several or none, or if it is not in [0, 1)."""
  if len(momenta) > 1:
    raise ModelError(
      f"{name} has BatchNorm layers with several momenta, {sorted(momenta)},"
      " but the server averages all statistics alike: give them one"
    )
  if not momenta:
    raise ModelError(
      f"{name} keeps batch_stats that are not flax's BatchNorm; only those of"
      " BatchNorm can be averaged"
    )
  (momentum,) = momenta
  # 1 would divide by 0 in `_batch_statistics`.
  if not 0 <= momentum < 1:
    raise ModelError(
      f"{name} has BatchNorm with momentum {momentum}, which must be in [0, 1)"
    )
  return float(momentum)


# flax.linen.


def _trace_variables(
  init: Callable[..., Any], example: jax.ShapeDtypeStruct, name: str
) -> tuple[Any, set[float]]:
  """Returns the shapes of a module's variables, and the momenta of its
  BatchNorm layers."""
  momenta: set[float] = set()
  try:
    with nn.intercept_methods(_record_momenta(momenta)):
      shapes = jax.eval_shape(  # a new function: JAX has not cached its trace
        lambda key: init(key, example), jax.random.key(0)
      )
  except ModelError:
    raise
  except Exception as error:  # a user's module may raise anything
    form = f"{example.dtype}{list(example.shape)}"
    line = checks.text_of(error, 200)
    raise ModelError(f"{name} does not take examples {form}: {line}") from error
  return shapes, momenta


def _model_of_linen(module: nn.Module) -> Model:
  """Returns the Model of a flax.linen module."""
  name = type(module).__name__
  # Arguments after self and the batch.
  arguments = _argument_names(type(module).__call__, 2, f"{name}.__call__")
  # All calls add to this set, because JAX may not trace a layer again.
  momenta_seen: set[float] = set()

  def init(key, example):
    rngs = {"params": key, "dropout": key}
    # lazy_init computes only the variables, from the example's shape.
    variables = module.lazy_init(
      rngs, example, **_mode_arguments(arguments, False)
    )
    other_collections = sorted(set(variables) - {"params", "batch_stats"})
    if other_collections:
      raise ModelError(
        f"{name} keeps {', '.join(other_collections)}, but only params and"
        " batch_stats are trained and kept"
      )
    weights, stats = variables.get("params", {}), variables.get("batch_stats")
    return base.Variables(weights, stats) if stats else weights

  def apply(params, x, train, key):
    has_statistics = isinstance(params, base.Variables)
    variables: dict[str, Any] = {"params": base.weights_of(params)}
    if has_statistics:
      variables["batch_stats"] = params.stats
    rngs = None if key is None else {"dropout": key}
    options = _mode_arguments(arguments, train)
    if not train or not has_statistics:
      y = module.apply(variables, x, rngs=rngs, **options)
      return y, params.stats if has_statistics else ()
    momenta: set[float] = set()
    # The momentum is known only when the layers are called.
    with nn.intercept_methods(_record_momenta(momenta)):
      y, changed_variables = module.apply(
        variables, x, rngs=rngs, mutable=["batch_stats"], **options
      )
    momenta_seen.update(momenta)
    momentum = _common_momentum(momenta_seen, name)
    return y, _batch_statistics(
      params.stats, changed_variables["batch_stats"], momentum
    )

  def decay(example):
    shapes, momenta = _trace_variables(init, example, name)
    if not isinstance(shapes, base.Variables):
      return DECAY
    if not arguments or not set(arguments) & set(_MODES):
      raise ModelError(
        f"{name} has BatchNorm, but its __call__ takes no argument train, which"
        " selects the batch's or the running statistics; add it"
      )
    momenta_seen.update(momenta)
    return _common_momentum(momenta, name)

  return Model(init, apply, decay, _from_linen, _to_linen)


def _from_linen(variables: Any) -> Any:
  """Returns parameters of linen's variables; others as they are."""
  if not isinstance(variables, Mapping) or "params" not in variables:
    return variables
  weights, stats = variables["params"], variables.get("batch_stats")
  return base.Variables(weights, stats) if stats else weights


def _to_linen(params: Any, example: Any) -> dict[str, Any]:
  """Returns linen's variables of parameters."""
  del example
  if isinstance(params, base.Variables):
    return {"params": params.weights, "batch_stats": params.stats}
  return {"params": params}


def check_layers(init: Callable[[jax.Array], Any], other_way: str) -> None:
  """Raises ModelError if the layers that `init` (key -> parameters) calls
  average their statistics: a message needs the statistics of its batch.
  `other_way` is the end of the error."""
  momenta: set[float] = set()
  with nn.intercept_methods(_record_momenta(momenta)):
    jax.eval_shape(lambda key: init(key), jax.random.key(0))  # not cached
  if momenta - {0.0}:
    raise ModelError(
      f"its layers have BatchNorm with momentum {max(momenta)}, but the server"
      f" averages: set momentum=0.0, {other_way}"
    )


def _record_momenta(momenta: set[float]) -> Callable[..., Any]:
  """Returns an interceptor that adds the momentum of each called BatchNorm."""

  def intercept(call, args, kwargs, context):
    if isinstance(context.module, nn.BatchNorm):
      momenta.add(context.module.momentum)
    return call(*args, **kwargs)

  return intercept


# flax.nnx.


def of_nnx(make: Callable[..., Any]) -> Model:
  """Returns the Model of a function rngs -> nnx.Module. Each batch calls the
  function and sets the module's parameters and statistics."""
  from flax import nnx

  kept_kinds = nnx.Param, nnx.BatchStat, nnx.RngState, nnx.Intermediate
  other_kinds = nnx.Not(nnx.Any(*kept_kinds))

  def make_module(params, dropout):
    module = make(rngs=nnx.Rngs(params=params, dropout=dropout))
    if not isinstance(module, nnx.Module):
      raise ModelError(
        f"it takes rngs but returned {checks.shown(module)}; return a flax.nnx"
        " Module"
      )
    return module

  def values_of(module, kind):
    return nnx.to_pure_dict(nnx.state(module, kind))

  def init(key, example):
    del example
    module = make_module(key, key)
    weights = values_of(module, nnx.Param)
    stats = values_of(module, nnx.BatchStat)
    return base.Variables(weights, stats) if stats else weights

  def apply(params, x, train, key):
    module = make_module(0, 0 if key is None else key)
    _set_nnx(module, nnx.Param, base.weights_of(params))
    has_statistics = isinstance(params, base.Variables)
    if has_statistics:
      _set_nnx(module, nnx.BatchStat, params.stats)
    (module.train if train else module.eval)()
    function_name = f"{type(module).__name__}.__call__"
    arguments = _argument_names(module.__call__, 1, function_name)
    before = jax.tree.leaves(values_of(module, other_kinds))
    y = module(x, **_mode_arguments(arguments, train))
    after = jax.tree.leaves(values_of(module, other_kinds))
    if any(a is not b for a, b in zip(before, after, strict=False)):
      raise ModelError(
        f"{function_name} changes variables that are neither nnx.Param nor"
        " nnx.BatchStat, but only these are trained and kept"
      )
    if not train or not has_statistics:
      return y, params.stats if has_statistics else ()
    stats = values_of(module, nnx.BatchStat)
    return y, _batch_statistics(params.stats, stats, momentum_of(module))

  def momentum_of(module):
    nodes = (node for _, node in nnx.iter_graph(module))
    momenta = {n.momentum for n in nodes if isinstance(n, nnx.BatchNorm)}
    name = type(module).__name__
    return _common_momentum(momenta, name) if momenta else DECAY

  def decay(example):
    del example
    return momentum_of(nnx.eval_shape(lambda: make_module(0, 0)))

  return Model(init, apply, decay)


def _set_nnx(module: Any, kind: Any, tree: Any) -> None:
  """Sets a module's variables of a kind, by name."""
  from flax import nnx

  state = nnx.state(module, kind)
  nnx.replace_by_pure_dict(state, tree)
  nnx.update(module, state)


# Two functions, with or without Haiku's positional state and rng.


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
  """Returns the parameters of a function that are passed by position."""
  parameters = inspect.signature(function).parameters.values()
  return [p for p in parameters if p.kind <= p.VAR_POSITIONAL]


def _model_of_pair(
  init: Callable[..., Any], apply: Callable[..., Any]
) -> Model:
  """Returns the Model of a pair (init, apply).

  init is called as init(key) or init(key, example). apply is called as
  apply(params, x), with `train` and `key` by name if it takes them. If params
  are base.Variables, apply must return (output, the batch's own statistics).

  apply may also have the form of Haiku: apply(params, rng, x), apply(params,
  state, rng, x) or apply(params, state, x). With a state, init returns (params,
  state) and apply returns (output, state)."""
  names = [p.name for p in _positional(apply)]
  names_between = [name for name in names[1:2] if name == _STATE]
  names_between += [
    name for name in names[1 + len(names_between) :][:1] if name in _KEYS
  ]
  arguments = _argument_names(apply, 2 + len(names_between), "apply")
  draw = _make_draw(init)
  if _STATE in names_between:
    return _model_with_state(draw, apply, names_between, arguments)

  def run(params, x, train, key):
    keys = {name: key for name in _KEYS if name in arguments}
    result = apply(
      params,
      *(key for _ in names_between),
      x,
      **_mode_arguments(arguments, train),
      **keys,
    )
    if not isinstance(params, base.Variables):
      return result, ()
    if not isinstance(result, tuple) or len(result) != 2:
      raise ModelError(
        "init returns asgd.base.Variables, so apply must return (output,"
        f" statistics), not {checks.shown(result)}"
      )
    return result

  return Model(draw, run)


def _make_draw(init: Callable[..., Any]) -> Callable[..., Any]:
  """Returns (key, example) -> the result of a pair's init."""
  required_names = [
    p.name
    for p in _positional(init)
    if p.kind is p.VAR_POSITIONAL
    or (p.default is p.empty and p.name not in _MODES)
  ]
  if len(required_names) not in (1, 2):
    names = ", ".join(required_names)
    raise ValueError(f"init takes ({names}); write init(key) or init(key, x)")
  # Haiku's moving averages get their shapes only in training.
  mode_arguments = _mode_arguments(
    _argument_names(init, len(required_names), "init"), True
  )

  def draw(key, example):
    if len(required_names) == 1:
      return init(key, **mode_arguments)
    return init(key, jnp.zeros(example.shape, example.dtype), **mode_arguments)

  return draw


def _model_with_state(
  draw: Callable[..., Any],
  apply: Callable[..., Any],
  names_between: list[str],
  arguments: list[str],
) -> Model:
  """Returns the Model of an (init, apply) pair; apply takes and returns a
  state.

  The statistics of this model are the state, as floating point numbers, because
  the server subtracts and adds statistics. A count is exact up to 2^24.

  Args:
    draw: (key, example) -> (params, state).
    apply: the function `apply` of the pair.
    names_between: names of its arguments between params and x.
    arguments: names of its arguments after x.
  """

  def as_params(result):
    if not isinstance(result, tuple) or len(result) != 2:
      raise ModelError(
        "apply takes a state, so init must return (params, state), not"
        f" {checks.shown(result)}"
      )
    if not jax.tree.leaves(result[1]):
      return result[0]
    return base.Variables(result[0], jax.tree.map(_as_float, result[1]))

  def init(key, example):
    return as_params(draw(key, example))

  def state_shapes(x):
    """Returns the structure and dtypes of the state before `_as_float`."""
    example = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = jax.eval_shape(lambda key: draw(key, example), jax.random.key(0))
    return shapes[1]

  def state_of(params, x):
    state = state_shapes(x)
    if isinstance(params, base.Variables):
      return jax.tree.map(
        lambda leaf, like_leaf: leaf.astype(like_leaf.dtype),
        params.stats,
        state,
      )
    if jax.tree.leaves(state):
      raise ModelError(
        "the model has a state, which the parameters lack: give params=(params,"
        " state) as its init returns them, or params=None"
      )
    return state

  def run(params, x, train, key):
    values_between = {_STATE: state_of(params, x)}
    out = apply(
      base.weights_of(params),
      *(values_between.get(name, key) for name in names_between),
      x,
      **_mode_arguments(arguments, train),
    )
    if not isinstance(out, tuple) or len(out) != 2:
      raise ModelError(
        "apply takes a state, so it must return (output, state), not"
        f" {checks.shown(out)}"
      )
    if not isinstance(params, base.Variables):
      return out[0], ()
    state_after = jax.tree.map(_as_float, out[1])
    return out[0], state_after if train else params.stats

  def inward(variables):
    # Haiku's params are a dict; (params, state) and Variables are tuples.
    return as_params(variables) if isinstance(variables, tuple) else variables

  def outward(params, example):
    return base.weights_of(params), state_of(params, example)

  return Model(init, run, lambda example: 0.0, inward, outward)


def _as_float(value: jax.Array) -> jax.Array:
  """Returns an array of integers or flags as floating point numbers."""
  is_inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
  return jnp.asarray(value) if is_inexact else jnp.asarray(value, jnp.float32)
