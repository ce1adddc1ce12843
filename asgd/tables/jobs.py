"""What happens to jobs on tables in simulated time, whoever says when.

A worker asks for the rows that its next job needs, the server answers, the
worker reads, computes, and at the end of a clock has a message, which the
server receives. A simulation is an order of these steps.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.trace import Event
from asgd.tables.book import Book
from asgd.tables.client import Client
from asgd.tables.keys import Keys
from asgd.tables.messages import Push, Rows
from asgd.tables.places import JobResult, SimulatedTableWorker, TableTicket
from asgd.tables.server import Server
from asgd.tables.settings import TableSettings
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


class Jobs:
  """The server, workers and book of a run of tables.

  Who has an order for its steps is a class below it, with `_begin` and
  `_happen`: the first things that happen, and the next one.
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
    of the workers; `observe` is told each read."""
    if messages % workers:
      raise ValueError(
        f"{messages} messages are not the same number for each of {workers}"
        " workers"
      )
    self.total, self._jobs = messages, messages // workers
    settings = settings.of_run(workers, self._jobs)
    self._settings, self._work, self._observe = settings, work, observe
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
    self._places = [
      SimulatedTableWorker(durations.stream(i)) for i in range(workers)
    ]
    self.now = 0.0
    self._book = Book()
    self.moved = 0  # ranges that went to another shard
    self._heap: list[tuple[float, int, int]] = []  # (time, push, worker)
    self._pushed = 0
    self._begun = False

  # Reading.

  @property
  def received(self) -> int:
    """Jobs that have ended."""
    return self._book.received

  @property
  def rows(self) -> list[Event]:
    """Of the trace so far."""
    return self._book.rows

  @property
  def differentials(self) -> Mapping[int, int]:
    """Rows read at each clock differential."""
    return self._book.differentials

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
    return self._book.records(start)

  # Running.

  def advance(self, until: int) -> int:
    """Goes on until so many jobs have ended; returns how many have. ValueError
    for an update that is not finite: its job has not ended then."""
    if not self._begun:
      self._begun = True
      self._begin()
    # What overflows is refused by the client, with its key.
    with np.errstate(over="ignore", invalid="ignore"):
      while self.received < min(until, self.total):
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
    out = []
    if stale:
      out.append(self.server.pull(worker, stale))
    if self._settings.rules.by_value:
      rows = self.server.by_value(worker, clock)
      out += [] if rows is None else [rows]
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
    every = self._book.count(clocks.values(), clock)
    if self._observe is not None:
      self._observe(Read(row, worker, clock, keys, values, clocks))
    oldest = clock - int(every.min(initial=clock))
    job, version = self._next(worker), self.server.version
    place.ticket = TableTicket(job, keys, values, oldest, version)
    place.started += 1

  def _write(self, worker, job, action):
    seq = job // len(self._places)
    self._book.write(Event(self.now, worker, seq, job, action))

  def _compute(self, worker) -> Push | None:
    """A job's updates are the worker's own; returns its message, if a clock
    ends."""
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
    every = [values for _, values in written.values()]
    size = sum(x.size for x in every)
    square = sum(float(np.square(x, dtype=float).sum()) for x in every)
    place.outcome = JobResult(loss, np.sqrt(square / max(size, 1)))
    after = place.done // settings.clock_every
    last = place.done == self._jobs
    if not (after > clock or last or settings.rules.by_value):
      return None
    # With its last job a worker has no more clocks to wait for.
    after += last and after == clock
    push = client.flush(after, everything=last)
    place.up += push.nbytes
    return push

  def _receive(self, worker, push) -> Mapping[int, Rows]:
    """A job ends, with its message if it has one; returns what the server sends
    to workers as the slowest clock advances."""
    place, client = self._places[worker], self._clients[worker]
    ticket, outcome = place.ticket, place.outcome
    gap = _gap(self.server, ticket)
    change, sent = (0.0, {}) if push is None else self._apply(push)
    place.ticket = place.outcome = None
    self._write(worker, ticket.job, base.RECEIVE)
    self._book.record(
      (
        *(self.server.version, self.now, worker, ticket.job, ticket.oldest),
        *(gap, outcome.loss, True, outcome.norm, change),
        *(place.up, place.down, client.residual()),
      )
    )
    place.up = place.down = 0
    return sent

  def _apply(self, push):
    """The server applies a message; returns the RMS of what that changed, and
    what it sends to workers."""
    before, sent = self._peek(push), {}
    advanced = self.server.receive(push)
    change = self._peek(push)
    square = sum(
      float(np.square(a - b).sum())
      for a, b in zip(change, before, strict=True)
    )
    size = sum(a.size for a in change)
    if advanced:
      sent = self.server.at_clock()
      for other, rows in sent.items():
        self._places[other].down += rows.nbytes
      self._rebalance(advanced)
    return np.sqrt(square / max(size, 1)), sent

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
    of_book, differentials = self._book.pack()
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
      **of_book,
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
      "differentials": differentials,
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
    self._book.unpack(arrays, notes["differentials"], self.now)


def request_bytes(keys: Mapping[str, Keys]) -> int:
  """Returns the bytes of a request for rows, by table."""
  return 16 + sum(8 * len(each) for each in keys.values())


def _gap(server, ticket):
  """RMS over the elements read of what the server has now minus then."""
  square = count = 0.0
  for name, keys in ticket.keys.items():
    table = np.asarray(server.tables[name].peek(keys), float)
    square += float(np.square(table - ticket.values[name]).sum())
    count += table.size
  return np.sqrt(square / max(count, 1))


def template(
  simulation: Jobs, notes: Mapping[str, Any]
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
