"""The division of tables over shards, each with a server.

Index letters used in shape comments:
  S  shards
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd.tables import ranges as ranges_lib
from asgd.tables.client import TableSpec
from asgd.tables.keys import Keys
from asgd.tables.server import TableServer
from asgd.tables.settings import TableSettings
from asgd.tables.table import Table

# One shard's part of a message: table -> (positions of its keys, its keys).
Parts = dict[str, tuple[np.ndarray, Keys]]
Cuts = Mapping[str, Sequence[int]]  # name -> int[S + 1], as `Ranges.cuts`


class Division(NamedTuple):
  """The owner shard of each row of each table, and the specs of the tables.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import division
    >>> halves = division.divide({"w": np.zeros((4, 1))}, 2)
    >>> [part["w"][1].tolist() for part in halves.split({"w": [3, 0, 2]})]
    [[0], [3, 2]]
  """

  ranges: Mapping[str, ranges_lib.Ranges]
  specs: Mapping[str, TableSpec]
  shards: int
  version: int = 0  # count of earlier divisions of the run

  def split(self, keys: Mapping[str, Keys]) -> list[Parts]:
    """Splits the keys of a message by shard. A shard's part has only the tables
    with a key of that shard."""
    parts: list[Parts] = [{} for _ in range(self.shards)]
    for name, table_keys in keys.items():
      table_keys = np.asarray(table_keys, np.int64)
      owners = self.ranges[name].shard_of(table_keys)
      for shard, part in enumerate(parts):
        (positions,) = (owners == shard).nonzero()
        if positions.size:
          part[name] = positions, table_keys[positions]
    return parts

  def of_shard(self, shard: int) -> dict[str, TableSpec]:
    """Returns the specs of the tables of which a shard owns rows."""
    return {
      name: spec
      for name, spec in self.specs.items()
      if shard < self.ranges[name].shards
    }

  def server(
    self,
    shard: int,
    tables: Mapping[str, Any],
    settings: TableSettings,
    workers: int,
  ) -> TableServer:
    """Returns the server of a shard, given complete tables [K, ...]. The server
    gets a share of the budget in proportion to its number of rows."""
    parts, n_rows = {}, 0
    for name, rows in tables.items():
      # The budget is shared over the rows of all shards, so count all rows.
      n_rows += len(rows)
      ranges = self.ranges[name]
      if shard < ranges.shards:
        start, stop = ranges.cuts[shard : shard + 2]
        parts[name] = Table(
          np.asarray(rows[start:stop]),
          settings.function,
          start=start,
          name=name,
        )
    codec = settings.make_codec()
    return TableServer(
      parts, settings.rules, range(workers), codec=codec, total=n_rows
    )

  def cuts_of(self, numbers: Sequence[float]) -> Cuts:
    """Returns table -> cuts. `numbers` are those of a MOVE row: the cuts of all
    tables, one table after the other."""
    all_cuts, cuts = iter(numbers), {}
    for name, ranges in self.ranges.items():
      count = ranges.shards + 1
      cuts[name] = [int(cut) for cut in itertools.islice(all_cuts, count)]
    return cuts

  def moves_to(self, later: "Division") -> int:
    """Returns the number of ranges that move to another shard."""
    pairs = [(self.ranges[name], later.ranges[name]) for name in self.ranges]
    return sum(len(ranges_lib.moves(*pair)) for pair in pairs)

  def next(self, cuts: Cuts) -> "Division":
    """Returns the next division of the run, with other cuts."""
    ranges = {
      name: ranges_lib.Ranges(tuple(map(int, edges)))
      for name, edges in cuts.items()
    }
    return self._replace(ranges=ranges, version=self.version + 1)

  def join(self, parts: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Returns complete tables from the parts of all shards."""
    return {
      name: np.concatenate([part[name] for part in parts if name in part])
      for name in self.ranges
    }


def divide(tables: Mapping[str, Any], shards: int) -> Division:
  """Divides tables [K, ...] into ranges of about equal size. A table with fewer
  rows than shards uses only the first shards.

  Raises:
    ValueError: if a shard would have no row of any table.
  """
  ranges = {
    name: ranges_lib.by_load(np.ones(len(rows)), min(shards, len(rows)))
    for name, rows in tables.items()
  }
  # Each shard needs a row of some table.
  max_shards = max(table_ranges.shards for table_ranges in ranges.values())
  if shards > max_shards:
    raise ValueError(
      f"shards must be at most {max_shards}, the rows of the largest table, not"
      f" {shards}"
    )
  specs = {
    name: TableSpec(rows.shape[1:], np.dtype(rows.dtype), len(rows))
    for name, rows in tables.items()
  }
  return Division(ranges, specs, shards)


def by_load(loads: Sequence[Mapping[str, np.ndarray]]) -> Cuts:
  """Returns cuts of all tables that give the shards about equal loads.

  Args:
    loads: the loads of each shard: table -> float[k], the load of each row of
      the shard.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import division
    >>> division.by_load(
    ...   [{"w": np.array([6.0, 2.0])}, {"w": np.array([2.0, 2.0])}]
    ... )
    {'w': [0, 1, 4]}
  """
  cuts = {}
  for name in loads[0]:
    # Shards are in the order of keys, and so are their rows.
    parts = [
      shard_loads[name] for shard_loads in loads if name in shard_loads
    ]
    ranges = ranges_lib.by_load(np.concatenate(parts), len(parts))
    cuts[name] = list(ranges.cuts)
  return cuts
