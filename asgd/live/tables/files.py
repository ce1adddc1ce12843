"""Files of a run of tables; the docstring of the package lists them."""

import contextlib
import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.live import store
from asgd.live.journal import (
  FileJournal,
  check_joined_trace,
  journal_path,
  read_journal,
  read_nonempty_journal,
)
from asgd.live.records import join_by_time as join_by_time
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

_MESSAGE_HEAD = struct.Struct("<qd")  # before a message: seq, time of its row
_IMAGE_HEAD = struct.Struct("<q")  # before an image: rows of the trace


class TableRecords(NamedTuple):
  """Records of U jobs: the columns of `base.Records`, and `reads`."""

  update: npt.NDArray[np.int32]  # [U], messages that shard 0 had applied
  time: npt.NDArray[np.float64]  # [U]
  worker: npt.NDArray[np.int32]  # [U]
  job: npt.NDArray[np.int32]  # [U]
  staleness: npt.NDArray[np.int32]  # [U], clocks that the oldest row lacked
  gap: npt.NDArray[np.float32]  # [U], NaN
  loss: npt.NDArray[np.float32]  # [U]
  accepted: npt.NDArray[np.bool_]  # [U]
  message_norm: npt.NDArray[np.float32]  # [U]
  update_norm: npt.NDArray[np.float32]  # [U]
  bytes_up: npt.NDArray[np.int64]  # [U]
  bytes_down: npt.NDArray[np.int64]  # [U]
  residual_norm: npt.NDArray[np.float32]  # [U]
  reads: npt.NDArray[np.int64]  # [U, BINS], rows read, by clock differential

  @property
  def plain(self) -> base.Records:
    """The records without `reads`."""
    return base.Records(*self[:-1])


FILES = WorkerFiles(TableRecords, "reads", "<i8", (BINS,))
JOB_RECORD = FILES.dtype
cut_back, read_table_records = FILES.cut_back, FILES.read


def columns(rows: Sequence[tuple[float, JobRecord]]) -> TableRecords:
  """Returns (time, record) pairs as columns, with the types of the file."""
  table = np.zeros(len(rows), JOB_RECORD)
  for row, (time, record) in zip(table, rows, strict=True):
    row["time"] = time
    for name, value in record._asdict().items():
      row[name] = value
  return FILES.columns(table)


def order_path(run: Path, index: int) -> Path:
  """Returns the path of a shard's trace."""
  return Path(run) / f"shard-{index}.csv"


def read_divisions(run: Path, first_division: Division) -> list[Division]:
  """Returns all divisions of the tables of a run, beginning with the first."""
  divisions = [first_division]
  # Every shard has a MOVE row for each division; those of shard 0 suffice.
  for event in read_journal(order_path(run, 0)):
    if event.action == base.MOVE:
      divisions.append(divisions[-1].next(first_division.cuts_of(event.totals)))
  return divisions


def rest_seconds(run: Path, workers: int, jobs: int) -> float:
  """Returns how long workers rested while ranges moved.

  For each worker and move this is the time between the worker's last job before
  the move and its next job, in seconds. The times are summed over moves, and
  averaged over workers.

  Args:
    run: folder of the run.
    workers: the number of workers.
    jobs: the number of jobs of each worker between two moves.
  """
  total = 0.0
  for worker in range(workers):
    end_times: dict[int, float] = {}  # jobs done -> end of the last of them
    for event in read_journal(journal_path(run, worker)):
      # Worker j % N does job j of the run, after j // N earlier jobs.
      jobs_done = event.job // workers
      if event.action == base.RECEIVE:
        end_times[jobs_done + 1] = event.time
      elif (
        event.action in STARTS
        and jobs_done % jobs == 0
        and jobs_done in end_times
      ):
        total += event.time - end_times.pop(jobs_done)
  return total / workers


def digest(path: Path, rows: int) -> str:
  """Returns a digest of the first rows of a trace file, or of a records file.

  A CRC-32 would not do: trace rows may end with their own CRCs, and then the
  CRC of all rows together does not depend on their content.
  """
  with path.open("rb") as file:
    if path.suffix == ".csv":
      data = b"".join(itertools.islice(file, rows + 1))  # 1 for the header
    else:
      data = file.read(rows * JOB_RECORD.itemsize)
  return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_orders(run: Path, shards: int, workers: int) -> Orders:
  """Returns the traces of a run; ValueError if a file is empty. A worker that
  exited before it joined, and was not replaced, has only the header."""

  def read_worker(path: Path) -> list[Event]:
    """Returns the rows of a worker; there may be none below the header."""
    if path.exists() and path.stat().st_size:
      return read_journal(path)
    return read_nonempty_journal(run, path)  # raises the error

  shard_paths = [order_path(run, shard) for shard in range(shards)]
  worker_paths = [journal_path(run, worker) for worker in range(workers)]
  return Orders(
    [read_nonempty_journal(run, path) for path in shard_paths],
    [read_worker(path) for path in worker_paths],
  )


def read_rows_of_workers(run: Path) -> list[Event]:
  """Returns the rows of all workers in the order of their times."""
  paths = sorted(Path(run).glob("trace-*.csv"))
  rows = [event for path in paths for event in read_journal(path)]
  return sorted(rows, key=lambda event: event.time)


