"""The type of a problem: a model, its data and its loss, as functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from asgd import base, data, models
from asgd import losses as losses_lib
from asgd.data import partitions

Batches = Callable[[int, int], base.Batch]  # (worker, job) -> NumPy arrays
# The updates of a worker that computes no gradient: (parameters, batch, key) ->
# ((float[], Aux), values like the parameters). Rows of zeros are not pushed.
Updates = Callable[..., tuple[tuple[jax.Array, losses_lib.Aux], Any]]

_PROBE = 256  # training examples on which curvature is estimated


class Evaluation(NamedTuple):
  """The quality of parameters, on data that were not trained on."""

  loss: float  # mean cross-entropy in nats; for a regression, squared error
  accuracy: float = float("nan")  # fraction in [0, 1], for a classification
  measure: float = float("nan")  # a further measure of the task, if it has one
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
  """Finds the rows of the parameters that a batch needs, if the parameters are
  tables. A key is an index of a table's leading axis.

  The loss of (the rows with these keys, localise(batch, keys)) equals the loss
  of (all rows, batch). More rows may follow those with the keys.
  """

  keys: Callable[[base.Batch], Any]  # like the parameters, int64[n] ascending
  localise: Callable[[base.Batch, Any], base.Batch]  # keys -> indices into them


def keyed(
  rows: Callable[[base.Batch], Mapping[str, tuple[np.ndarray, Any]]],
  replace: Callable[..., base.Batch],
) -> Keyed:
  """Returns the Keyed of a problem with a dict of tables as parameters.

  Args:
    rows: batch -> {table: (int[...] row numbers, bool[...] whether each of them
      counts, or True for all)}.
    replace: (batch, table=indices, ...) -> batch, with int32[...] indices into
      the needed rows, 0 for rows that do not count.
  """

  def parts(batch):
    for name, (row_numbers, do_count) in rows(batch).items():
      yield name, row_numbers, np.broadcast_to(do_count, row_numbers.shape)

  def keys(batch):
    return {
      name: np.unique(row_numbers[do_count]).astype(np.int64)
      for name, row_numbers, do_count in parts(batch)
    }

  def localise(batch, keys):
    indices = {
      name: np.where(do_count, np.searchsorted(keys[name], row_numbers), 0)
      for name, row_numbers, do_count in parts(batch)
    }
    return replace(batch, **{k: x.astype(np.int32) for k, x in indices.items()})

  return Keyed(keys, localise)


class Problem(NamedTuple):
  """A model with its data and loss, for one batch size.

  It holds no seed: seeds are arguments, so runs with different seeds share
  their compiled programs.
  """

  init: Callable[[jax.Array], optax.Params]  # key -> parameters
  loss: losses_lib.Loss  # (params, batch, key) -> (float[], Aux)
  evaluate: Callable[[optax.Params], Evaluation]
  batches: Callable[[int, int], Batches]  # (seed, workers) -> Batches
  probe: base.Batch  # training examples to measure curvature on
  batches_per_epoch: int  # batches in one pass over the training data
  pieces: Pieces | None = None  # None: it cannot be cut into stages
  rebatch: Callable[[int], "Problem"] | None = None  # batch size -> Problem
  guess: float = float("nan")  # loss of the best constant answer, if known
  statistics_decay: float = models.DECAY  # see `transforms.own_statistics`
  keyed: Keyed | None = None  # None: a batch needs all rows
  # Replaces the gradient, for the recipe `table` alone; None: workers compute
  # the gradient of the loss.
  updates: Updates | None = None
  # The function at the server (`tables.RowFunction.name`) that applies the
  # updates, and its options.
  function: tuple[str, Mapping[str, Any]] = ("add", {})
  sequential: bool = False  # batches of a worker come from an iterator

  def with_batch_size(self, batch_size: int) -> "Problem":
    """Returns the same problem with batches of another size.

    It shares compiled programs of `init`, `loss`, `evaluate` and `pieces`.
    Raises ValueError for a size that the data cannot fill.
    """
    if self.rebatch is None:
      raise ValueError(
        "the data are given as batches, whose size cannot change: give"
        " examples, and batch_size"
      )
    return self.rebatch(batch_size)


def carrying(
  problem: Problem, make_state: Callable[[optax.Params], Any]
) -> Problem:
  """Returns a problem with parameters that carry the state of an optimizer.

  Args:
    problem: any problem; its functions get the model's parameters only.
    make_state: weights -> the state at the start.
  """

  def init(key):
    params = problem.init(key)
    return base.carry(params, make_state(base.weights_of(params)))

  def loss(params, batch, key):
    return problem.loss(base.without_state(params), batch, key)

  def evaluate(params):
    return problem.evaluate(base.without_state(params))

  return problem._replace(init=init, loss=loss, evaluate=evaluate)


# batch size -> (batches, probe, batches_per_epoch) of a Problem
DataOf = Callable[[int], tuple[Callable[..., Any], base.Batch, int]]


def dtype_of(params: optax.Params) -> Any:
  """Returns the dtype in which a model computes: its parameters' dtype."""
  return jax.tree.leaves(params)[0].dtype


