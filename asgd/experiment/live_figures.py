"""How a live run goes, in numbers: for the bar, for lines and for TensorBoard.

Rates are over the last seconds by the driver's clock, so they fall when nothing
comes. Bytes are those of parameters sent and of messages received, as they lie
in the memory that the two sides share.
"""

import collections
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, sharding
from asgd.live import wire
from asgd.live.journal import journal_path

_WINDOW = 5.0  # seconds that rates are taken over
_BOARD = 1.0  # seconds between two points of a curve
_BINS = 6  # most of a staleness histogram in words
_FEW_WORKERS = 8  # up to which the rate of each is told
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
    total = self.staleness.sum()
    if not total:
      return float("nan")
    return float(np.arange(len(self.staleness)) @ self.staleness / total)


class _Seen(NamedTuple):
  """The state of all counters at a look."""

  now: float
  update: int
  workers: np.ndarray
  staleness: np.ndarray
  gap: float  # sum


class Counter:
  """Counts what comes, and makes rates of it."""

  def __init__(self, workers: int, now: float, *, window: float = _WINDOW):
    """Starts with nothing seen.

    Args:
      workers: N.
      now: seconds, on any clock.
      window: seconds that rates are taken over.
    """
    self._span = window
    nothing = np.zeros(workers, int), np.zeros(1, int)
    self._looks = collections.deque([_Seen(now, 0, *nothing, 0.0)])

  def add(self, now: float, records: base.Records) -> None:
    """Counts the records that are new."""
    last = self._looks[-1]
    update, workers, staleness, gap = last[1:5]
    if len(records.loss):
      if not workers.any():  # start-up, and what a run did before, is no time
        first = int(records.update[0]) - 1
        start = _Seen(last.now, first, *last[2:5])
        self._looks = collections.deque([start])
      update = int(records.update[-1])
      workers = workers + np.bincount(records.worker, minlength=len(workers))
      new = np.bincount(records.staleness)
      staleness = np.pad(staleness, (0, max(len(new) - len(staleness), 0)))
      staleness[: len(new)] += new
      gap += float(records.gap.sum())
    self._looks.append(_Seen(now, update, workers, staleness, gap))
    while len(self._looks) > 2 and self._looks[1].now <= now - self._span:
      self._looks.popleft()

  def figures(self, nbytes: float) -> Figures:
    """Returns the rates over the window, with so many bytes for a message."""
    old, new = self._looks[0], self._looks[-1]
    seconds = max(new.now - old.now, 1e-9)
    workers = new.workers - old.workers
    messages = int(workers.sum())
    before = np.pad(old.staleness, (0, len(new.staleness) - len(old.staleness)))
    return Figures(
      updates=max(new.update - old.update, 0) / seconds,  # or rolled back
      messages=messages / seconds,
      workers=workers / seconds,
      staleness=new.staleness - before,
      gap=(new.gap - old.gap) / messages if messages else float("nan"),
      bytes=nbytes * messages / seconds,
    )


