"""Stacks the H batches of a job on a leading axis, for workers that do H local
steps per job."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import base, checks

Batches = Callable[[int, int], base.Batch]  # (worker, job) -> NumPy arrays


def stack(batches: Sequence[Any]) -> Any:
  """Stacks trees of NumPy arrays on a new leading axis.

  Args:
    batches: H trees of the same structure and shapes, at least one.

  Example:
    >>> import numpy as np
    >>> from asgd import stacking
    >>> stacking.stack([{"x": np.zeros(3)}, {"x": np.ones(3)}])["x"].shape
    (2, 3)
  """
  return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def job_batches(batches: Batches, steps: int) -> Batches:
  """Makes jobs of several batches from jobs of one batch.

  Args:
    batches: (worker, job) -> NumPy arrays [B, ...], as from `Problem.batches`.
    steps: H, 1 or more.

  Returns:
    (worker, job) -> NumPy arrays [H, B, ...]. Job j of the result holds the H
    batches batches(worker, j H), ..., batches(worker, j H + H - 1). With one
    step the function returns `batches` itself.

  Raises:
    ValueError: for steps that are no positive integer.

  Example:
    >>> import numpy as np
    >>> from asgd import stacking
    >>> batches = stacking.job_batches(lambda worker, job: np.array([job]), 2)
    >>> batches(0, 3).tolist()
    [[6], [7]]
  """
  checks.integer("steps", steps)
  if steps == 1:
    return batches
  # Batches of `data.iterators` are read in order, so they stack themselves.
  if hasattr(batches, "of_steps"):
    stacked: Batches = batches.of_steps(steps)
    return stacked

  def batch(worker: int, job: int) -> base.Batch:
    return stack([batches(worker, job * steps + h) for h in range(steps)])

  return batch


def of_jobs(
  batches: Batches, workers: Sequence[int], jobs: Sequence[int]
) -> base.Batch:
  """Returns the batches of several jobs, stacked.

  Args:
    batches: (worker, job) -> NumPy arrays [B, ...]. If `batches` has a method
      `of_jobs(workers, jobs)`, the method is called once for all jobs.
    workers: int[C], the worker of each of the C jobs.
    jobs: int[C], the number of each job.

  Returns:
    NumPy arrays [C, B, ...].

  Example:
    >>> import numpy as np
    >>> from asgd import stacking
    >>> batches = lambda worker, job: np.array([worker, job])
    >>> stacking.of_jobs(batches, [0, 1], [5, 6]).tolist()
    [[0, 5], [1, 6]]
  """
  # A method `of_jobs` indexes an array once for all jobs, which is faster than
  # stacking C batches.
  of_all_jobs = getattr(batches, "of_jobs", None)
  if of_all_jobs is not None:
    return of_all_jobs(workers, jobs)
  return _stack_jobs(batches, workers, jobs)


def _stack_jobs(
  batches: Batches, workers: Sequence[int], jobs: Sequence[int]
) -> base.Batch:
  """Calls `batches` for each job, and stacks the results. Raises ValueError for
  batches of several shapes; it names the first job with other shapes."""
  values = [batches(*pair) for pair in zip(workers, jobs, strict=True)]
  try:
    return stack(values)
  except ValueError:
    shapes = [jax.tree.map(np.shape, value) for value in values]
    for i in range(1, len(values)):
      if shapes[i] != shapes[i - 1]:
        raise ValueError(
          f"the batch of worker {workers[i]}, job {jobs[i]} has the shapes"
          f" {checks.shown(shapes[i])}, and a batch before it"
          f" {checks.shown(shapes[i - 1])}: one program simulates batches of"
          " one shape; pad them, or set --config.simulator.engine=host"
        ) from None
    raise


@dataclasses.dataclass(frozen=True)
class NamedBatches:
  """Batches of jobs, with errors that name the job.

  An error in making one batch names the worker and the job. An error of the
  method `batches.of_jobs` names the first and the last of the jobs. A
  ValueError passes unchanged.
  """

  batches: Batches

  @property
  def iterators(self) -> Any:
    """`batches`, if they are from iterators (`data.iterators`); else None."""
    return self.batches if hasattr(self.batches, "example") else None

  def example(self, worker: int) -> base.Batch:
    """Returns a batch with the shapes and dtypes of a worker's batches; the
    values may be zeros."""
    of_iterators = self.iterators
    return of_iterators.example(worker) if of_iterators else self(worker, 0)

  def kept_in(self, folder: Path, worker: int) -> "NamedBatches":
    """Returns the batches of one live worker. Iterators save their position in
    `folder`. Other batches have no position, so the method returns `self`."""
    of_iterators = self.iterators
    if of_iterators is None:
      return self
    return NamedBatches(of_iterators.kept_in(folder, worker))

  def __call__(self, worker: int, job: int) -> base.Batch:
    """Returns the batch of a job."""
    with checks.blame_batch(f"worker {worker}, job {job}"):
      return self.batches(worker, job)

  def of_jobs(self, workers: Sequence[int], jobs: Sequence[int]) -> base.Batch:
    """Returns the batches of several jobs, stacked; see `stacking.of_jobs`."""
    if not hasattr(self.batches, "of_jobs"):
      return _stack_jobs(self, workers, jobs)
    with checks.blame_batch(f"jobs {jobs[0]} to {jobs[-1]}"):
      return of_jobs(self.batches, workers, jobs)
