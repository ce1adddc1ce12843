"""Rows by key: columns of equal length, sorted by their keys.

What tables, clients and the server's notes on them are made of. A column is an
array [K, ...] of NumPy, which is written to in place, or of JAX, which is not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd.tables.keys import Keys

Column = Any  # [K, ...], of NumPy or JAX


def _put(column: Column, at: Any, values: Any) -> Column:
  """Returns the column with rows replaced; NumPy's is written to."""
  if isinstance(column, jax.Array):
    return column.at[at].set(values)
  column[at] = values
  return column


def _insert(column: Column, where: Any, values: Any) -> Column:
  if isinstance(column, jax.Array):
    return jnp.insert(column, where, values, axis=0)
  return np.insert(column, where, values, axis=0)


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
    return len(keys) == len(self) and np.array_equal(keys, self.keys)

  def insert(
    self, keys: Keys, make: Callable[[Keys], Mapping[str, Any]]
  ) -> None:
    """Makes rows for keys that have none."""
    new = np.sort(keys[~self.has(keys)])
    if not new.size:
      return
    made, where = make(new), np.searchsorted(self.keys, new)
    self.keys = np.insert(self.keys, where, new)
    self.columns = {
      name: _insert(column, where, made[name])
      for name, column in self.columns.items()
    }
    self._index()

  def read(self, keys: Any, name: str) -> Any:
    """Returns rows of a column, a copy."""
    return self.columns[name][self.positions(keys)]

  def write(self, keys: Any, name: str, values: Any) -> None:
    """Replaces rows of a column."""
    at = self.positions(keys)
    self.columns[name] = _put(self.columns[name], at, values)

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
    left, right = np.searchsorted(self.keys, [start, stop])
    rest = np.r_[0:left, right : len(self)]
    self.keys = self.keys[rest]
    self.columns = {name: x[rest] for name, x in self.columns.items()}
    self._index()
    return part

  def keep(self, which: np.ndarray) -> None:
    """Drops all rows but some, bool[K]."""
    self.keys = self.keys[which]
    self.columns = {name: x[which] for name, x in self.columns.items()}
    self._index()

  def join(self, part: "KeyedRows") -> None:
    """Takes rows in that `cut` has taken out elsewhere."""
    self.insert(part.keys, lambda keys: part.columns)

  def copy(self) -> "KeyedRows":
    """Returns another one, which shares no array that is written to."""
    columns = self.columns.items()
    return KeyedRows(
      self.keys,
      {k: x if isinstance(x, jax.Array) else x.copy() for k, x in columns},
    )
