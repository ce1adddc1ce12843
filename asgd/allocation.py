"""Work by speed: larger batches, or longer jobs, for faster workers.

Workers of different speed that get the same work wait for each other in rounds,
and without rounds the slow ones hand in stale gradients. With work in
proportion to speed all take as long, while the global batch, the examples of a
message from every worker, stays what it was. The steps of a job are those of
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
  """What a job of each worker is."""

  batch_sizes: tuple[int, ...]  # int[N], examples of a batch
  steps: tuple[int, ...]  # int[N], batches of a job

  @property
  def by_steps(self) -> bool:
    """Whether workers differ in the batches of a job."""
    return len(set(self.steps)) > 1


def in_proportion(
  speeds: Sequence[float], total: int, *, unit: int = 1, most: int | None = None
) -> tuple[int, ...]:
  """Divides `total` into parts, one for each speed, that take as long.

  What is left of the proportional parts, rounded down, goes unit by unit to
  whom it would keep busy for the shortest time. So the slowest part is as fast
  as whole units allow.

  Args:
    speeds: of N workers, positive; only their ratios count.
    total: what is divided, at least a unit for each.
    unit: each part is a multiple of it, as is `total`.
    most: of one part; None is `total`.

  Raises:
    ValueError: if the speeds are not positive, or `total` cannot be divided so.

  Example:
    >>> in_proportion([1.0, 3.0], 64), in_proportion([1.0, 3.0], 64, most=40)
    ((16, 48), (24, 40))
  """
  checks.whole("total", total)
  checks.whole("unit", unit)
  for speed in speeds:
    checks.positive("speed", speed)
  checks.multiple(total, "total", unit, "units of {}")
  units, workers = total // unit, len(speeds)
  limit = units if most is None else min(most // unit, units)
  if not workers <= units <= limit * workers:
    raise ValueError(
      f"{total} cannot be divided among {workers} workers, each with {unit} to"
      f" {limit * unit}"
    )
  fastest = max(speeds)  # or the sum might be infinite
  parts = [speed / fastest for speed in speeds]
  scale = units / math.fsum(parts)
  parts = [min(max(int(part * scale), 1), limit) for part in parts]
  while sum(parts) > units:  # of whom a unit is more than was due
    busy = [(parts[i] / speeds[i], i) for i in range(workers) if parts[i] > 1]
    parts[max(busy)[1]] -= 1
  heap = [((parts[i] + 1) / speeds[i], i) for i in range(workers)]
  heapq.heapify(heap)
  for _ in range(units - sum(parts)):
    while parts[heap[0][1]] == limit:
      heapq.heappop(heap)
    _, i = heap[0]
    parts[i] += 1
    heapq.heapreplace(heap, ((parts[i] + 1) / speeds[i], i))
  return tuple(part * unit for part in parts)


def job_batches(
  batches: Batches, given: Allocation, *, stacked: bool
) -> Batches:
  """Makes the jobs of an allocation out of jobs that are one batch, of the
  largest size in it.

  A worker's batch is the first examples of that, and its job the first batches
  of as many as the longest has: (worker, job) says what is drawn, whatever the
  allocation, and no example is in two jobs of an epoch.

  Args:
    batches: (worker, job) -> NumPy arrays [max(batch_sizes), ...].
    given: what the job of each worker is.
    stacked: whether jobs are of several batches, [H, B, ...], wrapped in
      `asgd.worker.Uneven`; False asks for one step each.

  Raises ValueError, when called, for arrays of another leading axis.
  """
  largest, longest = max(given.batch_sizes), max(given.steps)

  def part(worker, job):
    size = given.batch_sizes[worker]

    def first(leaf):
      if leaf.shape[:1] != (largest,):
        raise ValueError(
          f"a batch holds an array of shape {leaf.shape}, whose first axis is"
          f" not that of its {largest} examples: it cannot be made smaller"
        )
      return leaf[:size]

    return jax.tree.map(first, batches(worker, job))

  def batch(worker, job):
    if not stacked:
      return part(worker, job)
    parts = [
      part(worker, job * longest + h) for h in range(given.steps[worker])
    ]
    return Uneven(stack(parts))

  return batch
