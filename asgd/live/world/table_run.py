"""Runs of live tables in a simulated world: cases, driver, checks.

Job j adds 2^j to its rows. So the bits of a row's value show which jobs were
applied to the row, and that each was applied once.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, safe_files, tables
from asgd.live.failures import AllDied
from asgd.live.journal import journal_path, read_journal
from asgd.live.tables import files
from asgd.live.tables.cluster import Images, Makers, TableCluster
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.live.world.broken import breaks_on_value_error, require
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
  kills: bool = True  # hosts are processes; False: threads
  refill: bool = True

  @property
  def settings(self) -> tables.TableSettings:
    """Settings of the run."""
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
  TableCase("ssp", 1, refill=False),
  TableCase("essp", 1, rebalance_every=1, refill=False),
)


def first_tables() -> dict[str, np.ndarray]:
  """Returns the tables before the first push."""
  return {"v": np.zeros((ROWS, 2)), "w": np.zeros((2, 1))}


def keys(job: int) -> dict[str, np.ndarray]:
  """Returns the keys of a job's rows, by table."""
  return {"v": np.arange(job % 3, ROWS, 2), "w": np.array([job % 2])}


def _jobs_of(worker: int) -> range:
  """Returns the jobs of a worker in their order."""
  return range(worker, WORKERS * JOBS, WORKERS)


def _expected(workers: Iterable[int]) -> dict[str, np.ndarray]:
  """Returns the tables after each job of some workers was applied once, as
  whole numbers."""
  final = {name: table.astype(int) for name, table in first_tables().items()}
  for worker in workers:
    for job in _jobs_of(worker):
      for name, rows in keys(job).items():
        final[name][rows] += 2**job
  return final


def _gradient(
  rows: dict[str, np.ndarray], job: int, keys: Any, worker: int, seq: int
) -> tuple[float, dict[str, np.ndarray]]:
  """Returns the loss and a gradient that adds 2^job at a learning rate of 1."""
  del keys, worker, seq
  gradient = {name: np.full_like(x, -(2.0**job)) for name, x in rows.items()}
  return float(job), gradient


_WORK = tables.Work(lambda worker, job: job, keys, _gradient)


