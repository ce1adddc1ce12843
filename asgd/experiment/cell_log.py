"""The evaluations of cells: a file for each cell, and curves on boards.

Each cell has a board while it trains. When several seeds are finished, one
board with their means replaces the boards of the seeds (`join`). `join` reads
the rows in the cells' folders, so a kill in between loses nothing, and later
seeds are added.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd import safe_files
from asgd.experiment import boards, figure, folder, storage
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.figure import Rows

_NO_CURVES = ("workers", "seed", "message", "diverged")  # keys without a curve
_GROUPS = ("test", "train", "staleness", "gap")  # of curves on a board
_METRICS = ("test/accuracy", "test/loss", "train/loss")
_EVENTS = "events.out.tfevents.*"  # live runs have more files in subfolders
# A joined board is written here: TensorBoard watches the folder of the boards.
_DRAFT = ".tensorboard"


def tag_of(key: str) -> str:
  """Returns the tag of an evaluation's column, by which boards group curves.

  Example:
    >>> tag_of("test_loss"), tag_of("learning_rate")
    ('test/loss', 'run/learning_rate')
  """
  group, _, rest = key.partition("_")
  return f"{group}/{rest}" if rest and group in _GROUPS else f"run/{key}"


def _scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
  """Returns the points that an evaluation adds to curves: tag -> value."""
  return {
    tag_of(key): value
    for key, value in row.items()
    if key not in _NO_CURVES
    and isinstance(value, (int, float))
    and np.isfinite(value)
  }


def settings_of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
  """Returns the hyperparameters of a cell, for tables of boards."""
  run = experiment.runs[cell.label]
  config_keys = "batch_size", "epochs", "examples", "learning_rate", "clip_norm"
  settings: dict[str, Any] = {
    "algorithm": cell.title,
    "recipe": run.recipe,
    "engine": run.engine,
    "workers": cell.workers,
    "seed": cell.seed,
  }
  settings |= {key: run.config[key] for key in config_keys}
  settings |= {f"recipe.{key}": value for key, value in run.options.items()}
  settings["data"] = experiment.dataset.name
  # TensorBoard's table takes no lists, dicts or None.
  plain_types = (bool, int, float, str)
  return {k: v for k, v in settings.items() if isinstance(v, plain_types)}


def read_rows_so_far(cell_folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell that is about to resume.

  A kill may have cut the last line short, so it is dropped. folder.FolderError
  names any other line that is not an evaluation.
  """
  path, rows = cell_folder / "metrics.jsonl", list[dict[str, Any]]()
  if not path.exists():
    return rows
  # The text after the last newline is "", or a line that a kill has cut.
  *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
  for line_number, line in enumerate(lines, 1):
    try:
      rows.append(storage.unsealed(json.loads(line)))
    except ValueError as error:
      raise folder.FolderError(
        f"{path}, line {line_number} is no evaluation that a run wrote:"
        f" {line[:60].strip()!r}. Put the file back as it was, or remove it:"
        " then the earlier evaluations are repeated with the current"
        " parameters"
      ) from error
  return rows


