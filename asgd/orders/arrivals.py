"""Messages that have arrived and that the server has not received yet, and the
choice of those that it receives next.

A message waits for the earlier messages of its worker, and in rounds for the
other messages of its round. Each arrival and each closed ticket updates the set
of messages that may be received, so the dispatcher does not search all waiting
messages.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from asgd import base
from asgd.orders.backups import Copies, Key
from asgd.orders.trace import Event, Ledger


class StartedJob(NamedTuple):
  """A job that was started and has not ended."""

  job: int
  round: int  # the round in which it was started
  time: float  # the time at which it was started


class Arrivals:
  """Messages of a protocol without rounds, in the order of their arrival.

  Attributes:
    round: index of the round of the jobs that start now.
    n_granted: number of jobs that were started in this round and not lost.
    tickets: number of open tickets.
  """

  def __init__(self, ledger: Ledger[StartedJob]):
    self._ledger = ledger
    # Message -> number of messages that arrived earlier.
    self._arrival_rank: dict[Key, int] = {}
    self._arrival_counter = itertools.count()
    # Messages that arrived on the earliest open ticket of their worker. Some of
    # these tickets may be closed by now.
    self._earliest: list[Key] = []
    self.round = self.n_granted = self.tickets = 0

  def __contains__(self, key: Key) -> bool:
    return key in self._arrival_rank

  def count_jobs(self, worker: int) -> int:
    """Returns the number of tickets that count against the worker's depth."""
    return len(self._ledger.open[worker])

  def add_ticket(self, event: Event) -> None:
    """Adds an opened ticket."""
    del event
    self.tickets += 1

  def add_message(self, key: Key, seconds: float | None) -> None:
    """Adds a message that has arrived, `seconds` after its ticket."""
    del seconds
    self._arrival_rank[key] = next(self._arrival_counter)
    # Only the message of a worker's earliest open ticket can be received next.
    if key[1] == next(iter(self._ledger.open[key[0]])):
      self._earliest.append(key)

  def close_ticket(self, event: Event, ticket: StartedJob) -> bool:
    """Removes a closed ticket. Returns whether its job is lost."""
    del ticket
    worker = event.worker
    self.tickets -= 1
    self._arrival_rank.pop(event.key, None)
    # The worker's next message may have arrived before this ticket was closed.
    if tickets := self._ledger.open[worker]:
      earliest_key = worker, next(iter(tickets))
      if earliest_key in self._arrival_rank:
        self._earliest.append(earliest_key)
    return event.action != base.RECEIVE

  def take_superseded(self) -> list[Key]:
    """Returns the messages that arrived since the last call, after another
    message of their job."""
    return []

  def take_ready(self, has_jobs_left: Callable[[], bool]) -> list[Key]:
    """Returns the messages to be received now, in their order.
    `has_jobs_left()` is whether a job has yet to start."""
    del has_jobs_left
    # A message has no rank any more if its ticket was closed.
    keys = {key for key in self._earliest if key in self._arrival_rank}
    self._earliest.clear()
    return sorted(keys, key=self._arrival_rank.__getitem__)

  def find_late_jobs(self, before: float) -> list[tuple[float, int, int]]:
    """Returns []: only jobs of rounds can be late."""
    del before
    return []


