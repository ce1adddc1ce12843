"""Ranges of keys: which shard has which, by load, and clocks of ranges.

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
  """Which shard has which keys: shard s those with cuts[s] <= key <
  cuts[s + 1]. Plain numbers."""

  cuts: tuple[int, ...]  # S + 1, ascending

  @property
  def shards(self) -> int:
    """S."""
    return len(self.cuts) - 1

  def shard_of(self, keys: Keys) -> np.ndarray:
    """Returns int[n], each key's shard."""
    return _inner(self.cuts).searchsorted(keys, side="right")


@functools.lru_cache(maxsize=256)
def _inner(cuts):
  """The cuts but the first and the last."""
  return np.array(cuts[1:-1], np.int64)


def by_load(load: Any, shards: int, *, start: int = 0) -> Ranges:
  """Cuts keys into ranges of about the same load.

  A cut is where equal parts would end, at the nearest key; so no range has more
  than its S-th part and the load of one key.

  Args:
    load: float[K], 0 or more, of each key from `start` on; without any, ranges
      have as many keys.
    shards: S, as many as keys at most.
    start: the first key.

  Raises:
    ValueError: for more shards than keys, or a load below 0.

  Example:
    >>> from asgd import tables
    >>> tables.by_load([9, 1, 1, 1, 3, 3], 2)
    Ranges(cuts=(0, 1, 6))
  """
  load = np.asarray(load, np.float64)
  checks.whole("shards", shards)
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
    at = int(np.searchsorted(ends, target))
    at -= bool(at and target - ends[at - 1] <= ends[at] - target)
    # Each range has a key, also where one key has most of the load.
    cuts.append(min(max(at, cuts[-1] + 1), len(load) - (shards - shard)))
  return Ranges(tuple(start + at for at in (*cuts, len(load))))


class Move(NamedTuple):
  """Keys that go from one shard to another: start <= key < stop."""

  start: int
  stop: int
  source: int
  target: int


def moves(before: Ranges, after: Ranges) -> list[Move]:
  """Returns what must move to come from some ranges to others.

  Example:
    >>> from asgd import tables
    >>> tables.moves(tables.Ranges((0, 4, 8)), tables.Ranges((0, 6, 8)))
    [Move(start=4, stop=6, source=1, target=0)]
  """
  edges = sorted({*before.cuts, *after.cuts})
  out = []
  for start, stop in zip(edges[:-1], edges[1:], strict=True):
    key = np.array([start])
    source, target = int(before.shard_of(key)[0]), int(after.shard_of(key)[0])
    if source != target:
      out.append(Move(start, stop, source, target))
  return out


class RangeClocks:
  """Clocks of ranges of keys, of several workers: one number for each worker
  and range, in the place of one for each key.

  A range is split where a clock is told of a part of it.

  Example:
    >>> from asgd import tables
    >>> clocks = tables.RangeClocks([0, 1], 0, 100)
    >>> clocks.tell(0, 1)
    >>> clocks.tell(1, 1, 40, 60)  # of some keys only
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

  def _split(self, key):
    """Has a range begin at a key; returns its number."""
    starts = self._starts
    at = int(np.searchsorted(starts, key))
    if key < self._stop and (at == len(starts) or starts[at] != key):
      starts.insert(at, key)
      for clocks in self._clocks.values():
        clocks.insert(at, clocks[at - 1])
    return at

  def tell(
    self, worker: int, clock: int, start: int | None = None,
    stop: int | None = None,
  ) -> None:
    """A worker has finished so many clocks on start <= key < stop, or on all
    keys; what is not later than what is known changes nothing."""
    first = 0 if start is None else self._split(start)
    last = len(self._starts) if stop is None else self._split(stop)
    clocks = self._clocks[worker]
    clocks[first:last] = [max(clock, old) for old in clocks[first:last]]

  def leave(self, worker: int) -> None:
    """A worker has gone: nobody waits for it."""
    del self._clocks[worker]

  def least(self, keys: Any) -> np.ndarray:
    """Returns int[n]: for each key the least of all workers' clocks."""
    least = np.min(list(self._clocks.values()), axis=0)
    at = np.searchsorted(self._starts, np.asarray(keys), side="right") - 1
    return least[at]

  @property
  def slowest(self) -> int:
    """The least clock of all workers and ranges."""
    return min(min(clocks) for clocks in self._clocks.values())

  def pack(self) -> dict[str, Any]:
    """Returns it as JSON."""
    clocks = [[worker, each] for worker, each in self._clocks.items()]
    return {"starts": self._starts, "stop": self._stop, "clocks": clocks}

  @classmethod
  def unpack(cls, packed: Mapping[str, Any]) -> "RangeClocks":
    """Returns what was packed."""
    clocks = {worker: list(each) for worker, each in packed["clocks"]}
    out = cls(list(clocks), 0, packed["stop"])
    out._starts, out._clocks = list(packed["starts"]), clocks
    return out
