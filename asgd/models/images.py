"""Models of images: perceptron, small CNN, ResNet, wide ResNet.

References:
  He et al., "Deep residual learning for image recognition", CVPR 2016.
  Zagoruyko and Komodakis, "Wide residual networks", BMVC 2016.
  Wu and He, "Group normalization", ECCV 2018.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from asgd import checks, names
from asgd.models.layers import MOST_FEATURES, MOST_LAYERS, Layers

NORMS = ("group", "batch", "none")

_EPSILON = 1e-5  # added to variances, by both norms


def _conv(
  features: int,
  size: int = 3,
  *,
  stride: int = 1,
  bias: bool = False,
  towers: int = 1,
  name: str,
) -> nn.Conv:
  """Returns a convolution with an output of the input's size / stride. Each of
  the `towers` reads its part of the channels."""
  # Not "SAME" padding: for images of even size and stride 2 it pads only right
  # and bottom, so kernels centre on odd pixels, but shortcuts select the even
  # pixels.
  return nn.Conv(
    features,
    (size, size),
    stride,
    padding=size // 2,
    use_bias=bias,
    feature_group_count=towers,
    kernel_init=nn.initializers.he_normal(),
    name=name,
  )


def _norm(
  layer: nn.Module, x: jax.Array, train: bool, name: str
) -> jax.Array:
  """Applies a layer's norm."""
  if layer.norm == "group":
    return nn.GroupNorm(layer.groups, epsilon=_EPSILON, name=name)(x)
  if layer.norm == "batch":
    # Momentum 0 returns the batch's own statistics; the server averages them.
    return nn.BatchNorm(
      use_running_average=not train, momentum=0.0, epsilon=_EPSILON, name=name
    )(x)
  return x


def _check_images(x: jax.Array) -> None:
  """Raises ValueError unless `x` has the axes of images."""
  if x.ndim != 4:
    raise ValueError(
      f"a convolution takes images [B, H, W, C], not an array of shape"
      f" {x.shape}; reshape the batch"
    )


def _check_patch(x: jax.Array) -> None:
  """Raises ValueError for an image that is smaller than a 2x2 patch."""
  if min(x.shape[1:3]) < 2:
    raise ValueError(
      f"no 2x2 patch to pool in an image of shape {x.shape[1:]}; give fewer"
      f" features or larger images"
    )


def _pool(x: jax.Array) -> jax.Array:
  """Returns the maximum of each 2x2 patch: [B, H, W, C] -> [B, H // 2, W // 2,
  C]."""
  _check_patch(x)
  # Not nn.max_pool: its gradient is a scatter, so slow on XLA:CPU that the
  # step of a small CNN takes twice as long.
  b, h, w, c = x.shape
  # Drop an odd last row and column.
  x = x[:, : h // 2 * 2, : w // 2 * 2]
  return x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


class Flatten(nn.Module):
  """Makes a vector of each example: [B, ...] -> [B, C]."""

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    del train
    return x.reshape(x.shape[0], -1)


class Dense(nn.Module):
  """An affine map, then ReLU: [B, C] -> [B, features]."""

  features: int

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    del train
    # He: with the variance 2 / C a ReLU does not change the activations' size.
    he = nn.initializers.he_normal()
    return nn.relu(nn.Dense(self.features, kernel_init=he, name="dense")(x))


class Classifier(nn.Module):
  """An affine map to logits: [B, C] -> [B, classes].

  LeCun's initialisation (variance 1 / C): the first logits are of order 1.
  """

  classes: int

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    del train
    return nn.Dense(self.classes, name="dense")(x)


class ConvPool(nn.Module):
  """A 3x3 convolution, norm, ReLU, and the maximum of each 2x2 patch.

  [B, H, W, C] -> [B, H // 2, W // 2, features].
  """

  features: int
  norm: str = "none"
  groups: int = 8

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    _check_images(x)
    _check_patch(x)
    # A norm adds a bias, so the convolution needs none.
    x = _conv(self.features, bias=self.norm == "none", name="conv")(x)
    x = nn.relu(_norm(self, x, train, "norm"))
    return _pool(x)


class TowerConv(nn.Module):
  """A convolution of separate towers, ReLU, and perhaps the maximum of each 2x2
  patch: [B, H, W, C] -> [B, H', W', features]."""

  features: int
  size: int = 3
  towers: int = 1  # each reads its part of the channels
  stride: int = 1
  pools: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    del train
    _check_images(x)
    options: dict[str, Any] = {
      "stride": self.stride, "bias": True, "towers": self.towers
    }
    x = nn.relu(_conv(self.features, self.size, **options, name="conv")(x))
    return _pool(x) if self.pools else x


class Stem(nn.Module):
  """A 3x3 convolution without bias. If `norm` is not "none", the norm and ReLU
  follow."""

  features: int
  norm: str = "none"
  groups: int = 8

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    _check_images(x)
    x = _conv(self.features, name="conv")(x)
    if self.norm == "none":
      return x
    return nn.relu(_norm(self, x, train, "norm"))


class Head(nn.Module):
  """The mean over the image, then an affine map to logits: [B, classes].

  With a norm, first the norm and ReLU, as pre-activation networks need.
  """

  classes: int
  norm: str = "none"
  groups: int = 8

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    if self.norm != "none":
      x = nn.relu(_norm(self, x, train, "norm"))
    # The mean makes the head independent of the size of images.
    return nn.Dense(self.classes, name="dense")(x.mean((1, 2)))


def pad_shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
  """The shortcut without parameters: option A of He et al. 2016, section 3.3.

  Keeps every stride-th row and column, from the first, and appends zeros after
  the C channels: float[B, H, W, C] -> float[B, ceil(H / stride),
  ceil(W / stride), features].
  """
  # No parameters: the shortcut stays the identity, except for its shape.
  x = x[:, ::stride, ::stride]
  return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, features - x.shape[-1])))


