"""The layers of a GPT: token and position embedding, blocks, logits.

A block is one unit for pipeline cuts: no skip connection crosses its border.
Index letters:
  B  sequences
  T  positions
  C  features

References:
  Radford et al., "Language models are unsupervised multitask learners", 2019:
  layer norm before attention and MLP, GELU, initial deviation 0.02.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from asgd import checks
from asgd.models.layers import MOST_FEATURES, MOST_LAYERS, Layers

INIT = nn.initializers.normal(0.02)


def attention(
  block: Any, dtype: Any, train: bool, **options: Any
) -> nn.MultiHeadDotProductAttention:
  """Returns the attention of a block with `heads` and `dropout`."""
  return nn.MultiHeadDotProductAttention(
    block.heads,
    dtype=dtype,
    kernel_init=INIT,
    dropout_rate=block.dropout,
    deterministic=not train,
    name="attention",
    **options,
  )


class Embed(nn.Module):
  """Token plus learned position: int[B, T] -> float[B, T, C]."""

  vocabulary: int
  context: int  # most positions
  width: int
  dropout: float = 0.0

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    # A sequence that is shorter than the context gets the first positions.
    length = tokens.shape[1]
    check_length(length, self.context)
    table = self.param("tokens", INIT, (self.vocabulary, self.width))
    positions = self.param("positions", INIT, (self.context, self.width))
    x = jnp.take(table, tokens, axis=0) + positions[:length]
    return nn.Dropout(self.dropout, deterministic=not train)(x)


class Block(nn.Module):
  """Causal self-attention, then an MLP: float[B, T, C] -> the same.

  Both read a layer norm of the residual stream, and their outputs are added to
  the stream.
  """

  heads: int
  depth: int  # blocks of the model; scales the initial output weights
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    width, dtype = x.shape[-1], x.dtype
    # GPT-2 scales the weights of outputs by 1 / sqrt(residual additions).
    output_init = nn.initializers.normal(0.02 / (2 * self.depth) ** 0.5)
    h = nn.LayerNorm(dtype=dtype, name="norm_attention")(x)
    # bool[B, 1, T, T]: position t attends to positions up to t.
    mask = nn.make_causal_mask(jax.ShapeDtypeStruct(x.shape[:2], dtype))
    h = attention(self, dtype, train, out_kernel_init=output_init)(h, mask=mask)
    x = x + nn.Dropout(self.dropout, deterministic=not train)(h)
    h = nn.LayerNorm(dtype=dtype, name="norm_mlp")(x)
    # The hidden layer has 4 C features, as in GPT-2.
    h = nn.Dense(4 * width, dtype=dtype, kernel_init=INIT, name="up")(h)
    down = nn.Dense(width, dtype=dtype, kernel_init=output_init, name="down")
    h = down(nn.gelu(h))
    return x + nn.Dropout(self.dropout, deterministic=not train)(h)


class Unembed(nn.Module):
  """Layer norm and logits: float[B, T, C] -> float[B, T, vocabulary]."""

  vocabulary: int

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    del train
    x = nn.LayerNorm(dtype=x.dtype)(x)
    # The weights are not shared with Embed, which may be in another stage.
    return nn.Dense(
      self.vocabulary, use_bias=False, dtype=x.dtype, kernel_init=INIT
    )(x)


def check_stream(depth: int, width: int, heads: int, dropout: float) -> None:
  """Raises ValueError unless these sizes fit a stack of attention blocks."""
  checks.integer("depth", depth, most=MOST_LAYERS)
  checks.integer("width", width, most=MOST_FEATURES)
  checks.integer("heads", heads, most=MOST_FEATURES)
  if width % heads:
    raise ValueError(
      f"heads must divide the width: {heads} does not divide {width}"
    )
  checks.fraction("dropout", dropout)


def check_length(length: int, context: int) -> None:
  """Raises ValueError for more positions than the context has."""
  if length > context:
    raise ValueError(
      f"{length} positions do not fit into a context of {context}; give the"
      " model a longer context, or the data a shorter one"
    )


def gpt(
  classes: int,
  *,
  depth: int = 4,
  width: int = 128,
  heads: int = 4,
  context: int = 128,
  dropout: float = 0.0,
) -> Layers:
  """A GPT: Embed, `depth` Blocks, Unembed; predicts each token's next.

  Args:
    classes: vocabulary size (called classes as in every model here).
    depth: number of blocks.
    width: features of the residual stream.
    heads: attention heads of a block; they divide the width.
    context: most positions of a sequence.
    dropout: rate in [0, 1), on attention and on the outputs that are
      added to the residual stream.
  """
  checks.integer("classes", classes, most=MOST_FEATURES)
  checks.integer("context", context, most=MOST_FEATURES)
  check_stream(depth, width, heads, dropout)
  return (
    Embed(classes, context, width, dropout),
    *(Block(heads, depth, dropout) for _ in range(depth)),
    Unembed(classes),
  )
