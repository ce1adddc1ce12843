"""The processes of a run: their locks and process ids, and how to end them.

The system gives the ids of ended processes to new ones. A `.pid` file also has
the start time of the process, so that no foreign process is killed.
"""

import collections
import contextlib
import fcntl
import os
import resource
import shutil
import signal
import time
from pathlib import Path

from asgd import safe_files

_MAX_FILES = 2**16  # open files of a process, if the system allows so many
# Folders that only the descendants of this process use.
TEMPORARY_FOLDERS: set[str] = set()


def lock(path: Path, seconds: float, name: Path | None = None) -> int:
  """Locks a file until this process ends, and returns the file's descriptor.

  Args:
    path: the path of the file.
    seconds: how long to wait for another process that has the lock.
    name: the path in the error; by default `path`.

  Raises:
    ValueError: if another process still has the lock after `seconds`, or for a
      symbolic link.
  """
  # The kernel unlocks the file when a process exits, also after a kill.
  descriptor = safe_files.descriptor(path, os.O_RDWR | os.O_CREAT, 0o600)
  deadline = time.monotonic() + seconds
  while True:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return descriptor
    except OSError as error:
      if time.monotonic() > deadline:
        os.close(descriptor)
        raise ValueError(
          f"{name or path} is held by another process; end it first"
        ) from error
      time.sleep(0.05)


def allow_open_files() -> None:
  """Raises the limit of files that this process may have open, as far as the
  system allows: threads have both ends of all sockets of a run."""
  soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
  soft_limit = max(soft_limit, min(hard_limit, _MAX_FILES))
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def process_stat(pid: int) -> tuple[str, str]:
  """Returns (state, start time) of a process, as the kernel writes them. Raises
  OSError if there is no such process."""
  text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
  # The process's name, up to the last ")", may have spaces and parentheses.
  fields = text[text.rindex(")") + 1 :].split()
  return fields[0], fields[19]


def write_pid(folder: Path, kind: str, index: int) -> None:
  """Writes the `.pid` file of this process, the host of a kind and index."""
  path, pid = Path(folder) / f"{kind}-{index}.pid", os.getpid()
  # Renamed when it is complete, so that no reader sees half of it.
  temporary_path = path.with_suffix(f".{pid}")
  temporary_path.write_text(f"{pid} {process_stat(pid)[1]}")
  os.replace(temporary_path, path)


def live_pids(folder: Path) -> dict[str, dict[int, int]]:
  """Returns the live processes of a run from its memory folder: kind -> index
  -> process id."""
  pids_by_kind: dict[str, dict[int, int]] = collections.defaultdict(dict)
  for path in Path(folder).glob("*-*.pid"):
    kind, index = path.stem.split("-")
    try:
      pid, start_time = path.read_text().split()
      state, actual_start_time = process_stat(int(pid))
    except (OSError, ValueError):
      continue
    if actual_start_time == start_time and state not in "ZX":  # zombie, dead
      pids_by_kind[kind][int(index)] = int(pid)
  return pids_by_kind


def kill_run(folder: Path) -> None:
  """Kills the processes of a run after its driver was killed."""
  for pids in live_pids(folder).values():
    for pid in pids.values():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int | None = None) -> list[int]:
  """Returns the ids of the descendants of a process, by default of this one."""
  parents = {}  # process id -> process id of the parent
  for path in Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      text = path.read_text(errors="replace")
      fields = text[text.rindex(")") + 1 :].split()
      parents[int(path.parent.name)] = int(fields[1])
  family = [os.getpid() if pid is None else pid]
  for ancestor in family:  # the list grows in the loop
    family += [child for child, parent in parents.items() if parent == ancestor]
  return family[1:]


def kill_descendants(ancestor: int | None = None) -> None:
  """Kills the descendants of a process. By default these are the descendants of
  this process, and TEMPORARY_FOLDERS are removed, too."""
  for pid in descendants(ancestor):
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
  if ancestor is None:
    for folder in TEMPORARY_FOLDERS:
      shutil.rmtree(folder, ignore_errors=True)