class BasicBlock(nn.Module):
  """The residual block of He et al. 2016, figure 2, as one layer.

  relu(pad_shortcut(x) + norm(conv(relu(norm(conv(x)))))).
  """

  features: int
  stride: int = 1
  norm: str = "group"
  groups: int = 8

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    y = _conv(self.features, stride=self.stride, name="conv1")(x)
    y = nn.relu(_norm(self, y, train, "norm1"))
    y = _conv(self.features, name="conv2")(y)
    y = _norm(self, y, train, "norm2")
    return nn.relu(pad_shortcut(x, self.features, self.stride) + y)


class WideBlock(nn.Module):
  """The pre-activation block of Zagoruyko and Komodakis 2016, as one layer.

  x + conv(relu(norm(conv(relu(norm(x)))))). If the shape changes, the shortcut
  is a 1x1 convolution of the first activation instead of x.
  """

  features: int
  stride: int = 1
  norm: str = "group"
  groups: int = 8

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    y = nn.relu(_norm(self, x, train, "norm1"))
    if self.stride != 1 or self.features != x.shape[-1]:
      x = _conv(self.features, 1, stride=self.stride, name="shortcut")(y)
    y = _conv(self.features, stride=self.stride, name="conv1")(y)
    y = nn.relu(_norm(self, y, train, "norm2"))
    return x + _conv(self.features, name="conv2")(y)


def _check_widths(name: str, widths: Sequence[int], least: int) -> None:
  """Raises ValueError unless `widths` has at least `least` valid widths."""
  if isinstance(widths, str) or not isinstance(widths, Sequence):
    raise ValueError(
      f"{name} must be a sequence of widths, as (64,), not"
      f" {checks.shown(widths)}"
    )
  checks.integer(f"the length of {name}", len(widths), least, MOST_LAYERS)
  for width in widths:
    checks.integer(f"each width of {name}", width, most=MOST_FEATURES)


def _check_norm(
  norm: str, groups: int, channels: Sequence[int], *, residual: bool = False
) -> None:
  """Raises ValueError unless the norm fits the channels of all layers."""
  names.check("norm", norm, NORMS)
  checks.integer("groups", groups, most=MOST_FEATURES)
  # GroupNorm needs groups of equal size.
  for c in channels if norm == "group" else ():
    if c % groups:
      raise ValueError(
        f"{groups} groups do not divide {c} channels; set groups to"
        f" {math.gcd(groups, *channels)}, or to another divisor of"
        f" {tuple(channels)}"
      )
  if residual and norm == "none":
    raise ValueError(
      "norm 'none' is only for networks without shortcuts, because each"
      " residual block would double the variance of its input; use 'group' or"
      " 'batch'"
    )


def mlp(classes: int, *, hidden: Sequence[int] = (64,)) -> Layers:
  """A perceptron: Flatten, a Dense of each width in `hidden`, Classifier."""
  checks.integer("classes", classes)
  _check_widths("hidden", hidden, least=0)
  return (Flatten(), *map(Dense, hidden), Classifier(classes))


def cnn(
  classes: int,
  *,
  features: Sequence[int] = (16, 32),
  hidden: int = 64,
  norm: str = "none",
  groups: int = 8,
) -> Layers:
  """A small convolutional network, fast on a CPU.

  It has a ConvPool for each entry of `features` (its channels), which halves
  the image; Flatten; a Dense of `hidden` features; Classifier. With a norm,
  "group" or "batch", a convolution has no bias.
  """
  checks.integer("classes", classes)
  _check_widths("features", features, least=1)
  checks.integer("hidden", hidden, most=MOST_FEATURES)
  _check_norm(norm, groups, features)
  convs = [ConvPool(c, norm, groups) for c in features]
  return (*convs, Flatten(), Dense(hidden), Classifier(classes))


