"""Trees of arrays as bytes: the format of requests, replies and images.

A tree consists of dicts with string keys, lists, JSON values, bytes and NumPy
arrays. Its bytes are a JSON text with indices in place of arrays, and then the
arrays, each at a multiple of 8 bytes. Unlike a pickle, the data cannot run
code.
"""

import functools
import json
from typing import Any

import numpy as np

_ALIGN = 8
# A dict with one of these as its only key stands for an array, or for bytes.
_ARRAY, _BYTES = "#", "$"
_SHORT = ",", ":"  # JSON separators without spaces


@functools.cache
def _name(dtype):
  return dtype.name


def _padding(size):
  """Returns the bytes that fill up `size` to a multiple of _ALIGN."""
  return -size % _ALIGN


def dump(tree: Any) -> bytes:
  """Returns a tree as bytes.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import wire
    >>> data = wire.dump({"keys": np.arange(3), "clock": 2, "of": b"me"})
    >>> wire.load(data)
    {'keys': array([0, 1, 2]), 'clock': 2, 'of': b'me'}
  """
  arrays: list[np.ndarray] = []

  def store_array(node):
    is_array = isinstance(node, np.ndarray)
    if not is_array and not isinstance(node, bytes):
      raise TypeError(f"{type(node).__name__} cannot be sent")
    array = node if is_array else np.frombuffer(node, np.uint8)
    arrays.append(np.ascontiguousarray(array))
    return {_ARRAY if is_array else _BYTES: len(arrays) - 1}

  text = json.dumps(tree, separators=_SHORT, default=store_array)
  names_and_shapes = [[_name(array.dtype), array.shape] for array in arrays]
  head = f"[{text},{json.dumps(names_and_shapes, separators=_SHORT)}]".encode()
  head += b" " * _padding(_ALIGN + len(head))
  parts = [len(head).to_bytes(_ALIGN, "little"), head]
  for array in arrays:
    parts += [array.tobytes(), b"\0" * _padding(array.nbytes)]
  return b"".join(parts)


def load(data: bytes) -> Any:
  """Returns the tree that `dump` wrote; it shares no memory with the bytes."""
  size = int.from_bytes(data[:_ALIGN], "little")
  offset = _ALIGN + size
  head = data[_ALIGN:offset]
  tree, names_and_shapes = json.loads(head)
  arrays = []
  # Copies: views would be read-only and keep the buffer alive.
  for name, shape in names_and_shapes:
    arrays.append(np.ndarray(shape, np.dtype(name), data, offset).copy())
    offset += arrays[-1].nbytes + _padding(arrays[-1].nbytes)

  def restore_array(node):
    if len(node) != 1:
      return node
    ((name, value),) = node.items()
    if name == _ARRAY:
      return arrays[value]
    return arrays[value].tobytes() if name == _BYTES else node

  # The first parse gave the shapes of the arrays; this one inserts them.
  return json.loads(head, object_hook=restore_array)[0] if arrays else tree
