"""The files of a run of tables; see the room's docstring."""

import contextlib
import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base
from asgd.live import store
from asgd.live.journal import (
  FileJournal,
  check_together,
  journal_path,
  read_begun,
  read_journal,
)
from asgd.live.records import by_time as by_time
from asgd.live.worker_files import WorkerFiles
from asgd.orders.trace import ENDS, NO_SEQ, STARTS, Event, from_events
from asgd.tables.division import Division
from asgd.tables.replay import Orders
from asgd.tables.requests import (
  BINS,
  ClockMessage,
  JobRecord,
  dump_message,
  load_message,
)

_MESSAGE = struct.Struct("<qd")  # before a message: seq and time of its row
_IMAGE = struct.Struct("<q")  # before an image: rows of the order


class TableRecords(
  NamedTuple(  # noqa: UP014  of the fields of another
    "TableRecords",
    [*base.Records.__annotations__.items(), ("reads", np.ndarray)],
  )
):
  """Records of jobs, as columns; `reads` is int[m, BINS]."""

  @property
  def plain(self) -> base.Records:
    """Without the reads."""
    return base.Records(*self[:-1])


FILES = WorkerFiles(TableRecords, "reads", "<i8", (BINS,))
JOB_RECORD = FILES.dtype
cut_back, read_table_records = FILES.cut_back, FILES.read


def columns(rows: Sequence[tuple[float, JobRecord]]) -> TableRecords:
  """Returns (time, record) as columns, in the types of a file."""
  table = np.zeros(len(rows), JOB_RECORD)
  for row, (time, record) in zip(table, rows, strict=True):
    row["time"] = time
    for name, value in record._asdict().items():
      row[name] = value
  return FILES.columns(table)


def order_path(run: Path, index: int) -> Path:
  """The file of a shard's order."""
  return Path(run) / f"shard-{index}.csv"


def read_divisions(run: Path, first: Division) -> list[Division]:
  """Returns the divisions of tables of a run, with the first."""
  out = [first]
  for event in read_journal(order_path(run, 0)):
    if event.action == base.MOVE:
      out.append(out[-1].next(first.cuts_of(event.totals)))
  return out


def rest_seconds(run: Path, workers: int, jobs: int) -> float:
  """Returns how long workers waited for ranges to move: the mean over workers
  of the seconds between their last job before a move and the next one, summed
  over moves, which there are after every so many jobs of each."""
  total = 0.0
  for worker in range(workers):
    ended: dict[int, float] = {}  # jobs done -> when
    for event in read_journal(journal_path(run, worker)):
      done = event.job // workers
      if event.action == base.RECEIVE:
        ended[done + 1] = event.time
      elif event.action in STARTS and done % jobs == 0 and done in ended:
        total += event.time - ended.pop(done)
  return total / workers


def digest(path: Path, rows: int) -> str:
  """Returns a digest of so many rows of a journal, or of records. It is no
  CRC-32: that is the same of all rows which end with their own."""
  with path.open("rb") as file:
    if path.suffix == ".csv":
      data = b"".join(itertools.islice(file, rows + 1))
    else:
      data = file.read(rows * JOB_RECORD.itemsize)
  return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_orders(run: Path, shards: int, workers: int) -> Orders:
  """Returns what a run wrote down; ValueError if some of it is empty."""
  paths = [order_path(run, s) for s in range(shards)]
  paths += [journal_path(run, w) for w in range(workers)]
  rows = [read_begun(run, path) for path in paths]
  return Orders(rows[:shards], rows[shards:])


def read_rows_of_workers(run: Path) -> list[Event]:
  """Returns the rows of all workers, by their times."""
  paths = sorted(Path(run).glob("trace-*.csv"))
  rows = [event for path in paths for event in read_journal(path)]
  return sorted(rows, key=lambda event: event.time)


def read_trace(run: Path, workers: int) -> base.Trace:
  """Returns the jobs of all workers as one trace, by their times. ValueError if
  they are not what workers wrote."""
  for worker in range(workers):
    if not journal_path(run, worker).exists():
      raise ValueError(
        f"{journal_path(run, worker)} is gone: put it back as the run wrote it"
      )
  rows = read_rows_of_workers(run)
  trace = from_events(rows)
  check_together(run, trace, depth=len(rows))
  return trace


