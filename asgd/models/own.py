"""Users' models: a flax module, an nnx module, a pair (init, apply) or a
transformed function of Haiku.

Such a model cannot be cut into stages. Statistics of BatchNorm follow the rule
of this library: a message holds those of its batch, and the server averages
them in. Flax averages by itself, new = m old + (1 - m) batch. So the batch's
statistics are (new - m old) / (1 - m), and the server uses the momentum m. One
worker then keeps the same statistics as a loop of flax and optax.

Haiku's state has no such rule: it may be any values. A message holds the state
after its batch, and the server replaces its own by it (momentum 0).
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
_STATE = "state"  # the name of a second argument of apply, as Haiku has it
_FORMS = (
  "a flax.linen Module, a tuple of layers, a pair (init, apply), a transformed"
  " function of Haiku or, with an argument rngs, a flax.nnx Module"
)
DECAY = 0.9  # for statistics that a model returns as those of its batch


class ModelError(ValueError):
  """A model cannot be trained in its current form."""


class Model(NamedTuple):
  """A model that cannot be cut into stages, as two functions."""

  # (key, example) -> weights, or base.Variables of them and statistics
  init: Callable[..., optax.Params]
  # (params, x, train, key or None) -> (output, the batch's own statistics)
  apply: Callable[..., tuple[jax.Array, Any]]
  # example -> the part of the old statistics that an update keeps
  decay: Callable[[Any], float] = lambda example: DECAY
  # Variables in the form of the model's package -> params of this model
  inward: Callable[[Any], optax.Params] = lambda variables: variables
  # (params of this model, example) -> variables in the package's form
  outward: Callable[[optax.Params, Any], Any] = lambda params, example: params


def as_model(value: Any) -> Any:
  """Returns the result of a user's function: layers unchanged, other models as
  a Model. Raises ValueError if it is no model."""
  if isinstance(value, Model):
    return value
  if isinstance(value, nn.Module):
    return _linen(value)
  # Layers before a pair: a flax module is callable, as are init and apply.
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
      return _pair(*value)
  init, apply = getattr(value, "init", None), getattr(value, "apply", None)
  if callable(init) and callable(apply):
    return _pair(init, apply)
  raise ValueError(f"it returned {checks.shown(value)}; return {_FORMS}")


def _arguments(call, count: int, callee: str) -> list[str]:
  """Returns the names of a function's arguments after the first `count`. Raises
  ValueError if one of them needs a value that no caller has."""
  parameters = list(inspect.signature(call).parameters.values())
  several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
  if len(parameters) < count and not several:
    raise ValueError(
      f"{callee} takes {len(parameters)} arguments, but needs {count} or more"
    )
  variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
  rest = [p for p in parameters[count:] if p.kind not in variable]
  for p in rest:
    if p.default is p.empty and p.name not in (*_MODES, *_KEYS):
      raise ValueError(
        f"{callee} needs an argument {p.name!r}, which has no value here: only"
        f" a batch is passed, and {', '.join((*_MODES, *_KEYS))} by name"
      )
  return [p.name for p in rest]


def _mode(arguments: Collection[str], train: bool) -> dict[str, Any]:
  """Returns the keywords that switch a model to training or evaluation."""
  return {
    name: value is train for name, value in _MODES.items() if name in arguments
  }


def _own(before, after, momentum):
  """Returns the batch's statistics from flax's running ones before and
  after."""
  return jax.tree.map(
    lambda old, new: (new - momentum * old) / (1 - momentum), before, after
  )


def _one_momentum(momenta: set[float], name: str) -> float:
  """Returns the only momentum; ModelError for several, none, or a bad one."""
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
  # 1 would divide by 0 in `_own`.
  if not 0 <= momentum < 1:
    raise ModelError(
      f"{name} has BatchNorm with momentum {momentum}, which must be in [0, 1)"
    )
  return float(momentum)


# flax.linen.


def _traced(init, example, name) -> tuple[Any, set[float]]:
  """Returns the shapes of a module's variables, and the momenta of its
  BatchNorm layers."""
  momenta: set[float] = set()
  try:
    with nn.intercept_methods(_listing(momenta)):
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


def _linen(module: nn.Module) -> Model:
  """Returns the Model of a flax.linen module."""
  name = type(module).__name__
  # Arguments after self and the batch.
  arguments = _arguments(type(module).__call__, 2, f"{name}.__call__")
  # Kept between calls: JAX does not trace some parts again.
  momenta_seen: set[float] = set()

  def init(key, example):
    rngs = {"params": key, "dropout": key}
    # lazy_init computes only the variables, from the example's shape.
    variables = module.lazy_init(rngs, example, **_mode(arguments, False))
    other_collections = sorted(set(variables) - {"params", "batch_stats"})
    if other_collections:
      raise ModelError(
        f"{name} keeps {', '.join(other_collections)}, but only params and"
        " batch_stats are trained and kept"
      )
    weights, stats = variables.get("params", {}), variables.get("batch_stats")
    return base.Variables(weights, stats) if stats else weights

  def apply(params, x, train, key):
    keeps = isinstance(params, base.Variables)
    variables: dict[str, Any] = {"params": base.weights_of(params)}
    if keeps:
      variables["batch_stats"] = params.stats
    rngs = None if key is None else {"dropout": key}
    options = _mode(arguments, train)
    if not train or not keeps:
      y = module.apply(variables, x, rngs=rngs, **options)
      return y, params.stats if keeps else ()
    momenta: set[float] = set()
    # The momentum is known only when the layers are called.
    with nn.intercept_methods(_listing(momenta)):
      y, new = module.apply(
        variables, x, rngs=rngs, mutable=["batch_stats"], **options
      )
    momenta_seen.update(momenta)
    momentum = _one_momentum(momenta_seen, name)
    return y, _own(params.stats, new["batch_stats"], momentum)

  def decay(example):
    shapes, momenta = _traced(init, example, name)
    if not isinstance(shapes, base.Variables):
      return DECAY
    if not arguments or not set(arguments) & set(_MODES):
      raise ModelError(
        f"{name} has BatchNorm, but its __call__ takes no argument train, which"
        " selects the batch's or the running statistics; add it"
      )
    momenta_seen.update(momenta)
    return _one_momentum(momenta, name)

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
  """Raises ModelError if the layers of `init`, key -> parameters, average their
  statistics: a message needs the batch's own. `other_way` ends the error."""
  momenta: set[float] = set()
  with nn.intercept_methods(_listing(momenta)):
    jax.eval_shape(lambda key: init(key), jax.random.key(0))  # not cached
  if momenta - {0.0}:
    raise ModelError(
      f"its layers have BatchNorm with momentum {max(momenta)}, but the server"
      f" averages: set momentum=0.0, {other_way}"
    )


