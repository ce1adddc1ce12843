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
    stream: TextIO | None = None,
    seconds: float = 15.0,
  ):
    """Starts a bar of `total` messages; `describe(engine, result)` describes a
    result. Without a terminal `seconds` pass between lines. None: stderr."""
    # sys.stderr is None where it was closed.
    stream = stream or sys.stderr or io.StringIO()
    self._stream = stream
    self._describe = describe or (lambda engine, result: "")
    self._done, self._total = 0, total
    self._seconds, self._last = seconds, time.monotonic()
    self._warned: set[tuple[str, int]] = set()
    self.notes: list[str] = []  # lines beside progress and results
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
    """Counts the messages of an `asgd.experiment.engines.Progress`.

    Shows their loss, staleness and gap: in short in a bar, in full in a line.
    """
    self._done += progress.count
    state, figures = f"loss {float(progress.loss.mean()):.3f}", progress.figures
    if progress.staleness is not None:
      state += f" staleness {progress.staleness:.1f}"
    if progress.gap is not None:
      state += f" gap {progress.gap:.2g}"
    if self._bar is not None:
      state += f" {live_figures.short(figures)}" if figures is not None else ""
      self._bar.set_description_str(cell.name, refresh=False)
      self._bar.set_postfix_str(state, refresh=False)
      self._bar.update(progress.count)
    elif time.monotonic() - self._last >= self._seconds:
      self._last = time.monotonic()
      state += f", {live_figures.long(figures)}" if figures is not None else ""
      self._print(f"{self._done / self._total:4.0%} {cell.name}: {state}")

  def finish(self, cell: Any, result: Mapping[str, Any]) -> None:
    """Shows the result of a cell, with warnings for the first seed of a run."""
    said, *warnings = report.lines(
      result, lambda row: self._describe(row["engine"], row)
    )
    self._print(said)
    if warnings and (cell.label, cell.workers) not in self._warned:
      self._warned.add((cell.label, cell.workers))
      for text in warnings:
        self._print(text)

  def line(self, text: str) -> None:
    """Prints a line that stays, and keeps it for the report."""
    self.notes.append(text)
    self._print(text)

  def _print(self, text):
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

  notes: tuple[str, ...] = ()

  def skip(self, *_: Any) -> None:
    """Shows nothing."""

  update = line = finish = close = skip
