"""Being asked to stop: by a signal, once to save and twice to end at once."""

import signal

GO_ON = "run the same command again to go on"  # what a user is told


class Signals:
  """Remembers the first request to stop; a second one interrupts at once."""

  def __init__(self):
    self.received = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del frame
    if self.received:
      raise KeyboardInterrupt
    self.received = number


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
