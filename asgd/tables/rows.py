"""Keyed rows: columns of equal length, sorted by their keys.

Tables, clients and the server's records of clients consist of keyed rows. A
column is an array [K, ...] of NumPy or JAX. NumPy arrays are mutated, JAX
arrays replaced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd.tables.keys import Keys

Column = Any  # [K, ...], of NumPy or JAX


def sum_of_squares(arrays: Iterable[Any]) -> tuple[float, int]:
  """Returns (sum of the squares of all elements, number of elements)."""
  arrays = [np.asarray(x) for x in arrays]
  total = sum(float(np.square(x, dtype=float).sum()) for x in arrays)
  return total, sum(x.size for x in arrays)


def rms(arrays: Iterable[Any]) -> float:
  """Returns the root mean square of all elements; 0 if there are none."""
  total, count = sum_of_squares(arrays)
  return float(np.sqrt(total / max(count, 1)))


def largest(rows: Any) -> np.ndarray:
  """Returns the largest absolute value of each row of [n, ...], float[n]."""
  return np.abs(np.asarray(rows)).reshape(len(rows), -1).max(1, initial=0)


def largest_first(changes: Any, rows: Any) -> np.ndarray:
  """Returns the indices of rows, int[n], sorted by relative change, the largest
  first: the largest change in a row divided by the row's largest value. Both
  arguments are [n, ...]."""
  # `tiny` avoids a division by 0 for a row of zeros.
  tiny = np.finfo(np.float64).tiny
  with np.errstate(over="ignore"):  # infinity is the largest change
    relative = largest(changes) / (largest(rows) + tiny)
  return np.argsort(-relative, kind="stable")


class KeyedRows:
  """Columns of equal length, with a key for each row.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import KeyedRows
    >>> rows = KeyedRows([4, 9], {"x": np.array([1.0, 2.0])})
    >>> rows.add([9], "x", np.array([0.5]))
    >>> rows.read([9, 4], "x").tolist(), rows.has([4, 5]).tolist()
    ([2.5, 1.0], [True, False])
  """

  def __init__(self, keys: Any, columns: Mapping[str, Column]):
    """Takes int64[K] keys, ascending, and columns [K, ...]."""
    self.keys: Keys = np.asarray(keys, np.int64)
    self.columns: dict[str, Column] = dict(columns)
    self._index()

  def _index(self) -> None:
    """Prepares the search for keys; called after each change of the keys."""
    keys = self.keys
    self._first = int(keys[0]) if keys.size else 0
    # Without gaps a row's position is the difference to the first key.
    self._is_contiguous = bool(
      keys.size and int(keys[-1]) - self._first + 1 == keys.size
    )

  def __len__(self) -> int:
    return len(self.keys)

  def has(self, keys: Any) -> np.ndarray:
    """Returns bool[n], whether each key has a row."""
    keys = np.asarray(keys, np.int64)
    if self._is_contiguous:
      positions = keys - self._first
      return (positions >= 0) & (positions < len(self))
    if not len(self):
      return np.zeros(len(keys), bool)
    if self._is_all_keys(keys):  # cheaper than the search below
      return np.ones(len(keys), bool)
    # `searchsorted` returns an index past the end for a key beyond the last.
    positions = np.searchsorted(self.keys, keys).clip(max=len(self) - 1)
    return self.keys[positions] == keys

  def positions(self, keys: Any) -> np.ndarray:
    """Returns int[n], the positions of the keys' rows, which must exist."""
    keys = np.asarray(keys, np.int64)
    if self._is_contiguous:
      return keys - self._first
    if self._is_all_keys(keys):
      return np.arange(len(keys))
    return np.searchsorted(self.keys, keys)

  def _is_all_keys(self, keys: Keys) -> bool:
    """Whether `keys` are all keys of the rows in order, the usual case."""
    return len(keys) == len(self) and bool((keys == self.keys).all())

  def insert(
    self, keys: Keys, make: Callable[[Keys], Mapping[str, Any]]
  ) -> None:
    """Adds a row for each key that has none.

    Args:
      keys: [n].
      make: (keys without rows, ascending) -> columns of their rows.
    """
    new_keys = np.sort(keys[~self.has(keys)])
    if not new_keys.size:
      return
    # Insert each key at its position: the keys stay sorted.
    columns, indices = make(new_keys), np.searchsorted(self.keys, new_keys)
    self.keys = np.insert(self.keys, indices, new_keys)
    for name, column in self.columns.items():
      xp = jnp if isinstance(column, jax.Array) else np
      self.columns[name] = xp.insert(column, indices, columns[name], axis=0)
    self._index()

  def read(self, keys: Any, name: str) -> Any:
    """Returns a copy of rows of a column."""
    return self.columns[name][self.positions(keys)]

  def write(self, keys: Any, name: str, values: Any) -> None:
    """Replaces rows of a column."""
    positions, column = self.positions(keys), self.columns[name]
    if isinstance(column, jax.Array):
      self.columns[name] = column.at[positions].set(values)
    else:
      column[positions] = values

  def add(self, keys: Any, name: str, values: Any) -> None:
    """Adds values to rows of a column; the keys must be distinct."""
    # With equal keys NumPy's += would count only one of their values.
    positions, column = self.positions(keys), self.columns[name]
    if isinstance(column, jax.Array):
      self.columns[name] = column.at[positions].add(values)
    else:
      column[positions] += values

  def between(self, start: int, stop: int) -> "KeyedRows":
    """Returns the rows with start <= key < stop; arrays may share memory."""
    left, right = np.searchsorted(self.keys, [start, stop])
    columns = {
      name: column[left:right] for name, column in self.columns.items()
    }
    return KeyedRows(self.keys[left:right], columns)

  def cut(self, start: int, stop: int) -> "KeyedRows":
    """Removes and returns the rows with start <= key < stop."""
    part = self.between(start, stop)
    self.keep((self.keys < start) | (self.keys >= stop))
    return part

  def keep(self, selected: np.ndarray) -> None:
    """Keeps only the rows selected by bool[K]."""
    self.keys = self.keys[selected]
    self.columns = {
      name: column[selected] for name, column in self.columns.items()
    }
    self._index()

  def join(self, part: "KeyedRows") -> None:
    """Adds rows that another instance has cut."""
    self.insert(part.keys, lambda keys: part.columns)

  def pack(self) -> dict[str, np.ndarray]:
    """Returns the rows as a tree of arrays."""
    columns = {
      name: np.asarray(column) for name, column in self.columns.items()
    }
    return {"keys": self.keys, **columns}

  @classmethod
  def unpack(cls, tree: Mapping[str, np.ndarray]) -> "KeyedRows":
    """Returns rows from what `pack` returned; arrays are shared."""
    columns = dict(tree)
    return cls(columns.pop("keys"), columns)


