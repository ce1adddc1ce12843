"""Tensor parallel layers: each device of an axis holds a part of every matrix.

Of two matrices in a row the first is split by columns and the second by rows,
so that what is between them is never put together: one sum at the end of
attention and one at the end of the MLP, and the same in the backward. Attention
is split by heads; the embedding and the logits by the vocabulary, and the
cross-entropy is computed without the logits ever being in one place.

The layers are flax modules for use inside shard_map, where each sees its part
of the parameters. They have the names, and put together the shapes, of the
layers of `asgd.transformer`: a checkpoint of one is a checkpoint of the other
(`split`, `join`). Parameters are drawn by the whole model, never here.

Megatron's operators are f, the identity whose derivative is an all-reduce, and
g, an all-reduce whose derivative is the identity. Under shard_map with
check_vma they are JAX's own: f casts what is the same on all devices to what
varies, g is psum, and each is the transpose of the other. They are written out
here (`enter`, `leave`) although JAX would cast by itself, so that they stand
where they are meant to: it is their place that makes two all-reduces of a
block's backward and not six. With check_vma=False JAX has no f, psum's
derivative is another psum, and gradients taken inside shard_map are wrong:
`enter` refuses it.

With `sequence`, what is between the regions (norms, dropout, the stream) is
split by positions: f gathers positions and g scatters them, in the same bytes,
and activations there are a t-th as large.

Index letters:
  B  sequences
  T  positions
  C  features
  V  tokens of the vocabulary, rounded up to a multiple of t
  t  devices of the axis

References:
  Shoeybi et al., "Megatron-LM", 2019, section 3.
  Korthikanti et al., "Reducing activation recomputation in large transformer
  models", MLSys 2023, section 4.2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import models, transformer
from asgd.parallel import meshes

_POSITIONS = 1  # the dimension that `sequence` splits


def enter(x: jax.Array, axis: str, dim: int | None = None) -> jax.Array:
  """Megatron's f: what all devices share, into a region where each has a part.

  Args:
    x: the same on all devices of the axis; or, given `dim`, a part of it each.
    axis: of the mesh.
    dim: along which parts are put together.

  Returns:
    All of x, on every device. The derivative is added up over the devices (and
    given `dim`, each is left with its part).

  Raises:
    ValueError: inside shard_map with check_vma=False.
  """
  if dim is not None:
    out = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
  else:
    out = meshes.vary(x, axis)
  if axis not in meshes.varying(out):
    raise ValueError(
      f"tensor parallel layers on the axis {axis!r} need shard_map with"
      " check_vma=True, without which their gradients would be wrong"
    )
  return out


def leave(x: jax.Array, axis: str, dim: int | None = None) -> jax.Array:
  """Megatron's g: adds up what each device has of a sum.

  Args:
    x: a summand on each device of the axis.
    axis: of the mesh.
    dim: along which the sum is divided among the devices; None: all have it.

  Returns:
    The sum. Its derivative reaches every summand as it is.
  """
  if dim is not None:
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
  return jax.lax.psum(x, axis)


def _share(what: str, number: int, axis: str, size: int | None = None) -> int:
  """Returns a device's part of a number of things."""
  size = jax.lax.axis_size(axis) if size is None else size
  if number % size:
    raise ValueError(
      f"{number} {what} cannot be divided among the {size} devices of the axis"
      f" {axis!r}"
    )
  return number // size


def _sum_out(axis: str, dim: int | None) -> Callable[..., jax.Array]:
  """A product whose inner dimension is split; a bias comes after the sum."""

  def dot_general(*args, **kwargs):
    return leave(jax.lax.dot_general(*args, **kwargs), axis, dim)

  return dot_general


class ColumnDense(nn.Module):
  """An affine map split by what comes out: float[..., C_in] ->
  float[..., features / t].

  What goes in is the same everywhere; with `sequence`, a part of the positions.
  """

  features: int  # of all devices
  axis: str = meshes.TENSOR
  sequence: bool = False
  use_bias: bool = True
  dtype: Any = None
  enters: bool = True  # False where the caller has called `enter`

  def setup(self):
    """Is the Dense, under this module's name."""
    self.dense = nn.Dense(
      _share("features", self.features, self.axis),
      use_bias=self.use_bias,
      dtype=self.dtype,
    )
    nn.share_scope(self, self.dense)

  def __call__(self, x):
    """Applies the layer."""
    if self.enters:
      x = enter(x, self.axis, _POSITIONS if self.sequence else None)
    return self.dense(x)


