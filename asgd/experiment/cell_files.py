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

# Files that a result has checksums of.
FILES = ("cell.json", "metrics.jsonl", "records.npz", "params.msgpack")
CELL = "cell.npz"  # the archive of a finished cell: FILES and its result


class CellInUse(ValueError):
  """Another process trains the cell."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Holds a lock. The file of the lock exists only while it is held.

  Raises CellInUse if another process holds it.
  """
  with contextlib.ExitStack() as stack:
    is_current = False
    # The process that held the lock before may remove the file between the
    # opening and the locking here. Then the lock is on a removed file.
    while not is_current:
      opened = safe_files.descriptor(path, os.O_RDWR | os.O_CREAT)
      file = stack.enter_context(os.fdopen(opened, "w"))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        raise CellInUse(
          f"{path.parent} is in use by another process; wait for it, or"
          " choose another folder with --workdir"
        ) from error
      with contextlib.suppress(FileNotFoundError):
        is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def finish(
  place: Path,
  result: Mapping[str, Any],
  records: Any,
  params: Any,
  *,
  packs: bool,
) -> None:
  """Writes the result of a cell, which is finished then.

  Args:
    place: the cell's folder, with cell.json and metrics.jsonl.
    result: the cell's row of results.
    records: a NamedTuple of columns.
    params: the final parameters.
    packs: whether one archive replaces all files and the checkpoints. If not,
      result.json is written last, with checksums of the other files.
  """
  if packs:
    _pack(place, result, records, params)
    return
  storage.save_columns(place / "records.npz", records)
  storage.write_params(place, params)
  files = {name: storage.file_digest(place / name) for name in FILES}
  content = storage.sealed({**result, "files": files})
  storage.write_json(place / "result.json", content)


def _pack(
  place: Path, result: Mapping[str, Any], records: Any, params: Any
) -> None:
  """Writes the archive of a cell, then removes the files that it replaces."""
  members = {}
  for name, column in records._asdict().items():
    np.save(content := io.BytesIO(), column)
    members[f"{name}.npy"] = content.getvalue()
  for name in ("cell.json", "metrics.jsonl", PROGRESS):
    if (place / name).exists():
      members[name] = (place / name).read_bytes()
  members["params.msgpack"] = storage.params_bytes(params)
  text = storage.to_json(result, indent=2) + "\n"
  storage.write_archive(place / CELL, {**members, "result.json": text.encode()})
  _remove_packed(place)


def _remove_packed(place: Path) -> None:
  """Removes the files and checkpoints that the archive replaces."""
  for name in (*FILES, PROGRESS, "result.json"):
    (place / name).unlink(missing_ok=True)
  shutil.rmtree(place / "checkpoints", ignore_errors=True)


def tidy(place: Path) -> None:
  """Removes files of a finished cell that a kill at its end has left.

  These are files that the archive has too, and a half-written archive. Nothing
  is removed if another process holds the cell, or its folder is read-only or a
  link.
  """
  if place.is_symlink() or not safe_files.is_writable(place):
    return
  packed, half = (place / CELL).exists(), f"{CELL}.tmp"
  left = (".lock", half, *(("checkpoints", *FILES, "result.json") * packed))
  if not any((place / name).exists() for name in left):
    return
  with contextlib.suppress(CellInUse), locked(place / ".lock"):
    if packed:
      _remove_packed(place)
    (place / half).unlink(missing_ok=True)


def read_file(place: Path, name: str) -> bytes:
  """Returns the bytes of a finished cell's file, one of `FILES`."""
  members = storage.read_archive(place / CELL, name)
  return members[name] if members else (place / name).read_bytes()


def read_records(place: Path) -> dict[str, np.ndarray]:
  """Returns the columns of a finished cell's records, one row per message."""
  packed, loose = place / CELL, place / "records.npz"
  with np.load(packed if packed.exists() else loose) as columns:
    names = (name for name in columns.files if "." not in name)
    return {name: columns[name] for name in names}
