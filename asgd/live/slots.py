"""Memory that a shard and its workers share, in numbered slots.

There are three kinds of slots: parameters that were sent, messages that came
in, and two snapshots of the shard. They are mapped files, which live in the
kernel's memory (/dev/shm) and stay when a process is killed: that is what makes
them the log of a shard.
"""

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.live import wire
from asgd.live.append_only import GO_ON

PARAMS, MESSAGES = 0, 1  # kinds of slots


class DamagedSnapshot(ValueError):
  """A snapshot that cannot be read."""


class SlotCounts(NamedTuple):
  """How many slots there are."""

  params: int
  messages: int


def _stride(nbytes: int) -> int:
  """Bytes of a slot, in whole pages."""
  return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def slots_nbytes(
  counts: SlotCounts, part: Any, *, compress: str | None = None
) -> int:
  """Returns the bytes that a shard's slots take, those of snapshots left out;
  `part` are its parameters (shapes and dtypes)."""
  return sum(counts) * _stride(wire.layout(part, compress=compress).nbytes)


def check_room(folder: Path | str, nbytes: int) -> None:
  """Raises ValueError unless a folder's disk has room for so many bytes."""
  disk = os.statvfs(folder)
  free = disk.f_bavail * disk.f_frsize
  if nbytes > free:
    raise ValueError(
      f"no room for {nbytes / 1e6:.0f} MB of shared memory in {folder}, which"
      f" has {free / 1e6:.0f} MB left: use fewer workers, a smaller log"
      " (server.log) or another folder for it"
    )


class SharedMemory:
  """Slots in mapped files of one folder; several processes may open it."""

  def __init__(
    self,
    folder: Path,
    counts: SlotCounts,
    like: tuple[Any, Any, Any],
    *,
    compress: str | None = None,
  ):
    """Opens the files, making those that are not there, in a folder that is
    best in memory (/dev/shm/NAME) and readable by its owner alone. `like` says
    what lies in params, message and snapshot slots (shapes and dtypes), and
    `compress` is of the first two, as in `wire.layout`. Raises ValueError if
    there is no room, or the files hold something else."""
    self._folder = Path(folder)
    self.name = str(self._folder.parent)  # of all shards
    # Whether there was nothing: what a shard's journal refers to is lost.
    self.fresh = not (self._folder / "messages").exists()
    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    *kinds, snapshot = like
    self._layouts = [wire.layout(tree, compress=compress) for tree in kinds]
    self._image = None if snapshot is None else wire.layout(snapshot)
    kinds = zip(SlotCounts._fields, self._layouts, counts, strict=True)
    self._slots = [self._map(name, x.nbytes, count) for name, x, count in kinds]
    self._images = None
    self._turn = 0  # the image to be written next

  def _map(self, name, nbytes, count):
    stride = _stride(nbytes)
    path, size = self._folder / name, stride * count
    try:
      path.touch(0o600)
      with path.open("r+b") as file:
        nbytes_there = os.fstat(file.fileno()).st_size
        if nbytes_there not in (0, size):
          raise ValueError(
            f"{path} has {nbytes_there} bytes where {size} are needed: it was"
            f" made by a run with other settings. Remove {self._folder.parent}"
            f" and {GO_ON} from the last checkpoint"
          )
        if not nbytes_there:
          try:
            check_room(self._folder, size)
            os.posix_fallocate(file.fileno(), 0, size)
          except (OSError, ValueError):
            path.unlink()
            raise
        mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
      raise ValueError(
        f"no room for {size / 1e6:.0f} MB in {path} ({error.strerror}): use"
        " fewer workers, a smaller log or another folder"
      ) from error
    rows = np.frombuffer(mapped, np.uint8).reshape(count, stride)
    return [row[:nbytes] for row in rows]

  def write(self, kind: int, slot: int, tree: Any) -> None:
    """Copies a tree into a slot."""
    wire.write(self._layouts[kind], tree, self._slots[kind][slot])

  def read(self, kind: int, slot: int) -> Any:
    """Returns views of a slot, to be used before the slot is given away."""
    return wire.read(self._layouts[kind], self._slots[kind][slot])

  def read_copy(self, kind: int, slot: int) -> Any:
    """Returns a copy of what lies in a slot."""
    return jax.tree.map(np.array, self.read(kind, slot))

  def save(self, tree: Any, meta: Any) -> None:
    """Keeps a snapshot; a kill on the way leaves the one before."""
    if self._images is None:
      with contextlib.suppress(DamagedSnapshot):
        self._open_images()
    wire.write(self._image, tree, self._images[self._turn])
    path = self._folder / "snapshot.json"
    temporary = path.with_suffix(".tmp")
    try:
      temporary.write_text(json.dumps({"image": self._turn, "meta": meta}))
      os.replace(temporary, path)
    except FileNotFoundError as error:
      raise ValueError(
        f"the shared memory {self._folder} is gone: it was removed while the"
        f" run used it; {GO_ON} from the last checkpoint"
      ) from error
    except OSError as error:
      raise ValueError(
        f"cannot write {path} ({error.strerror}); make room and {GO_ON}"
      ) from error
    self._turn = 1 - self._turn

  def _open_images(self):
    """Returns what was saved beside the last image, if any; see `load`."""
    if self._images is None:
      self._images = self._map("snapshots", self._image.nbytes, 2)
    path = self._folder / "snapshot.json"
    try:
      saved = json.loads(path.read_text())
      if saved["image"] in (0, 1) and isinstance(saved["meta"], dict):
        self._turn = 1 - saved["image"]
        return saved
      reason = "it is no snapshot"
    except FileNotFoundError:
      return None
    except (ValueError, KeyError, TypeError, OSError) as error:
      reason = f"{type(error).__name__}: {error}"
    raise DamagedSnapshot(f"{path} is damaged and is not used ({reason})")

  def forget(self) -> None:
    """Drops the snapshot."""
    (self._folder / "snapshot.json").unlink(missing_ok=True)

  def load(self) -> tuple[Any, Any] | None:
    """Returns (tree, meta) of the last, or None. Raises DamagedSnapshot."""
    saved = self._open_images()
    if saved is None:
      return None
    tree = wire.read(self._image, self._images[saved["image"]])
    return jax.tree.map(np.array, tree), saved["meta"]
