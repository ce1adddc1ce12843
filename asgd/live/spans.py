"""Spans: what a worker did when, a file for each worker."""

import collections
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
  """A stretch of a worker's time."""

  name: str  # fetch, compute or push
  start: float  # seconds since the run began
  end: float
  seq: int
  job: int


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
