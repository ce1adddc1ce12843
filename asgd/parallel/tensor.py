"""Tensor parallel layers: the devices of an axis divide each layer's matrices.

The first of two consecutive matrices is split by columns and the second by
rows, so that the activations between the two stay split. Attention and MLP need
one all-reduce each in the forward, and one each in the backward. Attention is
split by heads, embedding and logits are split by the vocabulary; the
cross-entropy is computed from split logits. Each device has the whole table of
positions.

The layers are flax modules for use inside shard_map, where each module gets the
device's part of the parameters. The parameters have the same names as in
`asgd.models.transformer`. After `pad` the joined parts also have the same
shapes, so a checkpoint fits both models (`partition`, `pad`). Initialize with
the unsplit model: these modules draw only zeros.

Megatron's operator f is the identity with an all-reduce as its derivative; g is
an all-reduce with the identity as its derivative. Under shard_map with
check_vma f is JAX's cast to a value that varies over devices, and g is psum.
`enter` and `leave` apply f and g explicitly: with JAX's own casts the backward
of a block would have six all-reduces instead of two. With check_vma=False the
derivative of psum is another psum, and gradients taken inside shard_map are
wrong: `enter` then raises an error.

With `sequence`, devices also divide norms, dropout and the stream between the
split regions, by positions: f gathers positions and g scatters them. Devices
send the same number of bytes as without `sequence`, and these activations are
1/t as large.

Index letters:
  B  sequences
  T  positions
  C  features
  V  tokens of the vocabulary, rounded up to a multiple of t
  t  devices of the axis "tensor"

References:
  Shoeybi et al., "Megatron-LM", 2019, section 3.
  Korthikanti et al., "Reducing activation recomputation in large transformer
  models", MLSys 2023, section 4.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import models
from asgd.models import transformer
from asgd.parallel import meshes

_AXIS = meshes.TENSOR
_POSITIONS = 1  # dimension of the positions, which `sequence` splits


def enter(x: jax.Array, dim: int | None = None) -> jax.Array:
  """Megatron's f: casts a value, equal on all devices, for a split region.

  Given `dim`, each device has a part of x along `dim`, and `enter` gathers the
  parts. The derivative is added up over devices, and scattered if given `dim`.
  Raises ValueError inside shard_map with check_vma=False.
  """
  if dim is None:
    shared = meshes.vary(x, _AXIS)
  else:
    shared = jax.lax.all_gather(x, _AXIS, axis=dim, tiled=True)
  # With check_vma=False JAX marks no value as varying. A traced function has no
  # other sign of this option.
  if _AXIS not in meshes.varying(shared):
    raise ValueError(
      f"tensor parallel layers on the axis {_AXIS!r} need shard_map with"
      " check_vma=True, without which their gradients would be wrong"
    )
  return shared


def leave(x: jax.Array, dim: int | None = None) -> jax.Array:
  """Megatron's g: adds up the devices' parts of a sum.

  All devices return the sum; given `dim`, each device returns a part along
  `dim`. The derivative of each summand is the derivative of the sum.
  """
  if dim is None:
    return jax.lax.psum(x, _AXIS)
  return jax.lax.psum_scatter(x, _AXIS, scatter_dimension=dim, tiled=True)


def _divide(plural: str, number: int, size: int | None = None) -> int:
  """Returns a number divided by the number of devices. Raises ValueError if
  there is a remainder; `plural` names the divided things in the message."""
  size = jax.lax.axis_size(_AXIS) if size is None else size
  if number % size:
    raise ValueError(
      f"{number} {plural} cannot be divided among the {size} devices of the"
      f" axis {_AXIS!r}: use another number of {plural}, or another mesh"
    )
  return number // size


def _summed_dot_general(dim: int | None) -> Callable[..., jax.Array]:
  """Returns a dot_general that adds up the partial products of the devices. The
  layer then adds its bias once, to the sum."""

  def dot_general(*args, **kwargs):
    return leave(jax.lax.dot_general(*args, **kwargs), dim)

  return dot_general


def column_dense(
  features: int, *, sequence: bool = False, **options: Any
) -> nn.Dense:
  """Returns an affine map split by outputs, inside shard_map:
  float[..., C_in] -> float[..., features / t]. All devices have the same
  inputs; with `sequence` each device has the inputs of its positions."""

  def dot_general(x, *args, **kwargs):
    x = enter(x, _POSITIONS if sequence else None)
    return jax.lax.dot_general(x, *args, **kwargs)

  local_features = _divide("features", features)
  return nn.Dense(local_features, dot_general=dot_general, **options)


def row_dense(
  features: int, *, sequence: bool = False, **options: Any
) -> nn.Dense:
  """Returns an affine map split by inputs: float[..., C_in / t] ->
  float[..., features]. All devices have the same outputs; with `sequence` each
  device has the outputs of its positions. The bias is added once, to the sum.
  """
  dot_general = _summed_dot_general(_POSITIONS if sequence else None)
  return nn.Dense(features, dot_general=dot_general, **options)


def _stream_dropout(
  x: jax.Array, rate: float, sequence: bool, name: str
) -> jax.Array:
  """Applies dropout to the stream in training, with the mask that one device
  alone would draw. With `sequence` each device draws the full mask, and uses
  its positions of the mask."""
  dropout = nn.Dropout(rate, deterministic=False, name=name)
  if not sequence or not rate:
    return dropout(x)
  batch, length, width = x.shape
  shape = batch, length * jax.lax.axis_size(_AXIS), width
  mask = dropout(jnp.ones(shape, x.dtype))
  return x * meshes.part(mask, _AXIS, _POSITIONS)


class ParallelEmbed(transformer.Embed):
  """An Embed with its table split by rows: int[B, T] -> float[B, T, C], or with
  `sequence` float[B, T / t, C]."""

  sequence: bool = False

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    """Raises ValueError for more positions than the context, and, with
    `sequence`, for positions that the axis does not divide."""
    length = tokens.shape[1]
    transformer.check_length(length, self.context)
    if self.sequence:
      _divide("positions", length)
    count = -(-self.vocabulary // jax.lax.axis_size(_AXIS))
    # Draw zeros: the unsplit model draws the parameters.
    zeros = nn.initializers.zeros_init()
    table = self.param("tokens", zeros, (count, self.width))
    positions = self.param("positions", zeros, (self.context, self.width))
    positions = positions[:length]
    # One device has the row of a token; the other devices add zeros.
    row, is_here = _local_token(tokens, count)
    rows = jnp.where(is_here[..., None], jnp.take(table, row, axis=0), 0)
    x = leave(rows, _POSITIONS if self.sequence else None)
    if self.sequence:
      positions = meshes.part(positions, _AXIS, 0)
    x = x + positions
    if not train:
      return x
    return _stream_dropout(x, self.dropout, self.sequence, "Dropout_0")


def _local_token(tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns (index in this device's `count` tokens, whether this device has the
  token), int32[...] and bool[...]."""
  local = tokens - jax.lax.axis_index(_AXIS) * count
  is_here = (local >= 0) & (local < count)
  return jnp.where(is_here, local, 0), is_here  # 0: any index that is valid


