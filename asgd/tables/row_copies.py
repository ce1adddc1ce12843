"""Copies of rows that workers have, as the server of tables knows them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asgd.tables.keys import Keys
from asgd.tables.rows import KeyedRows
from asgd.tables.table import Table


class RowCopies:
  """Which rows each worker has, and what its copies of them lack.

  A copy lacks the sum of the changes of its row since the row was sent.
  """

  def __init__(self, tables: Mapping[str, Table], workers: Sequence[int]):
    """Begins with no copies; the tables stay those of the server."""
    self._tables = tables
    self._copies = {worker: self._none() for worker in workers}

  def _none(self):
    """Returns no copies, of each table."""
    return {
      name: KeyedRows(
        np.zeros(0, np.int64),
        {
          "lacks": np.zeros((0, *table.shape), np.float64),
          "changed": np.zeros(0, bool),
        },
      )
      for name, table in self._tables.items()
    }

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
    copies, shape = self._copies[worker][name], self._tables[name].shape

    def make(new):
      lacks = np.zeros((len(new), *shape))
      return {"lacks": lacks, "changed": np.zeros(len(new), bool)}

    copies.insert(keys, make)
    self.sent(worker, name, keys)

  def sent(self, worker: int, name: str, keys: Keys) -> None:
    """Notes that rows are sent to a worker that has copies of them."""
    copies = self._copies[worker][name]
    copies.write(keys, "lacks", 0)
    copies.write(keys, "changed", False)

  def change(
    self, sender: int, name: str, keys: Keys, change: np.ndarray
  ) -> None:
    """Adds a change of rows to what copies lack. The sender's copies have its
    own change, if the table adds."""
    exact = self._tables[name].function.additive
    for worker, copies in self._copies.items():
      if worker == sender and exact:
        continue
      has = copies[name].has(keys)
      if has.any():
        copies[name].add(keys[has], "lacks", change[has])
        copies[name].write(keys[has], "changed", True)

  # Another range of keys.

  def part(self, name: str, start: int, stop: int) -> list[list[Any]]:
    """Returns (worker, copies) of rows start <= key < stop of a table, as
    trees of arrays."""
    return [
      [worker, tree_of(each[name].between(start, stop))]
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
      self._copies[worker][name].join(rows_of(tree))

  # Checkpoints.

  def pack(self) -> list[dict[str, dict[str, np.ndarray]]]:
    """Returns the copies as trees of arrays, worker by worker."""
    return [
      {name: {"keys": x.keys, **x.columns} for name, x in each.items()}
      for each in self._copies.values()
    ]

  def unpack(
    self, workers: Sequence[int], packed: Sequence[Mapping[str, Any]]
  ) -> None:
    """Takes over copies of `workers` that were packed."""
    for worker, each in zip(workers, packed, strict=True):
      for name, tree in each.items():
        columns = {k: np.array(x) for k, x in tree.items()}
        self._copies[worker][name] = KeyedRows(columns.pop("keys"), columns)


def tree_of(rows: KeyedRows) -> dict[str, np.ndarray]:
  """Returns rows as a tree of arrays."""
  columns = {name: np.asarray(x) for name, x in rows.columns.items()}
  return {"keys": rows.keys, **columns}


def rows_of(tree: Mapping[str, np.ndarray]) -> KeyedRows:
  """Returns the rows that a tree is of."""
  columns = dict(tree)
  return KeyedRows(columns.pop("keys"), columns)
