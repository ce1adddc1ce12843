"""Spans: intervals of a worker's time, in one file for each worker.

  name,start,end,seq,job,checksum      a line; its checksum is as in a journal
"""

import collections
from pathlib import Path
from typing import NamedTuple

from asgd import safe_files
from asgd.orders.trace import LATEST, checksum

_NAMES = ("fetch", "compute", "push")


class Span(NamedTuple):
  """An interval of a worker's time."""

  name: str  # fetch, compute or push
  start: float  # seconds since the run began
  end: float
  seq: int
  job: int


class SpanWriter:
  """Writes the spans of workers, all spans of a job at once."""

  def __init__(self, folder: Path):
    self._folder = folder
    self._lines: dict[int, list[str]] = collections.defaultdict(list)

  def __call__(self, worker: int, span: Span) -> None:
    """Adds one span of a worker. The push is the last span of a job: with it
    the spans of the job are written."""
    name, start, end, seq, job = span
    path = spans_path(self._folder, worker)
    if worker not in self._lines and path.exists():
      # A line that a kill cut short would become part of the next line.
      safe_files.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    lines = self._lines[worker]
    line = f"{name},{start:.6f},{end:.6f},{seq},{job}"
    lines.append(f"{line},{checksum(line)}\n")
    if name == "push":
      with safe_files.appending(path) as file:
        file.write("".join(lines).encode())
      lines.clear()


def spans_path(folder: Path, worker: int) -> Path:
  """Returns the path of a worker's spans."""
  return folder / f"spans-{worker}.csv"


def read_spans(path: Path) -> list[Span]:
  """Reads a worker's spans, without a last line that a kill cut short. Raises a
  ValueError that names the file and the first line that is not a span."""
  # The last element is empty, or the beginning of a line.
  *lines, _ = path.read_text(errors="replace").split("\n")
  spans = []
  for line_number, line in enumerate(lines, 1):
    try:
      text, _, crc = line.rpartition(",")
      name, start, end, seq, job = text.split(",")
      span = Span(name, float(start), float(end), int(seq), int(job))
      is_valid = name in _NAMES and all(abs(n) <= LATEST for n in span[1:])
      is_valid = is_valid and crc == checksum(text)
    except ValueError:
      is_valid = False
    if not is_valid:
      raise ValueError(
        f"{path}, line {line_number} is no span: {line[:60]!r}. It must be"
        f" {','.join(Span._fields)} and their checksum, with a name of"
        f" {', '.join(_NAMES)}: put the file back as the run wrote it"
      )
    spans.append(span)
  return spans
