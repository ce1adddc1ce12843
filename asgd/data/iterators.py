"""Iterators of batches, one for each worker, read in the order of its jobs.

An iterator has a position, so its batch is no function of (worker, job). Each
new job of a worker takes the next batch of its iterator. A run can resume, and
a worker can be replaced, only if the position can be saved:

- the iterator has `get_state()` and `set_state(state)` (grain's iterators);
- or the iterable that makes it has `state_dict()` and `load_state_dict(state)`
  (`datasets.IterableDataset`, torchdata's `StatefulDataLoader`).
"""

import base64
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, checks, safe_files

_RESUMABLE_REMEDY = (
  "give iterators with get_state() and set_state(state) (grain.IterDataset), or"
  " iterables with state_dict() and load_state_dict(state), or a function"
  " (worker, job) -> batch"
)


def _has_methods(value: Any, *methods: str) -> bool:
  return all(callable(getattr(value, name, None)) for name in methods)


def _encode_state(state: Any) -> Any:
  """Returns an iterator's state as data for JSON. Raises ValueError for a part
  that is neither plain data nor an array."""
  if isinstance(state, dict) and all(isinstance(key, str) for key in state):
    return {"dict": {key: _encode_state(value) for key, value in state.items()}}
  if isinstance(state, list | tuple):
    return {type(state).__name__: [_encode_state(value) for value in state]}
  if isinstance(state, bytes):
    return {"bytes": base64.b64encode(state).decode()}
  if isinstance(state, np.ndarray | np.generic):
    content = base64.b64encode(state.tobytes()).decode()
    return {"array": [state.dtype.str, list(state.shape), content]}
  if state is None or isinstance(state, bool | int | float | str):
    return state
  raise ValueError(
    f"the state of an iterator holds {checks.shown(state)}; it must be made of"
    " dicts with text keys, lists, tuples, numbers, texts, bytes and arrays"
  )


def _decode_state(data: Any) -> Any:
  """Returns the state that `_encode_state` was given."""
  if not isinstance(data, dict):
    return data
  # A dict here always has one key, the kind of the value that it encodes.
  ((kind, value),) = data.items()
  if kind == "dict":
    return {key: _decode_state(part) for key, part in value.items()}
  if kind == "bytes":
    return base64.b64decode(value)
  if kind == "array":
    dtype, shape, content = value
    # `copy`: an array of a buffer is read-only, and a state may be changed.
    flat = np.frombuffer(base64.b64decode(content), dtype)
    return flat.reshape(shape).copy()
  values = [_decode_state(part) for part in value]
  return tuple(values) if kind == "tuple" else values


class Form(NamedTuple):
  """The structure, shapes and dtypes of each batch."""

  structure: Any
  leaves: tuple[tuple[tuple[int, ...], Any], ...]  # (shape, dtype)

  @classmethod
  def of(cls, batch: base.Batch) -> "Form":
    """Returns the form of a batch of NumPy arrays."""
    leaves, structure = jax.tree.flatten(batch)
    return cls(structure, tuple((x.shape, x.dtype) for x in leaves))

  def __str__(self) -> str:
    """Returns dtypes and shapes as a short text."""
    texts = [f"{dtype}{list(shape)}" for shape, dtype in self.leaves]
    tree = jax.tree.unflatten(self.structure, texts)
    return checks.shown(tree).replace("'", "")


class Source(NamedTuple):
  """A caller's factory, and the form of its batches."""

  make: Callable[[int], Any]  # worker -> an iterator or an iterable
  read: Callable[[Any, str], base.Batch]  # (batch, its name) -> NumPy arrays
  form: Form | None = None  # None: not known yet

  def example(self) -> base.Batch:
    """Returns a batch of zeros."""
    assert self.form is not None
    leaves = [np.zeros(*leaf) for leaf in self.form.leaves]
    return jax.tree.unflatten(self.form.structure, leaves)


