"""The files of a run of peers: of each a journal and records."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, gossip, simulator
from asgd.live.append_only import check_rows
from asgd.live.journal import (
  FileJournal,
  check_together,
  cut_journal,
  journal_path,
  read_begun,
  read_journal,
)
from asgd.live.records import FileSink, read_rows, records_path
from asgd.live.records import by_time as by_time
from asgd.orders.trace import ENDS, NO_SEQ, STARTS, Event

RECORD = np.dtype(
  [
    *(
      (name, column.dtype.newbyteorder("<"))
      for name, column in simulator.join_records([])._asdict().items()
    ),
    ("crc32", "<u4"),
  ]
)


def open_files(
  run: Path, index: int, disk: Any = os
) -> tuple[FileJournal, FileSink]:
  """Opens, or makes, the journal and the records of a peer, which `disk`
  writes."""
  journal = FileJournal(journal_path(run, index), disk=disk)
  return journal, FileSink(records_path(run, index), dtype=RECORD, disk=disk)


def read_peer_records(
  run: Path, index: int, start: int = 0
) -> simulator.PeerRecords:
  """Returns the records of a peer, from one on."""
  rows = read_rows(records_path(run, index), RECORD, start)
  names = simulator.PeerRecords._fields
  return simulator.PeerRecords(*(rows[name].copy() for name in names))


def read_trace(run: Path, peers: int) -> base.Trace:
  """Returns the one trace of all journals. ValueError if they cannot be obeyed,
  or one is empty."""
  journals = []
  for index in range(peers):
    journals.append(read_begun(run, journal_path(run, index)))
  try:
    trace = gossip.orders.merge(journals)
  except ValueError as error:
    raise ValueError(
      f"{run}: {error}: trace-K.csv of one of these two peers was cut or"
      " changed; put it back as the run wrote it"
    ) from error
  check_together(run, trace)
  return trace


def lives_of(events: Sequence[Event]) -> int:
  """Returns how many holders left a peer's place."""
  return sum(event.action == base.LEAVE for event in events)


def residuals_lost(
  events: Sequence[Event], records: simulator.PeerRecords
) -> list[tuple[Event, float]]:
  """Returns the LEAVE rows of a peer's journal, and of each the RMS of what the
  codec of who left had kept back, as its last record says; 0 without one."""
  jobs, norms = records.job.tolist(), records.residual_norm.tolist()
  known = dict(zip(jobs, norms, strict=True))
  lost, kept = [], 0.0
  for event in events:
    if event.action == base.RECEIVE:
      kept = known.get(event.job, kept)
    elif event.action == base.LEAVE:
      lost.append((event, kept))
      kept = 0.0
  return lost


def last_residual_lost(run: Path, index: int) -> float:
  """Returns the last of `residuals_lost`, of a peer that has left."""
  events = read_journal(journal_path(run, index))
  ((_, kept),) = residuals_lost(events, read_peer_records(run, index))[-1:]
  return kept


class Left(NamedTuple):
  """An incarnation of a peer that has exited."""

  begun: int  # jobs that it began
  lost: list[int]  # numbers of the jobs that it began and did not receive


def numbers_of(events: Sequence[Event]) -> list[int]:
  """Returns the numbers of the jobs that a peer's journal begins, but for those
  that others are to do: of peers that left, and were at them or refused."""
  numbers: dict[int, None] = {}
  refused: list[int] = []
  for event in events:
    if event.action in STARTS:
      numbers[event.job] = None
    elif event.action == base.REJECT:
      refused.append(event.job)
    elif event.action == base.LOST:
      numbers.pop(event.job, None)
    elif event.action == base.LEAVE:
      for number in refused:
        numbers.pop(number, None)
      refused = []
  return list(numbers)


def leave(
  run: Path, index: int, life: int, now: float, disk: Any = os
) -> Left:
  """Writes that an incarnation of a peer has exited, if it has joined."""
  journal = FileJournal(journal_path(run, index), disk=disk)
  lives, begun, joined = 0, 0, not life
  last, end = None, None  # the row that began its last job, and what ended it
  for event in journal.events():
    if lives == life and event.action in STARTS:
      last, end, begun = event, None, begun + 1
    elif lives == life and event.action in ENDS:
      end = event.action
    elif lives == life and event.action == base.JOIN:
      joined = True
    lives += event.action == base.LEAVE
  if joined and lives == life:
    now = max([now, *(event.time for event in journal.events()[-1:])])
    if last and end is None:
      journal.append(Event(now, index, last.seq, last.job, base.LOST))
    journal.append(Event(now, index, NO_SEQ, life, base.LEAVE))
  return Left(begun, [last.job] if last and end != base.RECEIVE else [])


def length_of(run: Path, index: int) -> tuple[int, int]:
  """Returns how many rows and records a peer has written."""
  rows = len(read_journal(journal_path(run, index)))
  return rows, len(read_peer_records(run, index).loss)


def lengths(
  run: Path, peers: int, images: Mapping[int, Any]
) -> list[tuple[int, int]]:
  """Returns how many rows and records of each peer belong to a checkpoint:
  those that its image counts, and of a peer without an image all."""
  out = []
  for index in range(peers):
    if index in images:
      _, notes = images[index]
      out.append((notes["rows"], notes["records"]))
    else:
      out.append(length_of(run, index))
  return out


def cut_back(run: Path, kept: Sequence[tuple[int, int]]) -> int:
  """Drops what was written since a checkpoint; returns how many rows that was.

  Args:
    run: the folder of the run.
    kept: (rows, records) of each peer that are kept.

  Raises:
    ValueError: for a file that has fewer of them.
  """
  dropped = 0
  for index, (rows, records) in enumerate(kept):
    there = length_of(run, index)
    check_rows(journal_path(run, index), there[0], rows)
    check_rows(records_path(run, index), there[1], records)
    dropped += there[0] - rows
  for index, (rows, records) in enumerate(kept):
    cut_journal(journal_path(run, index), rows)
    FileSink(records_path(run, index), dtype=RECORD).truncate(records)
  return dropped