def lives_of(events: Sequence[Event]) -> int:
  """Returns how many holders a place has had."""
  return sum(event.action == base.JOIN for event in events)


def open_jobs(events: Sequence[Event]) -> list[Event]:
  """Returns the rows that began jobs which have not ended, of the last
  holder."""
  begun: dict[int, Event] = {}
  for event in events:
    if event.action in STARTS:
      begun[event.seq] = event
    elif event.action in ENDS:
      begun.pop(event.seq, None)
  return list(begun.values())


def done_again(run: Path, workers: int) -> int:
  """Returns how many jobs that had begun were done again: those that were lost,
  but for those whose message was there (its row has no `totals`)."""
  count = 0
  for worker in range(workers):
    for event in read_journal(journal_path(run, worker)):
      count += event.action in (base.LOST, base.REJECT)
      count -= event.action in STARTS and not event.totals
  return count


def leave(run: Path, worker: int, now: float, disk: Any = os) -> None:
  """Writes that a worker has died, and with it the jobs that it was at."""
  journal = FileJournal(journal_path(run, worker), disk=disk)
  events = journal.events()
  now = max([now, *(event.time for event in events[-1:])])
  for event in open_jobs(events):
    journal.append(Event(now, worker, event.seq, event.job, base.LOST))
  life = lives_of(events) - 1
  if life >= 0:
    journal.append(Event(now, worker, NO_SEQ, life, base.LEAVE))


class LastMessage:
  """The last message of a worker, kept in the memory of the run before any
  shard has it, with the row of the journal that began its last job."""

  def __init__(self, memory: Path, worker: int, life: int, disk: Any = os):
    """Of an incarnation of a worker; it keeps none if the memory is on another
    machine."""
    self._disk = disk
    self._folder, self._name = Path(memory), f"worker-{worker}-"
    self._life = life

  def _path(self, life):
    return self._folder / f"{self._name}{life}.message"

  def _lives(self):
    """Those of which there is a message."""
    paths = self._folder.glob(f"{self._name}*.message")
    lives = (path.stem.removeprefix(self._name) for path in paths)
    return sorted(int(life) for life in lives if life.isdecimal())

  def write(self, row: Event, message: ClockMessage) -> None:
    """Keeps a message. If it cannot, the next incarnation does its jobs
    again."""
    if not self._folder.is_dir():
      return
    head = _MESSAGE.pack(row.seq, row.time)
    with contextlib.suppress(OSError, ValueError):
      store.write_body(
        self._path(self._life), head + dump_message(message), self._disk
      )
      for life in self._lives():
        if life < self._life:
          self._path(life).unlink()

  def read(self, events: Sequence[Event]) -> tuple[Event, ClockMessage] | None:
    """Returns (row, message) that incarnations before have left, whose rows
    are these; None if there is none of them, or it was changed."""
    lives = [life for life in self._lives() if life < self._life]
    if not lives:
      return None
    try:
      body = store.read_body(self._path(lives[-1]))
      seq, time = _MESSAGE.unpack_from(body)
    except (store.Changed, struct.error):
      return None
    for event in reversed(events):
      if event.action in STARTS and event.seq == seq:
        # Another run may have left it, or this one before it went back.
        same = event.time == time
        return (event, load_message(body[_MESSAGE.size :])) if same else None
    return None


def write_image(
  folder: Path, data: bytes, rows: int, disk: Any = os
) -> None:
  """Writes an image of a shard, of so many rows of its order, in the place of
  the last one. Raises ValueError if the disk does not take it."""
  store.write_body(folder / "snapshots", _IMAGE.pack(rows) + data, disk)


def read_image(folder: Path) -> tuple[int, bytes] | None:
  """Returns (rows of the order, image), None if there is none. ValueError if it
  was changed."""
  path = folder / "snapshots"
  if not path.exists():
    return None
  body = store.read_body(path)
  (rows,) = _IMAGE.unpack_from(body)
  return rows, body[_IMAGE.size :]
