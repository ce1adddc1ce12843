"""A caller's data, in any form, as batches of jobs."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks, data, stacking
from asgd.data import iterators
from asgd.problems.problem import Batches

_MOST_EXAMPLES = 10**9  # for more, no random order is drawn
_MOST_STORED = 10_000  # elements of indexed data that `Stream.stored` yields
# Threads (workers, stages of a pipeline) take turns to read the batches of a
# loader that refills its arrays: another thread may not have copied them yet.
_READING = threading.RLock()
_REMEDY = (
  "give arrays with batch_size=, something with len() and an index (a list of"
  " batches, a grain.MapDataset), a function (worker, job) -> batch, or one"
  " (worker) -> iterator of batches"
)


def accepts(function: Callable[..., Any], count: int) -> bool:
  """Whether a function can be called with `count` positional arguments."""
  try:
    inspect.signature(function).bind(*range(count))
  except TypeError:
    return False
  except ValueError:  # a builtin has no signature: assume that it can
    return True
  return True


def takes(function: Callable[..., Any], name: str) -> bool:
  """Whether a function has an argument `name`."""
  try:
    return name in inspect.signature(function).parameters
  except (TypeError, ValueError):
    return False


def arguments_of(function: Callable[..., Any]) -> str:
  """Returns a function's arguments as text, for errors."""
  try:
    return str(inspect.signature(function))
  except (TypeError, ValueError):
    return "(?)"


class Stream(NamedTuple):
  """Data as batches of jobs."""

  batches: Callable[[int, int], Batches]  # (seed, workers) -> Batches
  first: base.Batch  # of worker 0, job 0
  size: int  # examples in a batch; 1 if the number is not known
  per_epoch: int | None  # batches in an epoch; None: the data have no end
  # batch size -> the same data; None: they were given as batches.
  resize: "Callable[[int], Stream] | None" = None
  sequential: bool = False  # from iterators, see `data.iterators`
  repeatable: bool = True  # the same calls give the same batches
  # Yields (label, arrays) of data that are in memory, or are indexed.
  stored: Callable[[], Iterable[tuple[str, Any]]] = tuple


def read_data(user_data: Any, batch_size: int | None = None) -> Stream:
  """Reads data in any form that a user may have.

  Args:
    user_data: one of these forms:
      - arrays with a leading axis of examples, in a tuple, a dict or alone;
      - a `datasets.Dataset`, with such arrays as columns;
      - anything with len() and an index: of examples, or of batches if there is
        no `batch_size`;
      - a pure function (worker, job) -> batch;
      - a function worker -> iterator of batches, see `data.iterators`.
    batch_size: examples in a batch. Each epoch visits them in a new random
      order; those at its end that do not fill a batch are dropped.

  Raises ValueError for anything else.

  Example:
    >>> stream = read_data((np.zeros((10, 3)), np.arange(10)), batch_size=5)
    >>> stream.first[0].shape, stream.size, stream.per_epoch
    ((5, 3), 5, 2)
  """
  if batch_size is not None:
    checks.integer("batch_size", batch_size)
  if isinstance(user_data, Mapping):
    splits = [key for key, x in user_data.items() if data.columns.is_table(x)]
    if splits:
      raise ValueError(
        f"data has the splits {', '.join(splits)}: choose one, such as"
        f" data[{splits[0]!r}]"
      )
  # A tuple or a dict holds arrays; a list holds batches.
  if isinstance(user_data, (tuple, Mapping, np.ndarray, jax.Array)):
    return _of_arrays(user_data, batch_size)
  if isinstance(user_data, str) or user_data is None:
    raise ValueError(f"data cannot be {checks.shown(user_data)}: {_REMEDY}")
  if data.columns.is_table(user_data):
    return _of_arrays(data.columns.arrays(user_data), batch_size)
  # A list of arrays is read as a list of batches, not as columns.
  if hasattr(user_data, "__getitem__") and hasattr(user_data, "__len__"):
    return _of_indexed(user_data, batch_size)
  if callable(user_data):
    read = _of_iterators if _takes_worker_alone(user_data) else _of_function
    return read(user_data, batch_size)
  kind = type(user_data).__name__
  if hasattr(user_data, "__next__"):
    raise ValueError(
      f"data ({kind}) is an iterator, and each worker needs its own: {_REMEDY}"
    )
  if isinstance(user_data, Iterable):
    raise ValueError(
      f"data ({kind}) can be iterated over, and each worker needs its own"
      " iterator: give a function, data=lambda worker: iter(...), which makes"
      " it for a worker"
    )
  raise ValueError(f"data ({kind}) is of no known form: {_REMEDY}")


def as_batch(
  value: Any, label: str, as_array: Callable[[Any], np.ndarray] = np.array
) -> base.Batch:
  """Returns a batch as NumPy arrays. Raises ValueError, which names it as
  `label`, for arrays that JAX cannot compute with.

  Arrays are copied. A loader may refill the arrays of its last batch, and JAX
  on a CPU reads NumPy arrays in place, and later than it is called.
  """
  batch = jax.tree.map(as_array, value)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.dtype.kind not in "biufcV":
      raise ValueError(
        f"{label}{jax.tree_util.keystr(path)} has dtype {leaf.dtype}, but a"
        " batch holds arrays of numbers: encode or drop it"
      )
  return batch


