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
from asgd.live.append_only import ANEW, PUT_BACK, AppendOnlyFile
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
  """Returns the CRC-32 of each row without its last column."""
  data, size = memoryview(rows.tobytes()), rows.itemsize
  end = size - rows.dtype["crc32"].itemsize
  return [zlib.crc32(data[i : i + end]) for i in range(0, len(data), size)]


def records_path(run: Path, index: int) -> Path:
  """Returns the path of a shard's records."""
  return Path(run) / f"records-{index}.bin"


class FileSink(AppendOnlyFile):
  """A file of records: rows of RECORD, or of the `dtype` of a peer's."""

  def __init__(
    self, path: Path, *, dtype: np.dtype[Any] = RECORD, **options: Any
  ):
    """Opens or makes the file; options are those of an `AppendOnlyFile`."""
    super().__init__(path, **options)
    self._dtype = dtype
    self._cut(self.count * dtype.itemsize)  # a row that a kill cut short

  @property
  def count(self) -> int:
    """The count of complete records."""
    return self._size // self._dtype.itemsize

  def append(self, records: Any) -> None:
    """Adds records, given as columns: all of them, or none with a
    ValueError."""
    rows = np.empty(len(records.loss), self._dtype)
    for name, column in records._asdict().items():
      rows[name] = column
    rows["crc32"] = _checksums(rows)
    self._add(rows.tobytes())

  def truncate(self, count: int) -> None:
    """Drops all but the first `count`: the others will be made again."""
    self._cut(min(count * self._dtype.itemsize, self._size))


def count_records(path: Path, dtype: np.dtype[Any] = RECORD) -> int:
  """Returns how many records a sink's file has; 0 if it is missing."""
  return path.stat().st_size // dtype.itemsize if path.exists() else 0


def read_records(
  path: Path, start: int = 0, end: int | None = None
) -> base.Records:
  """Returns the records in a sink's file, or only rows `start` to `end`, and
  reads no more of the file. Raises ValueError naming a changed record."""
  rows = read_rows(path, RECORD, start, end)
  if not len(rows):
    return simulator.concatenate([])
  return base.Records(*(rows[name].copy() for name in base.Records._fields))


def read_rows(
  path: Path, dtype: np.dtype[Any], start: int = 0, end: int | None = None
) -> npt.NDArray[Any]:
  """Returns the rows of a dtype in a sink's file, as `read_records`."""
  count = (count_records(path, dtype) if end is None else end) - start
  if count <= 0:
    return np.empty(0, dtype)
  rows = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
  wrong = np.flatnonzero(rows["crc32"] != _checksums(rows))
  if len(wrong):
    raise ValueError(
      f"{path}, record {start + wrong[0]} was changed, as its checksum says."
      f" {PUT_BACK}"
    )
  return rows


def by_time(parts: Sequence[Any]) -> Any:
  """Joins records of several workers, columns of one type, in the order of
  their times."""
  kind = type(parts[0])
  joined = kind(*map(np.concatenate, zip(*parts, strict=True)))
  order = np.argsort(joined.time, kind="stable")
  return kind(*(column[order] for column in joined))


def check_records(
  path: Path, count: int, events: Sequence[Event], *, whole: bool
) -> None:
  """Checks that a file has a record of each message of a shard's journal. If
  the run has not ended (`whole`), it may lack any. Raises ValueError for too
  many records, or for fewer than rollbacks explain."""
  # The records of messages that a rollback undid may be lost.
  lost = trace.follow(events).undone if whole else len(events)
  check_count(path, count, events, lost)


def check_count(
  path: Path,
  count: int,
  events: Sequence[Event],
  lost: int,
  noun: str = "messages",
) -> None:
  """Checks that a file has a record of each received message of a journal; up
  to `lost` records may be missing. Raises ValueError, in which `noun` names the
  messages."""
  received = sum(event.action == base.RECEIVE for event in events)
  if not received - lost <= count <= received:
    raise ValueError(
      f"{path} has {count} records, and the trace beside it {received} {noun}:"
      " one of the two was cut short or changed. Put it back as the run wrote"
      f" it, {ANEW}"
    )
