"""Files and memory of a simulated world: where a process is killed in the
middle of what it writes, and where there is no room."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asgd.live.shard import Shard
from asgd.live.slots import SharedMemory, message_stamp
from asgd.live.world.scheduler import Scheduler


class Broken(Exception):
  """An invariant does not hold."""


class Disk:
  """Writes to real files, as `os` does, or fails to."""

  def __init__(self, scheduler: Scheduler):
    self._scheduler = scheduler
    self.full = False
    # Writes to come in the middle of which a process is killed: how many are
    # left alone before, and what a row has in it; nothing is any write.
    self.tears: list[tuple[int, bytes]] = []
    # Packed messages or updates to come of which a byte is changed, at that
    # part of it.
    self.spoils: list[float] = []

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
    """Kills the process in the middle of a write, if that is to be."""
    process = self._scheduler.current
    if not self.tears or process is None:
      return
    left, text = self.tears[0]
    if text not in data:
      return
    self.tears[0] = left - 1, text
    if left == 0:
      self.tears.pop(0)
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
    if not self._formats[kind].fixed and length and self._disk.spoils:
      at = self._disk.spoils.pop() * (length - 1)
      self._slots[kind][slot][int(at)] ^= 0x10
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
    """Returns the error, and notes it: nobody hears a worker that was ended."""
    error = Broken(text)
    self._scheduler.errors.append(error)
    return error

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """See the base; raises Broken for what it should have refused."""
    tree = super().read(kind, slot, stamp)
    there = self.stamp(kind, slot)
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
  def is_there(self) -> bool:
    """Whether the file still is so long, and has not been put back."""
    data = self.path.read_bytes() if self.path.exists() else b""
    size = len(self.before)
    return len(data) >= size and data[:size] != self.before

  def mend(self) -> None:
    """Puts the byte back, if it is where it was."""
    data = self.path.read_bytes() if self.path.exists() else b""
    at, flipped = len(self.before) - 1, self.before[-1] ^ 0x01
    if data[: at + 1] == self.before[:at] + bytes([flipped]):
      self.path.write_bytes(self.before + data[at + 1 :])


def flip(path: Path, position: float) -> None:
  """Changes a byte of a file, at that part of its length."""
  data = bytearray(path.read_bytes())
  if data:
    data[int(position * (len(data) - 1))] ^= 0x01
    path.write_bytes(data)
