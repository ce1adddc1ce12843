"""The tables that a benchmark prints, and the same numbers as JSON.

A benchmark gets a `BenchReport`, asks it for tables, and adds rows to them.
Each row is printed at once, and stored in the report. JSON of benchmarks is a
list of objects:

  name, command   such as "simulator", and its command line
  device, cores   JAX's platform, and the cores that this process may use
  busy            share of the cores that other programs used, before and after
  seconds         from the first line to the last
  rows            objects: table, name, values (column -> number) and measured
                  (column -> median, range of the turns, target)
"""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import safe_files
from asgd.experiment import provenance

# NumPy's scalars count as numbers, too.
Number = float | np.floating | None
_WIDTH, _RATIO_WIDTH = 9, 24  # least widths of columns
# Columns of /proc/stat. Idle time is in columns 3 and 4 (idle and iowait); the
# first eight are all times but those of guests, which user time includes.
_IDLE, _TIMES = 3, 8


class Measured(NamedTuple):
  """A number that several turns measured, most often a ratio."""

  turns: np.ndarray | float  # the number in each turn; at least one turn
  target: str = ""  # such as ">= 2.5", or none

  def summary(self) -> dict[str, Any]:
    """Returns median, range [least, most] and target, for JSON."""
    turns = np.atleast_1d(self.turns)
    limits = [_rounded(turns.min()), _rounded(turns.max())]
    row = {"median": _rounded(np.median(turns)), "range": limits}
    return {**row, "target": self.target} if self.target else row

  def text(self, spec: str) -> str:
    """Returns median, range and target for a reader.

    Example:
      >>> import numpy as np
      >>> Measured(np.array([0.5, 1.0, 0.75]), ">= 1").text(".2f")
      '0.75 (0.50-1.00) >= 1'
    """
    turns = np.atleast_1d(self.turns)
    text = f"{np.median(turns):{spec}}"
    if len(turns) > 1:
      text += f" ({turns.min():{spec}}-{turns.max():{spec}})"
    return f"{text} {self.target}".rstrip()


class BenchTable:
  """A table that prints each row as soon as it is measured."""

  def __init__(
    self,
    rows: list[dict[str, Any]],
    title: str,
    first: str,
    columns: tuple[Mapping[str, str], Mapping[str, str]],
    width: int,
  ):
    """Prints title and header, see `BenchReport.table`. `row` appends to
    `rows`."""
    self._rows, self.title = rows, title
    self._values, self._measured = columns
    header = [first, *self._values, *self._measured]
    least_widths = [width] + [_WIDTH] * len(self._values)
    least_widths += [_RATIO_WIDTH] * len(self._measured)
    pairs = zip(least_widths, header, strict=True)
    self._widths = [max(least, len(text)) for least, text in pairs]
    line = self._line(header)
    print(f"\n{title}\n\n{line}\n{'-' * len(line)}", flush=True)

  def row(self, name: str, *cells: Number | Measured) -> None:
    """Prints and stores a row: a number for each value, and a Measured for each
    measured column; None leaves a cell empty."""
    # The first cells are values, all later ones are measured.
    values: dict[str, Any] = dict(zip(self._values, cells, strict=False))
    measured: dict[str, Any] = dict(
      zip(self._measured, cells[len(values) :], strict=True)
    )
    texts = [
      "" if x is None else f"{x:{self._values[k]}}" for k, x in values.items()
    ]
    texts += [
      "" if x is None else x.text(self._measured[k])
      for k, x in measured.items()
    ]
    print(self._line([name, *texts]), flush=True)
    numbers = {k: _rounded(x) for k, x in values.items() if x is not None}
    turns = {k: x.summary() for k, x in measured.items() if x is not None}
    row = {"table": self.title, "name": name}
    self._rows.append({**row, "values": numbers, "measured": turns})

  def _line(self, cells: Sequence[str]) -> str:
    """Returns a line: the name to the left, numbers to the right."""
    first, *other_cells = zip(cells, self._widths, strict=True)
    padded = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in other_cells)]
    return "  ".join(padded).rstrip()


