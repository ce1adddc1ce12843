"""Reads the folder of an experiment while it is trained, and afterwards.

The files are those of `asgd.experiment.folder`. Another process may be writing
them, so a line that is cut at the end of a file is left out, and a file that
cannot be read is treated as missing.
"""

import contextlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

PROGRESS = "progress.json"  # of a cell; asgd.experiment.cell_progress writes it
_ARCHIVE = "cell.npz"  # has the files of a finished cell
_MAX_PROGRESS_BYTES = 2**23  # a run writes some 100 kB
_MAX_BYTES = 2**28  # of any other file, which is read as a whole

# Errors of a damaged archive: `zipfile` documents only the first of them.
_DAMAGES = (
  *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError),
  *(RuntimeError, ValueError),
)

# A cell is BEGUN from its first file on, FINISHED once it has a result.
FINISHED, BEGUN = "finished", "begun"


class CellFiles(NamedTuple):
  """Contents of the files of one cell, which may still be trained."""

  name: str
  progress: dict[str, Any]  # contents of progress.json; {}: there is none
  rows: list[dict[str, Any]]  # evaluations
  result: dict[str, Any]  # {} until the cell is finished

  @property
  def state(self) -> str:
    """FINISHED or BEGUN."""
    return FINISHED if self.result else BEGUN


def _read_text(cell_folder: Path, name: str) -> str:
  """Returns the text of a cell's file, packed or not; "" if it is missing, is
  no plain file, or is larger than any that a run writes."""
  path = cell_folder / name
  # [1] The loose file of a cell that is trained.
  with contextlib.suppress(OSError):
    limit = _MAX_BYTES if name != PROGRESS else _MAX_PROGRESS_BYTES
    if not path.is_file() or path.stat().st_size > limit:
      raise OSError
    return path.read_text("utf-8", "replace")
  # [2] The archive, which replaces the loose files of a finished cell.
  with (
    contextlib.suppress(OSError, KeyError, *_DAMAGES),
    zipfile.ZipFile(cell_folder / _ARCHIVE) as file,
  ):
    return file.read(name).decode("utf-8", "replace")
  return ""


def _parse_object(text: str) -> dict[str, Any]:
  """Returns a JSON object; {} for any other text."""
  # A deeply nested text exhausts the parser's stack.
  with contextlib.suppress(ValueError, RecursionError):
    value = json.loads(text)
    return value if isinstance(value, dict) else {}
  return {}


def read_progress(cell_folder: Path) -> dict[str, Any]:
  """Returns the contents of a cell's progress.json; {} if there is none."""
  return _parse_object(_read_text(cell_folder, PROGRESS))


def last_write(cell_folder: Path) -> float:
  """Returns when a file of a cell was written last, in seconds since 1970."""
  names = PROGRESS, "cell.json", "metrics.jsonl", "result.json", _ARCHIVE
  times = [0.0]
  for name in names:
    with contextlib.suppress(OSError):  # missing, or removed just now
      times.append((cell_folder / name).stat().st_mtime)
  return max(times)


def is_locked(cell_folder: Path) -> bool:
  """Whether a process trains a cell, or was killed while it did."""
  return (cell_folder / ".lock").exists()


def read_cell(cell_folder: Path) -> CellFiles:
  """Reads the folder of a cell."""
  # The last line may be cut: text after the last newline is left out.
  lines = _read_text(cell_folder, "metrics.jsonl").split("\n")[:-1]
  rows = list(filter(None, map(_parse_object, lines)))
  result = _parse_object(_read_text(cell_folder, "result.json"))
  return CellFiles(cell_folder.name, read_progress(cell_folder), rows, result)


def cell_folders(workdir: Path) -> list[Path]:
  """Returns the folders of the cells of a run that have begun.

  Raises:
    ValueError: the folder is missing, empty, or no experiment's; with the
      remedy.
  """
  train = f"start asgd train --workdir={workdir}, then watch it"
  if not workdir.is_dir():
    problem = "is a file" if workdir.exists() else "does not exist"
    raise ValueError(
      f"{workdir} {problem}: name the folder of a run, or {train}"
    )
  if not (workdir / "config.json").exists():
    if not any(workdir.iterdir()):
      raise ValueError(f"{workdir} is empty, no run has begun in it: {train}")
    raise ValueError(
      f"{workdir} is not the folder of an experiment, which has a config.json:"
      " name a folder that asgd train made (its --workdir)"
    )
  return sorted(path for path in (workdir / "cells").glob("*") if path.is_dir())
