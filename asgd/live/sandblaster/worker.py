"""A worker of Sandblaster in a host: the driver calls it for each job.

The worker fetches the parameters from the shards if its last job belonged to
another evaluation. It computes the sum of the gradients of the job's portions,
pushes to each shard that shard's rows of the sum, and returns the loss.
"""

import collections
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding
from asgd.live import pace
from asgd.live.faults import Fault, Script
from asgd.live.hosts import Host, Inside
from asgd.live.spans import Span
from asgd.sandblaster import Settings, Work, make_sums, message_norm

_MAX_RETRIES = 3  # if the loss of a job is finite and its gradient is not
Batch = Callable[[int, int], Any]  # (0, portion) -> batch


class PortionTask(NamedTuple):
  """The computation that all workers of a run do."""

  settings: Settings
  params: base.Params  # the first iterate, as NumPy arrays
  batch: Batch
  work: Callable[[Batch], Work]  # (function that returns batches) -> work
  cache_size: int  # number of batches that a worker caches
  slowdown: tuple[float, ...] = ()  # factors on the time of workers 0, 1, ...


class PortionResult(NamedTuple):
  """The result of a job."""

  loss: float  # sum over its portions
  norm: float  # root mean square of the mean gradient
  is_late: bool = False  # the evaluation has ended: nothing was computed


class PortionLoader:
  """A cache that makes batches ahead of their use."""

  def __init__(self, batch: Batch, capacity: int, pool: Executor):
    """Stores at most `capacity` batches, which are made in `pool`."""
    self._batch, self._capacity, self._pool = batch, capacity, pool
    # Portion -> its batch, the least recently used first.
    self._batches: collections.OrderedDict[int, Future[Any]] = (
      collections.OrderedDict()
    )

  def load(self, portion: int) -> Future[Any]:
    """Returns the Future of a batch, which is made unless it is cached."""
    if portion in self._batches:
      self._batches.move_to_end(portion)
      return self._batches[portion]
    future = self._pool.submit(self._batch, 0, portion)
    self._batches[portion] = future
    while len(self._batches) > self._capacity:
      self._batches.popitem(last=False)
    return future

  def __call__(self, worker: int, portion: int) -> Any:
    """Returns a batch, or raises the error of the function that makes it."""
    del worker
    try:
      return self.load(portion).result()
    except BaseException:
      self._batches.pop(portion, None)  # a retry makes it again
      raise

  def close(self) -> None:
    """Shuts the pool down."""
    self._pool.shutdown(wait=False, cancel_futures=True)


