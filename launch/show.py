"""Shows the contents of a results folder.

  asgd show WORKDIR

prints the config, the cells that are finished and those that are missing, the
best results, and where the report is. It reads files only: no library is
imported, and nothing is run or written.
"""

import contextlib
import csv
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asgd import output

from . import command_line

_WIDEST = 120  # most characters of another error
_MOST = 8  # rows of results, and missing cells, that are shown
# A finished cell has one of them: cells of old versions are not packed.
_FINISHED = "cell.npz", "result.json"
# Name of data and model in the config of a Python call, as
# `asgd.problems.own.Objects` has it.
_OF_CALL = "given"
# Columns of results.csv that are shown, with their headers.
_SHOWN = {
  "algorithm": "run",
  "workers": "workers",
  "seeds": "seeds",
  "test_accuracy": "accuracy %",
  "test_loss": "loss",
  "staleness_mean": "staleness",
  "seconds": "seconds",
}


def _cells(config: Mapping[str, Any]) -> list[str]:
  """Returns the names of a config's cells, as `asgd.experiment.cells` does."""
  return [
    f"{label}-n{workers}-s{seed}"
    for label, run in config["runs"].items()
    # A run may have other numbers of workers than the config.
    for workers in run.get("workers") or config["workers"]
    for seed in config["seeds"]
  ]


def _number(row: Mapping[str, str], key: str) -> float | None:
  """Returns a number of results.csv; None if it is missing."""
  try:
    return float(row.get(key) or "nan")
  except ValueError:
    return None


def _best(row: Mapping[str, str]) -> tuple[float, float]:
  """Returns the key by which results are sorted, the best first."""
  # NaN is not equal to itself; a missing number is sorted last.
  accuracy, loss = (_number(row, key) for key in ("test_accuracy", "test_loss"))
  return (
    -accuracy if accuracy is not None and accuracy == accuracy else 0.0,
    loss if loss is not None and loss == loss else float("inf"),
  )


class Damaged(ValueError):
  """A file of a results folder cannot be read."""


@contextlib.contextmanager
def _damage(path: Path, remedy: str) -> Iterator[None]:
  """Turns whatever a damaged file raises into one line with the remedy."""
  try:
    yield
  except Exception as error:  # it may hold any bytes, or any JSON
    text = " ".join(f"{type(error).__name__}: {error}".split())
    raise Damaged(f"{path} is damaged ({text[:_WIDEST]}): {remedy}") from None


def _results(path: Path) -> str:
  """Returns the best rows of results.csv as a table."""
  with path.open(newline="", encoding="utf-8") as file:
    rows = sorted(csv.DictReader(file), key=_best)
  # Columns that no row of this experiment has are left out.
  shown = {k: v for k, v in _SHOWN.items() if any(row.get(k) for row in rows)}
  if not shown:
    raise ValueError("it has no results")
  lines = []
  for row in rows[:_MOST]:
    line = []
    for key in shown:
      number = _number(row, key)
      scale = 100 if key == "test_accuracy" else 1  # percent
      text = row.get(key) or "-"
      # A text, such as the name of a run, is printed as it is, on one line.
      text = _printable(text) if number is None else f"{scale * number:.4g}"
      line.append(text)
    lines.append(line)
  remainder = f"{len(rows) - _MOST} more rows are in {path}\n"
  table = output.table(list(shown.values()), lines)
  return table + remainder * (len(rows) > _MOST)


def describe(folder: Path) -> str:
  """Returns the text of a results folder.

  Raises:
    Damaged: for a file that cannot be read; it names the remedy.
    ValueError: for a folder that holds no experiment.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"{folder} holds no experiment, which has a config.json: name a folder"
      " that asgd train made, such as runs/digits-001"
    )
  # The stored config is resolved: every key has a value.
  with _damage(path, "restore it from a copy, or train in another folder"):
    config = json.loads(path.read_text("utf-8"))["config"]
    progress = map(_printable, _progress(folder / "cells", config))
    lines = [f"folder    {folder}", *progress]
  report = folder / "report.html"
  lines.append(f"report    {report if report.is_file() else 'none yet'}")
  table = folder / "results.csv"
  # The table appears with the first finished cell.
  if table.is_file():
    again = f"train again with --workdir={shlex.quote(str(folder))}"
    with _damage(table, f"{again}, which writes it anew"):
      lines += ["", *_results(table).rstrip().splitlines()]
  return "\n".join(lines)


def _progress(cells: Path, config: Mapping[str, Any]) -> Iterator[str]:
  """Yields lines of a config's problem, and of the cells that are finished and
  those that are missing. `cells` is their folder."""
  model, data = config["model"]["name"], config["data"]["name"]
  problem = f"{config['problem']['name'] or model} on {data}"
  if (model, data) == (_OF_CALL, _OF_CALL):
    problem = "a caller's data and model"
  yield f"problem   {problem}"
  yield f"runs      {', '.join(config['runs'])}"
  names = _cells(config)
  finished = {
    name
    for name in names
    if any((cells / name / file).is_file() for file in _FINISHED)
  }
  yield f"cells     {len(finished)} of {len(names)} finished"
  missing = [name for name in names if name not in finished]
  if missing:
    more = f" and {len(missing) - _MOST} more" * (len(missing) > _MOST)
    yield f"to do     {', '.join(missing[:_MOST])}{more}"


def _printable(line: str) -> str:
  """Returns a line without control characters. A foreign file may hold them,
  and they would change the terminal."""
  return "".join(each if each.isprintable() else "?" for each in line)


def main(*words: str) -> None:
  """Prints what the named folder holds."""
  if len(words) != 1:
    command_line.fail(
      f"asgd show takes one folder, not {len(words)}: asgd show runs/digits-001"
    )
  try:
    print(describe(Path(words[0])))
  except (Damaged, OSError) as error:
    command_line.fail(str(error), status=1)
  except ValueError as error:
    command_line.fail(str(error))


if __name__ == "__main__":
  command_line.run(main, "show")
