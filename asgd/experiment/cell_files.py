"""The files of one cell: several while it is trained, and one of them all when
it is finished and could be trained again to the same bits (`pack`)."""

import contextlib
import fcntl
import io
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asgd import safe_files
from asgd.experiment import storage

# What a result is of, beside itself.
FILES = ("cell.json", "metrics.jsonl", "records.npz", "params.msgpack")
CELL = "cell.npz"  # all of them, of a cell that is finished


class CellInUse(ValueError):
  """Another process trains the cell."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Holds a lock, whose file is there only as long."""
  with contextlib.ExitStack() as stack:
    there = False
    while not there:  # or who held it has just removed the file
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
        there = os.path.samestat(os.fstat(file.fileno()), path.stat())
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def write_result(place: Path, result: Mapping[str, Any]) -> None:
  """Writes result.json, with checksums of the other files of the cell: they are
  there, and the cell is finished."""
  files = {name: storage.file_digest(place / name) for name in FILES}
  content = storage.sealed({**result, "files": files})
  storage.write_json(place / "result.json", content)


def pack(place: Path) -> None:
  """Makes one file of those of a finished cell, and removes its checkpoints."""
  members = {name: (place / name).read_bytes() for name in FILES}
  with zipfile.ZipFile(io.BytesIO(members.pop("records.npz"))) as records:
    columns = {name: records.read(name) for name in records.namelist()}
  result = storage.read_sealed(place / "result.json")
  assert result is not None
  del result["files"]
  text = storage.to_json(result, indent=2) + "\n"
  storage.write_archive(
    place / CELL, {**columns, **members, "result.json": text.encode()}
  )
  _remove_packed(place)


def _remove_packed(place):
  """Removes what a cell has in its one file."""
  for name in (*FILES, "result.json"):
    (place / name).unlink(missing_ok=True)
  shutil.rmtree(place / "checkpoints", ignore_errors=True)


def tidy(place: Path, *, packs: bool) -> None:
  """Completes the end of a finished cell after a kill: packs its files if it
  `packs`, and removes files that are packed or half written. Does nothing if
  another process holds the cell, or it is read-only or a link."""
  if place.is_symlink() or not safe_files.is_writable(place):
    return
  left = (".lock", f"{CELL}.tmp", "checkpoints", *FILES, "result.json")
  loose = packs and not (place / CELL).exists()
  left = left if packs else left[:2]
  if not any((place / name).exists() for name in left):
    return
  with contextlib.suppress(CellInUse), locked(place / ".lock"):
    if (place / CELL).exists():
      _remove_packed(place)
    elif loose:
      pack(place)
    (place / f"{CELL}.tmp").unlink(missing_ok=True)


def read_file(place: Path, name: str) -> bytes:
  """Returns what a file of a finished cell holds, of those that are listed
  above."""
  members = storage.read_archive(place / CELL, name)
  return members[name] if members else (place / name).read_bytes()


def read_records(place: Path) -> dict[str, np.ndarray]:
  """Returns the columns of a finished cell's records, one row per message."""
  packed, loose = place / CELL, place / "records.npz"
  with np.load(packed if packed.exists() else loose) as columns:
    names = (name for name in columns.files if "." not in name)
    return {name: columns[name] for name in names}