class RoundArrivals(Arrivals):
  """Messages of rounds: the messages of a round are received together;
  `take_ready` sorts them.

  Args:
    size: messages of a round.
    late: as in `Rules`.
  """

  def __init__(self, ledger: Ledger[StartedJob], size: int, late: float):
    super().__init__(ledger)
    self._round_size, self._late_factor = size, late
    self._copies = Copies()
    self._received = 0  # messages of this round
    self._round_start = 0.0  # a lower bound of the times of this round's jobs
    # worker -> number of arrived messages that were not received
    self._arrived_counts = collections.Counter[int]()
    # worker -> its front: the seq below which all messages of the worker have
    # arrived or ended. Only messages below the front can be received.
    self._front: dict[int, int] = {}
    self._on_time: dict[Key, None] = {}  # messages of this round below a front
    # Workers that may have arrived messages of an earlier round.
    self._late_workers: set[int] = set()

  def count_jobs(self, worker: int) -> int:
    """Returns the number of jobs that a worker computes: its open tickets minus
    its messages that have arrived."""
    return len(self._ledger.open[worker]) - self._arrived_counts[worker]

  def add_ticket(self, event: Event) -> None:
    """Adds an opened ticket, perhaps the second ticket of its job."""
    super().add_ticket(event)
    if not self.n_granted:
      self._round_start = event.time
    self.n_granted += self._copies.start(event.job, event.key)

  def add_message(self, key: Key, seconds: float | None) -> None:
    """Adds a message that has arrived, `seconds` after its ticket."""
    worker, seq = key
    self._arrival_rank[key] = next(self._arrival_counter)
    self._arrived_counts[worker] += 1
    tickets = self._ledger.open[worker]
    self._copies.arrive(tickets[seq].job, key)
    if seconds is not None and self._late_factor < math.inf:
      self._copies.set_time(worker, seconds)
    # Move the front past closed tickets and arrived messages. It stops at the
    # first message that the worker has yet to send.
    front, end = self._front.get(worker, 0), self._ledger.next_seq[worker]
    while front < end and (front not in tickets or (worker, front) in self):
      if front in tickets and tickets[front].round == self.round:
        self._on_time[worker, front] = None
      elif front in tickets:
        self._late_workers.add(worker)
      front += 1
    self._front[worker] = front

  def close_ticket(self, event: Event, ticket: StartedJob) -> bool:
    """Removes a closed ticket. Returns whether its job is lost."""
    self.tickets -= 1
    is_received, key = event.action == base.RECEIVE, event.key
    if self._arrival_rank.pop(key, None) is not None:
      self._arrived_counts[event.worker] -= 1
      self._on_time.pop(key, None)
    is_lost = self._copies.end(ticket.job, key, counts=is_received)
    if ticket.round != self.round:
      return is_lost
    if is_received:
      self._received += 1
      if self._received == self._round_size:
        self._next_round()
    elif is_lost and event.action != base.DROP:
      self.n_granted -= 1  # another worker will start the job again
    return is_lost

  def _next_round(self) -> None:
    """Starts the next round. Messages of the last round that still wait are
    late from now on."""
    self.round += 1
    self.n_granted = self._received = 0
    self._late_workers.update(worker for worker, _ in self._on_time)
    self._on_time.clear()

  def take_superseded(self) -> list[Key]:
    """Returns the messages that arrived since the last call, after another
    message of their job."""
    return self._copies.take_superseded()

  def take_ready(self, has_jobs_left: Callable[[], bool]) -> list[Key]:
    """Returns late messages, which the server drops. If the round will get no
    further message, the messages of the round follow.

    Both groups are sorted by the largest job that the message's worker had
    started up to the message.
    """
    late_rows = [
      row for row in self._rows(self._late_workers) if row[2] != self.round
    ]
    ready_rows = sorted(late_rows)
    self._late_workers.clear()
    # The round is received when it is complete, or when no further job of the
    # round can end: the last round of a run may have fewer messages.
    n_missing = self._round_size - self._received
    if self._on_time and (
      len(self._on_time) >= n_missing
      or not (has_jobs_left() or self._copies.awaited)
    ):
      rows = self._rows({worker for worker, _ in self._on_time})
      ready_rows += sorted(row for row in rows if row[2] == self.round)[
        :n_missing
      ]
    return [key for _, key, _ in ready_rows]

  def _rows(
    self, workers: set[int]
  ) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yields (largest job so far, message, round) for those messages of the
    workers that can be received."""
    for worker in workers:
      largest_job = 0
      for seq, ticket in self._ledger.open[worker].items():
        if (worker, seq) not in self:
          break
        largest_job = max(largest_job, ticket.job)
        yield largest_job, (worker, seq), ticket.round

  def find_late_jobs(self, before: float) -> list[tuple[float, int, int]]:
    """Returns (time from which the job is late, worker, job) for the jobs of
    this round that have one open ticket. It returns none while jobs of the
    round have yet to start. The list may be empty if no job is late at time
    `before`."""
    factor = self._late_factor
    if factor == math.inf or self.n_granted < self._round_size:
      return []
    # A quick exit: no job can be late before this bound.
    if self._round_start + factor * self._copies.least_median_time() > before:
      return []
    late_jobs = []
    for worker, seq in self._copies.single.values():
      ticket = self._ledger.open[worker][seq]
      median_time = self._copies.median_time(worker)
      if ticket.round == self.round and median_time is not None:
        late_time = ticket.time + factor * median_time
        late_jobs.append((late_time, worker, ticket.job))
    return late_jobs
