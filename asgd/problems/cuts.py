"""Cuts a problem between the layers of its model."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from asgd import base, models
from asgd.problems.problem import Pieces, dtype_of


def slice_of(params: Any, first: int, last: int) -> Any:
  """Returns the parameters of layers[first:last]."""
  if isinstance(params, base.Variables):
    weights: Any = params.weights
    stats: Any = params.stats
    return base.Variables(weights[first:last], stats[first:last])
  return params[first:last]


def joined(parts: Sequence[Any]) -> Any:
  """Returns the parameters of all layers, on the host."""
  # Stages are on different devices: join them on the host.
  parts = [jax.tree.map(np.asarray, part) for part in parts]
  if not isinstance(parts[0], base.Variables):
    return tuple(itertools.chain(*parts))
  columns = zip(*parts, strict=True)
  return base.Variables(*(tuple(itertools.chain(*c)) for c in columns))


class _PiecesById:
  """Holds Pieces that cannot be hashed, such as those with a list in a module.
  Two of these are equal if they hold the same object."""

  def __init__(self, pieces: Pieces):
    self.pieces = pieces

  def __hash__(self) -> int:
    return id(self.pieces)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _PiecesById) and self.pieces is other.pieces


def stage_fn(pieces: Pieces, first: int, last: int) -> Callable[..., Any]:
  """Returns layers[first:last] as a function for `stages.compile_stage`. The
  same layers give the same function object, so JAX compiles it only once.

  The function's arguments are the parameters of these layers, the output of the
  layer before (any value for the first layer), and (batch, key) of the job.
  Only the first and the last layer read the batch. The function returns
  (output, statistics); for the last layer the output is the loss.
  """
  try:
    hash(pieces)
  except TypeError:
    return _new_stage_fn(_PiecesById(pieces), first, last)
  return _new_stage_fn(pieces, first, last)


@functools.lru_cache(maxsize=256)
def _new_stage_fn(
  key: Pieces | _PiecesById, first: int, last: int
) -> Callable[..., Any]:
  """Returns a new function of layers[first:last]."""
  pieces = key.pieces if isinstance(key, _PiecesById) else key
  is_last = last == len(pieces.layers)

  def fn(params, x, extra):
    batch, key = extra
    # Every stage splits the same key, so a cut does not change random numbers.
    prepare_key, model_key = jax.random.split(key)
    # The first stage gets examples; later stages get activations.
    if first == 0:
      dtype = dtype_of(base.weights_of(params))
      x = pieces.prepare(batch, prepare_key, dtype)
    layers: Any = pieces.layers[first:last]
    y, stats = models.apply(
      # `first` numbers the layers as in the complete model, for their keys.
      layers, params, x, train=True, key=model_key, first=first
    )
    return (pieces.criterion(y, batch) if is_last else y), stats

  return fn