def histogram(counts: Sequence[int]) -> str:
  """Says how often each staleness was, like `0:3 1:10 2:55 3:30 4+:2 %`.

  Args:
    counts: how many messages had staleness 0, 1, ...

  Returns:
    Percent in at most six bins, of equal width but for the first and the last:
    these take in the 2 percent at either end.
  """
  counts = np.asarray(counts)
  total = counts.sum()
  if not total:
    return "-"
  below = np.cumsum(counts)
  low, high = (
    int(np.argmax(below >= share * total / 100)) for share in (2, 98)
  )
  low = 0 if high < _BINS - 1 else low
  width = -(-(high - low + 1) // (_BINS - 1))
  bins = [
    (start if i else 0, start + width)
    for i, start in enumerate(range(low, high + 1, width))
  ]
  end = bins[-1][1]
  words = [
    f"{_range(*ends)}:{100 * counts[slice(*ends)].sum() / total:.0f}"
    for ends in bins
  ]
  if counts[end:].any():
    words.append(f"{end}+:{100 * counts[end:].sum() / total:.0f}")
  return " ".join(words) + " %"


def _range(start, end):
  return f"{start}" if end - start == 1 else f"{start}-{end - 1}"


def sparkline(counts: Sequence[int], width: int = 8) -> str:
  """Draws a histogram in so many characters or fewer."""
  counts = np.trim_zeros(np.asarray(counts), "b")
  if not len(counts):
    return ""
  step = -(-len(counts) // width)
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


class Tickets:
  """How many tickets there were for a message, as a growing journal tells: it
  is less than one where workers keep a ticket for several jobs."""

  def __init__(self, path: Path):
    """Starts at the journal's end."""
    self._path, self._rest = path, b""
    self._at = path.stat().st_size if path.exists() else 0
    self._sent = self._received = 0

  def look(self) -> float:
    """Returns the ratio since the start; 1 before the first message."""
    with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
      file.seek(self._at)
      data = self._rest + file.read()
      self._at = file.tell()
      whole = data.rfind(b"\n") + 1
      self._sent += data.count(b",send,", 0, whole)
      self._received += data.count(b",receive,", 0, whole)
      self._rest = data[whole:]
    return self._sent / self._received if self._received else 1.0


class Board:
  """Curves of a live run for TensorBoard; nothing without tensorboardX."""

  def __init__(self, folder: Path, *, seconds: float = _BOARD):
    """Opens the board.

    Args:
      folder: a board of its own, below that of the cell's evaluations: readers
        follow one file a folder.
      seconds: between two points.
    """
    self._seconds, self._next, self._writer = seconds, 0.0, None
    with contextlib.suppress(ImportError):
      from tensorboardX import SummaryWriter

      self._writer = SummaryWriter(str(folder))

  def write(self, now: float, message: int, figures: Figures) -> None:
    """Adds a point, if it is time for one."""
    if self._writer is None or now < self._next:
      return
    self._next = now + self._seconds
    for name, value in scalars(figures).items():
      if np.isfinite(value):
        self._writer.add_scalar(name, value, message)
    counts = figures.staleness
    total, numbers = counts.sum(), np.arange(len(counts))
    if total:
      self._writer.add_histogram_raw(
        "live/staleness",
        min=float(numbers[counts > 0][0]),
        max=float(numbers[counts > 0][-1]),
        num=int(total),
        sum=float(numbers @ counts),
        sum_squares=float(numbers**2 @ counts),
        bucket_limits=(numbers + 0.5).tolist(),
        bucket_counts=counts.tolist(),
        global_step=message,
      )

  def close(self) -> None:
    """Closes the board."""
    if self._writer is not None:
      self._writer.close()


def scalars(figures: Figures) -> dict[str, float]:
  """Returns the points of the curves."""
  out = {
    "live/updates_per_second": figures.updates,
    "live/messages_per_second": figures.messages,
    "live/staleness_mean": figures.staleness_mean,
    "live/gap": figures.gap,
    "live/bytes_per_second": figures.bytes,
  }
  for worker, rate in enumerate(figures.workers):
    out[f"live_workers/{worker}_messages_per_second"] = float(rate)
  return out


def message_bytes(params: Any, shards: int, compress: str | None) -> int:
  """Returns the bytes of all parameters on their way, and of a message."""
  parts = [params]
  if shards > 1:
    parts = sharding.split(sharding.make_plan(params, shards), params)
  return sum(wire.layout(part, compress=compress).nbytes for part in parts)


class Watch:
  """Watches a live cell."""

  def __init__(self, live: Any, board: Path, *, compress: str | None = None):
    """Starts watching.

    Args:
      live: a `live_run.Live`.
      board: of the cell, for TensorBoard.
      compress: the dtype on the wire, as in `wire.layout`.
    """
    setup = live.setup
    self._nbytes = message_bytes(live.params, setup.shards, compress)
    self._tickets = Tickets(journal_path(live.folder, 0))
    self._counter = Counter(setup.workers, time.monotonic())
    self._board = Board(board / "live")

  def look(self, now: float, records: base.Records, message: int) -> Figures:
    """Counts what is new.

    Args:
      now: when it was read, by `time.monotonic`.
      records: that are new.
      message: how many there are in all.
    """
    self._counter.add(now, records)
    nbytes = self._nbytes * (1 + self._tickets.look())
    figures = self._counter.figures(nbytes)
    if figures.messages:
      self._board.write(now, message, figures)
    return figures

  def close(self) -> None:
    """Closes the board."""
    self._board.close()
