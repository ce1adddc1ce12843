"""The layers of a recurrent language model: embedding, LSTMs, logits.

Index letters:
  B  sequences
  T  positions
  C  features

References:
  Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 1997.
  Zaremba, Sutskever, Vinyals, "Recurrent neural network regularization", 2014,
  arXiv:1409.2329: LSTMs in layers, with dropout only between layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from asgd import checks
from asgd.models.layers import MOST_FEATURES, MOST_LAYERS, Layers


class TokenEmbed(nn.Module):
  """A row of a table for each token: int[B, T] -> float[B, T, C]."""

  vocabulary: int
  width: int

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    del train
    init = nn.initializers.normal(1.0)
    table = self.param("tokens", init, (self.vocabulary, self.width))
    return jnp.take(table, tokens, axis=0)


class Recurrent(nn.Module):
  """Dropout, then an LSTM over the positions: float[B, T, C] -> float[B, T,
  width]. Its state is 0 before each sequence."""

  width: int
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    # `param_dtype` is also the dtype of the state, which a loop cannot change.
    cell = nn.OptimizedLSTMCell(
      self.width, dtype=x.dtype, param_dtype=x.dtype, name="cell"
    )
    # Its type also allows (outputs, last state).
    outputs: Any = nn.RNN(cell, name="lstm")(x)
    y: jax.Array = outputs
    return y


class Logits(nn.Module):
  """An affine map: float[B, T, C] -> float[B, T, vocabulary]."""

  vocabulary: int

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    del train
    return nn.Dense(self.vocabulary, dtype=x.dtype)(x)


def lstm(
  classes: int, *, depth: int = 1, width: int = 128, dropout: float = 0.0
) -> Layers:
  """An LSTM: embedding, `depth` LSTMs, logits; predicts each token's next.

  Args:
    classes: vocabulary size.
    depth: number of LSTMs.
    width: features of the embedding and of each LSTM.
    dropout: rate in [0, 1), on the input of each LSTM.
  """
  checks.integer("classes", classes, most=MOST_FEATURES)
  checks.integer("depth", depth, most=MOST_LAYERS)
  checks.integer("width", width, most=MOST_FEATURES)
  checks.fraction("dropout", dropout)
  return (
    TokenEmbed(classes, width),
    *(Recurrent(width, dropout) for _ in range(depth)),
    Logits(classes),
  )
