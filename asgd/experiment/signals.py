"""Being asked to stop: by a signal, once to save and twice to end at once.

Python calls a handler between two steps of the main thread, which may wait in a
library for ever. So a second thread counts signals too, and ends the process
that does not end after two.
"""

import contextlib
import os
import select
import signal
import sys
import threading

from asgd.live import processes

GO_ON = "run the same command again to go on"  # what a user is told
_GRACE = 3.0  # seconds to end, once asked twice
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
  """Remembers the first request to stop. A second one interrupts at once,
  unless this process ends anyway (`ending`); if that does not end it, or a
  third comes, it and its children end."""

  ending = False  # what was trained is saved, and the user was told

  def __init__(self, *, tells: bool = True):
    """Starts to listen; `tells` the user at once when a request comes."""
    self.received, self._tells = 0, tells and sys.stderr is not None
    for number in _NUMBERS:
      signal.signal(number, self._handle)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=self._count, args=(heard,), daemon=True).start()

  def _handle(self, number, frame):
    del frame
    if self.received and not Signals.ending:
      raise KeyboardInterrupt
    self.received = number
    if self._tells:
      _say("stopping: what was trained is saved first")

  def _count(self, heard):
    asked, milliseconds = 0, None
    poller = select.poll()  # select() refuses numbers of files from 1,024 on
    poller.register(heard, select.POLLIN)
    while asked < 3 and poller.poll(milliseconds):
      data = os.read(heard, 64)
      mine = [n for n in _NUMBERS if signal.getsignal(n) == self._handle]
      asked += sum(map(data.count, mine))
      if asked >= 2:
        milliseconds = 1000 * _GRACE
    if self._tells:
      _say(f"ended at once, before all was saved; {GO_ON}")
    processes.end_children()
    os._exit(128 + signal.SIGINT)


def _say(text):
  with contextlib.suppress(OSError):  # no print: it may be in one
    os.write(2, f"\n{text}\n".encode())


class NoSignals:
  """Of a library call, which is never asked to stop."""

  received = 0


class Stopped(Exception):
  """A signal asked for the end, and what was trained has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message, signal_number)
    self.message, self.signal_number = message, signal_number

  def __str__(self):
    return self.message
