"""The files of a run of peers: of each a journal and records."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asgd import base, gossip, simulator
from asgd.live.journal import (
  FileJournal,
  check_together,
  journal_path,
  read_begun,
  read_journal,
)
from asgd.live.records import FileSink, read_rows, records_path
from asgd.orders.trace import NO_SEQ, STARTS, Event

RECORD = np.dtype(
  [
    *(
      (name, column.dtype.newbyteorder("<"))
      for name, column in simulator.join_records([])._asdict().items()
    ),
    ("crc32", "<u4"),
  ]
)


def open_files(run: Path, index: int) -> tuple[FileJournal, FileSink]:
  """Opens, or makes, the journal and the records of a peer."""
  journal = FileJournal(journal_path(run, index))
  return journal, FileSink(records_path(run, index), dtype=RECORD)


def read_peer_records(
  run: Path, index: int, start: int = 0
) -> simulator.PeerRecords:
  """Returns the records of a peer, from one on."""
  rows = read_rows(records_path(run, index), RECORD, start)
  names = simulator.PeerRecords._fields
  return simulator.PeerRecords(*(rows[name].copy() for name in names))


def by_time(
  parts: Sequence[simulator.PeerRecords],
) -> simulator.PeerRecords:
  """Joins records of peers, in the order of their times."""
  joined = simulator.join_records(parts)
  order = np.argsort(joined.time, kind="stable")
  return simulator.PeerRecords(*(column[order] for column in joined))


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


def leave(run: Path, index: int, now: float) -> list[int]:
  """Writes that a peer has died, if it did not write so itself; returns the
  job that was lost with it, if there was one."""
  journal = FileJournal(journal_path(run, index))
  events = journal.events()
  lost: dict[int, Event] = {}  # by seq
  there = True
  for event in events:
    if event.action in STARTS:
      lost = {event.seq: event}
    elif event.action == base.RECEIVE:
      lost.pop(event.seq, None)
    elif event.action in (base.JOIN, base.LEAVE):
      there = event.action == base.JOIN
      lost = lost if event.action == base.LEAVE else {}
  if there:
    now = max([now, *(event.time for event in events[-1:])])
    rows = [Event(now, index, e.seq, e.job, base.LOST) for e in lost.values()]
    for row in [*rows, Event(now, index, NO_SEQ, lives_of(events), base.LEAVE)]:
      journal.append(row)
  return [event.job for event in lost.values()]


def cut_records(path: Path, records: int) -> None:
  """Drops what a peer wrote after so many records."""
  FileSink(path, dtype=RECORD).truncate(records)
