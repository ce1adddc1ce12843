"""A trace of one process by JAX's profiler, over the first seconds of work.

TensorBoard's profile plugin and Perfetto show it. The folder has
plugins/profile/TIME/HOST.trace.json.gz and HOST.xplane.pb.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

SECONDS = 5.0  # length of the trace: a trace of a minute is hard to look at


class Profile:
  """Traces this process once, from the first call of `after_job` on."""

  def __init__(
    self,
    folder: str | Path | None,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Writes the trace to the folder; with None there is no trace."""
    self._folder, self._seconds, self._clock = folder, seconds, clock
    self._start_time: float | None = None
    self._stop_thread: threading.Thread | None = None

  def after_job(self) -> None:
    """Begins the trace at the first call, and ends it when `seconds` have
    passed. Call this after each job. Raises RuntimeError if this process is
    traced already."""
    if self._folder is None or self._stop_thread:
      return
    if self._start_time is None:  # the first job has compiled the programs
      jax.profiler.start_trace(str(self._folder))
      self._start_time = self._clock()
    elif self._clock() - self._start_time >= self._seconds:
      self._stop()

  def _stop(self) -> None:
    # Writing the trace takes seconds. The lead would expel a worker that waited
    # for it.
    self._stop_thread = threading.Thread(target=jax.profiler.stop_trace)
    self._stop_thread.start()

  def close(self) -> None:
    """Ends the trace, and waits until it is written."""
    if self._start_time is not None and not self._stop_thread:
      self._stop()
    if self._stop_thread:
      self._stop_thread.join()
