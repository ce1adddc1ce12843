"""Rows by key: columns of equal length, sorted by their keys.

Tables, clients and the server's notes on clients are made of them. A column is
an array [K, ...] of NumPy, which is written to in place, or of JAX, which is
not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd.tables.keys import Keys

Column = Any  # [K, ...], of NumPy or JAX


def squares(arrays: Iterable[Any]) -> tuple[float, int]:
  """Returns the sum of the squares of all elements, and how many they are."""
  arrays = [np.asarray(x) for x in arrays]
  total = sum(float(np.square(x, dtype=float).sum()) for x in arrays)
  return total, sum(x.size for x in arrays)


def rms(arrays: Iterable[Any]) -> float:
  """Returns the root mean square of all elements; 0 if there are none."""
  total, count = squares(arrays)
  return float(np.sqrt(total / max(count, 1)))


class KeyedRows:
  """Columns whose rows have keys.

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

  def _index(self):
    keys = self.keys
    self._first = int(keys[0]) if keys.size else 0
    # The keys are a range: a position is a difference.
    self._whole = bool(
      keys.size and int(keys[-1]) - self._first + 1 == keys.size
    )

  def __len__(self) -> int:
    return len(self.keys)

  def has(self, keys: Any) -> np.ndarray:
    """Returns bool[n], which keys have rows."""
    keys = np.asarray(keys, np.int64)
    if self._whole:
      at = keys - self._first
      return (at >= 0) & (at < len(self))
    if not len(self):
      return np.zeros(len(keys), bool)
    if self._are_all(keys):
      return np.ones(len(keys), bool)
    at = np.searchsorted(self.keys, keys).clip(max=len(self) - 1)
    return self.keys[at] == keys

  def positions(self, keys: Any) -> np.ndarray:
    """Returns int[n], where the rows of keys are, which there must be."""
    keys = np.asarray(keys, np.int64)
    if self._whole:
      return keys - self._first
    if self._are_all(keys):
      return np.arange(len(keys))
    return np.searchsorted(self.keys, keys)

  def _are_all(self, keys):
    """Whether keys are those that there are: often a worker has no others."""
    return len(keys) == len(self) and bool((keys == self.keys).all())

  def insert(
    self, keys: Keys, make: Callable[[Keys], Mapping[str, Any]]
  ) -> None:
    """Makes rows for keys that have none."""
    new = np.sort(keys[~self.has(keys)])
    if not new.size:
      return
    made, where = make(new), np.searchsorted(self.keys, new)
    self.keys = np.insert(self.keys, where, new)
    for name, column in self.columns.items():
      xp = jnp if isinstance(column, jax.Array) else np
      self.columns[name] = xp.insert(column, where, made[name], axis=0)
    self._index()

  def read(self, keys: Any, name: str) -> Any:
    """Returns rows of a column, a copy."""
    return self.columns[name][self.positions(keys)]

  def write(self, keys: Any, name: str, values: Any) -> None:
    """Replaces rows of a column."""
    at, column = self.positions(keys), self.columns[name]
    if isinstance(column, jax.Array):
      self.columns[name] = column.at[at].set(values)
    else:
      column[at] = values

  def add(self, keys: Any, name: str, values: Any) -> None:
    """Adds to rows of a column; the keys differ."""
    at, column = self.positions(keys), self.columns[name]
    if isinstance(column, jax.Array):
      self.columns[name] = column.at[at].add(values)
    else:
      column[at] += values

  def between(self, start: int, stop: int) -> "KeyedRows":
    """Returns the rows with start <= key < stop; arrays may be shared."""
    left, right = np.searchsorted(self.keys, [start, stop])
    columns = {k: x[left:right] for k, x in self.columns.items()}
    return KeyedRows(self.keys[left:right], columns)

  def cut(self, start: int, stop: int) -> "KeyedRows":
    """Takes out the rows with start <= key < stop, and returns them."""
    part = self.between(start, stop)
    self.keep((self.keys < start) | (self.keys >= stop))
    return part

  def keep(self, which: np.ndarray) -> None:
    """Drops all rows but some, bool[K]."""
    self.keys = self.keys[which]
    self.columns = {name: x[which] for name, x in self.columns.items()}
    self._index()

  def join(self, part: "KeyedRows") -> None:
    """Takes rows in that `cut` has taken out elsewhere."""
    self.insert(part.keys, lambda keys: part.columns)

  def pack(self) -> dict[str, np.ndarray]:
    """Returns it as a tree of arrays."""
    columns = {name: np.asarray(x) for name, x in self.columns.items()}
    return {"keys": self.keys, **columns}

  @classmethod
  def unpack(cls, tree: Mapping[str, np.ndarray]) -> "KeyedRows":
    """Returns the rows that were packed; arrays are shared."""
    columns = dict(tree)
    return cls(columns.pop("keys"), columns)


