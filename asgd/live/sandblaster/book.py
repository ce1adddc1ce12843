"""What a live run writes down as it goes: a journal and records, as a server's
lead does."""

from pathlib import Path
from typing import Any

import numpy as np

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
from asgd.sandblaster.book import Lengths, RunLog


class LiveRunLog(RunLog):
  """A book whose rows and messages are in files, too."""

  def __init__(
    self, run: Path, lengths: Lengths | None = None, **options: Any
  ):
    """Starts, or goes on with the first rows and messages in the files, and
    drops what comes after them. Raises ValueError if there are fewer. Options
    are those of `AppendOnlyFile`."""
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
    # When the first job was begun; NaN before that.
    jobs = (row.time for row in self.rows if row.action == base.SEND)
    self.began = next(jobs, np.nan)

  def write(self, row: Event) -> None:
    """Adds a row of the trace."""
    super().write(row)
    self._journal.append(row)
    if row.action == base.SEND and np.isnan(self.began):
      self.began = row.time

  def receive(self, *message: float) -> None:
    """Adds a message, in the order of base.Records."""
    super().receive(*message)
    self._sink.append(self.records(len(self.messages) - 1))


def last_time(events: list[Event]) -> float:
  """Returns when the last row was written."""
  return events[-1].time if events else 0.0
