"""Formats of slots: a tree as its bytes, a packed code, or bytes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asgd import compression, wire
from asgd.compression import packing


class Slot(NamedTuple):
  """The functions that write and read one slot."""

  # Content -> how many bytes it took. Raises BadCode for a packed code that is
  # longer than a slot.
  write: Callable[[Any], int]
  # Bytes of a content -> views for a tree, otherwise new arrays. Raises
  # BadCode.
  read: Callable[[int], Any]


class SlotFormat(NamedTuple):
  """How a content lies in a slot."""

  nbytes: int  # of a slot
  open: Callable[[np.ndarray], Slot]  # of its bytes, uint8[nbytes]
  fixed: bool = False  # each content has `nbytes`
  shared: bool = False  # `read` returns views of the slot

  def length(self, written: int) -> int:
    """Returns the bytes of a content, of which its slot claims so many: not
    more than a slot has."""
    return self.nbytes if self.fixed else min(max(written, 0), self.nbytes)


def slot_format(like: Any, *, compress: str | None = None) -> SlotFormat:
  """Returns the format for trees like one of shapes and dtypes, with numbers
  stored as `compress` of `wire.layout` says; for codes, packed or not, of a
  `packing.CodeLayout`; or for at most so many bytes, uint8[n], of an int."""
  if isinstance(like, packing.CodeLayout):
    write = functools.partial(_write_code, like)
    return _packed(like.most, write, functools.partial(packing.unpack, like))
  if isinstance(like, int):
    return _packed(like, _write_bytes, np.copy)
  layout = wire.layout(like, compress=compress)

  def open_tree(data):
    write, read = wire.opened(layout, data)

    def write_tree(tree):
      write(tree)
      return layout.nbytes

    return Slot(write_tree, lambda length: read())

  shared = all(field.stored == field.dtype for field in layout.fields)
  return SlotFormat(layout.nbytes, open_tree, fixed=True, shared=shared)


def _packed(nbytes, write, read):
  """The format of contents of any length up to `nbytes`."""

  def open_bytes(data):
    return Slot(
      lambda content: write(content, data), lambda length: read(data[:length])
    )

  return SlotFormat(nbytes, open_bytes)


def _write_code(layout, code, slot):
  if not isinstance(code, np.ndarray):
    return packing.pack(layout, code, slot)
  if code.size > len(slot):
    raise packing.BadCode(
      f"a packed message of {code.size:,} bytes, where {len(slot):,} is the"
      " most that one of this model and codec has"
    )
  return _write_bytes(code, slot)


def _write_bytes(data, slot):
  slot[: data.size] = data
  return data.size


def contents(
  codec: compression.Codec | None, params: Any, *, updates: bool
) -> tuple[Any, ...]:
  """Returns the contents of a shard's slots of params, messages and, if workers
  are sent these, updates, as `slots.SharedMemory` takes them; shapes and dtypes
  of the shard's parameters are enough."""
  like = params, compression.layout(codec, params)
  return (*like, wire.layout(params).nbytes) if updates else like
