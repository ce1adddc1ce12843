"""What a live run writes down as it goes: a journal and records, as a server's
lead does."""

import itertools
from pathlib import Path

import numpy as np

from asgd import base
from asgd.live.append_only import PUT_BACK
from asgd.live.journal import FileJournal, journal_path, read_journal
from asgd.live.records import (
  FileSink,
  count_records,
  read_records,
  records_path,
)
from asgd.orders.trace import Event
from asgd.sandblaster.book import Book, Lengths


class LiveBook(Book):
  """A book whose rows and messages are in files, too."""

  def __init__(self, run: Path, lengths: Lengths | None = None):
    """Starts, or goes on with the first rows and messages in the files, and
    drops what comes after them. Raises ValueError if there are fewer."""
    super().__init__()
    rows, messages, _ = lengths or (0, 0, 0)
    _cut_journal(journal_path(run, 0), rows)
    self._journal = FileJournal(journal_path(run, 0))
    there = count_records(records_path(run, 0))
    if there < messages:
      raise ValueError(
        f"{records_path(run, 0)} has {there} records where the run goes on from"
        f" {messages}: it was cut short. {PUT_BACK}"
      )
    self._sink = FileSink(records_path(run, 0))
    self._sink.truncate(messages)
    self.rows = self._journal.events()
    columns = (c.tolist() for c in read_records(records_path(run, 0)))
    self.messages = list(zip(*columns, strict=True))

  def write(self, row: Event) -> None:
    """Adds a row of the trace."""
    super().write(row)
    self._journal.append(row)

  def receive(self, *message: float) -> None:
    """Adds a message, in the order of base.Records."""
    super().receive(*message)
    self._sink.append(self.records(len(self.messages) - 1))


def _cut_journal(path, rows):
  """Leaves so many rows, of a journal that has as many."""
  if not path.exists():
    there = 0
  else:
    there = len(read_journal(path))
  if there < rows:
    raise ValueError(
      f"{path} has {there} rows where the run goes on from {rows}: it was cut"
      f" short. {PUT_BACK}"
    )
  if there > rows:
    with path.open("rb") as file:
      kept = sum(map(len, itertools.islice(file, rows + 1)))
    with path.open("r+b") as file:
      file.truncate(kept)


def last_time(events: list[Event]) -> float:
  """Returns when the last row was written."""
  return events[-1].time if events else 0.0


def first_ticket(events: list[Event]) -> float:
  """Returns when the first job was begun; NaN before that."""
  return next((e.time for e in events if e.action == base.SEND), np.nan)
