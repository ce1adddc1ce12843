"""Memory that a shard and its workers share, in numbered slots.

There are slots of sent parameters, slots of messages, and two slots for
snapshots of the shard. If the shard sends updates, the updates of a ticket lie
in the updates slot with the index of its message slot. All slots are mapped
files in the kernel's memory (/dev/shm). These files outlive a killed process,
so message slots serve as a shard's log.

  a slot     content ........ unused ........ | length | stamp |   whole pages
  written    [2] content             [1] stamp 0, [3] length, [4] stamp

A reader compares the stamp with the stamp that it expects. So it refuses the
content of a replaced file, of another message, or of a write that a kill cut
short. `SharedMemory` is the memory; `slot_formats` defines the contents.
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
from asgd.checks import RERUN
from asgd.live import store
from asgd.live.slot_formats import Slot, slot_format

PARAMS, MESSAGES, UPDATES = range(3)  # kinds of slots
_NAMES = "params", "messages", "updates"


class DamagedSnapshot(ValueError):
  """A snapshot that cannot be read."""


class WrongSlot(ValueError):
  """A slot holds other content than the reader expects."""

  def __init__(self, memory: str, kind: int, slot: int):
    super().__init__(
      f"{_NAMES[kind]} slot {slot} in {memory} does not hold what"
      " was written there: the shared memory was removed or changed while the"
      f" run used it; {RERUN} from the last checkpoint"
    )


class SlotCounts(NamedTuple):
  """Numbers of slots."""

  params: int
  messages: int

  @property
  def of_kinds(self) -> tuple[int, int, int]:
    """Numbers of slots by kind: params, messages, updates. There are two more
    updates slots than messages, for the packets of the two snapshots."""
    return self.params, self.messages, self.messages + 2


# Files beside the slots: a mark that a journal refers to the memory, and the
# index and description of the valid snapshot.
_ADOPTED, _SNAPSHOT = "adopted", "snapshot"
# Bytes of an array that JAX copies faster than it shares the array's memory.
_SMALL = 4096
_TRAILER = np.dtype([("length", np.int64), ("stamp", np.int64)])


def message_stamp(worker: int, seq: int) -> int:
  """Returns the stamp of a message, unique in a run."""
  return (worker + 1) << 40 | seq  # + 1: a new slot has the stamp 0


def _stride(nbytes: int) -> int:
  """Returns the bytes of a slot with its trailer, rounded up to whole pages."""
  return -(-(nbytes + _TRAILER.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE


def slots_nbytes(
  counts: SlotCounts, like: tuple[Any, ...], *, compress: str | None = None
) -> int:
  """Returns how many bytes a shard's slots take, without the snapshots. `like`
  has the contents of slots of params, messages and, if the shard sends updates,
  of updates, as in `SharedMemory`."""
  formats = [slot_format(content, compress=compress) for content in like]
  strides = [_stride(form.nbytes) for form in formats]
  counts_and_strides = zip(counts.of_kinds, strides, strict=False)
  return sum(count * stride for count, stride in counts_and_strides)


def check_room(folder: Path | str, nbytes: int) -> None:
  """Raises ValueError unless a folder's disk has room for `nbytes` bytes."""
  disk = os.statvfs(folder)
  free_bytes = disk.f_bavail * disk.f_frsize
  if nbytes > free_bytes:
    raise ValueError(
      f"no room for {nbytes / 1e6:.0f} MB of shared memory in {folder}, which"
      f" has {free_bytes / 1e6:.0f} MB left: use fewer workers, a smaller log"
      " (server.log) or another folder for it"
    )


def _on_device(view: np.ndarray) -> Any:
  """Returns a jax array in the memory of a view, or the view itself if it is
  small or JAX would copy it."""
  if view.nbytes < _SMALL:
    return view
  array = jax.device_put(view)
  if array.devices() and next(iter(array.devices())).platform != "cpu":
    return view
  shares_memory = array.unsafe_buffer_pointer() == view.ctypes.data
  # JAX may also change the dtype, for example to 32 bits.
  return array if shares_memory and array.dtype == view.dtype else view


def _read_snapshot(folder: Path) -> dict[str, Any] | None:
  """Returns {"image": index of its slot, "meta": its description} of the last
  snapshot, None if there is none."""
  path = folder / _SNAPSHOT
  if not path.exists():
    return None
  try:
    snapshot: dict[str, Any] = json.loads(store.read_body(path))
    return snapshot
  except (store.Changed, ValueError) as error:
    raise DamagedSnapshot(f"{path} is damaged and is not used") from error


def _is_adopted(folder: Path) -> bool:
  """Whether all slot files exist, and a shard's journal refers to them."""
  names = *SlotCounts._fields, _ADOPTED
  return all((folder / name).exists() for name in names)


