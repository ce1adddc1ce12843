"""The standard output of commands, whose reader may close it at any time."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
  """Ends the program silently, with SIGPIPE's exit status, if its output is
  closed, as by `asgd --list | head -1`. Flushes the output at the end of the
  block: a failure when Python exits would print a traceback.

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
