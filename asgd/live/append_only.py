"""Files to which complete rows are only ever added.

A kill of the process leaves complete rows and at most one row that is cut
short. A subclass drops the cut row when it opens the file again. If the disk is
full in the middle of a row, the beginning of the row is removed.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.checks import RERUN

# Remedies, for error messages.
START_ANEW = "or start anew in another folder (--workdir)"
PUT_BACK = f"Put the file back as the run wrote it, {START_ANEW}"


class FileGone(ValueError):
  """A file of a run was deleted while the run wrote it."""

  def __init__(self, path: Path | str):
    super().__init__(
      f"{path} is gone: it was deleted while the run wrote it. Put it back from"
      f" a copy and {RERUN}, {START_ANEW}"
    )


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
  """Raises ValueError, with the remedy, if the disk does not take the writes of
  the block to a file."""
  try:
    yield
  except OSError as error:
    raise ValueError(
      f"cannot write {path} ({error.strerror}); make room and {RERUN}"
    ) from error


def check_rows(path: Path, rows: int, min_rows: int) -> None:
  """Raises ValueError for a file with fewer rows than the run resumes from."""
  if rows < min_rows:
    finding = f"has {rows} rows" if path.exists() else "is missing"
    raise ValueError(
      f"{path} {finding} where the run resumes from {min_rows}: it was cut"
      f" short or removed. {PUT_BACK}"
    )


class AppendOnlyFile:
  """A file with one writer. A subclass defines the form of its rows."""

  def __init__(self, path: Path, disk: Any = os):
    """`disk` has the functions of `os` that write; a simulation passes
    others."""
    self.name, self._disk = str(path), disk
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    self._file = safe_files.descriptor(path, flags, 0o644)
    self._size = os.fstat(self._file).st_size

  def _add(self, data: bytes) -> None:
    """Adds all of `data`, or nothing and raises ValueError."""
    status = os.fstat(self._file)
    if not status.st_nlink:  # its name was removed; the open file remains
      raise FileGone(self.name)
    if status.st_size != self._size:
      raise ValueError(
        f"{self.name} has {status.st_size} bytes where this run wrote"
        f" {self._size}: another process changed it. Put it back as it was and"
        f" {RERUN}, {START_ANEW}"
      )
    unwritten = memoryview(data)
    try:
      while unwritten:
        unwritten = unwritten[self._disk.write(self._file, unwritten) :]
    except OSError:
      # If this fails, too, the next command drops the rest of the row.
      with contextlib.suppress(OSError):
        os.ftruncate(self._file, self._size)
      with writing(self.name):  # entered only after an error, to save time
        raise
    self._size += len(data)

  def _cut(self, size: int) -> None:
    """Drops all but the first `size` bytes."""
    os.ftruncate(self._file, size)
    self._size = size

  def close(self) -> None:
    """Closes the file."""
    os.close(self._file)

  def sync(self) -> None:
    """Makes the rows so far safe from a loss of power. Raises ValueError if the
    disk does not take them."""
    try:
      os.fsync(self._file)
    except OSError as error:
      raise ValueError(
        f"cannot write {self.name} ({error.strerror}); mend the disk and"
        f" {RERUN}"
      ) from error
