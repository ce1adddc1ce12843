"""The files of one cell: several while it is trained, and one of them all when
it is finished and could be trained again to the same bits."""

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


def finish(
  place: Path,
  result: Mapping[str, Any],
  records: Any,
  params: Any,
  *,
  packs: bool,
) -> None:
  """Writes what a cell came to, after which it is finished.

  Args:
    place: its folder, with cell.json and metrics.jsonl.
    result: its result.
    records: a NamedTuple of columns.
    params: its parameters.
    packs: whether one file is made of all, and checkpoints are removed; else
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


def _pack(place, result, records, params):
  members = {}
  for name, column in records._asdict().items():
    np.save(content := io.BytesIO(), column)
    members[f"{name}.npy"] = content.getvalue()
  for name in ("cell.json", "metrics.jsonl"):
    members[name] = (place / name).read_bytes()
  members["params.msgpack"] = storage.params_bytes(params)
  text = storage.to_json(result, indent=2) + "\n"
  storage.write_archive(place / CELL, {**members, "result.json": text.encode()})
  _remove_packed(place)


def _remove_packed(place):
  """Removes what a cell has in its one file."""
  for name in (*FILES, "result.json"):
    (place / name).unlink(missing_ok=True)
  shutil.rmtree(place / "checkpoints", ignore_errors=True)


def tidy(place: Path) -> None:
  """Removes files of a finished cell that are packed or half written, as after
  a kill. Does nothing if another process holds the cell, or it is read-only or
  a link."""
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
