"""How a live run goes, in numbers: for the bar, for lines and for TensorBoard.

Rates are over the last seconds by the driver's clock, so they fall when nothing
comes. Bytes are those of parameters sent and of messages received, as records
tell them; of several shards the lead's stand for all, by its share of the
parameters.
"""

import collections
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, sharding, wire
from asgd.experiment import boards

_WINDOW = 5.0  # seconds that rates are taken over
_BOARD = 1.0  # seconds between two points of a curve
_BINS = 6  # most of a staleness histogram in words
_FEW_WORKERS = 8  # up to which the rate of each is told
_CHARACTERS = 8  # most of a histogram
_BLOCKS = "▁▂▃▄▅▆▇█"


class Figures(NamedTuple):
  """What was seen in the last seconds."""

  updates: float  # changes of the parameters, per second
  messages: float  # received, per second
  workers: np.ndarray  # float[N], messages of each, per second
  staleness: np.ndarray  # int[...], how many messages had it, from 0 on
  gap: float  # mean
  bytes: float  # moved, per second

  @property
  def staleness_mean(self) -> float:
    """Over the messages; NaN if there was none."""
    total, numbers = self.staleness.sum(), np.arange(len(self.staleness))
    return float(numbers @ self.staleness / total) if total else float("nan")


class _Look(NamedTuple):
  """What was new at a look."""

  now: float
  update: int  # of the last message; -1 before there is one
  worker: np.ndarray  # int[m], of each message
  staleness: np.ndarray  # int[m]
  gap: np.ndarray  # float[m]
  bytes: np.ndarray  # int[m], up and down


class Counter:
  """Counts what comes, and makes rates of it; times are in seconds."""

  def __init__(self, workers: int, now: float):
    self._workers = workers
    self._looks = collections.deque([_Look(now, -1, *[np.zeros(0, int)] * 4)])

  def add(self, now: float, records: base.Records) -> None:
    """Counts the records that are new."""
    last, update = self._looks[-1], self._looks[-1].update
    if len(records.loss):
      if update < 0:  # start-up, and what a run did before, is no time
        first = int(records.update[0]) - 1
        self._looks = collections.deque([last._replace(update=first)])
      update = int(records.update[-1])
    new = records.worker, records.staleness, records.gap
    new += (records.bytes_up + records.bytes_down,)
    self._looks.append(_Look(now, update, *new))
    while len(self._looks) > 2 and self._looks[1].now <= now - _WINDOW:
      self._looks.popleft()

  def figures(self, share: float = 1.0) -> Figures:
    """Returns the rates over the window; the bytes that were counted are such a
    share of all."""
    old, *looks = self._looks
    seconds = max(looks[-1].now - old.now, 1e-9)
    columns = zip(*(look[2:] for look in looks), strict=True)
    worker, staleness, gap, nbytes = map(np.concatenate, columns)
    return Figures(
      # Less than before if a shard rolled back.
      updates=max(looks[-1].update - old.update, 0) / seconds,
      messages=len(gap) / seconds,
      workers=np.bincount(worker, minlength=self._workers) / seconds,
      staleness=np.bincount(staleness, minlength=1),
      gap=float(gap.mean(dtype=float)) if len(gap) else float("nan"),
      bytes=nbytes.sum() / share / seconds,
    )