class RowDense(nn.Module):
  """An affine map split by what goes in: float[..., C_in / t] ->
  float[..., features], the same everywhere; with `sequence`, a part of the
  positions. The bias is added once, to the sum."""

  features: int
  axis: str = meshes.TENSOR
  sequence: bool = False
  use_bias: bool = True
  dtype: Any = None

  def setup(self):
    """Is the Dense, under this module's name."""
    self.dense = nn.Dense(
      self.features,
      use_bias=self.use_bias,
      dtype=self.dtype,
      dot_general=_sum_out(self.axis, _POSITIONS if self.sequence else None),
    )
    nn.share_scope(self, self.dense)

  def __call__(self, x):
    """Applies the layer."""
    return self.dense(x)


def _mine(x: jax.Array, axis: str, dim: int = _POSITIONS) -> jax.Array:
  """Returns this device's part of what all have."""
  length = _share("positions", x.shape[dim], axis)
  start = jax.lax.axis_index(axis) * length
  return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


class _Dropout(nn.Module):
  """nn.Dropout of the stream, with the mask that one device would draw.

  With `sequence`, every device draws all of it and takes its positions: numbers
  are the same on any mesh, for the price of drawing t times as many.
  """

  rate: float
  axis: str
  sequence: bool

  def setup(self):
    """Draws under this module's name, as nn.Dropout would."""
    self.dropout = nn.Dropout(self.rate)
    nn.share_scope(self, self.dropout)

  def __call__(self, x, train: bool):
    """float[B, T, C] -> the same; T is a part of the positions."""
    if not train or not self.rate:
      return x
    if not self.sequence:
      return self.dropout(x, deterministic=False)
    batch, length, width = x.shape
    length *= jax.lax.axis_size(self.axis)
    ones = jnp.ones((batch, length, width), x.dtype)
    return x * _mine(self.dropout(ones, deterministic=False), self.axis)


