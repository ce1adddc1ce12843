"""Draws a live run: what each worker and each shard did when.

  python -m launch.timeline RESULTS/cells/NAME

writes timeline.json there, in Chrome's trace-event format, to be opened with
Perfetto. What workers do on a job is known if the run wrote it down
(--config.live.spans=True); without that, a job is one piece, from its ticket to
its message.
"""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from asgd import base
from launch import cli, live_cell, outputs

_WORKERS, _SERVER = 1, 2  # pids of the two groups of tracks
_FIRST_TID = 11  # 0 is the idle task, and the others are pids
_OF_WORKERS = (base.JOIN, base.LEAVE, base.LOST, base.REJECT)
_ENDS = {
  base.RECEIVE: "job",
  base.LOST: "job, lost",
  base.REJECT: "job, rejected",
}


def _event(phase, name, pid, tid, **fields) -> dict[str, Any]:
  return {"name": name, "ph": phase, "pid": pid, "tid": tid, **fields}


def _microseconds(seconds: float) -> int:
  return round(1e6 * seconds)


class _Tracks:
  """Tracks of workers and shards, named when they are met."""

  def __init__(self):
    self._tids: dict[tuple[int, str], int] = {}
    self._lanes: dict[int, list[float]] = collections.defaultdict(list)
    self.names: list[dict[str, Any]] = [
      _event("M", "process_name", pid, 0, args={"name": name})
      for pid, name in ((_WORKERS, "workers"), (_SERVER, "server"))
    ]

  def tid(self, pid: int, name: str, place: int) -> int:
    """Returns the number of a track, to be shown at a place in its group."""
    key = pid, name
    if key not in self._tids:
      self._tids[key] = tid = _FIRST_TID + len(self._tids)
      for what, args in (
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": place}),
      ):
        self.names.append(_event("M", what, pid, tid, args=args))
    return self._tids[key]

  def worker(self, worker: int, lane: int = 0) -> int:
    """Returns a track of a worker."""
    name = f"worker {worker}" + (f", ticket {lane + 1}" if lane else "")
    return self.tid(_WORKERS, name, 100 * worker + lane)

  def lane(self, worker: int, start: float, end: float) -> int:
    """Returns a track of a worker that is free from `start`, which must not
    decrease: pieces of a track may not overlap, and the jobs of a worker that
    holds several tickets do."""
    lanes = self._lanes[worker]
    for lane, free in enumerate(lanes):
      if free <= start:
        lanes[lane] = end
        return self.worker(worker, lane)
    lanes.append(end)
    return self.worker(worker, len(lanes) - 1)


def _pieces(cell) -> Iterator[tuple[int, int, list[tuple[str, float, float]]]]:
  """Yields (worker, job, pieces of time) of each job."""
  for worker, spans in cell.spans.items():
    of_job = collections.defaultdict(list)
    for name, start, end, seq, job in spans:
      of_job[seq, job].append((name, start, end))
    for (_, job), pieces in of_job.items():
      yield worker, job, pieces
  for worker, _, job, start, end, action in live_cell.jobs(cell.journals[0]):
    if worker not in cell.spans:
      yield worker, job, [(_ENDS[action], start, end)]


def _work(cell, tracks):
  """Yields what workers did."""
  found = [
    (pieces[0][1], pieces[-1][2], worker, job, pieces)
    for worker, job, pieces in _pieces(cell)
  ]
  for start, end, worker, job, pieces in sorted(found):
    tid = tracks.lane(worker, start, end)
    for name, start, end in pieces:
      time = _microseconds(start)
      length = _microseconds(end) - time
      args = {"job": job}
      yield _event("X", name, _WORKERS, tid, ts=time, dur=length, args=args)


def _decisions(cell, shard, tracks):
  """Yields what a shard did: its rows, and what they brought about."""
  tid = tracks.tid(_SERVER, f"shard {shard}", shard)
  for start, end in live_cell.served(cell.journals[shard], cell.spans):
    time = _microseconds(start)
    length = _microseconds(end) - time
    yield _event("X", "serve", _SERVER, tid, ts=time, dur=length)
  records = cell.records[shard]
  keys = zip(records.worker.tolist(), records.job.tolist(), strict=True)
  seen = dict(zip(keys, zip(records.update, records.staleness, strict=True)))  # noqa: B905
  of_shard = f" (shard {shard})" if len(cell.journals) > 1 else ""
  for entry in cell.journals[shard]:
    name, time = base.ACTIONS[entry.action], _microseconds(entry.time)
    args = {"worker": entry.worker, "job": entry.job, "seq": entry.seq}
    where, scope = (_SERVER, tid), "t"
    if entry.action == base.ROLLBACK:
      args, scope = {"row": entry.job}, "g"
    elif entry.action in _OF_WORKERS:
      if shard:  # the lead has said it
        continue
      where = _WORKERS, tracks.worker(entry.worker)
    elif entry.action != base.RECEIVE:
      args["version"] = entry.version
    yield _event("i", name, *where, ts=time, s=scope, args=args)
    if entry.action == base.RECEIVE and (entry.worker, entry.job) in seen:
      values = seen[entry.worker, entry.job]
      for counter, value in zip(("version", "staleness"), values, strict=True):
        args = {counter: int(value)}
        yield _event("C", counter + of_shard, _SERVER, tid, ts=time, args=args)


def events(cell: live_cell.Cell) -> list[dict[str, Any]]:
  """Returns the events of a timeline: names first, then by time."""
  tracks = _Tracks()
  for worker in sorted({entry.worker for entry in cell.journals[0]}):
    tracks.worker(worker)
  out = list(_work(cell, tracks))
  for shard in range(len(cell.journals)):
    out += _decisions(cell, shard, tracks)
  return tracks.names + sorted(out, key=lambda event: event["ts"])


def main(folder: str | None = None, *, out: str | None = None) -> None:
  """Writes the timeline of the run that is named."""
  if folder is None:
    raise ValueError(
      "which run? write python -m launch.timeline RESULTS/cells/NAME, a folder"
      " that launch.serve made"
    )
  cell = live_cell.read(Path(folder))
  made = events(cell)
  path = Path(out or Path(folder) / "timeline.json")
  text = outputs.to_json({"displayTimeUnit": "ms", "traceEvents": made})
  outputs.write_atomically(path, text)
  print(
    f"{len(made)} events in {path}: drop the file on https://ui.perfetto.dev"
    " (it stays on your machine), or open it at chrome://tracing"
  )
  if not cell.spans:
    print(
      "each job is one piece: run launch.serve with --config.live.spans=True to"
      " see what workers do on it"
    )


if __name__ == "__main__":
  _OUT = flags.DEFINE_string(
    "out", None, "File to write. Default: timeline.json in the run's folder."
  )
  cli.run(lambda *words: main(*words, out=_OUT.value), words=1)
