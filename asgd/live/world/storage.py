"""Files and memory of a simulated world: where a process is killed in the
middle of what it writes, and where there is no room."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asgd.live.shard import Shard
from asgd.live.slots import SharedMemory, message_stamp
from asgd.live.world.broken import Broken
from asgd.live.world.injections import Faults
from asgd.live.world.scheduler import Scheduler

_TEARS = 4  # writes, of which one is torn; or the next of a row like these:
_TORN = {0.05: b"", 0.5: b"leave", 2.0: b"join", 8.0: b"receive"}


class Disk:
  """Writes to real files, as `os` does, or fails to."""

  def __init__(self, scheduler: Scheduler, faults: Faults):
    self._scheduler, self.faults = scheduler, faults
    self.full = False
    self._passed = 0  # writes since a fault was armed that tears a later one

  def write(self, file: int, data: Any) -> int:
    """See `os.write`."""
    self._scheduler.touch()
    return self.put(file, data)

  def put(self, file: int, data: Any) -> int:
    """Writes in the same turn."""
    if self.full:
      if len(data) > 1:
        return os.write(file, data[: len(data) // 2])
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    self.tear(lambda: os.write(file, data[: len(data) // 2]), bytes(data))
    return os.write(file, data)

  def replace(self, source: Path, target: Path) -> None:
    """See `os.replace`."""
    self._scheduler.touch()
    os.replace(source, target)

  def tear(self, write_part, data: bytes = b"") -> None:
    """Kills the process in the middle of a write, if that is to be: of the next
    row of a kind, or of one of the next writes."""
    process, fault = self._scheduler.current, self.faults.next("tear")
    if fault is None or process is None:
      return
    text = _TORN[fault.seconds]
    if text not in data:
      return
    if not text and self._passed < int(fault.which * _TEARS):
      self._passed += 1
      return
    self._passed = 0
    self.faults.take("tear", process.name)
    write_part()
    self._scheduler.kill(process)
    self._scheduler.point()


class Memory(SharedMemory):
  """Shared memory of the world's processes."""

  def __init__(self, scheduler: Scheduler, disk: Disk, *args: Any, **options):
    super().__init__(*args, **options)
    self._scheduler, self._disk = scheduler, disk
    self.shard: Callable[[], Shard | None] = lambda: None  # it is a worker's

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    """See the base. A writer may be killed on the way; nobody else has a turn
    then, or a writer could not be told to write no more."""
    self._scheduler.point()
    if shard := self.shard():
      self._check_owner(shard, slot, stamp)
    self._disk.tear(lambda: super(Memory, self).write(kind, slot, tree, 0))
    super().write(kind, slot, tree, stamp)
    length = self.length(kind, slot)
    packed, faults = not self._formats[kind].fixed, self._disk.faults
    if packed and length and (fault := faults.take("spoil", "message")):
      at = int(fault.which * (length - 1))
      self._slots[kind][slot][at] ^= 0x10
    self._scheduler.point()

  def _check_owner(self, shard, slot, stamp):
    """Raises Broken if a worker's message would lie where another's may."""
    slots = shard.state.slots
    if not self._files.items() <= slots.memory._files.items():
      return  # it was removed, and nobody reads there
    others = [
      key
      for key, ticket in shard.state.tickets.items()
      if ticket.message == slot and message_stamp(*key) != stamp
    ]
    free = slot in slots.free_messages or slot in slots.logged
    if others or free:
      raise self._broken(
        f"no slot is leaked, or used twice: slot {slot} of shard {shard.index}"
        f" is {'free' if free else others}, and is written for {stamp:x}"
      )

  def _broken(self, text):
    """Returns the error, and notes it: a worker that was ended reports none."""
    self._scheduler.errors.append(Broken(text))
    return self._scheduler.errors[-1]

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """See the base; raises Broken for what it should have refused."""
    tree, there = super().read(kind, slot, stamp), self.stamp(kind, slot)
    if there != stamp:
      raise self._broken(
        f"no slot is read without its stamp: slot {slot} of kind {kind} has"
        f" {there}, not {stamp}"
      )
    return tree

  def _save_image(self, tree):
    super()._save_image(tree)
    self._scheduler.touch()

  def _save_meta(self, meta):
    self._disk.tear(lambda: None)
    super()._save_meta(meta)
    self._scheduler.touch()


class Flip(NamedTuple):
  """A byte of a file that was changed."""

  path: Path
  before: bytes  # the file, up to and with the byte

  @property
  def after(self) -> bytes:
    """The same part of the file with the change."""
    return self.before[:-1] + bytes([self.before[-1] ^ 0x01])

  def original(self) -> bytes | None:
    """Returns the file as it would be without the change; None if the byte is
    not there any more, or was put back."""
    data = self.path.read_bytes() if self.path.exists() else b""
    if not data.startswith(self.after):
      return None
    return self.before + data[len(self.before) :]

  def mend(self) -> None:
    """Puts the byte back, if it is where it was."""
    if (data := self.original()) is not None:
      self.path.write_bytes(data)


def flip(path: Path, position: float) -> Flip | None:
  """Changes a byte of a file, at that part of its length; None if it is
  empty."""
  data = bytearray(path.read_bytes())
  if not data:
    return None
  at = int(position * (len(data) - 1))
  before = bytes(data[: at + 1])
  data[at] ^= 0x01
  path.write_bytes(data)
  return Flip(path, before)
