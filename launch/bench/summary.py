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
_HEADER = "what is measured", "median (its range over several runs; the target)"
_Key = tuple[str, str, str, str]  # benchmark, table, row, column


def _numbers(run: Sequence[Mapping[str, Any]]) -> dict[_Key, dict[str, Any]]:
  """Returns the measured numbers of a run by their names, in order."""
  return {
    (result["name"], row["table"], row["name"], column): number
    for result in run
    for row in result["rows"]
    for column, number in row["measured"].items()
  }


def _describe_runs(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """Returns a sentence about where and how the runs were made."""
  # One sentence describes all runs, so their results are pooled.
  all_results = [result for run in runs for result in run]
  failed_names = [
    result["name"] for result in all_results if "failed" in result
  ]
  if failed_names:
    raise ValueError(f"{', '.join(failed_names)} has failed: run it again")
  devices = {f"{r['cores']} cores, {r['device']}" for r in all_results}
  busiest = max(share for result in all_results for share in result["busy"])
  minutes = [sum(result["seconds"] for result in run) / 60 for run in runs]
  commands, *other_commands = (
    ", ".join(f"`{result['command']}`" for result in run) for run in runs
  )
  for other in other_commands:
    if other != commands:
      raise ValueError(
        f"one file was made by {commands}, another by {other}: make all by the"
        " same command"
      )
  return (
    f"On {'; '.join(sorted(devices))}, while other programs used at most"
    f" {busiest:.0%} of the cores; minutes of each run:"
    f" {', '.join(f'{count:.1f}' for count in minutes)}. Commands: {commands}."
  )


def _format_number(value: float) -> str:
  """Returns a number with three digits, or a large one without fractions."""
  return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _format_cell(
  key: _Key, numbers_of_runs: Sequence[Mapping[_Key, dict[str, Any]]]
) -> str:
  """Returns the text of a number that all runs measured: its column, its median
  and range over runs, and its target."""
  medians = [run_numbers[key]["median"] for run_numbers in numbers_of_runs]
  if None in medians:
    raise ValueError(f"{' / '.join(key)} is not finite in one of the files")
  notes = []
  if len(medians) > 1:
    limits = min(medians), max(medians)
    notes.append(" to ".join(map(_format_number, limits)))
  if target := numbers_of_runs[0][key].get("target"):
    notes.append(f"target {target}")
  note = f" ({'; '.join(notes)})" if notes else ""
  return f"{key[-1]}: **{_format_number(float(np.median(medians)))}**{note}"


def table(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """Returns the numbers of several runs as a table of Markdown.

  Each run has a median over its turns, the repetitions of a measurement. A cell
  shows the median of these medians, and their range over the runs.

  Args:
    runs: each the results of benchmarks, as `report.read` returns them.

  Raises:
    ValueError: for runs that measured different numbers or have different
      commands, and for a run with a benchmark that failed.
  """
  description = _describe_runs(runs)
  # Numbers in the order of the first run; the others must have the same.
  first, *other_runs = numbers_of_runs = [_numbers(run) for run in runs]
  for other_run in other_runs:
    if missing := sorted(first.keys() ^ other_run.keys()):
      raise ValueError(
        f"{' / '.join(missing[0])} is in some of the files only: make all by"
        " the same command"
      )
  rows = []
  # Rows of one table follow each other, so neighbours are grouped.
  tables = itertools.groupby(first, key=lambda key: key[:2])
  for (benchmark, title), keys in tables:
    # A heading, without a number.
    rows.append((f"**{benchmark}**: {title}", ""))
    for name, row_keys in itertools.groupby(keys, key=lambda key: key[2]):
      cells = (_format_cell(key, numbers_of_runs) for key in row_keys)
      rows.append((name, "; ".join(cells)))
  return f"{description}\n\n{format_markdown(_HEADER, rows)}\n"


def show(paths: Sequence[Path], page: str | None) -> None:
  """Prints the table of files, or puts it between the marks of a page.

  Raises:
    ValueError: without files, or for a page without marks.
  """
  if not paths:
    raise ValueError("--table needs the FILEs that --json=FILE has written")
  new_table = table([report.read(path) for path in paths])
  if page is None:
    print(new_table, end="")
    return
  text = Path(page).read_text()
  # All text outside of the two marks stays as it is.
  before, begin, rest = text.partition(_BEGIN)
  _, end, after = rest.partition(_END)
  if not (begin and end):
    raise ValueError(f"{page} has no lines {_BEGIN.strip()}, {_END.strip()}")
  safe_files.write(Path(page), f"{before}{begin}\n{new_table}\n{end}{after}")