class Embed(nn.Module):
  """`transformer.Embed`, whose table is split by rows: int[B, T] ->
  float[B, T, C], or with `sequence` float[B, T / t, C]."""

  vocabulary: int
  context: int
  width: int
  dropout: float = 0.0
  axis: str = meshes.TENSOR
  sequence: bool = False

  @nn.compact
  def __call__(self, tokens, train: bool = False):
    """Raises ValueError for more positions than the context, and, with
    `sequence`, for positions that the axis does not divide."""
    length = tokens.shape[1]
    if length > self.context:
      raise ValueError(
        f"{length} positions do not fit into a context of {self.context}; give"
        " the model a longer one, or the data a shorter one"
      )
    if self.sequence:
      _share("positions", length, self.axis)
    rows = -(-self.vocabulary // jax.lax.axis_size(self.axis))
    zeros = nn.initializers.zeros_init()
    table = self.param("tokens", zeros, (rows, self.width))
    places = self.param("positions", zeros, (self.context, self.width))
    places = places[:length]
    found = _look_up(table, tokens, self.axis)
    x = leave(found, self.axis, _POSITIONS if self.sequence else None)
    if self.sequence:
      places = _mine(places, self.axis, 0)
    dropout = _Dropout(self.dropout, self.axis, self.sequence, name="Dropout_0")
    return dropout(x + places, train)


def _look_up(table, tokens, axis):
  """Rows of a table that is split; zeros for those that others have."""
  local = tokens - jax.lax.axis_index(axis) * len(table)
  held = (local >= 0) & (local < len(table))
  rows = jnp.take(table, jnp.where(held, local, 0), axis=0)
  return jnp.where(held[..., None], rows, 0)


class Block(nn.Module):
  """`transformer.Block`, whose heads and hidden features are split.

  float[B, T, C] -> the same; with `sequence`, T / t positions.
  """

  heads: int
  depth: int
  dropout: float = 0.0
  axis: str = meshes.TENSOR
  sequence: bool = False

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Applies the block."""
    width, dtype = x.shape[-1], x.dtype
    dim = _POSITIONS if self.sequence else None
    shared = dict(axis=self.axis, sequence=self.sequence)
    heads = _share("heads", self.heads, self.axis)

    h = nn.LayerNorm(dtype=dtype, name="norm_attention")(x)
    h = enter(h, self.axis, dim)
    h = nn.MultiHeadDotProductAttention(
      heads,
      qkv_features=width // self.heads * heads,
      out_features=width,
      dtype=dtype,
      dropout_rate=self.dropout,
      deterministic=not train,
      out_dot_general=_sum_out(self.axis, dim),
      name="attention",
    )(h, mask=nn.make_causal_mask(jax.ShapeDtypeStruct(h.shape[:2], dtype)))
    x = x + _Dropout(self.dropout, **shared, name="Dropout_0")(h, train)

    h = nn.LayerNorm(dtype=dtype, name="norm_mlp")(x)
    h = ColumnDense(4 * width, **shared, dtype=dtype, name="up")(h)
    h = RowDense(width, **shared, dtype=dtype, name="down")(nn.gelu(h))
    return x + _Dropout(self.dropout, **shared, name="Dropout_1")(h, train)


class Unembed(nn.Module):
  """`transformer.Unembed`, split by the vocabulary: float[B, T, C], with
  `sequence` T / t positions, -> float[B, T, V / t], for `cross_entropy`."""

  vocabulary: int
  axis: str = meshes.TENSOR
  sequence: bool = False

  @nn.compact
  def __call__(self, x, train: bool = False):
    """Applies the layer."""
    del train
    size = jax.lax.axis_size(self.axis)
    padded = -(-self.vocabulary // size) * size
    x = nn.LayerNorm(dtype=x.dtype, name="LayerNorm_0")(x)
    return ColumnDense(
      padded,
      axis=self.axis,
      sequence=self.sequence,
      use_bias=False,
      dtype=x.dtype,
      name="Dense_0",
    )(x)


def cross_entropy(
  logits: jax.Array,
  labels: jax.Array,
  *,
  vocabulary: int,
  axis: str = meshes.TENSOR,
) -> jax.Array:
  """Softmax cross-entropy of logits that are split by the vocabulary.

  Three numbers an example are sent: the largest logit, the sum of exponentials
  and the label's logit.

  Args:
    logits: float[..., V / t], this device's, in the order of the axis.
    labels: int[...], below `vocabulary`.
    vocabulary: tokens that there are; logits beyond count for nothing.
    axis: of the mesh.

  Returns:
    float[...], in nats, the same on all devices; at least float32.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  mine = logits.shape[-1]
  local = labels - jax.lax.axis_index(axis) * mine
  number = jax.lax.axis_index(axis) * mine + jnp.arange(mine)
  logits = jnp.where(number < vocabulary, logits, -jnp.inf)
  top = jax.lax.stop_gradient(logits).max(-1)
  top = jax.lax.pmax(top, axis)  # finite: some device has a token
  held = (local >= 0) & (local < mine)
  at = jnp.where(held, local, 0)[..., None]
  label = jnp.take_along_axis(logits, at, axis=-1)[..., 0]
  sums = jnp.exp(logits - top[..., None]).sum(-1), jnp.where(held, label, 0)
  total, label = jax.lax.psum(sums, axis)
  return jnp.log(total) + top - label


def parallel(
  layers: models.Layers,
  mesh: Mesh,
  *,
  axis: str = meshes.TENSOR,
  sequence: bool = False,
) -> models.Layers:
  """Makes tensor parallel layers of whole ones.

  Args:
    layers: of `transformer.gpt`, or some of them.
    mesh: with `axis`.
    axis: its devices share each layer.
    sequence: split the stream between regions by positions.

  Returns:
    As many layers, for `models.apply` inside shard_map.

  Raises:
    ValueError: for an axis that the mesh lacks, another layer, or heads that
      the axis does not divide.
  """
  size = meshes.size(mesh, axis)
  shared = dict(axis=axis, sequence=sequence)

  def one(layer):
    if isinstance(layer, transformer.Embed):
      return Embed(
        layer.vocabulary, layer.context, layer.width, layer.dropout, **shared
      )
    if isinstance(layer, transformer.Block):
      _share("heads", layer.heads, axis, size)
      return Block(layer.heads, layer.depth, layer.dropout, **shared)
    if isinstance(layer, transformer.Unembed):
      return Unembed(layer.vocabulary, **shared)
    raise ValueError(
      f"a {type(layer).__name__} has no tensor parallel form; the layers of"
      " transformer.gpt have"
    )

  return tuple(map(one, layers))


def gpt(
  classes: int,
  mesh: Mesh,
  *,
  axis: str = meshes.TENSOR,
  sequence: bool = False,
  **options: Any,
) -> models.Layers:
  """`transformer.gpt`, tensor parallel.

  Args:
    classes: tokens of the vocabulary.
    mesh: as for `parallel`.
    axis: as for `parallel`.
    sequence: as for `parallel`.
    **options: of `transformer.gpt`.

  Raises:
    ValueError: as both.
  """
  layers = transformer.gpt(classes, **options)
  return parallel(layers, mesh, axis=axis, sequence=sequence)


# Which dimension of which parameter is split, by the end of its path.
_SPLIT = {
  ("tokens",): 0,
  ("query", "kernel"): 1,
  ("query", "bias"): 0,
  ("key", "kernel"): 1,
  ("key", "bias"): 0,
  ("value", "kernel"): 1,
  ("value", "bias"): 0,
  ("out", "kernel"): 0,
  ("up", "kernel"): 1,
  ("up", "bias"): 0,
  ("down", "kernel"): 0,
  ("Dense_0", "kernel"): 1,
}
_VOCABULARY = (("tokens",), ("Dense_0", "kernel"))


def _name(path) -> tuple[str, ...]:
  keys = tuple(key.key for key in path if hasattr(key, "key"))
  return keys[-1:] if keys[-1:] in _SPLIT else keys[-2:]


def partition(params: optax.Params, axis: str = meshes.TENSOR) -> Any:
  """Says how the parameters of a GPT, or of some of its layers, are split.

  Args:
    params: a tree like the whole model's; only its structure is read.
    axis: of the mesh.

  Returns:
    A tree of PartitionSpecs.
  """

  def spec(path, _):
    dim = _SPLIT.get(_name(path))
    return P() if dim is None else P(*(None,) * dim, axis)

  return jax.tree_util.tree_map_with_path(spec, params)


def pad(params: optax.Params, size: int) -> optax.Params:
  """Adds zeros to the vocabulary until `size` divides it.

  No gradient ever reaches them: no token finds the one, and `cross_entropy`
  leaves out the other.
  """

  def one(path, x):
    if _name(path) not in _VOCABULARY:
      return x
    dim = _SPLIT[_name(path)]
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % size)
    return jnp.pad(x, widths) if widths[dim][1] else x

  return jax.tree_util.tree_map_with_path(one, params)


def unpad(params: optax.Params, vocabulary: int) -> optax.Params:
  """Cuts off what `pad` added."""

  def one(path, x):
    if _name(path) not in _VOCABULARY:
      return x
    return jax.lax.slice_in_dim(x, 0, vocabulary, axis=_SPLIT[_name(path)])

  return jax.tree_util.tree_map_with_path(one, params)


def split(
  params: optax.Params, mesh: Mesh, *, axis: str = meshes.TENSOR
) -> optax.Params:
  """Puts the parameters of a whole GPT on a mesh, each device its part.

  Args:
    params: as `models.init` draws them, or a checkpoint holds them.
    mesh: with `axis`; over others they are repeated.
    axis: of the tensor parallel layers.

  Returns:
    Global arrays of the same structure; the vocabulary is padded.
  """
  padded = pad(params, meshes.size(mesh, axis))
  return meshes.place(padded, mesh, partition(padded, axis))


def join(params: optax.Params, mesh: Mesh, vocabulary: int) -> optax.Params:
  """Takes back what `split` did: whole parameters, on every device."""
  return unpad(meshes.whole(params, mesh), vocabulary)
