"""Memory that a shard and its workers share, in numbered slots.

There are slots of sent parameters, of messages, and two of snapshots of the
shard. If workers are sent updates, those of a ticket lie in the updates slot
with the index of its message slot. All slots are mapped files in the kernel's
memory (/dev/shm). These outlive a killed process, so they are a shard's log.

Each slot ends with the length of its content and a stamp. The writer sets the
stamp after the content, and the reader compares it: so it refuses the content
of a replaced file or of another message.
"""

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import safe_files, wire
from asgd.live import store
from asgd.live.append_only import GO_ON
from asgd.live.slot_formats import Slot, slot_format

PARAMS, MESSAGES, UPDATES = range(3)  # kinds of slots
_NAMES = "params", "messages", "updates"


class DamagedSnapshot(ValueError):
  """A snapshot that cannot be read."""


class WrongSlot(ValueError):
  """A slot does not hold what was expected there."""

  def __init__(self, memory: str, kind: int, slot: int):
    super().__init__(
      f"{_NAMES[kind]} slot {slot} in {memory} does not hold what"
      " was written there: the shared memory was removed or changed while the"
      f" run used it; {GO_ON} from the last checkpoint"
    )


class SlotCounts(NamedTuple):
  """Numbers of slots."""

  params: int
  messages: int

  @property
  def of_kinds(self) -> tuple[int, int, int]:
    """Those of each kind: of updates one for each message, and two for the
    snapshots."""
    return self.params, self.messages, self.messages + 2


_ADOPTED, _SNAPSHOT = "adopted", "snapshot"  # files
_TRAILER = np.dtype([("length", np.int64), ("stamp", np.int64)])


def message_stamp(worker: int, seq: int) -> int:
  """Returns the stamp of a message, unique in a run."""
  return (worker + 1) << 40 | seq


