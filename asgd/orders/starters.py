"""The workers that may start a job, kept up to date as each of them changes.

A dispatcher reports each change of a worker, and asks for the workers that may
start. Neither needs a loop over all workers: workers and clocks are in heaps,
and an outdated heap entry is dropped when it reaches the top.
"""

import bisect
import heapq


class Clocks:
  """Clocks of workers, and the least of them. A clock counts the jobs that the
  worker has finished; a newcomer's clock begins at the least one.

  Example:
    >>> from asgd.orders.starters import Clocks
    >>> clocks = Clocks()
    >>> clocks.set_clock(0, 3), clocks.set_clock(1, 5), clocks.set_clock(0, 7)
    (None, None, None)
    >>> clocks.least()
    5
  """

  def __init__(self) -> None:
    self._clock: dict[int, int] = {}  # by worker
    self._count: dict[int, int] = {}  # clock -> number of workers that have it
    self._heap: list[int] = []  # clocks; some are outdated

  def __contains__(self, worker: int) -> bool:
    return worker in self._clock

  def set_clock(self, worker: int, clock: int | None) -> None:
    """Sets the clock of a worker; None removes the worker."""
    old_clock = self._clock.get(worker)
    if old_clock == clock:
      return
    if old_clock is not None:
      self._count[old_clock] -= 1
      if not self._count[old_clock]:
        del self._count[old_clock]
    if clock is None:
      del self._clock[worker]
      return
    self._clock[worker] = clock
    # The heap may still have this clock, outdated. Two equal entries are
    # harmless: `least` drops both once no worker has the clock.
    if clock not in self._count:
      self._count[clock] = 0
      heapq.heappush(self._heap, clock)
    self._count[clock] += 1

  def least(self) -> int:
    """Returns the least clock; 0 if there are no workers."""
    while self._heap and self._heap[0] not in self._count:
      heapq.heappop(self._heap)
    return self._heap[0] if self._heap else 0


class Starters:
  """Present workers, their clocks, and which of them are free for a job.

  Attributes:
    workers: indices of the present workers, sorted.
    largest_clock: the largest clock that a worker has had.

  Example:
    Worker 2 is free at clock 1, worker 0 at clock 4.

    >>> from asgd.orders.starters import Starters
    >>> starters = Starters()
    >>> starters.update(2, 1, has_job=False, start_clock=1)
    >>> starters.update(0, 4, has_job=False, start_clock=4)
    >>> starters.slowest(all_workers=True), starters.take(3), starters.take(9)
    (1, [2], [0])
  """

  def __init__(self) -> None:
    self.workers: list[int] = []
    self.largest_clock = 0
    self._clocks, self._with_job = Clocks(), Clocks()
    self._free: dict[int, int] = {}  # free worker -> clock at its next start
    # A free worker with a clock above the limit is in `_waiting`, under that
    # clock. When a limit allows the clock, it moves to the heap `_allowed`.
    self._waiting: dict[int, list[int]] = {}  # some workers are outdated
    self._heap: list[int] = []  # clocks of `_waiting`
    self._limit = -1.0  # the latest limit on clocks
    self._allowed: list[int] = []  # workers; some are outdated

  def update(
    self, worker: int, clock: int, *, has_job: bool, start_clock: int | None
  ) -> None:
    """Updates the state of a present worker.

    Args:
      worker: its index.
      clock: the clock of the worker, now.
      has_job: whether the worker holds a ticket, or must repeat a lost job.
      start_clock: the worker's clock once its open jobs have ended; None if the
        worker is not free for another job.
    """
    if worker not in self._clocks:
      bisect.insort(self.workers, worker)
    self.largest_clock = max(self.largest_clock, clock)
    self._clocks.set_clock(worker, clock)
    self._with_job.set_clock(worker, clock if has_job else None)
    if start_clock is None:
      self._free.pop(worker, None)
    elif self._free.get(worker) != start_clock:  # else it is filed already
      self._file(worker, start_clock)

  def remove(self, worker: int) -> None:
    """Removes a worker that is not present."""
    if worker in self._clocks:
      del self.workers[bisect.bisect_left(self.workers, worker)]
    self._clocks.set_clock(worker, None)
    self._with_job.set_clock(worker, None)
    self._free.pop(worker, None)

  def slowest(self, *, all_workers: bool) -> int:
    """Returns the least clock of all workers, or of the workers with a job; 0
    if there is no such worker."""
    return (self._clocks if all_workers else self._with_job).least()

  def allows(self, worker: int, limit: float) -> bool:
    """Whether a worker is free and would start at a clock of at most `limit`.
    """
    clock = self._free.get(worker)
    return clock is not None and clock <= limit

  def first_free(self) -> int | None:
    """Returns the free worker of the least index, whatever its clock; None if
    no worker is free."""
    self._admit(float("inf"))
    while self._allowed and self._allowed[0] not in self._free:
      heapq.heappop(self._allowed)
    return self._allowed[0] if self._allowed else None

  def take(self, limit: float, count: float = float("inf")) -> list[int]:
    """Returns at most `count` free workers that would start at a clock of at
    most `limit`, sorted by index. They count as busy until the next `update`.
    """
    self._admit(limit)
    starters: list[int] = []
    while self._allowed and len(starters) < count:
      worker = heapq.heappop(self._allowed)
      clock = self._free.pop(worker, None)
      if clock is None:  # an outdated entry: the worker has become busy
        continue
      if clock <= limit:
        starters.append(worker)
      else:
        self._file(worker, clock)  # an earlier, higher limit allowed it
    return starters

  def _file(self, worker: int, clock: int) -> None:
    """Files a free worker that would start at `clock`: in `_allowed`, or under
    this clock in `_waiting`."""
    self._free[worker] = clock
    if clock <= self._limit:
      heapq.heappush(self._allowed, worker)
    elif clock in self._waiting:
      self._waiting[clock].append(worker)
    else:
      self._waiting[clock] = [worker]
      heapq.heappush(self._heap, clock)

  def _admit(self, limit: float) -> None:
    """Moves workers with clocks that the limit allows into `_allowed`."""
    self._limit = limit
    while self._heap and self._heap[0] <= limit:
      for worker in self._waiting.pop(heapq.heappop(self._heap)):
        heapq.heappush(self._allowed, worker)
