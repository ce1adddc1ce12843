"""What a shard writes to disk: its journal and its records.

Both are only ever added to, by one `write` an entry, so that whatever kills the
process leaves whole entries and at most one that is cut short, which is dropped
when the file is opened again.
"""

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

import numpy as np

from asgd import base, simulator
from asgd.runtimes import faults, protocol
from asgd.runtimes.protocol import Entry

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


class FileJournal:
  """A shard's journal: CSV, the trace and the columns of an Entry."""

  def __init__(self, path: Path):
    """Opens the journal, making it if it is not there.

    Raises:
      ValueError: if the file is no journal.
    """
    self._entries = read_journal(path) if path.exists() else []
    whole = protocol.HEADER + "\n"
    whole += "".join(map(protocol.format_entry, self._entries))
    self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if os.fstat(self._file).st_size == 0:
      os.write(self._file, whole.encode())
    os.ftruncate(self._file, len(whole))
    os.lseek(self._file, 0, os.SEEK_END)

  def append(self, entry: Entry) -> None:
    """Writes an entry; when this returns, a kill does not lose it."""
    os.write(self._file, protocol.format_entry(entry).encode())
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


class FileSink:
  """A shard's records: rows of RECORD."""

  def __init__(self, path: Path):
    self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    size = os.fstat(self._file).st_size
    self.truncate(size // RECORD.itemsize)

  def append(self, records: base.Records) -> None:
    """Adds records."""
    rows = np.empty(len(records.loss), RECORD)
    for name, column in records._asdict().items():
      rows[name] = column
    os.write(self._file, rows.tobytes())

  def truncate(self, count: int) -> None:
    """Drops all but the first `count`."""
    held = os.fstat(self._file).st_size
    os.ftruncate(self._file, min(count * RECORD.itemsize, held))
    os.lseek(self._file, 0, os.SEEK_END)


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
