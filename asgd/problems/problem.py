"""What a problem is: a model, its data and its loss, as functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from asgd import base, data, models
from asgd import losses as losses_lib

Batches = Callable[[int, int], base.Batch]  # (worker, job) -> NumPy arrays
# What a worker pushes that computes no gradient: (parameters, batch, key) ->
# ((float[], Aux), values like the parameters). A row of zeros is not pushed.
Updates = Callable[..., tuple[tuple[jax.Array, losses_lib.Aux], Any]]

_PROBE = 256  # training examples on which curvature is estimated


class Evaluation(NamedTuple):
  """How good parameters are on data that was not trained on."""

  loss: float  # mean cross-entropy, nats; of a regression, squared error
  accuracy: float = float("nan")  # fraction in [0, 1], of a classification
  measure: float = float("nan")  # the task's own beside these, if it has one
  more: Mapping[str, float] = {}  # further columns of an evaluation


class Pieces(NamedTuple):
  """The training loss in pieces, for a runtime that cuts between layers.

  The loss of a batch is criterion(apply(layers, params, prepare(batch, key,
  dtype)), batch).
  """

  layers: models.Layers | models.Model
  prepare: Callable[..., jax.Array]  # batch, key, dtype -> input of layer 0
  criterion: Callable[..., jax.Array]  # (output of the last, batch) -> float[]


class Keyed(NamedTuple):
  """Which rows of the parameters a batch needs: of problems whose leaves are
  tables, their leading axes keys.

  The loss of (rows of those keys, localise(batch, keys)) is that of (all rows,
  batch); rows beyond them may follow.
  """

  keys: Callable[[base.Batch], Any]  # like the parameters, int64[n] ascending
  localise: Callable[[base.Batch, Any], base.Batch]


def keyed(
  rows: Callable[[base.Batch], Mapping[str, tuple[np.ndarray, Any]]],
  replace: Callable[..., base.Batch],
) -> Keyed:
  """Returns which rows of a dict of tables a batch needs.

  Args:
    rows: batch -> by table, int[...] rows and bool[...] which of them count, or
      True.
    replace: (batch, for each table int32[...], places among the rows that are
      needed, 0 where none counts) -> batch.
  """

  def parts(batch):
    for name, (numbers, counts) in rows(batch).items():
      yield name, numbers, np.broadcast_to(counts, numbers.shape)

  def keys(batch):
    return {
      name: np.unique(numbers[counts]).astype(np.int64)
      for name, numbers, counts in parts(batch)
    }

  def localise(batch, keys):
    places = {
      name: np.where(counts, np.searchsorted(keys[name], numbers), 0)
      for name, numbers, counts in parts(batch)
    }
    return replace(batch, **{k: x.astype(np.int32) for k, x in places.items()})

  return Keyed(keys, localise)


class Problem(NamedTuple):
  """Something to train, for one batch size.

  It holds no seed: seeds are arguments, so that runs which differ in the seed
  share what is compiled.
  """

  init: Callable[[jax.Array], optax.Params]  # key -> parameters
  loss: losses_lib.Loss  # (params, batch, key) -> (float[], Aux)
  evaluate: Callable[[optax.Params], Evaluation]
  batches: Callable[[int, int], Batches]  # (seed, workers) -> Batches
  probe: base.Batch  # training examples to measure curvature on
  batches_per_epoch: int  # batches in one pass over the training data
  pieces: Pieces | None = None  # None: it cannot be cut
  rebatch: Callable[[int], "Problem"] | None = None  # batch size -> Problem
  guess: float = float("nan")  # loss of the best constant answer, if known
  statistics_decay: float = models.DECAY  # as of `transforms.own_statistics`
  keyed: Keyed | None = None  # None: a batch needs all rows
  # In the place of the gradient, for the recipe `table` alone; None: there is
  # a gradient of the loss.
  updates: Updates | None = None
  # The function at the server (`tables.RowFunction.name`) that takes the
  # updates, and its options.
  function: tuple[str, Mapping[str, Any]] = ("add", {})

  def with_batch_size(self, batch_size: int) -> "Problem":
    """Returns the same problem with batches of another size.

    It shares what was compiled for `init`, `loss`, `evaluate` and `pieces`.
    ValueError is raised for a size that the data cannot fill.
    """
    if self.rebatch is None:
      raise ValueError(
        "the data came in batches, which cannot be made larger or smaller: give"
        " examples, and batch_size"
      )
    return self.rebatch(batch_size)


# batch size -> (batches, probe, batches_per_epoch) of a Problem
DataOf = Callable[[int], tuple[Callable, base.Batch, int]]


def dtype_of(params: optax.Params) -> Any:
  """Returns the dtype in which a model computes: that of its parameters."""
  return jax.tree.leaves(params)[0].dtype


def whole_loss(pieces: Pieces) -> losses_lib.Loss:
  """Returns the loss of all layers, one after the other."""

  def loss(params, batch, key):
    prepare_key, model_key = jax.random.split(key)
    x = pieces.prepare(batch, prepare_key, dtype_of(params))
    y, stats = models.apply(pieces.layers, params, x, train=True, key=model_key)
    return pieces.criterion(y, batch), losses_lib.Aux(stats)

  return loss


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the loss of each example (or position), in nats: float[...]."""
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def classification_loss(logits: jax.Array, batch: tuple) -> jax.Array:
  """The criterion for batches (examples, labels): their mean, float[]."""
  return cross_entropy(logits, batch[1]).mean()


