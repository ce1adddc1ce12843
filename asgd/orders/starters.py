"""The workers that may start a job, kept up to date as each of them changes.

A dispatcher notes each change of a worker, and asks for the workers that may
start. No event loops over all workers: each worker is in one or two heaps, and
an outdated heap entry is dropped when it reaches the top.
"""

import bisect
import heapq


class Clocks:
  """Clocks of workers, and the least of them.

  Example:
    >>> from asgd.orders.starters import Clocks
    >>> clocks = Clocks()
    >>> clocks.put(0, 3), clocks.put(1, 5), clocks.put(0, 7)
    (None, None, None)
    >>> clocks.least()
    5
  """

  def __init__(self) -> None:
    self._clock: dict[int, int] = {}  # by worker
    self._workers: dict[int, int] = {}  # clock -> workers that have it
    self._heap: list[int] = []  # clocks; some are outdated

  def __contains__(self, worker: int) -> bool:
    return worker in self._clock

  def put(self, worker: int, clock: int | None) -> None:
    """Sets the clock of a worker; None takes the worker out."""
    old_clock = self._clock.get(worker)
    if old_clock == clock:
      return
    if old_clock is not None:
      self._workers[old_clock] -= 1
      if not self._workers[old_clock]:
        del self._workers[old_clock]
    if clock is None:
      del self._clock[worker]
      return
    self._clock[worker] = clock
    # A clock that returns may be in the heap twice; `least` skips it.
    if clock not in self._workers:
      self._workers[clock] = 0
      heapq.heappush(self._heap, clock)
    self._workers[clock] += 1

  def least(self) -> int:
    """Returns the least clock, 0 without workers."""
    while self._heap and self._heap[0] not in self._workers:
      heapq.heappop(self._heap)
    return self._heap[0] if self._heap else 0


class Starters:
  """Present workers, their clocks, and which of them are free for a job.

  Attributes:
    workers: indices of the present workers, sorted.
    most: the largest clock that a worker has had.

  Example:
    Worker 2 is free at clock 1, worker 0 at clock 4.

    >>> from asgd.orders.starters import Starters
    >>> starters = Starters()
    >>> starters.note(2, 1, has_job=False, ahead=1)
    >>> starters.note(0, 4, has_job=False, ahead=4)
    >>> starters.slowest(everyone=True), starters.take(3), starters.take(9)
    (1, [2], [0])
  """

  def __init__(self) -> None:
    self.workers: list[int] = []
    self.most = 0
    self._clocks, self._with_job = Clocks(), Clocks()
    self._free: dict[int, int] = {}  # free worker -> clock at its next start
    # A free worker is in `_waiting`, under its clock, until a limit reaches
    # that clock; then it moves to the heap `_allowed`.
    self._waiting: dict[int, list[int]] = {}
    self._heap: list[int] = []  # clocks of `_waiting`
    self._limit = -1.0  # the latest limit on clocks
    self._allowed: list[int] = []  # workers; some are outdated

  def note(
    self, worker: int, clock: int, *, has_job: bool, ahead: int | None
  ) -> None:
    """Notes the state of a present worker.

    Args:
      clock: jobs that it has finished.
      has_job: whether it has a ticket or a job that only it can do.
      ahead: the clock at which it would start a job, None if it is not free.
    """
    if worker not in self._clocks:
      bisect.insort(self.workers, worker)
    self.most = max(self.most, clock)
    self._clocks.put(worker, clock)
    self._with_job.put(worker, clock if has_job else None)
    if ahead is None:
      self._free.pop(worker, None)
    elif self._free.get(worker) != ahead:  # else it is filed already
      self._put(worker, ahead)

  def remove(self, worker: int) -> None:
    """Notes that a worker is not present."""
    if worker in self._clocks:
      del self.workers[bisect.bisect_left(self.workers, worker)]
    self._clocks.put(worker, None)
    self._with_job.put(worker, None)
    self._free.pop(worker, None)

  def slowest(self, *, everyone: bool) -> int:
    """Returns the least clock of all workers, or of those with a job; 0 if no
    worker qualifies."""
    return (self._clocks if everyone else self._with_job).least()

  def allows(self, worker: int, limit: float) -> bool:
    """Whether a worker is free and would start at a clock of at most `limit`.
    """
    clock = self._free.get(worker)
    return clock is not None and clock <= limit

  def first(self) -> int | None:
    """Returns the free worker of the least index."""
    self._admit(float("inf"))
    while self._allowed and self._allowed[0] not in self._free:
      heapq.heappop(self._allowed)
    return self._allowed[0] if self._allowed else None

  def take(self, limit: float, most: float = float("inf")) -> list[int]:
    """Returns at most `most` free workers that would start at a clock of at
    most `limit`, sorted by index. They are not free until `note` says so."""
    self._admit(limit)
    starters: list[int] = []
    while self._allowed and len(starters) < most:
      worker = heapq.heappop(self._allowed)
      clock = self._free.pop(worker, None)
      if clock is None:  # an outdated entry: the worker has become busy
        continue
      if clock <= limit:
        starters.append(worker)
      else:
        self._put(worker, clock)  # the slowest clock has become less
    return starters

  def _put(self, worker: int, clock: int) -> None:
    """Files a free worker under the clock at which it would start."""
    self._free[worker] = clock
    if clock <= self._limit:
      heapq.heappush(self._allowed, worker)
    elif clock in self._waiting:
      self._waiting[clock].append(worker)
    else:
      self._waiting[clock] = [worker]
      heapq.heappush(self._heap, clock)

  def _admit(self, limit: float) -> None:
    """Moves workers whose clocks the limit allows into `_allowed`."""
    self._limit = limit
    while self._heap and self._heap[0] <= limit:
      for worker in self._waiting.pop(heapq.heappop(self._heap)):
        heapq.heappush(self._allowed, worker)