class RowCopies:
  """Which rows each worker has, and what its copies of them lack, as the server
  of tables knows them.

  A copy lacks the sum of the changes of its row since the row was sent.
  """

  def __init__(
    self, shapes: Mapping[str, tuple[int, ...]], workers: Sequence[int]
  ):
    """Begins with no copies; `shapes` are those of rows, by table."""
    self._shapes = dict(shapes)
    self._copies = {worker: self._none() for worker in workers}

  def _made(self, name, keys):
    lacks = np.zeros((len(keys), *self._shapes[name]))
    return {"lacks": lacks, "changed": np.zeros(len(keys), bool)}

  def _none(self):
    return {name: KeyedRows([], self._made(name, ())) for name in self._shapes}

  def join(self, worker: int) -> None:
    """Forgets the copies of a worker that begins anew."""
    self._copies[worker] = self._none()

  def leave(self, worker: int) -> None:
    """Drops a worker."""
    del self._copies[worker]

  def of(self, worker: int) -> dict[str, KeyedRows]:
    """Returns the copies of a worker, by table: columns `lacks`, and `changed`,
    whether the row was changed since it was sent."""
    return self._copies[worker]

  def register(self, worker: int, name: str, keys: Keys) -> None:
    """Notes that rows of a table are sent to a worker, which asks for them."""
    copies = self._copies[worker][name]
    copies.insert(keys, lambda new: self._made(name, new))
    self.sent(worker, name, keys)

  def sent(self, worker: int, name: str, keys: Keys) -> None:
    """Notes that rows are sent to a worker that has copies of them."""
    copies = self._copies[worker][name]
    copies.write(keys, "lacks", 0)
    copies.write(keys, "changed", False)

  def change(
    self, sender: int | None, name: str, keys: Keys, change: np.ndarray
  ) -> None:
    """Adds a change of rows to what copies lack, but for those of a sender,
    which has its own increments. None: no worker has it."""
    for worker, copies in self._copies.items():
      has = copies[name].has(keys)
      if worker != sender and has.any():
        copies[name].add(keys[has], "lacks", change[has])
        copies[name].write(keys[has], "changed", True)

  def part(self, name: str, start: int, stop: int) -> list[list[Any]]:
    """Returns (worker, copies) of rows start <= key < stop of a table, as
    trees of arrays."""
    return [
      [worker, each[name].between(start, stop).pack()]
      for worker, each in self._copies.items()
    ]

  def set_range(
    self, name: str, start: int, stop: int, parts: Sequence[list[list[Any]]]
  ) -> None:
    """Keeps the copies of rows start <= key < stop of a table, and adds those
    of `parts` of other shards."""
    for each in self._copies.values():
      keys = each[name].keys
      each[name].keep((keys >= start) & (keys < stop))
    for worker, tree in (pair for part in parts for pair in part):
      self._copies[worker][name].join(KeyedRows.unpack(tree))

  def pack(self) -> list[Any]:
    """Returns (worker, copies by table) as a tree of arrays."""
    return [
      [worker, {name: rows.pack() for name, rows in each.items()}]
      for worker, each in self._copies.items()
    ]

  def unpack(self, packed: Sequence[Any]) -> None:
    """Takes over copies that were packed."""
    self._copies = {
      worker: {name: KeyedRows.unpack(tree) for name, tree in each.items()}
      for worker, each in packed
    }