class CellLog:
  """metrics.jsonl and the boards of one cell."""

  def __init__(
    self,
    cell_folder: Path,
    board: Path,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
  ):
    """Starts the log with the `rows` that a checkpoint kept; later ones,
    written before a kill, are dropped. Boards show the cell's `settings`."""
    path = cell_folder / "metrics.jsonl"
    safe_files.write(path, storage.to_lines(map(storage.sealed, rows)))
    self._file = safe_files.appending(path)
    # Boards keep the points up to the checkpoint; later ones are drawn again.
    step = rows[-1]["message"] + 1 if rows else 0
    self._boards: list[Any] = [boards.open_board(board, purge_step=step)]
    if settings:
      self._boards[0].add_settings(settings, _METRICS)
    if boards.is_wandb_wanted():
      workdir = board.parents[1].absolute()  # WORKDIR/tensorboard/CELL
      run = boards.WandbRun(workdir, cell_folder.name, settings or {})
      self._boards.append(run)

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one evaluation."""
    self._file.write(storage.to_lines([storage.sealed(row)]).encode())
    self._file.flush()  # a live run resumes from these rows after a kill
    for board in self._boards:
      board.add_scalars(_scalars_of(row), row["message"])

  def close(self) -> None:
    """Closes the files."""
    for output in (self._file, *self._boards):
      output.close()


def join(workdir: Path, experiment: Experiment, results: Rows) -> None:
  """Replaces the boards of finished seeds in WORKDIR/tensorboard by one board
  for each run and number of workers. Without tensorboardX it does nothing. The
  caller holds the lock of the folder."""
  if not boards.is_available():
    return
  for group in figure.group_by(results, "label", "workers").values():
    if len(group) > 1 and group[0]["label"] in experiment.runs:
      _join_seeds(workdir, experiment, group)


def _join_seeds(
  workdir: Path, experiment: Experiment, group: Sequence[Mapping[str, Any]]
) -> None:
  """Writes the board of one group of seeds and removes the seeds' boards."""
  first_row = group[0]
  cell = Cell(
    *(first_row[k] for k in ("label", "algorithm", "workers", "seed"))
  )
  boards_folder = workdir / "tensorboard"
  joined_board = boards_folder / f"{cell.label}-n{cell.workers}"
  seed_boards = [boards_folder / row["cell"] for row in group]
  # Leave links out: nothing is removed through a link.
  seed_boards = [board for board in seed_boards if not board.is_symlink()]
  safe_files.make_folder(joined_board)
  old_files = list(joined_board.glob(_EVENTS))
  seed_files = [path for board in seed_boards for path in board.glob(_EVENTS)]
  if old_files and not seed_files:
    return  # an earlier call has joined these seeds
  # [1] Write the means of all seeds, including those of an earlier board.
  settings = settings_of(experiment, cell)
  del settings["seed"]
  settings["seeds"] = " ".join(str(row["seed"]) for row in group)
  cells = [folder.read_rows(workdir / "cells" / row["cell"]) for row in group]
  draft = workdir / _DRAFT
  shutil.rmtree(draft, ignore_errors=True)  # a kill may have left one
  # With purge_step=0 TensorBoard drops all points of older files.
  board = boards.open_board(draft, purge_step=0)
  try:
    board.add_settings(settings, _METRICS)
    for message, values in mean_curves(cells):
      board.add_scalars(values, message)
  finally:
    board.close()
  # [2] Publish the file, complete, then remove the files that it replaces. A
  # kill in between leaves seeds' boards, and the next call joins them again.
  (event_file,) = draft.iterdir()
  published = joined_board / event_file.name
  event_file.replace(published)
  draft.rmdir()
  for path in (*old_files, *seed_files):
    if path != published:
      path.unlink(missing_ok=True)
  for seed_board in seed_boards:
    # The folder is removed already, or has a subfolder `live` of a live run.
    with contextlib.suppress(OSError):
      seed_board.rmdir()


def mean_curves(cells: Sequence[Rows]) -> list[tuple[int, dict[str, float]]]:
  """Returns the mean curves of several seeds: [(message, {tag: value})].

  There is a point for each evaluation that all seeds have made, with the means
  of the values that are finite in all seeds. Test curves also have their sample
  deviation, as NAME_std.

  Example:
    >>> rows = [{"message": 8, "test_loss": loss} for loss in (0.5, 1.5)]
    >>> ((message, values),) = mean_curves([rows[:1], rows[1:]])
    >>> print(message, values["test/loss"], round(values["test/loss_std"], 3))
    8 1.0 0.707
  """
  points = []
  # strict=False: the shortest log ends the curves, as a seed that diverged has
  # fewer evaluations.
  for rows in zip(*cells, strict=False):
    scalars = [_scalars_of(row) for row in rows]
    values: dict[str, float] = {}
    for tag in scalars[0]:
      if all(tag in of_seed for of_seed in scalars):
        seed_values = [of_seed[tag] for of_seed in scalars]
        values[tag] = float(np.mean(seed_values))
        if tag.startswith("test/"):
          values[f"{tag}_std"] = float(np.std(seed_values, ddof=1))
    # Live cells may be evaluated a few messages apart.
    message = round(float(np.mean([row["message"] for row in rows])))
    points.append((message, values))
  return points
