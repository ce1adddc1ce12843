"""Resources of a command, which change no result.

These are shared memory, a Ray cluster that starts with the first engine that
needs it, processes for stages of a pipeline, and faults to inject.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asgd.experiment import ray_runtime
from asgd.live import faults as faults_lib
from asgd.live.profile import Profile


@dataclasses.dataclass
class Machine:
  """The resources that one command gives its engines."""

  memory_dir: str = "/dev/shm"  # where the shared memory of live runs is made
  grace_seconds: float = 20.0  # for live workers to finish when stopped
  faults: Sequence[faults_lib.Fault] = ()
  address: str | None = None  # of a Ray cluster; None: one on this machine
  allow_network: bool = False  # whether Ray may listen beyond this machine
  processes: int = 0  # for the stages of a pipeline; 0: threads
  gpus_per_process: float = 0.0  # GPUs that Ray reserves for each process
  spans: bool = False  # write the times of each task of a pipeline
  modules: Sequence[str] = ()  # a user's files, for a Ray cluster
  # A folder for a trace by JAX's profiler. The profiler traces this process, or
  # worker 0 on its machine if the workers are processes of Ray.
  profile: str | None = None
  # Shows a line to the user; None prints it to stderr.
  show_line: Callable[[str], None] | None = None
  # Lines shown about the current cell that are not in its progress.json yet.
  lines: list[str] = dataclasses.field(default_factory=list)

  # id of a value -> (reference, value).
  _references: dict[int, Any] = dataclasses.field(
    default_factory=dict, init=False
  )
  # Whether this object has started Ray.
  _started_ray: bool = dataclasses.field(default=False, init=False)
  _tracer: Profile | None = dataclasses.field(default=None, init=False)

  def ray_reference(self, value: Any) -> Any:
    """Returns a reference to a value in Ray's object store; starts Ray, unless
    this process has it already."""
    if not self._references:
      self._started_ray = ray_runtime.start(
        self.address, allow_network=self.allow_network, modules=self.modules
      )
    if id(value) not in self._references:
      import ray

      self._references[id(value)] = ray.put(value), value
    return self._references[id(value)][0]

  def show(self, line: str) -> None:
    """Shows a line to the user at once, for an engine that waits in a call."""
    if self.show_line is None:
      print(line, file=sys.stderr)
    else:
      self.show_line(line)

  def after_job(self) -> None:
    """Counts work that was done in this process; see `Profile.after_job`."""
    if self._tracer is None:
      self._tracer = Profile(self.profile)
    self._tracer.after_job()

  def close(self) -> None:
    """Stops the profiler, and Ray if this object has started it."""
    if self._tracer is not None:
      self._tracer.close()
    if self._started_ray:
      ray_runtime.stop()
      self._started_ray = False
    self._references.clear()
