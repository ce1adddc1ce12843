"""A caller's parameters: a tree of arrays, a model, or a function of a key.

A model is a callable tree, as Equinox and Flax NNX make them. Its floating
point arrays are trained, as by `eqx.partition(model, eqx.is_inexact_array)`.
Its other leaves, such as functions and rates of dropout, are constants. The
trained tree is a dict of arrays by their paths in the model, so it can travel,
be cut into shards and be saved without the model's package.
"""

import dataclasses
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from asgd import checks
from asgd import losses as losses_lib
from asgd.problems import descriptions, streams, user_code

_ARRAYS = jax.Array, np.ndarray, np.generic
_SPLIT = (
  "train the arrays alone, and join them with the rest in the loss: params,"
  " rest = eqx.partition(model, eqx.is_inexact_array) and eqx.combine(params,"
  " rest) in Equinox, nnx.split and nnx.merge in Flax NNX"
)


@dataclasses.dataclass(frozen=True)
class _Trained:
  """Stands for a trained array in a model."""

  name: str


class ModelTree(NamedTuple):
  """A callable model without the arrays that are trained."""

  template: Any  # the model, with a _Trained for each trained array

  def join(self, arrays: Any) -> Any:
    """Returns the model with these arrays: name -> array."""

    def leaf(value):
      return arrays[value.name] if isinstance(value, _Trained) else value

    return jax.tree.map(leaf, self.template)

  def digest(self) -> str:
    """Returns a checksum of the constants, which a results folder records."""
    leaves, structure = jax.tree.flatten(self.template)
    # A function has another address in each process.
    texts = [re.sub(r" at 0x\w+", "", str(structure))]
    for leaf in leaves:
      if isinstance(leaf, np.ndarray):
        texts.append(f"{leaf.dtype}{leaf.shape}{leaf.tobytes().hex()}")
      elif inspect.isfunction(leaf):
        texts.append(descriptions.describe_object(leaf))
      else:
        texts.append(user_code.name_of(leaf))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


class Parameters(NamedTuple):
  """Initial parameters, and the model that they belong to."""

  init: Callable[[jax.Array], Any]  # key -> the tree that is trained
  model: ModelTree | None = None

  def outward(self, params: Any) -> Any:
    """Returns trained parameters in the caller's form."""
    return params if self.model is None else self.model.join(params)

  def loss_of(self, loss: losses_lib.Loss) -> losses_lib.Loss:
    """Returns a loss of the caller's form as a loss of the trained tree."""
    model = self.model
    if model is None:
      return loss
    return lambda params, batch, key: loss(model.join(params), batch, key)


def is_model(value: Any) -> bool:
  """Whether a value is callable and holds arrays, as a model of Equinox does.
  It is then parameters, not a function that makes parameters."""
  are_arrays = (isinstance(x, _ARRAYS) for x in jax.tree.leaves(value))
  is_partial = isinstance(value, functools.partial)  # jax.tree_util.Partial is
  return callable(value) and not is_partial and any(are_arrays)


def _is_constant(value: Any) -> bool:
  """Whether a value is a variable of Flax NNX but no parameter, such as the
  statistics of BatchNorm."""
  nnx = sys.modules.get("flax.nnx")  # a variable exists only if it is imported
  return (
    nnx is not None
    and isinstance(value, nnx.Variable)
    and not isinstance(value, nnx.Param)
  )


def _refusal(path: Any, leaf: Any, reason: str) -> ValueError:
  """Returns the error for a leaf of the parameters."""
  name = f"params{jax.tree_util.keystr(path)}"
  return ValueError(f"{name} is {checks.shown(leaf)}, {reason}")


def _as_arrays(params: Any) -> Any:
  """Returns a tree as arrays of JAX; ValueError for a leaf that is no array."""

  def array(path, leaf):
    if callable(leaf):
      raise _refusal(path, leaf, f"which cannot be trained: {_SPLIT}")
    try:
      return jnp.array(leaf)  # a copy: the caller may change its array
    except (TypeError, ValueError) as error:
      reason = "and parameters are arrays: drop it, or bind it to the loss with"
      raise _refusal(path, leaf, f"{reason} functools.partial") from error

  return jax.tree_util.tree_map_with_path(array, params)


