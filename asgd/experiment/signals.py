"""Being asked to stop: by a signal, once to save and twice to end at once."""

import contextlib
import os
import signal
import sys

GO_ON = "run the same command again to go on"  # what a user is told


class Signals:
  """Remembers the first request to stop; a second one interrupts at once."""

  def __init__(self, *, tells: bool = True):
    """Starts to listen; `tells` the user at once when a request comes."""
    self.received, self._tells = 0, tells and sys.stderr is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del frame
    if self.received:
      raise KeyboardInterrupt
    self.received = number
    if self._tells:
      with contextlib.suppress(OSError):  # no print: it may be in one
        os.write(2, b"\nstopping: what was trained is saved first\n")


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