class WorkerIterator:
  """The iterator of one worker, with its position."""

  def __init__(self, source: Source, worker: int):
    """Makes the iterator. Raises ValueError if the factory makes none."""
    self._source, self._worker = source, worker
    with checks.user_code(f"data({worker}) fails"):
      self.iterable = source.make(worker)
    is_indexed = isinstance(self.iterable, Iterable) and _has_methods(
      self.iterable, "__getitem__", "__len__"
    )
    is_iterator = _has_methods(self.iterable, "__next__")
    if is_indexed or not (is_iterator or isinstance(self.iterable, Iterable)):
      remedy = "return an iterator of batches, such as iter(loader)"
      if is_indexed:
        remedy = "give it as data, without a function, or return iter(...)"
      raise ValueError(
        f"data({worker}) returned {checks.shown(self.iterable)}, which is no"
        f" iterator: {remedy}"
      )
    # Batches drawn, passes completed, and whether the position was restored.
    self.drawn, self._epoch, self._restored = 0, 0, False
    self._start()

  def _start(self) -> None:
    """Starts a pass over an iterable; an iterator has only one pass."""
    with checks.user_code(f"the iterator of worker {self._worker} fails"):
      is_single_pass = _has_methods(self.iterable, "__next__")
      # An Iterator, which may have get_state and set_state.
      self._iterator: Any = (
        self.iterable if is_single_pass else iter(self.iterable)
      )

  @property
  def keeps_position(self) -> bool:
    """Whether the iterable, not its iterator, has the position."""
    return _has_methods(self.iterable, "state_dict", "load_state_dict")

  @property
  def resumable(self) -> bool:
    """Whether the position can be saved and restored."""
    iterator_has_state = _has_methods(self._iterator, "get_state", "set_state")
    return iterator_has_state or self.keeps_position

  def take(self) -> base.Batch:
    """Returns the next batch. An iterable starts again at its end; ValueError
    for an iterator that ends, or a batch of another form."""
    name = f"the iterator of worker {self._worker}"
    with checks.user_code(f"{name} fails at batch {self.drawn}"):
      batch = next(self._iterator, self)
      if batch is self and self._iterator is not self.iterable:
        self._epoch += 1
        # A datasets.IterableDataset starts each pass where it was restored.
        if self._restored and hasattr(self.iterable, "with_format"):
          self.iterable, self._restored = self._source.make(self._worker), False
        self._start()
        batch = next(self._iterator, self)
    # `self` marks the end: no iterator yields it.
    if batch is self:
      raise ValueError(
        f"{name} ended after {self.drawn} batches, but the run needs more:"
        " repeat it (ds.repeat(), itertools.cycle), or return an iterable,"
        " which starts again at its end"
      )
    batch = self._source.read(batch, f"batch {self.drawn} of {name}")
    form, expected = Form.of(batch), self._source.form
    if expected is not None and form != expected:
      raise ValueError(
        f"batch {self.drawn} of {name} is {form}, but the first batch of worker"
        f" 0 is {expected}: all batches must have one form; drop the last one"
        " of a pass (drop_last=True, drop_remainder=True), or pad it"
      )
    self.drawn += 1
    return batch

  def save(self) -> dict[str, Any]:
    """Returns the position as data for JSON, without a state if the iterator
    has none."""
    position: dict[str, Any] = {"drawn": self.drawn, "epoch": self._epoch}
    remedy = ": change it, or return an iterator without it, (x for x in ...)"
    with checks.user_code("the state of an iterator cannot be saved", remedy):
      if _has_methods(self._iterator, "get_state", "set_state"):
        position["iterator"] = _encode_state(self._iterator.get_state())
      elif self.resumable:
        position["iterable"] = _encode_state(self.iterable.state_dict())
    return position

  def restore(self, position: dict[str, Any]) -> None:
    """Moves a new iterator to a saved position; ValueError without a state."""
    if not position["drawn"]:
      return
    if not {"iterator", "iterable"} & set(position) or not self.resumable:
      raise ValueError(
        f"worker {self._worker} has drawn {position['drawn']} batches from an"
        " iterator whose position cannot be restored, so the run cannot"
        f" continue: start anew in another folder, and {_RESUMABLE_REMEDY}"
      )
    with checks.user_code(
      f"the iterator of worker {self._worker} cannot be restored"
    ):
      if "iterable" in position:
        self._restored = True
        self.iterable.load_state_dict(_decode_state(position["iterable"]))
        self._start()
      else:
        self._iterator.set_state(_decode_state(position["iterator"]))
    self.drawn, self._epoch = position["drawn"], position["epoch"]


