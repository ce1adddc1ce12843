"""A shard's records: one row for each message that it received.

`FileSink` writes them; the functions read and check the files. Each row ends
with its CRC-32.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asgd import base, simulator
from asgd.live.append_only import PUT_BACK, START_ANEW, AppendOnlyFile
from asgd.orders import trace
from asgd.orders.trace import Event

RECORD = np.dtype(
  [
    *(("update", "<i4"), ("time", "<f8"), ("worker", "<i4"), ("job", "<i4")),
    *(("staleness", "<i4"), ("gap", "<f4"), ("loss", "<f4"), ("accepted", "?")),
    *(("message_norm", "<f4"), ("update_norm", "<f4"), ("bytes_up", "<i8")),
    *(("bytes_down", "<i8"), ("residual_norm", "<f4"), ("crc32", "<u4")),
  ]
)


def _checksums(rows: npt.NDArray[Any]) -> list[int]:
  """Returns the CRC-32 of each row, computed without its last column."""
  data, size = memoryview(rows.tobytes()), rows.itemsize
  checked_bytes = size - rows.dtype["crc32"].itemsize
  starts = range(0, len(data), size)
  return [zlib.crc32(data[start : start + checked_bytes]) for start in starts]


def records_path(run: Path, index: int) -> Path:
  """Returns the path of a shard's records."""
  return Path(run) / f"records-{index}.bin"


class FileSink(AppendOnlyFile):
  """A file of records. The rows have the dtype RECORD, or another dtype for the
  records of a peer or of a worker of tables."""

  def __init__(
    self, path: Path, *, dtype: np.dtype[Any] = RECORD, **options: Any
  ):
    """Opens or creates the file. `options` are those of `AppendOnlyFile`."""
    super().__init__(path, **options)
    self._dtype = dtype
    self._cut(self.count * dtype.itemsize)  # a row that a kill cut short

  @property
  def count(self) -> int:
    """The count of complete records."""
    return self._size // self._dtype.itemsize

  def append(self, records: Any) -> None:
    """Adds records, given as columns. If the write fails, adds none of them and
    raises ValueError."""
    rows = np.empty(len(records.loss), self._dtype)
    for name, column in records._asdict().items():
      rows[name] = column
    rows["crc32"] = _checksums(rows)
    self._add(rows.tobytes())

  def truncate(self, count: int) -> None:
    """Keeps the first `count` records and drops the others, which the resumed
    run recomputes."""
    self._cut(min(count * self._dtype.itemsize, self._size))


def count_records(path: Path, dtype: np.dtype[Any] = RECORD) -> int:
  """Returns how many records a file has; 0 if the file is missing."""
  return path.stat().st_size // dtype.itemsize if path.exists() else 0


def read_records(
  path: Path, start: int = 0, end: int | None = None
) -> base.Records:
  """Reads rows `start`, ..., `end` - 1 of a file of records, and no others. If
  `end` is None, reads all rows from `start` on. Raises ValueError if the
  checksum of a row is wrong; the error names the first such row."""
  rows = read_rows(path, RECORD, start, end)
  if not len(rows):
    return simulator.concatenate([])
  return base.Records(*(rows[name].copy() for name in base.Records._fields))


def read_rows(
  path: Path, dtype: np.dtype[Any], start: int = 0, end: int | None = None
) -> npt.NDArray[Any]:
  """Reads rows of any dtype as `read_records` does. Returns one structured
  array."""
  count = (count_records(path, dtype) if end is None else end) - start
  if count <= 0:
    return np.empty(0, dtype)
  rows = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
  changed_rows = np.flatnonzero(rows["crc32"] != _checksums(rows))
  if len(changed_rows):
    raise ValueError(
      f"{path}, record {start + changed_rows[0]} was changed, as its checksum"
      f" says. {PUT_BACK}"
    )
  return rows


def join_by_time(parts: Sequence[Any]) -> Any:
  """Joins the records of several workers and sorts the rows by time.

  Args:
    parts: NamedTuples of columns, all of the same type, with a column `time`.
  """
  record_type = type(parts[0])
  joined = record_type(*map(np.concatenate, zip(*parts, strict=True)))
  row_order = np.argsort(joined.time, kind="stable")
  return record_type(*(column[row_order] for column in joined))


def check_records(
  path: Path, count: int, events: Sequence[Event], *, run_has_ended: bool
) -> None:
  """Checks that a file has a record of each message of a shard's journal.

  Args:
    path: the file, for the error.
    count: records in the file.
    events: rows of the journal.
    run_has_ended: whether the run has ended. Then only records of messages that
      rollbacks undid may be missing; before the end any number may be.

  Raises:
    ValueError: for more records than messages, or if too many are missing.
  """
  may_be_missing = trace.follow(events).undone if run_has_ended else len(events)
  check_count(path, count, events, may_be_missing)


def check_count(
  path: Path,
  count: int,
  events: Sequence[Event],
  may_be_missing: int,
  noun: str = "messages",
) -> None:
  """Checks that a file has a record of each RECEIVE row of a journal. Raises
  ValueError if more than `may_be_missing` records are missing; `noun` is the
  word for messages in the error."""
  received = sum(event.action == base.RECEIVE for event in events)
  if not received - may_be_missing <= count <= received:
    raise ValueError(
      f"{path} has {count} records, and the trace beside it {received} {noun}:"
      " one of the two was cut short or changed. Put it back as the run wrote"
      f" it, {START_ANEW}"
    )