class BenchReport:
  """All rows of a benchmark."""

  def __init__(self) -> None:
    """Begins without rows."""
    self.rows: list[dict[str, Any]] = []

  def table(
    self,
    title: str,
    first: str,
    values: Mapping[str, str],
    measured: Mapping[str, str],
    *,
    width: int = 24,
  ) -> BenchTable:
    """Begins a table; titles, and names within a table, are unique.

    Args:
      title: the measured thing, with its sizes.
      first: header of the names of rows.
      values: header -> format of a number, such as {"updates/s": ".0f"}.
      measured: header -> format of the numbers that docs/benchmarks.md shows,
        each a `Measured`.
      width: the width of the names, at least.
    """
    return BenchTable(self.rows, title, first, (values, measured), width)

  def save(self, path: str) -> None:
    """Writes the rows for the process that called `add_from`."""
    safe_files.write(Path(path), json.dumps(self.rows))

  def add_from(
    self, command: Sequence[str], environment: Mapping[str, str]
  ) -> None:
    """Runs a process and adds its rows. It prints them, and saves them to the
    path that is appended to the command."""
    with tempfile.TemporaryDirectory() as folder:
      path = Path(folder) / "rows.json"
      # The process's output is redirected like that of this process.
      subprocess.run(
        [*command, str(path)], env=environment, check=True, stdout=sys.stdout
      )
      self.rows += json.loads(path.read_text())


def _rounded(number: Number) -> float | None:
  """Returns a number with four digits, None for one that is not finite."""
  # JSON has neither NaN nor infinities.
  if number is None or not math.isfinite(number):
    return None
  return float(f"{number:.4g}")


# The machine, and how busy it is.


def peak_bytes() -> float:
  """Returns the largest number of bytes of memory that this process has
  used."""
  # macOS counts bytes, Linux KiB.
  unit = 1 if sys.platform == "darwin" else 1024
  return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cpu_times() -> tuple[float, float] | None:
  """Returns (busy, all) ticks of all cores since the machine's start; None
  where there is no /proc/stat."""
  try:
    # Ticks of all cores together.
    line = Path("/proc/stat").read_text().partition("\n")[0]
  except OSError:
    return None
  ticks = [float(word) for word in line.split()[1 : 1 + _TIMES]]
  return sum(ticks) - sum(ticks[_IDLE : _IDLE + 2]), sum(ticks)


def busy_share(
  seconds: float = 0.5,
  cpu_times: Callable[[], tuple[float, float] | None] = _cpu_times,
  sleep: Callable[[float], None] = time.sleep,
) -> float:
  """Returns the share of all cores that other programs use while this process
  sleeps; without /proc/stat the load of the last minute, at most 1."""
  # Ticks count from the machine's start: a share is a quotient of differences.
  before = cpu_times()
  sleep(seconds)
  after = cpu_times()
  if before is None or after is None:
    return min(os.getloadavg()[0] / provenance.cores(), 1.0)
  busy, total = np.subtract(after, before)
  return float(busy / total) if total > 0 else 0.0


# Files.


def to_json(results: Sequence[Mapping[str, Any]]) -> str:
  """Returns results of benchmarks as JSON, a row on each line."""
  objects = []
  for result in results:
    # Not by `json` alone: with a row on each line, a diff shows changed rows.
    head = json.dumps({k: v for k, v in result.items() if k != "rows"})
    rows = ",\n".join(map(json.dumps, result["rows"]))
    objects.append(f'{head[:-1]}, "rows": [\n{rows}]}}')
  return "[" + ",\n".join(objects) + "]\n"


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the results of a file. ValueError for one that has none."""
  try:
    results = json.loads(path.read_text())
    rows_of = {result["name"]: result["rows"] for result in results}
  except (json.JSONDecodeError, TypeError, KeyError) as error:
    raise ValueError(
      f"{path} is no file of `asgd bench --json=FILE` ({error!r})"
    ) from error
  if not rows_of:
    raise ValueError(f"{path} has no benchmark")
  return results