class TablesRun(WorldRun):
  """One scenario of live tables."""

  INVARIANTS, INJECT, STEPS_PER_SAVE = INVARIANTS, COMMON, 4
  FLIPPED = "shard-*/[ms]*s", "*.message"  # messages, snapshots
  _cluster: TableCluster  # of the present command

  def __init__(self, scenario: Scenario, folder: Path):
    super().__init__(scenario, folder)
    self._settings = scenario.case.settings
    self._division = division_lib.divide(first_tables(), self._settings.shards)
    # The last checkpoint: images, and counts (rows, records) of each worker.
    self._checkpoint: tuple[Images, list[Sequence[int]]] | None = None
    self._rows: list[Mapping[str, Any]] = []  # of each shard, at the end

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(CASES, KINDS, WORKERS, WORKERS * JOBS)

  # Makers of the objects in hosts.

  def _shard_maker(self, index: int, image: Any) -> Callable[..., ShardHost]:
    """Returns the maker of a shard; `image` is a checkpoint's or None."""

    def make() -> TableShard:
      first, settings = first_tables(), self._settings
      server = self._division.server(index, first, settings, WORKERS)
      return TableShard(index, server)

    return lambda inside: ShardHost(
      *(inside, make, self.folder, self.memory, index),
      clock_every=_EVERY,
      image=image,
    )

  def _worker_maker(
    self, index: int, shards: Any, image: Any
  ) -> Callable[..., WorkerHost]:
    """Returns the maker of a worker; `image` is a checkpoint's or None."""

    def gradient(rows: Any, job: int, *others: Any) -> tuple[float, Any]:
      self.simulate_work(job)
      return _gradient(rows, job, *others)

    def make(incarnation: int, work: tables.Work) -> TableWorker:
      return TableWorker(
        *(index, incarnation, self._settings, self._division, work),
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
      Makers(self._shard_maker, self._worker_maker),
      self.folder,
      shards=self._settings.shards,
      workers=WORKERS,
      ladder=LADDER,
      refill=self.scenario.case.refill,
    )
    return functools.partial(self._drive, resumed)

  def _drive(self, resumed: bool) -> None:
    """Runs a command's driver."""
    safe_files.make_private(self.memory)
    if resumed:
      self._cut_files()
    try:
      self._drive_cluster()
    except AllDied:  # the next command resumes from the checkpoint
      exits = self.outcome.injected.total()
      if self.scenario.case.refill or exits < WORKERS:
        raise

  def _drive_cluster(self) -> None:
    """Runs the cluster to its end."""
    cluster = self._cluster
    cluster.start(self._checkpoint and self._checkpoint[0])

    def step() -> bool:
      received = [
        len(files.read_table_records(self.folder, worker).loss)
        for worker in range(WORKERS)
      ]
      cluster.check(sum(received))
      return cluster.finished

    self.drive(step, self._save, cluster.wait)
    self._rows = [*cluster.rows()]
    self.finished = True

  def _save(self) -> None:
    """Makes a checkpoint while all workers pause."""
    cluster = self._cluster
    cluster.pause()
    images = cluster.images()
    saved_counts = {
      worker: image[:2] for worker, image in images.workers.items()
    }
    counts = files.FILES.checkpoint_counts(self.folder, WORKERS, saved_counts)
    self._checkpoint = images, counts
    cluster.resume()

  def _cut_files(self) -> None:
    """Cuts the files back to the last checkpoint, or to nothing."""
    shard_rows = [0] * self._settings.shards
    worker_counts: list[Sequence[int]] = [(0, 0)] * WORKERS
    if self._checkpoint:
      images, worker_counts = self._checkpoint
      shard_rows = [rows for rows, _ in images.shards]
    shard_traces = [
      (files.order_path(self.folder, shard), rows)
      for shard, rows in enumerate(shard_rows)
    ]
    files.cut_back(self.folder, worker_counts, shard_traces)

  # Checks.

  def check(self) -> None:
    """See the base."""
    # [1] Each job was applied once, and received once.
    result = self._division.join(self._rows)
    self._check_applied(result)
    self._check_received()
    # [2] The order, and its replay.
    with breaks_on_value_error(INVARIANTS[2]):
      files.read_trace(self.folder, WORKERS)
    orders = files.read_orders(self.folder, self._settings.shards, WORKERS)
    with breaks_on_value_error(INVARIANTS[3]):
      replayed = replay.replay(
        *(self._settings, first_tables(), self._division, _WORK, orders),
        jobs=JOBS,
      )
    for name, rows in replayed.tables.items():
      is_equal = rows.tobytes() == result[name].tobytes()
      require(is_equal, INVARIANTS[3], name, rows, "and not", result[name])
    # [3] Records.
    for worker, records in enumerate(replayed.records):
      self._check_records(worker, records)

  def _lost_workers(self) -> set[int]:
    """Returns the workers that have exited and were not replaced."""
    if self.scenario.case.refill:
      return set()
    journals = [
      read_journal(journal_path(self.folder, worker))
      for worker in range(WORKERS)
    ]
    return {
      worker
      for worker, events in enumerate(journals)
      if not events or events[-1].action == base.LEAVE
    }

  def _check_applied(self, result: Mapping[str, np.ndarray]) -> None:
    """Checks that each job of the workers was applied once, and that each job
    of a worker that was lost was applied at most once."""
    lost_workers = self._lost_workers()
    lost = _expected(lost_workers)
    for name, whole in _expected(range(WORKERS)).items():
      rows = result[name].astype(int)
      # The bits of jobs of lost workers may be 0.
      is_equal = np.array_equal(rows | lost[name], whole)
      is_equal &= np.array_equal(rows, result[name])
      require(
        *(is_equal, INVARIANTS[0], name, result[name], "and not", whole),
        *("with lost workers", lost_workers),
      )

  def _check_received(self) -> None:
    """Checks that each worker received its jobs once.

    A job has no row if a fault changed its saved message after the shards had
    applied it: the worker's next incarnation cannot know what to record.
    """
    may_lack = self.outcome.injected["flip"] > 0
    lost_workers = self._lost_workers()
    for worker in range(WORKERS):
      events = read_journal(journal_path(self.folder, worker))
      jobs = [event.job for event in events if event.action == base.RECEIVE]
      expected = [*_jobs_of(worker)]
      if worker in lost_workers:  # the last jobs may lack
        expected = expected[: len(jobs)]
      if may_lack:
        expected = [job for job in expected if job in jobs]
      is_equal = jobs == expected
      require(is_equal, INVARIANTS[1], "worker", worker, "received", jobs)

  def _check_records(self, worker: int, records: Any) -> None:
    """Compares a worker's records with those of the replay. One record of each
    failed incarnation may be missing: the incarnation may have exited before it
    wrote the record."""
    written = files.read_table_records(self.folder, worker)
    replayed = files.columns(records)
    rows = np.searchsorted(replayed.job, written.job)
    events = read_journal(journal_path(self.folder, worker))
    n_failed = files.count_incarnations(events) - 1
    n_failed += worker in self._lost_workers()
    are_equal = len(records) - len(written.job) <= n_failed
    for name in written._fields:
      column, replayed_column = getattr(written, name), getattr(replayed, name)
      # The gap is NaN, because no shard knows it.
      are_equal &= np.array_equal(
        column, replayed_column[rows], equal_nan=name != "reads"
      )
    text = "worker", worker, written, "and not", replayed
    require(are_equal, INVARIANTS[4], *text)
