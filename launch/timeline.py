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

_WORKERS, _SERVER = 1, 2  # pids of the two groups of tracks
_OF_WORKERS = (base.JOIN, base.LEAVE, base.LOST, base.REJECT)
_ENDS = {
  base.RECEIVE: "job",
  base.LOST: "job, lost",
  base.REJECT: "job, rejected",
  base.DROP: "job, dropped",
}


def _track(tracks, worker, lane=0) -> int:
  """Returns the track of a worker; its tickets after the first have others."""
  name = f"worker {worker}" + (f", ticket {lane + 1}" if lane else "")
  return tracks.tid(_WORKERS, name, 100 * worker + lane)


def _has_tables(cell) -> bool:
  """Whether workers recorded the jobs (tables), and not the first shard."""
  return cell.jobs is not cell.journals[0]


def _jobs(cell) -> Iterator[tuple[float, float, int, int, list[Any]]]:
  """Yields (start, end, worker, job, spans) of each job."""
  for worker, spans in cell.spans.items():
    of_job = collections.defaultdict(list)
    for name, start, end, seq, job in spans:
      # With tables, the jobs of a clock are pushed one after the other at the
      # end of the clock, so each kind of span is a job of the timeline.
      alone = name if _has_tables(cell) else ""
      of_job[seq, job, alone].append((name, start, end))
    for (_, job, _), pieces in of_job.items():
      yield pieces[0][1], pieces[-1][2], worker, job, pieces
  for start, end in live_files.ended_jobs(cell.jobs):
    if end.worker not in cell.spans:
      pieces = [(_ENDS[end.action], start.time, end.time)]
      yield start.time, end.time, end.worker, end.job, pieces


def _work(cell, tracks):
  """Yields the spans of workers. The jobs of a worker with several tickets
  overlap, and the spans of a track must not: such jobs get several tracks."""
  # One set of lanes for each worker; overlapping jobs take another lane.
  lanes = collections.defaultdict(tracks_lib.Lanes)
  for start, end, worker, job, pieces in sorted(_jobs(cell)):
    tid = _track(tracks, worker, lanes[worker].take(start, end))
    for name, start, end in pieces:
      args = {"job": job}
      yield tracks_lib.piece(name, _WORKERS, tid, start, end, args=args)


def _decisions(cell, shard, tracks):
  """Yields the events of a shard: its rows, and the counters they change."""
  tid = tracks.tid(_SERVER, f"shard {shard}", shard)
  spans = {} if _has_tables(cell) else cell.spans
  for start, end in live_files.served(cell.journals[shard], spans):
    yield tracks_lib.piece("serve", _SERVER, tid, start, end)
  records = cell.records[shard]
  columns = records.worker, records.job, records.update, records.staleness
  rows = zip(*(column.tolist() for column in columns), strict=True)
  seen = {(worker, job): values for worker, job, *values in rows}
  of_shard = f" (shard {shard})" if len(cell.journals) > 1 else ""
  for row in cell.journals[shard]:
    name = base.ACTIONS[row.action]
    time = tracks_lib.microseconds(row.time)
    args = {"worker": row.worker, "job": row.job, "seq": row.seq}
    where, scope = (_SERVER, tid), "t"
    if row.action == base.ROLLBACK:
      args, scope = {"row": row.job}, "g"
    elif row.action in _OF_WORKERS:
      if shard:  # the lead's journal has this row, too
        continue
      where = _WORKERS, _track(tracks, row.worker)
    elif row.action != base.RECEIVE:
      args["version"] = row.version
    yield event("i", name, *where, ts=time, s=scope, args=args)
    if row.action == base.RECEIVE and (row.worker, row.job) in seen:
      values = seen[row.worker, row.job]
      for counter, value in zip(("version", "staleness"), values, strict=True):
        args = {counter: value}
        yield event("C", counter + of_shard, _SERVER, tid, ts=time, args=args)


def events(cell: live_files.LiveFiles) -> list[dict[str, Any]]:
  """Returns the events of a timeline: names first, then by time."""
  tracks = tracks_lib.Tracks({_WORKERS: "workers", _SERVER: "server"})
  for worker in sorted({row.worker for row in cell.jobs}):
    _track(tracks, worker)
  out = list(_work(cell, tracks))
  for shard in range(len(cell.journals)):
    out += _decisions(cell, shard, tracks)
  return tracks.ordered(out)


def main(folder: str | None = None, *, out: str | None = None) -> None:
  """Writes the timeline of the named run."""
  if folder is None:
    raise ValueError(
      "no run is named: write asgd timeline WORKDIR/cells/NAME, a folder that"
      " asgd train made"
    )
  place = live_files.only_cell(Path(folder))
  there = place
  if not safe_files.is_writable(place):
    there = flags.next_free(Path("runs"), "timeline")
  path = Path(out or there / "timeline.json")
  if out and (path.is_dir() or not path.parent.is_dir()):
    what = "is a folder" if path.is_dir() else "is in a folder that is missing"
    raise ValueError(f"--out={path} {what}: name a file in an existing folder")
  cell = live_files.read(place)
  safe_files.make_folder(path.parent.resolve())
  timeline = events(cell)
  document = tracks_lib.document(timeline)
  safe_files.write(path, storage.to_json(document))
  print(
    f"{len(timeline)} events in {path}: drop the file on https://ui.perfetto.dev"
    " (it stays on your machine), or open it at chrome://tracing"
  )
  if not cell.spans:
    print(
      "each job is one span: run asgd train with --config.live.spans=True to"
      " record its steps"
    )


if __name__ == "__main__":
  _F = flags.define("timeline")
  flags.run(lambda *words: main(*words, out=_F["out"].value), "timeline")