def _split(model: Any) -> tuple[dict[str, Any], ModelTree]:
  """Returns the arrays of a model by their paths, and the model without them.

  Raises:
    ValueError: for tied weights, for variables of Flax NNX that a training
      would have to update without a gradient, and for constants that are
      computed from a key.
  """
  # Tied weights are one array with two paths; as a tree, they are two leaves.
  arrays = [x for x in jax.tree.leaves(model) if isinstance(x, _ARRAYS)]
  if len({id(x) for x in arrays}) < len(arrays):
    raise ValueError(
      "params is a model that holds an array twice (tied weights), and the two"
      f" would be trained separately: {_SPLIT}; or give a pair of a function"
      " rngs -> nnx module, and a criterion"
    )
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    model, is_leaf=_is_constant
  ):
    if _is_constant(leaf):
      raise _refusal(path, leaf, f"which cannot be trained: {_SPLIT}")
  trained_arrays = {}

  def replace_leaf(path, leaf):
    is_array = isinstance(leaf, _ARRAYS)
    if is_array and jnp.issubdtype(leaf.dtype, jnp.inexact):
      name = jax.tree_util.keystr(path).removeprefix(".")
      trained_arrays[name] = jnp.array(leaf)
      return _Trained(name)
    if isinstance(leaf, jax.core.Tracer):
      reason = "a constant that is made from the key: give the model itself"
      raise _refusal(path, leaf, f"{reason} instead of a function of a key")
    # Only NumPy arrays travel to other processes; they have no keys.
    return np.asarray(leaf) if is_array and not streams.is_key(leaf) else leaf

  template = jax.tree_util.tree_map_with_path(replace_leaf, model)
  if not trained_arrays:
    raise ValueError(
      f"params is a model without an array of floats: {checks.shown(model)}"
    )
  return trained_arrays, ModelTree(template)


def read(user_params: Any) -> Parameters:
  """Reads parameters: a tree of arrays, a callable model that holds arrays, or
  a function of a key that makes one of the two.

  Raises ValueError for anything else.

  Example:
    >>> params = read({"w": np.ones(2)})
    >>> print(params.init(jax.random.key(0)))
    {'w': Array([1., 1.], dtype=float32)}
  """
  if isinstance(user_params, nn.Module):
    raise ValueError(
      "params is a flax module, which holds no parameters: give its variables,"
      " or the pair (module, criterion) as the loss and params=None"
    )
  if is_model(user_params):
    arrays, model = _split(user_params)
    # NumPy copies travel to other processes, and survive the donation of a
    # run's buffers.
    arrays = jax.tree.map(np.asarray, arrays)
    return Parameters(lambda key: jax.tree.map(jnp.asarray, arrays), model)
  if callable(user_params):
    return _of_function(user_params)
  if not jax.tree.leaves(user_params):
    raise ValueError(
      f"params holds no array: {checks.shown(user_params)}; give a tree of"
      " arrays, or a function of a key that makes one"
    )
  params = jax.tree.map(np.asarray, _as_arrays(user_params))
  return Parameters(lambda key: jax.tree.map(jnp.asarray, params))


def _of_function(function: Callable[..., Any]) -> Parameters:
  """Reads a function of a key that makes a tree of arrays or a model."""
  if not streams.accepts(function, 1):
    raise ValueError(
      "params must be a tree of arrays, or a function of a key that makes"
      f" one; it takes {streams.arguments_of(function)}"
    )
  models_traced: list[ModelTree] = []  # eval_shape itself returns only arrays

  def trace(key):
    result = function(key)
    if is_model(result):
      models_traced.append(_split(result)[1])
    return ()

  with checks.user_code("params cannot be made", passes=(ValueError,)):
    jax.eval_shape(trace, jax.random.key(0))
  # The last trace has the constants of the model; init makes its arrays.
  if models_traced:
    return Parameters(lambda key: _split(function(key))[0], models_traced[-1])
  return Parameters(lambda key: _as_arrays(function(key)))
