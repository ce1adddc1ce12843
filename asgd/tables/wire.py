"""Trees of arrays as bytes: what requests, answers and images travel as.

A tree is of dicts with names, lists, JSON, bytes and NumPy arrays. Its bytes
are a text, where an array is its number, and the arrays one after the other,
each at a multiple of 8 bytes. Nothing in it is run when it is read, as a pickle
is.
"""

import json
from typing import Any

import numpy as np

_ALIGN = 8
_ARRAY, _BYTES = "#", "$"  # a dict of this key alone is an array, or bytes


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
    if isinstance(node, np.ndarray | bytes):
      is_array = isinstance(node, np.ndarray)
      array = node if is_array else np.frombuffer(node, np.uint8)
      arrays.append(np.ascontiguousarray(array))
      return {_ARRAY if is_array else _BYTES: len(arrays) - 1}
    if isinstance(node, dict):
      return {name: plain(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
      return [plain(value) for value in node]
    return node

  text = plain(tree)
  like = [[x.dtype.name, x.shape] for x in arrays]
  head = json.dumps([text, like], separators=(",", ":")).encode()
  head += b" " * _padded(_ALIGN + len(head))
  parts = [len(head).to_bytes(_ALIGN, "little"), head]
  for x in arrays:
    parts += [x.tobytes(), b"\0" * _padded(x.nbytes)]
  return b"".join(parts)


def load(data: bytes) -> Any:
  """Returns the tree of some bytes, which shares no memory with them."""
  size = int.from_bytes(data[:_ALIGN], "little")
  at = _ALIGN + size
  text, like = json.loads(data[_ALIGN:at])
  arrays = []
  for name, shape in like:
    arrays.append(np.ndarray(shape, np.dtype(name), data, at).copy())
    at += arrays[-1].nbytes + _padded(arrays[-1].nbytes)

  def whole(node):
    if isinstance(node, list):
      return [whole(value) for value in node]
    if isinstance(node, dict):
      if node.keys() == {_ARRAY}:
        return arrays[node[_ARRAY]]
      if node.keys() == {_BYTES}:
        return arrays[node[_BYTES]].tobytes()
      return {name: whole(value) for name, value in node.items()}
    return node

  return whole(text)
