"""What a shard writes to disk: its journal and its records.

Both are only ever added to, entry by entry, so that whatever kills the process
leaves whole entries and at most one that is cut short, which is dropped when
the file is opened again. What does not fit on the disk is taken back: a file
holds whole entries, in their order, and all of them.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asgd import base, orders, simulator
from asgd.runtimes import faults, protocol
from asgd.runtimes.protocol import Entry
from asgd.runtimes.shard import entries_to_trace

RECORD = np.dtype(
  [
    ("update", "<i4"),
    ("time", "<f8"),
    ("worker", "<i4"),
    ("job", "<i4"),
    ("staleness", "<i4"),
    ("gap", "<f4"),
    ("loss", "<f4"),
    ("accepted", "?"),
    ("message_norm", "<f4"),
    ("update_norm", "<f4"),
  ]
)


def journal_path(run: Path, index: int) -> Path:
  """The file of a shard's journal."""
  return Path(run) / f"trace-{index}.csv"


def records_path(run: Path, index: int) -> Path:
  """The file of a shard's records."""
  return Path(run) / f"records-{index}.bin"


def append_fault(run: Path, fault: faults.Fault) -> None:
  """Writes down a fault that is injected on purpose."""
  with (Path(run) / "faults.csv").open("a") as file:
    file.write(",".join(map(str, fault)) + "\n")


def read_faults(run: Path) -> list[faults.Fault]:
  """Returns the faults that were injected."""
  path = Path(run) / "faults.csv"
  lines = path.read_text().splitlines() if path.exists() else []
  rows = [line.split(",") for line in lines]
  return [faults.Fault(int(w), int(s), k, float(x)) for w, s, k, x in rows]


class _Growing:
  """A file that grows by whole rows."""

  def __init__(self, path: Path):
    self.name = str(path)
    self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    self._size = os.fstat(self._file).st_size

  def _add(self, data: bytes) -> None:
    """Adds all of it, or nothing.

    Raises:
      ValueError: if that is not possible, or the file was changed by others.
    """
    seen = os.fstat(self._file)
    if not seen.st_nlink:
      raise ValueError(gone(self.name))
    if seen.st_size != self._size:
      raise ValueError(
        f"{self.name} has {seen.st_size} bytes where this run wrote"
        f" {self._size}: somebody else changed it. Put it back as it was and go"
        " on with --resume, or start anew in another folder (--out)"
      )
    rest = memoryview(data)
    try:
      while rest:
        rest = rest[os.write(self._file, rest) :]
    except OSError as error:
      with contextlib.suppress(OSError):
        os.ftruncate(self._file, self._size)
      raise ValueError(
        f"cannot write {self.name} ({error.strerror}); make room and go on with"
        " --resume"
      ) from error
    self._size += len(data)

  def _cut(self, size: int) -> None:
    os.ftruncate(self._file, size)
    self._size = size

  def sync(self) -> None:
    """When this returns, a loss of power does not lose what was written.

    Raises:
      ValueError: if the disk does not take it.
    """
    try:
      os.fsync(self._file)
    except OSError as error:
      raise ValueError(
        f"cannot write {self.name} ({error.strerror}); go on with --resume"
        " when the disk is well"
      ) from error


def gone(path: Path | str) -> str:
  """Says that a file of a run was deleted."""
  return (
    f"{path} is gone: it was deleted while the run wrote it. Put it back from a"
    " copy and go on with --resume, or start anew in another folder (--out)"
  )


class FileJournal(_Growing):
  """A shard's journal: CSV, the trace and the columns of an Entry."""

  def __init__(self, path: Path):
    """Opens the journal, making it if it is not there.

    Raises:
      ValueError: if the file is no journal.
    """
    self._entries = read_journal(path) if path.exists() else []
    super().__init__(path)
    self._cut(Path(path).read_bytes().rfind(b"\n") + 1)
    if not self._size:
      self._add(f"{protocol.HEADER}\n".encode())

  def append(self, entry: Entry) -> None:
    """Writes an entry; when this returns, a kill does not lose it.

    Raises:
      ValueError: if it cannot be written: it is not in the file then.
    """
    self._add(protocol.format_entry(entry).encode())
    self._entries.append(entry)

  def entries(self) -> list[Entry]:
    """Returns all that was written."""
    return list(self._entries)


def read_journal(path: Path) -> list[Entry]:
  """Reads a journal; a last line that was cut short is dropped.

  Raises:
    ValueError: naming the line that is no entry.
  """
  with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
    head = next(lines, "")
    if not head.endswith("\n"):
      return []
    if head.endswith("\r\n"):
      raise ValueError(
        f"{path}, line 1: its lines end as those of Windows do (CRLF); write"
        " them as the run did (LF)"
      )
    if head.strip() != protocol.HEADER:
      raise ValueError(f"{path} is no journal: it starts with {head[:60]!r}")
    entries = []
    for number, line in enumerate(lines, 2):
      if not line.endswith("\n"):
        break
      try:
        entries.append(protocol.parse_entry(line))
      except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
  return entries