def copied(batches: Batches) -> Batches:
  """Returns the batches of a user's function as copies, see `as_batch`."""
  copies_already = data.ExampleBatches, iterators.IteratorBatches
  if any(isinstance(batches, kind) for kind in copies_already):
    return batches  # new arrays in each call
  return lambda worker, job: jax.tree.map(_copy, batches(worker, job))


def _copy(leaf: Any) -> Any:
  """Returns a copy of an array; keys and numbers as they are."""
  is_array = isinstance(leaf, np.ndarray | jax.Array)
  return np.array(leaf) if is_array and not is_key(leaf) else leaf


def _share_memory(batch: Any, later_batch: Any) -> bool:
  """Whether a loader has refilled arrays of a batch for a later batch."""
  array_lists = [
    [np.asarray(x) for x in jax.tree.leaves(tree) if hasattr(x, "__array__")]
    for tree in (batch, later_batch)
  ]
  return any(map(np.may_share_memory, *array_lists))


def is_key(leaf: Any) -> bool:
  """Whether a leaf is an array of keys, which NumPy does not have."""
  return isinstance(leaf, jax.Array) and jnp.issubdtype(
    leaf.dtype, jax.dtypes.prng_key
  )


def _shapes(batch):
  return jax.tree.map(lambda x: (*x.shape, str(x.dtype)), batch)


def describe_batch(batch: base.Batch) -> str:
  """Returns the shapes of a batch as a short text."""
  text = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
  return checks.shown(text).replace("'", "")


def _size(batch) -> int:
  """Returns the number of examples in a batch; 1 if its arrays do not agree."""
  sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  return max(*sizes.pop(), 1) if len(sizes) == 1 and () not in sizes else 1


