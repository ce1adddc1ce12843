"""Runs of live tables in a world: scenarios, the driver, and what must hold.

Job j adds 2^j to the rows that it is done on, so the sum of a row says which
jobs it has, and that it has each of them once.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, safe_files, tables
from asgd.live.journal import journal_path, read_journal
from asgd.live.tables import files
from asgd.live.tables.cluster import Images, Makers, TableCluster
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.live.world.broken import refused, require
from asgd.live.world.injections import Menu, Scenario
from asgd.live.world.run import COMMON, LADDER, WorldRun, WorldScript
from asgd.tables import division as division_lib
from asgd.tables import replay
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker

WORKERS, JOBS = 3, 6  # jobs of each worker
ROWS = 7
_EVERY = 2  # jobs in a clock
KINDS = tuple(COMMON)
INVARIANTS = (
  "every job is applied once",
  "every job is received once",
  "the order is allowed",
  "the replay has the same bits",
  "records are those of the replay",
  "it ends in bounded time",
  "no error without a reason",
)


class TableCase(NamedTuple):
  """A run without its faults."""

  consistency: str
  bound: int | None = None
  shards: int = 2
  rebalance_every: int = 0
  options: tuple[tuple[str, Any], ...] = ()
  kills: bool = True  # as processes; False: as threads

  @property
  def settings(self) -> tables.TableSettings:
    """Of the run."""
    return tables.table(
      *(1.0, WORKERS),
      consistency=self.consistency,
      bound=self.bound,
      clock_every=_EVERY,
      shards=self.shards,
      rebalance_every=self.rebalance_every,
      **dict(self.options),
    )


CASES = (
  TableCase("bulk_synchronous"),
  TableCase("ssp", 1),
  TableCase("ssp", 1, kills=False),
  TableCase("ssp", 0, shards=1),
  TableCase("ssp", 1, rebalance_every=1),
  TableCase("essp", 1),
  TableCase("essp", 1, shards=3, kills=False),
  TableCase("essp", 2, rebalance_every=1),
  TableCase("managed", 1, options=(("budget", 4),)),
  TableCase("delay_bounded", 1),
  TableCase("value_bounded", options=(("threshold", 1000.0),)),
  TableCase("asynchronous", shards=3),
)


def first() -> dict[str, np.ndarray]:
  """Returns the tables before the first push."""
  return {"v": np.zeros((ROWS, 2)), "w": np.zeros((2, 1))}


def keys(job: int) -> dict[str, np.ndarray]:
  """Returns the keys of the rows that a job is done on."""
  return {"v": np.arange(job % 3, ROWS, 2), "w": np.array([job % 2])}


def _whole():
  """All jobs, once each."""
  out = first()
  for job in range(WORKERS * JOBS):
    for name, mine in keys(job).items():
      out[name][mine] += 2.0**job
  return out


def _gradient(rows, job, keys, worker, number):
  del keys, worker, number
  ones = {name: np.full_like(x, -(2.0**job)) for name, x in rows.items()}
  return float(job), ones


_WORK = tables.Work(lambda worker, job: job, keys, _gradient)


class TablesRun(WorldRun):
  """One scenario of live tables."""

  INVARIANTS, INJECT, SAVES = INVARIANTS, COMMON, 4
  FLIPPED = "shard-*/[ms]*s", "*.message"

  def __init__(self, drawn: Scenario, folder: Path):
    super().__init__(drawn, folder)
    self._settings = drawn.case.settings
    self._division = division_lib.divide(first(), self._settings.shards)
    # A checkpoint: images, (rows, records) of each worker.
    self._saved: tuple[Images, list[tuple[int, int]]] | None = None
    self._cluster: TableCluster | None = None
    self._rows: list[Mapping[str, np.ndarray]] = []  # of each shard, at the end

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(CASES, KINDS, WORKERS, WORKERS * JOBS)

  # Objects in hosts.

  def _shard(self, index, image):
    def make():
      server = self._division.server(index, first(), self._settings, WORKERS)
      return TableShard(index, server)

    return lambda inside: ShardHost(
      *(inside, make, self.folder, self.memory, index),
      every=_EVERY,
      image=image,
    )

  def _worker(self, index, shards, image):
    def gradient(rows, job, *rest):
      self.work(job)
      return _gradient(rows, job, *rest)

    def make(life, work):
      return TableWorker(
        *(index, life, self._settings, self._division, work),
        workers=WORKERS,
        jobs=JOBS,
      )

    return lambda inside: WorkerHost(
      *(inside, make, _WORK._replace(gradient=gradient)),
      JobJournal(
        *(inside, self.folder, index),
        resumes=image is not None,
        memory=self.memory,
      ),
      shards=shards,
      script=WorldScript(self.world),
      image=image,
    )

  # A command.

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    hosts = self.make_hosts()
    self._cluster = TableCluster(
      hosts,
      Makers(self._shard, self._worker),
      self.folder,
      shards=self._settings.shards,
      workers=WORKERS,
      ladder=LADDER,
      refill=True,
    )
    return functools.partial(self._drive, resumed)

  def _drive(self, resumed):
    """The main function of the driver."""
    cluster = self._cluster
    safe_files.make_private(self.memory)
    if resumed:
      self._cut_files()
    cluster.start(self._saved and self._saved[0])

    def look():
      cluster.check(sum(len(each.loss) for each in self._records()))
      return cluster.finished

    self.drive(look, self._save, cluster.wait)
    self._rows = cluster.rows()
    self.finished = True

  def _records(self):
    return [files.read_table_records(self.folder, w) for w in range(WORKERS)]

  def _save(self):
    cluster = self._cluster
    cluster.pause()
    images = cluster.images()
    kept = {w: image[:2] for w, image in images.workers.items()}
    lengths = files.FILES.lengths(self.folder, WORKERS, kept)
    self._saved = images, lengths
    cluster.go_on()

  def _cut_files(self):
    """Drops what was written since the checkpoint, or all."""
    orders, workers = [0] * self._settings.shards, [(0, 0)] * WORKERS
    if self._saved:
      images, workers = self._saved
      orders = [rows for rows, _ in images.shards]
    paths = [files.order_path(self.folder, s) for s in range(len(orders))]
    others = list(zip(paths, orders, strict=True))
    files.cut_back(self.folder, workers, others)

  # What must hold.

  def check(self) -> None:
    """See the base."""
    whole = self._division.join(self._rows)
    for name, expected in _whole().items():
      same = np.array_equal(whole[name], expected)
      require(same, INVARIANTS[0], name, whole[name], "and not", expected)
    self._check_received()
    with refused(INVARIANTS[2]):
      files.read_trace(self.folder, WORKERS)
    orders = files.read_orders(self.folder, self._settings.shards, WORKERS)
    with refused(INVARIANTS[3]):
      again = replay.replay(
        *(self._settings, first(), self._division, _WORK, orders),
        jobs=JOBS,
      )
    for name, rows in again.tables.items():
      same = rows.tobytes() == whole[name].tobytes()
      require(same, INVARIANTS[3], name, rows, "and not", whole[name])
    for worker, records in enumerate(again.records):
      self._check_records(worker, records)

  def _check_received(self):
    """A job whose message was changed after it was applied has no row: its next
    holder cannot know what to record."""
    changed = self.outcome.injected["flip"]
    for worker in range(WORKERS):
      events = read_journal(journal_path(self.folder, worker))
      jobs = [e.job for e in events if e.action == base.RECEIVE]
      expected = list(range(worker, WORKERS * JOBS, WORKERS))
      kept = [job for job in expected if job in jobs or not changed]
      require(jobs == kept, INVARIANTS[1], "worker", worker, "received", jobs)

  def _check_records(self, worker, records):
    """A record that a holder did not live to write may be missing."""
    there = files.read_table_records(self.folder, worker)
    again = files.columns(records)
    which = np.searchsorted(again.job, there.job)
    lives = files.lives_of(read_journal(journal_path(self.folder, worker)))
    same = len(records) - len(there.job) < lives
    for name in there._fields:
      mine, other = getattr(there, name), getattr(again, name)
      same &= np.array_equal(mine, other[which], equal_nan=name != "reads")
    require(same, INVARIANTS[4], "worker", worker, there, "and not", again)
