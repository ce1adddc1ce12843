"""A shard's journal: the rows of its trace, with all columns of an Event.

`FileJournal` writes one; the functions read, cut and check the files.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asgd import base, orders, safe_files
from asgd.live.append_only import PUT_BACK, AppendOnlyFile
from asgd.orders import trace
from asgd.orders.trace import Event


def journal_path(run: Path, index: int) -> Path:
  """Returns the path of a shard's journal."""
  return Path(run) / f"trace-{index}.csv"


class FileJournal(AppendOnlyFile):
  """A journal as a file: CSV with the columns `trace.JOURNAL_COLUMNS`."""

  def __init__(self, path: Path, **options: Any):
    """Opens or creates the file. Raises ValueError if it is not a journal."""
    self._events = read_journal(path)
    super().__init__(path, **options)
    # A kill may have left the beginning of a row.
    self._cut(Path(path).read_bytes().rfind(b"\n") + 1)
    if not self._size:
      self._add(f"{trace.JOURNAL_HEADER}\n".encode())

  def append(self, event: Event) -> None:
    """Writes a row; a later kill does not lose it. Raises ValueError."""
    self._add(f"{event.format(journal=True)}\n".encode())
    self._events.append(event)

  def events(self) -> list[Event]:
    """Returns the rows so far."""
    return list(self._events)


def read_journal(path: Path) -> list[Event]:
  """Reads a journal; returns [] for a missing file. If a line is not a row,
  raises a ValueError that names the file and the line."""
  if not path.exists():
    return []
  with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
    try:
      return trace.read(lines)
    except ValueError as error:
      raise ValueError(f"{path}, {error}. {PUT_BACK}") from error


def read_nonempty_journal(run: Path, path: Path) -> list[Event]:
  """Reads a journal that must have at least one row. Raises ValueError for an
  empty or missing journal, and the errors of `read_journal`."""
  events = read_journal(path)
  if events:
    return events
  if (run / "result.json").exists():
    raise ValueError(
      f"{path} is missing or empty, but the run has a result: put the file back"
      " as the run wrote it"
    )
  raise ValueError(f"{path} holds no event: the run has not begun (yet)")


def cut_journal(path: Path, rows: int) -> None:
  """Cuts a journal after its first `rows` rows. The file may be missing."""
  if path.exists():
    with path.open("rb") as file:
      lines = b"".join(itertools.islice(file, rows + 1))  # 1: the header
    safe_files.truncate(path, len(lines))


def check_joined_trace(run: Path, joined: base.Trace, **options: Any) -> None:
  """Checks the trace that joins all journals of a run, as `orders.check` does.
  Raises a ValueError that names the folder of the run."""
  try:
    orders.check(joined, **options)
  except trace.TraceError as error:
    raise ValueError(
      f"the journals of {run} cannot be replayed together, at {error}: one of"
      " them was changed; put it back as the run wrote it"
    ) from error


def check_journal(path: Path | str, events: Sequence[Event]) -> None:
  """Checks that a shard could have written a journal. Raises a ValueError that
  names the file, the first wrong line, and the reason."""
  try:
    # A journal does not record the depth of its run, so any depth is allowed.
    orders.check(events, depth=math.inf, path=path)
  except ValueError as error:
    raise ValueError(
      f"{error}. The file was changed: put it back as the run wrote it"
    ) from error
