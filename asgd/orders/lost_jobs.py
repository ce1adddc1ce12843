"""Jobs that lost their tickets: they start again, before new jobs."""

import heapq
from collections.abc import Iterator


class LostJobs:
  """Jobs that start again, the lowest number first.

  Args:
    owned: whether jobs belong to workers. If so, a lost job goes to the next
      incarnation of the same worker; if not, to any worker.

  Example:
    >>> from asgd.orders.lost_jobs import LostJobs
    >>> lost = LostJobs(owned=False)
    >>> lost.add(worker=0, job=7)
    >>> lost.add(worker=1, job=5)
    >>> lost.first(worker=2)
    5
    >>> lost.remove(worker=2, job=5)
    >>> lost.first(worker=2), len(lost)
    (7, 1)
  """

  def __init__(self, owned: bool) -> None:
    self._owned = owned
    # Worker -> heap of its lost jobs; the key is 0 if any worker may take a
    # job. No heap is empty.
    self._heaps: dict[int, list[int]] = {}

  def _key(self, worker: int) -> int:
    return worker if self._owned else 0

  def __len__(self) -> int:
    return sum(map(len, self._heaps.values()))

  def workers(self) -> Iterator[int]:
    """Returns the workers that have lost jobs, if jobs belong to workers."""
    return iter(self._heaps)

  def has_own(self, worker: int) -> bool:
    """Whether jobs belong to workers, and this worker has lost some."""
    return self._owned and worker in self._heaps

  def first(self, worker: int) -> int | None:
    """Returns the lost job that a worker starts next, or None."""
    heap = self._heaps.get(self._key(worker))
    return heap[0] if heap else None

  def add(self, worker: int, job: int) -> None:
    """Adds a job that a worker lost."""
    heapq.heappush(self._heaps.setdefault(self._key(worker), []), job)

  def remove(self, worker: int, job: int) -> None:
    """Removes a job that a worker starts, if the job was lost."""
    if self.first(worker) != job:
      return
    key = self._key(worker)
    heapq.heappop(self._heaps[key])
    if not self._heaps[key]:
      del self._heaps[key]