def alexnet(
  classes: int,
  *,
  features: Sequence[int] = (96, 256, 384, 384, 256),
  hidden: int = 4096,
  towers: int = 2,
  stride: int = 1,
) -> Layers:
  """AlexNet: five convolutions in towers, two dense layers, Classifier.

  The second, fourth and fifth convolution read only the channels of their
  tower. So two devices with one tower each exchange activations only before the
  third convolution and the dense layers. Convolutions 1, 2 and 5 are followed
  by 2x2 pooling; the paper's 3x3 patches, local response normalisation and
  dropout are left out.

  Args:
    classes: number of logits.
    features: channels of the five convolutions; multiples of the towers.
    hidden: features of the two dense layers.
    towers: 2 in the paper; 1 is one network.
    stride: the stride of the first convolution, 4 for images of ImageNet. Its
      kernel has 5x5 pixels at stride 1, else 11x11.
  """
  checks.integer("classes", classes)
  _check_widths("features", features, least=5)
  checks.integer("the length of features", len(features), most=5)
  checks.integer("hidden", hidden, most=MOST_FEATURES)
  checks.integer("towers", towers, most=MOST_FEATURES)
  checks.integer("stride", stride, most=MOST_FEATURES)
  for width in features:
    checks.multiple(width, "features", towers, "{} towers")
  a, b, c, d, e = features
  first_size = 11 if stride > 1 else 5
  return (
    # Every tower sees the complete image.
    TowerConv(a, first_size, stride=stride, pools=True),
    TowerConv(b, 5, towers, pools=True),
    TowerConv(c),  # reads both towers
    TowerConv(d, towers=towers),
    TowerConv(e, towers=towers, pools=True),
    *(Flatten(), Dense(hidden), Dense(hidden), Classifier(classes)),
  )


def resnet(
  classes: int,
  *,
  depth: int = 20,
  width: int = 16,
  norm: str = "group",
  groups: int = 8,
) -> Layers:
  """The ResNet for CIFAR of He et al. 2016, section 4.2, with option A.

  Stem, three groups of (depth - 2) / 6 BasicBlocks with 1, 2 and 4 times
  `width` channels, and Head. The second and third group halve the image.

  The depth is 6 n + 2, counting layers with weights: 20, 32, 44, 56, 110. The
  width is 16 in the paper. The norm is "group", which needs no statistics, or
  "batch", as in the paper.
  """
  checks.integer("classes", classes)
  checks.integer("depth", depth, most=MOST_LAYERS)
  if depth < 8 or depth % 6 != 2:
    raise ValueError(f"depth must be 6 n + 2 (20, 32, 44, 56), not {depth}")
  checks.integer("width", width, most=MOST_FEATURES // 4)
  _check_norm(norm, groups, (width, 2 * width, 4 * width), residual=True)
  blocks = _blocks(BasicBlock, width, (depth - 2) // 6, norm, groups)
  return (Stem(width, norm, groups), *blocks, Head(classes))


def _blocks(
  block: Callable[..., nn.Module],
  width: int,
  count: int,
  norm: str,
  groups: int,
) -> list[nn.Module]:
  """Returns three groups of blocks; the second and third halve the image."""
  blocks = []
  for multiplier in (1, 2, 4):
    for i in range(count):
      # The first block of the second and third group halves the image.
      stride = 2 if multiplier > 1 and i == 0 else 1
      blocks.append(block(width * multiplier, stride, norm, groups))
  return blocks


def wide_resnet(
  classes: int,
  *,
  depth: int = 16,
  widen: int = 4,
  norm: str = "group",
  groups: int = 8,
) -> Layers:
  """The wide ResNet of Zagoruyko and Komodakis 2016, table 1, without dropout.

  Like `resnet`, but with WideBlocks of k = `widen` times the channels, and
  6 n + 4 layers with weights.
  """
  checks.integer("classes", classes)
  checks.integer("depth", depth, most=MOST_LAYERS)
  checks.integer("widen", widen, most=MOST_FEATURES)
  if depth < 10 or depth % 6 != 4:
    raise ValueError(f"depth must be 6 n + 4 (16, 22, 28, 40), not {depth}")
  # Norms act on 16, 16 k, 32 k and 64 k channels; a divisor of 16 k divides the
  # last two.
  _check_norm(norm, groups, (16, 16 * widen), residual=True)
  blocks = _blocks(WideBlock, 16 * widen, (depth - 4) // 6, norm, groups)
  # Each block begins with its norm, so the stem has none, and the head applies
  # a norm to the last block's output.
  return (Stem(16), *blocks, Head(classes, norm, groups))


def resnet20(
  classes: int, *, norm: str = "group", groups: int = 8
) -> Layers:
  """The `resnet` of depth 20: 269,722 parameters for 10 classes of CIFAR."""
  return resnet(classes, depth=20, norm=norm, groups=groups)


def wrn16_4(
  classes: int, *, norm: str = "group", groups: int = 8
) -> Layers:
  """The `wide_resnet` 16-4: 2,748,890 parameters for 10 classes of CIFAR."""
  return wide_resnet(classes, depth=16, widen=4, norm=norm, groups=groups)