class LiveWorker:
  """One incarnation of a worker."""

  def __init__(
    self,
    inside: Inside,
    index: int,
    make_task: Callable[[], PortionTask],
    *,
    faults: Sequence[Fault] = (),
    record: Callable[[Fault], None] = lambda fault: None,
    span: Callable[[Span], None] | None = None,
  ):
    """Prepares and compiles the computation.

    Args:
      inside: the functions of the host.
      index: the index of the worker.
      make_task: returns the computation.
      faults: the faults to inject.
      record: called with each fault before it happens.
      span: called with the worker's spans of time.
    """
    self._inside, self._index = inside, index
    self._task = task = make_task()
    self._span = span or (lambda span: None)
    self._faults = Script(
      faults, kill=inside.kill, wait=inside.wait, record=record
    )
    self._plan = sharding.make_plan(task.params, task.settings.shards)
    pool = inside.make_pool()
    self._loader = PortionLoader(task.batch, task.cache_size, pool)
    self._sum_portions = make_sums(task.work(self._loader))
    self._params_evaluation = -1  # the evaluation of `_params`
    self._params = jax.tree.map(jnp.asarray, task.params)
    # ((evaluation, job), message, result) until all shards have the message.
    self._unpushed: tuple[tuple[int, int], Any, PortionResult] | None = None
    self._span_end = inside.clock()  # time at which the last span ended
    # Compiles the gradient and, as there are two portions, their sum.
    self._sum_portions(self._params, (0, 0))

  def work(
    self,
    evaluation: int,
    job: int,
    seq: int,
    shards: Sequence[Host],
    next_job: int | None,
  ) -> PortionResult:
    """Does a job.

    Args:
      evaluation: the evaluation of the job.
      job: its index in the evaluation.
      seq: count of earlier jobs of this worker index.
      shards: the host of each shard.
      next_job: a job that the driver may assign next; the worker loads its
        data. None: no job is left.

    Raises:
      HostExited: if a shard has exited. When called again for the job, the
        worker only pushes the message that it has computed.
    """
    shards = list(map(self._inside.wrap_host, shards))
    # [1] Compute, unless the message of this job is computed and only its push
    # has failed.
    if self._unpushed is None or self._unpushed[0] != (evaluation, job):
      outcome = self._compute(evaluation, job, seq, shards, next_job)
      if outcome is None:
        return PortionResult(float("nan"), float("nan"), is_late=True)
      self._unpushed = (evaluation, job), *outcome
    # [2] Push to all shards. A shard that has the message ignores the push.
    _, message, result = self._unpushed
    start = self._inside.clock()
    parts = sharding.split(self._plan, message)
    calls = [
      shard.call("push", evaluation, job, rows)
      for shard, rows in zip(shards, parts, strict=True)
    ]
    for call in calls:
      call.result()
    self._unpushed, self._span_end = None, self._inside.clock()
    self._report_span("push", start, self._span_end, seq, evaluation, job)
    return result

  def _compute(
    self,
    evaluation: int,
    job: int,
    seq: int,
    shards: Sequence[Host],
    next_job: int | None,
  ) -> tuple[base.Params, PortionResult] | None:
    """Returns (message, result); None if the evaluation has ended."""
    clock, settings = self._inside.clock, self._task.settings
    self._faults.apply_to_job(self._index, seq)
    # [1] Fetch the parameters, once for each evaluation.
    if evaluation != self._params_evaluation:
      calls = [shard.call("fetch", evaluation) for shard in shards]
      parts = [call.result() for call in calls]
      if any(part is None for part in parts):
        return None
      params = sharding.join(self._plan, parts)
      self._params = jax.tree.map(jnp.asarray, params)
      self._params_evaluation = evaluation
    # [2] Load the data. The pool loads the data of the next job while this job
    # is computed.
    portions = settings.portions_of(job)
    for portion in portions:
      self._loader.load(portion)
    if settings.prefetch and next_job is not None:
      for portion in settings.portions_of(next_job):
        self._loader.load(portion)
    # [3] Compute the sum of the portions' gradients.
    start = clock()
    self._report_span("fetch", self._span_end, start, seq, evaluation, job)
    loss, message = self._sum_portions(self._params, portions)
    message = self._faults.apply_to_message(self._index, seq, message)
    retries = 0
    while not _is_finite(message):
      # If the loss is finite, the message was probably damaged, and a retry
      # helps. If the loss is not finite either, one retry confirms this.
      if retries == (_MAX_RETRIES if math.isfinite(loss) else 1):
        break
      loss, message = self._sum_portions(self._params, portions)
      retries += 1
    factor = pace.factor_of(self._task.slowdown, self._index)
    pace.slow_down(factor, start, clock=clock, wait=self._inside.wait)
    self._report_span("compute", start, clock(), seq, evaluation, job)
    return message, PortionResult(loss, message_norm(message, len(portions)))

  def _report_span(
    self,
    name: str,
    start: float,
    end: float,
    seq: int,
    evaluation: int,
    job: int,
  ) -> None:
    """Reports a span of the worker's time, with the number of the job in the
    run."""
    number = evaluation * self._task.settings.jobs + job
    self._span(Span(name, start, end, seq, number))

  def close(self) -> None:
    """Shuts the loader down."""
    self._loader.close()


def _is_finite(tree: Any) -> bool:
  return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
