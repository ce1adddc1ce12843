"""What lies in a slot: a tree as its bytes, a code that is packed, or bytes."""

from typing import Any, NamedTuple

import numpy as np

from asgd import compression, wire
from asgd.compression import packing


class DenseFormat(NamedTuple):
  """A tree of arrays, as `asgd.wire` lays it out: always as many bytes."""

  layout: wire.Layout

  @property
  def nbytes(self) -> int:
    """The bytes that a slot is to have."""
    return self.layout.nbytes

  def write(self, tree: Any, slot: np.ndarray) -> int:
    """Copies a tree into a slot; returns how many bytes that took."""
    wire.write(self.layout, tree, slot)
    return self.layout.nbytes

  def length(self, written: int) -> int:
    """Returns the bytes of a content, of which so many are said to be."""
    del written
    return self.layout.nbytes

  def read(self, data: np.ndarray) -> Any:
    """Returns views of a slot's bytes."""
    return wire.read(self.layout, data)


class Packed(NamedTuple):
  """A code, packed: each takes what it needs, `nbytes` at most."""

  layout: packing.CodeLayout

  @property
  def nbytes(self) -> int:
    """The bytes that a slot is to have."""
    return self.layout.most

  def write(self, code: Any, slot: np.ndarray) -> int:
    """Packs a code, or copies one that is packed, into a slot; returns how many
    bytes that took. Raises BadCode for one that is longer than a slot."""
    if not isinstance(code, np.ndarray):
      return packing.pack(self.layout, code, slot)
    if code.size > len(slot):
      raise packing.BadCode(
        f"a packed message of {code.size:,} bytes, where {len(slot):,} is the"
        " most that one of this model and codec has"
      )
    slot[: code.size] = code
    return code.size

  def length(self, written: int) -> int:
    """Returns the bytes of a content, of which so many are said to be: not more
    than a slot has."""
    return min(max(written, 0), self.layout.most)

  def read(self, data: np.ndarray) -> Any:
    """Returns the code, of NumPy arrays of its own. Raises BadCode."""
    return packing.unpack(self.layout, data)


class Raw(NamedTuple):
  """Bytes, as many as there are, `nbytes` at most."""

  nbytes: int

  def write(self, data: np.ndarray, slot: np.ndarray) -> int:
    """Copies uint8[n] into a slot; returns n."""
    slot[: data.size] = data
    return data.size

  def length(self, written: int) -> int:
    """Returns the bytes of a content, of which so many are said to be: not more
    than a slot has."""
    return min(max(written, 0), self.nbytes)

  def read(self, data: np.ndarray) -> np.ndarray:
    """Returns a copy of a slot's bytes."""
    return data.copy()


Format = DenseFormat | Packed | Raw


def slot_format(like: Any, *, compress: str | None = None) -> Format:
  """Returns what slots hold: trees like one of shapes and dtypes, whose
  numbers are stored as `wire.layout` has `compress`; packed codes, if that is a
  `packing.CodeLayout`; or bytes, if it is how many they are at most."""
  if isinstance(like, packing.CodeLayout):
    return Packed(like)
  if isinstance(like, int):
    return Raw(like)
  return DenseFormat(wire.layout(like, compress=compress))


def contents(
  codec: compression.Codec | None, params: Any, *, updates: bool
) -> tuple[Any, ...]:
  """Returns what slots of params, messages and, if workers are sent these,
  updates hold, in the forms that `slots.SharedMemory` takes; the parameters are
  those of a shard, their shapes and dtypes are enough."""
  like = params, compression.layout(codec, params)
  return (*like, wire.layout(params).nbytes) if updates else like
