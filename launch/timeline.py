"""Draws a live run on a time axis: the actions of each worker and each shard.

  asgd timeline WORKDIR/cells/NAME

WORKDIR alone is enough if it has one run. The command writes timeline.json into
that folder, or into runs/timeline-001, -002, ... if the folder is read-only.
The format is Chrome's trace-event format, for Perfetto. The steps of a job are
drawn if the run recorded them (--config.live.spans=True); otherwise a job is
one span, from its ticket to its message.
"""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asgd import base, safe_files
from asgd import tracks as tracks_lib
from asgd.experiment import live_files, storage
from asgd.tracks import event

from . import flags

# Chrome's format groups tracks by "process": pid and tid are only numbers.
_WORKERS, _SERVER = 1, 2  # pids of the two groups of tracks
# Rows about a worker, drawn on its track; other rows on the shard's.
_OF_WORKERS = (base.JOIN, base.LEAVE, base.LOST, base.REJECT)
# The name of the span of a job, by the row that ends it.
_JOB_NAMES = {
  base.RECEIVE: "job",
  base.LOST: "job, lost",
  base.REJECT: "job, rejected",
  base.DROP: "job, dropped",
}


def _track(tracks: tracks_lib.Tracks, worker: int, lane: int = 0) -> int:
  """Returns the track of a worker; its tickets after the first have others."""
  name = f"worker {worker}" + (f", ticket {lane + 1}" if lane else "")
  # Sorted by tid: the tickets of a worker follow it.
  return tracks.tid(_WORKERS, name, 100 * worker + lane)


def _has_tables(cell: live_files.LiveFiles) -> bool:
  """Whether workers recorded the jobs (tables), and not the first shard."""
  # A server's jobs are the rows of the lead shard's journal; peers have no
  # shards.
  return bool(cell.journals) and cell.jobs is not cell.journals[0]


def _jobs(
  cell: live_files.LiveFiles,
) -> Iterator[tuple[float, float, int, int, list[Any]]]:
  """Yields (start, end, worker, job, spans) of each job."""
  for worker, spans in cell.spans.items():
    spans_by_job: dict[tuple[int, int, str], list[Any]] = (
      collections.defaultdict(list)
    )
    for name, start, end, seq, job in spans:
      # With tables, the jobs of a clock are pushed one after the other at the
      # end of the clock, so each kind of span is drawn as a separate job.
      span_kind = name if _has_tables(cell) else ""
      spans_by_job[seq, job, span_kind].append((name, start, end))
    for (_, job, _), job_spans in spans_by_job.items():
      # Spans of a job are in order, so the first starts it and the last ends
      # it.
      yield job_spans[0][1], job_spans[-1][2], worker, job, job_spans
  # Workers without spans: from the ticket to the row that ends the job.
  for ticket, row in live_files.ended_jobs(cell.jobs):
    if row.worker not in cell.spans:
      job_spans = [(_JOB_NAMES[row.action], ticket.time, row.time)]
      yield ticket.time, row.time, row.worker, row.job, job_spans


def _worker_events(
  cell: live_files.LiveFiles, tracks: tracks_lib.Tracks
) -> Iterator[dict[str, Any]]:
  """Yields the spans of workers. The jobs of a worker with several tickets
  overlap, and the spans of a track must not: such jobs get several tracks."""
  # One set of lanes for each worker; overlapping jobs take another lane.
  lanes: dict[int, tracks_lib.Lanes] = collections.defaultdict(tracks_lib.Lanes)
  # By start: `take` gives the first lane that is free by then.
  for start, end, worker, job, job_spans in sorted(_jobs(cell)):
    tid = _track(tracks, worker, lanes[worker].take(start, end))
    for name, start, end in job_spans:
      args = {"job": job}
      yield tracks_lib.span(name, _WORKERS, tid, start, end, args=args)