class IteratorBatches:
  """Batches of jobs from the iterators of all workers.

  A worker asks for its jobs in the order in which it does them, whatever their
  numbers. It may ask for its last job again.
  """

  def __init__(self, source: Source, steps: int = 1):
    """Reads `steps` batches for each job, stacked if there are several."""
    self.source, self.steps = source, steps
    self._iterators: dict[int, WorkerIterator] = {}
    self._last: dict[int, tuple[int, base.Batch]] = {}  # (job, batch)

  def of_steps(self, steps: int) -> "IteratorBatches":
    """Returns the same batches, for jobs of `steps` batches each."""
    return IteratorBatches(self.source, steps)

  def _stack(self, batches: list[base.Batch]) -> base.Batch:
    if self.steps == 1:
      return batches[0]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

  def example(self, worker: int) -> base.Batch:
    """Returns zeros in the form of a job, without reading an iterator."""
    del worker
    return self._stack([self.source.example()] * self.steps)

  def __call__(self, worker: int, job: int) -> base.Batch:
    """Returns the batch of a worker's next job, or that of its last one."""
    worker, job = int(worker), int(job)
    last, batch = self._last.get(worker, (-1, None))
    # An iterator has no way back, so a repeated job gets the stored batch.
    if job == last:
      return batch
    if worker not in self._iterators:
      self._iterators[worker] = WorkerIterator(self.source, worker)
    iterator = self._iterators[worker]
    batch = self._stack([iterator.take() for _ in range(self.steps)])
    self._last[worker] = job, batch
    return batch

  def save(self) -> dict[str, Any]:
    """Returns the positions of all iterators, as data for JSON."""
    return {str(w): iterator.save() for w, iterator in self._iterators.items()}

  def restore(self, positions: dict[str, Any]) -> None:
    """Continues from saved positions; ValueError if one has no state."""
    for worker, position in positions.items():
      iterator = WorkerIterator(self.source, int(worker))
      iterator.restore(position)
      self._iterators[int(worker)] = iterator

  def kept_in(self, folder: Path, worker: int) -> "ResumableBatches":
    """Returns the batches of one live worker. A folder of the run keeps the
    worker's position."""
    return ResumableBatches(self, folder / f"iterator-{worker}.json", worker)


class ResumableBatches:
  """Batches of one incarnation of a live worker.

  The position is written after each job's batch was taken. The next incarnation
  continues there, so it does not repeat the batches of lost jobs.
  """

  def __init__(self, batches: IteratorBatches, path: Path, worker: int):
    """Continues from the file, if an earlier incarnation wrote it."""
    self._batches, self._path = batches.of_steps(batches.steps), path
    self._job = -1
    if not path.parent.is_dir():
      raise ValueError(
        f"worker {worker} does not see {path.parent}, where the positions of"
        " iterators are kept: put the folder on a file system that all machines"
        " share, or give a function (worker, job) -> batch"
      )
    if path.exists():
      self._batches.restore({str(worker): json.loads(path.read_bytes())})

  def example(self, worker: int) -> base.Batch:
    """Returns zeros in the form of a job, without reading an iterator."""
    return self._batches.example(worker)

  def __call__(self, worker: int, job: int) -> base.Batch:
    """Returns the batch of the worker's next job, or that of its last one."""
    batch = self._batches(worker, job)
    if job != self._job:
      self._job = job
      position = self._batches.save()[str(int(worker))]
      # Write before the batch is used: a new incarnation must not repeat it.
      safe_files.write(self._path, json.dumps(position))
    return batch
