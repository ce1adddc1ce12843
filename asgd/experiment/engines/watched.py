"""What live engines share whose workers write down what they do.

Each worker, or peer, has a journal and records of its own. The driver looks at
their files and at the cluster: it replaces who dies, evaluates parameters as
they are, and has all come to rest for a checkpoint. A run that was stopped or
killed goes on from its last checkpoint; what was written after that is dropped.
"""

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asgd.experiment import engines, live_figures
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import parameter_server
from asgd.live import failures, processes
from asgd.live.append_only import FileGone
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import by_time, records_path
from asgd.orders.trace import STARTS

LOOK = 0.1  # seconds between two looks at the cluster
@contextlib.contextmanager
def engine_errors(context: engines.Context) -> Iterator[None]:
  """What a cluster raises, as the run loop knows it."""
  try:
    yield
  except failures.AllDied as error:
    raise engines.Died(str(error)) from error
  except failures.NotFinite as error:
    raise engines.NonFiniteResult(
      parameter_server.not_finite(context.plan, str(error), context.cell.name)
    ) from error


class WatchedEngine(engines.Engine):
  """A cell that is watched until all its jobs are received."""

  cluster: Any  # of asgd.live.gossip or asgd.live.tables
  _who = "workers"
  _gaps = False  # whether records have them

  def __init__(
    self,
    context: engines.Context,
    make_cluster: Callable[..., Any],
    *,
    begun: bool,
  ):
    """Starts the cell, or goes on from its last checkpoint if it has `begun`;
    `make_cluster` is handed on to `_make`."""
    self._context, self.total = context, context.plan.messages
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    if begun:  # what a driver left that was killed writes no more
      processes.end_all(self._memory.memory)
    self._received = 0
    self._news: list[str] = []
    self._there: set[Path] = set()  # files, as it saw last
    self._snapshot: engines.Snapshot | None = None
    self._stopped: bool | None = None  # whether all came to rest in time
    with contextlib.ExitStack() as stack:
      stack.callback(self._release)
      self._start(make_cluster, begun, stack)
      self._open = stack.pop_all()

  @property
  def _plan(self) -> Any:
    """The plan of the cell."""
    return self._context.plan

  @property
  def _folder(self) -> Path:
    """The folder of the cell."""
    return self._context.folder

  @property
  def _places(self) -> range:
    """The indices of the workers."""
    return range(self._plan.workers)

  def _release(self):
    if not self._memory.kept and not self._received:
      self._memory.remove()  # there is nothing to go on with
    self._memory.close()

  def _start(self, make_cluster, begun, stack):
    context = self._context
    images = context.restore(self._unpack) if begun else None
    if begun:
      self._go_back(images)
    self._counts = [0] * len(self._places)  # records that were read, of each
    self._parts: list[Any] = []
    self._received = len(self._read().loss)
    self.done = min(self._received, self.total)
    last = [read_journal(path)[-1:] for path in self._journals()]
    before = max((e.time for (e, *_) in filter(None, last)), default=0.0)
    began = time.monotonic() - before
    self.cluster = self._make(make_cluster, began, images)
    stack.callback(self.cluster.close)
    self._memory.note(self._replaced())
    self._figures = live_figures.Watch(len(self._places), context.board)
    stack.callback(self._figures.close)
    self._next_look = 0.0
    with self._watched():
      self.cluster.start(images)

  # What a kind of cluster has of its own.

  @abc.abstractmethod
  def _make(self, make_cluster, began, images):
    """Returns a cluster that is to start, or with images to go on."""

  @abc.abstractmethod
  def _unpack(self, saved):
    """Returns the images of a checkpoint."""

  @abc.abstractmethod
  def _go_back(self, images):
    """Drops what was written after the checkpoint, or all without one."""

  @abc.abstractmethod
  def _records_of(self, place: int, start: int = 0) -> Any:
    """Returns the records of a worker, from one on."""

  @abc.abstractmethod
  def _look_for(self, until: int) -> None:
    """Takes a snapshot at message `until`, if that was received."""

  @abc.abstractmethod
  def _take_last(self) -> None:
    """Takes a snapshot of the end."""

  # Files.

  def _journals(self) -> list[Path]:
    """The journals that are written."""
    return [journal_path(self._folder, place) for place in self._places]

  def _check_files(self):
    """Raises FileGone if one of the files was taken away."""
    paths = [records_path(self._folder, place) for place in self._places]
    there = {path for path in self._journals() + paths if path.exists()}
    for path in sorted(self._there - there):
      raise FileGone(path)
    self._there = there

  def _read(self) -> Any:
    """Returns the records that are new, and keeps them."""
    parts = []
    for place in self._places:
      parts.append(self._records_of(place, self._counts[place]))
      self._counts[place] += len(parts[-1].loss)
    new = by_time(parts)
    self._parts.append(new)
    return new

  def _all(self) -> Any:
    """Returns all records."""
    if len(self._parts) > 1:
      self._parts = [by_time(self._parts)]
    return self._parts[0]

  def _say_going_on(self, images, dropped, more=""):
    where = "the checkpoint" if images else "the beginning: no checkpoint"
    told = f"going on from {where}; {dropped} rows are dropped{more}"
    self._news.append(told)

  def _length_of(self, place: int) -> list[int]:
    """Returns (rows, records) of one that has died: all there are."""
    rows = read_journal(journal_path(self._folder, place))
    return [len(rows), len(self._records_of(place).loss)]

  @functools.cached_property
  def _first_ticket(self) -> float:
    paths = [journal_path(self._folder, place) for place in self._places]
    rows = (event for path in paths for event in read_journal(path))
    return min(event.time for event in rows if event.action in STARTS)

  # Training.

  def _watched(self):
    return engine_errors(self._context)

  def _look(self):
    """Looks after the cluster."""
    with self._watched():
      self._news += self.cluster.check(self._received)
    self._memory.note(self._replaced())

  def _wait(self, seconds):
    """Waits before the next look, no longer than so many seconds."""
    time.sleep(seconds)

  def advance(self, until: int) -> engines.Progress:
    """Looks at the cluster once, a moment after the last time."""
    self._wait(max(self._next_look - time.monotonic(), 0))
    self._next_look = time.monotonic() + LOOK
    self._look()
    news, self._news = self._news, []
    self._check_files()
    new = self._read()
    self._received += len(new.loss)
    figures = self._figures.look(time.monotonic(), new, self._received)
    with self._watched():
      self._look_for(until)
    return engines.Progress(
      loss=new.loss,
      staleness=engines.mean(new.staleness),
      gap=engines.mean(new.gap) if self._gaps else None,
      news=news,
      figures=figures,
    )

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters of the message that `advance` was to reach."""
    if self._snapshot is None:  # all was evaluated before this process began
      while not self.cluster.finished:
        self._look()
        time.sleep(LOOK)
      with self._watched():
        self._take_last()
    assert self._snapshot is not None
    return self._snapshot

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  # Rest.

  def stop(self) -> str:
    """Lets all end the same round or clock, or the job that they are at."""
    with self._watched():
      whole = self.cluster.pause(self._context.machine.grace_seconds)
    self._stopped = whole
    self._received += len(self._read().loss)
    self.done = self._received
    return "" if whole else f"; some {self._who} did not finish in time"

  def discard(self) -> None:
    """Removes what is kept to go on with: there is nothing to do any more."""
    self.close()
    memory_lib.forget(self._folder)

  def close(self) -> None:
    """Ends all that the cluster has started."""
    self._open.close()
