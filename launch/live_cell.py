"""What a live cell leaves in its folder, read again: journals, spans, records.

A journal says when tickets were sent and messages received, by the shard's
clock. Spans say what a worker did in between, by the same clock; it writes them
if it is asked to (--config.live.spans=True).
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import base
from asgd.runtimes import files
from asgd.runtimes.protocol import Entry
from asgd.runtimes.worker_loop import Span
from launch import outputs


class Cell(NamedTuple):
  """What a live cell wrote."""

  held: dict[str, Any]  # the experiment: config.json
  journals: list[list[Entry]]  # of each shard
  spans: dict[int, list[Span]]  # of each worker that wrote them
  records: list[base.Records]  # of each shard


class Job(NamedTuple):
  """A job from its ticket to its end, as a journal has it."""

  worker: int
  seq: int
  job: int
  start: float
  end: float
  action: int  # that ended it: RECEIVE, LOST or REJECT


class SpanWriter:
  """Writes down what workers do when, a job at a time."""

  def __init__(self, folder: Path):
    self._folder = folder
    self._lines: dict[int, list[str]] = collections.defaultdict(list)

  def __call__(self, worker: int, span: Span) -> None:
    """Takes one stretch of a worker's time; a push ends a job."""
    name, start, end, seq, job = span
    lines = self._lines[worker]
    lines.append(f"{name},{start:.6f},{end:.6f},{seq},{job}\n")
    if name == "push":
      with spans_path(self._folder, worker).open("a") as file:
        file.write("".join(lines))
      lines.clear()


def spans_path(folder: Path, worker: int) -> Path:
  """The file of a worker's spans."""
  return folder / f"spans-{worker}.csv"


def read_spans(path: Path) -> list[Span]:
  """Reads what a worker wrote, but for lines that a kill cut short."""
  spans = []
  for line in path.read_text(errors="replace").splitlines():
    try:
      name, start, end, seq, job = line.split(",")
      spans.append(Span(name, float(start), float(end), int(seq), int(job)))
    except ValueError:
      continue
  return spans


def read(folder: Path) -> Cell:
  """Reads what a live cell wrote, be it finished or not.

  Raises:
    ValueError: if the folder holds no such thing, or not all of it, or what no
      run wrote.
  """
  folder = only_cell(folder)
  held = outputs.read_json(folder.parent.parent / "config.json")
  if held is None or "runtime" not in held:
    raise ValueError(
      f"{folder} is no folder of a live run: it should be RESULTS/cells/NAME,"
      " as launch.serve makes them"
    )
  shards = range(held["config"]["server"]["shards"])
  journals = []
  for index in shards:
    path = files.journal_path(folder, index)
    entries = files.read_journal(path) if path.exists() else []
    if not entries:
      raise ValueError(f"{path} holds no event: the run has not begun (yet)")
    files.check_entries(path, entries)
    journals.append(entries)
  records = _records(folder, journals)
  paths = {e.worker: spans_path(folder, e.worker) for e in journals[0]}
  return Cell(
    held,
    journals,
    {w: read_spans(path) for w, path in paths.items() if path.exists()},
    records,
  )


def only_cell(folder: Path) -> Path:
  """Returns RESULTS/cells/NAME, also for RESULTS if it has one cell.

  Raises:
    ValueError: if it has several, naming them.
  """
  if not (folder / "cells").is_dir():
    return folder
  cells = sorted(path for path in (folder / "cells").iterdir() if path.is_dir())
  if len(cells) != 1:
    names = ", ".join(path.name for path in cells[:5])
    raise ValueError(
      f"{folder} has {len(cells)} runs: name one of {folder}/cells/ ({names})"
    )
  return cells[0]


def _records(folder, journals):
  """Reads the records of each shard, and checks that they are all there."""
  result, out = outputs.read_json(folder / "result.json"), []
  for index, entries in enumerate(journals):
    path = files.records_path(folder, index)
    records = files.read_records(path)
    count = len(records.loss)
    if path.exists() or result:
      files.check_records(path, count, entries, whole=result is not None)
    if result and not index and count != result.get("messages"):
      raise ValueError(
        f"{path} has {count} records, result.json {result.get('messages')}"
        " messages: one of the two was changed; put it back as the run wrote it"
      )
    out.append(records)
  return out


def jobs(journal: Iterable[Entry]) -> list[Job]:
  """Returns the jobs that have ended, in the order of their ends."""
  opened: dict[tuple[int, int], float] = {}
  out = []
  for entry in journal:
    key = entry.worker, entry.seq
    if entry.action in (base.SEND, base.KEEP):
      opened[key] = entry.time
    elif entry.action in (base.RECEIVE, base.LOST, base.REJECT):
      start = opened.pop(key)
      out.append(Job(*key, entry.job, start, entry.time, entry.action))
  return out


def spans_by_job(
  spans: Mapping[int, Sequence[Span]], name: str
) -> dict[tuple[int, int], Span]:
  """Returns the spans of one name, by (worker, seq)."""
  return {
    (worker, span.seq): span
    for worker, mine in spans.items()
    for span in mine
    if span.name == name
  }


def served(
  journal: Sequence[Entry], spans: Mapping[int, Sequence[Span]]
) -> list[tuple[float, float]]:
  """Returns (start, end) of each stretch in which a shard dealt with messages
  and sent what followed. They do not overlap.

  A stretch ends, as far as the files tell, when the last worker it sent to has
  heard of its ticket, or when the next one starts: at most a little later than
  it really did.
  """
  heard = spans_by_job(spans, "fetch")
  groups: dict[float, list[Entry]] = {}  # rows of one call have one time
  for entry in journal:
    groups.setdefault(entry.time, []).append(entry)
  out = []
  following = [*groups, float("inf")][1:]
  for (start, rows), limit in zip(groups.items(), following, strict=True):
    sent = [(e.worker, e.seq) for e in rows if e.action == base.SEND]
    end = max((heard[key].start for key in sent if key in heard), default=start)
    if end > start:
      out.append((start, min(end, limit)))
  return out