def read_trace(run: Path, workers: int) -> base.Trace:
  """Returns the jobs of all workers as one trace, in the order of their times.

  Raises:
    ValueError: if a file is missing or was changed.
  """
  for worker in range(workers):
    if not journal_path(run, worker).exists():
      raise ValueError(
        f"{journal_path(run, worker)} is missing: restore the file that the"
        " run wrote"
      )
  rows = read_rows_of_workers(run)
  trace = from_events(rows)
  check_joined_trace(run, trace, depth=len(rows))
  return trace


def count_incarnations(events: Sequence[Event]) -> int:
  """Returns the number of incarnations of a worker, from its rows."""
  return sum(event.action == base.JOIN for event in events)


def open_jobs(events: Sequence[Event]) -> list[Event]:
  """Returns the rows that began jobs which have not ended."""
  start_rows: dict[int, Event] = {}  # by seq
  for event in events:
    if event.action in STARTS:
      start_rows[event.seq] = event
    elif event.action in ENDS:
      start_rows.pop(event.seq, None)
  return list(start_rows.values())


def count_repeated_jobs(run: Path, workers: int) -> int:
  """Returns how many jobs were computed again. These are the lost and rejected
  jobs, except those for which a saved message was sent again."""
  count = 0
  for worker in range(workers):
    for event in read_journal(journal_path(run, worker)):
      count += event.action in (base.LOST, base.REJECT)
      # A start without `totals` belongs to a saved message: the job was not
      # computed again.
      count -= event.action in STARTS and not event.totals
  return count


def write_leave(run: Path, worker: int, now: float, disk: Any = os) -> None:
  """Writes LOST for each open job of a worker that has exited, and LEAVE.

  Args:
    run: folder of the run.
    worker: its index.
    now: time of the rows in seconds, unless the journal has a later row.
    disk: has the methods `write` and `replace` of `os`.
  """
  journal = FileJournal(journal_path(run, worker), disk=disk)
  events = journal.events()
  # The worker's clock may have been ahead; times of rows do not decrease.
  if events:
    now = max(now, events[-1].time)
  for event in open_jobs(events):
    journal.append(Event(now, worker, event.seq, event.job, base.LOST))
  incarnation = count_incarnations(events) - 1
  if incarnation >= 0:
    journal.append(Event(now, worker, NO_SEQ, incarnation, base.LEAVE))
  journal.close()


class LastMessage:
  """The last message of a worker, saved in the memory of the run before any
  shard has it, with the trace row that began its last job."""

  def __init__(
    self, memory: Path, worker: int, incarnation: int, disk: Any = os
  ):
    """Opens the saved messages of a worker, for one of its incarnations. If the
    memory is on another machine, `write` saves none and `read` finds none."""
    self._disk = disk
    self._folder, self._name = Path(memory), f"worker-{worker}-"
    self._incarnation = incarnation

  def _path(self, incarnation: int) -> Path:
    return self._folder / f"{self._name}{incarnation}.message"

  def _saved_incarnations(self) -> list[int]:
    """Returns the incarnations that have saved a message, ascending."""
    paths = self._folder.glob(f"{self._name}*.message")
    numbers = (path.stem.removeprefix(self._name) for path in paths)
    return sorted(int(number) for number in numbers if number.isdecimal())

  def write(self, row: Event, message: ClockMessage) -> None:
    """Saves a message. If it cannot be written, a later incarnation computes
    the jobs again instead of sending the message."""
    if not self._folder.is_dir():
      return
    head = _MESSAGE_HEAD.pack(row.seq, row.time)
    with contextlib.suppress(OSError, ValueError):
      store.write_body(
        self._path(self._incarnation), head + dump_message(message), self._disk
      )
      # Remove earlier messages only now: a kill before this incarnation's first
      # message must leave the message of an earlier incarnation.
      for incarnation in self._saved_incarnations():
        if incarnation < self._incarnation:
          self._path(incarnation).unlink()

  def read(self, events: Sequence[Event]) -> tuple[Event, ClockMessage] | None:
    """Returns (row, message) of the latest earlier incarnation that saved a
    message.

    Args:
      events: the worker's rows.

    Returns:
      None if there is no message, or if it is damaged or belongs to another
      run.
    """
    earlier_incarnations = [
      incarnation
      for incarnation in self._saved_incarnations()
      if incarnation < self._incarnation
    ]
    if not earlier_incarnations:
      return None
    try:
      body = store.read_body(self._path(earlier_incarnations[-1]))
      seq, time = _MESSAGE_HEAD.unpack_from(body)
    except (store.Changed, struct.error):
      return None
    for event in reversed(events):
      if event.action in STARTS and event.seq == seq:
        # The row has another time if the message is of an earlier run in this
        # folder, or of this run before a rollback.
        if event.time != time:
          return None
        return event, load_message(body[_MESSAGE_HEAD.size :])
    return None


def write_image(
  folder: Path, data: bytes, rows: int, disk: Any = os
) -> None:
  """Replaces the image of a shard, which has `rows` rows of its trace. Raises
  ValueError if the image cannot be written."""
  store.write_body(folder / "snapshots", _IMAGE_HEAD.pack(rows) + data, disk)


def read_image(folder: Path) -> tuple[int, bytes] | None:
  """Returns (rows of the trace, image), or None if there is no image. Raises
  ValueError if the image was changed."""
  path = folder / "snapshots"
  if not path.exists():
    return None
  body = store.read_body(path)
  (rows,) = _IMAGE_HEAD.unpack_from(body)
  return rows, body[_IMAGE_HEAD.size :]