def _shard_events(
  cell: live_files.LiveFiles, shard: int, tracks: tracks_lib.Tracks
) -> Iterator[dict[str, Any]]:
  """Yields the events of a shard: its rows, and the counters they change."""
  # [1] The times in which the shard worked. With tables, spans have no jobs
  # that a shard could have served.
  tid = tracks.tid(_SERVER, f"shard {shard}", shard)
  spans = {} if _has_tables(cell) else cell.spans
  for start, end in live_files.busy_periods(cell.journals[shard], spans):
    yield tracks_lib.span("serve", _SERVER, tid, start, end)
  # [2] Version and staleness of each received message.
  records = cell.records[shard]
  columns = records.worker, records.job, records.update, records.staleness
  rows = zip(*(column.tolist() for column in columns), strict=True)
  values_by_job = {(worker, job): values for worker, job, *values in rows}
  shard_suffix = f" (shard {shard})" if len(cell.journals) > 1 else ""
  # [3] Its rows as instants; those of received messages also set counters.
  for row in cell.journals[shard]:
    name = base.ACTIONS[row.action]
    time = tracks_lib.microseconds(row.time)
    args = {"worker": row.worker, "job": row.job, "seq": row.seq}
    track, scope = (_SERVER, tid), "t"  # scope: this track
    if row.action == base.ROLLBACK:  # the whole timeline
      args, scope = {"row": row.job}, "g"
    elif row.action in _OF_WORKERS:
      if shard:  # the lead's journal has this row, too
        continue
      track = _WORKERS, _track(tracks, row.worker)
    # A received message shows its version as a counter instead.
    elif row.action != base.RECEIVE:
      args["version"] = row.version
    yield event("i", name, *track, ts=time, s=scope, args=args)
    if row.action == base.RECEIVE and (row.worker, row.job) in values_by_job:
      values = values_by_job[row.worker, row.job]
      for counter, value in zip(("version", "staleness"), values, strict=True):
        args = {counter: value}
        yield event(
          "C", counter + shard_suffix, _SERVER, tid, ts=time, args=args
        )


def events(cell: live_files.LiveFiles) -> list[dict[str, Any]]:
  """Returns the events of a timeline: names first, then by time."""
  tracks = tracks_lib.Tracks({_WORKERS: "workers", _SERVER: "server"})
  # Tracks are made in this order, so workers without a job keep their row.
  for worker in sorted({row.worker for row in cell.jobs}):
    _track(tracks, worker)
  timeline = list(_worker_events(cell, tracks))
  for shard in range(len(cell.journals)):
    timeline += _shard_events(cell, shard, tracks)
  return tracks.ordered(timeline)


def main(folder: str | None = None, *, out: str | None = None) -> None:
  """Writes the timeline of the named run."""
  if folder is None:
    raise ValueError(
      "no run is named: write asgd timeline WORKDIR/cells/NAME, a folder that"
      " asgd train made"
    )
  # A read-only folder of another user can be drawn, too.
  cell_folder = live_files.only_cell(Path(folder))
  target_folder = cell_folder
  if not safe_files.is_writable(cell_folder):
    target_folder = flags.next_free_folder(Path("runs"), "timeline")
  path = Path(out or target_folder / "timeline.json")
  if out and (path.is_dir() or not path.parent.is_dir()):
    missing = "is in a folder that is missing"
    problem = "is a folder" if path.is_dir() else missing
    raise ValueError(
      f"--out={path} {problem}: name a file in an existing folder"
    )
  cell = live_files.read(cell_folder)
  safe_files.make_folder(path.parent.resolve())
  timeline = events(cell)
  document = tracks_lib.document(timeline)
  safe_files.write(path, storage.to_json(document))
  print(
    f"{len(timeline)} events in {path}: drop the file on"
    " https://ui.perfetto.dev (it stays on your machine), or open it at"
    " chrome://tracing"
  )
  if not cell.spans:
    print(
      "each job is one span: run asgd train with --config.live.spans=True to"
      " record its steps"
    )


if __name__ == "__main__":
  _FLAGS = flags.define("timeline")
  flags.run(lambda *words: main(*words, out=_FLAGS["out"].value), "timeline")
