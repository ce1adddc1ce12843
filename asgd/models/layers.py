"""Models as tuples of layers, which a pipeline can cut anywhere.

A model is a tuple of modules. layers[a:b] with params[a:b] is a stage; the
complete model is the stage with a = 0, b = len(layers). A residual block with
its skip connection is one layer. Parameters are also a tuple, with one dict for
each layer; models with BatchNorm have `base.Variables` of two such tuples. A
model that cannot be cut is a `Model` of `asgd.models.own`; `init` and `apply`
accept both.

A layer is a flax module called as layer(x, train=bool). Index letters:
  B  examples
  H, W, C  height, width, channels of an image
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from asgd import base, internals
from asgd.models.own import Model

Layers = tuple[nn.Module, ...]

# Larger sizes are refused before any layer is created.
MOST_LAYERS = 200  # GPT-3 has 96 blocks, the ResNet of CIFAR 110 layers
MOST_FEATURES = 10**6  # features of a layer, or rows of a table


def init(
  layers: Layers | Model,
  key: jax.Array,
  example: jax.Array | jax.ShapeDtypeStruct,
) -> optax.Params:
  """Draws the parameters of every layer of a model, in float32.

  Layer i draws from fold_in(key, i), so its values depend on no other layer.
  `example` is a batch of any size, of which only shape and dtype are read. Only
  the parameters are computed: this is cheap outside of jit, and works under it.

  Returns:
    A tuple with a dict of weights per layer, {} for a layer without weights. If
    a layer has statistics: `base.Variables` of this tuple and of a tuple with a
    dict of statistics per layer (mean 0, variance 1).
  """
  weights, stats = [], []
  has_64_bit_types = jax.config.jax_enable_x64  # type: ignore[attr-defined]
  # `lazy_init` needs the dtype that JAX will compute with.
  dtype = jax.dtypes.canonicalize_dtype(example.dtype)  # float64 may be off
  x = jax.ShapeDtypeStruct(example.shape, dtype)
  if isinstance(layers, Model):
    return layers.init(key, x)
  for i, layer in enumerate(layers):
    variables = _draw(layer, jax.random.fold_in(key, i), x)
    x = _call_cached(_shape_of_output, layer, x, has_64_bit_types)
    weights.append(variables.get("params", {}))
    stats.append(variables.get("batch_stats", {}))
  if any(stats):
    return base.Variables(tuple(weights), tuple(stats))
  return tuple(weights)


def _draw(layer: nn.Module, key: jax.Array, x: jax.ShapeDtypeStruct) -> Any:
  """Returns the variables of a layer, for an input of the shape of `x`."""
  if isinstance(key, jax.core.Tracer):
    # `own.check_layers` intercepts the calls of layers while this is traced.
    return layer.lazy_init(key, x, train=False)
  has_64_bit_types = jax.config.jax_enable_x64  # type: ignore[attr-defined]
  return _call_cached(_make_draw, layer, x, key.aval, has_64_bit_types)(key)


def _make_draw(
  layer: nn.Module,
  x: jax.ShapeDtypeStruct,
  key: jax.core.ShapedArray,
  has_64_bit_types: bool,
) -> Callable[[jax.Array], Any]:
  """Returns a function of a key that repeats the steps of `lazy_init`, without
  tracing the layer again: tracing took most of the time."""
  del has_64_bit_types

  def draw_by_flax(key):
    return layer.lazy_init(key, x, train=False)

  steps, shapes = jax.make_jaxpr(draw_by_flax, return_shape=True)(key)
  structure = jax.tree.structure(shapes)
  run_steps = internals.imported("jax.extend.core.jaxpr_as_fun")(steps)
  return lambda key: jax.tree.unflatten(structure, run_steps(key))


def _shape_of_output(
  layer: nn.Module, x: jax.ShapeDtypeStruct, has_64_bit_types: bool
) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of a layer's output. `has_64_bit_types` is a
  setting of JAX, which is only needed in the cache's key."""
  del has_64_bit_types
  draw = functools.partial(layer.init_with_output, train=False)
  key = jax.eval_shape(jax.random.key, 0)
  return jax.eval_shape(draw, key, x)[0]


@functools.lru_cache(maxsize=2048)
def _cached_result(fn, *arguments):
  """Calls a function, with a cache of results."""
  return fn(*arguments)


def _call_cached(
  fn: Callable[..., Any], layer: nn.Module, *arguments: Any
) -> Any:
  """Calls a function of a layer, or returns the result of an earlier call."""
  try:
    return _cached_result(fn, layer, *arguments)
  except TypeError:  # the layer cannot be hashed, so the result is not cached
    return fn(layer, *arguments)


def apply(
  layers: Layers | Model, params: Any, x: jax.Array, *,
  train: bool = False, key: jax.Array | None = None, first: int = 0,
) -> tuple[jax.Array, optax.Params]:
  """Runs the layers, or the slice of them that is one stage.

  Computes in the dtype of the weights: a floating point `x` is cast to it.

  Args:
    layers: the model, or layers[a:b] of it.
    params: see `init`, or a slice [a:b] (of both tuples of `Variables`).
    x: a batch.
    train: normalise by the batch's statistics instead of those in `params`, and
      apply dropout.
    key: for layers that draw "dropout"; layer i draws from fold_in(key, i).
    first: index of layers[0] in the complete model, so that a stage draws the
      same numbers as the complete model.

  Returns:
    (y, stats): the output, and the statistics used, in the structure of
    `params.stats`. In training they are the batch's own (mean and biased
    variance, not averaged), otherwise the given ones; () for params without
    statistics.
  """
  weights: Any = base.weights_of(params)
  if isinstance(layers, Model):
    return layers.apply(params, _cast(x, weights), train, key)
  if len(weights) != len(layers):
    raise ValueError(
      f"{len(layers)} layers need a dict of parameters each, not"
      f" {len(weights)}; cut both at the same layer"
    )
  has_stats = isinstance(params, base.Variables)
  stats_before = params.stats if has_stats else ({},) * len(layers)

  x, stats = _cast(x, weights), []
  for i, layer in enumerate(layers):
    variables = {"params": weights[i], "batch_stats": stats_before[i]}
    rngs = None
    if key is not None:
      rngs = {"dropout": jax.random.fold_in(key, first + i)}
    # In training, flax returns the batch's statistics as changed variables.
    mutable = ["batch_stats"] if train else []
    x, changed_variables = layer.apply(
      variables, x, train=train, rngs=rngs, mutable=mutable
    )
    stats.append(
      changed_variables.get("batch_stats", {}) if train else stats_before[i]
    )
  return x, tuple(stats) if has_stats else ()


def _cast(x: jax.Array, weights: Any) -> jax.Array:
  """Returns a floating point `x` in the dtype of the weights."""
  x, leaves = jnp.asarray(x), jax.tree.leaves(weights)
  if leaves and jnp.issubdtype(x.dtype, jnp.floating):
    x = x.astype(jnp.result_type(*leaves))
  return x


def count(params: optax.Params) -> int:
  """Returns the number of trained parameters, statistics not included."""
  return sum(leaf.size for leaf in jax.tree.leaves(base.weights_of(params)))
