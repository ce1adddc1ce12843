"""The standard output of commands, whose reader may close it at any time."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
  """Ends the program without a word where nobody reads its output any more, as
  in `asgd --list | head -1`: with the exit status of a program that SIGPIPE
  ended. What is still to be printed is printed at the end of the block, and not
  when Python exits, where a failure has a page of its own.

  Example:
    >>> @ends_with_its_reader()
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
