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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, Ledger, events, from_events
from asgd.tables.client import Client
from asgd.tables.keys import Keys
from asgd.tables.server import Server
from asgd.tables.settings import Settings
from asgd.tables.table import Table
from asgd.tables.work import Values, Work


class Read(NamedTuple):
  """A job's read, told to an observer: what tests of a model look at."""

  row: int  # of the trace
  worker: int
  clock: int  # clocks that the worker has finished
  keys: Mapping[str, Keys]
  values: Values
  clocks: Mapping[str, np.ndarray]  # of the rows


class _Ticket(NamedTuple):
  """A job that a worker has started."""

  job: int
  keys: Mapping[str, Keys]
  values: Values  # as they were read
  oldest: int  # clock of the oldest row
  version: int  # of the server


class _Place:
  """A worker."""

  def __init__(self, stream):
    self.stream = stream
    self.drawn = self.started = self.done = 0
    self.ticket: _Ticket | None = None
    self.waits = False
    self.up = self.down = 0  # bytes since its last record

  def draw(self) -> float:
    self.drawn += 1
    return next(self.stream)

  def pack(self) -> tuple[list[Any], list[int] | None]:
    """Returns its numbers, and those of its ticket, as JSON."""
    numbers = [self.drawn, self.started, self.done]
    numbers += [self.waits, self.up, self.down]
    ticket = self.ticket
    return numbers, ticket and [ticket.job, ticket.oldest, ticket.version]

  def unpack(self, numbers, of_ticket, arrays) -> None:
    """Takes over what was packed; `arrays` are the ticket's rows."""
    self.drawn, self.started, self.done, *rest = numbers
    self.waits, self.up, self.down = rest
    collections.deque(itertools.islice(self.stream, self.drawn), maxlen=0)
    if of_ticket is not None:
      keys, values = (
        {name: np.array(x) for name, x in arrays[part].items()}
        for part in ("keys", "values")
      )
      self.ticket = _Ticket(of_ticket[0], keys, values, *of_ticket[1:])