def _listing(momenta: set[float]):
  """Returns an interceptor that adds the momentum of each called BatchNorm."""

  def intercept(call, args, kwargs, context):
    if isinstance(context.module, nn.BatchNorm):
      momenta.add(context.module.momentum)
    return call(*args, **kwargs)

  return intercept


# flax.nnx.


def of_nnx(make: Callable[..., Any]) -> Model:
  """Returns the Model of a function rngs -> nnx.Module. It is called for each
  batch, and its module filled with parameters and statistics."""
  from flax import nnx

  def built(params, dropout):
    module = make(rngs=nnx.Rngs(params=params, dropout=dropout))
    if not isinstance(module, nnx.Module):
      raise ModelError(
        f"it takes rngs but returned {checks.shown(module)}; return a flax.nnx"
        " Module"
      )
    return module

  def values(module, kind):
    return nnx.to_pure_dict(nnx.state(module, kind))

  def init(key, example):
    del example
    module = built(key, key)
    weights = values(module, nnx.Param)
    stats = values(module, nnx.BatchStat)
    return base.Variables(weights, stats) if stats else weights

  def put(module, kind, tree):
    # Replace values by name; the module keeps its own structure.
    state = nnx.state(module, kind)
    nnx.replace_by_pure_dict(state, tree)
    nnx.update(module, state)

  def apply(params, x, train, key):
    module = built(0, 0 if key is None else key)
    put(module, nnx.Param, base.weights_of(params))
    keeps = isinstance(params, base.Variables)
    if keeps:
      put(module, nnx.BatchStat, params.stats)
    (module.train if train else module.eval)()
    function_name = f"{type(module).__name__}.__call__"
    y = module(x, **_mode(_arguments(module.__call__, 1, function_name), train))
    if not train or not keeps:
      return y, params.stats if keeps else ()
    new = values(module, nnx.BatchStat)
    return y, _own(params.stats, new, momentum_of(module))

  def momentum_of(module):
    nodes = (node for _, node in nnx.iter_graph(module))
    momenta = {n.momentum for n in nodes if isinstance(n, nnx.BatchNorm)}
    return _one_momentum(momenta, type(module).__name__) if momenta else DECAY

  def decay(example):
    del example
    return momentum_of(nnx.eval_shape(lambda: built(0, 0)))

  return Model(init, apply, decay)