def is_usable(folder: Path, rows: int) -> bool:
  """Whether a shard with `rows` rows in its journal can resume from memory."""
  if not _is_adopted(folder):
    return False
  try:
    snapshot = _read_snapshot(folder)
  except DamagedSnapshot:
    return False
  return snapshot is None or snapshot["meta"]["rows"] <= rows


def disown(folder: Path) -> None:
  """Removes the mark of an adopted memory, so that the next shard that opens
  the memory treats it as new."""
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
    """Opens the files; a shard creates missing ones, a worker does not.

    Args:
      folder: the folder of the shard, best in memory (/dev/shm/NAME), readable
        by its owner alone.
      counts: numbers of slots.
      like: contents of slots of params, of messages and, if shards send
        updates, of updates, as `slot_format` takes them. The last element is a
        snapshot, or None for the memory of a worker.
      compress: how numbers are stored in slots, as in `wire.layout`.

    Raises:
      ValueError: if there is no room, or the files hold something else.
    """
    self._folder = Path(folder)
    self.name = str(self._folder.parent)  # of the memory of all shards
    # Whether the memory is new: no journal refers to it.
    self.is_new = not _is_adopted(self._folder)
    *contents, snapshot = like
    if snapshot is not None:
      safe_files.make_private(self._folder)
    self._files: dict[Path, int] = {}  # mapped file -> its inode
    self._formats = [
      slot_format(content, compress=compress) for content in contents
    ]
    # None in a worker, which neither creates files nor reads snapshots.
    self._image_layout = None if snapshot is None else wire.layout(snapshot)
    kinds = zip(_NAMES, self._formats, counts.of_kinds, strict=False)
    maps = [self._map(name, form.nbytes, count) for name, form, count in kinds]
    # By kind, then by slot.
    self._slots = [slots for slots, _ in maps]
    self._lengths = [trailers["length"] for _, trailers in maps]
    self._stamps = [trailers["stamp"] for _, trailers in maps]
    # (kind, slot) -> the slot's functions; (kind, slot) -> its device view.
    self._slot_functions: dict[tuple[int, int], Slot] = {}
    self._device_views: dict[tuple[int, int], Any] = {}
    self._images: list[np.ndarray] = []  # the two images; []: not mapped yet
    self._next_image = 0  # index of the image to be written next

  def _map(
    self, name: str, nbytes: int, count: int
  ) -> tuple[list[np.ndarray], np.ndarray]:
    """Maps the file of `count` slots of `nbytes` bytes. Returns the bytes of
    each slot, uint8[nbytes], and the trailers, _TRAILER[count]."""
    stride = _stride(nbytes)
    path, size = self._folder / name, stride * count
    try:
      if self._image_layout is not None:
        path.touch(0o600)
      with path.open("r+b") as file:
        self._files[path] = os.fstat(file.fileno()).st_ino
        actual_size = os.fstat(file.fileno()).st_size
        if actual_size not in (0, size):
          raise ValueError(
            f"{path} has {actual_size} bytes where {size} are needed: it was"
            f" made by a run with other settings. Remove {self._folder.parent}"
            f" and {RERUN} from the last checkpoint"
          )
        if not actual_size:
          # Memory is reserved now: a mapped page that the kernel cannot supply
          # later would kill the process (SIGBUS).
          try:
            check_room(self._folder, size)
            os.posix_fallocate(file.fileno(), 0, size)
          except (OSError, ValueError):
            path.unlink()
            raise
        mapping = mmap.mmap(file.fileno(), size)
    except FileNotFoundError as error:
      raise self._lost_memory_error() from error
    except OSError as error:
      raise ValueError(
        f"no room for {size / 1e6:.0f} MB in {path} ({error.strerror}): use"
        " fewer workers, a smaller log or another folder"
      ) from error
    rows = np.frombuffer(mapping, np.uint8).reshape(count, stride)
    trailers = rows[:, -_TRAILER.itemsize :].view(_TRAILER)[:, 0]
    return [row[:nbytes] for row in rows], trailers

  @property
  def has_updates(self) -> bool:
    """Whether there are slots of updates."""
    return len(self._formats) > UPDATES

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    """Copies a tree into a slot, and sets the slot's stamp. For a slot of codes
    `tree` is a code, packed (uint8[n]) or not."""
    # A kill during the copy leaves stamp 0, which no reader expects.
    self._stamps[kind][slot] = 0
    self._lengths[kind][slot] = self._slot(kind, slot).write(tree)
    self._stamps[kind][slot] = stamp

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    """Returns views of a slot, valid until the slot is written again; for a
    slot of codes, returns the unpacked code. Raises WrongSlot if the slot has
    another stamp, BadCode if its bytes cannot be unpacked."""
    if self._stamps[kind][slot] != stamp:
      raise WrongSlot(str(self._folder), kind, slot)
    return self._slot(kind, slot).read(self.content_nbytes(kind, slot))

  def device_view(self, kind: int, slot: int, stamp: int) -> Any:
    """Returns the content of a slot for a compiled program; see `read`.

    The views are jax arrays if arrays of this thread's device can share the
    memory of a slot. They are cached, because JAX would convert NumPy arrays at
    each call.
    """
    tree = self.read(kind, slot, stamp)
    if not self._formats[kind].gives_views:
      return tree
    if (kind, slot) not in self._device_views:
      self._device_views[kind, slot] = jax.tree.map(_on_device, tree)
    return self._device_views[kind, slot]

  def _slot(self, kind: int, slot: int) -> Slot:
    """Returns the functions that write and read a slot."""
    if (kind, slot) not in self._slot_functions:
      data = self._slots[kind][slot]
      self._slot_functions[kind, slot] = self._formats[kind].open(data)
    return self._slot_functions[kind, slot]

  def content_nbytes(self, kind: int, slot: int) -> int:
    """Returns the number of bytes of a slot's content."""
    return self._formats[kind].content_nbytes(int(self._lengths[kind][slot]))

  def stamp(self, kind: int, slot: int) -> int:
    """Returns the stamp of a slot's content."""
    return int(self._stamps[kind][slot])

  def read_copy(self, kind: int, slot: int) -> Any:
    """Returns a copy of a slot's content. Raises WrongSlot if it has none."""
    stamp = self.stamp(kind, slot) or -1  # 0: nothing was written
    return jax.tree.map(np.array, self.read(kind, slot, stamp))

  def save(self, tree: Any, meta: Any) -> None:
    """Saves a snapshot; a kill meanwhile leaves the previous one valid.

    [1] Write the tree to the image that is not valid. [2] Replace the file that
    names the valid image.
    """
    self._save_image(tree)
    self._save_meta(meta)

  def _save_image(self, tree: Any) -> None:
    if not self._images:
      with contextlib.suppress(DamagedSnapshot):  # the new snapshot replaces it
        self._open_images()
    wire.write(self._layout, tree, self._images[self._next_image])

  def _save_meta(self, meta: Any) -> None:
    """Replaces the file that names the valid image, and has `meta`."""
    text = json.dumps({"image": self._next_image, "meta": meta})
    try:
      store.write_body(self._folder / _SNAPSHOT, text.encode())
    except store.Changed as error:
      raise self._lost_memory_error() from error
    self._next_image = 1 - self._next_image

  @property
  def _layout(self) -> wire.Layout:
    """The layout of an image, at a shard."""
    assert self._image_layout is not None
    return self._image_layout

  def _open_images(self) -> dict[str, Any] | None:
    """Maps the images; returns the result of `_read_snapshot`."""
    if not self._images:
      self._images, _ = self._map("snapshots", self._layout.nbytes, 2)
    snapshot = _read_snapshot(self._folder)
    if snapshot is not None:
      self._next_image = 1 - snapshot["image"]
    return snapshot

  def adopt(self) -> None:
    """Marks this memory as that of the shard's journal. Raises ValueError if
    another process removed or replaced the memory's files."""
    try:
      # This shard still maps the removed file; workers would map the new one.
      for path, inode in self._files.items():
        if path.stat().st_ino != inode:
          raise self._lost_memory_error()
      (self._folder / _ADOPTED).touch(0o600)
    except FileNotFoundError as error:
      raise self._lost_memory_error() from error
    self.is_new = False

  def _lost_memory_error(self) -> ValueError:
    """Returns the error to raise for missing or replaced files."""
    return ValueError(
      f"the shared memory {self._folder} is missing: it was removed while the"
      f" run used it; {RERUN} from the last checkpoint"
    )

  def disown(self) -> None:
    """See `disown` of this module."""
    disown(self._folder)

  def forget(self) -> None:
    """Drops the snapshot, and with it the log, which continues the snapshot. No
    journal refers to the memory until it is adopted again."""
    # Disown first: a kill between the two steps must not leave a log without
    # the snapshot that it builds on.
    self.disown()
    (self._folder / _SNAPSHOT).unlink(missing_ok=True)

  def load(self) -> tuple[Any, Any] | None:
    """Returns (tree, meta) of the last snapshot, or None. Raises
    DamagedSnapshot."""
    snapshot = self._open_images()
    if snapshot is None:
      return None
    tree = wire.read(self._layout, self._images[snapshot["image"]])
    # Copied: a later snapshot is written to the same image.
    return jax.tree.map(np.array, tree), snapshot["meta"]