class Simulation:
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

  def __init__(
    self,
    settings: Settings,
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
    of the workers; `observe` is told each read."""
    if messages % workers:
      raise ValueError(
        f"{messages} messages are not the same number for each of {workers}"
        " workers"
      )
    self._settings, self._work, self._observe = settings, work, observe
    self.total, self._jobs = messages, messages // workers
    codec = settings.make_codec()
    shards = settings.shards
    self.server = Server(
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
    key = None if codec is None else jax.random.key(seed)
    self._clients = [
      Client(
        *(worker, self.server.specs, settings.rules),
        filters=settings.filters,
        codec=codec,
        key=key if key is None else jax.random.fold_in(key, worker),
        seed=seed,
      )
      for worker in range(workers)
    ]
    self._places = [_Place(durations.stream(i)) for i in range(workers)]
    self.now = 0.0
    self.rows: list[Event] = []
    self._ledger: Ledger[Event] = Ledger()
    self.differentials: collections.Counter[int] = collections.Counter()
    self.moved = 0  # ranges that went to another shard
    self._messages: list[tuple[Any, ...]] = []
    self._heap: list[tuple[float, int, int]] = []  # (time, push, worker)
    self._pushed = 0
    self._begun = False

  # Reading.

  @property
  def received(self) -> int:
    """Jobs that have ended."""
    return len(self._messages)

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
    columns = zip(*self._messages[start:], strict=True)
    dtypes = (
      *(np.int32, np.float64, np.int32, np.int32, np.int32, np.float32),
      *(np.float32, np.bool_, np.float32, np.float32, np.int64, np.int64),
      np.float32,
    )
    empty = [()] * len(dtypes)
    return base.Records(*map(np.array, list(columns) or empty, dtypes))

  # Running.

  def advance(self, until: int) -> int:
    """Goes on until so many jobs have ended; returns how many have. ValueError
    for an update that is not finite: its job has not ended then."""
    if not self._begun:
      self._begun = True
      for worker in range(len(self._places)):
        self._try(worker)
    # What overflows is refused by the client, with its key.
    with np.errstate(over="ignore", invalid="ignore"):
      while self.received < min(until, self.total):
        self._happen()
    return self.received

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
          self._ledger.refuse(event, "that job was not sent to the worker")
        self._end(event.worker)
        continue
      if place.ticket is not None or event.job != self._next(event.worker):
        self._ledger.refuse(event, "it is not the worker's next job")
      if not self._start(event.worker):
        self._ledger.refuse(
          event, "the worker would read rows that are too old"
        )
      if self.rows[-1].action != event.action:
        self._ledger.refuse(
          event, f"it was a {base.ACTIONS[self.rows[-1].action]}"
        )

  def _next(self, worker):
    """The worker's next job."""
    return self._places[worker].started * len(self._places) + worker

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
    """Reads what the next job needs; False if the worker must wait."""
    place, client, job = (
      self._places[worker], self._clients[worker], self._next(worker)
    )
    keys = self._work.keys(self._work.batch(worker, job))
    clock = place.done // self._settings.clock_every
    client.factor = self._settings.factor(clock)
    stale = client.stale(keys, clock)
    if stale and self.server.slowest < client.rules.need(clock):
      return False
    if stale:
      rows = self.server.pull(worker, stale)
      place.up += 16 + sum(8 * len(each) for each in stale.values())
      self._deliver(worker, rows)
    if client.rules.by_value:
      rows = self.server.by_value(worker, clock)
      if rows is not None:
        self._deliver(worker, rows)
    values = client.read(keys)
    clocks = {name: client.clocks(name, each) for name, each in keys.items()}
    every = np.concatenate([*clocks.values(), np.zeros(0, int)])
    lacks, counts = np.unique(every - 1 - clock, return_counts=True)
    pairs = zip(lacks.tolist(), counts.tolist(), strict=True)
    self.differentials.update(dict(pairs))
    if self._observe is not None:
      read = Read(len(self.rows), worker, clock, keys, values, clocks)
      self._observe(read)
    oldest = clock - int(every.min(initial=clock))
    self._write(worker, job, base.SEND if stale else base.KEEP)
    place.ticket = _Ticket(job, keys, values, oldest, self.server.version)
    place.started += 1
    return True

  def _deliver(self, worker, rows):
    self._places[worker].down += rows.nbytes
    self._clients[worker].take(rows)

  def _write(self, worker, job, action):
    seq = job // len(self._places)
    event = Event(self.now, worker, seq, job, action)
    self.rows.append(event)
    self._ledger.rows += 1
    self._ledger.time = self.now

  def _end(self, worker):
    """A job ends: its updates are the worker's own; at the end of a clock they
    are sent."""
    place, client, settings = (
      self._places[worker], self._clients[worker], self._settings
    )
    ticket = place.ticket
    job, keys = ticket.job, ticket.keys
    batch = self._work.batch(worker, job)
    loss, gradient = self._work.gradient(
      ticket.values, batch, keys, worker, job
    )
    clock = place.done // settings.clock_every
    written = settings.written(clock, keys, gradient)
    client.write(written)
    place.done += 1
    after = place.done // settings.clock_every
    last = place.done == self._jobs
    gap = _gap(self.server, ticket)
    change = 0.0
    if after > clock or last or settings.rules.by_value:
      # With its last job a worker has no more clocks to wait for.
      after += last and after == clock
      change = self._flush(worker, after, last)
    place.ticket = None
    self._write(worker, job, base.RECEIVE)
    every = [values for _, values in written.values()]
    size = sum(x.size for x in every)
    square = sum(float(np.square(x, dtype=float).sum()) for x in every)
    self._messages.append(
      (
        *(self.server.version, self.now, worker, job, ticket.oldest, gap),
        *(loss, True, np.sqrt(square / max(size, 1)), change),
        *(place.up, place.down, client.residual()),
      )
    )
    place.up = place.down = 0

  def _flush(self, worker, clock, last):
    """Sends a worker's updates; returns the RMS of what the server changed."""
    push = self._clients[worker].flush(clock, everything=last)
    self._places[worker].up += push.nbytes
    before = self._peek(push)
    advanced = self.server.receive(push)
    change = self._peek(push)
    square = sum(
      float(np.square(a - b).sum())
      for a, b in zip(change, before, strict=True)
    )
    size = sum(a.size for a in change)
    if advanced:
      for other, rows in self.server.at_clock().items():
        self._deliver(other, rows)
      self._rebalance(advanced)
    return np.sqrt(square / max(size, 1))

  def _peek(self, push):
    """The server's rows that a message is about."""
    lists = self._clients[push.worker].sender.lists
    return [
      np.array(self.server.tables[name].peek(lists[each.keys.digest]), float)
      for name, each in push.tables.items()
    ]

  def _rebalance(self, advanced):
    every, clock = self._settings.rebalance_every, self.server.slowest
    if every and clock // every > (clock - advanced) // every:
      for table in self.server.tables.values():
        self.moved += len(table.rebalance())

  # Checkpoints.

  def pack(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns its arrays, and the rest as JSON."""
    clients = [client.pack() for client in self._clients]
    server, server_notes = self.server.pack()
    tickets = {
      f"{i}": {"keys": dict(p.ticket.keys), "values": dict(p.ticket.values)}
      for i, p in enumerate(self._places)
      if p.ticket is not None
    }
    arrays = {
      "server": server,
      "clients": [each for each, _ in clients],
      "tickets": tickets,
      "records": self.records(),
      "trace": from_events(self.rows),
    }
    places, numbers = zip(*(p.pack() for p in self._places), strict=True)
    notes = {
      "server": server_notes,
      "clients": [each for _, each in clients],
      "places": places,
      "tickets": numbers,
      "now": self.now,
      "heap": [list(each) for each in self._heap],
      "counts": [self._pushed, self._begun, self.moved],
      "differentials": sorted(self.differentials.items()),
    }
    return arrays, notes

  def unpack(self, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Takes over what a run like this one, which has not begun, has packed."""
    self.server.unpack(arrays["server"], notes["server"])
    for client, packed, each in zip(
      self._clients, arrays["clients"], notes["clients"], strict=True
    ):
      client.unpack(packed, each)
    numbers = zip(notes["places"], notes["tickets"], strict=True)
    each = zip(self._places, numbers, strict=True)
    for i, (place, packed) in enumerate(each):
      place.unpack(*packed, arrays["tickets"].get(f"{i}"))
    self.now = notes["now"]
    self._heap = [(t, n, w) for t, n, w in notes["heap"]]
    self._pushed, self._begun, self.moved = notes["counts"]
    self.differentials = collections.Counter(dict(notes["differentials"]))
    self.rows = list(events(arrays["trace"]))
    self._ledger.rows, self._ledger.time = len(self.rows), self.now
    columns = (column.tolist() for column in arrays["records"])
    self._messages = list(zip(*columns, strict=True))


def _gap(server, ticket):
  """RMS over the elements read of what the server has now minus then."""
  square = count = 0.0
  for name, keys in ticket.keys.items():
    table = np.asarray(server.tables[name].peek(keys), float)
    square += float(np.square(table - ticket.values[name]).sum())
    count += table.size
  return np.sqrt(square / max(count, 1))


def template(
  simulation: Simulation, notes: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a tree of the structure that was packed with some notes, of this
  run, which has not begun; shapes differ."""
  arrays, _ = simulation.pack()
  for client, each in zip(arrays["clients"], notes["clients"], strict=True):
    client["cached"] = dict.fromkeys(each["cached"], 0)
  server, server_notes = arrays["server"], notes["server"]
  server["cached"] = [dict.fromkeys(x, 0) for x in server_notes["cached"]]
  server["deferred"] = [
    {name: [0, 0] for name in names}
    for *_, names in server_notes["deferred"]
  ]
  rows = dict.fromkeys(simulation.server.tables, 0)
  arrays["tickets"] = {
    f"{i}": {"keys": rows, "values": rows}
    for i, numbers in enumerate(notes["tickets"])
    if numbers is not None
  }
  return arrays
