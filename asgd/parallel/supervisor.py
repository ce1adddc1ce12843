"""Starts a command as several processes that train together, and ends them.

The processes connect on the loopback interface. The supervisor prints the
output of the first of them, and forwards signals to all. If one process exits,
the supervisor ends the others within seconds; if the supervisor exits, they
save and end (`asgd.parallel.processes.join` watches it).
"""

import collections
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

from asgd.parallel.processes import INCOMPLETE, LIFELINE

_GRACE = 2.0  # seconds for processes to end after one has exited
_SAVING = 60.0  # seconds to save after a signal
_LOOK = 0.5  # seconds between two looks at signals
_LOUD = "[Gloo]"  # begins lines of the library that are dropped


def supervise(count: int) -> None:
  """Runs this command `count` times, as processes that train together.

  ValueError if one fails, with its last line; SystemExit if a signal, which was
  forwarded to them, stopped them, or some cells are missing at the end.
  """
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  _Supervisor(count, f"127.0.0.1:{port}").run()


class _Supervisor:
  """Starts the processes, forwards their output, and ends them."""

  def __init__(self, count, place):
    self._count, self._place = count, place
    self._children: list[subprocess.Popen] = []
    self._lines = [collections.deque(maxlen=100) for _ in range(count)]
    self._readers: list[threading.Thread] = []
    self._exits = queue.SimpleQueue()  # of (number, status)
    self._signal = 0

  def run(self):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._forward_signal)
    killed: list[str] = []
    # The processes inherit the read end. This process keeps the write end open:
    # when it exits, they read an end of file and exit, too.
    read_end, write_end = os.pipe()
    try:
      for number in range(self._count):
        self._start(number, read_end)
      os.close(read_end)
      failed = self._wait()
    finally:
      for child in self._children:
        if child.poll() is None:
          child.kill()
          killed.append(child.args[-2].removeprefix("--process_id="))
        child.wait()
      for reader in self._readers:
        reader.join(_GRACE)
      os.close(write_end)
    if self._signal and killed:
      print(
        f"process {', '.join(killed)} of {self._count} did not stop in"
        f" {_SAVING:g} s and was killed; the same command resumes from the last"
        " checkpoint",
        file=sys.stderr,
      )
    if self._signal:
      sys.exit(128 + self._signal)
    if failed is not None:
      if failed[1] == INCOMPLETE:  # of all processes
        print(self._last_line(failed[0]), file=sys.stderr)
        sys.exit(failed[1])
      raise ValueError(self._describe(*failed))

  def _start(self, number, pipe):
    role = f"--process_id={number}", f"--coordinator={self._place}"
    command = [sys.executable, *sys.orig_argv[1:], *role]
    child = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env={**os.environ, LIFELINE: str(pipe), "PYTHONUNBUFFERED": "1"},
      pass_fds=(pipe,),
      start_new_session=True,  # the terminal's Ctrl-C is forwarded from here
      text=True,
      errors="replace",
    )
    self._children.append(child)
    if self._signal:
      child.terminate()
    for read in (self._print, self._remember, self._await):
      reader = threading.Thread(target=read, args=(number,), daemon=True)
      reader.start()
      self._readers.append(reader)

  def _print(self, number):
    """Prints the output of the first process."""
    with self._children[number].stdout as lines:
      for line in lines:
        if number == 0 and not line.startswith(_LOUD):
          print(line, end="", flush=True)

  def _remember(self, number):
    """Keeps a process's last lines on stderr, for the error at the end."""
    interrupted = False
    with self._children[number].stderr as lines:
      for line in lines:
        self._lines[number].append(line.strip())
        if self._signal and line.startswith(
          ("Traceback (", "Could not import")
        ):
          interrupted = True  # by Ctrl-C while Python started: no error
        if interrupted or number != 0:
          continue
        if not line.startswith(("error: ", _LOUD)):
          print(line, end="", file=sys.stderr, flush=True)

  def _await(self, number):
    self._exits.put((number, self._children[number].wait()))

  def _forward_signal(self, signum, frame):
    """Ends the processes by SIGTERM, as Python may lose a SIGINT while it
    starts."""
    del frame
    self._signal = signum
    for child in self._children:
      with contextlib.suppress(ProcessLookupError):
        child.terminate()

  def _wait(self):
    """Waits until all processes have exited or the deadline has passed; returns
    (number, status) of the first failure, or None."""
    failed, end, left = None, None, self._count
    while left:
      if end is None and self._signal:
        end = time.monotonic() + _SAVING
      try:
        number, status = self._exits.get(timeout=_LOOK)
      except queue.Empty:
        if end is not None and time.monotonic() > end:
          break
        continue
      left -= 1
      if status and failed is None:
        failed = number, status
        end = time.monotonic() + (_SAVING if self._signal else _GRACE)
    return failed

  def _describe(self, number, status):
    how, remedy = f"failed with status {status}", ""
    if status < 0:
      how = f"was killed by {signal.Signals(-status).name}"
      remedy = "; the same command resumes from the last checkpoint"
    last = self._last_line(number).removeprefix("error: ")
    return f"process {number} of {self._count} {how}: {last}{remedy}"

  def _last_line(self, number):
    lines = list(filter(None, self._lines[number]))
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
