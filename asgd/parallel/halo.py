"""Images in tiles; neighbouring tiles exchange their boundaries.

Each device of the axes "rows" and "columns", or of one of these axes, holds a
tile of every image in all layers. A convolution reads rows and columns beyond
the tile (the halo): the neighbours send them with `ppermute`, and at the
image's border they are zeros. Columns are sent with their halo of rows, which
has the corners of the diagonal neighbours. GroupNorm adds up its moments over
the axes, and the head its mean. All other operations of a ResNet work on each
pixel separately.

The layers of `asgd.models` are used as they are. While `apply` runs, flax
passes each call of a convolution or a norm inside a layer to this module
(`nn.intercept_methods`), which runs the same flax module on more pixels. So the
parameters have the shapes of the whole model.

In DistBelief's models (`locally_connected`) pixels share no weights: a tile's
weights are on one device, and only boundaries are sent, forward and backward.

Index letters:
  B  examples
  H  rows of the image, of which a device has H / r
  W  columns, of which it has W / c
  C  channels
  r  devices of the axis "rows", 1 without it
  c  devices of the axis "columns", 1 without it

References:
  Dean et al., "Large scale distributed deep networks", NIPS 2012, section 3.
  Dryden et al., "Improving strong-scaling of CNN training by exploiting
  finer-grained parallelism", IPDPS 2019.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import base, checks, models
from asgd.parallel import meshes

AXES = meshes.ROWS, meshes.COLUMNS
_DIMS = {meshes.ROWS: 1, meshes.COLUMNS: 2}  # of [B, H, W, C]


def _axes() -> tuple[str, ...]:
  """Returns the axes of AXES that the mesh has, inside shard_map."""
  mesh_axes = jax.sharding.get_abstract_mesh().axis_names
  return tuple(axis for axis in AXES if axis in mesh_axes)


def exchange(
  x: jax.Array, before: int, after: int, axis: str = meshes.ROWS
) -> jax.Array:
  """Adds the nearest rows (or columns) of the neighbours to a device's tile.

  float[B, H / r, W / c, C] -> float[B, before + H / r + after, W / c, C], and
  likewise for columns, with zeros beyond the image. Raises ValueError if a
  neighbour has fewer rows than `before` or `after`.
  """
  dim = _DIMS[axis]
  n_devices, tile_size = jax.lax.axis_size(axis), x.shape[dim]
  if max(before, after) > tile_size:
    raise ValueError(
      f"a device of the axis {axis!r} has {tile_size} {axis}, and its neighbour"
      f" needs {max(before, after)} of them: use fewer devices or larger images"
    )
  # The pairs form no ring: a device at the border receives nothing. ppermute
  # then returns zeros, the padding of a convolution.
  to_next = [(i, i + 1) for i in range(n_devices - 1)]
  parts = [x]
  if before:
    last_rows = jax.lax.slice_in_dim(x, tile_size - before, tile_size, axis=dim)
    parts.insert(0, jax.lax.ppermute(last_rows, axis, to_next))
  if after:
    to_previous = [(b, a) for a, b in to_next]
    first_rows = jax.lax.slice_in_dim(x, 0, after, axis=dim)
    parts.append(jax.lax.ppermute(first_rows, axis, to_previous))
  return jnp.concatenate(parts, axis=dim)


def tile(x: jax.Array) -> jax.Array:
  """Returns this device's tile of whole images, float[B, H, W, C] ->
  float[B, H / r, W / c, C]; ValueError if the axes do not divide them."""
  for axis in _axes():
    size, dim = jax.lax.axis_size(axis), _DIMS[axis]
    if x.ndim != 4 or x.shape[dim] % size:
      raise ValueError(
        f"images [B, H, W, C] of shape {x.shape} have no {axis} that can be"
        f" divided among the {size} devices of the axis {axis!r}"
      )
    x = meshes.part(x, axis, dim)
  return x


def _pair(value: Any) -> tuple[int, int]:
  return (value, value) if isinstance(value, int | None) else tuple(value)


def convolve(module: nn.Module, x: jax.Array) -> jax.Array:
  """Computes this device's tile of a convolution of whole images.

  Raises ValueError for a convolution without exactly two dimensions, for
  dilation, for a padding that is not of zeros, and for outputs that cannot be
  divided into tiles as the inputs are.
  """
  kernel = tuple(module.kernel_size)
  stride = tuple(n or 1 for n in _pair(module.strides))
  sizes = {axis: jax.lax.axis_size(axis) for axis in _axes()}
  image_sizes = [
    x.shape[dim] * sizes.get(axis, 1) for axis, dim in _DIMS.items()
  ]
  if (
    len(kernel) != 2
    or module.padding in ("CIRCULAR", "REFLECT", "CAUSAL")
    or {*_pair(module.kernel_dilation), *_pair(module.input_dilation)} - {1}
  ):
    raise ValueError(
      "only convolutions of images without dilation, and padded with zeros, can"
      f" be split into tiles; not {module}"
    )
  # [1] The padding as numbers; "SAME" is the padding of the whole image.
  padding = module.padding
  if isinstance(padding, str):
    padding = jax.lax.padtype_to_pads(image_sizes, kernel, stride, padding)
  pads = [_pair(pair) for pair in _pair(padding)]
  # [2] The halo of each axis. Rows come first, so that columns are sent with
  # their corners.
  for axis in sizes:
    dim = _DIMS[axis] - 1  # without the axis of examples
    k, s, image_size = kernel[dim], stride[dim], image_sizes[dim]
    low, high = pads[dim]
    tile_size = image_size // sizes[axis]
    n_outputs = (image_size + low + high - k) // s + 1
    if tile_size % s or n_outputs != image_size // s:
      raise ValueError(
        f"a convolution with a kernel of {k} {axis}, stride {s} and padding"
        f" {(low, high)} makes {n_outputs} {axis} of {image_size}, which cannot"
        f" be divided as {tile_size} on each device of the axis {axis!r}: use"
        f" fewer devices, or images with more {axis}"
      )
    # The last window begins s pixels before a tile's end, and reads k pixels.
    x = exchange(x, low, max(k - s - low, 0), axis)
    pads[dim] = 0, 0  # the halo contains the padding
  # [3] The same module, on the tile and its halo.
  return _rerun(module, x, padding=tuple(pads))


_RERUN_NAME = "tile"  # name of the copies, which `_intercept` does not change


def _rerun(module: nn.Module, x: jax.Array, **changes: Any) -> Any:
  """Applies a copy of a module with changed fields and the same parameters."""
  copy = module.clone(parent=None, name=_RERUN_NAME, **changes)
  return copy.apply({"params": module.variables["params"]}, x)


def _intercept(
  method: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
  """Runs a method of a module on a tile; flax calls this function instead of
  each method."""
  module = context.module
  if context.method_name != "__call__" or module.name == _RERUN_NAME:
    return method(*args, **kwargs)
  if isinstance(module, nn.Conv | nn.ConvLocal):
    return convolve(module, *args)
  if isinstance(module, nn.GroupNorm):
    # flax averages the moments over these axes.
    return _rerun(module, *args, axis_name=_axes())
  if isinstance(module, nn.BatchNorm):
    raise ValueError(
      "the statistics of BatchNorm are not kept by tiles; use norm='group'"
    )
  if isinstance(module, nn.Dense) and isinstance(module.parent, models.Head):
    # The input is the mean over this device's tile.
    return method(jax.lax.pmean(args[0], _axes()), **kwargs)
  return method(*args, **kwargs)


class Local(nn.Module):
  """A locally connected layer, with a kernel for each pixel, and ReLU."""

  features: int
  kernel: int = 3
  stride: int = 1

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    """[B, H, W, C] -> [B, H / stride, W / stride, features]."""
    del train
    low = (self.kernel - 1) // 2
    pads = (low, self.kernel - 1 - low)
    x = nn.ConvLocal(
      self.features,
      (self.kernel, self.kernel),
      self.stride,
      padding=(pads, pads),
      kernel_init=nn.initializers.he_normal(),
      name="local",
    )(x)
    return nn.relu(x)


def locally_connected(
  classes: int, *, features: Sequence[int] = (8, 16), kernel: int = 3
) -> models.Layers:
  """Returns DistBelief's kind of model: locally connected layers and a head.

  All layers but the first halve the image. Raises ValueError for a number that
  is not positive and whole, and for no features.

  Args:
    classes: number of logits.
    features: number of feature maps of each layer; in the paper 8 to 36.
    kernel: side, in pixels, of the square that a pixel reads; in the paper 10.
  """
  if not features:
    raise ValueError("features needs a width for each layer, as (8, 16)")
  checks.integer("classes", classes)
  checks.integer("kernel", kernel)
  for width in features:
    checks.integer("each of features", width)
  first, *others = features
  halving = (Local(width, kernel, stride=2) for width in others)
  return (Local(first, kernel), *halving, models.Head(classes))


_LAYERS = (models.Stem, models.BasicBlock, models.WideBlock, models.Head, Local)


def check(layers: models.Layers) -> None:
  """Raises ValueError for a layer that cannot be split into tiles."""
  kinds = ", ".join(kind.__name__ for kind in _LAYERS)
  for layer in layers:
    if not isinstance(layer, _LAYERS):
      raise ValueError(
        f"a {type(layer).__name__} cannot be split into tiles; these can:"
        f" {kinds}"
      )


def apply(
  layers: models.Layers,
  params: optax.Params,
  x: jax.Array,
  *,
  train: bool = False,
  key: jax.Array | None = None,
) -> tuple[jax.Array, optax.Params]:
  """Applies layers to this device's tile, float[B, H / r, W / c, C], as
  `models.apply` does to whole images.

  Call it inside shard_map. Parameters have the shapes of the whole model; the
  parameters of a Local are this device's part (`partition`). A Head returns the
  same output on all devices. Raises ValueError for a layer that cannot be
  split, and for a tile that is too small.
  """
  check(layers)
  with nn.intercept_methods(_intercept):
    return models.apply(layers, params, x, train=train, key=key)


def partition(
  params: optax.Params, axes: Sequence[str] = (meshes.ROWS,)
) -> Any:
  """Returns the PartitionSpecs of a model's parameters on a mesh with these
  axes. Locally connected layers are split as the images are; other parameters
  are whole on every device."""
  # A locally connected kernel is [H, W, ...]: its first axes are the pixels.
  spec_of_tile = P(*(axis if axis in axes else None for axis in AXES))

  def spec(path, _):
    # `Local` names its layer "local".
    names = {getattr(entry, "key", None) for entry in path}
    return spec_of_tile if "local" in names else P()

  return jax.tree_util.tree_map_with_path(spec, base.weights_of(params))