def check_output(output: Any, wanted: tuple[int, ...], why: str) -> None:
  """Raises ValueError unless a model's output is an array of a shape."""
  shape = getattr(output, "shape", None)
  if shape != wanted:
    is_like = f"of shape {shape}" if shape else f"a {type(output).__name__}"
    raise models.ModelError(
      f"the model's output is {is_like}, and {why} need {wanted}; give the"
      " model that many outputs"
    )


def spread(count: int, limit: int) -> np.ndarray:
  """Returns indices of `limit` of `count` things, or all: evenly spaced."""
  return np.linspace(0, count - 1, min(limit, count)).astype(int)


def totals(
  score: Callable, arrays: Sequence[np.ndarray], at_once: int
) -> np.ndarray:
  """Returns the sums of what `score` gives of rows of arrays, so many at once.

  Args:
    score: rows of each of the arrays -> sums over them.
    arrays: each [m, ...].
    at_once: rows of a call.
  """
  total: Any = 0
  for start in range(0, len(arrays[0]), at_once):
    sums = score(*(array[start : start + at_once] for array in arrays))
    total = total + np.array(jax.device_get(sums), float)
  return total


def join(
  pieces: Pieces,
  init: Callable,
  evaluate: Callable,
  data_of: DataOf,
  batch_size: int,
  *,
  example: jax.ShapeDtypeStruct,
  guess: float,
) -> Problem:
  """Joins a model to its data, which may be cut again into other batches; a
  model in one piece gives a problem without pieces. `example` is its input."""
  loss, decay = whole_loss(pieces), models.DECAY
  given: Pieces | None = pieces
  if isinstance(pieces.layers, models.Model):
    decay, given = pieces.layers.decay(example), None

  return of_data(
    *(data_of, batch_size, init, loss, evaluate),
    pieces=given,
    guess=guess,
    statistics_decay=decay,
  )


def of_data(
  data_of: DataOf,
  batch_size: int,
  init: Callable,
  loss: Callable,
  evaluate: Callable,
  **options: Any,
) -> Problem:
  """Returns a problem whose data may be cut again into other batches; options
  are the other fields of a Problem."""

  def rebatch(size):
    return Problem(
      *(init, loss, evaluate, *data_of(size)), rebatch=rebatch, **options
    )

  return rebatch(batch_size)


def examples_of(
  examples: np.ndarray, labels: np.ndarray, partition: str = "shared"
) -> DataOf:
  """Returns what cuts labelled examples, [n, ...] and int[n], into batches."""
  rows = spread(len(labels), _PROBE)
  probe = examples[rows], labels[rows]

  def data_of(size):
    def batches(seed, workers):
      return data.make_batches(
        examples,
        labels,
        batch_size=size,
        seed=seed,
        partition=partition,
        workers=workers,
      )

    batches(0, 1)  # raises here, not in a run, what is wrong with arguments
    return batches, probe, len(labels) // size

  return data_of
