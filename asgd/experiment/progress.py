"""Progress: a bar on a terminal, plain lines elsewhere."""

import io
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import tqdm

from asgd.experiment import live_figures, report


class ProgressBar:
  """Shows how far an experiment is, and the state of its current cell."""

  def __init__(
    self,
    total: int,
    *,
    describe: Callable[[str, Mapping[str, Any]], str] | None = None,
    stream: TextIO | None = sys.stderr,
    seconds: float = 15.0,
  ):
    """Starts.

    Args:
      total: messages in the whole experiment.
      describe: (engine, result) -> a few words on a cell that is finished.
      stream: a bar is drawn if this is a terminal.
      seconds: between two lines if it is not.
    """
    stream = stream or io.StringIO()  # stderr is None where it was closed
    self._stream, self._describe = stream, describe
    self._total = total
    self._done = 0
    self._seconds = seconds
    self._last = time.monotonic()
    self._warned: set[tuple[str, int]] = set()
    self._bar = None
    if stream.isatty():
      self._bar = tqdm.tqdm(
        total=total, file=stream, unit="msg", dynamic_ncols=True, smoothing=0.1
      )

  def skip(self, messages: int) -> None:
    """Counts messages that an earlier run received."""
    self._done += messages
    if self._bar is not None:
      self._bar.initial += messages
      self._bar.update(messages)

  def update(self, cell: Any, progress: Any) -> None:
    """Counts messages and shows what they were like (where nothing is ever
    stale, the loss), and how a live run goes: in short in a bar, in full in a
    line.

    Args:
      cell: that they are of.
      progress: an `asgd.experiment.engines.Progress`.
    """
    self._done += progress.count
    state = f"loss {float(progress.loss.mean()):.3f}"
    if progress.staleness is not None:
      state += f" staleness {progress.staleness:.1f} gap {progress.gap:.2g}"
    if self._bar is not None:
      if progress.figures is not None:
        state = f"{state} {live_figures.short(progress.figures)}"
      self._bar.set_description_str(cell.name, refresh=False)
      self._bar.set_postfix_str(state, refresh=False)
      self._bar.update(progress.count)
      return
    now = time.monotonic()
    if now - self._last >= self._seconds:
      self._last = now
      if progress.figures is not None:
        state = f"{state}, {live_figures.long(progress.figures)}"
      self.line(f"{self._done / self._total:4.0%} {cell.name}: {state}")

  def finish(self, cell: Any, result: Mapping[str, Any]) -> None:
    """Shows what a cell came to, with warnings for the first seed of a run."""
    describe = self._describe or (lambda engine, row: "")
    said, *warnings = report.lines(
      result, lambda row: describe(row["engine"], row)
    )
    self.line(said)
    key = cell.label, cell.workers
    if key not in self._warned:
      self._warned |= {key} if warnings else set()
      for text in warnings:
        self.line(text)

  def line(self, text: str) -> None:
    """Prints a line that stays."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Takes the bar away."""
    if self._bar is not None:
      self._bar.close()


class Silent:
  """A bar where another process has it."""

  def skip(self, *_):
    """Shows nothing."""

  update = line = finish = skip

  def close(self):
    """Has nothing to take away."""
