"""Tables in simulated time: workers take drawn durations.

Messages take no time, jobs do. What happens is written down as rows of a trace:
SEND where a job starts and rows were read from the server for it, KEEP where it
starts on the rows that the worker has, RECEIVE where it ends. A worker's own
updates are applied at the end of a clock; a worker waits where it would read
what is too old.

An order that was recorded can be obeyed again, with the same bits.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, TraceError, events, from_events
from asgd.tables.client import Client
from asgd.tables.keys import Keys
from asgd.tables.messages import Push, Rows
from asgd.tables.rows import rms
from asgd.tables.server import TableServer
from asgd.tables.settings import TableSettings, Values, Work
from asgd.tables.table import Table


class TableTicket(NamedTuple):
  """A job that a worker has started."""

  job: int
  keys: Mapping[str, Keys]
  values: Values  # as they were read
  oldest: int  # clocks that the oldest row lacked
  # What the worker has computed of it:
  loss: float = math.nan
  norm: float = math.nan  # RMS of its updates


class SimulatedTableWorker:
  """How far a worker is in simulated time."""

  def __init__(self, stream):
    self._stream = stream  # of the times of its jobs
    self._drawn = self.started = self.done = 0
    self.ticket: TableTicket | None = None
    self.waits = False
    self.up = self.down = 0  # bytes since its last record
    # Over a network:
    self.heard = 0  # the slowest clock, as rows that came said
    self.applied = 0  # of its messages, by the shards
    self.row = 0  # of the trace: the start of its job
    self.queued = 0.0  # time of its messages in queues of shards

  def draw(self) -> float:
    """Returns the time of its next job."""
    self._drawn += 1
    return next(self._stream)

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {k: x for k, x in vars(self).items() if k != "_stream"}

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it, of which nothing was drawn, has packed."""
    vars(self).update(tree)
    collections.deque(itertools.islice(self._stream, self._drawn), maxlen=0)
    self.ticket = self.ticket and TableTicket(*self.ticket)


class Read(NamedTuple):
  """A job's read, for an observer: tests of a model check it."""

  row: int  # of the trace
  worker: int
  clock: int  # clocks that the worker has finished
  keys: Mapping[str, Keys]
  values: Values
  clocks: Mapping[str, np.ndarray]  # of the rows


