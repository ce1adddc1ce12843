"""Journals and records that workers write about their own jobs.

Peers and workers of tables have these files.
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
  by_time,
  check_count,
  read_rows,
  records_path,
)
from asgd.orders.trace import STARTS, Event


class WorkerFiles:
  """Opens, reads and cuts the files of workers."""

  def __init__(self, columns: Any, *last: Any):
    """Takes the NamedTuple of the records' columns, and the column that only
    this protocol has: (name, dtype) or (name, dtype, shape)."""
    self._columns = columns
    self.dtype = np.dtype([*RECORD.descr[:-1], last, RECORD.descr[-1]])

  def open(
    self, run: Path, index: int, disk: Any = os
  ) -> tuple[FileJournal, FileSink]:
    """Opens or creates the journal and the records of a worker; `disk` writes
    them."""
    path = records_path(run, index)
    journal = FileJournal(journal_path(run, index), disk=disk)
    return journal, FileSink(path, dtype=self.dtype, disk=disk)

  def columns(self, rows: np.ndarray) -> Any:
    """Returns rows as columns."""
    names = self._columns._fields
    return self._columns(*(rows[name].copy() for name in names))

  def read(self, run: Path, index: int, start: int = 0) -> Any:
    """Returns the records of a worker, from record `start` on."""
    path = records_path(run, index)
    return self.columns(read_rows(path, self.dtype, start))

  def read_all(self, run: Path, workers: int) -> Any:
    """Returns the records of all workers, in the order of their times."""
    return by_time([self.read(run, index) for index in range(workers)])

  def length(self, run: Path, index: int) -> tuple[int, int]:
    """Returns the numbers of rows and records that a worker has written."""
    rows = len(read_journal(journal_path(run, index)))
    return rows, len(self.read(run, index).loss)

  def lengths(
    self, run: Path, workers: int, images: Mapping[int, Sequence[int]]
  ) -> list[Sequence[int]]:
    """Returns the numbers of rows and records of each worker in a checkpoint:
    the counts of its image, or all rows if a worker has no image."""
    return [
      images[index] if index in images else self.length(run, index)
      for index in range(workers)
    ]

  def check(
    self,
    run: Path,
    workers: int,
    lost: Callable[[Sequence[Event]], int],
    what: str = "messages",
  ) -> None:
    """Raises ValueError if a worker has fewer records than received jobs, less
    the number that `lost` returns for its rows."""
    for index in range(workers):
      events = read_journal(journal_path(run, index))
      path, count = records_path(run, index), len(self.read(run, index).loss)
      check_count(path, count, events, lost(events), what)

  def cut_back(
    self,
    run: Path,
    kept: Sequence[Sequence[int]],
    others: Sequence[tuple[Path, int]] = (),
  ) -> int:
    """Cuts all files back to a checkpoint.

    Args:
      run: the folder of the run.
      kept: (rows, records) of each worker in the checkpoint.
      others: (journal, rows) of other parties.

    Returns:
      The number of rows that were dropped.

    Raises:
      ValueError: if a file has fewer rows than the checkpoint; nothing is cut.
    """
    dropped, journals = 0, [*others]
    # [1] Check all files before any of them is cut.
    for index, (rows, records) in enumerate(kept):
      journals.append((journal_path(run, index), rows))
      actual_records = len(self.read(run, index).loss)
      check_rows(records_path(run, index), actual_records, records)
    for path, rows in journals:
      actual_rows = len(read_journal(path))
      check_rows(path, actual_rows, rows)
      dropped += actual_rows - rows
    # [2] A kill between two cuts is harmless: the next command cuts again.
    for path, rows in journals:
      cut_journal(path, rows)
    for index, (_, records) in enumerate(kept):
      path = records_path(run, index)
      FileSink(path, dtype=self.dtype).truncate(records)
    return dropped


class WorkerJournal:
  """Appends to the journal and the records of one worker."""

  def __init__(
    self,
    index: int,
    files: tuple[FileJournal, FileSink],
    clock: Callable[[], float],
  ):
    """Continues after the rows of the journal. `clock` returns the seconds of
    the run."""
    self.index, self._clock = index, clock
    self._journal, self._sink = files
    self._time = 0.0  # of the last row
    self.seqs = 0  # count of started jobs, earlier incarnations included
    for event in self._journal.events():
      self._note(event)

  def _note(self, event: Event) -> None:
    """Updates time and count by a row of the journal."""
    self._time = max(self._time, event.time)
    self.seqs += event.action in STARTS

  def write(self, seq: int, job: int, action: int, **fields: Any) -> Event:
    """Appends a row and returns it; `fields` are further ones of an Event."""
    # Times never decrease, though the clock may after a restart.
    time = max(self._clock(), self._time)
    event = Event(time, self.index, seq, job, action, **fields)
    self._journal.append(event)
    self._note(event)
    return event

  def counts(self) -> tuple[int, int]:
    """Returns the numbers of rows and records."""
    return len(self._journal.events()), self._sink.count
