"""The files of one cell.

A cell has several files while it is trained. When it is finished, and its
engine would train it again to the same bits, one archive replaces them.
"""

import contextlib
import fcntl
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asgd import safe_files
from asgd.experiment import storage
from asgd.pages.run_files import PROGRESS

# Files with checksums in result.json.
FILES = ("cell.json", "metrics.jsonl", "records.npz", "params.msgpack")
# The archive of a finished cell. It has FILES, progress.json and result.json;
# instead of records.npz it has NAME.npy for each column.
ARCHIVE = "cell.npz"
_REPLACED = (*FILES, PROGRESS, "result.json")  # by the archive


class CellInUse(ValueError):
  """Another process trains the cell."""


@contextlib.contextmanager
def locked_cell(cell_folder: Path) -> Iterator[None]:
  """Holds the lock of a cell: the file .lock, which it removes at the end.

  After a kill the file stays, but no process holds it. Raises CellInUse if
  another process holds the lock.
  """
  path = cell_folder / ".lock"
  with contextlib.ExitStack() as stack:
    is_current = False  # whether the locked file is the one at `path`
    # The process that held the lock before may remove the file between the
    # opening and the locking here. Then the lock is on a removed file.
    while not is_current:
      opened = safe_files.descriptor(path, os.O_RDWR | os.O_CREAT)
      file = stack.enter_context(os.fdopen(opened, "w"))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        raise CellInUse(
          f"{cell_folder} is in use by another process; wait for it, or"
          " choose another folder with --workdir"
        ) from error
      with contextlib.suppress(FileNotFoundError):
        is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def finish(
  cell_folder: Path,
  result: Mapping[str, Any],
  records: Any,
  params: Any,
  *,
  as_archive: bool,
) -> None:
  """Writes the result of a cell. The cell then counts as finished.

  Args:
    cell_folder: the cell's folder, with cell.json and metrics.jsonl.
    result: the cell's row of results.
    records: a NamedTuple of columns.
    params: the final parameters.
    as_archive: whether one archive replaces all files and the checkpoints. If
      not, result.json is written last, with checksums of the other files.
  """
  if as_archive:
    _pack(cell_folder, result, records, params)
    return
  storage.save_columns(cell_folder / "records.npz", records)
  storage.write_params(cell_folder, params)
  # result.json is written last, because it marks the cell as finished. It has
  # the checksums of the other files.
  files = {name: storage.file_digest(cell_folder / name) for name in FILES}
  content = storage.sealed({**result, "files": files})
  storage.write_json(cell_folder / "result.json", content)


def _pack(
  cell_folder: Path, result: Mapping[str, Any], records: Any, params: Any
) -> None:
  """Writes the archive of a cell, then removes the files that it replaces."""
  members: dict[str, bytes] = {}
  # NAME.npy, as in an .npz file, so that numpy.load reads the archive.
  for name, values in records._asdict().items():
    np.save(buffer := io.BytesIO(), values)
    members[f"{name}.npy"] = buffer.getvalue()
  for name in ("cell.json", "metrics.jsonl", PROGRESS):
    if (cell_folder / name).exists():
      members[name] = (cell_folder / name).read_bytes()
  members["params.msgpack"] = storage.params_bytes(params)
  result_text = storage.to_json(result, indent=2) + "\n"
  members["result.json"] = result_text.encode()
  # The archive is written atomically, by a rename. A kill before the rename
  # leaves the cell unfinished; a kill after it leaves files that
  # `remove_leftovers` removes.
  storage.write_archive(cell_folder / ARCHIVE, members)
  _remove_packed(cell_folder)


def _remove_packed(cell_folder: Path) -> None:
  """Removes the files and checkpoints that the archive replaces."""
  for name in _REPLACED:
    (cell_folder / name).unlink(missing_ok=True)
  shutil.rmtree(cell_folder / "checkpoints", ignore_errors=True)


def remove_leftovers(cell_folder: Path) -> None:
  """Removes files of a finished cell that a kill at its end has left.

  These are the lock's file, a half-written archive, and the files that a
  complete archive replaces. Nothing is removed if another process holds the
  cell, or its folder is read-only or a link.
  """
  if cell_folder.is_symlink() or not safe_files.is_writable(cell_folder):
    return
  packed, half_written = (cell_folder / ARCHIVE).exists(), f"{ARCHIVE}.tmp"
  leftovers = [".lock", half_written]
  if packed:
    leftovers += ["checkpoints", *_REPLACED]
  # Most cells have no leftovers, and need no lock.
  if not any((cell_folder / name).exists() for name in leftovers):
    return
  with contextlib.suppress(CellInUse), locked_cell(cell_folder):
    if packed:
      _remove_packed(cell_folder)
    (cell_folder / half_written).unlink(missing_ok=True)


def read_file(cell_folder: Path, name: str) -> bytes:
  """Returns the bytes of a file of a finished cell, from its archive or its
  folder; `read_records` reads the records.

  Raises FileNotFoundError if the cell has no such file, or if its archive was
  changed.
  """
  members = storage.read_archive(cell_folder / ARCHIVE, name)
  return members[name] if members else (cell_folder / name).read_bytes()


def read_records(cell_folder: Path) -> dict[str, np.ndarray]:
  """Returns the columns of a finished cell's records, one row per message."""
  packed, loose = cell_folder / ARCHIVE, cell_folder / "records.npz"
  with np.load(packed if packed.exists() else loose) as columns:
    # numpy strips .npy from the names of columns; other members keep a suffix.
    column_names = (name for name in columns.files if "." not in name)
    return {name: columns[name] for name in column_names}
