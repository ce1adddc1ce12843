"""Trees of arrays as bytes: what requests, answers and images travel as.

A tree is of dicts with names, lists, JSON, bytes and NumPy arrays. Its bytes
are a text, where an array is its number, and the arrays one after the other,
each at a multiple of 8 bytes. Nothing in it is run when it is read, as a pickle
is.
"""

import functools
import json
from typing import Any

import numpy as np

_ALIGN = 8
_ARRAY, _BYTES = "#", "$"  # a dict of this key alone is an array, or bytes

_SHORT = ",", ":"  # separators


@functools.cache
def _name(dtype):
  return dtype.name


def _padded(size):
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

  def plain(node):
    is_array = isinstance(node, np.ndarray)
    if not is_array and not isinstance(node, bytes):
      raise TypeError(f"{type(node).__name__} cannot be sent")
    array = node if is_array else np.frombuffer(node, np.uint8)
    arrays.append(np.ascontiguousarray(array))
    return {_ARRAY if is_array else _BYTES: len(arrays) - 1}

  text = json.dumps(tree, separators=_SHORT, default=plain)
  names = [[_name(x.dtype), x.shape] for x in arrays]
  head = f"[{text},{json.dumps(names, separators=_SHORT)}]".encode()
  head += b" " * _padded(_ALIGN + len(head))
  parts = [len(head).to_bytes(_ALIGN, "little"), head]
  for x in arrays:
    parts += [x.tobytes(), b"\0" * _padded(x.nbytes)]
  return b"".join(parts)


def load(data: bytes) -> Any:
  """Returns the tree of some bytes, which shares no memory with them."""
  size = int.from_bytes(data[:_ALIGN], "little")
  at = _ALIGN + size
  head = data[_ALIGN:at]
  tree, like = json.loads(head)
  arrays = []
  for name, shape in like:
    arrays.append(np.ndarray(shape, np.dtype(name), data, at).copy())
    at += arrays[-1].nbytes + _padded(arrays[-1].nbytes)

  def whole(node):
    if len(node) != 1:
      return node
    ((name, value),) = node.items()
    if name == _ARRAY:
      return arrays[value]
    return arrays[value].tobytes() if name == _BYTES else node

  # Once more, now that the arrays are there.
  return json.loads(head, object_hook=whole)[0] if arrays else tree
