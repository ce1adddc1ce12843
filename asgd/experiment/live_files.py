"""Reads the files that a live cell wrote: journals, spans, records.

A journal has the times at which tickets were sent and messages received, by the
shard's clock. With --config.live.spans=True workers also write spans: the times
of their fetches, computations and pushes, by the same clock. The clock of a
worker on another machine differs, so its spans were shifted to the lead's clock
(`live.links.notes`), to about a millisecond. So a push may seem to end up to a
millisecond after its message was received.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import base
from asgd.experiment import checks, protocol, storage
from asgd.experiment.folder import check_own, only_cell, read_cell
from asgd.live.journal import (
  check_journal,
  journal_path,
  read_journal,
  read_nonempty_journal,
)
from asgd.live.records import check_records, read_records, records_path
from asgd.live.spans import Span, read_spans, spans_path
from asgd.orders.trace import ENDS, STARTS, Event, Ledger

CHANGED = "cell.json is not what a run wrote: restore it"
Journal = Sequence[Event]
Spans = Mapping[int, Sequence[Span]]  # by worker


class LiveFiles(NamedTuple):
  """The files of a live cell."""

  description: dict[str, Any]  # cell.json
  journals: list[Journal]  # of each shard
  spans: Spans
  records: list[base.Records]  # of each shard
  jobs: Journal  # the rows that start and end jobs


def read_description(folder: Path) -> dict[str, Any]:
  """Returns the contents of a live cell's cell.json. Raises ValueError for any
  other cell."""
  description = read_cell(folder)
  engine = description.get("engine")
  has_trace = engine in ("threads", "ray") or journal_path(folder, 1).exists()
  if isinstance(engine, str) and not has_trace:
    raise ValueError(
      f"{folder} was made by engine {engine!r}: only live runs (threads, ray)"
      " and simulated shards leave a trace"
    )
  # Check the values that later become paths and code; `check_own` and
  # `cells.build` check the others.
  try:
    shards = description["config"]["server"]["shards"]
    checks.text(engine, "engine")
    checks.whole_number(1, 256)(shards, "shards")
    for module in description["modules"].values():
      for key in ("file", "sha256", "top"):
        checks.text(module[key], key)
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(f"{folder}/{CHANGED}") from None
  check_own(folder, description)
  return description


def read_traces(
  folder: Path, description: Mapping[str, Any]
) -> list[tuple[Path, list[Event]]]:
  """Returns (path, rows) of each shard's journal. Raises ValueError for an
  empty journal."""
  traces = []
  for index in range(description["config"]["server"]["shards"]):
    path = journal_path(folder, index)
    traces.append((path, read_nonempty_journal(folder, path)))
  return traces


def read(folder: Path) -> LiveFiles:
  """Reads a live cell's files so far. Raises ValueError if some are missing."""
  folder = only_cell(folder)
  description = read_description(folder)
  return protocol.of_cell(folder, description).live.read(folder, description)


def read_shards(folder: Path, description: Mapping[str, Any]) -> LiveFiles:
  """Reads the files of a cell in which shards write journals and records."""
  # [1] The journals, the lead's first.
  journals: list[Journal] = []
  for path, events in read_traces(folder, description):
    check_journal(path, events)
    journals.append(events)
  # [2] The records. While a cell runs, they may lag behind its journals.
  result, records = storage.read_json(folder / "result.json"), []
  for index, journal in enumerate(journals):
    path = records_path(folder, index)
    records.append(read_records(path))
    n_records = len(records[-1].loss)
    if path.exists() or result:
      check_records(path, n_records, journal, run_has_ended=result is not None)
    if result and not index and n_records != result.get("messages"):
      raise ValueError(
        f"{path} has {n_records} records, result.json {result.get('messages')}"
        " messages: one of the two was changed; restore it as the run wrote it"
      )
  # [3] The spans of each worker, in the order in which the lead's rows have
  # them.
  spans = spans_of(folder, {e.worker: None for e in journals[0]})
  return LiveFiles(dict(description), journals, spans, records, journals[0])


def spans_of(folder: Path, workers: Iterable[int]) -> Spans:
  """Returns the spans of the workers that wrote some."""
  paths = {worker: spans_path(folder, worker) for worker in workers}
  return {w: read_spans(path) for w, path in paths.items() if path.exists()}


def read_journals(folder: Path, shards: int) -> list[list[Event]]:
  """Returns the journals of a cell that resumes; they are empty if it did no
  work. Raises ValueError if a journal is missing or was changed."""
  paths = [journal_path(folder, index) for index in range(shards)]
  journals = [read_journal(path) for path in paths]
  record_paths = [records_path(folder, index) for index in range(shards)]
  # Files that show that the cell has done work, without its journals.
  evidence = [
    path
    for path in (*record_paths, folder / "metrics.jsonl")
    if path.exists() and path.stat().st_size
  ]
  evidence += (folder / "checkpoints").glob("[0-9]*")
  for path, journal in zip(paths, journals, strict=True):
    # All shards start together, so each has a journal if the lead's has rows.
    lead_only = journals[0] and not path.exists() and paths[:1]
    existing_files = evidence or lead_only
    if not journal and existing_files:
      raise ValueError(
        f"{path} is missing or empty, but {existing_files[0]} exists: the run"
        " cannot resume without it. Restore it, or start in another folder"
        " (--workdir)"
      )
    check_journal(path, journal)
  for path in record_paths:
    read_records(path)  # raises ValueError if the file was changed
  return journals


def first_ticket(journal: Journal) -> float:
  """Returns the time of the first ticket, by the journal's clock."""
  ticket_times = (event.time for event in journal if event.action in STARTS)
  return next(ticket_times, journal[0].time if journal else 0.0)


def ended_jobs(journal: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
  """Yields the rows that started and ended each job, in the order of ends."""
  ledger: Ledger[Event] = Ledger()
  for event in journal:
    start = ledger.apply(event)
    if event.action in ENDS and start is not None:
      yield start, event


def spans_by_job(spans: Spans, name: str) -> dict[tuple[int, int], Span]:
  """Returns the spans of one name, by (worker, seq)."""
  return {
    (worker, span.seq): span
    for worker, spans_of_worker in spans.items()
    for span in spans_of_worker
    if span.name == name
  }


def busy_periods(journal: Journal, spans: Spans) -> list[tuple[float, float]]:
  """Returns (start, end) of each period in which a shard handled messages. A
  period ends when the last worker fetches its ticket, or the next one starts.
  """
  fetched = spans_by_job(spans, "fetch")
  rows_by_time: dict[float, list[Event]] = {}  # rows of one call have one time
  for event in journal:
    rows_by_time.setdefault(event.time, []).append(event)
  periods = []
  # A journal's rows are in the order of their times, so the groups are, too.
  next_times = [*rows_by_time, float("inf")][1:]
  pairs = zip(rows_by_time.items(), next_times, strict=True)
  for (start, rows), next_time in pairs:
    sent_jobs = [event.key for event in rows if event.action == base.SEND]
    fetches = (fetched[key].start for key in sent_jobs if key in fetched)
    end = max(fetches, default=start)
    if end > start:
      periods.append((start, min(end, next_time)))
  return periods
