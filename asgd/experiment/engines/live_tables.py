"""Live tables: the engines `threads` and `ray` of the recipe `table`.

For a checkpoint all workers end the same clock. A run that was stopped or
killed resumes from its last checkpoint, and drops rows that were written later.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base
from asgd.experiment import checkpoint, checks, engines
from asgd.experiment.engines import (
  live_engine,
  server_results,
  tables,
  traffic,
)
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.experiment.engines.tables import TablePlan
from asgd.experiment.schema import Run
from asgd.live import faults, pace
from asgd.live.append_only import PUT_BACK, check_rows
from asgd.live.hosts import Host, Inside, Make
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import count_records, records_path
from asgd.live.slots import check_room
from asgd.live.spans import SpanWriter
from asgd.live.tables import cluster as cluster_lib
from asgd.live.tables import files
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.tables.division import Division, divide
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker


def plan(experiment: Any, run: Run, workers: int) -> TablePlan:
  """Returns `tables.plan`; refuses more shards than the tables have rows."""
  result = tables.plan(experiment, run, workers)
  with checks.prefix_errors(f"runs.{run.label}", ("shards",)):
    make_division(result)  # raises for too many shards
  return result


def first_tables(plan: TablePlan, seed: int) -> dict[str, Any]:
  """Returns the tables of a cell before the first push."""
  key, _ = jax.random.split(jax.random.key(seed))
  return plan.split(jax.device_get(plan.problem.init(key)))


def make_division(plan: TablePlan) -> Division:
  """Returns the division of rows among shards. Raises ValueError for more
  shards than the largest table has rows."""
  # Zero-strided views: a large table needs no memory for its shape.
  views = jax.tree.map(
    lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), plan.shapes
  )
  return divide(plan.split(views), plan.settings.shards)


def table_shards(folder: Path) -> int:
  """Returns the number of shards of a cell of tables, by its files."""
  return len([*folder.glob("shard-*.csv")])


def check_files(folder: Path, description: Mapping[str, Any]) -> None:
  """Raises ValueError if orders or records of a finished cell were changed. The
  last job of a worker that failed may have no record."""
  shards = table_shards(folder)
  workers = description["cell"]["workers"]
  files.read_orders(folder, shards, workers)
  files.read_trace(folder, workers)
  files.FILES.check(
    # Minus one: the first incarnation of a worker is no replacement.
    folder, workers, lambda events: files.count_incarnations(events) - 1, "jobs"
  )


class TableMakers(NamedTuple):
  """Makes shards and workers in their hosts; see
  `asgd.live.tables.cluster.Makers`. It is sent to the hosts' processes."""

  plan: Callable[[], TablePlan]
  seed: int
  folder: Path  # of the cell
  memory: Path  # folder in which shards store their state
  faults: Sequence[faults.Fault]
  span: SpanWriter | None

  def shard(self, index: int, image: bytes | None) -> Make:
    """Returns the maker of a shard."""
    return functools.partial(self._make_shard, index, image)

  def _make_shard(
    self, index: int, image: bytes | None, inside: Inside
  ) -> ShardHost:
    """Makes a shard in its host."""
    plan = self.plan()
    # Every shard computes all tables from the seed, and stores only its rows.
    start_tables = first_tables(plan, self.seed)

    def make() -> TableShard:
      server = make_division(plan).server(
        index, start_tables, plan.settings, plan.workers
      )
      return TableShard(index, server)

    return ShardHost(
      *(inside, make, self.folder, self.memory, index),
      # Images are written at the end of a clock.
      clock_every=plan.settings.clock_every,
      image=image,
    )

  def worker(
    self, index: int, shards: Mapping[int, Host], image: bytes | None
  ) -> Make:
    """Returns the maker of a worker."""
    return functools.partial(self._make_worker, index, dict(shards), image)

  def _make_worker(
    self,
    index: int,
    shards: Mapping[int, Host],
    image: bytes | None,
    inside: Inside,
  ) -> WorkerHost:
    """Makes a worker in its host."""
    plan = self.plan()
    division = make_division(plan)
    _, root = jax.random.split(jax.random.key(self.seed))

    def make(incarnation: int, work: Any) -> TableWorker:
      """Returns an incarnation of the worker."""
      return TableWorker(
        *(index, incarnation, plan.settings, division, work),
        workers=plan.workers,
        # Workers have equally many jobs.
        jobs=plan.messages // plan.workers,
        seed=self.seed,
      )

    journal = JobJournal(
      *(inside, self.folder, index),
      resumes=image is not None,
      on_span=self.span,
      memory=self.memory,
    )
    return WorkerHost(
      *(inside, make, plan.work(self.seed, root), journal),
      shards=shards,
      script=faults.script_of(self.faults, self.folder, inside),
      slowdown=pace.factor_of(plan.run.config["live"]["slowdown"], index),
      image=image,
    )


