"""Rates of a live run: for the progress bar, for log lines, for TensorBoard.

Rates are over the last seconds of the driver's clock, so they fall when no
message arrives. Bytes are those of sent parameters and received messages, from
the records. With several shards, the lead's bytes are divided by its share of
the parameters.
"""

import collections
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base, sharding, wire
from asgd.experiment import boards
from asgd.pages.panels import bytes_text

_WINDOW_SECONDS = 5.0  # seconds over which rates are computed
_POINT_SECONDS = 1.0  # seconds between two points of a curve
_MAX_BINS = 6  # most bins of a staleness histogram in text
_MAX_LISTED_WORKERS = 8  # most workers with a rate for each in a line
_MAX_CHARACTERS = 8  # most characters of a sparkline
_BLOCKS = "▁▂▃▄▅▆▇█"


class Figures(NamedTuple):
  """Rates over the last seconds."""

  updates: float  # changes of the parameters, per second
  messages: float  # received, per second
  workers: np.ndarray  # float[N], messages of each worker, per second
  staleness: np.ndarray  # int[S]; entry s: number of messages of staleness s
  gap: float  # mean
  bytes: float  # sent and received, per second

  @property
  def staleness_mean(self) -> float:
    """Mean over the messages; NaN if there was none."""
    total, values = self.staleness.sum(), np.arange(len(self.staleness))
    return float(values @ self.staleness / total) if total else float("nan")


class _Sample(NamedTuple):
  """The new messages at one reading of the records."""

  now: float
  update: int  # version after the last message; -1 before the first one
  worker: np.ndarray  # int[m], of each of the m new messages
  staleness: np.ndarray  # int[m]
  gap: np.ndarray  # float[m]
  bytes: np.ndarray  # int[m], up and down


class Counter:
  """Counts messages, and computes their rates; times are in seconds."""

  def __init__(self, workers: int, now: float):
    self._workers = workers
    # The samples of the window, after one that marks its beginning.
    self._samples = collections.deque(
      [_Sample(now, -1, *[np.zeros(0, int)] * 4)]
    )

  def add(self, now: float, records: base.Records) -> None:
    """Counts the new records."""
    previous, update = self._samples[-1], self._samples[-1].update
    if len(records.loss):
      if update < 0:
        # The time of the start, and updates before a resume, do not count.
        first_update = int(records.update[0]) - 1
        self._samples = collections.deque(
          [previous._replace(update=first_update)]
        )
      update = int(records.update[-1])
    nbytes = records.bytes_up + records.bytes_down
    self._samples.append(
      _Sample(
        now, update, records.worker, records.staleness, records.gap, nbytes
      )
    )
    while (
      len(self._samples) > 2 and self._samples[1].now <= now - _WINDOW_SECONDS
    ):
      self._samples.popleft()

  def figures(self, bytes_share: float = 1.0) -> Figures:
    """Returns the rates over the window. The records have only the fraction
    `bytes_share` of all bytes."""
    oldest, *samples = self._samples
    seconds = max(samples[-1].now - oldest.now, 1e-9)
    # The last four fields of all samples, each as one array.
    columns = zip(*(sample[2:] for sample in samples), strict=True)
    worker, staleness, gap, nbytes = map(np.concatenate, columns)
    return Figures(
      # A rollback of a shard makes the difference negative.
      updates=max(samples[-1].update - oldest.update, 0) / seconds,
      messages=len(gap) / seconds,
      workers=np.bincount(worker, minlength=self._workers) / seconds,
      staleness=np.bincount(staleness, minlength=1),
      gap=float(gap.mean(dtype=float)) if len(gap) else float("nan"),
      bytes=nbytes.sum() / bytes_share / seconds,
    )