def check_entries(path: Path | str, entries: Sequence[Entry]) -> None:
  """Checks that a journal can be obeyed: that it is one that a shard wrote.

  Args:
    path: of the journal, for the message.
    entries: what it holds.

  Raises:
    ValueError: naming the file and the first line that is wrong, and why.
  """

  def wrong(row, text):
    line = protocol.format_entry(entries[row]).strip()
    raise ValueError(
      f"{path}, line {row + 2} ({line}): {text}. The file was changed: put it"
      " back as the run wrote it"
    )

  last, opened = {}, {}  # worker -> seq; (worker, seq) -> job
  for row, entry in enumerate(entries):
    key = entry.worker, entry.seq
    if entry.action in (base.SEND, base.KEEP):
      if entry.seq <= last.get(entry.worker, -1):
        wrong(row, "the worker has begun that number (seq) before")
      last[entry.worker], opened[key] = entry.seq, entry.job
    elif entry.action in (base.RECEIVE, base.LOST, base.REJECT) and (
      opened.pop(key, None) != entry.job
    ):
      wrong(row, "the worker was not sent that job under that number (seq)")
  try:
    orders.check(entries_to_trace(entries), depth=len(entries))
  except ValueError as error:
    raise ValueError(
      f"{path}: {error}. The file was changed: put it back as the run wrote it"
    ) from error


def check_records(
  path: Path, count: int, entries: Sequence[Entry], *, whole: bool
) -> None:
  """Checks that a file has a record of each message.

  Args:
    path: of the records, for the message.
    count: how many there are.
    entries: of the same shard's journal.
    whole: whether the run has ended; until then some are still to come.

  Raises:
    ValueError: if there are too many, or too few that no rollback explains.
  """
  received = sum(entry.action == base.RECEIVE for entry in entries)
  least = received - protocol.rolled_back(entries)[1] if whole else 0
  if not least <= count <= received:
    raise ValueError(
      f"{path} has {count} records, and the trace beside it {received}"
      " messages: one of the two was cut short or changed. Put it back as the"
      " run wrote it, or start anew in another folder (--out)"
    )


class FileSink(_Growing):
  """A shard's records: rows of RECORD."""

  def __init__(self, path: Path):
    super().__init__(path)
    self._cut(self.count * RECORD.itemsize)

  @property
  def count(self) -> int:
    """How many there are."""
    return self._size // RECORD.itemsize

  def append(self, records: base.Records) -> None:
    """Adds records.

    Raises:
      ValueError: if they cannot be written: none of them is in the file then.
    """
    rows = np.empty(len(records.loss), RECORD)
    for name, column in records._asdict().items():
      rows[name] = column
    self._add(rows.tobytes())

  def truncate(self, count: int) -> None:
    """Drops all but the first `count`."""
    self._cut(min(count * RECORD.itemsize, self._size))


def read_records(path: Path, start: int = 0) -> base.Records:
  """Returns the records in a sink's file, from row `start` on."""
  try:
    data = path.read_bytes()[start * RECORD.itemsize :]
  except FileNotFoundError:
    data = b""
  whole = len(data) - len(data) % RECORD.itemsize
  rows = np.frombuffer(data[:whole], RECORD)
  if not len(rows):
    return simulator.concatenate([])
  return base.Records(*(rows[name].copy() for name in base.Records._fields))


def lock(path: Path, seconds: float) -> int:
  """Holds a file until this process ends, waiting for the one before to end.

  Raises:
    ValueError: if it is still held after so many seconds.
  """
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
  end = time.monotonic() + seconds
  while True:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return descriptor
    except OSError as error:
      if time.monotonic() > end:
        os.close(descriptor)
        raise ValueError(
          f"{path} is held by another process; end it first"
        ) from error
      time.sleep(0.05)


def process(pid: int) -> tuple[str, str]:
  """Returns (state, when it was started) of a process, as the kernel says them;
  its number alone may be another's by now.

  Raises:
    OSError: if there is no such process.
  """
  text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
  fields = text[text.rindex(")") + 1 :].split()
  return fields[0], fields[19]


def write_pid(folder: Path, kind: str, index: int) -> None:
  """Writes down, for `pids`, that this process is worker or shard `index`."""
  path, pid = Path(folder) / f"{kind}-{index}.pid", os.getpid()
  temporary = path.with_suffix(f".{pid}")
  temporary.write_text(f"{pid} {process(pid)[1]}")
  os.replace(temporary, path)


def pids(folder: Path) -> dict[str, dict[int, int]]:
  """Returns the processes of a run that are alive: kind -> index -> number.

  Args:
    folder: the run's memory.
  """
  found = {"shard": {}, "worker": {}}
  for path in Path(folder).glob("*-*.pid"):
    kind, index = path.stem.split("-")
    try:
      pid, started = path.read_text().split()
      state, now = process(int(pid))
    except (OSError, ValueError):
      continue
    if now == started and state not in "ZX":
      found[kind][int(index)] = int(pid)
  return found


def end_all(folder: Path) -> None:
  """Kills what is left of a run whose driver was killed."""
  for processes in pids(folder).values():
    for pid in processes.values():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