# Two functions, with or without Haiku's positional state and rng.


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
  """Returns the parameters of a function that are passed by position."""
  parameters = inspect.signature(function).parameters.values()
  return [p for p in parameters if p.kind <= p.VAR_POSITIONAL]


def _pair(init: Callable[..., Any], apply: Callable[..., Any]) -> Model:
  """Returns the Model of a pair (init, apply).

  init is called as init(key) or init(key, example). apply is called as
  apply(params, x), with `train` and `key` by name if it takes them. If params
  are base.Variables, apply must return (output, the batch's own statistics).

  apply may also have the form of Haiku: apply(params, rng, x), apply(params,
  state, rng, x) or apply(params, state, x). With a state, init returns (params,
  state) and apply returns (output, state)."""
  names = [p.name for p in _positional(apply)]
  between = [name for name in names[1:2] if name == _STATE]
  between += [name for name in names[1 + len(between) :][:1] if name in _KEYS]
  arguments = _arguments(apply, 2 + len(between), "apply")
  draw = _drawing(init)
  if _STATE in between:
    return _stateful(draw, apply, between, arguments)

  def run(params, x, train, key):
    keys = {name: key for name in _KEYS if name in arguments}
    out = apply(
      params, *(key for _ in between), x, **_mode(arguments, train), **keys
    )
    if not isinstance(params, base.Variables):
      return out, ()
    if not isinstance(out, tuple) or len(out) != 2:
      raise ModelError(
        "init returns asgd.base.Variables, so apply must return (output,"
        f" statistics), not {checks.shown(out)}"
      )
    return out

  return Model(draw, run)


def _drawing(init: Callable[..., Any]) -> Callable[..., Any]:
  """Returns (key, example) -> the result of a pair's init."""
  needed = [
    p.name
    for p in _positional(init)
    if p.kind is p.VAR_POSITIONAL
    or (p.default is p.empty and p.name not in _MODES)
  ]
  if len(needed) not in (1, 2):
    names = ", ".join(needed)
    raise ValueError(f"init takes ({names}); write init(key) or init(key, x)")
  # Haiku's moving averages get their shapes only in training.
  mode = _mode(_arguments(init, len(needed), "init"), True)

  def draw(key, example):
    if len(needed) == 1:
      return init(key, **mode)
    return init(key, jnp.zeros(example.shape, example.dtype), **mode)

  return draw


def _stateful(
  draw: Callable[..., Any],
  apply: Callable[..., Any],
  between: list[str],
  arguments: list[str],
) -> Model:
  """Returns the Model of an (init, apply) pair; apply takes and returns a
  state.

  The statistics of this model are the state, in floating point numbers: the
  server subtracts and adds statistics. A count is exact up to 2^24.

  Args:
    draw: (key, example) -> (params, state).
    apply: the function `apply` of the pair.
    between: names of its arguments between params and x.
    arguments: names of its arguments after x.
  """

  def of_pair(result):
    if not isinstance(result, tuple) or len(result) != 2:
      raise ModelError(
        "apply takes a state, so init must return (params, state), not"
        f" {checks.shown(result)}"
      )
    if not jax.tree.leaves(result[1]):
      return result[0]
    return base.Variables(result[0], jax.tree.map(_as_float, result[1]))

  def init(key, example):
    return of_pair(draw(key, example))

  def like(x):
    """The state's structure and dtypes, which params alone do not show."""
    example = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = jax.eval_shape(lambda key: draw(key, example), jax.random.key(0))
    return shapes[1]

  def own_state(params, x):
    state = like(x)
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
    passed = {_STATE: own_state(params, x)}
    out = apply(
      base.weights_of(params),
      *(passed.get(name, key) for name in between),
      x,
      **_mode(arguments, train),
    )
    if not isinstance(out, tuple) or len(out) != 2:
      raise ModelError(
        "apply takes a state, so it must return (output, state), not"
        f" {checks.shown(out)}"
      )
    if not isinstance(params, base.Variables):
      return out[0], ()
    after = jax.tree.map(_as_float, out[1])
    return out[0], after if train else params.stats

  def inward(variables):
    # Haiku's params are a dict; (params, state) and Variables are tuples.
    return of_pair(variables) if isinstance(variables, tuple) else variables

  def outward(params, example):
    return base.weights_of(params), own_state(params, example)

  return Model(init, run, lambda example: 0.0, inward, outward)


def _as_float(value: jax.Array) -> jax.Array:
  """Returns an array of integers or flags in floating point numbers."""
  inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
  return jnp.asarray(value) if inexact else jnp.asarray(value, jnp.float32)
