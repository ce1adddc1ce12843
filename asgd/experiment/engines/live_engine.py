"""The engine of live cells: starts a cell, watches it, and saves it.

Participants (shards, workers, peers) train in hosts, and write journals and
records. The driver, which is this process, watches these files and the cluster
of the participants. It replaces participants that exit, evaluates the present
parameters, and pauses the cluster for a checkpoint. Each protocol has a
subclass, which makes its cluster and reads its files.
"""

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asgd.experiment import cell_progress, engines, live_figures
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import live_hosts, server_results
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.live import failures, processes
from asgd.live.append_only import FileGone
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import join_by_time, records_path
from asgd.live.setup import Setup
from asgd.live.worker_files import WorkerFiles
from asgd.orders.network import Network
from asgd.orders.trace import STARTS

LOOK_SECONDS = 0.1  # between two looks at the cluster


class LiveEngine(engines.Engine):
  """Watches a cell until all its jobs are received."""

  cluster: Any  # a Cluster of the protocol
  _participants = "workers"  # their name in the text of `stop`
  _measures_gap = True  # whether records have gaps
  _bytes_share = 1.0  # share of all bytes that records count
  _files: WorkerFiles  # of the writers; unused if a subclass overrides `_read`

  def __init__(
    self, context: engines.Context, make_hosts: live_hosts.MakeHosts
  ):
    """Starts the cell in hosts, or resumes it. Raises ValueError if files of
    the cell are missing or do not fit."""
    self._context, self._plan = context, context.plan
    self.total, self.done, self._received = context.plan.messages, 0, 0
    self._news: list[str] = []
    self._existing_files: set[Path] = set()  # at the last look
    self._snapshot: engines.Snapshot | None = None
    # Whether all participants paused in time; None: they were not stopped.
    self._all_paused: bool | None = None
    # Look at the files first: a new cell must not use the memory of an old one.
    begun = self._prepare()
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    if begun:
      # Processes of a killed driver must no longer write to the files.
      processes.kill_run(self._memory.folder)
    with contextlib.ExitStack() as stack:
      # If the start fails, hosts and memory are released in reverse order.
      stack.callback(self._release)
      self._start_cluster(make_hosts, begun, stack)
      self._resources = stack.pop_all()

  @property
  def _folder(self) -> Path:
    """The folder of the cell."""
    folder = self._context.folder
    assert folder is not None  # the driver of a live cell writes it
    return folder

  def _release(self) -> None:
    # A cell that has received a message resumes from its memory.
    if not self._memory.is_resumed and not self._received:
      self._memory.remove()  # there is nothing to resume from
    self._memory.close()

  def _start_cluster(
    self,
    make_hosts: live_hosts.MakeHosts,
    begun: bool,
    stack: contextlib.ExitStack,
  ) -> None:
    """Starts the cluster. `stack` closes its parts in reverse order."""
    context, plan = self._context, self._plan
    # [1] Restore a checkpoint and cut the files back to it.
    saved = self._restore() if begun else None
    self._read_counts = [0] * len(self._writers)  # read records of each writer
    # Records are appended; `_joined_records` joins them when they are needed.
    self._record_parts: list[Any] = []  # records that were read
    self._received = self._open_files(saved, begun=begun)
    self.done = min(self._received, self.total)
    # [2] Continue the cell's time at its last row.
    last_rows = [read_journal(path)[-1:] for path in self._journals()]
    # The latest row counts: the journals end at different times.
    elapsed = max((e.time for (e, *_) in filter(None, last_rows)), default=0.0)
    live = LiveCell(
      *(plan, context.cell, context.experiment.dataset, self._setup()),
      folder=self._folder.absolute(),
      memory=self._memory.folder,
      start_time=time.monotonic() - elapsed,
      network=self._network(),
    )
    # [3] Start hosts, then the cluster in them.
    hosts = make_hosts(live, context.machine)
    stack.callback(hosts.hosts.close)
    self.cluster, start = self._make_cluster(live, hosts, saved)
    stack.callback(self.cluster.close)
    # Participants that were replaced before a resume count, too.
    self._memory.write_running(self._replaced())
    assert context.board is not None  # the driver of a live cell writes it
    self._figures = live_figures.Watch(
      plan.workers, context.board, self._bytes_share
    )
    stack.callback(self._figures.close)
    # During the start, a worker's first job may fail already.
    with self._errors():
      start()

  # Methods that a protocol's subclass overrides.

  @property
  def _writers(self) -> range:
    """Indices of the participants that write journals and records."""
    return range(self._plan.workers)

  def _prepare(self) -> bool:
    """Returns whether the cell has begun, by its files. Raises ValueError if
    one is missing."""
    return any(path.exists() for path in self._journals())

  def _setup(self) -> Setup:
    return live_hosts.default_setup(self._plan)

  def _network(self) -> Network | None:
    """Returns the network that delays calls between threads, if any."""
    return None

  def _restore(self) -> Any:
    """Returns the last checkpoint of a cell that has begun, if there is one."""
    return self._context.restore(self._unpack)

  @abc.abstractmethod
  def _unpack(self, saved: Any) -> Any:
    """Returns the state of a checkpoint, as `_make_cluster` takes it."""

  def _open_files(self, saved: Any, *, begun: bool) -> int:
    """Drops rows that were written after the checkpoint; returns the count of
    received messages."""
    if begun:
      self._cut_files_back(saved)
    return len(self._read().loss)

  def _cut_files_back(self, saved: Any) -> None:
    """Cuts the files back to a checkpoint (tree, notes), or to nothing."""
    # A checkpoint has the counts of rows and records at its time.
    notes = saved[1] if saved else {}
    worker_counts = notes.get("files") or [(0, 0) for _ in self._writers]
    other_journals = self._other_journals(notes)
    dropped = self._files.cut_back(self._folder, worker_counts, other_journals)
    self._report_resumed(saved, dropped)

  def _report_resumed(self, saved, dropped):
    source = "the checkpoint" if saved else "the beginning: no checkpoint"
    self._news.append(f"resuming from {source}; {dropped} rows are dropped")

  def _other_journals(self, notes: Mapping[str, Any]) -> list[Any]:
    """Returns (journal, rows at the checkpoint) of journals without records."""
    del notes
    return []

  @abc.abstractmethod
  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[Any, Callable[[], None]]:
    """Returns the cluster of a cell and the function that starts it. `saved` is
    from `_unpack`; None: the cell starts new."""

  @abc.abstractmethod
  def _snapshot_at(self, until: int) -> None:
    """Takes a snapshot at message `until`, if that message was received."""

  def _take_last_snapshot(self) -> None:
    """Waits until the cluster has finished, and takes the last snapshot."""
    while not self.cluster.finished:
      self._check_cluster(self.total)  # raises if the cluster fails
    self._snapshot_at(self.total)

  def _pack(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns a checkpoint of a paused cluster, as `save` does."""
    raise NotImplementedError

  # Files.

  def _journals(self) -> list[Path]:
    """Returns the paths of all journals."""
    return [journal_path(self._folder, index) for index in self._writers]

  def _check_files(self) -> None:
    """Raises FileGone if a file was removed since the last look."""
    paths = [records_path(self._folder, index) for index in self._writers]
    existing = {path for path in self._journals() + paths if path.exists()}
    for path in sorted(self._existing_files - existing):
      raise FileGone(path)
    self._existing_files = existing

  def _read(self) -> Any:
    """Reads the new records, stores and returns them."""
    records_of_writers = []
    for index in self._writers:
      # Start at the first record that was not read yet.
      new_records = self._files.read(
        self._folder, index, self._read_counts[index]
      )
      self._read_counts[index] += len(new_records.loss)
      records_of_writers.append(new_records)
    # Writers are independent, so rows are sorted by time.
    records = join_by_time(records_of_writers)
    self._record_parts.append(records)
    return records

  def _joined_records(self) -> Any:
    """Returns all records."""
    if len(self._record_parts) > 1:
      self._record_parts = [join_by_time(self._record_parts)]
    return self._record_parts[0]

  @functools.cached_property
  def _first_ticket(self) -> float:
    # A journal may begin with other rows than starts, such as joins.
    rows = (event for path in self._journals() for event in read_journal(path))
    return min(event.time for event in rows if event.action in STARTS)

  def _seconds_of(self, new_records: Any) -> float | None:
    """Returns the time of the last new record, in seconds since the first job
    started; 0 before the cell's first record, None without a new record."""
    if len(new_records.loss):
      return float(new_records.time[-1]) - self._first_ticket
    return None if self._received else 0.0

  # Training.

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    """Turns errors of a cluster into those that the run loop handles."""
    try:
      yield
    except failures.AllDied as error:
      raise engines.ProcessExited(str(error)) from error
    except failures.NotFinite as error:
      # The user has to mend a NaN, so the error names message and cell.
      arguments = self._plan, str(error), self._context.cell.name
      raise engines.NonFiniteResult(
        server_results.divergence_error(*arguments)
      ) from error

  def _wait(self, seconds: float) -> None:
    """Waits before the next look, for `seconds` at most."""
    time.sleep(seconds)

  def _check_cluster(self, until: int) -> None:
    """Waits until the next look, then checks the cluster."""
    del until
    # The first look comes at once.
    self._wait(LOOK_SECONDS if self._existing_files else 0.0)
    self._news += self.cluster.check(self._received)

  def advance(self, until: int) -> engines.Progress:
    """Checks the cluster once, and reads its new records."""
    with self._errors():
      self._check_cluster(until)
    # [1] Store the counts of replacements, which must survive a killed driver.
    self._memory.write_running(self._replaced())
    self._check_files()
    # [2] The new records.
    new_records = self._read()
    self._received += len(new_records.loss)
    rows = new_records
    if self._bytes_share < 1:  # the lead records its part of the bytes
      rows = new_records._replace(
        bytes_up=new_records.bytes_up / self._bytes_share,
        bytes_down=new_records.bytes_down / self._bytes_share,
      )
    figures = self._figures.add_records(
      time.monotonic(), new_records, self._received
    )
    # [3] Parameters for an evaluation, if message `until` was received.
    with self._errors():
      self._snapshot_at(until)
    news, self._news = self._news, []
    return engines.Progress(
      loss=new_records.loss,
      staleness=engines.mean(new_records.staleness),
      gap=engines.mean(new_records.gap) if self._measures_gap else None,
      news=news,
      figures=figures,
      rows=rows,
      seconds=self._seconds_of(new_records),
    )

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time, by journals and spans,
    in seconds since the first start of a job."""
    segments = cell_progress.read_work(self._folder)
    if not segments:
      return []
    # Before the first record the files are short, so `segments` has all jobs.
    has_records = self._received > 0
    start = (
      self._first_ticket if has_records else min(p.start for p in segments)
    )
    return [
      segment._replace(start=segment.start - start, end=segment.end - start)
      for segment in segments
    ]

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters at the message that `advance` had to reach."""
    with self._errors():
      if self._snapshot is None:
        # The cell was complete before this process resumed it, so `advance` was
        # not called.
        self._take_last_snapshot()
    assert self._snapshot is not None
    return self._snapshot

  # Results.

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  def records(self) -> Any:
    """Returns a row for each message, in the order of their times."""
    return self._joined_records()

  def _records_between(self, start: int, end: int) -> Any:
    """Returns the records of some messages, at least one."""
    records = self.records()
    # At least one record, also if the last ones are missing.
    start = max(min(start, end - 1, len(records.loss) - 1), 0)
    return type(records)(*(column[start:end] for column in records))

  # Save and end.

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns the state of all participants while the cluster is paused; None
    if some did not pause before a stop, or if there is no row yet."""
    # A participant that did not pause may still write.
    if self._all_paused is False:
      return None
    with self._errors():
      if not self._all_paused:
        self.cluster.pause()
      packed = self._pack()
      if not self._all_paused:
        self.cluster.resume()
    # A step of 0 is a cell without any row.
    return packed if packed[0] else None

  def stop(self) -> str:
    """Makes all participants end their present round, clock or job."""
    with self._errors():
      paused = self.cluster.pause(self._context.machine.grace_seconds)
    self._all_paused = paused
    # Rows that were written during the pause.
    self._received += len(self._read().loss)
    self.done = self._received
    return (
      "" if paused else f"; some {self._participants} did not finish in time"
    )

  def discard(self) -> None:
    """Removes the memory of a finished cell, which will not resume."""
    self.close()
    memory_lib.remove_leftover(self._folder)

  def close(self) -> None:
    """Ends the cluster and the hosts of the cell."""
    self._resources.close()
