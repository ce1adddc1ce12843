"""Progress: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from typing import TextIO

import tqdm

from launch import live_figures


class Progress:
  """Shows how far an experiment is, and the state of its current cell."""

  def __init__(
    self,
    total: int,
    *,
    stream: TextIO | None = sys.stderr,
    seconds: float = 15.0,
  ):
    """Starts.

    Args:
      total: messages in the whole experiment.
      stream: a bar is drawn if this is a terminal.
      seconds: between two lines if it is not.
    """
    stream = stream or open(os.devnull, "w")  # noqa: SIM115  (closed stderr)
    self._stream = stream
    self._total = total
    self._done = 0
    self._seconds = seconds
    self._last = time.monotonic()
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

  def update(
    self,
    cell: str,
    messages: int,
    loss: float,
    staleness: float | None = None,
    gap: float | None = None,
    live: live_figures.Figures | None = None,
  ) -> None:
    """Counts messages and shows what they were like (where nothing is ever
    stale, the loss), and how a live run goes: in short in a bar, in full in a
    line."""
    self._done += messages
    state = f"loss {loss:.3f}"
    if staleness is not None:
      state += f" staleness {staleness:.1f} gap {gap:.2g}"
    if self._bar is not None:
      if live is not None:
        state = f"{state} {live_figures.short(live)}"
      self._bar.set_description_str(cell, refresh=False)
      self._bar.set_postfix_str(state, refresh=False)
      self._bar.update(messages)
      return
    now = time.monotonic()
    if now - self._last >= self._seconds:
      self._last = now
      if live is not None:
        state = f"{state}, {live_figures.long(live)}"
      self.line(f"{self._done / self._total:4.0%} {cell}: {state}")

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
