"""One incarnation of a worker, between independent shards: no clock, no files.

The worker has a client for each shard. The rows that it has taken when a job
begins determine the rest of the job, such as the rows that it pulls. So the
SEND or KEEP row of a job's start has, for each shard, the number of rows taken
(the column `totals`). The caller writes that row before the job sends a
request.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asgd import base
from asgd.tables import ranges as ranges_lib
from asgd.tables import requests, wire
from asgd.tables.bandwidth import free_after
from asgd.tables.client import Client
from asgd.tables.division import Cuts, Division, Parts
from asgd.tables.keys import Keys
from asgd.tables.messages import Push, Rows
from asgd.tables.requests import JOIN, PULL, PUSH, ClockMessage, JobRecord
from asgd.tables.rows import rms
from asgd.tables.settings import TableSettings, Values, Work

_UNKNOWN_GAP = float("nan")

# Shard -> request. The caller sends all of them, and resumes the generator
# after all replies.
ShardRequests = dict[int, bytes]
Steps = Generator[ShardRequests, None, None]


def _with_bytes(record: JobRecord, up: int, down: int) -> JobRecord:
  """Returns a record with more bytes sent and taken."""
  return record._replace(
    bytes_up=record.bytes_up + up, bytes_down=record.bytes_down + down
  )


def _read(
  clients: Sequence[Client],
  division: Division,
  keys: Mapping[str, Keys],
  parts: Sequence[Parts],
  clock: int,
) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
  """Returns the values of rows, the counts of rows by clock differential, and
  the age of the oldest row in clocks."""
  values = {
    name: np.empty(
      (len(table_keys), *division.specs[name].shape), division.specs[name].dtype
    )
    for name, table_keys in keys.items()
  }
  ages_by_part = [np.zeros(0, np.int64)]
  for client, part in zip(clients, parts, strict=True):
    part_keys = {name: table_keys for name, (_, table_keys) in part.items()}
    for name, rows in client.read(part_keys).items():
      values[name][part[name][0]] = rows
      ages_by_part.append(clock - client.clocks(name, part_keys[name]))
  # A row may be newer than the worker's clock; it counts as age 0.
  ages = np.concatenate(ages_by_part).clip(min=0)
  bins = ages.clip(max=requests.BINS - 1)
  reads = np.bincount(bins, minlength=requests.BINS)
  return values, reads, int(ages.max(initial=0))


class TableWorker:
  """The clients and jobs of one incarnation of a worker.

  The caller runs the steps of `join`, then the steps of one `job` after the
  other. It sends the requests that each step yields, and passes the replies to
  `sessions`.

      join -> [PUSH]              resends an earlier incarnation's last message
      job  -> [PULL] [PULL] PUSH  waits for a clock, pulls, computes, pushes
  """

  def __init__(
    self,
    worker: int,
    incarnation: int,
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
      worker: the index of the worker.
      incarnation: the incarnation of the worker, counted from 0.
      settings: the settings of the run.
      division: the division of the tables.
      work: the work of the worker.
      workers: N.
      jobs: the number of jobs of this worker.
      seed: the seed of filters and codecs.
    """
    self.worker, self.jobs = worker, jobs
    self.sessions = requests.ShardSessions(worker, incarnation, division.shards)
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
        key_caching=settings.key_caching,
        key=codec and jax.random.fold_in(key, shard),
        seed=seed * division.shards + shard,
      )
      for shard in shards
    ]
    self.done = 0  # jobs finished by the worker, earlier incarnations included
    self._clocks = [0 for _ in shards]  # slowest worker's, in the last rows
    self._records: list[JobRecord] = []  # of jobs of the unfinished clock
    self._link_free = 0.0  # time at which its messages so far have been sent

  @property
  def gets_server_push(self) -> bool:
    """Whether shards send rows that the worker did not request."""
    return self._settings.rules.by_clock

  def take(self, shard: int, upto: int, *, behind: bool = False) -> None:
    """Takes the rows of a shard before the number `upto`, which must have
    arrived. `behind`: the shard sent these rows before it had the worker's last
    message."""
    client = self._clients[shard]
    for data in self.sessions.take(shard, upto):
      rows = Rows(*wire.load(data))
      (client.take_behind if behind else client.take)(rows)
      self._clocks[shard] = rows.clock

  def _take_replies(self, shards: Iterable[int]) -> None:
    """Takes the rows of some shards' replies to pulls."""
    for shard in shards:
      self.take(shard, self.sessions.replies[shard].upto)

  def join(
    self,
    find_saved: Callable[[int], ClockMessage | None] = lambda n_done: None,
    on_start: Callable[[JobRecord], None] = lambda record: None,
    on_done: Callable[[JobRecord], None] = lambda record: None,
  ) -> Steps:
    """Joins all shards, and resumes after the last message that all of them
    have. If only some shards have the last message, and it was saved, the
    worker sends it to the other shards.

    Args:
      find_saved: (number of jobs done) -> the saved message of an earlier
        incarnation, or None. The message has at least one record: those of the
        jobs that the incarnation had not reported.
      on_start: called with each of these records before a request is sent.
      on_done: called with each record once all shards have the job's updates.
    """
    shards = range(self._division.shards)
    yield {shard: self.sessions.ask(shard, JOIN) for shard in shards}
    self._set_division(*self.sessions.replies[0].division)
    counts = [reply.done for reply in self.sessions.replies]
    message = find_saved(max(counts))
    if message is None:
      # Jobs that only some shards have are computed again.
      self.done = min(counts)
      return
    self.done = message.done
    for record in message.records:
      on_start(record)
    push_requests = {
      shard: self.sessions.ask(
        *(shard, PUSH, message.clock, message.done),
        self._clients[shard].resend(message.shards[shard]),
      )
      for shard in shards
      if counts[shard] < message.done
    }
    if push_requests:
      yield push_requests
    for record in self._finish_push(message.records, push_requests):
      on_done(record)

  @property
  def next_job(self) -> int | None:
    """The index of the next job; None if all jobs are done."""
    if self.done >= self.jobs:
      return None
    return self.done * self._workers + self.worker

  # Moving ranges of keys between shards.

  @property
  def must_rest(self) -> bool:
    """Whether the worker waits for the next division of the tables."""
    settings, division = self._settings, self._division
    jobs_between = settings.rebalance_every * settings.clock_every
    if not jobs_between or division.shards == 1 or self.next_job is None:
      return False
    return self.done >= (division.version + 1) * jobs_between

  def divide(self, cuts: Cuts) -> None:
    """Adopts the next division: takes all rows that shards have sent, which
    must have arrived, then moves rows to the clients of their new shards."""
    for shard in range(self._division.shards):
      self.take(shard, self.sessions.available(shard))
    old_division, self._division = self._division, self._division.next(cuts)
    for name, new_ranges in self._division.ranges.items():
      moves = ranges_lib.moves(old_division.ranges[name], new_ranges)
      # Cut all ranges before joining any: a shard may both give and get rows.
      parts = [self._clients[m.source].cut(name, *m[:2]) for m in moves]
      for move, part in zip(moves, parts, strict=True):
        self._clients[move.target].join(name, part)

  def _set_division(self, version: int, cuts: Cuts) -> None:
    """Adopts the division that the shards have; version 0 is the first."""
    if version:
      division = self._division.next(cuts)
      self._division = division._replace(version=version)

  # Jobs.

  def job(
    self,
    on_start: Callable[[int], float],
    on_done: Callable[[JobRecord], None],
    alter_gradient: Callable[[Any], Any] = lambda gradient: gradient,
    on_send: Callable[[ClockMessage], None] = lambda message: None,
  ) -> Steps:
    """Does the next job, in steps.

    Args:
      on_start: called with SEND if the job requests rows, else with KEEP;
        returns the time of the job's start in the trace.
      on_done: called with the record of each job once all shards have the job's
        updates.
      alter_gradient: applied to the gradient, to inject faults.
      on_send: called with each message before it is sent to any shard.

    Raises:
      ValueError: for an update that is not finite; nothing is sent then.
    """
    job, settings = self.next_job, self._settings
    batch = self._work.batch(self.worker, job)
    keys = self._work.keys(batch)
    parts = self._division.split(keys)
    clock = self.done // settings.clock_every
    for client in self._clients:  # the learning rate may change per clock
      client.factor = settings.factor(clock)
    stale_keys = self._stale_keys(parts, clock)
    start_time = on_start(base.SEND if stale_keys else base.KEEP)

    # [1] With server push, wait until all shards have the needed clock.
    late_shards = []
    if settings.rules.by_clock:
      required_clock = settings.rules.need(clock)
      late_shards = [s for s in stale_keys if self._clocks[s] < required_clock]
    if late_shards:
      # A pull without keys is answered when the clock has advanced. The server
      # push of that clock has the changed rows, which need no pull.
      yield {s: self.sessions.ask(s, PULL, clock) for s in late_shards}
      self._take_replies(late_shards)
      stale_keys = self._stale_keys(parts, clock)

    # [2] Pull stale rows. Under value_bounded every shard gets a request: the
    # copies of its rows may lack too much even if no row is stale.
    if settings.rules.by_value:
      shards = range(len(parts))
      stale_keys = {shard: stale_keys.get(shard, {}) for shard in shards}
    if stale_keys:
      yield {
        shard: self.sessions.ask(shard, PULL, clock, tables=tables)
        for shard, tables in stale_keys.items()
      }
      self._take_replies(stale_keys)

    # [3] Read the rows, compute, and write the updates to the clients.
    values, reads, oldest = _read(
      self._clients, self._division, keys, parts, clock
    )
    loss, gradient = self._work.gradient(values, batch, keys, self.worker, job)
    norm = self._write_updates(keys, alter_gradient(gradient), clock)
    self.done += 1
    record = JobRecord(
      *(self._version, self.worker, job, oldest, _UNKNOWN_GAP, loss, True),
      *(norm, 0.0, 0, 0, 0.0, reads),
    )

    # [4] If the job ends a clock, push the updates of the clock to all shards.
    pushes = self._flush(start_time)
    squares = [client.residual() ** 2 for client in self._clients]
    record = record._replace(residual_norm=float(np.sqrt(np.mean(squares))))
    # The bytes of a push are counted for the job that ends the clock.
    push_requests = {
      shard: self.sessions.ask(shard, PUSH, push.clock, self.done, push.tables)
      for shard, push in enumerate(pushes)
    }
    self._records.append(_with_bytes(record, *self.sessions.count()))
    if push_requests:
      yield from self._push(pushes, push_requests, on_done, on_send)

  def _flush(self, start_time: float) -> list[Push]:
    """Returns a push for each shard after a job that began at `start_time`; []
    if the worker sends no message then."""
    settings, counts = self._settings, (self.done, self.jobs)
    clock = settings.clock_of_message(
      *counts, link_is_free=start_time >= self._link_free
    )
    if clock is None:
      return []
    everything = settings.sends_everything(*counts)
    pushes = [
      client.flush(clock, everything=everything) for client in self._clients
    ]
    nbytes = sum(push.nbytes for push in pushes)
    self._link_free = free_after(
      self._link_free, start_time, nbytes, settings.bandwidth
    )
    return pushes

  def _push(
    self,
    pushes: Sequence[Push],
    push_requests: ShardRequests,
    on_done: Callable[[JobRecord], None],
    on_send: Callable[[ClockMessage], None],
  ) -> Steps:
    """Sends a push to each shard, and reports the records of its jobs."""
    records, self._records = self._records, []
    shards = [
      client.with_keys(push)
      for client, push in zip(self._clients, pushes, strict=True)
    ]
    on_send(ClockMessage(pushes[0].clock, self.done, shards, records))
    yield push_requests
    for record in self._finish_push(records, push_requests):
      on_done(record)

  def _finish_push(
    self, records: Sequence[JobRecord], shards: Iterable[int]
  ) -> list[JobRecord]:
    """Takes the rows of the shards' replies to a push. Returns the push's
    records; the last one has the norm of the change (`update_norm`)."""
    for shard in shards:
      self.take(shard, self.sessions.replies[shard].upto, behind=True)
    *earlier_records, last_record = records
    change = self.sessions.change()
    last_record = last_record._replace(update=self._version, update_norm=change)
    return [*earlier_records, _with_bytes(last_record, *self.sessions.count())]

  @property
  def _version(self) -> int:
    """Messages that shard 0 has applied, as of its last reply."""
    return self.sessions.replies[0].version

  def _stale_keys(
    self, parts: Sequence[Parts], clock: int
  ) -> dict[int, dict[str, Keys]]:
    """Returns shard -> keys to pull; a shard without such keys is left out."""
    keys_by_shard = {}
    for shard, part in enumerate(parts):
      keys = {name: table_keys for name, (_, table_keys) in part.items()}
      if stale := self._clients[shard].stale(keys, clock):
        keys_by_shard[shard] = stale
    return keys_by_shard

  def _write_updates(
    self, keys: Mapping[str, Keys], gradient: Values, clock: int
  ) -> float:
    """Writes updates to the clients. Returns the RMS of the gradient."""
    written = self._settings.written(clock, keys, gradient)
    parts = self._division.split(
      {name: table_keys for name, (table_keys, _) in written.items()}
    )
    for client, part in zip(self._clients, parts, strict=True):
      client.write(
        {
          name: (part_keys, written[name][1][positions])
          for name, (positions, part_keys) in part.items()
        }
      )
    return rms(gradient.values())

  def held_counts(self) -> tuple[int, int]:
    """Returns counts of rows: (held back by filters, dropped by filters)."""
    counts = [client.held for client in self._clients]
    n_held_back, n_dropped = map(sum, zip(*counts, strict=True))
    return n_held_back, n_dropped

  # Images, between two jobs of different clocks.

  def pack(self) -> dict[str, Any]:
    """Returns the worker as a tree of arrays and JSON."""
    return {
      "clients": [client.pack() for client in self._clients],
      "mail": self.sessions.pack(),
      "done": self.done,
      "clocks": self._clocks,
      "link_free": self._link_free,
      "division": [
        self._division.version,
        {name: ranges.cuts for name, ranges in self._division.ranges.items()},
      ],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a worker with the same arguments."""
    for client, packed in zip(self._clients, tree["clients"], strict=True):
      client.unpack(packed)
    self.sessions.unpack(tree["mail"])
    self.done, self._clocks = tree["done"], list(tree["clocks"])
    self._link_free = tree.get("link_free", 0.0)  # not in earlier images
    self._set_division(*tree["division"])
