"""Signals that stop a run: the first makes it save, the second ends it.

Python calls a handler between two steps of the main thread, which may wait in a
library for ever. So a second thread counts signals too. That thread kills the
process if it has not ended soon after the second signal.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any

from asgd.checks import RERUN
from asgd.live import processes

_GRACE_SECONDS = 3.0  # in which the process has to end after a second signal
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
  """Remembers the first request to stop.

  A second request raises KeyboardInterrupt in the main thread, unless this
  process is already `ending`. If the process has not ended after
  `_GRACE_SECONDS`, or a third request arrives, the process and its children are
  killed.
  """

  ending = False  # all training is saved, and a line for the user is printed

  def __init__(self, *, prints: bool = True):
    """Installs the handlers. `prints`: whether a request prints a line."""
    self.received, self._prints = 0, prints and sys.stderr is not None
    for signal_number in _STOP_SIGNALS:
      signal.signal(signal_number, self._handle)
    # Python's C handler writes each signal's number to the pipe at once, even
    # while the main thread is blocked.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(
      target=self._count_requests, args=(read_end,), daemon=True
    ).start()

  def _handle(self, signal_number: int, frame: Any) -> None:
    """Python's handler: runs in the main thread, between two of its steps."""
    del frame
    if self.received and not Signals.ending:
      raise KeyboardInterrupt
    self.received = signal_number
    if self._prints:
      _print_line("stopping: all training so far is saved first")

  def _count_requests(self, read_end: int) -> None:
    """Counts the requests in a thread; ends the process when it must."""
    requests = 0
    timeout: float | None = None  # milliseconds; None: no limit
    poller = select.poll()  # select() refuses descriptors from 1,024 on
    poller.register(read_end, select.POLLIN)
    while requests < 3 and poller.poll(timeout):
      data = os.read(read_end, 64)  # a byte for each signal, its number
      # Another library may have replaced a handler: its signals do not count.
      handled_signals = [
        n for n in _STOP_SIGNALS if signal.getsignal(n) == self._handle
      ]
      requests += sum(map(data.count, handled_signals))
      if requests >= 2:
        timeout = 1000 * _GRACE_SECONDS
    if self._prints:
      _print_line(f"ended at once, before all was saved; {RERUN}")
    processes.kill_descendants()
    os._exit(128 + signal.SIGINT)


def _print_line(text: str) -> None:
  """Prints a line on stderr, as a handler may."""
  with contextlib.suppress(OSError):  # a handler may interrupt print
    os.write(2, f"\n{text}\n".encode())


class NoSignals:
  """The signals of a library call, which is never asked to stop."""

  received = 0


class Stopped(Exception):
  """A signal asked to stop, and all training so far has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message, signal_number)
    self.message, self.signal_number = message, signal_number

  def __str__(self):
    return self.message