def _of_rows(
  take: Callable[[Any], Any],
  count: int,
  size: int,
  stored: Callable[[], Iterable[tuple[str, Any]]],
) -> Stream:
  """Returns the stream of `count` examples; take(rows) is a batch of them."""
  if count > _MOST_EXAMPLES:
    raise ValueError(
      f"data has {count:,} examples, too many to draw an order: give it without"
      " repeat(), or in batches, without batch_size"
    )
  # The first batch would not be full, so an epoch would have none.
  if size > count:
    raise ValueError(
      f"batch_size {size} is larger than the {count} examples; use at most"
      f" {count}"
    )
  rows = np.arange(count)

  def batches(seed, workers):
    # `make_batches` draws row numbers; `take` turns them into examples.
    row_batches = data.make_batches(
      rows, rows, batch_size=size, seed=seed, workers=workers
    )
    return row_batches._replace(take=take)

  def resize(size):
    return _of_rows(take, count, size, stored)

  first = take(rows[:size])
  return Stream(batches, first, size, count // size, resize, stored=stored)


def _of_arrays(user_data: Any, size: int | None) -> Stream:
  """Reads arrays with a leading axis of examples."""
  # Not copied: `take` copies the rows of each batch.
  arrays = as_batch(user_data, "data", np.asarray)
  shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
  if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
    remedy = "if they are batches already, put them into a list"
    if () in shapes:  # each number of a Python list is a leaf
      remedy = "give numpy.asarray(...) in place of each list of numbers"
    raise ValueError(
      "data must be arrays with a leading axis of examples, of equal length,"
      f" not of shapes {checks.shown(shapes)}; {remedy}"
    )
  count = shapes[0][0]
  if size is None:
    raise ValueError(
      f"data are arrays of {count:,} examples: give the number in a batch, such"
      " as batch_size=32"
    )

  def take(rows):
    return jax.tree.map(lambda leaf: leaf[rows], arrays)

  return _of_rows(take, count, size, lambda: [("data", arrays)])


def _of_indexed(user_data: Any, size: int | None) -> Stream:
  """Reads a list of batches, or a data set of examples."""
  count = len(user_data)
  if not count:
    raise ValueError("data is empty: len(data) is 0")

  def load_element(index):
    with checks.user_code(f"data[{index}] fails", f"; {_REMEDY}"):
      return user_data[index]

  is_endless = count > _MOST_EXAMPLES  # repeat() has such a length
  last_index = 1 if is_endless else count - 1
  # The first is copied before the loader may refill its arrays for the last.
  stored_first = load_element(0)
  first = as_batch(stored_first, "data[0]")
  stored_last = load_element(last_index)
  last = as_batch(stored_last, f"data[{last_index}]")
  refills_arrays = _share_memory(stored_first, stored_last)

  def element(index):
    with _READING if refills_arrays else contextlib.nullcontext():
      return as_batch(load_element(index), f"data[{index}]")

  unit = "batches" if size is None else "examples"
  # Only the last batch of a data set can be smaller.
  if _shapes(first) != _shapes(last):
    remedy = "pad them"
    if size is None:
      remedy += ", drop the last (drop_remainder=True), or give batch_size="
    raise ValueError(
      f"data[0] is {describe_batch(first)}, but the last is"
      f" {describe_batch(last)}: {unit} must have one shape; {remedy}"
    )

  def stored_elements():
    for index in range(min(count, _MOST_STORED)):
      yield f"data[{index}]", element(index)

  if size is None:

    def batches(seed, workers):
      del seed, workers
      return lambda worker, job: element(job % count)

    facts = _size(first), None if is_endless else count
    return Stream(batches, first, *facts, stored=stored_elements)

  def take(rows):
    return stacking.stack([element(int(row)) for row in rows])

  return _of_rows(take, count, size, stored_elements)


def _of_function(function: Callable[..., Any], size: int | None) -> Stream:
  """Reads a function (worker, job) -> batch."""
  if not accepts(function, 2):
    raise ValueError(
      "data must be a function (worker, job) -> batch, or (worker) -> iterator,"
      f" of integers; it takes {arguments_of(function)}"
    )
  if size is not None:
    raise ValueError(
      "batch_size is for arrays and data sets; a function (worker, job) ->"
      " batch decides the size itself: drop it"
    )

  def call_function(worker, job):
    result = function(int(worker), int(job))
    if hasattr(result, "__next__"):
      raise ValueError(
        f"data({worker}, {job}) returned an iterator"
        f" ({type(result).__name__}): a function that makes iterators takes the"
        " worker alone"
      )
    return result

  label = "data(worker, job)"
  with checks.user_code("data(0, 0) fails", passes=(ValueError,)):
    # Call twice: a pure function returns the same bits. Each result is copied
    # before the next call, which may refill its arrays.
    first_result = call_function(0, 0)
    first = as_batch(first_result, label)
    refills_arrays = _share_memory(first_result, call_function(0, 1))
    repeat = as_batch(call_function(0, 0), label)

  def batch(worker, job):
    with _READING if refills_arrays else contextlib.nullcontext():
      return as_batch(call_function(worker, job), label)

  # Shapes may differ between batches; the structure is that of one program.
  structure: Any = jax.tree.structure(first)

  def checked_batch(worker, job):
    value = batch(worker, job)
    if jax.tree.structure(value) != structure:
      raise ValueError(
        f"data({worker}, {job}) is {describe_batch(value)}, but data(0, 0) was"
        f" {describe_batch(first)}: all batches must have one structure"
      )
    return value

  bits = [[x.tobytes() for x in jax.tree.leaves(y)] for y in (first, repeat)]
  if _shapes(first) != _shapes(repeat) or bits[0] != bits[1]:
    raise ValueError(
      "data(0, 0) gave two different batches: it must be a function of worker"
      " and job, or no run could be resumed or replayed; draw from"
      " np.random.default_rng((seed, worker, job))"
    )
  return Stream(lambda seed, workers: checked_batch, first, _size(first), None)


def _takes_worker_alone(function: Callable[..., Any]) -> bool:
  """Whether a function of data needs one argument; others have defaults."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return False
  if any(p.kind is p.VAR_POSITIONAL for p in parameters):
    return False
  return accepts(function, 1)


def _of_iterators(
  make_iterator: Callable[..., Any], size: int | None
) -> Stream:
  """Reads a function worker -> iterator of batches."""
  if size is not None:
    raise ValueError(
      "batch_size is for arrays and data sets; the iterators of a function"
      " (worker) -> iterator decide the size themselves: drop it"
    )
  source = iterators.Source(make_iterator, _as_batch_of_arrays)
  iterator, second_iterator = (
    iterators.WorkerIterator(source, 0) for _ in range(2)
  )
  # Two calls must not share a position; a list, which has none, is fine.
  iterable = iterator.iterable
  has_position = hasattr(iterable, "__next__") or iterator.keeps_position
  if iterable is second_iterator.iterable and has_position:
    raise ValueError(
      f"data(0) returned the same {type(iterable).__name__} twice, and a"
      " position cannot be shared: make a new one in each call"
    )
  first = iterator.take()
  iterator.save()  # raises now, and not by the first checkpoint
  source = source._replace(form=iterators.Form.of(first))

  def batches(seed, workers):
    del seed, workers
    return iterators.IteratorBatches(source)

  return Stream(
    *(batches, first, _size(first), None),
    sequential=True,
    repeatable=iterator.resumable,
  )


def _as_batch_of_arrays(value: Any, label: str) -> base.Batch:
  """Returns an iterator's batch as NumPy arrays."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(value):
    if isinstance(leaf, (bool, int, float, str)) and path:
      raise ValueError(
        f"{label}{jax.tree_util.keystr(path)} is {checks.shown(leaf)}, but a"
        " batch holds arrays: stack its examples with numpy.stack, or use"
        " with_format('numpy') and batch(...) of a datasets.IterableDataset"
      )
  return as_batch(value, label)
