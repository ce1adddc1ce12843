"""The sharding of parameters, gradients and optimizer state in ZeRO.

A leaf is divided over the data axis along one dimension: the longest dimension
that the axis divides and that no other axis divides already. If there is no
such dimension, the leaf is kept whole. The global array keeps its shape, so a
checkpoint depends neither on the stage of ZeRO nor on the number of devices.

Reference:
  Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
  parameter models", SC 2020, section 5.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from asgd.parallel import meshes, precision

_AXIS = meshes.DATA
Specs = Callable[[optax.Params], Any]  # params -> a tree of PartitionSpecs
WHOLE = -1  # instead of a dimension: the leaf is not divided


def replicated(params: optax.Params) -> Any:
  """Returns the specs of parameters that are whole on every device."""
  return jax.tree.map(lambda _: P(), params)


def add_data_axis(shape: tuple[int, ...], spec: P, devices: int) -> P:
  """Returns the spec of an array, with the data axis of `devices` devices.
  The axis divides the longest dimension that it can and no axis divides yet; of
  equal dimensions the first. Returns `spec` if there is no such dimension.

  Example:
    >>> tuple(add_data_axis((3, 3, 16, 32), P(), 8))
    (None, None, None, 'data')
    >>> tuple(add_data_axis((10,), P(), 8))
    ()
  """
  # A PartitionSpec may leave out its last dimensions.
  entries = [*spec, *(None,) * (len(shape) - len(spec))]
  dims = [
    i
    for i, length in enumerate(shape)
    if entries[i] is None and length and length % devices == 0
  ]
  if not dims:
    return spec
  entries[max(dims, key=lambda i: shape[i])] = _AXIS
  return P(*entries)


def dimension(spec: P) -> int:
  """Returns the dimension that the data axis divides, or WHOLE."""
  return tuple(spec).index(_AXIS) if _AXIS in tuple(spec) else WHOLE


def state_specs(
  state: optax.OptState,
  weights: optax.Params,
  specs: Any,
  choose: Callable[[jax.Array], P],
) -> Any:
  """Returns specs of the optimizer's state. A leaf with the path and shape of a
  weight gets the spec of that weight; `choose` makes the spec of any other
  leaf. A wrong spec costs time and changes no number."""
  leaves = jax.tree_util.tree_leaves_with_path(weights)
  by_path = {
    (path, leaf.shape): spec
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True)
  }

  def spec_of(path, leaf):
    # A moment of weight w has a path such as [0].mu['w']: it ends with the path
    # of w.
    ends = ((path[start:], leaf.shape) for start in range(len(path) + 1))
    spec = next((by_path[end] for end in ends if end in by_path), None)
    return choose(leaf) if spec is None else spec

  return jax.tree_util.tree_map_with_path(spec_of, state)


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
  """Returns, as a policy of jax.checkpoint, whether a result is kept. The
  backward repeats each custom_vjp_call of the loss: `gather` is one."""
  return primitive.name != "custom_vjp_call"


def gather(leaf: jax.Array, dim: int, reduce: Any) -> jax.Array:
  """Joins the parts of a leaf along `dim` (from `dimension`). The derivative is
  reduce-scattered in the dtype `reduce`; None: in its own dtype."""
  if dim == WHOLE:
    return leaf

  @jax.custom_vjp
  def gathered(part):
    return jax.lax.all_gather(part, _AXIS, axis=dim, tiled=True)

  # JAX's own derivative would reduce-scatter in the dtype of the weights.
  def backward(_, cotangent):
    total = scatter(precision.cast(cotangent, reduce), dim)
    return (total.astype(cotangent.dtype),)

  gathered.defvjp(lambda part: (gathered(part), None), backward)
  return gathered(leaf)


def scatter(leaf: jax.Array, dim: int) -> jax.Array:
  """Reduce-scatters a gradient along `dim`; with WHOLE returns it unchanged, as
  this device's summand."""
  if dim == WHOLE:
    return leaf
  return jax.lax.psum_scatter(leaf, _AXIS, scatter_dimension=dim, tiled=True)
