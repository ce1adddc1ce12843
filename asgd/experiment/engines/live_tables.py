"""Live tables: the engines `threads` and `ray` of the recipe `table`.

The driver watches: it replaces who dies, evaluates rows as they are, and has
all workers end the same clock for a checkpoint. A run that was stopped or
killed goes on from its last checkpoint; what was written after that is dropped.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import base
from asgd.experiment import (
  checkpoint,
  checks,
  engines,
  live_figures,
  live_files,
)
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import (
  parameter_server,
  table_clusters,
  tables,
  traffic,
)
from asgd.experiment.engines.table_clusters import LiveTables
from asgd.experiment.schema import Run
from asgd.live import processes
from asgd.live.append_only import PUT_BACK, FileGone
from asgd.live.gossip.files import cut_journal
from asgd.live.hosts import Gone
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import FileSink, records_path
from asgd.live.slots import check_room
from asgd.live.tables import cluster as cluster_lib
from asgd.live.tables import files
from asgd.orders.trace import STARTS

_LOOK = 0.1  # seconds between two looks at the cluster
_ONLY = {  # section, key -> the one value that tables have
  ("server", "shards"): 1,
  ("server", "consistent"): False,
  ("server", "wire"): "float32",
  ("live", "devices"): 1,
}
_OF_LINKS = ("lose", "double", "reorder")  # faults of frames


def check(run: Run) -> None:
  """Checks what needs neither data nor a model."""
  parameter_server.check(run)
  for (section, key), value in _ONLY.items():
    given = run.config[section][key]
    if given != value:
      instead = f"leave it {value!r}"
      if key == "shards":
        instead = f"write config.runs.{run.label}.shards={given}"
      raise ValueError(
        f"config.{section}.{key} {given!r} is not for the recipe {run.recipe!r}"
        f" (config.runs.{run.label}), whose tables have shards of their own:"
        f" {instead}"
      )


def check_faults(plan: tables.TablePlan, machine: Any) -> None:
  """Refuses faults that cannot happen to workers of tables."""
  for fault in machine.faults:
    if fault.kind in _OF_LINKS:
      raise ValueError(
        f"--fault={fault.kind}:{fault.worker}:{fault.seq}: what a worker of"
        " tables asks is asked again until it is answered; use kill, hang, slow"
        " or nan"
      )


def plan(experiment: Any, run: Run, workers: int) -> tables.TablePlan:
  """As `tables.plan`; refuses more shards than there can be live."""
  result = tables.plan(experiment, run, workers)
  with checks.blame(f"runs.{run.label}", ("shards",)):
    table_clusters.division_of(result)
  return result


def check_files(folder: Path, description: Mapping[str, Any]) -> None:
  """Raises ValueError if orders or records of a finished cell were changed
  since; what a worker did not outlive may have no record."""
  shards = live_files.table_shards(folder)
  workers = description["cell"]["workers"]
  orders = files.read_orders(folder, shards, workers)
  files.read_trace(folder, workers)
  for worker, events in enumerate(orders.workers):
    received = sum(event.action == base.RECEIVE for event in events)
    count = len(files.read_table_records(folder, worker).loss)
    if not received - files.lives_of(events) + 1 <= count <= received:
      raise ValueError(
        f"{records_path(folder, worker)} has {count} records, and the trace"
        f" beside it {received} jobs: one of the two was cut short or changed."
        f" {PUT_BACK}"
      )


class LiveTableEngine(engines.Engine):
  """A cell of live tables, watched until all its jobs are received."""

  def __init__(
    self, context: engines.Context, make_cluster: Callable[..., Any]
  ):
    """Starts the cell, or goes on from its last checkpoint, in a cluster as
    `table_clusters.thread_tables` makes it."""
    self._context, self._folder = context, context.folder
    self._plan = plan = context.plan
    self.total = plan.messages
    self._places = range(plan.workers)
    self._orders = range(plan.settings.shards)
    begun = any(path.exists() for path in self._written())
    if not begun:  # an image, the requests since, and the next image
      leaves = jax.tree.leaves(plan.like)
      nbytes = sum(x.size * x.dtype.itemsize for x in leaves)
      check_room(context.machine.memory_dir, 3 * nbytes)
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    if begun:  # what a driver left that was killed writes no more
      processes.end_all(self._memory.memory)
    self._received = 0
    self._news: list[str] = []
    self._there: set[Path] = set()  # files, as it saw last
    self._snapshot: engines.Snapshot | None = None
    self._counts_seen: list[tuple[int, int]] = []
    self._cuts: dict[str, Any] = {}
    self._stopped: bool | None = None  # whether all came to rest in time
    with contextlib.ExitStack() as stack:
      stack.callback(self._release)
      self._start(make_cluster, begun, stack)
      self._open = stack.pop_all()

  def _release(self):
    if not self._memory.kept and not self._received:
      self._memory.remove()  # there is nothing to go on with
    self._memory.close()

  def _written(self):
    """The files that shards and workers write."""
    orders = [files.order_path(self._folder, s) for s in self._orders]
    journals = [journal_path(self._folder, w) for w in self._places]
    return [*orders, *journals]

  def _start(self, make_cluster, begun, stack):
    context, plan = self._context, self._plan
    images = context.restore(self._unpack) if begun else None
    if begun:
      self._go_back(images)
    self._counts = [0] * plan.workers  # records that were read, of each
    self._parts: list[files.TableRecords] = []
    self._received = len(self._read().loss)
    self.done = min(self._received, self.total)
    last = [read_journal(path)[-1:] for path in self._written()]
    before = max((e.time for (e, *_) in filter(None, last)), default=0.0)
    live = LiveTables(
      plan,
      context.cell,
      self._folder,
      self._memory.memory,
      time.monotonic() - before,
    )
    self.cluster = make_cluster(live, context.machine)
    stack.callback(self.cluster.close)
    self._memory.note(self._replaced())
    self._counter = live_figures.Counter(plan.workers, time.monotonic())
    self._board = live_figures.Board(context.board / "live")
    stack.callback(self._board.close)
    self._next_look = 0.0
    with self._watched():
      self.cluster.start(images)

  # Going on from a checkpoint.

  def _unpack(self, saved):
    """The images of a checkpoint, and what to cut files to."""
    notes = saved.notes
    like = {"shards": [0] * len(self._orders)}
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

  def _go_back(self, images):
    """Drops what was written after the checkpoint, or all without one."""
    dropped = 0
    shards = [rows for rows, _ in images.shards] if images else None
    for s in self._orders:
      rows = shards[s] if images else 0
      dropped += self._cut(files.order_path(self._folder, s), rows)
    for w in self._places:
      rows, records = 0, 0
      if images:
        rows, records = self._cuts["files"][w]
      dropped += self._cut(journal_path(self._folder, w), rows)
      there = len(files.read_table_records(self._folder, w).loss)
      path = records_path(self._folder, w)
      self._check_length(path, there, records)
      FileSink(path, dtype=files.JOB_RECORD).truncate(records)
    where = "the checkpoint" if images else "the beginning: no checkpoint"
    self._news.append(f"going on from {where}; {dropped} rows are dropped")

  def _cut(self, path, rows):
    there = len(read_journal(path))
    self._check_length(path, there, rows)
    cut_journal(path, rows)
    return there - rows

  def _check_length(self, path, there, least):
    if there < least:
      raise ValueError(
        f"{path} has {there} rows where the checkpoint is of {least}: it was"
        f" cut short. {PUT_BACK}"
      )

  @contextlib.contextmanager
  def _watched(self) -> Iterator[None]:
    """What the cluster raises, as the run loop knows it."""
    try:
      yield
    except cluster_lib.AllDied as error:
      raise engines.Died(str(error)) from error
    except cluster_lib.NotFinite as error:
      raise engines.NotFinite(
        parameter_server.not_finite(
          self._plan, str(error), self._context.cell.name
        )
      ) from error

  # Training.

  def advance(self, until: int) -> engines.Progress:
    """Looks at the cluster once, a moment after the last time."""
    self.cluster.wait(max(self._next_look - time.monotonic(), 0))
    self._next_look = time.monotonic() + _LOOK
    before = self._replaced()
    with self._watched():
      self._news += self.cluster.check(self._received)
    if self._replaced() != before:
      self._memory.note(self._replaced())
    news, self._news = self._news, []
    there = {path for path in self._written() if path.exists()}
    for path in self._there - there:
      raise FileGone(path)
    self._there = there
    new = self._read()
    self._received += len(new.loss)
    now = time.monotonic()
    self._counter.add(now, new)
    figures = self._counter.figures()
    if figures.messages:
      self._board.write(now, self._received, figures)
    if self._received >= until and (until < self.total or self._finished):
      self._take(until)
    else:
      self.done = max(self.done, min(self._received, until - 1))
    return engines.Progress(
      loss=new.loss,
      staleness=engines.mean(new.staleness),
      news=news,
      figures=figures,
    )

  @property
  def _finished(self):
    return self.cluster.finished

  def _read(self) -> base.Records:
    """Returns the records that are new, and keeps them."""
    parts = []
    for worker in self._places:
      start = self._counts[worker]
      parts.append(files.read_table_records(self._folder, worker, start))
      self._counts[worker] += len(parts[-1].loss)
    new = files.by_time(parts)
    self._parts.append(new)
    return new.plain

  def _take(self, message):
    """Fetches the rows as they are, for an evaluation of a message."""
    parts = self._ask(self.cluster.rows)
    self._counts_seen = self._ask(self.cluster.counts)
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

  def _ask(self, question):
    """Asks all shards something, again if one has to be replaced first."""
    while True:
      try:
        return question()
      except Gone:
        with self._watched():
          self._news += self.cluster.check(self._received)
        time.sleep(_LOOK)

  @functools.cached_property
  def _first_ticket(self) -> float:
    paths = [journal_path(self._folder, w) for w in self._places]
    rows = (event for path in paths for event in read_journal(path))
    return min(event.time for event in rows if event.action in STARTS)

  def snapshot(self) -> engines.Snapshot:
    """Returns the rows of the message that `advance` was to reach."""
    if self._snapshot is None:  # all was evaluated before this process began
      with self._watched():
        while not self._finished:
          self._news += self.cluster.check(self._received)
          time.sleep(_LOOK)
      self._take(self.total)
    assert self._snapshot is not None
    return self._snapshot

  # What came of it.

  def _all(self) -> files.TableRecords:
    if len(self._parts) > 1:
      self._parts = [files.by_time(self._parts)]
    return self._parts[0]

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
    rules, profile = plan.settings.rules, self.profile()
    count = max(sum(profile.values()), 1)
    summary = parameter_server.summary(records)
    del summary["train_loss"]  # that of the last evaluation stands
    back, dropped = self.cluster.held()
    return {
      "order": rules.consistency.value,
      "bound": rules.bound,
      "messages": len(records.loss),
      "updates": min(slowest for _, slowest in self._counts_seen),
      "differential_mean": sum(d * n for d, n in profile.items()) / count,
      "differential_least": min(profile, default=0),
      "fresh_reads": profile.get(-1, 0) / count,
      "rows_held_back": back,
      "rows_dropped": dropped,
      **self._moved(),
      "bytes_up": int(records.bytes_up.sum()),
      "bytes_down": int(records.bytes_down.sum()),
      **summary,
      "seconds": float(records.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      "done_again": self.cluster.lost_jobs,
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
    lines = ["differential,rows"]
    lines += [f"{d},{n}" for d, n in sorted(self.profile().items())]
    return {"staleness.csv": "\n".join([*lines, ""])}

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  # Rest.

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns all shards and workers, as they are when all workers have ended
    the same clock; None if they did not come to rest to stop."""
    if self._stopped is False:
      return None
    with self._watched():
      while True:
        if not self._stopped:
          self.cluster.pause()
        try:
          images = self.cluster.images()
          break
        except Gone:
          self._stopped = None
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
    notes = {
      "shards": [rows for rows, _ in images.shards],
      "workers": {str(w): list(x[:2]) for w, x in images.workers.items()},
      "files": written,
    }
    return step, tree, notes

  def _rows(self, worker, image):
    """Rows and records of a worker; those of a dead one are all there are."""
    if image is not None:
      return list(image[:2])
    records = files.read_table_records(self._folder, worker)
    return [
      len(read_journal(journal_path(self._folder, worker))), len(records.loss)
    ]

  def stop(self) -> str:
    """Lets all workers end the same clock."""
    with self._watched():
      whole = self.cluster.pause(self._context.machine.grace_seconds)
    self._stopped = whole
    self._received += len(self._read().loss)
    self.done = self._received
    return "" if whole else "; some workers did not finish in time"

  def discard(self) -> None:
    """Removes what shards keep: there is nothing to go on with any more."""
    self.close()
    memory_lib.forget(self._folder)

  def close(self) -> None:
    """Ends all shards and workers."""
    self._open.close()


def describe(result: Mapping[str, Any]) -> str:
  """Returns what a cell came to in a few words."""
  words = (
    "{order}, loss {train_loss:.4g} (test {test_loss:.4g}), clock differential"
    " {differential_mean:.2f} (least {differential_least}), {seconds:.3g} s"
  ).format_map(result)
  megabytes = (result["bytes_up"] + result["bytes_down"]) / 1e6
  words += f", {megabytes:.3g} MB"
  if moved := result.get("ranges_moved"):
    words += f", {moved} ranges moved in {result['rest_seconds']:.2g} s of rest"
  if again := result["done_again"]:
    words += f", {again} jobs done again as workers died"
  if missed := result["missed"]:
    words += f", {missed} jobs missed"
  return words
