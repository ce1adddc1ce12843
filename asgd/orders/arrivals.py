"""Messages that have arrived and were not received: which may be received next.

A message waits for its worker's earlier ones, and in rounds for the others of
its round. Each arrival and each closed ticket updates the set of messages that
may be received, so the dispatcher does not search all waiting messages.
"""

import collections
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from asgd import base
from asgd.orders.backups import Copies, Key
from asgd.orders.trace import Event, Ledger


class StartedJob(NamedTuple):
  """A job that was started and has not ended."""

  job: int
  round: int  # in which it was started
  time: float  # when


class Arrivals:
  """Messages of a protocol without rounds, in the order of their arrival.

  Attributes:
    round: index of the round of the jobs that start now.
    granted: jobs that were started in it and were not lost.
    tickets: number of open tickets.
  """

  def __init__(self, ledger: Ledger[StartedJob]):
    self._ledger = ledger
    self._number: dict[Key, int] = {}  # message -> how many arrived before it
    self._count = itertools.count()
    # Messages on the earliest ticket of their worker; some tickets are closed.
    self._first: list[Key] = []
    self.round = self.granted = self.tickets = 0

  def __contains__(self, key: Key) -> bool:
    return key in self._number

  def busy(self, worker: int) -> int:
    """Returns the number of tickets that count against the worker's depth."""
    return len(self._ledger.open[worker])

  def start(self, event: Event) -> None:
    """Notes that a ticket is opened."""
    del event
    self.tickets += 1

  def add(self, key: Key, seconds: float | None) -> None:
    """Notes that a message has arrived, `seconds` after its ticket."""
    del seconds
    self._number[key] = next(self._count)
    if key[1] == next(iter(self._ledger.open[key[0]])):
      self._first.append(key)

  def end(self, event: Event, ticket: StartedJob) -> bool:
    """Notes that a ticket was closed; returns whether its job is lost."""
    del ticket
    worker = event.worker
    self.tickets -= 1
    self._number.pop(event.key, None)
    if tickets := self._ledger.open[worker]:
      first = worker, next(iter(tickets))
      if first in self._number:
        self._first.append(first)
    return event.action != base.RECEIVE

  def superseded(self) -> list[Key]:
    """Returns messages that arrived after another message of their job."""
    return []

  def ready(self, more_to_come: Callable[[], bool]) -> list[Key]:
    """Returns the messages to be received now, in their order."""
    del more_to_come
    keys = {key for key in self._first if key in self._number}
    self._first.clear()
    return sorted(keys, key=self._number.__getitem__)

  def late_jobs(self, before: float) -> list[tuple[float, int, int]]:
    """Returns no job: only those of a round are late."""
    del before
    return []


class RoundArrivals(Arrivals):
  """Messages of rounds: those of a round are received together, by their jobs.

  Args:
    size: messages of a round.
    late: as of `Rules`.
  """

  def __init__(self, ledger: Ledger[StartedJob], size: int, late: float):
    super().__init__(ledger)
    self._size, self._late_factor = size, late
    self._copies = Copies()
    self._received = 0  # messages of this round
    self._began = 0.0  # a lower bound of the times of this round's jobs
    self._waiting = collections.Counter[int]()  # worker -> arrived messages
    # worker -> seq below which all its messages have arrived or ended. Only
    # messages below it can be received.
    self._front: dict[int, int] = {}
    self._on_time: dict[Key, None] = {}  # messages of this round below a front
    self._late: set[int] = set()  # workers that may have earlier rounds' ones

  def busy(self, worker: int) -> int:
    """Returns the number of jobs that a worker computes: open tickets without
    those whose messages have arrived."""
    return len(self._ledger.open[worker]) - self._waiting[worker]

  def start(self, event: Event) -> None:
    """Notes that a ticket is opened, perhaps the second of its job."""
    super().start(event)
    if not self.granted:
      self._began = event.time
    self.granted += self._copies.start(event.job, event.key)

  def add(self, key: Key, seconds: float | None) -> None:
    """Notes that a message has arrived, `seconds` after its ticket."""
    worker, seq = key
    self._number[key] = next(self._count)
    self._waiting[worker] += 1
    tickets = self._ledger.open[worker]
    self._copies.arrive(tickets[seq].job, key)
    if seconds is not None and self._late_factor < math.inf:
      self._copies.set_time(worker, seconds)
    front, end = self._front.get(worker, 0), self._ledger.next_seq[worker]
    while front < end and (front not in tickets or (worker, front) in self):
      if front in tickets and tickets[front].round == self.round:
        self._on_time[worker, front] = None
      elif front in tickets:
        self._late.add(worker)
      front += 1
    self._front[worker] = front

  def end(self, event: Event, ticket: StartedJob) -> bool:
    """Notes that a ticket was closed; returns whether its job is lost."""
    self.tickets -= 1
    counts, key = event.action == base.RECEIVE, event.key
    if self._number.pop(key, None) is not None:
      self._waiting[event.worker] -= 1
      self._on_time.pop(key, None)
    lost = self._copies.end(ticket.job, key, counts=counts)
    if ticket.round != self.round:
      return lost
    if counts:
      self._received += 1
      if self._received == self._size:
        self._next_round()
    elif lost and event.action != base.DROP:
      self.granted -= 1
    return lost

  def _next_round(self):
    self.round += 1
    self.granted = self._received = 0
    self._late.update(worker for worker, _ in self._on_time)
    self._on_time.clear()

  def superseded(self) -> list[Key]:
    """Returns messages that arrived after another message of their job."""
    return self._copies.superseded()

  def ready(self, more_to_come: Callable[[], bool]) -> list[Key]:
    """Returns late messages, which the server drops, then those of the round if
    it is complete. Both are sorted by the largest job that their worker had
    started up to the message."""
    late = [row for row in self._rows(self._late) if row[2] != self.round]
    chosen = sorted(late)
    self._late.clear()
    missing = self._size - self._received
    if self._on_time and (
      len(self._on_time) >= missing
      or not (more_to_come() or self._copies.awaited)
    ):
      rows = self._rows({worker for worker, _ in self._on_time})
      chosen += sorted(row for row in rows if row[2] == self.round)[:missing]
    return [key for _, key, _ in chosen]

  def _rows(self, workers):
    """Yields (largest job so far, message, round) for the messages of workers
    that can be received."""
    for worker in workers:
      most = 0
      for seq, ticket in self._ledger.open[worker].items():
        if (worker, seq) not in self:
          break
        most = max(most, ticket.job)
        yield most, (worker, seq), ticket.round

  def late_jobs(self, before: float) -> list[tuple[float, int, int]]:
    """Returns (time at which it is late, worker, job) of this round's jobs that
    have one open ticket; an empty list if none is late at `before`."""
    factor = self._late_factor
    if self._began + factor * self._copies.least_usual() > before:
      return []
    out = []
    for worker, seq in self._copies.single.values():
      ticket, usual = self._ledger.open[worker][seq], self._copies.usual(worker)
      if ticket.round == self.round and usual is not None:
        out.append((ticket.time + factor * usual, worker, ticket.job))
    return out
