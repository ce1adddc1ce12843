"""Simulation of tables: jobs take drawn durations, messages take no time.

A run writes rows of a trace: SEND where a job starts on rows of the server,
KEEP where a job starts on the worker's copies alone, RECEIVE where a job ends.
A worker's updates are sent and applied at the end of a clock. A worker waits if
its next read would be too old for the consistency model.

`Simulation.replay` replays a recorded trace, with the same bits.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, TraceError, events, from_events
from asgd.tables.bandwidth import free_after
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
  # Known once the job is computed:
  loss: float = math.nan
  norm: float = math.nan  # RMS of its updates


class SimulatedTableWorker:
  """State of one worker in simulated time."""

  def __init__(self, stream: Iterator[float]) -> None:
    self._stream = stream  # of the durations of its jobs
    self._drawn = self.started = self.done = 0  # counts of jobs
    self.ticket: TableTicket | None = None  # of the job that it computes
    self.waits = False  # for other workers, before the next job can start
    self.up = self.down = 0  # bytes since the worker's last record
    # Times: when its job began, and when its messages so far have been sent.
    self.began = self.link_free = 0.0
    # Used over a network only:
    self.heard = 0  # the slowest worker's clock in the rows that it received
    self.applied = 0  # pushes that the shards have applied
    self.row = 0  # index of the trace row that started its job
    self.queued = 0.0  # time that its messages spent in queues of shards

  def draw(self) -> float:
    """Returns the duration of the worker's next job."""
    self._drawn += 1
    return next(self._stream)

  def pack(self) -> dict[str, Any]:
    """Returns the state as a tree of arrays and JSON."""
    fields = vars(self).items()
    return {name: value for name, value in fields if name != "_stream"}

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores what another instance has packed. This instance must not have
    drawn a duration yet."""
    vars(self).update(tree)
    # Skip the durations that were drawn; a deque of length 0 keeps none.
    collections.deque(itertools.islice(self._stream, self._drawn), maxlen=0)
    self.ticket = self.ticket and TableTicket(*self.ticket)


class Read(NamedTuple):
  """One job's read, passed to an observer: tests of a consistency model check
  it."""

  row: int  # index of the trace row that started the job
  worker: int
  clock: int  # clocks that the worker has finished
  keys: Mapping[str, Keys]
  values: Values
  clocks: Mapping[str, np.ndarray]  # int[n], of the rows read


class TableRun:
  """Base class of simulated runs.

  It has the server, the workers, the trace and the records. A subclass decides
  the order of steps: its `_begin` schedules the first events, and its `_step`
  handles the next one.
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
    """Starts a run.

    Args:
      settings: the settings of the run.
      tables: arrays [K, ...] by name.
      work: the work of the workers.
      durations: the durations of jobs.
      workers: N.
      messages: jobs of the run, a multiple of N.
      seed: the seed of filters and codecs.
      observe: called with each read.

    Raises:
      ValueError: if `messages` is no multiple of N.
    """
    if messages % workers:
      raise ValueError(
        f"{messages} messages are not the same number for each of {workers}"
        f" workers: use a multiple of {workers}"
      )
    self._jobs = messages // workers  # of each worker
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
        codec=codec, key_caching=settings.key_caching,
        key=codec and jax.random.fold_in(key, worker),
        seed=seed,
      )
      for worker in range(workers)
    ]
    self._workers = [
      SimulatedTableWorker(durations.stream(i)) for i in range(workers)
    ]
    self.now = 0.0
    self.rows: list[Event] = []  # the trace so far
    self._records: list[tuple[Any, ...]] = []  # rows of `base.Records`
    # Clock differential -> count of rows that were read at it.
    self.differentials: collections.Counter[int] = collections.Counter()
    self.moved = 0  # ranges that moved to another shard
    # (end of a job, number of earlier events, worker); the number breaks ties.
    self._heap: list[tuple[float, int, int]] = []
    self._event_count = 0
    self._begun = False

  # Reading.

  @property
  def received(self) -> int:
    """Count of jobs that have ended."""
    return len(self._records)

  def tables(self) -> dict[str, Any]:
    """Returns all rows [K, ...] of each table."""
    return {name: table.whole() for name, table in self.server.tables.items()}

  @property
  def held(self) -> tuple[int, int]:
    """Counts of rows: (held back by filters for later, dropped by filters)."""
    counts = [client.held for client in self._clients]
    n_held_back, n_dropped = map(sum, zip(*counts, strict=True))
    return n_held_back, n_dropped

  def records(self, start: int = 0) -> base.Records:
    """Returns the records of the ended jobs, in the order of their ends,
    without the first `start` ones.

    `update` counts the messages applied, `staleness` the clocks that the oldest
    row lacked. `gap` is the RMS of the change of the job's rows since it read
    them.
    """
    return base.Records.of(self._records[start:])

  # Running.

  def advance(self, until: int) -> int:
    """Simulates until `until` jobs have ended; returns the count of ended jobs.

    Raises:
      ValueError: for an update that is not finite. Its job has not ended then.
    """
    if not self._begun:
      self._begun = True
      self._begin()
    # No warning for an overflow: the client raises an error that names the key.
    with np.errstate(over="ignore", invalid="ignore"):
      while self.received < min(until, self._jobs * len(self._workers)):
        self._step()
    return self.received

  def _begin(self):
    """Schedules the first events."""
    raise NotImplementedError

  def _step(self):
    """Handles the next event."""
    raise NotImplementedError

  # Steps.

  def _next_job(self, worker: int) -> int:
    """Returns the index of the worker's next job."""
    return self._workers[worker].started * len(self._workers) + worker

  def _inspect_next_job(
    self, worker: int
  ) -> tuple[Mapping[str, Keys], int, dict[str, Keys]]:
    """Returns, for a worker's next job: the keys of the job's rows, the number
    of clocks that the worker has finished, and the keys that it must request.
    """
    state, client = self._workers[worker], self._clients[worker]
    keys = self._work.keys(self._work.batch(worker, self._next_job(worker)))
    clock = state.done // self._settings.clock_every
    client.factor = self._settings.factor(clock)
    return keys, clock, client.stale(keys, clock)

  def _answer(
    self, worker: int, clock: int, stale: Mapping[str, Keys]
  ) -> list[Rows]:
    """Returns the server's rows for a worker's next job, and writes the job's
    start to the trace."""
    messages = [self.server.pull(worker, stale)] if stale else []
    if self._settings.rules.by_value:
      rows = self.server.by_value(worker, clock)
      messages += [rows] if rows else []
    self._workers[worker].down += sum(rows.nbytes for rows in messages)
    job = self._next_job(worker)
    self._write_row(worker, job, base.SEND if stale else base.KEEP)
    return messages

  def _start_ticket(
    self, worker: int, keys: Mapping[str, Keys], clock: int, row: int
  ) -> None:
    """Starts the worker's next job on the rows of the worker's client. `row` is
    the index of the trace row that starts the job."""
    state, client = self._workers[worker], self._clients[worker]
    values, state.began = client.read(keys), self.rows[row].time
    self.server.record_read(worker)
    clocks = {name: client.clocks(name, keys[name]) for name in keys}
    # The empty array makes the concatenation valid for a job without keys.
    row_clocks = np.concatenate([*clocks.values(), np.zeros(0, int)])
    row_differentials = row_clocks - 1 - clock
    differentials, counts = np.unique(row_differentials, return_counts=True)
    pairs = zip(differentials.tolist(), counts.tolist(), strict=True)
    self.differentials.update(dict(pairs))
    if self._observe is not None:
      self._observe(Read(row, worker, clock, keys, values, clocks))
    oldest = clock - int(row_clocks.min(initial=clock))
    state.ticket = TableTicket(self._next_job(worker), keys, values, oldest)
    state.started += 1

  def _write_row(self, worker: int, job: int, action: int) -> None:
    """Appends a row to the trace."""
    seq = job // len(self._workers)
    self.rows.append(Event(self.now, worker, seq, job, action))

  def _compute(self, worker: int) -> Push | None:
    """Computes a job's gradient and writes the updates to the worker's client.
    Returns the worker's message if the job ends a clock."""
    state, client = self._workers[worker], self._clients[worker]
    settings, ticket = self._settings, state.ticket
    job, keys = ticket.job, ticket.keys
    batch = self._work.batch(worker, job)
    loss, gradient = self._work.gradient(
      ticket.values, batch, keys, worker, job
    )
    clock = state.done // settings.clock_every
    written = settings.written(clock, keys, gradient)
    client.write(written)
    state.done += 1
    norm = rms(updates for _, updates in written.values())
    state.ticket = ticket._replace(loss=loss, norm=norm)
    counts, is_free = (state.done, self._jobs), state.began >= state.link_free
    clock_after = settings.clock_of_message(*counts, link_is_free=is_free)
    if clock_after is None:
      return None
    everything = settings.sends_everything(*counts)
    push = client.flush(clock_after, everything=everything)
    state.up += push.nbytes
    state.link_free = free_after(
      state.link_free, state.began, push.nbytes, settings.bandwidth
    )
    return push

  def _receive(self, worker: int, push: Push | None) -> Mapping[int, Rows]:
    """Ends a job, and applies its message if there is one. Returns worker ->
    rows that the server then sends."""
    state, client = self._workers[worker], self._clients[worker]
    ticket = state.ticket
    # The gap is measured before the worker's own message is applied.
    gap = rms(
      np.asarray(self.server.tables[name].peek(keys), float)
      - ticket.values[name]
      for name, keys in ticket.keys.items()
    )
    change, sent = (0.0, {}) if push is None else self._apply(push)
    state.ticket = None
    self._write_row(worker, ticket.job, base.RECEIVE)
    self._records.append(
      (
        *(self.server.version, self.now, worker, ticket.job, ticket.oldest),
        *(gap, ticket.loss, True, ticket.norm, change),
        *(state.up, state.down, client.residual()),
      )
    )
    state.up = state.down = 0
    return sent

  def _apply(self, push: Push) -> tuple[float, Mapping[int, Rows]]:
    """Applies a message at the server. Returns the RMS of the change of the
    message's rows, and worker -> rows that the server sends."""
    clocks_advanced, (squares, size) = self.server.receive_measured(push)
    change, sent = np.sqrt(squares / max(size, 1)), {}
    if clocks_advanced:
      sent = self.server.at_clock()
      for other, rows in sent.items():
        self._workers[other].down += rows.nbytes
      # Rebalance when the slowest clock passes a multiple of the interval.
      interval, clock = self._settings.rebalance_every, self.server.slowest
      if interval and clock // interval > (clock - clocks_advanced) // interval:
        for table in self.server.tables.values():
          self.moved += len(table.rebalance())
    return change, sent

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns the state of the run as a tree of arrays and JSON."""
    return {
      "server": self.server.pack(),
      "clients": [client.pack() for client in self._clients],
      "places": [state.pack() for state in self._workers],
      "trace": from_events(self.rows),
      "records": self.records(),
      "differentials": list(self.differentials.items()),
      "now": self.now,
      "heap": self._heap,
      "counts": [self._event_count, self._begun, self.moved],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a run with the same arguments. This run must
    not have begun."""
    self.server.unpack(tree["server"])
    for client, packed in zip(self._clients, tree["clients"], strict=True):
      client.unpack(packed)
    for state, packed in zip(self._workers, tree["places"], strict=True):
      state.unpack(packed)
    self.rows = list(events(base.Trace(*tree["trace"])))
    self._records = base.Records(*tree["records"]).rows()
    self.differentials = collections.Counter(dict(tree["differentials"]))
    self.now = tree["now"]
    self._heap = [(t, n, w) for t, n, w in tree["heap"]]
    self._event_count, self._begun, self.moved = tree["counts"]