def whole_loss(pieces: Pieces) -> losses_lib.Loss:
  """Returns the loss that applies all layers, in order."""

  def loss(params, batch, key):
    # Augmentation and dropout draw from independent keys.
    prepare_key, model_key = jax.random.split(key)
    x = pieces.prepare(batch, prepare_key, dtype_of(params))
    y, stats = models.apply(pieces.layers, params, x, train=True, key=model_key)
    return pieces.criterion(y, batch), losses_lib.Aux(stats)

  return loss


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the loss of each example (or position), in nats: float[...]."""
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def classification_loss(logits: jax.Array, batch: tuple[Any, ...]) -> jax.Array:
  """The criterion for batches (examples, labels): the mean loss, float[]."""
  return cross_entropy(logits, batch[1]).mean()


def check_output(output: Any, expected: tuple[int, ...], needing: str) -> None:
  """Raises ModelError unless a model's output has the shape `expected`, which
  `needing`, such as "10 classes", need."""
  shape = getattr(output, "shape", None)
  if shape != expected:
    actual = f"of shape {shape}" if shape else f"a {type(output).__name__}"
    raise models.ModelError(
      f"the model's output is {actual}, but {needing} need {expected}; give the"
      " model that many outputs"
    )


def spread(count: int, limit: int) -> np.ndarray:
  """Returns `limit` evenly spaced indices of `count` things, or all indices."""
  return np.linspace(0, count - 1, min(limit, count)).astype(int)


def totals(
  score: Callable[..., Any], arrays: Sequence[np.ndarray], rows_per_call: int
) -> np.ndarray:
  """Returns the sums of a score over rows of arrays.

  Args:
    score: (some rows of each array) -> sums over them.
    arrays: each [m, ...].
    rows_per_call: largest number of rows in a call.
  """
  total: Any = 0
  for start in range(0, len(arrays[0]), rows_per_call):
    sums = score(*(array[start : start + rows_per_call] for array in arrays))
    total = total + np.array(jax.device_get(sums), float)
  return total


def join(
  pieces: Pieces,
  init: Callable[..., Any],
  evaluate: Callable[..., Any],
  data_of: DataOf,
  batch_size: int,
  *,
  example: jax.ShapeDtypeStruct,
  guess: float,
) -> Problem:
  """Returns the problem of a model and its data; its batch size can be changed.
  It has no pieces if the model cannot be cut. `example` has the shape and the
  dtype of the model's input."""
  loss, decay = whole_loss(pieces), models.DECAY
  cut_pieces: Pieces | None = pieces
  if isinstance(pieces.layers, models.Model):
    decay, cut_pieces = pieces.layers.decay(example), None

  return of_data(
    *(data_of, batch_size, init, loss, evaluate),
    pieces=cut_pieces,
    guess=guess,
    statistics_decay=decay,
  )


def of_data(
  data_of: DataOf,
  batch_size: int,
  init: Callable[..., Any],
  loss: Callable[..., Any],
  evaluate: Callable[..., Any],
  **options: Any,
) -> Problem:
  """Returns a problem with batches of `batch_size`, which can be changed later
  (`rebatch`); options are the other fields of a Problem."""

  def rebatch(size):
    return Problem(
      *(init, loss, evaluate, *data_of(size)), rebatch=rebatch, **options
    )

  return rebatch(batch_size)


def examples_of(
  examples: np.ndarray,
  labels: np.ndarray,
  partition: partitions.Partition = partitions.SHARED,
) -> DataOf:
  """Returns the `DataOf` of labelled examples, [n, ...] and int[n]."""
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

    batches(0, 1)  # raises for wrong arguments now, not in a run
    return batches, probe, len(labels) // size

  return data_of
