"""A worker in its host: its jobs, and its calls to shards.

It works as long as it can, in one call (`run`), which ends when a shard is
gone: the driver then calls again, and says where that one is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import base
from asgd.live import pace
from asgd.live.faults import Script
from asgd.live.hosts import Call, Gone, Host, Inside
from asgd.live.tables.job_journal import JobJournal
from asgd.tables import wire
from asgd.tables.client import RowNotFinite
from asgd.tables.division import Cuts
from asgd.tables.requests import JobRecord
from asgd.tables.settings import Work
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
    journal: JobJournal,
    *,
    shards: Mapping[int, Host],
    script: Script,
    slowdown: float = 1.0,
    image: bytes | None = None,
  ):
    """Begins a worker, or continues one.

    Args:
      inside: of the host.
      make: (life, work) -> a worker without rows.
      work: what is computed.
      journal: the worker's files.
      shards: their hosts, by number.
      script: of faults.
      slowdown: factor on the time that a job takes.
      image: of the worker at an earlier time, which continues from it; its
        journal `resumes`.
    """
    self._inside, self._journal, self._script = inside, journal, script
    self._shards, self._slowdown, self._work = dict(shards), slowdown, work
    self._worker = make(journal.life, work._replace(gradient=self._gradient))
    self._steps: Any = None
    self._asks: dict[int, bytes] = {}  # that were not answered
    self._asked: dict[int, Call] = {}  # the calls that ask them, by shard
    self._calls: dict[int, Call] = {}  # that listen, by shard
    self._limit: int | None = None
    self._free = self._inside.clock()
    if image is None:
      journal.join()
      self._go_on(
        self._worker.join(journal.left, self._begun_again, self._received)
      )
    else:
      self._worker.unpack(wire.load(image))

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
      self._journal.reject()
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
      self._go_on(
        worker.job(
          self._begun, self._received, self._spoil, self._journal.keep
        )
      )

  def image(self) -> tuple[int, int, bytes]:
    """Returns (rows of its journal, records, it as bytes), between clocks."""
    return *self._journal.counts(), wire.dump(self._worker.pack())

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
      asked = self._journal.index, self._worker.mail.life, have
      self._calls[shard] = self._shards[shard].call("listen", *asked)

  def _hear_rows(self, shard):
    call = self._calls.pop(shard)
    self._worker.mail.hear_rows(shard, call.result())

  def _take(self):
    """Takes the rows that have come."""
    for shard in self._shards:
      if self._worker.listens:
        if shard in self._calls and self._calls[shard].done():
          self._hear_rows(shard)
        self._listen(shard)
      self._worker.take(shard, self._worker.mail.there(shard))

  # A job.

  def _begun(self, action):
    taken = tuple(map(float, self._worker.mail.taken))
    self._journal.begin(self._worker.next, action, totals=taken)

  def _gradient(self, rows, batch, keys, worker, job):
    seq = self._journal.seq
    self._script.before_work(worker, seq)
    began = self._inside.clock()
    self._journal.span("fetch", self._free, began, seq, job)
    out = self._work.gradient(rows, batch, keys, worker, job)
    clock, wait = self._inside.clock, self._inside.wait
    pace.slow_down(self._slowdown, began, clock=clock, wait=wait)
    wait(0.0)  # a worker that was killed meanwhile sends nothing
    self._free = clock()
    self._journal.span("compute", began, self._free, seq, job)
    return out

  def _spoil(self, gradient):
    journal = self._journal
    return self._script.message(journal.index, journal.seq, gradient)

  def _begun_again(self, record: JobRecord):
    self._journal.begin(record.job, base.SEND)

  def _received(self, record: JobRecord):
    seq, time = self._journal.receive(record)
    began, self._free = self._free, time
    self._journal.span("push", began, time, seq, record.job)
