"""The standard output of commands. Its reader may close it at any time."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
  """Exits silently, with SIGPIPE's status, if the output's reader closes it, as
  in `asgd --list | head -1`. It flushes the output at the end of the block: a
  failure while Python exits would print a traceback.

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
