"""Files of a run of peers: a journal and records for each peer."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import base, gossip, simulator
from asgd.live.journal import (
  FileJournal,
  check_joined_trace,
  journal_path,
  read_journal,
  read_nonempty_journal,
)
from asgd.live.worker_files import WorkerFiles
from asgd.orders.trace import ENDS, NO_SEQ, STARTS, Event

FILES = WorkerFiles(simulator.PeerRecords, "mix_norm", "<f4")
cut_back = FILES.cut_back
open_files, read_peer_records = FILES.open, FILES.read


def checkpoint_counts(
  run: Path, peers: int, images: Mapping[int, Any]
) -> list[Sequence[int]]:
  """Returns (rows, records) of each peer that a checkpoint covers; see
  `WorkerFiles.checkpoint_counts`."""
  saved_counts = {
    peer: (notes["rows"], notes["records"])
    for peer, (_, notes) in images.items()
  }
  return FILES.checkpoint_counts(run, peers, saved_counts)


def read_trace(run: Path, peers: int) -> base.Trace:
  """Joins the journals of all peers into one trace. Raises ValueError if they
  cannot be joined, or if a journal is empty."""
  journals = []
  for index in range(peers):
    journals.append(read_nonempty_journal(run, journal_path(run, index)))
  try:
    trace = gossip.orders.merge(journals)
  except ValueError as error:
    raise ValueError(
      f"{run}: {error}: trace-K.csv of one of these two peers was cut or"
      " changed; restore the file that the run wrote"
    ) from error
  check_joined_trace(run, trace)
  return trace


def count_incarnations(events: Sequence[Event]) -> int:
  """Returns how many incarnations of a peer have left."""
  return sum(event.action == base.LEAVE for event in events)


def residuals_lost(
  events: Sequence[Event], records: simulator.PeerRecords
) -> list[tuple[Event, float]]:
  """Returns (LEAVE row, lost residual) for each incarnation that has left.

  The residual is the RMS of the update that the incarnation's codec had not
  sent, from its last record; 0 without a record.
  """
  jobs, norms = records.job.tolist(), records.residual_norm.tolist()
  norm_of = dict(zip(jobs, norms, strict=True))
  losses, residual = [], 0.0
  for event in events:
    if event.action == base.RECEIVE:
      # A peer that was killed after the row has no record of the job.
      residual = norm_of.get(event.job, residual)
    elif event.action == base.LEAVE:
      losses.append((event, residual))
      residual = 0.0
  return losses


def last_residual_lost(run: Path, index: int) -> float:
  """Returns the RMS of the residual that was lost with the incarnation that
  left last."""
  events = read_journal(journal_path(run, index))
  ((_, residual),) = residuals_lost(events, read_peer_records(run, index))[-1:]
  return residual


class JobsAtExit(NamedTuple):
  """The jobs of an incarnation of a peer that has exited."""

  begun: int  # count of jobs that it began
  lost: list[int]  # numbers of the jobs that it began and did not receive


def kept_job_numbers(events: Sequence[Event]) -> list[int]:
  """Returns the numbers of the jobs that a peer has done, or that are open.
  Other peers do its lost jobs, and its rejected jobs once it has left."""
  numbers: dict[int, None] = {}  # an ordered set
  rejected: list[int] = []
  for event in events:
    if event.action in STARTS:
      numbers[event.job] = None
    elif event.action == base.REJECT:
      rejected.append(event.job)
    elif event.action == base.LOST:
      numbers.pop(event.job, None)
    elif event.action == base.LEAVE:
      # The driver frees rejected jobs when it writes LEAVE. It does not free
      # them before, so that no number is freed twice.
      for number in rejected:
        numbers.pop(number, None)
      rejected = []
  return list(numbers)


def write_leave(
  run: Path, index: int, incarnation: int, now: float, disk: Any = os
) -> JobsAtExit:
  """Writes LOST and LEAVE for an incarnation of a peer that has exited, if it
  had joined and these rows are missing.

  Args:
    run: the folder of the run.
    index: the index of the peer.
    incarnation: the one that has exited.
    now: time of the rows in seconds, unless the journal has a later row.
    disk: writes the rows.
  """
  journal = FileJournal(journal_path(run, index), disk=disk)
  events = journal.events()
  # The rows of an incarnation follow the LEAVE rows of all earlier ones. The
  # first incarnation has no JOIN row.
  leaves, begun, has_joined = 0, 0, not incarnation
  # The row that began the incarnation's last job, and the action of the row
  # that ended this job.
  start_row, end_action = None, None
  for event in events:
    if leaves == incarnation and event.action in STARTS:
      start_row, end_action, begun = event, None, begun + 1
    elif leaves == incarnation and event.action in ENDS:
      end_action = event.action
    elif leaves == incarnation and event.action == base.JOIN:
      has_joined = True
    leaves += event.action == base.LEAVE
  if has_joined and leaves == incarnation:
    if events:  # times in a journal never decrease
      now = max(now, events[-1].time)
    if start_row and end_action is None:  # its last job was open
      journal.append(Event(now, index, start_row.seq, start_row.job, base.LOST))
    journal.append(Event(now, index, NO_SEQ, incarnation, base.LEAVE))
  journal.close()
  lost = [start_row.job] if start_row and end_action != base.RECEIVE else []
  return JobsAtExit(begun, lost)