class ParallelBlock(transformer.Block):
  """A Block with its heads and hidden features split: float[B, T, C] ->
  float[B, T, C]; with `sequence`, T / t positions."""

  sequence: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Applies the block."""
    width, dtype = x.shape[-1], x.dtype
    dim = _POSITIONS if self.sequence else None
    heads = _divide("heads", self.heads)

    def dropout(h, name):
      if not train:
        return h
      return _stream_dropout(h, self.dropout, self.sequence, name)

    # [1] Attention: split by heads from `enter` to the sum of its output.
    h = nn.LayerNorm(dtype=dtype, name="norm_attention")(x)
    h = enter(h, dim)
    h = nn.MultiHeadDotProductAttention(
      heads,
      qkv_features=width // self.heads * heads,
      out_features=width,
      dtype=dtype,
      dropout_rate=self.dropout,
      deterministic=not train,
      out_dot_general=_summed_dot_general(dim),
      name="attention",
    )(h, mask=nn.make_causal_mask(jax.ShapeDtypeStruct(h.shape[:2], dtype)))
    x = x + dropout(h, "Dropout_0")

    # [2] MLP: split by hidden features; `column_dense` enters, `row_dense`
    # leaves.
    h = nn.LayerNorm(dtype=dtype, name="norm_mlp")(x)
    options: Any = {"sequence": self.sequence, "dtype": dtype}
    h = column_dense(4 * width, name="up", **options)(h)
    h = nn.gelu(h)
    h = row_dense(width, name="down", **options)(h)
    return x + dropout(h, "Dropout_1")


class ParallelUnembed(transformer.Unembed):
  """An Unembed split by the vocabulary: float[B, T, C], with `sequence` T / t
  positions, -> float[B, T, V / t], for `cross_entropy`."""

  sequence: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Applies the layer."""
    del train
    size = jax.lax.axis_size(_AXIS)
    padded = -(-self.vocabulary // size) * size
    x = nn.LayerNorm(dtype=x.dtype, name="LayerNorm_0")(x)
    options = {"use_bias": False, "dtype": x.dtype, "name": "Dense_0"}
    return column_dense(padded, sequence=self.sequence, **options)(x)


def cross_entropy(
  logits: jax.Array, labels: jax.Array, *, vocabulary: int
) -> jax.Array:
  """Returns the softmax cross-entropy in nats, float[...], in float32 or wider;
  equal on all devices.

  Devices send three numbers per label: the largest logit, the sum of
  exponentials and the label's logit.

  Args:
    logits: float[..., V / t], this device's part. Columns of padding (index
      `vocabulary` or more) are ignored.
    labels: int[...].
    vocabulary: number of tokens without padding.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  count = logits.shape[-1]
  token = jax.lax.axis_index(_AXIS) * count + jnp.arange(count)
  logits = jnp.where(token < vocabulary, logits, -jnp.inf)
  # [1] The largest logit, without a derivative: in the result it cancels.
  largest_logit = jax.lax.stop_gradient(logits).max(-1)
  # The maximum is finite, as at least one device has a token.
  largest_logit = jax.lax.pmax(largest_logit, _AXIS)
  # [2] The label's logit, which one device has.
  column, is_here = _local_token(labels, count)
  label = jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]
  # [3] log sum exp - label's logit.
  exponentials = jnp.exp(logits - largest_logit[..., None])
  sums = exponentials.sum(-1), jnp.where(is_here, label, 0)
  total, label = jax.lax.psum(sums, _AXIS)
  return jnp.log(total) + largest_logit - label


def parallel_layers(
  layers: models.Layers, mesh: Mesh, *, sequence: bool = False
) -> models.Layers:
  """Returns the tensor parallel forms of layers of `transformer.gpt`, for
  `models.apply` inside shard_map; with `sequence` the stream is split by
  positions. Raises ValueError for an axis that the mesh lacks, for a layer
  without a parallel form, and for heads that the axis does not divide."""
  size = meshes.size(mesh, _AXIS)

  def parallel_layer(layer):
    if isinstance(layer, transformer.Embed):
      sizes = layer.vocabulary, layer.context, layer.width
      return ParallelEmbed(*sizes, layer.dropout, sequence)
    if isinstance(layer, transformer.Block):
      _divide("heads", layer.heads, size)
      return ParallelBlock(layer.heads, layer.depth, layer.dropout, sequence)
    if isinstance(layer, transformer.Unembed):
      return ParallelUnembed(layer.vocabulary, sequence)
    raise ValueError(
      f"a {type(layer).__name__} has no tensor parallel form; the layers of"
      " transformer.gpt have"
    )

  return tuple(map(parallel_layer, layers))


# The dimension of a parameter that is split, by the end of its path.
_COLUMNS = ("query", "key", "value", "up")
_SPLIT: dict[tuple[str, ...], int] = {
  ("tokens",): 0,
  **{(name, "kernel"): 1 for name in (*_COLUMNS, "Dense_0")},
  **{(name, "bias"): 0 for name in _COLUMNS},
  **{(name, "kernel"): 0 for name in ("out", "down")},
}
_VOCABULARY = (("tokens",), ("Dense_0", "kernel"))  # have a dimension V


def _path_end(path: Sequence[Any]) -> tuple[str, ...]:
  """Returns the end of a parameter's path: one name if _SPLIT has it, else two.
  """
  keys = tuple(key.key for key in path if hasattr(key, "key"))
  return keys[-1:] if keys[-1:] in _SPLIT else keys[-2:]


def partition(params: optax.Params) -> Any:
  """Returns the PartitionSpecs of the parameters of a GPT, or of some of its
  layers."""

  def spec(path, _):
    dim = _SPLIT.get(_path_end(path))
    return P() if dim is None else P(*(None,) * dim, _AXIS)

  return jax.tree_util.tree_map_with_path(spec, params)


def _map_vocabulary(
  change: Callable[[jax.Array, int], jax.Array], params: optax.Params
) -> optax.Params:
  """Applies `change(array, dimension)` to each parameter that has a dimension
  of the vocabulary."""

  def change_leaf(path, x):
    end = _path_end(path)
    return change(x, _SPLIT[end]) if end in _VOCABULARY else x

  return jax.tree_util.tree_map_with_path(change_leaf, params)


def pad(params: optax.Params, size: int) -> optax.Params:
  """Adds zeros to the vocabulary until `size` divides it. The gradients of
  these zeros are 0: no token selects their rows, and `cross_entropy` ignores
  their logits."""

  def widen(x, dim):
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % size)
    return jnp.pad(x, widths)

  return _map_vocabulary(widen, params)


def unpad(params: optax.Params, vocabulary: int) -> optax.Params:
  """Removes the zeros that `pad` added."""
  return _map_vocabulary(
    lambda x, dim: jax.lax.slice_in_dim(x, 0, vocabulary, axis=dim), params
  )
