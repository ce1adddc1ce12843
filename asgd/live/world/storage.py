"""Files and memory of a simulated world: where a process is killed in the
middle of what it writes, and where there is no room."""

import errno
import os
from pathlib import Path
from typing import Any

from asgd.live.slots import SharedMemory
from asgd.live.world.scheduler import Scheduler


class Broken(Exception):
  """An invariant does not hold."""


class Disk:
  """Writes to real files, as `os` does, or fails to."""

  def __init__(self, scheduler: Scheduler):
    self._scheduler = scheduler
    self.full = False
    # Writes to come in the middle of which a process is killed: of each, how
    # many are left alone before.
    self.tears: list[int] = []

  def write(self, file: int, data: Any) -> int:
    """See `os.write`."""
    self._scheduler.touch()
    if self.full:
      if len(data) > 1:
        return os.write(file, data[: len(data) // 2])
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    self.tear(lambda: os.write(file, data[: len(data) // 2]))
    return os.write(file, data)

  def tear(self, write_part) -> None:
    """Kills the process in the middle of a write, if that is to be."""
    process = self._scheduler.current
    if not self.tears or process is None:
      return
    self.tears[0] -= 1
    if self.tears[0] < 0:
      self.tears.pop(0)
      write_part()
      self._scheduler.kill(process)
      self._scheduler.point()


class Memory(SharedMemory):
  """Shared memory of the world's processes."""

  def __init__(self, scheduler: Scheduler, disk: Disk, *args: Any, **options):
    super().__init__(*args, **options)
    self._scheduler, self._disk = scheduler, disk

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    """See the base. A writer may be killed on the way; nobody else has a turn
    then, or a writer could not be told to write no more."""
    self._scheduler.point()
    self._disk.tear(lambda: super(Memory, self).write(kind, slot, tree, 0))
    super().write(kind, slot, tree, stamp)
    self._scheduler.point()

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """See the base; raises Broken for what it should have refused."""
    tree = super().read(kind, slot, stamp)
    there = self.stamp(kind, slot)
    if there != stamp:
      raise Broken(
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


def flip(path: Path, position: float) -> None:
  """Changes a byte of a file, at that part of its length."""
  data = bytearray(path.read_bytes())
  if data:
    data[int(position * (len(data) - 1))] ^= 0x01
    path.write_bytes(data)