class LiveTableEngine(live_engine.LiveEngine):
  """A cell of live tables."""

  _measures_gap = False
  _files = files.FILES

  def _prepare(self) -> bool:
    """Checks the room in memory; returns whether the cell has begun."""
    plan = self._plan
    # (messages applied, the slowest clock) by shard
    self._shard_progress: list[tuple[int, int]] = []
    shards = range(plan.settings.shards)
    self._orders = [files.order_path(self._folder, shard) for shard in shards]
    begun = super()._prepare()
    if not begun:  # room for an image, later requests, and the next image
      leaves = jax.tree.leaves(plan.shapes)
      nbytes = sum(x.size * x.dtype.itemsize for x in leaves)
      check_room(self._context.machine.memory_dir, 3 * nbytes)
    return begun

  def _journals(self):
    """Returns the paths of the journals of shards and workers."""
    return [*self._orders, *super()._journals()]

  def _network(self):
    return self._plan.call_network

  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[cluster_lib.TableCluster, Callable[[], None]]:
    """Returns the cluster of shards and workers, and its start."""
    makers = TableMakers(
      *(hosts.make_plan, live.cell.seed, live.folder, live.memory),
      *(tuple(self._context.machine.faults), live.write_span),
    )
    cluster = cluster_lib.TableCluster(
      hosts.hosts,
      cluster_lib.Makers(makers.shard, makers.worker),
      live.folder,
      shards=self._plan.settings.shards,
      workers=self._plan.workers,
      ladder=live.setup.ladder,
      refill=live.settings["refill"],
    )
    # Without a checkpoint `start` gets None.
    return cluster, functools.partial(cluster.start, saved and saved[0])

  # Resuming from a checkpoint.

  def _unpack(
    self, saved: checkpoint.Restored
  ) -> tuple[cluster_lib.Images, dict[str, Any]]:
    """Returns (images, notes) of a checkpoint."""
    notes = saved.notes
    template: dict[str, Any] = {"shards": [0] * len(self._orders)}
    template["workers"] = dict.fromkeys(notes["workers"], 0)
    # Images are bytes of any length: one uint8 array for each participant.
    tree = saved.tree(checkpoint.any_shapes(template))
    shards = [
      (rows, data.tobytes())
      for rows, data in zip(notes["shards"], tree["shards"], strict=True)
    ]
    workers = {
      int(w): (*notes["workers"][w], data.tobytes())
      for w, data in tree["workers"].items()
    }
    return cluster_lib.Images(shards, workers), notes

  def _rows_at_checkpoint(
    self, notes: Mapping[str, Any]
  ) -> Iterator[tuple[Path, int]]:
    """Yields each file and its count of rows at a checkpoint."""
    # Shards have orders only; workers have a journal and records.
    yield from zip(self._orders, notes["shards"], strict=True)
    for worker, (rows, records) in enumerate(notes["files"]):
      yield journal_path(self._folder, worker), rows
      yield records_path(self._folder, worker), records

  def _check_unchanged(self, notes: Mapping[str, Any]) -> None:
    """Raises ValueError, before any row is dropped, if files differ from those
    of the checkpoint."""
    for path, rows in self._rows_at_checkpoint(notes):
      if path.suffix == ".csv":
        count = len(read_journal(path))
      else:
        count = count_records(path, files.JOB_RECORD)
      check_rows(path, count, rows)
      digest = notes.get("digests", {}).get(path.name)
      # A checkpoint of an older version has no digests.
      if rows and digest not in (None, files.digest(path, rows)):
        raise ValueError(
          f"{path} is not the file that the checkpoint was made with: it was"
          f" changed or replaced. {PUT_BACK}"
        )

  def _other_journals(self, notes):
    rows = notes.get("shards") or [0 for _ in self._orders]
    return list(zip(self._orders, rows, strict=True))

  def _cut_files_back(self, saved):
    if saved:
      self._check_unchanged(saved[1])
    super()._cut_files_back(saved)

  # Training.

  def _wait(self, seconds):
    # The cluster waits for its own events, not for a fixed time.
    self.cluster.wait(seconds)

  def _snapshot_at(self, until: int) -> None:
    """Takes a snapshot at message `until`, or at the cluster's last one."""
    received = self._received >= until and until < self.total
    # A finished cluster may have missed jobs, which are then never received.
    if received or self.cluster.finished:
      self._take_snapshot(until)
    else:
      self.done = max(self.done, min(self._received, until - 1))

  def _take_snapshot(self, message: int) -> None:
    """Fetches the present rows, for the evaluation at a message."""
    # The rows of the shards are at slightly different clocks.
    rows_of_shards = self.cluster.rows()
    self._shard_progress = self.cluster.progress()
    params = self._plan.join(make_division(self._plan).join(rows_of_shards))
    records = self.records()
    row = min(message, len(records.loss)) - 1
    clock = {
      "seconds": float(records.time[row]) - self._first_ticket,
      "megabytes": traffic.megabytes([records]),
    }
    # A clock counts as an update when the slowest worker has ended it.
    updates = min(slowest for _, slowest in self._shard_progress)
    self._snapshot = engines.Snapshot(params, message, updates, clock)
    self.done = message

  # Results.

  def records(self) -> base.Records:
    """Returns a row for each job, in the order of their times."""
    return self._joined_records().plain

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness and losses of some jobs."""
    return server_results.summary(self._records_between(start, end))

  def profile(self) -> dict[int, int]:
    """Returns clock differential -> number of rows that were read at it."""
    counts = self._joined_records().reads.sum(0).tolist()
    # Row i of `reads` counts reads at clock differential -1 - i.
    return {-1 - i: n for i, n in enumerate(counts) if n}

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    self._received += len(self._read().loss)
    records, plan = self.records(), self._plan
    columns = tables.result_columns(
      plan.settings.rules,
      records,
      server_results.summary(records),
      self.profile(),
      self.cluster.filtered_counts(),
      updates=min(slowest for _, slowest in self._shard_progress),
      **self._rebalance_columns(),
    )
    return {
      **columns,
      "seconds": float(records.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      "done_again": files.count_repeated_jobs(self._folder, plan.workers),
      "missed": self.total - len(records.loss),
      "took_part": len(np.unique(records.worker)),
    }

  def _rebalance_columns(self) -> dict[str, float]:
    """Returns the count of ranges that moved to another shard, and the seconds
    that workers waited for the moves."""
    plan = self._plan
    first_division = make_division(plan)
    divisions = files.read_divisions(self._folder, first_division)
    # Neighbouring divisions differ in the ranges that moved.
    move_counts = [a.moves_to(b) for a, b in itertools.pairwise(divisions)]
    settings, rest_seconds = plan.settings, 0.0
    if len(divisions) > 1:
      jobs = settings.rebalance_every * settings.clock_every
      rest_seconds = files.rest_seconds(self._folder, plan.workers, jobs)
    return {"ranges_moved": sum(move_counts), "rest_seconds": rest_seconds}

  def extras(self) -> dict[str, str]:
    """Returns the profile of staleness."""
    return {"staleness.csv": tables.profile_table(self.profile())}

  def _pack(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns the images of all participants, with digests of their files."""
    images = self.cluster.images()
    # worker -> [rows of the journal, rows of the records]
    saved_counts = {w: list(image[:2]) for w, image in images.workers.items()}
    file_counts = self._files.checkpoint_counts(
      self._folder, len(self._writers), saved_counts
    )
    # A checkpoint stores arrays, so the bytes of images become uint8.
    as_array = functools.partial(np.frombuffer, dtype=np.uint8)
    tree = {
      "shards": [as_array(data) for _, data in images.shards],
      "workers": {
        str(worker): as_array(data)
        for worker, (_, _, data) in images.workers.items()
      },
    }
    notes: dict[str, Any] = {
      "shards": [rows for rows, _ in images.shards],
      "workers": {str(w): counts for w, counts in saved_counts.items()},
      "files": file_counts,
    }
    notes["digests"] = {
      path.name: files.digest(path, rows)
      for path, rows in self._rows_at_checkpoint(notes)
      if rows
    }
    return sum(rows for rows, _ in file_counts), tree, notes


def describe(result: Mapping[str, Any]) -> str:
  """Returns a cell's result in a few words."""
  words = f"{tables.loss_text(result)}, {result['seconds']:.3g} s"
  megabytes = (result["bytes_up"] + result["bytes_down"]) / 1e6
  words += f", {megabytes:.3g} MB" + tables.filters_text(result)
  if n_moved := result.get("ranges_moved"):
    words += (
      f", {n_moved} ranges moved in {result['rest_seconds']:.2g} s of rest"
    )
  if n_repeated := result["done_again"]:
    plural = "s" * (n_repeated > 1)
    words += f", {n_repeated} job{plural} redone because workers failed"
  if n_missed := result["missed"]:
    words += f", {n_missed} job{'s' * (n_missed > 1)} missed"
  return words
