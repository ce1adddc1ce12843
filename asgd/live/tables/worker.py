"""A worker in its host: its jobs, its files, and its ways to shards.

It works as long as it can, in one call (`run`), which ends when a shard is
gone: the driver then calls again, and says where that one is.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import base
from asgd.live import pace
from asgd.live.faults import Script
from asgd.live.hosts import Call, Gone, Host, Inside
from asgd.live.spans import Span
from asgd.live.tables import files
from asgd.orders.trace import NO_SEQ, STARTS, Event
from asgd.tables import wire
from asgd.tables.client import RowNotFinite
from asgd.tables.division import Cuts
from asgd.tables.job_records import ClockMessage, JobRecord
from asgd.tables.work import Work
from asgd.tables.worker import TableWorker

# How `run` ends; LOST with the number of a shard, HALTED at a limit, RESTS as
# tables are to be divided anew.
ENDED, HALTED, LOST, RESTS = "ended", "halted", "lost", "rests"
REJECTED, EXPELLED = "rejected", "expelled"


class Moved(NamedTuple):
  """What a worker that rests is told as ranges have moved."""

  cuts: Cuts
  # Of each shard: (number, Rows) that it may not have yet.
  rows: Sequence[Sequence[tuple[int, bytes]]]


class WorkerHost:
  """A holder of a worker's place."""

  def __init__(
    self,
    inside: Inside,
    make: Callable[[int, Work], TableWorker],
    work: Work,
    run: Path,
    index: int,
    *,
    shards: Mapping[int, Host],
    script: Script,
    listens: bool,
    slowdown: float = 1.0,
    span: Callable[[int, Span], None] | None = None,
    memory: Path | None = None,
    image: bytes | None = None,
  ):
    """Takes a place, or goes on.

    Args:
      inside: of the host.
      make: (life, work) -> a holder without rows.
      work: what is computed.
      run: the folder of the run.
      index: its place.
      shards: where they are.
      script: of faults.
      listens: whether shards send rows that it did not ask for.
      slowdown: factor on the time that a job takes.
      span: is told of stretches of time.
      memory: the folder of the run's memory; None: if it dies, its last message
        does.
      image: of a run that goes on.
    """
    self._inside, self._index, self._script = inside, index, script
    self._shards, self._listens = dict(shards), listens
    self._slowdown, self._span = slowdown, span or (lambda *_: None)
    self._journal, self._sink = files.open_files(run, index, inside.disk)
    events = self._journal.events()
    self._seq = sum(event.action in STARTS for event in events)
    self._time = events[-1].time if events else 0.0
    self._open: list[tuple[int, int]] = []  # (seq, job) that no shard has
    self._work = work
    lives = files.lives_of(events)
    is_new = image is None
    life = lives if is_new else lives - 1
    self._worker = make(life, work._replace(gradient=self._gradient))
    self._last = None
    if memory:
      self._last = files.LastMessage(memory, index, life, inside.disk)
    self._steps: Any = None
    self._asks: dict[int, bytes] = {}  # that were not answered
    self._asked: dict[int, Call] = {}  # the calls that ask them, by shard
    self._calls: dict[int, Call] = {}  # that listen, by shard
    self._limit: int | None = None
    self._free = self._inside.clock()
    if is_new:
      self._write(NO_SEQ, lives, base.JOIN)
      join = self._worker.join(self._left, self._begun_again, self._received)
      self._go_on(join)
    else:
      self._worker.unpack(wire.load(image))

  def _write(self, seq, job, action, **fields):
    self._inside.wait(0.0)  # who was killed writes no more
    self._time = max(self._inside.clock(), self._time)
    row = Event(self._time, self._index, seq, job, action, **fields)
    self._journal.append(row)
    return self._time

  # What the driver calls.

  def run(
    self,
    limit: int | None,
    found: Mapping[int, Host] | None = None,
    ranges: Moved | None = None,
  ) -> tuple[str, int]:
    """Works until all jobs are done, or so many, or it cannot go on; returns
    how it ended, and which shard is gone. `found` has the shards that were
    started again, where they are now: they come with the call, as calls may be
    made in another order. So do other ranges, for which it has rested."""
    self._limit = limit
    for shard, host in (found or {}).items():
      self._shards[shard] = host
      self._asked.pop(shard, None)
      self._calls.pop(shard, None)
    if ranges is not None:
      for shard, rows in enumerate(ranges.rows):
        self._worker.mail.hear_rows(shard, rows)
      self._worker.divide(ranges.cuts)
    try:
      return self._run(), 0
    except Gone as gone:
      return LOST, gone.index
    except RowNotFinite:
      for seq, job in self._open:
        last = (seq, job) == self._open[-1]
        self._write(seq, job, base.REJECT if last else base.LOST)
      self._open = []
      return REJECTED, 0

  def _run(self):
    while True:
      if self._steps is not None:
        if not self._answer():
          return EXPELLED
        self._go_on(self._steps)
        continue
      worker = self._worker
      if worker.next is None:
        return ENDED
      if worker.rests:
        return RESTS
      if self._limit is not None and worker.done >= self._limit:
        return HALTED
      self._take()
      told = self._begun, self._received, self._spoil, self._sends
      self._go_on(worker.job(*told))

  def image(self) -> tuple[int, int, bytes]:
    """Returns (rows of its journal, records, it as bytes), between clocks."""
    counts = len(self._journal.events()), self._sink.count
    return *counts, wire.dump(self._worker.pack())

  def held(self) -> tuple[int, int]:
    """(rows that filters held back for later, rows that they dropped)."""
    return self._worker.held()

  # Requests.

  def _go_on(self, steps):
    asks = next(steps, None)
    self._steps = None if asks is None else steps
    self._asks = dict(asks or {})

  def _answer(self) -> bool:
    """Has all that it asks answered; False if another has its place."""
    for shard, data in self._asks.items():
      if shard not in self._asked:
        self._asked[shard] = self._shards[shard].call("hear", data)
    # In the order of shards, and a lost one is asked again before the answers
    # of others are waited for. A shard may answer a push only after other
    # workers have pushed; two that had left out different shards, and waited at
    # the others, would wait for each other.
    for shard in [*self._asks]:
      reply = self._asked.pop(shard).result()
      if reply.number < 0:
        return False
      self._worker.mail.hear(shard, reply)
      del self._asks[shard]
      if shard == 0:
        self._limit = reply.limit
    for shard in self._shards:
      while self._worker.mail.lacks(shard):
        self._listen(shard)
        self._hear_rows(shard)
    return True

  def _listen(self, shard):
    """Has a call at a shard, that ends when there are rows."""
    if shard not in self._calls:
      have = self._worker.mail.there(shard)
      asked = self._index, self._worker.mail.life, have
      self._calls[shard] = self._shards[shard].call("listen", *asked)

  def _hear_rows(self, shard):
    call = self._calls.pop(shard)
    self._worker.mail.hear_rows(shard, call.result())

  def _take(self):
    """Takes the rows that have come."""
    for shard in self._shards:
      if self._listens:
        if shard in self._calls and self._calls[shard].done():
          self._hear_rows(shard)
        self._listen(shard)
      self._worker.take(shard, self._worker.mail.there(shard))

  # A job.

  def _begun(self, action):
    worker, seq = self._worker, self._seq
    job, taken = worker.next, tuple(map(float, worker.mail.taken))
    self._begin(seq, job, action, totals=taken)

  def _begin(self, seq, job, action, **fields):
    time = self._write(seq, job, action, **fields)
    self._seq += 1
    self._open.append((seq, job))
    self._row = Event(time, self._index, seq, job, action)

  def _gradient(self, rows, batch, keys, worker, job):
    seq, _ = self._open[-1]
    self._script.before_work(worker, seq)
    began = self._inside.clock()
    self._span(worker, Span("fetch", self._free, began, seq, job))
    out = self._work.gradient(rows, batch, keys, worker, job)
    clock, wait = self._inside.clock, self._inside.wait
    pace.slow_down(self._slowdown, began, clock=clock, wait=wait)
    wait(0.0)  # a worker that was killed meanwhile sends nothing
    self._free = clock()
    self._span(worker, Span("compute", began, self._free, seq, job))
    return out

  def _spoil(self, gradient):
    seq, _ = self._open[-1]
    return self._script.message(self._index, seq, gradient)

  def _sends(self, message: ClockMessage):
    if self._last:
      self._last.write(self._row, message)

  # Of the holder before.

  def _left(self, done: int) -> ClockMessage | None:
    """Its message with which so many jobs are done, if that is there and was
    not received by all."""
    events = self._journal.events()
    left = self._last.read(events) if self._last else None
    if left is None or left[1].done != done:
      return None
    row, message = left
    received = {e.job for e in events if e.action == base.RECEIVE}
    records = [r for r in message.records if r.job not in received]
    if not records:
      return None
    self._last.write(row, message)
    return message._replace(records=records)

  def _begun_again(self, record: JobRecord):
    self._begin(self._seq, record.job, base.SEND)

  def _received(self, record: JobRecord):
    seq, job = self._open.pop(0)
    time = self._write(seq, job, base.RECEIVE, loss=record.loss)
    self._sink.append(files.columns([(time, record)]))
    began, self._free = self._free, time
    self._span(self._index, Span("push", began, time, seq, job))
