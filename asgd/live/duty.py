"""The work of a live worker, in any kind of host."""

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
from asgd.live.held import HeldParams

_MEASURED = 1.0  # seconds that jobs take, to be timed


class Duty(NamedTuple):
  """The work of each worker of a run."""

  work: Callable  # of `simulator.compile_steps`
  init: Callable[[Any], Any]  # parameters (shapes) -> the worker's state
  batch: Callable[[int, int], base.Batch]
  root: jax.Array  # key
  params: Any  # shapes and dtypes of all parameters
  plan: sharding.ShardPlan | None  # how they are split; None: one shard
  consistent: bool = False
  depth: int = 1
  slowdown: tuple[float, ...] = ()  # factors on the time of workers 0, 1, ...
  devices: tuple[jax.Device, ...] = ()  # that workers share; (): the default
  codec: compression.Codec | None = None  # that the work ends with
  # Packs the updates sent to the worker; None: it is sent parameters.
  codec_down: compression.Codec | None = None
  overlap: bool = False  # compute and write messages in separate threads

  def parts(self) -> list[Any]:
    """Returns each shard's part of the parameters."""
    if self.plan is None:
      return [self.params]
    return sharding.split(self.plan, self.params)

  def shares(self) -> list[tuple[Any, ...]]:
    """Returns the contents of each shard's slots: (params, messages), and
    updates if they are sent, as `slots.SharedMemory` takes them."""
    updates = self.codec_down is not None
    return [
      slot_formats.contents(self.codec, part, updates=updates)
      for part in self.parts()
    ]

  def hold(self) -> list[HeldParams] | None:
    """Returns a `HeldParams` for each shard, which rebuilds its parameters;
    None if each ticket carries the parameters."""
    if self.codec_down is None:
      return None
    return [HeldParams(self.codec_down, part) for part in self.parts()]

  def on_device(self, worker: int) -> contextlib.AbstractContextManager:
    """Makes this thread compute on a worker's device: of n, i mod n."""
    if not self.devices:
      return contextlib.nullcontext()
    return jax.default_device(self.devices[worker % len(self.devices)])

  def example(self, worker: int) -> base.Batch:
    """Returns a batch in the form of a worker's."""
    example = getattr(self.batch, "example", None)
    return example(worker) if example else self.batch(worker, 0)

  def kept_in(self, folder: Path, worker: int) -> "Duty":
    """Returns the duty of one worker; see `stacking.NamedBatches.kept_in`."""
    kept_in = getattr(self.batch, "kept_in", None)
    return self._replace(batch=kept_in(folder, worker)) if kept_in else self

  def warm_up(self, worker: int, batch: base.Batch | None = None) -> None:
    """Compiles the work, for a batch like a worker's first by default, and
    drops its result."""
    batch = self.example(worker) if batch is None else batch
    self._try(worker, self._first(worker), batch)
    for held in self.hold() or ():
      held.warm_up()

  def _first(self, worker):
    """The state of a worker that was sent zeros, and its ticket."""
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.params)
    ticket = base.Ticket(np.int32(worker), np.int32(0), params, np.True_)
    with self.on_device(worker):
      return self.init(params), ticket

  def _try(self, worker, first, batch):
    """Does a job and drops its result."""
    with self.on_device(worker):
      out = self.work(*first, batch, self.root, np.int32(0))
    jax.block_until_ready(out)

  def warm_up_all(self, workers: int) -> None:
    """Compiles the work of each of N workers."""
    done = []
    for worker in range(workers):
      batch = self.example(worker)
      device = worker % max(len(self.devices), 1)
      program = device, [leaf.shape for leaf in jax.tree.leaves(batch)]
      if program not in done:
        done.append(program)
        self.warm_up(worker, batch)

  def measure(
    self, worker: int, jobs: int, wait: Callable[[float], None]
  ) -> float:
    """Returns the seconds that a job takes a worker: the median of so many
    jobs, or of more until they took a second. Their results are dropped.
    `warm_up` has compiled them; the other workers are measured at the same
    time."""
    times, first = [], self._first(worker)
    while len(times) < jobs or math.fsum(times) < _MEASURED:
      began = time.perf_counter()
      self._try(worker, first, self.batch(worker, len(times)))
      factor, clock = self.factor(worker), time.perf_counter
      pace.slow_down(factor, began, clock=clock, wait=wait)
      times.append(time.perf_counter() - began)
    return statistics.median(times)

  def factor(self, worker: int) -> float:
    """The factor on the time of a worker's jobs, 1 without a slowdown."""
    return pace.factor_of(self.slowdown, worker)
