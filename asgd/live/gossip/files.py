"""The files of a run of peers: of each a journal and records."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import base, gossip, simulator
from asgd.live.journal import (
  FileJournal,
  check_together,
  journal_path,
  read_begun,
  read_journal,
)
from asgd.live.worker_files import WorkerFiles
from asgd.orders.trace import ENDS, NO_SEQ, STARTS, Event

FILES = WorkerFiles(simulator.PeerRecords, "mix_norm", "<f4")
cut_back = FILES.cut_back
open_files, read_peer_records = FILES.open, FILES.read


def lengths(
  run: Path, peers: int, images: Mapping[int, Any]
) -> list[Sequence[int]]:
  """Returns how many rows and records of each peer belong to a checkpoint; see
  `WorkerFiles.lengths`."""
  kept = {
    peer: (notes["rows"], notes["records"])
    for peer, (_, notes) in images.items()
  }
  return FILES.lengths(run, peers, kept)


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
