"""Images split by rows: what neighbours need of one another, and no more.

Each device of an axis holds some rows of every image, from the first layer to
the last. A convolution reads a row or two beyond its own (the halo): they come
from the neighbours by `ppermute`, zeros at the image's border. GroupNorm adds
up its moments over the axis, the head its mean. Everything else of a ResNet is
at one pixel.

Layers are not written again. While `apply` runs, flax hands each call of a
convolution or a norm inside of `asgd.models`' layers to this module
(`nn.intercept_methods`), which runs the same module on more rows. So the
parameters, too, are those of the whole model.

In DistBelief's models the pixels of an image do not share their weights
(`locally_connected`): the rows of a device have weights that no other device
holds, and all that is ever sent, forward and backward, is the boundary.

Index letters:
  B  examples
  H  rows of the image, of which a device has H / r
  W  columns
  C  channels
  r  devices of the axis "rows"

References:
  Dean et al., "Large scale distributed deep networks", NIPS 2012, section 3.
  Dryden et al., "Improving strong-scaling of CNN training by exploiting
  finer-grained parallelism", IPDPS 2019.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import base, checks, models
from asgd.parallel import meshes

_AXIS = meshes.ROWS
_ROWS = 1  # the dimension of [B, H, W, C]


def exchange(x: jax.Array, before: int, after: int) -> jax.Array:
  """Adds the neighbours' nearest rows to this device's.

  float[B, H / r, W, C] -> float[B, before + H / r + after, W, C], with zeros
  beyond the image; ValueError if neighbours have fewer rows than are needed.
  """
  size, rows = jax.lax.axis_size(_AXIS), x.shape[_ROWS]
  if max(before, after) > rows:
    raise ValueError(
      f"a device of the axis {_AXIS!r} has {rows} rows, and its neighbour needs"
      f" {max(before, after)} of them: use fewer devices or larger images"
    )
  down = [(i, i + 1) for i in range(size - 1)]
  parts = [x]
  if before:
    parts.insert(0, jax.lax.ppermute(x[:, rows - before :], _AXIS, down))
  if after:
    up = [(b, a) for a, b in down]
    parts.append(jax.lax.ppermute(x[:, :after], _AXIS, up))
  return jnp.concatenate(parts, axis=_ROWS)


def rows(x: jax.Array) -> jax.Array:
  """Returns this device's rows of whole images, float[B, H, W, C] ->
  float[B, H / r, W, C]; ValueError if the axis does not divide them."""
  size = jax.lax.axis_size(_AXIS)
  if x.ndim != 4 or x.shape[_ROWS] % size:
    raise ValueError(
      f"images [B, H, W, C] of shape {x.shape} have no rows that can be divided"
      f" among the {size} devices of the axis {_AXIS!r}"
    )
  return meshes.part(x, _AXIS, _ROWS)


def _pair(value: Any) -> tuple[int, int]:
  return (value, value) if isinstance(value, int | None) else tuple(value)


def convolve(module: nn.Module, x: jax.Array) -> jax.Array:
  """Runs a convolution on this device's rows, as if they were all there.

  ValueError for other than two dimensions, dilation, a padding that is not of
  zeros, or where the rows that come out are not the same share as those that
  went in.
  """
  kernel = tuple(module.kernel_size)
  stride = tuple(n or 1 for n in _pair(module.strides))
  here, columns = x.shape[1:3]
  whole = here * jax.lax.axis_size(_AXIS)
  if (
    len(kernel) != 2
    or module.padding in ("CIRCULAR", "REFLECT", "CAUSAL")
    or {*_pair(module.kernel_dilation), *_pair(module.input_dilation)} - {1}
  ):
    raise ValueError(
      "only convolutions of images without dilation, and padded with zeros, can"
      f" be split by rows; not {module}"
    )
  padding = module.padding
  if isinstance(padding, str):
    padding = jax.lax.padtype_to_pads((whole, columns), kernel, stride, padding)
  (low, high), across = map(_pair, _pair(padding))
  k, s = kernel[0], stride[0]
  out = (whole + low + high - k) // s + 1  # rows
  if here % s or out != whole // s:
    raise ValueError(
      f"a convolution with a kernel of {k} rows, stride {s} and padding"
      f" {(low, high)} makes {out} rows of {whole}, which cannot be divided as"
      f" {here} on each device of the axis {_AXIS!r}: use fewer devices, or"
      " images with more rows"
    )
  x = exchange(x, low, max(k - s - low, 0))
  return _rerun(module, x, padding=((0, 0), across))


_DONE = "rows"  # the name of modules that see to their rows already


def _rerun(module, x, **changes):
  changed = module.clone(parent=None, name=_DONE, **changes)
  return changed.apply({"params": module.variables["params"]}, x)


def _intercept(method, args, kwargs, context):
  module = context.module
  if context.method_name != "__call__" or module.name == _DONE:
    return method(*args, **kwargs)
  if isinstance(module, nn.Conv | nn.ConvLocal):
    return convolve(module, *args)
  if isinstance(module, nn.GroupNorm):
    return _rerun(module, *args, axis_name=_AXIS)
  if isinstance(module, nn.BatchNorm):
    raise ValueError(
      "the statistics of BatchNorm are not kept by rows; use norm='group'"
    )
  if isinstance(module, nn.Dense) and isinstance(module.parent, models.Head):
    # What comes is the mean over this device's rows.
    return method(jax.lax.pmean(args[0], _AXIS), **kwargs)
  return method(*args, **kwargs)


class Local(nn.Module):
  """A locally connected layer and ReLU: each pixel has a kernel of its own."""

  features: int
  kernel: int = 3
  stride: int = 1

  @nn.compact
  def __call__(self, x, *, train: bool):
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
  classes: int, *, features: Sequence[int] = (8, 16)
) -> models.Layers:
  """DistBelief's kind of model: locally connected layers, then a head.

  All layers but the first halve the image. ValueError for a number that is not
  positive and whole, or no features.
  """
  if not features:
    raise ValueError("features needs a width for each layer, as (8, 16)")
  checks.whole("classes", classes)
  for width in features:
    checks.whole("each of features", width)
  first, *others = features
  others = (Local(width, stride=2) for width in others)
  return (Local(first), *others, models.Head(classes))


_LAYERS = (models.Stem, models.BasicBlock, models.WideBlock, models.Head, Local)


def check(layers: models.Layers) -> None:
  """Raises ValueError for a layer that cannot be split by rows."""
  kinds = ", ".join(kind.__name__ for kind in _LAYERS)
  for layer in layers:
    if not isinstance(layer, _LAYERS):
      raise ValueError(
        f"a {type(layer).__name__} cannot be split by rows; these can: {kinds}"
      )


def apply(
  layers: models.Layers,
  params: optax.Params,
  x: jax.Array,
  *,
  train: bool = False,
  key: jax.Array | None = None,
) -> tuple[jax.Array, optax.Params]:
  """`models.apply`, on this device's rows, float[B, H / r, W, C].

  For use inside shard_map. Parameters are those of the whole model, of a Local
  this device's part (`partition`). What the Head gives is the same on all
  devices. ValueError for a layer that cannot be split, or too few rows.
  """
  check(layers)
  with nn.intercept_methods(_intercept):
    return models.apply(layers, params, x, train=train, key=key)


def partition(params: optax.Params) -> Any:
  """Returns the PartitionSpecs of a model's parameters: those of locally
  connected layers are split by rows, and nothing else."""

  def spec(path, _):
    names = {getattr(entry, "key", None) for entry in path}
    return P(_AXIS) if "local" in names else P()

  return jax.tree_util.tree_map_with_path(spec, base.weights_of(params))
