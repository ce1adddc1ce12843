"""The section `durations` of a config: drawn times, or those of a file."""

import csv
from pathlib import Path

from asgd import checks, names
from asgd.checks import shown
from asgd.orders import durations

HEADER = ["worker", "seconds"]  # of a file of times


def build(name: str, **options) -> durations.Durations:
  """Returns durations by name: `recorded`, or as `asgd.orders.durations.build`
  has it, and its errors."""
  if name != recorded.__name__:
    return durations.build(name, **options)
  return names.call("durations", name, recorded, {"seed": 0, **options})


def recorded(
  path: str, *, resample: bool = False, seed: int = 0
) -> durations.Durations:
  """Times from a file, such as the durations.csv that `asgd compare` writes.

  Args:
    path: of a CSV file with the columns worker and seconds, a row a job, each
      worker's in their order. Worker i uses the i-th worker's, modulo their
      number, over and over.
    resample: draws from them at random, with replacement.
    seed: of the draws.

  Raises:
    ValueError: for a file that cannot be read, naming the line.
  """
  rows: dict[int, list[float]] = {}
  try:
    with Path(path).open(newline="") as file:
      reader = csv.reader(file)
      header = next(reader, None)
      if header != HEADER:
        raise ValueError(
          f"path {shown(path)}: line 1 must be {','.join(HEADER)!r}, not"
          f" {shown(','.join(header or []))}"
        )
      for row in reader:
        worker, seconds = _job(path, reader.line_num, row)
        rows.setdefault(worker, []).append(seconds)
  except (OSError, TypeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"path {shown(path)} cannot be read as times ({checks.text_of(error)}):"
      " give a CSV file, as asgd compare writes it (durations.csv)"
    ) from None
  if not rows:
    raise ValueError(f"path {shown(path)} holds no time")
  samples = [rows[worker] for worker in sorted(rows)]
  return durations.measured(samples, resample=resample, seed=seed)


def _job(path, line, row):
  """Returns (worker, seconds) of a line, or raises ValueError."""
  try:
    worker, seconds = int(row[0]), float(row[1])
    if len(row) == len(HEADER) and worker >= 0 and 0 < seconds < float("inf"):
      return worker, seconds
  except (ValueError, IndexError):
    pass
  raise ValueError(
    f"path {shown(path)}: line {line} must be a worker from 0 and a positive"
    f" time, not {shown(','.join(row))}"
  )
