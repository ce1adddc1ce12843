"""Starts a command as several processes that train together, and ends them.

The processes connect on the loopback interface. The supervisor prints the
output of process 0. When a signal asks the supervisor to stop, it sends all
processes SIGTERM and waits a minute for them to save. If a process fails, the
supervisor kills the other processes after two seconds. If the supervisor itself
exits, the processes save and end (`asgd.parallel.processes.join`).
"""

import collections
import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from asgd.parallel.processes import INCOMPLETE, LIFELINE

_GRACE_SECONDS = 2.0  # time to end after another process has failed
_SAVE_SECONDS = 60.0  # time to save after a signal
_POLL_SECONDS = 0.5  # between two checks for a signal
_DROPPED_PREFIX = "[Gloo]"  # begins lines of Gloo, which are not printed


def supervise(count: int) -> None:
  """Runs this command `count` times, as processes that train together.

  Raises:
    ValueError: if a process fails, with the last line of that process.
    SystemExit: if a signal stopped this process and the processes that it
      started, or if cells are missing at the end.
  """
  # The system chooses a free port. It is closed again at once, so that process
  # 0 can listen there.
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  _Supervisor(count, f"127.0.0.1:{port}").run()


class _Supervisor:
  """Starts the processes, forwards their output, and ends them."""

  def __init__(self, count: int, coordinator: str):
    self._count, self._coordinator = count, coordinator
    self._children: list[subprocess.Popen[str]] = []
    # The last lines of each process on stderr.
    self._lines: list[collections.deque[str]] = [
      collections.deque(maxlen=100) for _ in range(count)
    ]
    self._threads: list[threading.Thread] = []
    # (process, exit status), from the threads that wait for the processes.
    self._exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    self._signal = 0  # the last signal that this process got; 0: none

  def run(self) -> None:
    """Starts all processes and waits; `supervise` documents the errors."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(signum, self._end_children)
    killed: list[str] = []
    # The processes inherit the read end, and this process keeps the write end
    # open. When this process exits, they read an end of file and exit, too.
    read_end, write_end = os.pipe()
    try:
      # [1] Start the processes.
      for number in range(self._count):
        self._start(number, read_end)
      os.close(read_end)
      # [2] Wait for all processes, or for a failure and `_GRACE_SECONDS`.
      failure = self._wait()
    finally:
      # [3] Kill the processes that still run, and read the end of the output.
      for number, child in enumerate(self._children):
        if child.poll() is None:
          child.kill()
          killed.append(str(number))
        child.wait()
      for thread in self._threads:
        thread.join(_GRACE_SECONDS)
      os.close(write_end)
    # [4] End this process with the result of the processes.
    if self._signal and killed:
      print(
        f"process {', '.join(killed)} of {self._count} did not stop in"
        f" {_SAVE_SECONDS:g} s and was killed; the same command resumes from"
        " the last checkpoint",
        file=sys.stderr,
      )
    if self._signal:
      sys.exit(128 + self._signal)  # as shells report a signal
    if failure is not None:
      number, status = failure
      if status == INCOMPLETE:  # all exit with this status: no process failed
        print(self._last_line(number), file=sys.stderr)
        sys.exit(status)
      raise ValueError(self._describe(number, status))

  def _start(self, number: int, pipe: int) -> None:
    """Starts a process, and the threads that read its output."""
    # The same command with two more flags, by which `join` connects.
    role_flags = f"--process_id={number}", f"--coordinator={self._coordinator}"
    command = [sys.executable, *sys.orig_argv[1:], *role_flags]
    child = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env={**os.environ, LIFELINE: str(pipe), "PYTHONUNBUFFERED": "1"},
      pass_fds=(pipe,),
      start_new_session=True,  # the terminal's Ctrl-C reaches only this process
      text=True,
      errors="replace",
    )
    self._children.append(child)
    # The child missed a signal that came before it was started.
    if self._signal:
      child.terminate()
    targets = self._forward_output, self._record_errors, self._report_exit
    for target in targets:
      thread = threading.Thread(target=target, args=(number,), daemon=True)
      thread.start()
      self._threads.append(thread)

  def _forward_output(self, number: int) -> None:
    """Prints the output of process 0. Reads and drops the output of another
    process, because a full pipe would stop that process."""
    stdout = self._children[number].stdout
    assert stdout is not None
    with stdout:
      for line in stdout:
        if number == 0 and not line.startswith(_DROPPED_PREFIX):
          print(line, end="", flush=True)

  def _record_errors(self, number: int) -> None:
    """Keeps the last lines of a process on stderr, for the error at the end,
    and prints the lines of process 0."""
    stderr = self._children[number].stderr
    assert stderr is not None
    is_interrupted = False
    with stderr:
      for line in stderr:
        self._lines[number].append(line.strip())
        # A signal while Python imports leaves a traceback that is no error.
        if self._signal and line.startswith(
          ("Traceback (", "Could not import")
        ):
          is_interrupted = True
        if is_interrupted or number != 0:
          continue
        # `_describe` prints the error line once, at the end.
        if not line.startswith(("error: ", _DROPPED_PREFIX)):
          print(line, end="", file=sys.stderr, flush=True)

  def _report_exit(self, number: int) -> None:
    self._exits.put((number, self._children[number].wait()))

  def _end_children(self, signum: int, frame: Any) -> None:
    """Sends all processes SIGTERM, for every signal: Python may lose a SIGINT
    while it starts."""
    del frame
    self._signal = signum
    for child in self._children:
      with contextlib.suppress(ProcessLookupError):
        child.terminate()

  def _wait(self) -> tuple[int, int] | None:
    """Waits until all processes have exited or the deadline has passed. Returns
    (number, status) of the first failure, or None."""
    failure: tuple[int, int] | None = None
    deadline, n_running = math.inf, self._count
    while n_running:
      if self._signal and deadline == math.inf:
        deadline = time.monotonic() + _SAVE_SECONDS
      # A signal handler does not wake `get`, so it waits for short times.
      try:
        number, status = self._exits.get(timeout=_POLL_SECONDS)
      except queue.Empty:
        if time.monotonic() > deadline:
          break
        continue
      n_running -= 1
      # The first failure is the cause; later failures follow from it.
      if status and failure is None:
        failure = number, status
        seconds = _SAVE_SECONDS if self._signal else _GRACE_SECONDS
        deadline = time.monotonic() + seconds
    return failure

  def _describe(self, number: int, status: int) -> str:
    """Returns the error of a failed process, with its last line."""
    result, remedy = f"failed with status {status}", ""
    if status < 0:  # -N: signal N ended it
      result = f"was killed by {signal.Signals(-status).name}"
      remedy = "; the same command resumes from the last checkpoint"
    last = self._last_line(number).removeprefix("error: ")
    return f"process {number} of {self._count} {result}: {last}{remedy}"

  def _last_line(self, number: int) -> str:
    """Returns the last error line of a process on stderr; its last line if
    there is no error line."""
    lines = list(filter(None, self._lines[number]))
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
