"""The places of workers in a live run: who holds them, and what the trace says
of them."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asgd import base
from asgd.live.hosts import Call, Host, Make
from asgd.live.hosts.base import WORKER
from asgd.live.sandblaster.book import LiveRunLog, last_time
from asgd.live.supervisor import Party, Supervisor
from asgd.orders.trace import NO_SEQ, Event, follow
from asgd.sandblaster.batch_driver import Place, Places

_STARTS = 3  # of a worker that does not come up


class LiveJob(NamedTuple):
  """What a worker is at."""

  evaluation: int
  job: int
  seq: int
  fresh: bool  # the parameters are fetched for it
  began: float
  call: Call
  shards: Sequence[Host]  # as they were when it was called
  loss: float = math.nan  # what a copy of it came to


class LivePlace(Place):
  """The place of a worker in a host."""

  def __init__(self):
    super().__init__()
    self.party: Party | None = None  # None: no worker has this index
    self.joined = False  # the worker is made
    self.waited = 0.0  # seconds for that
    self.late = 0  # incarnations in a row that took too long

  @property
  def idle(self) -> bool:
    """See the base."""
    return self.joined and self.ticket is None

  @property
  def call(self) -> Call | None:
    """What is waited for."""
    if self.party is not None and not self.joined:
      return self.party.made
    return self.ticket and self.ticket.call

  def empty(self) -> None:
    """See the base."""
    super().empty()
    self.party, self.joined = None, False


class LivePlaces(Places):
  """All places of a run."""

  def __init__(
    self,
    count: int,
    jobs: int,
    supervisor: Supervisor,
    make: Callable[[int], Make],
    book: LiveRunLog,
  ):
    """`jobs` are those of an evaluation; `make` returns what makes a worker."""
    self._supervisor, self._make = supervisor, make

    def clock():
      return max(supervisor.hosts.clock(), last_time(book.rows))

    places = [LivePlace() for _ in range(count)]
    super().__init__(places, jobs, book, clock)

  @property
  def coming(self) -> list[int]:
    """The workers that are being made."""
    return [
      worker
      for worker, place in enumerate(self.all)
      if place.party is not None and not place.joined
    ]

  def calls(self) -> dict[int, Call]:
    """Returns what is waited for, by worker."""
    calls = {worker: place.call for worker, place in enumerate(self.all)}
    return {k: call for k, call in calls.items() if call is not None}

  def go_on(self) -> None:
    """Of a run that was begun: those who were there are gone, with their
    jobs."""
    begun, ledger = bool(self._book.rows), follow(self._book.rows)
    leaves = [e.worker for e in self._book.rows if e.action == base.LEAVE]
    for worker, place in enumerate(self.all):
      place.seq = ledger.next_seq.get(worker, 0)
      place.holder, place.alive = leaves.count(worker), not begun
      for row in ledger.open[worker].values():
        lost = Event(ledger.time, worker, row.seq, row.job, base.LOST)
        self._book.write(lost)
      if begun and (worker in ledger.present or worker not in ledger.ended):
        left = Event(ledger.time, worker, NO_SEQ, place.holder, base.LEAVE)
        self._book.write(left)
        place.holder += 1

  def fill(self, worker: int) -> None:
    """Begins to make the next holder of a place."""
    party = self._supervisor.start(WORKER, worker, self._make(worker))
    self.all[worker].party, self.all[worker].waited = party, 0.0

  def join(self, worker: int) -> None:
    """The holder is made. Raises Gone, or what kept it from it."""
    place = self.all[worker]
    assert place.party is not None
    place.party.made.result()
    place.joined, place.late = True, 0
    super().join(worker)

  def end_late(self, passed: float, limit: float) -> None:
    """Ends workers that have been starting for too long; others are started
    then. Raises ValueError if those are late again and again.

    Args:
      passed: seconds since the last time.
      limit: seconds that a start may take.
    """
    for worker in self.coming:
      place = self.all[worker]
      place.waited += passed
      if place.party is None or place.waited <= limit:
        continue
      place.late += 1
      text = (
        f"worker {worker} took more than {limit:g} seconds to start: give it"
        " more with config.live.start_seconds"
      )
      if place.late == _STARTS:
        raise ValueError(text)
      self._supervisor.hosts.say(text)
      self._supervisor.end(place.party)
      place.waited = 0.0  # until its end is known

  def empty(self, worker: int) -> LiveJob | None:
    """See the base."""
    self._supervisor.drop(self.all[worker].party)
    return super().empty(worker)
