"""Work by speed: larger batches, or longer jobs, for faster workers.

If all workers get the same work, faster workers wait for slower ones in rounds;
without rounds, slow workers send stale gradients. With work in proportion to
speed, all jobs take the same time. The global batch (the examples of one
message from every worker) keeps its size. Longer jobs for faster workers are
DyLU (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling").

Index letters used in shape comments:
  N  workers
  H  steps of a job, each on one batch
  B  examples of a batch
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from asgd import checks
from asgd.stacking import Batches, stack
from asgd.worker import Uneven


class Allocation(NamedTuple):
  """The batch size and the number of steps of each worker's job."""

  batch_sizes: tuple[int, ...]  # int[N], examples of a batch
  steps: tuple[int, ...]  # int[N], batches of a job

  @property
  def by_steps(self) -> bool:
    """Whether workers differ in the number of batches of a job."""
    return len(set(self.steps)) > 1


def in_proportion(
  speeds: Sequence[float], total: int, *, unit: int = 1, most: int | None = None
) -> tuple[int, ...]:
  """Divides `total` into one part per worker, in proportion to their speeds.

  Proportional parts are rounded down to units. Each unit that is left goes to
  the worker that would then finish first. So the part that takes longest is as
  short as whole units allow.

  Args:
    speeds: the speeds of N workers, positive; only their ratios count.
    total: the amount to divide, at least one unit for each worker.
    unit: all parts, and `total`, are multiples of it.
    most: the largest allowed part; None is `total`.

  Raises:
    ValueError: if the speeds are not positive, or no such parts exist.

  Example:
    >>> in_proportion([1.0, 3.0], 64), in_proportion([1.0, 3.0], 64, most=40)
    ((16, 48), (24, 40))
  """
  checks.integer("total", total)
  checks.integer("unit", unit)
  for speed in speeds:
    checks.positive("speed", speed)
  checks.multiple(total, "total", unit, "units of {}")
  units, workers = total // unit, len(speeds)
  max_units = units if most is None else min(most // unit, units)
  if not workers <= units <= max_units * workers:
    raise ValueError(
      f"{total} cannot be divided among {workers} workers with {unit} to"
      f" {max_units * unit} each"
    )
  # Divide by the fastest first: the sum of the speeds could overflow.
  fastest = max(speeds)
  parts = [speed / fastest for speed in speeds]
  scale = units / math.fsum(parts)
  # [1] Round proportional parts down, but to at least one unit.
  parts = [min(max(int(part * scale), 1), max_units) for part in parts]
  # Raising parts to one unit may exceed the total: take units back, each from
  # the worker that takes longest.
  while sum(parts) > units:
    durations = [
      (parts[i] / speeds[i], i) for i in range(workers) if parts[i] > 1
    ]
    parts[max(durations)[1]] -= 1
  # [2] Give the remaining units, each to the worker that would finish first.
  heap = [((parts[i] + 1) / speeds[i], i) for i in range(workers)]
  heapq.heapify(heap)
  for _ in range(units - sum(parts)):
    while parts[heap[0][1]] == max_units:
      heapq.heappop(heap)
    _, i = heap[0]
    parts[i] += 1
    heapq.heapreplace(heap, ((parts[i] + 1) / speeds[i], i))
  return tuple(part * unit for part in parts)


def job_batches(
  batches: Batches, allocation: Allocation, *, stacked: bool
) -> Batches:
  """Returns the jobs of an allocation, cut from batches of the largest size.

  A worker's batch is the first examples of a large batch. Its job is the first
  batches of a job with the largest number of steps. So (worker, job)
  decides which examples are drawn, whatever the allocation, and no example is
  in two jobs of an epoch.

  Args:
    batches: (worker, job) -> NumPy arrays [max(batch_sizes), ...].
    allocation: the batch size and the steps of each worker.
    stacked: whether jobs have several batches, [H, B, ...], wrapped in
      `asgd.worker.Uneven`; False requires one step for each worker.

  Raises ValueError, when called, for an array with another leading axis.
  """
  max_size, max_steps = max(allocation.batch_sizes), max(allocation.steps)

  def cut_batch(worker, job):
    size = allocation.batch_sizes[worker]

    def cut_leaf(leaf):
      if leaf.shape[:1] != (max_size,):
        raise ValueError(
          f"a batch has an array of shape {leaf.shape}, whose first axis is not"
          f" its {max_size} examples: it cannot be cut to a smaller batch"
        )
      return leaf[:size]

    return jax.tree.map(cut_leaf, batches(worker, job))

  def batch(worker, job):
    if not stacked:
      return cut_batch(worker, job)
    first, steps = job * max_steps, allocation.steps[worker]
    return Uneven(stack([cut_batch(worker, first + h) for h in range(steps)]))

  return batch
