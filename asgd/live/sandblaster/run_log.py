"""The log of a live run: a trace and records, both also in files."""

import math
from pathlib import Path
from typing import Any

from asgd import base
from asgd.live.append_only import check_rows
from asgd.live.journal import (
  FileJournal,
  cut_journal,
  journal_path,
  read_journal,
)
from asgd.live.records import (
  FileSink,
  count_records,
  read_records,
  records_path,
)
from asgd.orders.trace import Event
from asgd.sandblaster.run_log import Lengths, RunLog


class LiveRunLog(RunLog):
  """A RunLog that also writes rows and messages to files."""

  def __init__(
    self, run: Path, lengths: Lengths | None = None, **options: Any
  ):
    """Opens the files, and cuts them back to the given lengths.

    Args:
      run: folder of the run.
      lengths: numbers of rows and messages to keep; None: keep none.
      **options: options of `AppendOnlyFile`.

    Raises:
      ValueError: if the files have fewer entries.
    """
    super().__init__()
    rows, messages, _ = lengths or (0, 0, 0)
    path = journal_path(run, 0)
    check_rows(path, len(read_journal(path)), rows)
    cut_journal(path, rows)
    self._journal = FileJournal(path, **options)
    path = records_path(run, 0)
    check_rows(path, count_records(path), messages)
    self._sink = FileSink(path, **options)
    self._sink.truncate(messages)
    self.rows = self._journal.events()
    self.messages = read_records(path).rows()
    # Time of the first job's start; NaN before it.
    starts = (row.time for row in self.rows if row.action == base.SEND)
    self.first_start = next(starts, math.nan)

  def write(self, row: Event) -> None:
    """Adds a row of the trace."""
    super().write(row)
    self._journal.append(row)
    if row.action == base.SEND and math.isnan(self.first_start):
      self.first_start = row.time

  def receive(self, *message: float) -> None:
    """Adds a message, given as the fields of base.Records in their order."""
    super().receive(*message)
    self._sink.append(self.records(len(self.messages) - 1))

  def close(self) -> None:
    """Closes the files."""
    self._journal.close()
    self._sink.close()


def last_time(events: list[Event]) -> float:
  """Returns the time of the last row; 0 if there is none."""
  return events[-1].time if events else 0.0
