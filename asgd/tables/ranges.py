"""Ranges of keys: the shard that owns each key, and clocks of ranges.

Index letters used in shape comments:
  S  shards
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.tables.keys import Keys


class Ranges(NamedTuple):
  """Ownership of keys by range: shard s owns cuts[s] <= key < cuts[s + 1]."""

  cuts: tuple[int, ...]  # S + 1, ascending

  @property
  def shards(self) -> int:
    """Number of shards, S."""
    return len(self.cuts) - 1

  def shard_of(self, keys: Keys) -> np.ndarray:
    """Returns int[n], the shard that owns each key."""
    return _inner_cuts(self.cuts).searchsorted(keys, side="right")


@functools.lru_cache(maxsize=256)
def _inner_cuts(cuts):
  """Returns the cuts without the first and the last."""
  return np.array(cuts[1:-1], np.int64)


def by_load(load: Any, shards: int, *, start: int = 0) -> Ranges:
  """Cuts keys into ranges of about equal load.

  Each cut is at the key nearest to the ideal cut. So the load of a range is at
  most 1/S of the total plus the load of one key.

  Args:
    load: float[K], 0 or more: the load of each key from `start` on. If all
      loads are 0, the ranges have equal numbers of keys.
    shards: S, at most the number of keys.
    start: the first key.

  Raises:
    ValueError: for more shards than keys, or a load below 0.

  Example:
    >>> from asgd import tables
    >>> tables.by_load([9, 1, 1, 1, 3, 3], 2)
    Ranges(cuts=(0, 1, 6))
  """
  load = np.asarray(load, np.float64)
  checks.integer("shards", shards)
  if shards > max(len(load), 1):
    raise ValueError(
      f"shards must be at most {len(load)}, the keys of the table, not {shards}"
    )
  if not (np.isfinite(load) & (load >= 0)).all():
    raise ValueError("the load of a key must be finite and 0 or more")
  if not load.sum():
    load = np.ones_like(load)
  ends = np.concatenate([[0.0], np.cumsum(load)])
  cuts = [0]
  for shard in range(1, shards):
    target = ends[-1] * shard / shards
    end = int(np.searchsorted(ends, target))
    # The previous key may end nearer to the target.
    end -= bool(end and target - ends[end - 1] <= ends[end] - target)
    # Each range has at least one key, even if one key has most of the load.
    cuts.append(min(max(end, cuts[-1] + 1), len(load) - (shards - shard)))
  return Ranges(tuple(start + end for end in (*cuts, len(load))))


class Move(NamedTuple):
  """Keys start <= key < stop that move from one shard to another."""

  start: int
  stop: int
  source: int
  target: int


def moves(before: Ranges, after: Ranges) -> list[Move]:
  """Returns the moves that turn the ranges `before` into the ranges `after`.

  Example:
    >>> from asgd import tables
    >>> tables.moves(tables.Ranges((0, 4, 8)), tables.Ranges((0, 6, 8)))
    [Move(start=4, stop=6, source=1, target=0)]
  """
  # Between two edges all keys have one owner before and one after.
  edges = sorted({*before.cuts, *after.cuts})
  all_moves = []
  for start, stop in zip(edges[:-1], edges[1:], strict=True):
    key = np.array([start])
    source, target = int(before.shard_of(key)[0]), int(after.shard_of(key)[0])
    if source != target:
      all_moves.append(Move(start, stop, source, target))
  return all_moves


class RangeClocks:
  """Clocks of several workers by range of keys: one number per worker and range
  instead of one per worker and key.

  A range is split when a worker's clock advances on a part of it.

  Example:
    >>> from asgd import tables
    >>> clocks = tables.RangeClocks([0, 1], 0, 100)
    >>> clocks.advance(0, 1)
    >>> clocks.advance(1, 1, 40, 60)  # of some keys only
    >>> clocks.least([39, 40, 60]).tolist(), len(clocks)
    ([0, 1, 0], 3)
  """

  def __init__(self, workers: Sequence[int], start: int, stop: int):
    """All workers' clocks are 0 on start <= key < stop."""
    self._starts: list[int] = [start]  # of ranges, ascending
    self._stop = stop
    self._clocks: dict[int, list[int]] = {worker: [0] for worker in workers}

  def __len__(self) -> int:
    return len(self._starts)

  def _split(self, key: int) -> int:
    """Splits a range at `key` unless one starts there. Returns the index of the
    range that starts at `key`."""
    starts = self._starts
    index = int(np.searchsorted(starts, key))
    if key < self._stop and (index == len(starts) or starts[index] != key):
      starts.insert(index, key)
      for clocks in self._clocks.values():
        clocks.insert(index, clocks[index - 1])
    return index

  def advance(
    self, worker: int, clock: int, start: int | None = None,
    stop: int | None = None,
  ) -> None:
    """Sets a worker's clock on start <= key < stop, or on all keys. A clock
    that is not later than the present clock changes nothing."""
    # `_split` may insert a start, so `last` is computed after `first`.
    first = 0 if start is None else self._split(start)
    last = len(self._starts) if stop is None else self._split(stop)
    clocks = self._clocks[worker]
    clocks[first:last] = [max(clock, present) for present in clocks[first:last]]

  def leave(self, worker: int) -> None:
    """Removes a worker that has left: its clock holds back no other worker."""
    del self._clocks[worker]

  def least(self, keys: Any) -> np.ndarray:
    """Returns int[n], the least of all workers' clocks for each key."""
    least = np.min(list(self._clocks.values()), axis=0)
    index = np.searchsorted(self._starts, np.asarray(keys), side="right") - 1
    return least[index]

  @property
  def slowest(self) -> int:
    """The least clock of all workers and ranges."""
    return min(min(clocks) for clocks in self._clocks.values())

  def pack(self) -> dict[str, Any]:
    """Returns the clocks as JSON."""
    clocks = [
      [worker, worker_clocks] for worker, worker_clocks in self._clocks.items()
    ]
    return {"starts": self._starts, "stop": self._stop, "clocks": clocks}

  @classmethod
  def unpack(cls, packed: Mapping[str, Any]) -> "RangeClocks":
    """Returns clocks from what `pack` returned."""
    clocks = {
      worker: list(worker_clocks) for worker, worker_clocks in packed["clocks"]
    }
    range_clocks = cls(list(clocks), 0, packed["stop"])
    range_clocks._starts, range_clocks._clocks = list(packed["starts"]), clocks
    return range_clocks
