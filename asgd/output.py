"""Standard output of commands: tables, and the exit if its reader closes it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

_MOST_COLUMNS = 8  # largest number of columns of a table on a terminal


def table(
  header: Sequence[str], rows: Sequence[Sequence[str]], rest: str = ""
) -> str:
  """Returns a table to be printed on the standard output.

  On a terminal the table fits the screen. If there is a file `rest`, the table
  has at most eight columns, and a line below it names the file, which has all
  columns. Elsewhere it is the complete text of `text_table.format_table`.

  Args:
    header: names of the columns.
    rows: texts of each row.
    rest: file with all columns; "" keeps all columns.

  Example:
    >>> print(table(["name", "n"], [["a", "10"]]), end="")
    name   n
    --------
    a     10
  """
  if sys.stdout is None or not sys.stdout.isatty():
    from asgd import text_table

    return text_table.format_table(list(header), [list(row) for row in rows])
  import rich.box
  import rich.console
  import rich.table
  import rich.text

  console, n_columns = rich.console.Console(), len(header)
  if rest:  # as many columns as fit
    widths = [max(map(len, texts)) for texts in zip(header, *rows, strict=True)]
    n_columns = min(n_columns, _MOST_COLUMNS)
    while (
      n_columns > 2 and sum(widths[:n_columns]) + 3 * n_columns > console.width
    ):
      n_columns -= 1
  lines = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False
  )
  for number, name in enumerate(header[:n_columns]):
    lines.add_column(
      name, justify="right" if number else "left", overflow="fold"
    )
  for row in rows:
    lines.add_row(*(rich.text.Text(text) for text in row[:n_columns]))
  with console.capture() as capture:
    console.print(lines)
  text = capture.get()
  if header[n_columns:]:
    text += f"{len(header) - n_columns} more columns are in {rest}\n"
  return text


@contextlib.contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
  """Exits silently, with SIGPIPE's status, if the output's reader closes it, as
  in `asgd --list | head -1`. The output is flushed at the end of the block: if
  flushing failed while Python exits, Python would print a traceback.

  Example:
    >>> @exit_on_broken_pipe()
    ... def main():
    ...   print("listed")
    >>> main()
    listed
  """
  try:
    try:
      yield
    finally:
      if sys.stdout is not None:
        sys.stdout.flush()
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(128 + signal.SIGPIPE)
