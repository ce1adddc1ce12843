"""Asynchronous orders in which computations are stopped: a simulation only.

  worker 0   |--job 0--|--job 2--|--job 3--|
  worker 1   |--job 1------------|--job 4-- ...
                                 stopped: two messages were received meanwhile

A live worker cannot be interrupted inside a computation. There a late gradient
is computed to its end, and a gate drops it (`asgd.server.max_staleness`).
"""

import collections
import heapq
import math
from collections.abc import Sequence

from asgd import base, checks
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, from_events

# After more stops than this without a message, the budget counts as too small.
_MOST_STOPS = 100_000


def with_stops(
  durations: Durations, *, workers: int, messages: int,
  stop_after: int | None = None, budget: float | Sequence[float] | None = None
) -> base.Trace:
  """Returns an order in which stale or long jobs are stopped.

  Every worker starts its next job as soon as its job is received or stopped. A
  stopped job ends without a message, and no worker repeats it.

  Args:
    durations, workers, messages: shared options (`asgd.orders.makers`).
    stop_after: R: a job is stopped when R messages have been received since its
      ticket was sent. If each message is an update, no message has a staleness
      of R or more. None: no job is stopped for this reason.
    budget: a job that takes longer is stopped after this time, in the unit of
      the durations: a number, or one for each worker. None: no limit.

  Returns:
    A Trace. Its STOP rows are the jobs that were stopped.

  Raises:
    ValueError: for a value out of its range, and for a budget that no job
      meets.

  Source:
    Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: the first asynchronous SGD
    with optimal time complexity", ICML 2025, arXiv:2501.16168, with calculation
    stops. The budget: Maranjyan, Omar, Richtarik, "MindFlayer SGD: efficient
    parallel SGD in the presence of heterogeneous and random worker compute
    times", UAI 2025, arXiv:2410.04285.

  Example:
    Worker 1 takes ten times as long as worker 0.

    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 10])
    >>> trace = orders.with_stops(clock, workers=2, messages=3, stop_after=2)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,receive
    1.0,0,1,2,send
    2.0,0,1,2,receive
    2.0,1,0,1,stop
    2.0,0,2,3,send
    2.0,1,1,4,send
    3.0,0,2,3,receive
  """
  checks.integer("workers", workers)
  checks.integer("messages", messages)
  if stop_after is not None:
    checks.integer("stop_after", stop_after)
  jobs = _Jobs(durations, budgets_of(budget, workers), stop_after)
  while jobs.received < messages:
    jobs.advance()
  return from_events(jobs.rows)


def budgets_of(
  budget: float | Sequence[float] | None, workers: int
) -> list[float]:
  """Returns the budget of each of N workers, infinity for none.

  Raises:
    ValueError: for a budget that is not positive, or not N budgets.

  Example:
    >>> from asgd.orders import stops
    >>> stops.budgets_of(2.5, 3), stops.budgets_of(None, 2)
    ([2.5, 2.5, 2.5], [inf, inf])
  """
  if budget is None:
    return [math.inf] * workers
  budgets = budget if isinstance(budget, Sequence) else [budget] * workers
  if len(budgets) != workers:
    raise ValueError(
      f"budget must be a number, or one for each of the {workers} workers, not"
      f" {checks.shown(budget)}"
    )
  for value in budgets:
    checks.positive("budget", value)
  return list(budgets)


class _Jobs:
  """The jobs of an order with stops, event by event."""

  def __init__(
    self, durations: Durations, budgets: list[float], stop_after: int | None
  ):
    self.rows: list[Event] = []
    self.received = 0  # messages
    self._budgets, self._stop_after = budgets, stop_after
    self._streams = [durations.stream(i) for i in range(len(budgets))]
    self._now, self._next_job = 0.0, 0
    self._next_seq = [0] * len(budgets)
    self._idle_workers = list(range(len(budgets)))  # workers without a job
    self._open_rows: dict[int, Event] = {}  # worker -> SEND row of its job
    # (end, job, worker, whether the budget ends the job); some of these jobs
    # were stopped before their end
    self._ends: list[tuple[float, int, int, bool]] = []
    # (messages received before the row, SEND row), in the order of the rows
    self._start_rows = collections.deque[tuple[int, Event]]()
    self._stops = 0  # stops since the last message

  def advance(self) -> None:
    """Stops stale jobs, starts a job at each idle worker, and ends one job."""
    self._stop_stale()
    for worker in sorted(self._idle_workers):
      self._start(worker)
    self._idle_workers.clear()
    self._now, job, worker, over_budget = heapq.heappop(self._ends)
    if worker in self._open_rows and self._open_rows[worker].job == job:
      self._end(worker, base.STOP if over_budget else base.RECEIVE)

  def _start(self, worker: int) -> None:
    """Sends a worker a ticket for the next job."""
    seq, job = self._next_seq[worker], self._next_job
    row = Event(self._now, worker, seq, job, base.SEND)
    self.rows.append(row)
    self._open_rows[worker] = row
    self._next_seq[worker], self._next_job = seq + 1, job + 1
    if self._stop_after is not None:
      self._start_rows.append((self.received, row))
    duration, budget = next(self._streams[worker]), self._budgets[worker]
    end = self._now + min(duration, budget)
    heapq.heappush(self._ends, (end, job, worker, duration > budget))

  def _end(self, worker: int, action: int) -> None:
    """Ends the job of a worker by a RECEIVE or a STOP row."""
    row = self._open_rows.pop(worker)
    self.rows.append(row._replace(time=self._now, action=action))
    self._idle_workers.append(worker)
    self._stops += 1
    if action == base.RECEIVE:
      self.received, self._stops = self.received + 1, 0
    if self._stops > _MOST_STOPS:
      raise ValueError(
        f"{_MOST_STOPS:,} jobs in a row took longer than their budget,"
        f" {self._budgets[worker]:g} of worker {worker}: make it larger"
      )

  def _stop_stale(self) -> None:
    """Stops the jobs with a delay of `stop_after` or more."""
    if self._stop_after is None:
      return
    # A ticket is stale if at most this many messages were received before it.
    most_earlier = self.received - self._stop_after
    while self._start_rows and self._start_rows[0][0] <= most_earlier:
      _, row = self._start_rows.popleft()
      if self._open_rows.get(row.worker) is row:
        self._end(row.worker, base.STOP)
