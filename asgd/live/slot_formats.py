"""Formats of slots: a tree as its bytes, a packed code, or bytes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asgd import compression, wire
from asgd.compression import packing


class SlotFormat(NamedTuple):
  """How a content lies in a slot."""

  nbytes: int  # of a slot
  # (content, uint8[nbytes]) -> how many bytes it took. Raises BadCode for a
  # packed code that is longer than a slot.
  write: Callable[[Any, np.ndarray], int]
  # Bytes of a content -> views for a tree, otherwise arrays of its own. Raises
  # BadCode.
  read: Callable[[np.ndarray], Any]
  fixed: bool = False  # each content has `nbytes`

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
    return SlotFormat(like.most, write, functools.partial(packing.unpack, like))
  if isinstance(like, int):
    return SlotFormat(like, _write_bytes, np.copy)
  layout = wire.layout(like, compress=compress)

  def write_tree(tree, slot):
    wire.write(layout, tree, slot)
    return layout.nbytes

  read = functools.partial(wire.read, layout)
  return SlotFormat(layout.nbytes, write_tree, read, fixed=True)


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
