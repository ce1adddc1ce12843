"""Live tables: the engines `threads` and `ray` of the recipe `table`.

The driver watches: it replaces who dies, evaluates rows as they are, and has
all workers end the same clock for a checkpoint. A run that was stopped or
killed goes on from its last checkpoint; what was written after that is dropped.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import base
from asgd.experiment import checkpoint, checks, engines
from asgd.experiment.engines import (
  parameter_server,
  table_clusters,
  tables,
  traffic,
  watched,
)
from asgd.experiment.engines.table_clusters import LiveTables
from asgd.experiment.schema import Run
from asgd.live.append_only import PUT_BACK, check_rows
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import check_count, count_records, records_path
from asgd.live.slots import check_room
from asgd.live.tables import cluster as cluster_lib
from asgd.live.tables import files


def plan(experiment: Any, run: Run, workers: int) -> tables.TablePlan:
  """As `tables.plan`; refuses more shards than there can be live."""
  result = tables.plan(experiment, run, workers)
  with checks.blame(f"runs.{run.label}", ("shards",)):
    table_clusters.division_of(result)
  return result


def table_shards(folder: Path) -> int:
  """Returns the number of shards of a cell of tables, by its files."""
  return len([*folder.glob("shard-*.csv")])


def check_files(folder: Path, description: Mapping[str, Any]) -> None:
  """Raises ValueError if orders or records of a finished cell were changed
  since; what a worker did not outlive may have no record."""
  shards = table_shards(folder)
  workers = description["cell"]["workers"]
  orders = files.read_orders(folder, shards, workers)
  files.read_trace(folder, workers)
  for worker, events in enumerate(orders.workers):
    count = len(files.read_table_records(folder, worker).loss)
    path = records_path(folder, worker)
    check_count(path, count, events, files.lives_of(events) - 1, "jobs")


class LiveTableEngine(watched.WatchedEngine):
  """A cell of live tables."""

  def __init__(
    self, context: engines.Context, make_cluster: Callable[..., Any]
  ):
    """Starts the cell, or goes on from its last checkpoint, in a cluster as
    `table_clusters.thread_tables` makes it."""
    folder, plan = context.folder, context.plan
    shards = range(plan.settings.shards)
    self._orders = [files.order_path(folder, shard) for shard in shards]
    self._counts_seen: list[tuple[int, int]] = []
    self._cuts: dict[str, Any] = {}
    journals = [journal_path(folder, worker) for worker in range(plan.workers)]
    begun = any(path.exists() for path in self._orders + journals)
    if not begun:  # an image, the requests since, and the next image
      leaves = jax.tree.leaves(plan.like)
      nbytes = sum(x.size * x.dtype.itemsize for x in leaves)
      check_room(context.machine.memory_dir, 3 * nbytes)
    super().__init__(context, make_cluster, begun=begun)

  def _journals(self):
    """The journals of shards and workers."""
    return [*self._orders, *super()._journals()]

  def _make(self, make_cluster, began, images):
    del images
    memory, cell = self._memory.memory, self._context.cell
    live = LiveTables(self._plan, cell, self._folder, memory, began)
    return make_cluster(live, self._context.machine)

  # Going on from a checkpoint.

  def _unpack(self, saved):
    """The images of a checkpoint, and what to cut files to."""
    notes = saved.notes
    like: dict[str, Any] = {"shards": [0] * len(self._orders)}
    like["workers"] = dict.fromkeys(notes["workers"], 0)
    tree = saved.tree(checkpoint.any_shapes(like))
    self._cuts = notes
    shards = [
      (rows, data.tobytes())
      for rows, data in zip(notes["shards"], tree["shards"], strict=True)
    ]
    workers = {
      int(w): (*notes["workers"][w], data.tobytes())
      for w, data in tree["workers"].items()
    }
    return cluster_lib.Images(shards, workers)

  def _kept(self, notes):
    """Yields (file, rows) that a checkpoint is of."""
    yield from zip(self._orders, notes["shards"], strict=True)
    for worker, (rows, records) in enumerate(notes["files"]):
      yield journal_path(self._folder, worker), rows
      yield records_path(self._folder, worker), records

  def _check_kept(self, notes):
    """Raises ValueError, before anything is dropped, if files are not those
    that the checkpoint was made with."""
    for path, rows in self._kept(notes):
      if path.suffix == ".csv":
        there = len(read_journal(path))
      else:
        there = count_records(path, files.JOB_RECORD)
      check_rows(path, there, rows)
      digest = notes.get("digests", {}).get(path.name)
      if rows and digest not in (None, files.digest(path, rows)):
        raise ValueError(
          f"{path} is not the file that the checkpoint was made with: it was"
          f" changed, or another is in its place. {PUT_BACK}"
        )

  def _go_back(self, images):
    if images:
      self._check_kept(self._cuts)
    orders = [rows for rows, _ in images.shards] if images else None
    dropped = files.cut_back(
      self._folder,
      orders or [0 for _ in self._orders],
      self._cuts["files"] if images else [(0, 0) for _ in self._places],
    )
    self._say_going_on(images, dropped)

  # Training.

  def _wait(self, seconds):
    self.cluster.wait(seconds)

  def _records_of(self, place, start=0):
    return files.read_table_records(self._folder, place, start)

  def _by_time(self, parts):
    return files.by_time(parts)

  def _look_for(self, until):
    if self._received >= until and (
      until < self.total or self.cluster.finished
    ):
      self._take(until)
    else:
      self.done = max(self.done, min(self._received, until - 1))

  def _take_last(self):
    self._take(self.total)

  def _take(self, message):
    """Fetches the rows as they are, for an evaluation of a message."""
    parts = self.cluster.rows()
    self._counts_seen = self.cluster.counts()
    division = table_clusters.division_of(self._plan)
    params = self._plan.join(division.join(parts))
    records = self.records()
    at = min(message, len(records.loss)) - 1
    clock = {
      "seconds": float(records.time[at]) - self._first_ticket,
      "megabytes": traffic.megabytes([records]),
    }
    updates = min(slowest for _, slowest in self._counts_seen)
    self._snapshot = engines.Snapshot(params, message, updates, clock)
    self.done = message

  # What came of it.

  def records(self) -> base.Records:
    """Returns a row for each job, in the order of their times."""
    return self._all().plain

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness and losses of some jobs."""
    records = self.records()
    start = max(min(start, end - 1, len(records.loss) - 1), 0)
    return parameter_server.summary(
      base.Records(*(column[start:end] for column in records))
    )

  def profile(self) -> dict[int, int]:
    """Returns rows read at each clock differential."""
    counts = self._all().reads.sum(0).tolist()
    return {-1 - i: n for i, n in enumerate(counts) if n}

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to."""
    self._received += len(self._read().loss)
    records, plan = self.records(), self._plan
    columns = tables.columns_of(
      *(plan.settings.rules, records, parameter_server.summary(records)),
      *(self.profile(), self.cluster.held()),
      updates=min(slowest for _, slowest in self._counts_seen),
      **self._moved(),
    )
    return {
      **columns,
      "seconds": float(records.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      "done_again": files.done_again(self._folder, plan.workers),
      "missed": self.total - len(records.loss),
      "took_part": len(np.unique(records.worker)),
    }

  def _moved(self):
    """Ranges that went to another shard, and what workers waited for it."""
    plan = self._plan
    first = table_clusters.division_of(plan)
    divisions = files.read_divisions(self._folder, first)
    moved = [a.moves_to(b) for a, b in itertools.pairwise(divisions)]
    settings, rest = plan.settings, 0.0
    if len(divisions) > 1:
      jobs = settings.rebalance_every * settings.clock_every
      rest = files.rest_seconds(self._folder, plan.workers, jobs)
    return {"ranges_moved": sum(moved), "rest_seconds": rest}

  def extras(self) -> dict[str, str]:
    """Returns the profile of staleness."""
    return {"staleness.csv": tables.profile_table(self.profile())}

  # Rest.

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns all shards and workers, as they are when all workers have ended
    the same clock; None if they did not come to rest to stop."""
    if self._stopped is False:
      return None
    with self._watched():
      if not self._stopped:
        self.cluster.pause()
      images = self.cluster.images()
      written = [self._rows(w, images.workers.get(w)) for w in self._places]
      if not self._stopped:
        self.cluster.go_on()
    step = sum(rows for rows, _ in written)
    if not step:  # nothing has happened yet
      return None
    as_array = functools.partial(np.frombuffer, dtype=np.uint8)
    tree = {
      "shards": [as_array(data) for _, data in images.shards],
      "workers": {str(w): as_array(x[2]) for w, x in images.workers.items()},
    }
    notes: dict[str, Any] = {
      "shards": [rows for rows, _ in images.shards],
      "workers": {str(w): list(x[:2]) for w, x in images.workers.items()},
      "files": written,
    }
    notes["digests"] = {
      path.name: files.digest(path, rows)
      for path, rows in self._kept(notes)
      if rows
    }
    return step, tree, notes

  def _rows(self, worker, image):
    """Rows and records of a worker; those of a dead one are all there are."""
    return self._length_of(worker) if image is None else list(image[:2])


def describe(result: Mapping[str, Any]) -> str:
  """Returns what a cell came to in a few words."""
  words = (
    "{order}, loss {train_loss:.4g} (test {test_loss:.4g}), clock differential"
    " {differential_mean:.2f} (least {differential_least}), {seconds:.3g} s"
  ).format_map(result)
  megabytes = (result["bytes_up"] + result["bytes_down"]) / 1e6
  words += f", {megabytes:.3g} MB" + tables.held(result)
  if moved := result.get("ranges_moved"):
    words += f", {moved} ranges moved in {result['rest_seconds']:.2g} s of rest"
  if again := result["done_again"]:
    words += f", {again} job{'s' * (again > 1)} done again as workers died"
  if missed := result["missed"]:
    words += f", {missed} job{'s' * (missed > 1)} missed"
  return words
