"""The log of one cell: its evaluations in a file, and as curves on boards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd import safe_files
from asgd.experiment import cells as cells_lib
from asgd.experiment import event_file, folder, storage, trackers

_NO_CURVES = ("workers", "seed", "message", "diverged")  # which, and where
_GROUPS = ("test", "train", "staleness", "gap")  # of curves
METRICS = ("test/accuracy", "test/loss", "train/loss")


def tag_of(key: str) -> str:
  """Returns the tag of a column of evaluations, as boards group them.

  Example:
    >>> tag_of("test_loss"), tag_of("learning_rate")
    ('test/loss', 'run/learning_rate')
  """
  group, _, rest = key.partition("_")
  return f"{group}/{rest}" if rest and group in _GROUPS else f"run/{key}"


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
  """Returns the points that an evaluation adds to curves, by their tags."""
  return {
    tag_of(key): value
    for key, value in row.items()
    if key not in _NO_CURVES
    and isinstance(value, (int, float))
    and np.isfinite(value)
  }


def settings_of(
  experiment: cells_lib.Experiment, cell: cells_lib.Cell
) -> dict[str, Any]:
  """Returns the hyperparameters of a cell, for tables of boards."""
  run = experiment.runs[cell.label]
  keys = "batch_size", "epochs", "examples", "learning_rate", "clip_norm"
  named = {"algorithm": cell.title, "recipe": run.recipe, "engine": run.engine}
  named |= {"workers": cell.workers, "seed": cell.seed}
  named |= {key: run.config[key] for key in keys}
  named |= {f"recipe.{key}": value for key, value in run.options.items()}
  named["data"] = experiment.dataset.name
  plain = (bool, int, float, str)
  return {k: v for k, v in named.items() if isinstance(v, plain)}


def read_rows_so_far(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell that is to go on; a last one that was cut
  short is dropped, and folder.FolderError names another line that is none."""
  path, rows = place / "metrics.jsonl", []
  if not path.exists():
    return rows
  *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
  for number, line in enumerate(lines, 1):
    try:
      rows.append(storage.read_line(line))
    except ValueError as error:
      raise folder.FolderError(
        f"{path}, line {number} is no evaluation that a run wrote:"
        f" {line[:60].strip()!r}. Put the file back as it was, or remove it;"
        " evaluations that were made are then made again, with the parameters"
        " of now"
      ) from error
  return rows


class CellLog:
  """metrics.jsonl and the boards of one cell."""

  def __init__(
    self,
    place: Path,
    board: Path,
    rows: Sequence[Mapping],
    settings: Mapping[str, Any] | None = None,
  ):
    """Starts the log with the rows that a checkpoint kept; later ones, written
    before a kill, are dropped. Boards are told the `settings` of the cell."""
    path = place / "metrics.jsonl"
    lines = storage.to_lines(map(storage.sealed, rows))
    safe_files.write(path, lines)
    self._file = safe_files.appending(path)
    step = rows[-1]["message"] + 1 if rows else 0
    self._board = event_file.open_board(board, purge_step=step)
    if settings:
      self._board.add_settings(settings, METRICS)
    self._run = None
    if trackers.asked():
      workdir = board.parents[1].absolute()
      self._run = trackers.WandbRun(workdir, place.name, settings or {})

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one evaluation."""
    self._file.write(storage.to_lines([storage.sealed(row)]).encode())
    self._file.flush()
    scalars = scalars_of(row)
    for tag, value in scalars.items():
      self._board.add_scalar(tag, value, row["message"])
    if self._run is not None:
      self._run.add_scalars(scalars, row["message"])

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    self._board.close()
    if self._run is not None:
      self._run.close()