def request_bytes(keys: Mapping[str, Keys]) -> int:
  """Returns the bytes of a request for rows: a header and 8 per key."""
  return 16 + sum(8 * len(table_keys) for table_keys in keys.values())


class Simulation(TableRun):
  """A run of tables with messages that take no time.

  Job j always belongs to worker j modulo N, however fast the workers are.

  Example:
    Two workers add numbers to one row. With a bound of 1 the fast worker waits
    when it is more than one clock ahead of the slow one.

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
    """Starts the first job of each worker."""
    for worker in range(len(self._workers)):
      self._try_start(worker)

  def _step(self) -> None:
    """Ends the job that is due next, then starts the worker's next job and
    those of waiting workers that may start now."""
    event = heapq.heappop(self._heap)
    self.now, _, worker = event
    try:
      self._end_job(worker)
    except ValueError:
      # The job has not ended; a later `advance` tries again.
      heapq.heappush(self._heap, event)
      raise
    self._try_start(worker)
    for other, state in enumerate(self._workers):
      if state.waits:
        self._try_start(other)

  def replay(self, trace: base.Trace) -> None:
    """Replays a recorded trace: its rows give the order, instead of durations.

    Raises:
      TraceError: for a row that this run could not have written: a job of
        another worker, a read that the consistency model does not allow, or
        SEND where the worker needs no rows (and KEEP where it does).
    """
    self._begun = True
    for event in events(trace):
      self.now, state, mismatch = event.time, self._workers[event.worker], None
      if event.action == base.RECEIVE:
        if state.ticket is None or state.ticket.job != event.job:
          mismatch = "the worker is not computing that job"
        else:
          self._end_job(event.worker)
      elif state.ticket or event.job != self._next_job(event.worker):
        mismatch = "it is not the worker's next job"
      elif not self._start_job(event.worker):
        mismatch = "the worker would read rows that are too old"
      elif self.rows[-1].action != event.action:
        actual = base.ACTIONS[self.rows[-1].action]
        mismatch = f"the replayed job starts with {actual}"
      if mismatch is not None:
        raise TraceError(len(self.rows), event, mismatch)

  def _try_start(self, worker: int) -> None:
    """Starts the worker's next job, if the worker has a job left and the rules
    allow the job's read."""
    state = self._workers[worker]
    if state.started == self._jobs:
      return
    state.waits = not self._start_job(worker)
    if not state.waits:
      event = self.now + state.draw(), self._event_count, worker
      heapq.heappush(self._heap, event)
      self._event_count += 1

  def _start_job(self, worker: int) -> bool:
    """Starts the worker's next job; returns False if the worker must wait."""
    keys, clock, stale = self._inspect_next_job(worker)
    client = self._clients[worker]
    # A worker without stale rows need not wait: it requests no row.
    if stale and self.server.slowest < client.rules.need(clock):
      return False
    if stale:
      self._workers[worker].up += request_bytes(stale)
    for rows in self._answer(worker, clock, stale):
      client.take(rows)
    self._start_ticket(worker, keys, clock, len(self.rows) - 1)
    return True

  def _end_job(self, worker: int) -> None:
    """Computes and ends the worker's job. Delivers the rows that the server
    then sends."""
    push = self._compute(worker)
    for other, rows in self._receive(worker, push).items():
      self._clients[other].take(rows)
