"""The shared memory of a live cell, and the process that uses it.

The memory is a folder asgd-UID-HASH in /dev/shm or --memory_dir, which other
users cannot read. While a cell runs, and after it was stopped or killed,
running.json in the cell's folder names the memory. owner.json in the memory
names the cell's folder, and both files have the same token. So a copy of a
results folder cannot use the memory of the original, and a results folder that
was moved still uses its memory. A changed running.json cannot make the run
remove some other folder at its end. A lock in the memory keeps other processes
out.

The memory must be a folder of this user, not a link. It is opened once. Its
files are then read, written and removed through the descriptor, so another
folder that appears at its path later is not touched.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from asgd import safe_files
from asgd.experiment import storage
from asgd.live import processes
from asgd.live.hosts.base import KINDS

RUNNING = "running.json"  # in a cell's folder
_OWNER, _LOCK = "owner.json", "lock"  # in the memory
_NAME = re.compile(r"asgd-(\d+)-[0-9a-f]{12}")
# Paths that a run writes in a memory; folders end with a slash.
_PATHS = re.compile(
  r"(owner|driver)\.json(\.tmp)?|lock|\d+\.sock"
  rf"|({'|'.join(KINDS)})-\d+\.(pid|sock|lock|\d+)"
  r"|worker-\d+-\d+\.message(\.tmp)?"
  r"|shard-\d+/(params|messages|updates|adopted|lock"
  r"|(snapshots?|commands|image)(\.tmp)?"
  r"|(vector-\d+|message-\d+-\d+)(\.tmp)?)?"
)
_TIMEOUT = 10.0  # seconds to wait until the previous driver or a process ends
_RETRY_SECONDS = 0.05  # seconds between two attempts


class Running(NamedTuple):
  """The contents of running.json."""

  driver: int  # process id
  memory: Path  # of a run; it may have been removed
  token: str
  replaced: dict[str, int]  # by kind, processes replaced since the cell began


@contextlib.contextmanager
def _open_memory(memory: Path, *, create: bool = False) -> Iterator[Path]:
  """Opens a memory. Yields a path to the open folder, by its descriptor. Only a
  run's driver creates a missing memory: a reader that did so would leave an
  empty folder behind, if the run ends and removes its memory at that moment.

  Raises:
    FileNotFoundError: the memory does not exist, and `create` is False.
    ValueError: the folder is not the memory of a run; the text is the reason.
  """
  # [1] The path: absolute, below a folder, and named after this user.
  name = _NAME.fullmatch(memory.name)
  if not memory.is_absolute() or ".." in memory.parts or name is None:
    raise ValueError("its name is not /FOLDER/asgd-UID-HASH")
  if int(name[1]) != os.geteuid():
    raise ValueError("it is no folder of this user's")
  # [2] The folder itself: of this user, and no link.
  try:
    descriptor = safe_files.hold_folder(memory, create=create)
  except ValueError as error:
    raise ValueError("it is no folder of this user's") from error
  # [3] Its files. The path leads to this folder, whatever is at `memory` later.
  try:
    fd_path = Path(f"/proc/self/fd/{descriptor}")
    _check_names(fd_path)
    os.fchmod(descriptor, stat.S_IRWXU)  # no other user may read it
    yield fd_path
  finally:
    os.close(descriptor)


def _check_names(folder: Path) -> None:
  """Raises ValueError if a folder has a file that no run writes."""
  for path in folder.iterdir():
    names = [path.name]
    try:
      if stat.S_ISDIR(path.lstat().st_mode):
        files = sorted(path.iterdir())
        names = [f"{path.name}/", *(f"{path.name}/{p.name}" for p in files)]
    except FileNotFoundError:  # removed in the meantime
      continue
    for name in names:
      if not _PATHS.fullmatch(name):
        raise ValueError(f"it holds {name.rstrip('/')}, which no run writes")


def _remove_files(folder: Path, *exceptions: str) -> None:
  """Removes all files of a folder, except those named in `exceptions`."""
  for path in folder.iterdir():
    with contextlib.suppress(FileNotFoundError):  # removed in the meantime
      if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path, ignore_errors=True)
      elif path.name not in exceptions:
        path.unlink()


def _remove(fd_path: Path, memory: Path) -> None:
  """Removes an open memory, as far as possible. A process of the run that is
  just being killed may still write a file, so the removal is repeated."""
  deadline = time.monotonic() + _TIMEOUT
  with contextlib.suppress(OSError):
    while True:
      _remove_files(fd_path)
      try:
        return memory.rmdir()  # a folder cannot be removed by its descriptor
      except OSError as error:
        if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
          raise
      processes.kill_run(fd_path)
      time.sleep(_RETRY_SECONDS)


def read_running(cell_folder: Path) -> Running | None:
  """Returns the contents of a cell's running.json; None if there is none.
  Raises ValueError if the file was changed, or names a folder that is not the
  memory of a run."""
  path = cell_folder / RUNNING

  def changed_error(reason: str) -> ValueError:
    """Returns the error for a file that was changed."""
    return ValueError(
      f"{path} is not what a run wrote ({reason}): it was changed. Remove it,"
      " and remove the run's memory, asgd-*, from /dev/shm yourself; the same"
      " command then resumes, at least from the last checkpoint"
    )

  content = storage.read_sealed(path)
  if content is None:
    if not path.exists():  # looked at last: the end of a run removes the file
      return None
    raise changed_error("its checksum is wrong or missing")
  memory = Path(content["memory"])
  try:
    with _open_memory(memory):
      pass  # its checks only
  except FileNotFoundError:
    pass  # the end of a run and a restart of the machine remove it
  except ValueError as error:
    reason = f"{memory} is not the memory of a run: {error}"
    raise changed_error(reason) from error
  return Running(**{**content, "memory": memory})


def _read_owner(memory: Path) -> tuple[str, str]:
  """Returns the (cell's folder, token) of a memory."""
  owner = storage.read_json(memory / _OWNER) or {}
  return str(owner.get("cell", "")), str(owner.get("token", ""))


def _belongs_to(memory: Path, running: Running | None, cell: Path) -> bool:
  """Whether a memory belongs to a cell, which may have been moved since."""
  owner, token = _read_owner(memory)
  if running is None:
    return owner == str(cell)
  if not token or token != running.token:
    return False
  # A moved cell has left its old folder. A copy has not: there the original
  # still has its running.json, and keeps the memory.
  return owner == str(cell) or not (Path(owner) / RUNNING).exists()


class LiveMemory:
  """The memory of a cell, locked by this process."""

  def __init__(self, cell_folder: Path, memory_dir: str, *, resume: bool):
    """Opens and locks the memory of a cell; creates it if it does not exist.

    Args:
      cell_folder: the folder of the cell.
      memory_dir: folder for a new memory.
      resume: whether the files of an existing memory are kept.

    Raises:
      ValueError: another process has the lock, or the folder is not the memory
        of a run.
    """
    self._cell_folder, cell = cell_folder, cell_folder.resolve()
    running = read_running(cell_folder) if resume else None
    # [1] Which folder: one named after the cell's path, or that of an earlier
    # driver, also if the cell was moved since.
    path_hash = hashlib.sha256(str(cell).encode()).hexdigest()[:12]
    self.folder = (
      Path(memory_dir).resolve() / f"asgd-{os.geteuid()}-{path_hash}"
    )
    self.replaced: dict[str, int] = {}
    # The counts in running.json; None: this driver has not written the file.
    self._saved_counts: dict[str, int] | None = None
    if running is not None:
      self.replaced = dict(running.replaced)
      if running.memory.is_dir() and _belongs_to(running.memory, running, cell):
        self.folder = running.memory
    # [2] Open and lock it. An error closes what was opened.
    with contextlib.ExitStack() as stack:
      try:
        fd_path = stack.enter_context(
          _open_memory(self.folder, create=True)
        )
      except ValueError as error:
        raise ValueError(
          f"{self.folder} cannot be the memory of the run: {error}. Remove it,"
          " or use another folder (--memory_dir)"
        ) from error
      lock = processes.lock(fd_path / _LOCK, _TIMEOUT, self.folder / _LOCK)
      stack.callback(os.close, lock)
      # [3] Keep the files to resume. Else end the processes of an earlier run,
      # and remove its files.
      self.is_resumed = resume and _belongs_to(fd_path, running, cell)
      if not self.is_resumed:
        processes.kill_run(fd_path)
        _remove_files(fd_path, _LOCK)
      self._token = _read_owner(fd_path)[1] or uuid.uuid4().hex
      owner = {"cell": str(cell), "token": self._token}
      storage.write_json(fd_path / _OWNER, owner)
      self._fd_path: Path | None = fd_path  # None: the memory was closed
      self._exit_stack = stack.pop_all()

  def replaced_since(self, new_counts: Mapping[str, int]) -> dict[str, int]:
    """Returns, by kind, the count of processes replaced since the cell began:
    by earlier drivers, and `new_counts` by this driver."""
    return {
      kind: self.replaced.get(kind, 0) + count
      for kind, count in new_counts.items()
    }

  def write_running(self, replaced: Mapping[str, int]) -> None:
    """Writes running.json with the counts of replaced processes, by kind,
    unless they have not changed."""
    if replaced == self._saved_counts:
      return
    self._saved_counts = dict(replaced)
    running = Running(os.getpid(), self.folder, self._token, self._saved_counts)
    content = {**running._asdict(), "memory": str(self.folder)}
    storage.write_json(self._cell_folder / RUNNING, storage.sealed(content))

  def remove(self) -> None:
    """Removes the memory, from which the cell can then no longer resume."""
    with (
      contextlib.suppress(FileNotFoundError),  # it was removed
      contextlib.ExitStack() as stack,
    ):
      fd_path = self._fd_path or stack.enter_context(_open_memory(self.folder))
      _remove(fd_path, self.folder)
    # Last: a kill before this line leaves a running.json with the path of a
    # removed memory, which `read_running` accepts.
    (self._cell_folder / RUNNING).unlink(missing_ok=True)

  def close(self) -> None:
    """Unlocks the memory. Removes it if the run was refused before it began."""
    has_begun = self.is_resumed or self._saved_counts is not None
    if self._fd_path is not None and not has_begun:
      _remove(self._fd_path, self.folder)
    self._fd_path = None
    self._exit_stack.close()


def remove_leftover(cell_folder: Path) -> None:
  """Removes the memory of a run that was killed right after it had finished,
  unless the cell's folder is read-only."""
  if not safe_files.is_writable(cell_folder):
    return
  running, cell = read_running(cell_folder), cell_folder.resolve()
  if running is None:
    return
  memory = running.memory
  with (
    contextlib.suppress(FileNotFoundError),  # it was removed
    _open_memory(memory) as fd_path,
  ):
    if _belongs_to(fd_path, running, cell):
      processes.kill_run(fd_path)
      _remove(fd_path, memory)
  (cell_folder / RUNNING).unlink(missing_ok=True)