class RowCopies:
  """The server's record of the workers' copies: which rows each worker has, and
  by how much each copy differs from the server's row.

  The difference is the sum of the changes of the row since the server sent it.
  """

  def __init__(
    self, shapes: Mapping[str, tuple[int, ...]], workers: Sequence[int]
  ):
    """Starts without copies; `shapes` are the shapes of rows, by table."""
    self._shapes = dict(shapes)
    # Worker -> table -> rows of the worker's copies.
    self._copies = {worker: self._no_copies() for worker in workers}

  def _new_columns(self, name: str, keys: Any) -> dict[str, np.ndarray]:
    """Returns the columns of new copies, which lack nothing."""
    missing_change = np.zeros((len(keys), *self._shapes[name]))
    return {"lacks": missing_change, "changed": np.zeros(len(keys), bool)}

  def _no_copies(self) -> dict[str, KeyedRows]:
    return {
      name: KeyedRows([], self._new_columns(name, ())) for name in self._shapes
    }

  def join(self, worker: int) -> None:
    """Clears the copies of a worker: its new incarnation has none."""
    self._copies[worker] = self._no_copies()

  def leave(self, worker: int) -> None:
    """Removes a worker."""
    del self._copies[worker]

  def copies_of(self, worker: int) -> dict[str, KeyedRows]:
    """Returns table -> the worker's copies. The columns are `lacks`, the change
    that is missing from the copy, and `changed`, whether the row has changed
    since the server sent it."""
    return self._copies[worker]

  def register(self, worker: int, name: str, keys: Keys) -> None:
    """Records that a worker requested rows of a table, and that they are
    sent."""
    copies = self._copies[worker][name]
    copies.insert(keys, lambda new_keys: self._new_columns(name, new_keys))
    self.record_sent(worker, name, keys)

  def record_sent(self, worker: int, name: str, keys: Keys) -> None:
    """Records that rows are sent to a worker that has copies of them."""
    copies = self._copies[worker][name]
    copies.write(keys, "lacks", 0)
    copies.write(keys, "changed", False)

  def add_change(
    self, sender: int | None, name: str, keys: Keys, change: np.ndarray
  ) -> None:
    """Records a change of rows, which the workers' copies now lack.

    Args:
      sender: the worker that pushed the change and has applied it to its own
        copies; None if no worker has applied the change.
      name: the name of the table.
      keys: the keys of the rows.
      change: [n, ...].
    """
    for worker, copies in self._copies.items():
      is_copied = copies[name].has(keys)
      if worker != sender and is_copied.any():
        copies[name].add(keys[is_copied], "lacks", change[is_copied])
        copies[name].write(keys[is_copied], "changed", True)

  def range_part(self, name: str, start: int, stop: int) -> list[list[Any]]:
    """Returns (worker, copies) for the rows start <= key < stop of a table;
    copies are trees of arrays."""
    return [
      [worker, tables[name].between(start, stop).pack()]
      for worker, tables in self._copies.items()
    ]

  def set_range(
    self, name: str, start: int, stop: int, parts: Sequence[list[list[Any]]]
  ) -> None:
    """Keeps the copies of rows start <= key < stop of a table, and adds the
    copies that other shards have given (`parts`)."""
    for tables in self._copies.values():
      keys = tables[name].keys
      tables[name].keep((keys >= start) & (keys < stop))
    # A part has all workers' copies of the rows that one other shard gave.
    for worker, tree in (pair for part in parts for pair in part):
      self._copies[worker][name].join(KeyedRows.unpack(tree))

  def pack(self) -> list[Any]:
    """Returns (worker, copies by table) as a tree of arrays."""
    return [
      [worker, {name: rows.pack() for name, rows in tables.items()}]
      for worker, tables in self._copies.items()
    ]

  def unpack(self, packed: Sequence[Any]) -> None:
    """Restores the copies that `pack` returned."""
    self._copies = {
      worker: {name: KeyedRows.unpack(tree) for name, tree in tables.items()}
      for worker, tables in packed
    }
