"""A holder of a worker's place, between shards that order by themselves: no
clock, no files.

It has a client for each shard. The rows of shards that are there as a job
begins decide all that follows, which rows it asks for among it. So its record
has their number, for each shard (the column `totals` of SEND and KEEP rows),
written before the job asks any shard.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asgd import base
from asgd.tables import ranges as ranges_lib
from asgd.tables import requests, wire
from asgd.tables.client import Client
from asgd.tables.division import Cuts, Division, Parts
from asgd.tables.messages import Rows
from asgd.tables.requests import JOIN, PULL, PUSH, ClockMessage, JobRecord
from asgd.tables.rows import rms
from asgd.tables.settings import TableSettings, Work

_NOT_KNOWN = float("nan")

# What a holder yields: requests that must be answered before its next step.
Asks = dict[int, bytes]
Steps = Generator[Asks, None, None]


class TableWorker:
  """One holder's clients, and its jobs.

  Its caller runs the steps of `join`, and then of one `job` after the other,
  has each request answered, and gives the replies to its `mail`.
  """

  def __init__(
    self,
    worker: int,
    life: int,
    settings: TableSettings,
    division: Division,
    work: Work,
    *,
    workers: int,
    jobs: int,
    seed: int = 0,
  ):
    """Starts without rows.

    Args:
      worker: its place.
      life: holders of the place before it.
      settings: of the run.
      division: of its tables.
      work: what is computed.
      workers: N.
      jobs: of this place.
      seed: of filters and codecs.
    """
    self.worker, self.jobs = worker, jobs
    self.mail = requests.Mail(worker, life, division.shards)
    settings = settings.of_run(workers, jobs)
    self._settings, self._division, self._work = settings, division, work
    self._workers = workers
    shards, codec = range(division.shards), settings.make_codec()
    key = codec and jax.random.fold_in(jax.random.key(seed), worker)
    self._clients = [
      Client(
        *(worker, division.of_shard(shard), settings.rules),
        filters=settings.filters,
        codec=codec,
        key=codec and jax.random.fold_in(key, shard),
        seed=seed * division.shards + shard,
      )
      for shard in shards
    ]
    self.done = 0  # jobs
    self._clocks = [0 for _ in shards]  # the slowest worker's, as it knows
    self._records: list[JobRecord] = []  # of jobs that no shard has

  @property
  def listens(self) -> bool:
    """Whether shards send rows that the worker did not ask for."""
    return self._settings.rules.by_clock

  def take(self, shard: int, upto: int, *, behind: bool = False) -> None:
    """Takes the rows of a shard before a number; they must be there. Those that
    are `behind` were sent before the shard had its last message."""
    client = self._clients[shard]
    for data in self.mail.open(shard, upto):
      rows = Rows(*wire.load(data))
      (client.take_behind if behind else client.take)(rows)
      self._clocks[shard] = rows.clock

  def _answered(self, shards):
    """Takes what answers the pulls of some shards."""
    for shard in shards:
      self.take(shard, self.mail.replies[shard].upto)

  def join(
    self,
    left: Callable[[int], ClockMessage | None] = lambda done: None,
    begun: Callable[[JobRecord], None] = lambda record: None,
    done: Callable[[JobRecord], None] = lambda record: None,
  ) -> Steps:
    """Takes the place, and resumes after the last message that all shards have
    of it; or that some have, if it is there to be sent to the others.

    Args:
      left: returns the message of a holder before with which so many jobs are
        done, with the records of those jobs that were not received by all, one
        at least; None if there is no such message.
      begun: is called with each of these jobs before anything is sent.
      done: is called with the record of each once all shards have its updates.
    """
    shards = range(self._division.shards)
    yield {shard: self.mail.ask(shard, JOIN) for shard in shards}
    self._set_division(*self.mail.replies[0].division)
    has = [reply.done for reply in self.mail.replies]
    message = left(max(has))
    if message is None:
      self.done = min(has)
      return
    self.done = message.done
    for record in message.records:
      begun(record)
    asks = {
      shard: self.mail.ask(
        *(shard, PUSH, message.clock, message.done),
        self._clients[shard].again(message.shards[shard]),
      )
      for shard in shards
      if has[shard] < message.done
    }
    if asks:
      yield asks
    for record in self._answered_push(message.records, asks):
      done(record)

  @property
  def next(self) -> int | None:
    """The job that it does next, None if it has done all."""
    if self.done >= self.jobs:
      return None
    return self.done * self._workers + self.worker

  # Other ranges.

  @property
  def rests(self) -> bool:
    """Whether it waits for the next division of the tables: it has ended the
    clock after which they are divided anew."""
    settings, division = self._settings, self._division
    every = settings.rebalance_every * settings.clock_every
    if not every or division.shards == 1 or self.next is None:
      return False
    return self.done >= (division.version + 1) * every

  def divide(self, cuts: Cuts) -> None:
    """Takes other ranges of keys. All rows that shards sent must be here: they
    are taken, and copies and updates of rows move to the clients of their new
    shards."""
    for shard in range(self._division.shards):
      self.take(shard, self.mail.there(shard))
    before, self._division = self._division, self._division.next(cuts)
    for name, after in self._division.ranges.items():
      moves = ranges_lib.moves(before.ranges[name], after)
      # Taken out before anything is put in: a range may go through a shard.
      parts = [self._clients[move.source].cut(name, *move[:2])
        for move in moves]
      for move, part in zip(moves, parts, strict=True):
        self._clients[move.target].join(name, part)

  def _set_division(self, version, cuts):
    """Begins with a division that others have made."""
    if version:
      division = self._division.next(cuts)
      self._division = division._replace(version=version)

  # Jobs.

  def job(
    self,
    begun: Callable[[int], None],
    done: Callable[[JobRecord], None],
    change: Callable[[Any], Any] = lambda gradient: gradient,
    sends: Callable[[ClockMessage], None] = lambda message: None,
  ) -> Steps:
    """Does the next job.

    Args:
      begun: is called with SEND if rows have to be asked for, else KEEP.
      done: is called with the record of each job whose updates all shards have.
      change: what becomes of a gradient; faults are there.
      sends: is called with each message before any shard has it.

    Raises:
      ValueError: for an update that is not finite; nothing is sent then.
    """
    job, settings = self.next, self._settings
    batch = self._work.batch(self.worker, job)
    keys = self._work.keys(batch)
    parts = self._division.split(keys)
    clock = self.done // settings.clock_every
    for client in self._clients:
      client.factor = settings.factor(clock)
    asks = self._stale(parts, clock)
    begun(base.SEND if asks else base.KEEP)
    late = []
    if settings.rules.by_clock:
      need = settings.rules.need(clock)
      late = [shard for shard in asks if self._clocks[shard] < need]
    if late:
      # What they lack was changed before the clock advances: it is sent then.
      yield {shard: self.mail.ask(shard, PULL, clock) for shard in late}
      self._answered(late)
      asks = self._stale(parts, clock)
    if settings.rules.by_value:
      asks = {shard: asks.get(shard, {}) for shard in range(len(parts))}
    if asks:
      yield {
        shard: self.mail.ask(shard, PULL, clock, tables=tables)
        for shard, tables in asks.items()
      }
      self._answered(asks)
    values, reads, oldest = self._read(keys, parts, clock)
    loss, gradient = self._work.gradient(values, batch, keys, self.worker, job)
    size = self._write(keys, change(gradient), clock)
    self.done += 1
    record = JobRecord(
      *(self._version, self.worker, job, oldest, _NOT_KNOWN, loss, True),
      *(size, 0.0, 0, 0, 0.0, reads),
    )
    ends, pushes = settings.clock_of_message(self.done, self.jobs), []
    if ends is not None:
      last = self.done == self.jobs
      pushes = [x.flush(ends, everything=last) for x in self._clients]
    squares = [client.residual() ** 2 for client in self._clients]
    record = record._replace(residual_norm=float(np.sqrt(np.mean(squares))))
    if not pushes:
      self._records.append(self._with_bytes(record))
      return
    asks = {
      shard: self.mail.ask(shard, PUSH, push.clock, self.done, push.tables)
      for shard, push in enumerate(pushes)
    }
    records = [*self._records, self._with_bytes(record)]
    self._records = []
    shards = [
      client.with_keys(push)
      for client, push in zip(self._clients, pushes, strict=True)
    ]
    sends(ClockMessage(ends, self.done, shards, records))
    yield asks
    for each in self._answered_push(records, asks):
      done(each)

  def _with_bytes(self, record):
    """A record with what has been sent and taken since the last one."""
    up, down = self.mail.count()
    return record._replace(
      bytes_up=record.bytes_up + up, bytes_down=record.bytes_down + down
    )

  def _answered_push(self, records, shards):
    """Takes what came with the answers of some shards to a push; returns its
    records, the last with the size of the change."""
    for shard in shards:
      self.take(shard, self.mail.replies[shard].upto, behind=True)
    *before, last = records
    last = last._replace(update=self._version, update_norm=self.mail.change())
    return [*before, self._with_bytes(last)]

  @property
  def _version(self):
    return self.mail.replies[0].version

  def _stale(self, parts: Sequence[Parts], clock):
    """Returns the keys to be asked for, of the shards that have some."""
    asks = {}
    for shard, part in enumerate(parts):
      keys = {name: each for name, (_, each) in part.items()}
      if stale := self._clients[shard].stale(keys, clock):
        asks[shard] = stale
    return asks

  def _read(self, keys, parts, clock):
    values = {
      name: np.empty((len(each), *spec.shape), spec.dtype)
      for name, each in keys.items()
      for spec in [self._division.specs[name]]
    }
    every = [np.zeros(0, np.int64)]
    for client, part in zip(self._clients, parts, strict=True):
      mine = {name: each for name, (_, each) in part.items()}
      for name, rows in client.read(mine).items():
        values[name][part[name][0]] = rows
        every.append(clock - client.clocks(name, mine[name]))
    ages = np.concatenate(every).clip(min=0)
    bins = ages.clip(max=requests.BINS - 1)
    reads = np.bincount(bins, minlength=requests.BINS)
    return values, reads, int(ages.max(initial=0))

  def _write(self, keys, gradient, clock):
    """Keeps updates as its own; returns the RMS of the gradient."""
    written = self._settings.written(clock, keys, gradient)
    parts = self._division.split({k: mine for k, (mine, _) in written.items()})
    for client, part in zip(self._clients, parts, strict=True):
      client.write(
        {
          name: (mine, written[name][1][at])
          for name, (at, mine) in part.items()
        }
      )
    return rms(gradient.values())

  def held(self) -> tuple[int, int]:
    """(rows that filters held back for later, rows that they dropped)."""
    both = [client.held for client in self._clients]
    return sum(h.back for h in both), sum(h.dropped for h in both)

  # Images, between two jobs of different clocks.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "clients": [client.pack() for client in self._clients],
      "mail": self.mail.pack(),
      "done": self.done,
      "clocks": self._clocks,
      "division": [
        self._division.version,
        {name: each.cuts for name, each in self._division.ranges.items()},
      ],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it has packed."""
    for client, packed in zip(self._clients, tree["clients"], strict=True):
      client.unpack(packed)
    self.mail.unpack(tree["mail"])
    self.done, self._clocks = tree["done"], list(tree["clocks"])
    self._set_division(*tree["division"])
