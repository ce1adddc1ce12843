"""One table of several runs of all benchmarks, from their JSON."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd import safe_files
from asgd.text_table import format_markdown

from . import report

_BEGIN, _END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"
_HEADER = "what is measured", "median of runs (range), and target"
_Key = tuple[str, str, str, str]  # benchmark, table, row, column


def _numbers(run: Sequence[Mapping[str, Any]]) -> dict[_Key, dict[str, Any]]:
  """Returns the measured numbers of a run by their names, in order."""
  return {
    (each["name"], row["table"], row["name"], column): number
    for each in run
    for row in each["rows"]
    for column, number in row["measured"].items()
  }


def _described(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """Says where and how the runs were made."""
  every = [each for run in runs for each in run]
  failed = [each["name"] for each in every if "failed" in each]
  if failed:
    raise ValueError(f"{', '.join(failed)} has failed: run it again")
  devices = {f"{each['cores']} cores, {each['device']}" for each in every}
  busiest = max(share for each in every for share in each["busy"])
  minutes = [sum(each["seconds"] for each in run) / 60 for run in runs]
  commands = ", ".join(f"`{each['command']}`" for each in runs[0])
  return (
    f"On {'; '.join(sorted(devices))}, while other programs used at most"
    f" {busiest:.0%} of the cores; minutes of each run:"
    f" {', '.join(f'{each:.1f}' for each in minutes)}. Commands: {commands}."
  )


def _number(value: float) -> str:
  return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cell(key: _Key, numbers: Sequence[Mapping[_Key, dict[str, Any]]]) -> str:
  """Returns a number of all runs: its column, median, range and target."""
  medians = [each[key]["median"] for each in numbers]
  if None in medians:
    raise ValueError(f"{' / '.join(key)} is not finite in one of the files")
  text = f"{key[-1]} **{_number(float(np.median(medians)))}**"
  if len(medians) > 1:
    text += f" ({_number(min(medians))} to {_number(max(medians))})"
  return f"{text} {numbers[0][key].get('target', '')}".rstrip()


def table(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """Returns the numbers of several runs as a table of Markdown: the median over
  runs of the medians of their turns, and the range of these.

  Args:
    runs: each the results of benchmarks, as `report.read` returns them.

  Raises:
    ValueError: for runs that have not measured the same, or have failed.
  """
  described = _described(runs)
  first, *others = numbers = [_numbers(run) for run in runs]
  for other in others:
    if missing := sorted(first.keys() ^ other.keys()):
      raise ValueError(
        f"{' / '.join(missing[0])} is in some of the files only: make all by"
        " the same command"
      )
  rows = []
  tables = itertools.groupby(first, key=lambda key: key[:2])
  for (benchmark, title), keys in tables:
    rows.append((f"**{benchmark}**: {title}", ""))
    for name, of_row in itertools.groupby(keys, key=lambda key: key[2]):
      cells = (_cell(key, numbers) for key in of_row)
      rows.append((name, "; ".join(cells)))
  return f"{described}\n\n{format_markdown(_HEADER, rows)}\n"


def show(paths: Sequence[Path], page: str | None) -> None:
  """Prints the table of files, or puts it between the marks of a page.

  Raises:
    ValueError: without files, or for a page without marks.
  """
  if not paths:
    raise ValueError("--table needs the FILEs that --json=FILE has written")
  made = table([report.read(path) for path in paths])
  if page is None:
    print(made, end="")
    return
  text = Path(page).read_text()
  before, begin, rest = text.partition(_BEGIN)
  _, end, after = rest.partition(_END)
  if not (begin and end):
    raise ValueError(f"{page} has no lines {_BEGIN.strip()}, {_END.strip()}")
  safe_files.write(Path(page), f"{before}{begin}\n{made}\n{end}{after}")
