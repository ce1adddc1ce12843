"""Shows the contents of a results folder.

  asgd show WORKDIR

prints the config, the cells that are finished and those that are missing, the
best results, and where the report is. It reads files only: no library is
imported, and nothing is run or written. Damaged files are named at the end, and
the exit status is then 1.
"""

import contextlib
import csv
import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from asgd import output
from asgd.pages import run_files

from . import command_line

_MAX_ERROR_LENGTH = 120  # characters of the error of a damaged file
_MAX_SHOWN = 8  # rows of results, and missing cells, that are shown
# A finished cell has one of these; old versions wrote result.json.
_FINISHED = "cell.npz", "result.json"
# Name of data and model in the config of a Python call, as
# `asgd.problems.own.Objects` has it.
_GIVEN = "given"
# The names of `asgd.algorithms.PEER_RECIPES`; a test compares them.
PEER_RECIPES = (
  *("ad_psgd", "async_threshold_sharing", "choco_sgd", "d2", "d_psgd"),
  *("gradient_tracking", "local_d_psgd", "sgp", "threshold_sharing"),
)
# Columns of results.csv that are shown, with their headers.
_COLUMNS = {
  "algorithm": "run",
  "workers": "workers",
  "seeds": "seeds",
  "test_accuracy": "accuracy %",
  "test_loss": "loss",
  "staleness_mean": "staleness",
  "seconds": "seconds",
}


def _worker_counts(
  run: Mapping[str, Any], config: Mapping[str, Any]
) -> list[int]:
  """Returns the numbers of workers of a run's cells."""
  engine = run.get("engine")
  is_peers = engine == "mesh" and run.get("recipe") in PEER_RECIPES
  if engine in ("mesh", "pipeline") and not is_peers:
    return [1]  # all devices train one model
  # A run may have other numbers of workers than the config, or one number.
  workers = run.get("workers") or config["workers"]
  return workers if isinstance(workers, list) else [workers]


def _cell_names(config: Mapping[str, Any]) -> list[str]:
  """Returns the names of a config's cells, as `asgd.experiment.cells` does."""
  return [
    f"{label}-n{workers}-s{seed}"
    for label, run in config["runs"].items()
    for workers in _worker_counts(run, config)
    for seed in config["seeds"]
  ]


def _number(row: Mapping[str, str], key: str) -> float | None:
  """Returns a number of results.csv; None if it is missing."""
  try:
    return float(row.get(key) or "nan")
  except ValueError:
    return None


def _sort_key(row: Mapping[str, str]) -> tuple[float, float]:
  """Returns the key by which results are sorted, the best first."""
  # NaN is not equal to itself; a missing number is sorted last.
  accuracy, loss = (_number(row, key) for key in ("test_accuracy", "test_loss"))
  return (
    -accuracy if accuracy is not None and accuracy == accuracy else 0.0,
    loss if loss is not None and loss == loss else float("inf"),
  )


@contextlib.contextmanager
def _note_damage(faults: list[str], path: Path, remedy: str) -> Iterator[None]:
  """Catches an error that a damaged file raises in the block, and adds a line
  with the remedy to `faults`."""
  try:
    yield
  except PermissionError:  # it names the file
    raise
  except Exception as error:  # it may hold any bytes, or any JSON
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = _printable(text[:_MAX_ERROR_LENGTH])
    faults.append(f"{path} is damaged ({text}): {remedy}")


def _results(path: Path) -> str:
  """Returns the best rows of results.csv as a table."""
  with path.open(newline="", encoding="utf-8") as file:
    rows = sorted(csv.DictReader(file), key=_sort_key)
  # Columns that no row of this experiment has are left out.
  headers = {
    k: v for k, v in _COLUMNS.items() if any(row.get(k) for row in rows)
  }
  if not headers:
    raise ValueError("it has no results")
  text_rows = []
  for row in rows[:_MAX_SHOWN]:
    text_row = []
    for key in headers:
      # The name of a run may look like a number.
      number = None if key == "algorithm" else _number(row, key)
      scale = 100 if key == "test_accuracy" else 1  # percent
      text = row.get(key) or "-"
      # A text, such as the name of a run, is printed as it is, on one line.
      text = _printable(text) if number is None else f"{scale * number:.4g}"
      text_row.append(text)
    text_rows.append(text_row)
  remainder = f"{len(rows) - _MAX_SHOWN} more rows are in {path}\n"
  table = output.table(list(headers.values()), text_rows)
  return table + remainder * (len(rows) > _MAX_SHOWN)


