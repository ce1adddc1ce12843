"""How tables are divided over shards that each have a server of their own.

Index letters used in shape comments:
  S  shards
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from asgd.tables import ranges as ranges_lib
from asgd.tables.client import TableSpec
from asgd.tables.keys import Keys
from asgd.tables.server import Server
from asgd.tables.settings import Settings
from asgd.tables.table import Table

Parts = dict[str, tuple[np.ndarray, Keys]]  # name -> (where they are, keys)


class Division(NamedTuple):
  """Which shard has which rows of which table, and what rows are like.

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

  def split(self, keys: Mapping[str, Keys]) -> list[Parts]:
    """Returns the keys of each shard, by table, and where they were; tables of
    which a shard has none are left out."""
    out: list[Parts] = [{} for _ in range(self.shards)]
    for name, wanted in keys.items():
      wanted = np.asarray(wanted, np.int64)
      owners = self.ranges[name].shard_of(wanted)
      for shard, part in enumerate(out):
        at = np.flatnonzero(owners == shard)
        if at.size:
          part[name] = at, wanted[at]
    return out

  def of_shard(self, shard: int) -> dict[str, TableSpec]:
    """Returns the specs of the tables that a shard has rows of."""
    return {
      name: spec
      for name, spec in self.specs.items()
      if shard < self.ranges[name].shards
    }

  def server(
    self,
    shard: int,
    tables: Mapping[str, Any],
    settings: Settings,
    workers: int,
  ) -> Server:
    """Returns the server of a shard, of whole tables [K, ...]. A budget is
    shared by the number of rows."""
    parts, mine, total = {}, 0, 0
    for name, rows in tables.items():
      total += len(rows)
      ranges = self.ranges[name]
      if shard < ranges.shards:
        start, stop = ranges.cuts[shard : shard + 2]
        mine += stop - start
        parts[name] = Table(
          np.asarray(rows[start:stop]),
          settings.function,
          start=start,
          name=name,
        )
    rules = settings.rules
    rules = rules._replace(budget=round(rules.budget * mine / total))
    codec = settings.make_codec()
    return Server(parts, rules, range(workers), codec=codec)

  def join(self, parts: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Returns whole tables of those of each shard."""
    return {
      name: np.concatenate([part[name] for part in parts if name in part])
      for name in self.ranges
    }


def divide(tables: Mapping[str, Any], shards: int) -> Division:
  """Divides tables [K, ...] into ranges of as many rows; a table of fewer rows
  than shards is on the first ones.

  Raises:
    ValueError: for a shard without a row.
  """
  ranges = {
    name: ranges_lib.by_load(np.ones(len(rows)), min(shards, len(rows)))
    for name, rows in tables.items()
  }
  most = max(each.shards for each in ranges.values())
  if shards > most:
    raise ValueError(
      f"shards must be at most {most}, the rows of the largest table, not"
      f" {shards}"
    )
  specs = {
    name: TableSpec(rows.shape[1:], np.dtype(rows.dtype), len(rows))
    for name, rows in tables.items()
  }
  return Division(ranges, specs, shards)
