"""Journals and records that workers write about their own jobs.

Peers, and the workers of a parameter table (`asgd.tables`), have these files:
they have no server that could record their messages.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.live.append_only import check_rows
from asgd.live.journal import (
  FileJournal,
  cut_journal,
  journal_path,
  read_journal,
)
from asgd.live.records import (
  RECORD,
  FileSink,
  check_count,
  join_by_time,
  read_rows,
  records_path,
)
from asgd.orders.trace import STARTS, Event


class WorkerFiles:
  """Opens, reads and cuts the files of workers.

  Attributes:
    dtype: the dtype of a row of the records: RECORD with the extra column.
  """

  def __init__(self, columns: Any, *extra_column: Any):
    """Defines the records of a protocol.

    Args:
      columns: the NamedTuple type of the records' columns.
      *extra_column: the column that RECORD lacks: name, dtype and, for a
        column of arrays, their shape.
    """
    self._columns = columns
    # The checksum stays the last column.
    self.dtype = np.dtype([*RECORD.descr[:-1], extra_column, RECORD.descr[-1]])

  def open(
    self, run: Path, index: int, disk: Any = os
  ) -> tuple[FileJournal, FileSink]:
    """Opens or creates the journal and the records of a worker. `disk` has the
    methods `write` and `replace` of `os`."""
    path = records_path(run, index)
    journal = FileJournal(journal_path(run, index), disk=disk)
    return journal, FileSink(path, dtype=self.dtype, disk=disk)

  def columns(self, rows: np.ndarray) -> Any:
    """Returns a structured array of rows as the NamedTuple of its columns."""
    names = self._columns._fields
    return self._columns(*(rows[name].copy() for name in names))

  def read(self, run: Path, index: int, start: int = 0) -> Any:
    """Returns the records of a worker, from record `start` on."""
    path = records_path(run, index)
    return self.columns(read_rows(path, self.dtype, start))

  def read_all(self, run: Path, workers: int) -> Any:
    """Returns the records of all workers, in the order of their times."""
    return join_by_time([self.read(run, index) for index in range(workers)])

  def counts(self, run: Path, index: int) -> tuple[int, int]:
    """Returns the numbers (rows, records) that a worker has written."""
    rows = len(read_journal(journal_path(run, index)))
    return rows, len(self.read(run, index).loss)

  def checkpoint_counts(
    self, run: Path, workers: int, saved_counts: Mapping[int, Sequence[int]]
  ) -> list[Sequence[int]]:
    """Returns the numbers (rows, records) of each worker at a checkpoint.

    These are the numbers that were saved with the worker's state
    (`saved_counts`), or all that the worker has written if its state was not
    saved.
    """
    return [
      saved_counts[index] if index in saved_counts else self.counts(run, index)
      for index in range(workers)
    ]

  def check(
    self,
    run: Path,
    workers: int,
    count_lost: Callable[[Sequence[Event]], int],
    noun: str = "messages",
  ) -> None:
    """Checks that each worker has a record of each job that was received.

    Args:
      run: the folder of the run.
      workers: the number of workers.
      count_lost: rows of a worker -> how many of its records may be missing.
      noun: the word for received jobs in the error.

    Raises:
      ValueError: if a worker has more records than received jobs, or fewer than
        received jobs - count_lost(rows).
    """
    for index in range(workers):
      events = read_journal(journal_path(run, index))
      path, count = records_path(run, index), len(self.read(run, index).loss)
      check_count(path, count, events, count_lost(events), noun)

  def cut_back(
    self,
    run: Path,
    worker_counts: Sequence[Sequence[int]],
    other_journals: Sequence[tuple[Path, int]] = (),
  ) -> int:
    """Cuts all files back to a checkpoint.

    Args:
      run: the folder of the run.
      worker_counts: (rows, records) of each worker in the checkpoint.
      other_journals: (path, rows in the checkpoint) of journals that are not a
        worker's.

    Returns:
      The number of rows that were dropped.

    Raises:
      ValueError: if a file has fewer rows than the checkpoint; nothing is cut.
    """
    dropped, journals = 0, [*other_journals]
    # [1] Check all files before any of them is cut.
    for index, (rows, records) in enumerate(worker_counts):
      journals.append((journal_path(run, index), rows))
      actual_records = len(self.read(run, index).loss)
      check_rows(records_path(run, index), actual_records, records)
    for path, rows in journals:
      actual_rows = len(read_journal(path))
      check_rows(path, actual_rows, rows)
      dropped += actual_rows - rows
    # [2] Cut. A kill between two cuts is harmless: the next driver cuts again.
    for path, rows in journals:
      cut_journal(path, rows)
    for index, (_, records) in enumerate(worker_counts):
      sink = FileSink(records_path(run, index), dtype=self.dtype)
      sink.truncate(records)
      sink.close()
    return dropped


class WorkerJournal:
  """Appends rows to the journal of one worker. Subclasses append the records.

  Attributes:
    index: the index of the worker.
    started_jobs: number of jobs that it started, earlier incarnations included.
  """

  def __init__(
    self,
    index: int,
    files: tuple[FileJournal, FileSink],
    clock: Callable[[], float],
  ):
    """Continues after the rows of the journal; `files` are the journal and the
    records. `clock` returns the seconds since the beginning of the run."""
    self.index, self._clock = index, clock
    self._journal, self._sink = files
    self._time = 0.0  # of the last row
    self.started_jobs = 0
    for event in self._journal.events():
      self._count_row(event)

  def _count_row(self, event: Event) -> None:
    """Counts a row of the journal, and advances the time to it."""
    self._time = max(self._time, event.time)
    self.started_jobs += event.action in STARTS

  def write(self, seq: int, job: int, action: int, **fields: Any) -> Event:
    """Appends a row and returns it; `fields` are further fields of an Event."""
    # Times never decrease, even if the clock is behind after a restart.
    time = max(self._clock(), self._time)
    event = Event(time, self.index, seq, job, action, **fields)
    self._journal.append(event)
    self._count_row(event)
    return event

  def counts(self) -> tuple[int, int]:
    """Returns the numbers of rows and of records."""
    return len(self._journal.events()), self._sink.count

  def close(self) -> None:
    """Closes the journal and the records."""
    self._journal.close()
    self._sink.close()