def _stride(nbytes: int) -> int:
  """Bytes of a slot with what ends it, in whole pages."""
  return -(-(nbytes + _TRAILER.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE


def slots_nbytes(
  counts: SlotCounts, like: tuple[Any, ...], *, compress: str | None = None
) -> int:
  """Returns the bytes of a shard's slots without the snapshots; `like` are the
  contents of slots of params, messages and updates, as of `SharedMemory`."""
  strides = [_stride(slot_format(x, compress=compress).nbytes) for x in like]
  each = zip(counts.of_kinds, strides, strict=False)
  return sum(n * stride for n, stride in each)


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


def _on_device(view: np.ndarray) -> Any:
  """A jax array in the memory of a view; the view itself where JAX would copy
  it."""
  array = jax.device_put(view)
  if array.devices() and next(iter(array.devices())).platform != "cpu":
    return view
  there = array.unsafe_buffer_pointer() == view.ctypes.data
  return array if there and array.dtype == view.dtype else view


def _read_snapshot(folder: Path) -> dict[str, Any] | None:
  """Returns what was saved beside the last image, None if there is none."""
  path = folder / _SNAPSHOT
  if not path.exists():
    return None
  try:
    return json.loads(store.read_body(path))
  except (store.Changed, ValueError) as error:
    raise DamagedSnapshot(f"{path} is damaged and is not used") from error


def _is_adopted(folder: Path) -> bool:
  """Whether all slot files exist, and a shard's journal refers to them."""
  names = *SlotCounts._fields, _ADOPTED
  return all((folder / name).exists() for name in names)


def is_usable(folder: Path, rows: int) -> bool:
  """Whether a shard with so many rows in its journal can resume from memory."""
  if not _is_adopted(folder):
    return False
  try:
    saved = _read_snapshot(folder)
  except DamagedSnapshot:
    return False
  return saved is None or saved["meta"]["rows"] <= rows


def disown(folder: Path) -> None:
  """Makes the next shard that opens the memory take it for a new one."""
  (folder / _ADOPTED).unlink(missing_ok=True)


class SharedMemory:
  """Slots in mapped files of one folder; several processes may open it."""

  def __init__(
    self,
    folder: Path,
    counts: SlotCounts,
    like: tuple[Any, ...],
    *,
    compress: str | None = None,
  ):
    """Opens the files, and makes missing ones.

    Args:
      folder: of the shard, best in memory (/dev/shm/NAME), readable by its
        owner alone.
      counts: of slots.
      like: contents of slots of params, of messages and, if they are sent, of
        updates, as of `slot_format`; and, the last, a snapshot, or None for the
        memory of a worker.
      compress: of the contents, as in `wire.layout`.

    Raises:
      ValueError: if there is no room, or the files hold something else.
    """
    self._folder = Path(folder)
    self.name = str(self._folder.parent)  # of all shards
    # Whether the memory is new: no journal refers to it.
    self.fresh = not _is_adopted(self._folder)
    *kinds, snapshot = like
    if snapshot is not None:
      safe_files.make_private(self._folder)
    self._files: dict[Path, int] = {}  # their numbers on the disk
    self._formats = [slot_format(x, compress=compress) for x in kinds]
    self._image = None if snapshot is None else wire.layout(snapshot)
    kinds = zip(_NAMES, self._formats, counts.of_kinds, strict=False)
    rows = [self._map(name, x.nbytes, count) for name, x, count in kinds]
    self._slots = [slots for slots, _ in rows]
    self._open: dict[tuple[int, int], Slot] = {}  # by kind and number
    self._device_views: dict[tuple[int, int], Any] = {}
    self._lengths = [trailers["length"] for _, trailers in rows]
    self._stamps = [trailers["stamp"] for _, trailers in rows]
    self._images = None
    self._turn = 0  # the image to be written next

  def _map(self, name, nbytes, count):
    stride = _stride(nbytes)
    path, size = self._folder / name, stride * count
    try:
      if self._image is not None:  # or it is a worker's: a shard makes them
        path.touch(0o600)
      with path.open("r+b") as file:
        self._files[path] = os.fstat(file.fileno()).st_ino
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
    except FileNotFoundError as error:
      raise self._memory_lost() from error
    except OSError as error:
      raise ValueError(
        f"no room for {size / 1e6:.0f} MB in {path} ({error.strerror}): use"
        " fewer workers, a smaller log or another folder"
      ) from error
    rows = np.frombuffer(mapped, np.uint8).reshape(count, stride)
    trailers = rows[:, -_TRAILER.itemsize :].view(_TRAILER)[:, 0]
    return [row[:nbytes] for row in rows], trailers

  @property
  def sends_updates(self) -> bool:
    """Whether there are slots of updates."""
    return len(self._formats) > UPDATES

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    """Copies a tree into a slot, and sets its stamp; a packed slot takes a
    code, packed (uint8[length]) or not."""
    self._stamps[kind][slot] = 0
    self._lengths[kind][slot] = self._slot(kind, slot).write(tree)
    self._stamps[kind][slot] = stamp

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """Returns views of a slot, valid until the slot is given away, or the code
    that is packed in it. Raises WrongSlot for another stamp, BadCode for bytes
    that do not unpack."""
    if self._stamps[kind][slot] != stamp:
      raise WrongSlot(str(self._folder), kind, slot)
    return self._slot(kind, slot).read(self.length(kind, slot))

  def device_view(self, kind: int, slot: int, stamp: int) -> Any:
    """Returns what `read` returns, for a compiled program. Views are jax arrays
    where those of this thread's device can share the memory of a slot: they are
    made once, where NumPy arrays are converted at each call."""
    tree = self.read(kind, slot, stamp)
    if not self._formats[kind].shared:
      return tree
    if (kind, slot) not in self._device_views:
      self._device_views[kind, slot] = jax.tree.map(_on_device, tree)
    return self._device_views[kind, slot]

  def _slot(self, kind, slot):
    if (kind, slot) not in self._open:
      data = self._slots[kind][slot]
      self._open[kind, slot] = self._formats[kind].open(data)
    return self._open[kind, slot]

  def length(self, kind: int, slot: int) -> int:
    """Returns how many bytes the content of a slot has."""
    return self._formats[kind].length(int(self._lengths[kind][slot]))

  def stamp(self, kind: int, slot: int) -> int:
    """Returns the stamp of a slot's content."""
    return int(self._stamps[kind][slot])

  def read_copy(self, kind: int, slot: int) -> Any:
    """Returns a copy of a slot's content. Raises WrongSlot if it has none."""
    stamp = self.stamp(kind, slot) or -1  # 0: nothing was written
    return jax.tree.map(np.array, self.read(kind, slot, stamp))

  def save(self, tree: Any, meta: Any) -> None:
    """Saves a snapshot; a kill meanwhile leaves the previous one valid."""
    self._save_image(tree)
    self._save_meta(meta)

  def _save_image(self, tree):
    if self._images is None:
      with contextlib.suppress(DamagedSnapshot):
        self._open_images()
    wire.write(self._image, tree, self._images[self._turn])

  def _save_meta(self, meta):
    text = json.dumps({"image": self._turn, "meta": meta})
    try:
      store.write_body(self._folder / _SNAPSHOT, text.encode())
    except store.Changed as error:
      raise self._memory_lost() from error
    self._turn = 1 - self._turn

  def _open_images(self):
    """Returns what was saved beside the last image, if any; see `load`."""
    if self._images is None:
      self._images, _ = self._map("snapshots", self._image.nbytes, 2)
    saved = _read_snapshot(self._folder)
    if saved is not None:
      self._turn = 1 - saved["image"]
    return saved

  def adopt(self) -> None:
    """Marks it as the memory of the shard's journal. Raises ValueError if
    another process removed or replaced its files."""
    try:
      for path, number in self._files.items():
        if path.stat().st_ino != number:
          raise self._memory_lost()
      (self._folder / _ADOPTED).touch(0o600)
    except FileNotFoundError as error:
      raise self._memory_lost() from error
    self.fresh = False

  def _memory_lost(self):
    return ValueError(
      f"the shared memory {self._folder} is missing: it was removed while the"
      f" run used it; {GO_ON} from the last checkpoint"
    )

  def disown(self) -> None:
    """Makes the next shard that opens the memory take it for a new one."""
    disown(self._folder)

  def forget(self) -> None:
    """Drops the snapshot, on which the log builds. No journal refers to the
    memory until it is adopted again."""
    self.disown()
    (self._folder / _SNAPSHOT).unlink(missing_ok=True)

  def load(self) -> tuple[Any, Any] | None:
    """Returns (tree, meta) of the last, or None. Raises DamagedSnapshot."""
    saved = self._open_images()
    if saved is None:
      return None
    tree = wire.read(self._image, self._images[saved["image"]])
    return jax.tree.map(np.array, tree), saved["meta"]
