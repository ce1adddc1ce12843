"""Progress: one block on a terminal, plain lines elsewhere."""

import io
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from asgd.experiment import live_figures, report

_MAX_CELLS = 4  # cells in the block: the latest ones


class ProgressBar:
  """Shows how far an experiment is, and the state of its current cells."""

  def __init__(
    self,
    total: int,
    *,
    describe: Callable[[str, Mapping[str, Any]], str] | None = None,
    stream: TextIO | None = None,
    seconds: float = 15.0,
    quiet: bool = False,
  ):
    """Starts a bar.

    Args:
      total: messages of all cells.
      describe: (engine, result) -> the result in a few words.
      stream: where the progress is shown; None: stderr.
      seconds: time between two lines if the stream is no terminal.
      quiet: whether only warnings and notes are shown.
    """
    # sys.stderr is None if this process was started with it closed.
    stream = stream or sys.stderr or io.StringIO()
    self._stream, self._quiet = stream, quiet
    self._describe = describe or (lambda engine, result: "")
    self._messages_done, self._total = 0, total
    self._seconds, self._last_line_time = seconds, time.monotonic()
    self._warned: set[tuple[str, int]] = set()  # (label, workers) of cells
    self.notes: list[str] = []  # lines beside progress and results
    self._block = None
    if stream.isatty() and not quiet:
      self._block = _Block(total, stream)

  def skip(self, messages: int) -> None:
    """Counts messages that an earlier run received."""
    self._messages_done += messages
    if self._block is not None:
      self._block.skip(messages)

  def update(self, cell: Any, progress: Any) -> None:
    """Counts the messages of an `asgd.experiment.engines.Progress`.

    Shows their loss, staleness and gap. Rates are short in a block, and long in
    a line.
    """
    self._messages_done += progress.messages
    state, figures = f"loss {float(progress.loss.mean()):.3f}", progress.figures
    if progress.staleness is not None:
      state += f" staleness {progress.staleness:.1f}"
    if progress.gap is not None:
      state += f" gap {progress.gap:.2g}"
    if self._block is not None:
      if figures is not None:
        state += f" {live_figures.short_text(figures)}"
      self._block.update(cell.name, state, progress.messages)
    elif (
      not self._quiet
      and time.monotonic() - self._last_line_time >= self._seconds
    ):
      self._last_line_time = time.monotonic()
      if figures is not None:
        state += f", {live_figures.long_text(figures)}"
      self._print(
        f"{self._messages_done / self._total:4.0%} {cell.name}: {state}"
      )

  def finish(self, cell: Any, result: Mapping[str, Any]) -> None:
    """Shows the result of a cell, with warnings for the first seed of a run. A
    block shows only the first number; the table at the end has all."""
    line, *warnings = report.result_lines(
      result, lambda row: self._describe(row["engine"], row)
    )
    if self._block is not None:
      self._block.finish(cell.name, line.partition(", ")[0])
    elif not self._quiet:
      self._print(line)
    # Seeds of a run repeat the warnings of the first one.
    if warnings and (cell.label, cell.workers) not in self._warned:
      self._warned.add((cell.label, cell.workers))
      for warning in warnings:
        self._print(warning)

  def line(self, text: str) -> None:
    """Prints a line that stays, and stores it for the report."""
    self.notes.append(text)
    self._print(text)

  def _print(self, text: str) -> None:
    if self._block is not None:
      self._block.print(text)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Removes the block, if there is one."""
    if self._block is not None:
      self._block.close()


class _Block:
  """Lines at the bottom of a terminal: the number of messages of all cells, the
  cell that has finished last, and the cells in training."""

  def __init__(self, total: int, stream: TextIO):
    """Draws the block on a terminal; `total`: messages of all cells."""
    from rich import console, live
    from rich import progress as bars

    self._cells: dict[str, str] = {}  # name -> state, the latest first
    self._finished = 0  # cells
    self._last_result = ""  # the result of the cell that has finished last
    self._bar = bars.Progress(
      *("messages", bars.BarColumn(), bars.MofNCompleteColumn()),
      *(bars.TaskProgressColumn(), "left", bars.TimeRemainingColumn()),
    )
    self._task = self._bar.add_task("", total=total)
    self._console = console.Console(file=stream, highlight=False)
    self._live = live.Live(
      get_renderable=self._render,
      console=self._console,
      transient=True,
      redirect_stdout=False,
      redirect_stderr=False,
    )
    self._live.start()
    # Left visible, because a second Ctrl-C ends the process at once.
    self._console.show_cursor(True)

  def _render(self) -> Any:
    """Returns the block for the width that the terminal has now."""
    from rich import console, text

    lines = [f"{name}: {state}" for name, state in self._cells.items()]
    if self._last_result:
      lines.insert(0, f"{self._finished} finished, last {self._last_result}")
    # One line more than cells, for the finished cell. Lines are not wrapped, so
    # that the block keeps its height.
    rows = (
      text.Text(line, no_wrap=True, overflow="ellipsis")
      for line in lines[: _MAX_CELLS + 1]
    )
    return console.Group(self._bar.get_renderable(), *rows)

  def skip(self, messages: int) -> None:
    """Counts messages of an earlier run, which took no time of this run."""
    task = self._bar.tasks[0]
    # `reset`, not `advance`: rich estimates the remaining time from its own
    # messages only.
    self._bar.reset(
      self._task, total=task.total, completed=int(task.completed) + messages
    )

  def update(self, name: str, state: str, messages: int) -> None:
    """Shows the state of a cell, and counts its messages."""
    # The cell moves to the front of the dict.
    self._cells.pop(name, None)
    self._cells = {name: state, **self._cells}
    self._bar.advance(self._task, messages)

  def finish(self, name: str, result: str) -> None:
    """Shows the result of a cell that has ended."""
    self._cells.pop(name, None)
    self._finished, self._last_result = self._finished + 1, result

  def print(self, line: str) -> None:
    """Prints a line above the block."""
    self._console.print(line, markup=False, soft_wrap=True)

  def close(self) -> None:
    """Removes the block."""
    self._live.stop()


class Silent:
  """A bar that shows nothing: another process shows the progress."""

  notes: tuple[str, ...] = ()

  def skip(self, *_: Any) -> None:
    """Shows nothing."""

  update = line = finish = close = skip