def histogram(counts: npt.ArrayLike) -> str:
  """Returns a histogram of staleness as text, such as
  `0:3 1:10 2:55 3:30 4+:2 %`.

  It has at most six bins of equal width, except that the first and the last bin
  include the 2 percent at either end.
  """
  column = np.asarray(counts)  # int[S], by staleness
  total = column.sum()
  if not total:
    return "-"
  # [1] The staleness between which 96 percent of the messages are.
  low, high = np.searchsorted(
    np.cumsum(column), [2 * total / 100, 98 * total / 100]
  )
  low = 0 if high < _MAX_BINS - 1 else low
  # [2] Bins of one width between these; the first one begins at 0.
  width = -(-(high - low + 1) // (_MAX_BINS - 1))  # rounded up
  edges = [0, *range(low + width, high + width + 1, width)]
  bins = {
    f"{start}" if end - start == 1 else f"{start}-{end - 1}": column[start:end]
    for start, end in itertools.pairwise(edges)
  }
  # [3] A last bin without an end.
  if column[edges[-1] :].any():
    bins[f"{edges[-1]}+"] = column[edges[-1] :]
  percents = {k: 100 * part.sum() / total for k, part in bins.items()}
  return " ".join(f"{k}:{value:.0f}" for k, value in percents.items()) + " %"


def sparkline(counts: npt.ArrayLike) -> str:
  """Draws a histogram in a few characters."""
  column = np.asarray(counts)
  column = column[: column.nonzero()[0].max(initial=-1) + 1]
  if not len(column):
    return ""
  step = -(-len(column) // _MAX_CHARACTERS)  # counts per bar, rounded up
  bars = np.add.reduceat(column, np.arange(0, len(column), step))
  # Rounded up: a rare staleness has a bar that can be seen.
  levels = np.ceil(bars / bars.max() * (len(_BLOCKS) - 1)).astype(int)
  return "".join(_BLOCKS[level] for level in levels)


def short_text(figures: Figures) -> str:
  """Returns the rates in a few words, for a progress bar."""
  return (
    f"{sparkline(figures.staleness)} {figures.updates:.3g} upd/s"
    f" {bytes_text(figures.bytes)}/s worker {figures.workers.min():.3g}-"
    f"{figures.workers.max():.3g}/s"
  )


def long_text(figures: Figures) -> str:
  """Returns the rates as a line of text."""
  rates = figures.workers
  if len(rates) <= _MAX_LISTED_WORKERS:
    worker_rates = " ".join(f"{rate:.3g}" for rate in rates)
  else:
    worker_rates = (
      f"{rates.min():.3g} (worker {rates.argmin()}) to {rates.max():.3g}"
      f" (worker {rates.argmax()}), median {np.median(rates):.3g}"
    )
  return (
    f"{figures.updates:.3g} updates/s, {bytes_text(figures.bytes)}/s,"
    f" messages/s of each worker {worker_rates},"
    f" staleness {histogram(figures.staleness)}"
  )


class Board:
  """Curves of a live run for TensorBoard; none without tensorboardX."""

  def __init__(self, folder: Path):
    self._next_time = 0.0
    self._writer = boards.open_board(folder)
    self.close = self._writer.close

  def write(self, now: float, message: int, figures: Figures) -> None:
    """Adds a point if the last one is a second or more old."""
    if now < self._next_time:
      return
    self._next_time = now + _POINT_SECONDS
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
    staleness, occurring = np.arange(len(counts)), np.flatnonzero(counts)
    if len(occurring):
      # A bin for each staleness: bin k ends at k + 0.5.
      self._writer.add_histogram_raw(
        "live/staleness",
        min=float(occurring[0]),
        max=float(occurring[-1]),
        num=int(counts.sum()),
        sum=float(staleness @ counts),
        sum_squares=float(staleness**2 @ counts),
        bucket_limits=(staleness + 0.5).tolist(),
        bucket_counts=counts.tolist(),
        step=message,
      )


def lead_share(params: Any, shards: int) -> float:
  """Returns the lead's fraction of the parameters' bytes, with `shards`."""
  # The same plan that the run makes: it depends on shapes only.
  plan = sharding.make_plan(params, shards)
  shard_bytes = [
    wire.layout(part).nbytes for part in sharding.split(plan, params)
  ]
  return shard_bytes[0] / max(sum(shard_bytes), 1)


class Watch:
  """The rates of a live run, and their curves for TensorBoard."""

  def __init__(self, workers: int, board: Path, bytes_share: float = 1.0):
    """Starts the clock. The records have only the fraction `bytes_share` of all
    bytes."""
    self._bytes_share = bytes_share
    self._counter = Counter(workers, time.monotonic())
    # A subfolder, because readers follow only one event file in a folder.
    self._board = Board(board / "live")
    self.close = self._board.close

  def add_records(
    self, now: float, records: base.Records, message: int
  ) -> Figures:
    """Counts the new records at time `now`; `message` is the number of messages
    so far."""
    self._counter.add(now, records)
    figures = self._counter.figures(self._bytes_share)
    if figures.messages:
      self._board.write(now, message, figures)
    return figures
