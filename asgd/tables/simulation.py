"""Tables in simulated time: workers take drawn durations.

Messages take no time, jobs do. What happens is written down as rows of a trace:
SEND where a job starts and rows were read from the server for it, KEEP where it
starts on the rows that the worker has, RECEIVE where it ends. A worker's own
updates are applied at the end of a clock; a worker waits where it would read
what is too old.

An order that was recorded can be obeyed again, with the same bits.
"""

import heapq

from asgd import base
from asgd.orders.trace import events
from asgd.tables.jobs import Jobs, request_bytes


class Simulation(Jobs):
  """A run of tables.

  Job j of the run is that of worker j modulo N, whoever comes first.

  Example:
    Two workers add their numbers to a row; the bound is 1, and the fast worker
    waits where it would read without the slow one's first clock.

    >>> import numpy as np
    >>> from asgd import orders, tables
    >>> work = tables.Work(
    ...   lambda worker, job: worker,
    ...   lambda batch: {"w": np.array([0])},
    ...   lambda rows, batch, *_: (0.0, {"w": np.array([[-1.0 - batch]])}),
    ... )
    >>> run = tables.Simulation(
    ...   tables.table(1.0, 2, consistency="ssp", bound=1),
    ...   {"w": np.zeros((1, 1))},
    ...   work,
    ...   orders.durations.constant(slowdown=[1, 3]),
    ...   workers=2, messages=6,
    ... )
    >>> run.advance(until=6)
    6
    >>> run.records().time.tolist(), run.tables()["w"].tolist()
    ([1.0, 2.0, 3.0, 4.0, 6.0, 9.0], [[9.0]])
    >>> sorted(run.differentials.items())
    [(-2, 3), (-1, 3)]
  """

  def _begin(self):
    """All workers start what they may."""
    for worker in range(len(self._places)):
      self._try(worker)

  def _happen(self):
    """The next job ends, and what may start starts."""
    time, number, worker = heapq.heappop(self._heap)
    self.now = time
    try:
      self._end(worker)
    except ValueError:
      heapq.heappush(self._heap, (time, number, worker))
      raise
    self._try(worker)
    for other, place in enumerate(self._places):
      if place.waits:
        self._try(other)

  def obey(self, trace: base.Trace) -> None:
    """Obeys a recorded order in the place of durations.

    Raises:
      TraceError: for a row that cannot be obeyed: a job of another worker, a
        read that the consistency model does not allow, or SEND in the place of
        KEEP.
    """
    self._begun = True
    for event in events(trace):
      self.now, place = event.time, self._places[event.worker]
      if event.action == base.RECEIVE:
        if place.ticket is None or place.ticket.job != event.job:
          self._book.ledger.refuse(event, "that job was not sent to the worker")
        self._end(event.worker)
        continue
      if place.ticket is not None or event.job != self._next(event.worker):
        self._book.ledger.refuse(event, "it is not the worker's next job")
      if not self._start(event.worker):
        self._book.ledger.refuse(
          event, "the worker would read rows that are too old"
        )
      if self.rows[-1].action != event.action:
        self._book.ledger.refuse(
          event, f"it was a {base.ACTIONS[self.rows[-1].action]}"
        )

  def _try(self, worker):
    """Starts the worker's next job, if it has one and may."""
    place = self._places[worker]
    if place.started == self._jobs:
      return
    place.waits = not self._start(worker)
    if not place.waits:
      heapq.heappush(
        self._heap, (self.now + place.draw(), self._pushed, worker)
      )
      self._pushed += 1

  def _start(self, worker):
    """Starts the worker's next job; False if it must wait."""
    keys, clock, stale = self._wants(worker)
    client = self._clients[worker]
    if stale and self.server.slowest < client.rules.need(clock):
      return False
    if stale:
      self._places[worker].up += request_bytes(stale)
    for rows in self._answer(worker, clock, stale):
      client.take(rows)
    self._read(worker, keys, clock, len(self.rows) - 1)
    return True

  def _end(self, worker):
    """A job ends."""
    push = self._compute(worker)
    for other, rows in self._receive(worker, push).items():
      self._clients[other].take(rows)
