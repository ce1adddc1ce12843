"""Files and memory of a simulated world.

A fault can kill a process in the middle of a write, fill the disk, or change a
byte.
"""

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

# Seconds of a fault -> text of the write that is torn: the next write with this
# text, or with b"" one of the next _TEARS writes.
_TEARS = 4
_TORN_TEXT = {0.05: b"", 0.5: b"leave", 2.0: b"join", 8.0: b"receive"}


class Disk:
  """Writes to real files as `os` does, with faults."""

  def __init__(self, scheduler: Scheduler, faults: Faults):
    self._scheduler, self.faults = scheduler, faults
    self.full = False
    # Writes since a fault was armed that tears one of the next _TEARS writes.
    self._writes_passed = 0

  def write(self, file: int, data: Any) -> int:
    """See `os.write`."""
    self._scheduler.touch()
    return self.put(file, data)

  def put(self, file: int, data: Any) -> int:
    """Writes without ending the turn. On a full disk writes half of the data,
    or raises OSError for a single byte."""
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

  def tear(self, write_part: Callable[[], Any], data: bytes = b"") -> None:
    """Kills the process in the middle of a write, if such a fault is due.

    Args:
      write_part: writes the part that is written before the kill.
      data: all bytes of the write.
    """
    process, fault = self._scheduler.current, self.faults.first_armed("tear")
    if fault is None or process is None:
      return
    text = _TORN_TEXT[fault.seconds]
    if text not in data:
      return
    if not text and self._writes_passed < int(fault.target * _TEARS):
      self._writes_passed += 1
      return
    self._writes_passed = 0
    self.faults.take("tear", process.name)
    write_part()
    self._scheduler.kill(process)
    self._scheduler.point()  # raises Killed


class Memory(SharedMemory):
  """Shared memory of the world's processes."""

  def __init__(
    self, scheduler: Scheduler, disk: Disk, *args: Any, **options: Any
  ) -> None:
    super().__init__(*args, **options)
    self._scheduler, self._disk = scheduler, disk
    # Returns the shard that reads these slots; None in the shard's own memory.
    self.shard: Callable[[], Shard | None] = lambda: None

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    """See the base. The writer may be killed during the write, but the turn
    does not end: a worker checks only between two writes whether it has lost
    its slots."""
    self._scheduler.point()
    if shard := self.shard():
      self._check_owner(shard, slot, stamp)
    # A torn write leaves the data without its stamp.
    self._disk.tear(lambda: super(Memory, self).write(kind, slot, tree, 0))
    super().write(kind, slot, tree, stamp)
    length = self.content_nbytes(kind, slot)
    # Only a packed message has a checksum, by which a reader detects the fault.
    is_packed, faults = not self._formats[kind].is_fixed, self._disk.faults
    if is_packed and length and (fault := faults.take("spoil", "message")):
      position = int(fault.target * (length - 1))
      self._slots[kind][slot][position] ^= 0x10
    self._scheduler.point()

  def _check_owner(self, shard: Shard, slot: int, stamp: int) -> None:
    """Raises Broken if a worker writes a message to a slot that is free or is
    another ticket's."""
    slots = shard.state.slots
    if not self._files.items() <= slots.memory._files.items():
      return  # this memory was removed: the shard reads other files
    other_keys = [
      key
      for key, ticket in shard.state.tickets.items()
      if ticket.message_slot == slot and message_stamp(*key) != stamp
    ]
    is_free = slot in slots.free_messages or slot in slots.log_slots
    if other_keys or is_free:
      raise self._broken(
        f"no slot is leaked, or used twice: slot {slot} of shard {shard.index}"
        f" is {'free' if is_free else other_keys}, and is written for {stamp:x}"
      )

  def _broken(self, text: str) -> BaseException:
    """Returns the error, and stores it for the run: the error of a worker that
    the driver has given up is not reported."""
    self._scheduler.errors.append(Broken(text))
    return self._scheduler.errors[-1]

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """See the base; raises Broken if the base read a slot of another stamp."""
    tree, actual_stamp = super().read(kind, slot, stamp), self.stamp(kind, slot)
    if actual_stamp != stamp:
      raise self._broken(
        f"no slot is read without its stamp: slot {slot} of kind {kind} has"
        f" stamp {actual_stamp}, not {stamp}"
      )
    return tree

  # A snapshot is written as an image, then its description: the process may be
  # killed between the two writes.

  def _save_image(self, tree: Any) -> None:
    super()._save_image(tree)
    self._scheduler.touch()

  def _save_meta(self, meta: Any) -> None:
    self._disk.tear(lambda: None)
    super()._save_meta(meta)
    self._scheduler.touch()


class Flip(NamedTuple):
  """A changed byte of a file."""

  path: Path
  before: bytes  # content before the change, up to and including the byte

  @property
  def after(self) -> bytes:
    """The same part of the file with the change."""
    return self.before[:-1] + bytes([self.before[-1] ^ 0x01])

  def original(self) -> bytes | None:
    """Returns the present file without the change; None if the file no longer
    has the changed byte."""
    data = self.path.read_bytes() if self.path.exists() else b""
    if not data.startswith(self.after):
      return None
    return self.before + data[len(self.before) :]

  def restore(self) -> None:
    """Restores the byte, if the file still has the change."""
    if (data := self.original()) is not None:
      self.path.write_bytes(data)


def flip(path: Path, position: float) -> Flip | None:
  """Changes the byte at `position`, a fraction in [0, 1] of a file's length.
  Returns the change; None if the file is empty."""
  data = bytearray(path.read_bytes())
  if not data:
    return None
  index = int(position * (len(data) - 1))
  before = bytes(data[: index + 1])
  data[index] ^= 0x01
  path.write_bytes(data)
  return Flip(path, before)