def histogram(counts: Sequence[int]) -> str:
  """Says how often each staleness was, like `0:3 1:10 2:55 3:30 4+:2 %`: in at
  most six bins of equal width, but for the first and the last, which take in
  the 2 percent at either end."""
  counts = np.asarray(counts)
  total = counts.sum()
  if not total:
    return "-"
  below = np.cumsum(counts)
  low, high = np.searchsorted(below, [2 * total / 100, 98 * total / 100])
  low = 0 if high < _BINS - 1 else low
  width = -(-(high - low + 1) // (_BINS - 1))
  edges = [0, *range(low + width, high + width + 1, width)]
  bins = {
    f"{start}" if end - start == 1 else f"{start}-{end - 1}": counts[start:end]
    for start, end in itertools.pairwise(edges)
  }
  if counts[edges[-1] :].any():
    bins[f"{edges[-1]}+"] = counts[edges[-1] :]
  words = [f"{k}:{100 * part.sum() / total:.0f}" for k, part in bins.items()]
  return " ".join(words) + " %"


def sparkline(counts: Sequence[int]) -> str:
  """Draws a histogram in a few characters."""
  counts = np.trim_zeros(np.asarray(counts), "b")
  if not len(counts):
    return ""
  step = -(-len(counts) // _CHARACTERS)
  bars = np.add.reduceat(counts, np.arange(0, len(counts), step))
  levels = np.ceil(bars / bars.max() * (len(_BLOCKS) - 1)).astype(int)
  return "".join(_BLOCKS[level] for level in levels)


def bytes_text(rate: float) -> str:
  """Bytes per second, in words."""
  for unit in ("B/s", "kB/s", "MB/s"):
    if rate < 999.5:
      return f"{rate:.3g} {unit}"
    rate /= 1000
  return f"{rate:.3g} GB/s"


def short(figures: Figures) -> str:
  """A few words, for a bar."""
  return (
    f"{sparkline(figures.staleness)} {figures.updates:.3g} upd/s"
    f" {bytes_text(figures.bytes)} worker {figures.workers.min():.3g}-"
    f"{figures.workers.max():.3g}/s"
  )


def long(figures: Figures) -> str:
  """All of it, for a line."""
  rates = figures.workers
  if len(rates) <= _FEW_WORKERS:
    each = " ".join(f"{rate:.3g}" for rate in rates)
  else:
    each = (
      f"{rates.min():.3g} (worker {rates.argmin()}) to {rates.max():.3g}"
      f" (worker {rates.argmax()}), median {np.median(rates):.3g}"
    )
  return (
    f"{figures.updates:.3g} updates/s, {bytes_text(figures.bytes)}, messages/s"
    f" of each worker {each}, staleness {histogram(figures.staleness)}"
  )


class Board:
  """Curves of a live run for TensorBoard; nothing without tensorboardX."""

  def __init__(self, folder: Path):
    self._next = 0.0
    self._writer = boards.open_board(folder)
    self.close = self._writer.close

  def write(self, now: float, message: int, figures: Figures) -> None:
    """Adds a point, if it is time for one."""
    if now < self._next:
      return
    self._next = now + _BOARD
    scalars = {
      "live/updates_per_second": figures.updates,
      "live/messages_per_second": figures.messages,
      "live/staleness_mean": figures.staleness_mean,
      "live/gap": figures.gap,
      "live/bytes_per_second": figures.bytes,
    }
    for worker, rate in enumerate(figures.workers):
      scalars[f"live_workers/{worker}_messages_per_second"] = float(rate)
    for name, value in scalars.items():
      if np.isfinite(value):
        self._writer.add_scalar(name, value, message)
    counts = figures.staleness
    numbers, some = np.arange(len(counts)), np.flatnonzero(counts)
    if len(some):
      self._writer.add_histogram_raw(
        "live/staleness",
        min=float(some[0]),
        max=float(some[-1]),
        num=int(counts.sum()),
        sum=float(numbers @ counts),
        sum_squares=float(numbers**2 @ counts),
        bucket_limits=(numbers + 0.5).tolist(),
        bucket_counts=counts.tolist(),
        step=message,
      )


def lead_share(params: Any, shards: int) -> float:
  """Returns the share of all parameters that the lead of so many shards has,
  by their bytes."""
  plan = sharding.make_plan(params, shards)
  sizes = [wire.layout(part).nbytes for part in sharding.split(plan, params)]
  return sizes[0] / max(sum(sizes), 1)


class Watch:
  """The figures of a live run, and their curves for TensorBoard."""

  def __init__(self, workers: int, board: Path, share: float = 1.0):
    """Begins now; the bytes that are counted are such a `share` of all."""
    self._share, self._counter = share, Counter(workers, time.monotonic())
    # Below that of the evaluations: readers follow one file in a folder.
    self._board = Board(board / "live")
    self.close = self._board.close

  def look(self, now: float, records: base.Records, message: int) -> Figures:
    """Counts the records that are new at `now`, of `message` in all."""
    self._counter.add(now, records)
    figures = self._counter.figures(self._share)
    if figures.messages:
      self._board.write(now, message, figures)
    return figures
