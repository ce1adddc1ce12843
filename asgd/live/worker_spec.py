"""The work of a live worker, in any kind of host.

All workers of a run share a `WorkerSpec`: the compiled function that does a
job, the batches, the division of the parameters, and the speed of each worker.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, sharding
from asgd.live import pace, slot_formats
from asgd.live.rebuilt_params import RebuiltParams

_MEASURE_SECONDS = 1.0  # least total time of the measured jobs


class WorkerSpec(NamedTuple):
  """The work of each worker of a run."""

  # (state, ticket, batch, root, job) -> (state, message, metrics), as `work` of
  # `simulator.compile_steps`
  work: Callable[..., tuple[Any, Any, Any]]
  init: Callable[[Any], Any]  # parameters (shapes) -> the worker's state
  batch: Callable[[int, int], base.Batch]  # (worker, job) -> batch
  root: jax.Array  # key from which `work` derives the key of each job
  params: Any  # shapes and dtypes of all parameters
  plan: sharding.ShardPlan | None  # division of `params`; None: one shard
  consistent: bool = False  # all shards follow the lead's order
  depth: int = 1  # most open tickets of a worker
  slowdown: tuple[float, ...] = ()  # factors on the time of workers 0, 1, ...
  devices: tuple[jax.Device, ...] = ()  # of the workers; (): JAX's default
  codec: compression.Codec | None = None  # encodes messages, within `work`
  # Encodes the updates that shards send; None: shards send parameters.
  codec_down: compression.Codec | None = None
  overlap: bool = False  # compute and write messages in separate threads

  def parts(self) -> list[Any]:
    """Returns each shard's part of the parameters."""
    if self.plan is None:
      return [self.params]
    return sharding.split(self.plan, self.params)

  def slot_contents(self) -> list[tuple[Any, ...]]:
    """Returns the contents of each shard's slots: (params, messages), or with
    updates (params, messages, updates), as `slots.SharedMemory` takes them."""
    updates = self.codec_down is not None
    return [
      slot_formats.contents(self.codec, part, updates=updates)
      for part in self.parts()
    ]

  def make_rebuilt_params(self) -> list[RebuiltParams] | None:
    """Returns a `RebuiltParams` for each shard; None if each ticket carries the
    parameters."""
    if self.codec_down is None:
      return None
    return [RebuiltParams(self.codec_down, part) for part in self.parts()]

  def on_device(
    self, worker: int
  ) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which this thread computes on the device of a
    worker: device `worker` modulo the number of devices."""
    if not self.devices:
      return contextlib.nullcontext()
    return jax.default_device(self.devices[worker % len(self.devices)])

  def example(self, worker: int) -> base.Batch:
    """Returns a batch with the shapes of a worker's batches."""
    # Job 0 may belong to another worker, and its batch would be read from a
    # stream out of order. So some batch functions have a method `example`.
    example = getattr(self.batch, "example", None)
    return example(worker) if example else self.batch(worker, 0)

  def kept_in(self, folder: Path, worker: int) -> "WorkerSpec":
    """Returns the spec of one worker, which saves its batches in a folder if
    the batch function can; see `stacking.NamedBatches.kept_in`."""
    kept_in = getattr(self.batch, "kept_in", None)
    return self._replace(batch=kept_in(folder, worker)) if kept_in else self

  def warm_up(self, worker: int, batch: base.Batch | None = None) -> None:
    """Compiles the work by doing one job with `batch`, by default with
    `example(worker)`. Drops the result."""
    batch = self.example(worker) if batch is None else batch
    self._try_job(worker, self._first_state_and_ticket(worker), batch)
    for rebuilt_params in self.make_rebuilt_params() or ():
      rebuilt_params.warm_up()

  def _first_state_and_ticket(self, worker: int) -> tuple[Any, base.Ticket]:
    """Returns the first state and a ticket of a worker, with parameters 0."""
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.params)
    # NumPy scalars, as in a run: a jax array would lie on one device.
    index: Any = np.int32(worker)
    version: Any = np.int32(0)
    ticket = base.Ticket(index, version, params, np.True_)
    with self.on_device(worker):
      return self.init(params), ticket

  def _try_job(
    self,
    worker: int,
    state_and_ticket: tuple[Any, base.Ticket],
    batch: base.Batch,
  ) -> None:
    """Does a job and drops its result."""
    with self.on_device(worker):
      result = self.work(*state_and_ticket, batch, self.root, np.int32(0))
    jax.block_until_ready(result)

  def warm_up_all(self, workers: int) -> None:
    """Compiles the programs of all workers, each program once."""
    programs = []
    for worker in range(workers):
      batch = self.example(worker)
      device = worker % max(len(self.devices), 1)
      # A program depends on the device and the shapes of a batch.
      program = device, [leaf.shape for leaf in jax.tree.leaves(batch)]
      if program not in programs:
        programs.append(program)
        self.warm_up(worker, batch)

  def measure(
    self, worker: int, jobs: int, wait: Callable[[float], None]
  ) -> float:
    """Returns the median time of a worker's jobs, in seconds.

    The worker does at least `jobs` jobs, for at least a second; their results
    are dropped. Call `warm_up` before. The cluster measures all workers at the
    same time, because they share the machine in training, too.
    """
    times: list[float] = []
    state_and_ticket = self._first_state_and_ticket(worker)
    while len(times) < jobs or math.fsum(times) < _MEASURE_SECONDS:
      start_time = time.perf_counter()
      self._try_job(worker, state_and_ticket, self.batch(worker, len(times)))
      factor, clock = self.factor(worker), time.perf_counter
      pace.slow_down(factor, start_time, clock=clock, wait=wait)
      times.append(time.perf_counter() - start_time)
    return statistics.median(times)

  def factor(self, worker: int) -> float:
    """Returns the factor on the time of a worker's jobs, 1 by default."""
    return pace.factor_of(self.slowdown, worker)