class Jobs:
  """The server and the workers of a run of tables, and its trace and records.

  A class below it has an order for its steps: `_begin` is the first things that
  happen, and `_happen` the next one.
  """

  def __init__(
    self,
    settings: TableSettings,
    tables: Mapping[str, Any],
    work: Work,
    durations: Durations,
    *,
    workers: int,
    messages: int,
    seed: int = 0,
    observe: Callable[[Read], None] | None = None,
  ):
    """Starts from tables, arrays [K, ...] by name, for so many jobs, a multiple
    of the workers; `observe` is called with each read."""
    if messages % workers:
      raise ValueError(
        f"{messages} messages are not the same number for each of {workers}"
        " workers"
      )
    self._jobs = messages // workers  # of each
    settings = settings.of_run(workers, self._jobs)
    self._settings, self._work, self._observe = settings, work, observe
    codec, shards = settings.make_codec(), settings.shards
    self.server = TableServer(
      {
        name: Table(
          rows, settings.function, shards=min(shards, len(rows)), name=name
        )
        for name, rows in tables.items()
      },
      settings.rules,
      range(workers),
      codec=codec,
    )
    key = codec and jax.random.key(seed)
    self._clients = [
      Client(
        *(worker, self.server.specs, settings.rules),
        filters=settings.filters,
        codec=codec,
        key=codec and jax.random.fold_in(key, worker),
        seed=seed,
      )
      for worker in range(workers)
    ]
    self._places = [
      SimulatedTableWorker(durations.stream(i)) for i in range(workers)
    ]
    self.now = 0.0
    self.rows: list[Event] = []  # of the trace so far
    self._records: list[tuple[Any, ...]] = []  # rows of `base.Records`
    # Rows read at each clock differential.
    self.differentials: collections.Counter[int] = collections.Counter()
    self.moved = 0  # ranges that went to another shard
    self._heap: list[tuple[float, int, int]] = []  # (time, push, worker)
    self._pushed = 0
    self._begun = False

  # Reading.

  @property
  def received(self) -> int:
    """Jobs that have ended."""
    return len(self._records)

  def tables(self) -> dict[str, Any]:
    """Returns all rows [K, ...] of each table."""
    return {name: t.whole() for name, t in self.server.tables.items()}

  @property
  def held(self) -> tuple[int, int]:
    """(rows that filters held back for later, rows that they dropped)."""
    both = [client.held for client in self._clients]
    return sum(h.back for h in both), sum(h.dropped for h in both)

  def records(self, start: int = 0) -> base.Records:
    """Returns a row for each job from job `start` on: the update is messages
    applied, the staleness clocks that the oldest row lacked, the gap the RMS
    over the rows read of their values since."""
    return base.Records.of(self._records[start:])

  # Running.

  def advance(self, until: int) -> int:
    """Simulates until so many jobs have ended; returns their number. ValueError
    for an update that is not finite: its job has not ended then."""
    if not self._begun:
      self._begun = True
      self._begin()
    # What overflows is refused by the client, with its key.
    with np.errstate(over="ignore", invalid="ignore"):
      while self.received < min(until, self._jobs * len(self._places)):
        self._happen()
    return self.received

  def _begin(self):
    """All workers start what they may."""
    raise NotImplementedError

  def _happen(self):
    """The next thing happens."""
    raise NotImplementedError

  # Steps.

  def _next(self, worker):
    """The worker's next job."""
    return self._places[worker].started * len(self._places) + worker

  def _wants(self, worker):
    """Returns the keys of the rows that a worker's next job is on, the clocks
    that it has finished, and the keys that it has to ask for."""
    place, client = self._places[worker], self._clients[worker]
    keys = self._work.keys(self._work.batch(worker, self._next(worker)))
    clock = place.done // self._settings.clock_every
    client.factor = self._settings.factor(clock)
    return keys, clock, client.stale(keys, clock)

  def _answer(self, worker, clock, stale) -> list[Rows]:
    """The server has what a worker's next job needs, and sends it."""
    out = [self.server.pull(worker, stale)] if stale else []
    if self._settings.rules.by_value:
      rows = self.server.by_value(worker, clock)
      out += [rows] if rows else []
    self._places[worker].down += sum(rows.nbytes for rows in out)
    job = self._next(worker)
    self._write(worker, job, base.SEND if stale else base.KEEP)
    return out

  def _read(self, worker, keys, clock, row):
    """The worker's next job starts, on the rows that it has; `row` is the
    trace's."""
    place, client = self._places[worker], self._clients[worker]
    values = client.read(keys)
    self.server.has_read(worker)
    clocks = {name: client.clocks(name, each) for name, each in keys.items()}
    every = np.concatenate([*clocks.values(), np.zeros(0, int)])
    lacks, counts = np.unique(every - 1 - clock, return_counts=True)
    pairs = zip(lacks.tolist(), counts.tolist(), strict=True)
    self.differentials.update(dict(pairs))
    if self._observe is not None:
      self._observe(Read(row, worker, clock, keys, values, clocks))
    oldest = clock - int(every.min(initial=clock))
    place.ticket = TableTicket(self._next(worker), keys, values, oldest)
    place.started += 1

  def _write(self, worker, job, action):
    seq = job // len(self._places)
    self.rows.append(Event(self.now, worker, seq, job, action))

  def _compute(self, worker) -> Push | None:
    """A job's updates are the worker's own; returns its message, if a clock
    ends."""
    place, client = self._places[worker], self._clients[worker]
    settings, ticket = self._settings, place.ticket
    job, keys = ticket.job, ticket.keys
    batch = self._work.batch(worker, job)
    loss, gradient = self._work.gradient(
      ticket.values, batch, keys, worker, job
    )
    clock = place.done // settings.clock_every
    written = settings.written(clock, keys, gradient)
    client.write(written)
    place.done += 1
    norm = rms(x for _, x in written.values())
    place.ticket = ticket._replace(loss=loss, norm=norm)
    after = settings.clock_of_message(place.done, self._jobs)
    if after is None:
      return None
    push = client.flush(after, everything=place.done == self._jobs)
    place.up += push.nbytes
    return push

  def _receive(self, worker, push) -> Mapping[int, Rows]:
    """A job ends, with its message if it has one; returns what the server sends
    to workers as the slowest clock advances."""
    place, client = self._places[worker], self._clients[worker]
    ticket = place.ticket
    gap = rms(
      np.asarray(self.server.tables[name].peek(keys), float)
      - ticket.values[name]
      for name, keys in ticket.keys.items()
    )
    change, sent = (0.0, {}) if push is None else self._apply(push)
    place.ticket = None
    self._write(worker, ticket.job, base.RECEIVE)
    self._records.append(
      (
        *(self.server.version, self.now, worker, ticket.job, ticket.oldest),
        *(gap, ticket.loss, True, ticket.norm, change),
        *(place.up, place.down, client.residual()),
      )
    )
    place.up = place.down = 0
    return sent

  def _apply(self, push):
    """Has the server apply a message; returns the RMS of what that changed, and
    the rows that it sends to workers."""
    advanced, (square, count) = self.server.measure(push)
    change, sent = np.sqrt(square / max(count, 1)), {}
    if advanced:
      sent = self.server.at_clock()
      for other, rows in sent.items():
        self._places[other].down += rows.nbytes
      every, clock = self._settings.rebalance_every, self.server.slowest
      if every and clock // every > (clock - advanced) // every:
        for table in self.server.tables.values():
          self.moved += len(table.rebalance())
    return change, sent

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "server": self.server.pack(),
      "clients": [client.pack() for client in self._clients],
      "places": [place.pack() for place in self._places],
      "trace": from_events(self.rows),
      "records": self.records(),
      "differentials": list(self.differentials.items()),
      "now": self.now,
      "heap": self._heap,
      "counts": [self._pushed, self._begun, self.moved],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what a run like this one, which has not begun, has packed."""
    self.server.unpack(tree["server"])
    for parties, packed in (
      (self._clients, tree["clients"]), (self._places, tree["places"])
    ):
      for party, each in zip(parties, packed, strict=True):
        party.unpack(each)
    self.rows = list(events(base.Trace(*tree["trace"])))
    self._records = base.Records(*tree["records"]).rows()
    self.differentials = collections.Counter(dict(tree["differentials"]))
    self.now = tree["now"]
    self._heap = [(t, n, w) for t, n, w in tree["heap"]]
    self._pushed, self._begun, self.moved = tree["counts"]


def request_bytes(keys: Mapping[str, Keys]) -> int:
  """Returns the bytes of a request for rows, by table."""
  return 16 + sum(8 * len(each) for each in keys.values())


class Simulation(Jobs):
  """A run of tables.

  Job j of the run is that of worker j modulo N, in any order.

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
      self.now, place, why = event.time, self._places[event.worker], None
      if event.action == base.RECEIVE:
        if place.ticket is None or place.ticket.job != event.job:
          why = "that job was not sent to the worker"
        else:
          self._end(event.worker)
      elif place.ticket is not None or event.job != self._next(event.worker):
        why = "it is not the worker's next job"
      elif not self._start(event.worker):
        why = "the worker would read rows that are too old"
      elif self.rows[-1].action != event.action:
        why = f"it was a {base.ACTIONS[self.rows[-1].action]}"
      if why is not None:
        raise TraceError(len(self.rows), event, why)

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
