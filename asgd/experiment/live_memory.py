"""The memory of a live cell, and the process that has it.

While a cell runs, and after it was stopped or killed, running.json in its
folder names its memory: a folder asgd-UID-HASH of its own, in /dev/shm or where
--memory_dir says, which other users cannot read. owner.json in there names the
cell's folder in turn, and both hold the same token. So a results folder that
was copied does not take the memory of the original, one that was moved does,
and a file that was changed cannot name any folder, which would be removed in
the end. A lock in the memory keeps a second process out.

A memory is opened once, as a folder of this user's and no link; what is read,
written and removed in there is reached through that descriptor, whatever comes
to be at its path in the meantime.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
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
# Paths in a memory: folders end with a slash.
_HELD = re.compile(
  r"(owner|driver)\.json(\.tmp)?|lock|\d+\.sock"
  rf"|({'|'.join(KINDS)})-\d+\.(pid|sock|lock|\d+)"
  r"|worker-\d+-\d+\.message(\.tmp)?"
  r"|shard-\d+/(params|messages|updates|adopted|lock"
  r"|(snapshots?|commands|image)(\.tmp)?"
  r"|(vector-\d+|message-\d+-\d+)(\.tmp)?)?"
)
_SECONDS = 10.0  # to wait for the process before to end


class Running(NamedTuple):
  """What running.json says."""

  driver: int  # its process
  memory: Path  # that of a run, or not there any more
  token: str
  replaced: dict[str, int]  # processes, since the cell began


@contextlib.contextmanager
def _holding(memory: Path) -> Iterator[Path]:
  """Opens a memory, which is made if it is not there, and gives the folder of
  the descriptor; ValueError says why what is there is not the memory of a
  run."""
  name = _NAME.fullmatch(memory.name)
  if not memory.is_absolute() or ".." in memory.parts or name is None:
    raise ValueError("its name is not /FOLDER/asgd-UID-HASH")
  if int(name[1]) != os.geteuid():
    raise ValueError("it is no folder of this user's")
  try:
    descriptor = safe_files.hold_folder(memory)
  except ValueError as error:
    raise ValueError("it is no folder of this user's") from error
  try:
    held = Path(f"/proc/self/fd/{descriptor}")
    _check_names(held)
    os.fchmod(descriptor, stat.S_IRWXU)
    yield held
  finally:
    os.close(descriptor)


def _check_names(folder: Path) -> None:
  """Raises ValueError for a folder with something that no run writes."""
  for path in folder.iterdir():
    names = [path.name]
    try:
      if stat.S_ISDIR(path.lstat().st_mode):
        inner = sorted(path.iterdir())
        names = [f"{path.name}/", *(f"{path.name}/{p.name}" for p in inner)]
    except FileNotFoundError:  # it was there a moment ago
      continue
    for name in names:
      if not _HELD.fullmatch(name):
        raise ValueError(f"it holds {name.rstrip('/')}, which no run writes")


def _empty(folder: Path, *kept: str) -> None:
  """Removes all that a held folder has, but for files that are `kept`."""
  for path in folder.iterdir():
    with contextlib.suppress(FileNotFoundError):  # it was there a moment ago
      if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path, ignore_errors=True)
      elif path.name not in kept:
        path.unlink()


def _remove(held: Path, memory: Path) -> None:
  """Removes a memory that is held, as far as it can be."""
  with contextlib.suppress(OSError):
    _empty(held)
    memory.rmdir()


def read(cell_folder: Path) -> Running | None:
  """Returns what running.json in a cell's folder says, None if there is none;
  ValueError if no run wrote it, or it names what is not the memory of a run."""
  path = cell_folder / RUNNING
  if not path.exists():
    return None

  def wrong(why):
    return ValueError(
      f"{path} is not what a run wrote ({why}): it was changed. Remove it, and"
      " look for the run's memory, asgd-*, in /dev/shm yourself; the same"
      " command then goes on from what is there, the last checkpoint at least"
    )

  written = storage.read_sealed(path)
  if written is None:
    raise wrong("its checksum is another, or it has none")
  memory = Path(written["memory"])
  if os.path.lexists(memory):
    try:
      with _holding(memory):
        pass
    except ValueError as error:
      why = f"{memory} is not the memory of a run: {error}"
      raise wrong(why) from error
  return Running(**{**written, "memory": memory})


def _owner(memory: Path) -> tuple[str, str]:
  """Returns (cell's folder, token) that a memory was made for."""
  owner = storage.read_json(memory / _OWNER) or {}
  return str(owner.get("cell", "")), str(owner.get("token", ""))


def _is_of(memory: Path, running: Running | None, cell: Path) -> bool:
  """Whether a memory was made for a cell, which may have been moved since."""
  made_for, token = _owner(memory)
  if running is None:
    return made_for == str(cell)
  if not token or token != running.token:
    return False
  return made_for == str(cell) or not (Path(made_for) / RUNNING).exists()


class LiveMemory:
  """The memory of a cell, taken by this process."""

  def __init__(self, cell_folder: Path, memory_dir: str, *, resume: bool):
    """Takes the memory of a cell, kept if it `resume`s, or makes it. ValueError
    if it is in use, or is not the memory of a run."""
    self._folder, cell = cell_folder, cell_folder.resolve()
    running = read(cell_folder) if resume else None
    number = hashlib.sha256(str(cell).encode()).hexdigest()[:12]
    self.memory = Path(memory_dir).resolve() / f"asgd-{os.geteuid()}-{number}"
    self.replaced: dict[str, int] = {}
    self._noted: dict[str, int] | None = None  # None: the cell has not begun
    if running is not None:
      self.replaced = dict(running.replaced)
      if running.memory.is_dir() and _is_of(running.memory, running, cell):
        self.memory = running.memory
    with contextlib.ExitStack() as stack:
      try:
        held = stack.enter_context(_holding(self.memory))
      except ValueError as error:
        raise ValueError(
          f"{self.memory} is to be the memory of the run, and {error}: remove"
          " it, or use another folder (--memory_dir)"
        ) from error
      lock = processes.lock(held / _LOCK, _SECONDS, self.memory / _LOCK)
      stack.callback(os.close, lock)
      self.kept = resume and _is_of(held, running, cell)
      if not self.kept:  # end what is left of an earlier run, and remove it
        processes.end_all(held)
        _empty(held, _LOCK)
      self._token = _owner(held)[1] or uuid.uuid4().hex
      owner = {"cell": str(cell), "token": self._token}
      storage.write_json(held / _OWNER, owner)
      self._held: Path | None = held  # None: it was closed
      self._open = stack.pop_all()

  def replaced_since(self, now: Mapping[str, int]) -> dict[str, int]:
    """Returns how many processes were replaced since the cell began, of which
    this process has replaced `now`, by kind."""
    return {
      kind: self.replaced.get(kind, 0) + count for kind, count in now.items()
    }

  def note(self, replaced: Mapping[str, int]) -> None:
    """Writes running.json, with so many processes that were replaced, unless
    as many were noted before."""
    if replaced == self._noted:
      return
    self._noted = dict(replaced)
    fields = os.getpid(), str(self.memory), self._token, self._noted
    running = Running(*fields)._asdict()
    storage.write_json(self._folder / RUNNING, storage.sealed(running))

  def remove(self) -> None:
    """Removes the memory: nothing can be resumed from it any more."""
    with contextlib.ExitStack() as stack:
      held = self._held or stack.enter_context(_holding(self.memory))
      _remove(held, self.memory)
    (self._folder / RUNNING).unlink(missing_ok=True)

  def close(self) -> None:
    """Lets go of it, and leaves nothing of a run that was refused."""
    if self._held is not None and not self.kept and self._noted is None:
      _remove(self._held, self.memory)
    self._held = None
    self._open.close()


def forget(cell_folder: Path) -> None:
  """Removes what a run left that was killed right after it had finished, unless
  this user may only read the cell."""
  if not safe_files.is_writable(cell_folder):
    return
  running, cell = read(cell_folder), cell_folder.resolve()
  if running is None:
    return
  memory = running.memory
  if os.path.lexists(memory):
    with _holding(memory) as held:
      if _is_of(held, running, cell):
        processes.end_all(held)
        _remove(held, memory)
  (cell_folder / RUNNING).unlink(missing_ok=True)
