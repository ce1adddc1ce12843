"""One engine of live cells: it starts a cell, watches it, and saves it.

Parties (shards, workers, peers) train in hosts, and write journals and records.
The driver, which is this process, looks at these files and at the cluster of
the parties: it replaces those that exit, evaluates parameters as they are, and
pauses the cluster for a checkpoint. A protocol has a subclass, which makes its
cluster and reads its files.
"""

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asgd.experiment import engines, live_figures
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import live_hosts, parameter_server
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.live import failures, processes
from asgd.live.append_only import FileGone
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import by_time, records_path
from asgd.live.setup import Setup
from asgd.live.worker_files import WorkerFiles
from asgd.orders.network import Network
from asgd.orders.trace import STARTS

LOOK = 0.1  # seconds between two looks at the cluster


class LiveEngine(engines.Engine):
  """A cell that is watched until all its jobs are received."""

  cluster: Any  # a Cluster of the protocol
  _who = "workers"
  _gaps = True  # whether records have them
  _share = 1.0  # of all bytes, those that records count
  _files: WorkerFiles  # of writers, unless `_read` is another

  def __init__(
    self, context: engines.Context, make_hosts: live_hosts.MakeHosts
  ):
    """Starts the cell in hosts, or resumes it. Raises ValueError if the files
    of the cell are not all there, or do not fit."""
    self._context, self._plan = context, context.plan
    self.total, self.done, self._received = context.plan.messages, 0, 0
    self._news: list[str] = []
    self._there: set[Path] = set()  # files that were there at the last look
    self._snapshot: engines.Snapshot | None = None
    self._stopped: bool | None = None  # whether all came to rest in time
    begun = self._prepare()
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    if begun:  # what a driver left that was killed writes no more
      processes.end_all(self._memory.memory)
    with contextlib.ExitStack() as stack:
      stack.callback(self._release)
      self._start(make_hosts, begun, stack)
      self._open = stack.pop_all()

  @property
  def _folder(self) -> Path:
    """The folder of the cell."""
    return self._context.folder

  def _release(self):
    if not self._memory.kept and not self._received:
      self._memory.remove()  # there is nothing to resume from
    self._memory.close()

  def _start(self, make_hosts, begun, stack):
    context, plan = self._context, self._plan
    saved = self._restore() if begun else None
    self._counts = [0] * len(self._writers)  # records that were read, of each
    self._parts: list[Any] = []  # records that were read
    self._received = self._open_files(saved, begun=begun)
    self.done = min(self._received, self.total)
    last = [read_journal(path)[-1:] for path in self._journals()]
    before = max((e.time for (e, *_) in filter(None, last)), default=0.0)
    live = LiveCell(
      *(plan, context.cell, context.experiment.dataset, self._setup()),
      folder=self._folder.absolute(),
      memory=self._memory.memory,
      began=time.monotonic() - before,
      network=self._network(),
    )
    hosts = make_hosts(live, context.machine)
    stack.callback(hosts.hosts.close)
    self.cluster, start = self._make_cluster(live, hosts, saved)
    stack.callback(self.cluster.close)
    self._memory.note(self._replaced())
    self._figures = live_figures.Watch(plan.workers, context.board, self._share)
    stack.callback(self._figures.close)
    with self._errors():
      start()

  # What a protocol has.

  @property
  def _writers(self) -> range:
    """The indices of those that have a journal and records: the workers."""
    return range(self._plan.workers)

  def _prepare(self) -> bool:
    """Returns whether the cell has begun, by its files; raises ValueError if
    one is not there."""
    return any(path.exists() for path in self._journals())

  def _setup(self) -> Setup:
    return live_hosts.setup_of(self._plan)

  def _network(self) -> Network | None:
    """Returns the network whose time calls between parties take, in threads."""
    return None

  def _restore(self) -> Any:
    """Returns what was saved of a cell that has begun; None: nothing."""
    return self._context.restore(self._unpack)

  @abc.abstractmethod
  def _unpack(self, saved: Any) -> Any:
    """Returns what a checkpoint has."""

  def _open_files(self, saved: Any, *, begun: bool) -> int:
    """Drops what was written after that was saved; returns how many messages
    were received."""
    if begun:
      self._go_back(saved)
    return len(self._read().loss)

  def _go_back(self, saved: Any) -> None:
    """Cuts the files to what was saved, of which the second part are notes."""
    notes = saved[1] if saved else {}
    kept = notes.get("files") or [(0, 0) for _ in self._writers]
    others = self._other_journals(notes)
    dropped = self._files.cut_back(self._folder, kept, others)
    self._report_resumed(saved, dropped)

  def _report_resumed(self, saved, dropped):
    where = "the checkpoint" if saved else "the beginning: no checkpoint"
    self._news.append(f"going on from {where}; {dropped} rows are dropped")

  def _other_journals(self, notes: Mapping[str, Any]) -> list[Any]:
    """Returns (journal, rows that were saved) of others than the writers."""
    del notes
    return []

  @abc.abstractmethod
  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[Any, Callable[[], None]]:
    """Returns the cluster of a cell, and what starts it, from what was saved
    unless that is None."""

  @abc.abstractmethod
  def _look_for(self, until: int) -> None:
    """Takes a snapshot at message `until`, if that was received."""

  def _take_last(self) -> None:
    """Takes a snapshot of the end, once the cluster has finished."""
    while not self.cluster.finished:
      self._look(self.total)
    self._look_for(self.total)

  def _pack(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns a checkpoint of a cluster at rest, as `save` does."""
    raise NotImplementedError

  # Files.

  def _journals(self) -> list[Path]:
    """The journals that are written."""
    return [journal_path(self._folder, index) for index in self._writers]

  def _check_files(self):
    """Raises FileGone if one of the files was taken away."""
    paths = [records_path(self._folder, index) for index in self._writers]
    there = {path for path in self._journals() + paths if path.exists()}
    for path in sorted(self._there - there):
      raise FileGone(path)
    self._there = there

  def _read(self) -> Any:
    """Returns the records that are new, and keeps them."""
    parts = []
    for index in self._writers:
      part = self._files.read(self._folder, index, self._counts[index])
      self._counts[index] += len(part.loss)
      parts.append(part)
    new = by_time(parts)
    self._parts.append(new)
    return new

  def _all(self) -> Any:
    """Returns all records."""
    if len(self._parts) > 1:
      self._parts = [by_time(self._parts)]
    return self._parts[0]

  @functools.cached_property
  def _first_ticket(self) -> float:
    rows = (event for path in self._journals() for event in read_journal(path))
    return min(event.time for event in rows if event.action in STARTS)

  # Training.

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    """Raises what a cluster raises as the run loop knows it."""
    try:
      yield
    except failures.AllDied as error:
      raise engines.Died(str(error)) from error
    except failures.NotFinite as error:
      words = self._plan, str(error), self._context.cell.name
      raise engines.NonFiniteResult(
        parameter_server.not_finite(*words)
      ) from error

  def _wait(self, seconds: float) -> None:
    """Waits before the next look, so many seconds at most."""
    time.sleep(seconds)

  def _look(self, until: int) -> None:
    """Checks the cluster after a moment."""
    del until
    self._wait(LOOK if self._there else 0.0)  # the first time at once
    self._news += self.cluster.check(self._received)

  def advance(self, until: int) -> engines.Progress:
    """Checks the cluster once, and reads what it has written."""
    with self._errors():
      self._look(until)
    self._memory.note(self._replaced())
    self._check_files()
    new = self._read()
    self._received += len(new.loss)
    figures = self._figures.look(time.monotonic(), new, self._received)
    with self._errors():
      self._look_for(until)
    news, self._news = self._news, []
    return engines.Progress(
      loss=new.loss,
      staleness=engines.mean(new.staleness),
      gap=engines.mean(new.gap) if self._gaps else None,
      news=news,
      figures=figures,
    )

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters of the message that `advance` was to reach."""
    with self._errors():
      if self._snapshot is None:  # all was evaluated before this process began
        self._take_last()
    assert self._snapshot is not None
    return self._snapshot

  # Results.

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  def records(self) -> Any:
    """Returns a row for each message, in the order of their times."""
    return self._all()

  def _some(self, start: int, end: int) -> Any:
    """Returns the records of some messages, at least one."""
    records = self.records()
    start = max(min(start, end - 1, len(records.loss) - 1), 0)
    return type(records)(*(column[start:end] for column in records))

  # Rest.

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns all parties, as they are when the cluster is at rest; None if
    they did not come to rest to stop, or have done nothing yet."""
    if self._stopped is False:
      return None
    with self._errors():
      if not self._stopped:
        self.cluster.pause()
      packed = self._pack()
      if not self._stopped:
        self.cluster.go_on()
    return packed if packed[0] else None

  def stop(self) -> str:
    """Makes all parties end the round, the clock or the job that they are
    at."""
    with self._errors():
      whole = self.cluster.pause(self._context.machine.grace_seconds)
    self._stopped = whole
    self._received += len(self._read().loss)
    self.done = self._received
    return "" if whole else f"; some {self._who} did not finish in time"

  def discard(self) -> None:
    """Removes what is kept to resume from: there is nothing left to do."""
    self.close()
    memory_lib.forget(self._folder)

  def close(self) -> None:
    """Ends all that the cell has started."""
    self._open.close()
