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
    """Writes the trace to the folder; None traces nothing."""
    self._folder, self._seconds, self._clock = folder, seconds, clock
    self._began_at: float | None = None
    self._stopping: threading.Thread | None = None

  def after_job(self) -> None:
    """Begins the trace after the first job, and ends it after its seconds. Call
    this after each job. Raises RuntimeError if this process is traced
    already."""
    if self._folder is None or self._stopping:
      return
    if self._began_at is None:  # the first job has compiled the programs
      self._began_at = self._clock()
      jax.profiler.start_trace(str(self._folder))
    elif self._clock() - self._began_at >= self._seconds:
      self._stop()

  def _stop(self) -> None:
    # To write the trace takes seconds, in which the lead would expel a worker.
    self._stopping = threading.Thread(target=jax.profiler.stop_trace)
    self._stopping.start()

  def close(self) -> None:
    """Ends the trace, and waits until it is written."""
    if self._began_at is not None and not self._stopping:
      self._stop()
    if self._stopping:
      self._stopping.join()
