"""Jobs of an evaluation: which worker computes which portions; no clock.

A job is a few portions of the batch. An idle worker gets

  1. a job that it computed in the last evaluation, as it has the data;
  2. a job that no worker has computed before;
  3. the last job of the worker that has the most jobs left;
  4. a copy of a running job (a backup task), the oldest first.

Source: Dean et al., "Large scale distributed deep networks", NIPS 2012, section
4.2: portions much smaller than 1/N, backup tasks, data affinity.
"""

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, simulator
from asgd.sandblaster.shard import dot

# (parameters, portion) -> (float, gradient)
Work = Callable[[base.Params, int], tuple[Any, base.Params]]


class PortionJobs:
  """The jobs of an evaluation, and which worker computes which.

  Example:
    Worker 1 gets two of three jobs. Then it gets a copy of the job of worker 0,
    which is slow. The result of the copy counts; worker 0's comes too late.

    >>> from asgd.sandblaster.portions import PortionJobs
    >>> jobs = PortionJobs(3, backup=1)
    >>> jobs.begin()
    >>> jobs.take(0), jobs.take(1), jobs.finish(1, 1), jobs.take(1)
    (0, 1, True, 2)
    >>> jobs.finish(1, 2), jobs.take(1), jobs.finish(1, 0), jobs.finish(0, 0)
    (True, 0, True, False)
  """

  def __init__(
    self, count: int, backup: int = 1, owners: dict[int, int] | None = None
  ):
    """Starts without an evaluation.

    Args:
      count: jobs of an evaluation.
      backup: copies of a job that may run beside the original.
      owners: job -> the worker that finished it last.
    """
    self._count, self._backup = count, backup
    self.owners: dict[int, int] = dict(owners or {})
    # Owner -> its jobs that were not started; None: jobs without an owner.
    self._waiting_jobs: dict[int | None, collections.deque[int]] = {}
    # Job -> its workers, for jobs that were started; oldest first.
    self._workers_of_job: dict[int, list[int]] = {}
    self._finished_jobs: set[int] = set()

  def begin(self, first: int = 0, finished: Iterable[int] = ()) -> None:
    """Starts the next evaluation with the jobs from `first` on, without the
    jobs in `finished`."""
    self._waiting_jobs = collections.defaultdict(collections.deque)
    self._workers_of_job.clear()
    self._finished_jobs = {*range(first), *finished}
    for job in range(first, self._count):
      if job not in self._finished_jobs:
        self._waiting_jobs[self.owners.get(job)].append(job)

  def _find_queue(self, worker: int) -> tuple[int | None, bool] | None:
    """Returns (owner, takes last) of the queue with the next job for a worker:
    the queue's owner, and whether the worker takes the queue's last job. None
    if no job waits."""
    waiting_jobs = self._waiting_jobs
    for owner in (worker, None):
      if owner in waiting_jobs:
        return owner, False
    if not waiting_jobs:
      return None
    sizes = {owner: len(jobs) for owner, jobs in waiting_jobs.items()}
    longest = max(sizes, key=lambda owner: (sizes[owner], owner))
    return longest, True

  def peek(self, worker: int) -> int | None:
    """Returns the job that the worker would get next, without backup tasks."""
    queue_choice = self._find_queue(worker)
    if queue_choice is None:
      return None
    owner, takes_last = queue_choice
    return self._waiting_jobs[owner][-1 if takes_last else 0]

  def take(self, worker: int) -> int | None:
    """Assigns a job to an idle worker; returns None if there is none."""
    queue_choice = self._find_queue(worker)
    if queue_choice is not None:
      owner, takes_last = queue_choice
      queue = self._waiting_jobs[owner]
      job = queue.pop() if takes_last else queue.popleft()
      if not queue:
        del self._waiting_jobs[owner]
      self._workers_of_job[job] = [worker]
      return job
    for job, workers in self._workers_of_job.items():
      if worker not in workers and len(workers) <= self._backup:
        workers.append(worker)
        return job
    return None

  def workers(self, job: int) -> tuple[int, ...]:
    """Returns the workers of a running job, in the order of their starts."""
    return tuple(self._workers_of_job.get(job, ()))

  def finish(self, worker: int, job: int) -> bool:
    """Ends a job; returns False if another worker's result came before."""
    if job in self._finished_jobs:
      return False
    del self._workers_of_job[job]
    self._finished_jobs.add(job)
    self.owners[job] = worker
    return True

  def lose(self, worker: int, job: int) -> None:
    """Removes a worker that exited from its job. The job waits again, unless
    another worker computes it."""
    workers = self._workers_of_job.get(job)
    if not workers:
      return
    workers.remove(worker)
    if not workers:
      del self._workers_of_job[job]
      self._waiting_jobs[None].appendleft(job)


@jax.jit
def _add(x, y):
  return jax.tree.map(jnp.add, x, y)


def make_sums(
  work: Work,
) -> Callable[[base.Params, Iterable[int]], tuple[float, base.Params]]:
  """Returns a function (parameters, portions) -> (sum of losses, sum of
  gradients), in the order of the portions. Gradients are summed on the device,
  and the sum is returned as NumPy arrays.

  Example:
    >>> import jax
    >>> import numpy as np
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> loss, gradient = make_sums(work)(np.float32([3.0, 4.0]), range(2))
    >>> loss, gradient.tolist()
    (75.0, [18.0, 24.0])
  """

  def sum_portions(params, portions):
    loss, gradient = 0.0, None
    for portion in portions:
      portion_loss, portion_gradient = work(params, portion)
      loss += float(portion_loss)
      gradient = (
        portion_gradient
        if gradient is None
        else _add(gradient, portion_gradient)
      )
    return loss, simulator.fetch(gradient)

  return sum_portions


def message_norm(message: base.Params, portions: int) -> float:
  """Returns the root mean square of a message's mean gradient; the message is a
  sum over `portions` portions."""
  size = sum(leaf.size for leaf in jax.tree.leaves(message))
  return math.sqrt(dot(message, message) / max(size, 1)) / portions