def describe(folder: Path) -> tuple[str, list[str]]:
  """Returns the text of a results folder, and a line with the remedy for each
  of its files that is damaged.

  Raises:
    ValueError: for a folder that holds no experiment.
  """
  path = folder / "config.json"
  if not path.is_file():
    problem = "holds no experiment, which has a config.json"
    if not folder.is_dir():
      problem = "is a file" if folder.exists() else "does not exist"
    raise ValueError(
      f"{folder} {problem}: name a folder that asgd train made, such as"
      " runs/digits-001"
    )
  lines, faults = [f"folder    {folder}"], list[str]()
  finished, cell_faults = _read_cells(folder / "cells")
  # The stored config is resolved: every key has a value.
  remedy = "restore it from a copy, or train in another folder"
  with _note_damage(faults, path, remedy):
    config = json.loads(path.read_text("utf-8"))["config"]
    lines += map(_printable, _progress(config, finished))
  faults += cell_faults
  report = folder / "report.html"
  lines.append(f"report    {report if report.is_file() else 'none yet'}")
  table = folder / "results.csv"
  # The table appears with the first finished cell.
  if table.is_file():
    remedy = f"train again with --workdir={shlex.quote(str(folder))}"
    with _note_damage(faults, table, f"{remedy}, which writes it anew"):
      lines += ["", *_results(table).rstrip().splitlines()]
  return "\n".join(lines), faults


def _read_cells(cells: Path) -> tuple[set[str], list[str]]:
  """Returns the names of the cells with readable results, and a line for each
  other cell."""
  finished, faults = set(), []
  for cell in sorted(cells.glob("*")):
    paths = [path for name in _FINISHED if (path := cell / name).exists()]
    if not paths:
      continue
    if run_files.read_cell(cell).state == run_files.FINISHED:
      finished.add(cell.name)
      continue
    remedy = "restore it from a copy"
    if paths[0].name == _FINISHED[0]:
      remedy += ", or repeat its asgd train, which trains the cell again"
    faults.append(f"{paths[0]} is damaged, empty or cut short: {remedy}")
  return finished, faults


def _progress(
  config: Mapping[str, Any], finished: Collection[str]
) -> Iterator[str]:
  """Yields lines of a config's problem, and of the cells that are finished and
  those that are missing."""
  model, data = config["model"]["name"], config["data"]["name"]
  problem = f"{config['problem']['name'] or model} on {data}"
  if (model, data) == (_GIVEN, _GIVEN):
    problem = "a caller's data and model"
  yield f"problem   {problem}"
  yield f"runs      {', '.join(config['runs'])}"
  cell_names = _cell_names(config)
  missing = [name for name in cell_names if name not in finished]
  n_cells = len(cell_names)
  yield f"cells     {n_cells - len(missing)} of {n_cells} finished"
  if missing:
    n_more = len(missing) - _MAX_SHOWN
    remainder = f" and {n_more} more" * (n_more > 0)
    yield f"to do     {', '.join(missing[:_MAX_SHOWN])}{remainder}"


def _printable(line: str) -> str:
  """Returns a line without control characters. A foreign file may hold them,
  and they would change the terminal."""
  return "".join(
    character if character.isprintable() else "?" for character in line
  )


def main(*words: str) -> None:
  """Prints what the named folder holds."""
  if len(words) != 1:
    command_line.fail(
      f"asgd show takes one folder, not {len(words)}: asgd show runs/digits-001"
    )
  try:
    text, faults = describe(Path(words[0]))
  except OSError as error:
    command_line.fail(str(error), status=1)
  except ValueError as error:
    command_line.fail(str(error))
  print(text)
  for fault in faults:
    print(f"error: {fault}", file=sys.stderr)
  if faults:
    sys.exit(1)


if __name__ == "__main__":
  command_line.run(main, "show")
