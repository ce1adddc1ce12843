"""Formats of slots: a tree as its bytes, a packed code, or bytes.

`slots.SharedMemory` opens a slot of a format once, and then writes and reads it
without looking at the layout again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asgd import compression, wire
from asgd.compression import packing


class Slot(NamedTuple):
  """The functions that write and read one slot."""

  # (content) -> number of its bytes. Raises BadCode for a packed code that is
  # longer than a slot.
  write: Callable[[Any], int]
  # (number of bytes of the content) -> the content: views of the slot for a
  # tree, otherwise new arrays. Raises BadCode.
  read: Callable[[int], Any]


class SlotFormat(NamedTuple):
  """The form of the contents of slots."""

  nbytes: int  # of a slot
  open: Callable[[np.ndarray], Slot]  # (bytes of a slot, uint8[nbytes]) -> Slot
  is_fixed: bool = False  # each content has exactly `nbytes` bytes
  gives_views: bool = False  # `read` returns views of the slot

  def content_nbytes(self, stored_length: int) -> int:
    """Returns the number of bytes of a slot's content. `stored_length` is the
    length in the slot's trailer. Another process may have written any number
    there, so the result is limited to the bytes of a slot."""
    if self.is_fixed:
      return self.nbytes
    return min(max(stored_length, 0), self.nbytes)


def slot_format(like: Any, *, compress: str | None = None) -> SlotFormat:
  """Returns the format of the slots for one kind of content.

  Args:
    like: a tree of shapes and dtypes; a `packing.CodeLayout`, for codes, packed
      or not; or an int n, for up to n bytes, uint8[n].
    compress: how a tree's numbers are stored, as in `wire.layout`.
  """
  if isinstance(like, packing.CodeLayout):
    write = functools.partial(_write_code, like)
    read = functools.partial(packing.unpack, like)
    return _format_of_any_length(like.most, write, read)
  if isinstance(like, int):
    return _format_of_any_length(like, _write_bytes, np.copy)
  layout = wire.layout(like, compress=compress)

  def open_tree(data: np.ndarray) -> Slot:
    write, read = wire.opened(layout, data)

    def write_tree(tree: Any) -> int:
      write(tree)
      return layout.nbytes

    return Slot(write_tree, lambda length: read())

  # Compressed numbers are converted by `read`, so the results are no views.
  gives_views = all(field.stored == field.dtype for field in layout.fields)
  return SlotFormat(
    layout.nbytes, open_tree, is_fixed=True, gives_views=gives_views
  )


def _format_of_any_length(
  nbytes: int,
  write: Callable[[Any, np.ndarray], Any],
  read: Callable[[np.ndarray], Any],
) -> SlotFormat:
  """Returns the format of contents of any length up to `nbytes`."""

  def open_bytes(data: np.ndarray) -> Slot:
    return Slot(
      lambda content: write(content, data), lambda length: read(data[:length])
    )

  return SlotFormat(nbytes, open_bytes)


def _write_code(
  layout: packing.CodeLayout, code: Any, slot: np.ndarray
) -> Any:
  """Writes a code, packed (uint8[n]) or not; returns its number of bytes."""
  if not isinstance(code, np.ndarray):
    return packing.pack(layout, code, slot)
  if code.size > len(slot):
    raise packing.BadCode(
      f"a packed message of {code.size:,} bytes, where a message of this model"
      f" and codec has at most {len(slot):,}"
    )
  return _write_bytes(code, slot)


def _write_bytes(data: np.ndarray, slot: np.ndarray) -> int:
  slot[: data.size] = data
  return data.size


def contents(
  codec: compression.Codec | None, params: Any, *, updates: bool
) -> tuple[Any, ...]:
  """Returns the contents of a shard's slots, as `like` of `slots.SharedMemory`:
  for slots of params, of messages and, if the shard sends `updates` to workers,
  of updates. `params` may have only shapes and dtypes."""
  like = params, compression.layout(codec, params)
  # Updates with more bytes than the parameters are never sent.
  return (*like, wire.layout(params).nbytes) if updates else like
