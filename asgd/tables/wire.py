"""Trees of arrays as bytes: what requests, answers and images travel as.

A tree is of dicts with names, lists, JSON and NumPy arrays. Its bytes are a
text, where an array is its number, and the arrays one after the other, each at
a multiple of 8 bytes. Nothing in it is run when it is read, as a pickle is.
"""

import json
from typing import Any

import numpy as np

_ALIGN = 8
_ARRAY = "#"  # a dict of this key alone is an array


def _padded(size):
  return -size % _ALIGN


def dump(tree: Any) -> bytes:
  """Returns a tree as bytes.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import wire
    >>> data = wire.dump({"keys": np.arange(3), "clock": 2})
    >>> wire.load(data)
    {'keys': array([0, 1, 2]), 'clock': 2}
  """
  arrays: list[np.ndarray] = []

  def plain(node):
    if isinstance(node, np.ndarray):
      arrays.append(np.ascontiguousarray(node))
      return {_ARRAY: len(arrays) - 1}
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
  """Returns the tree of some bytes; its arrays are views of them, which cannot
  be written to."""
  size = int.from_bytes(data[:_ALIGN], "little")
  at = _ALIGN + size
  text, like = json.loads(data[_ALIGN:at])
  arrays = []
  for name, shape in like:
    dtype, count = np.dtype(name), int(np.prod(shape, dtype=np.int64))
    x = np.frombuffer(data, dtype, count, at) if count else np.zeros(0, dtype)
    arrays.append(x.reshape(shape))
    at += count * dtype.itemsize + _padded(count * dtype.itemsize)

  def whole(node):
    if isinstance(node, list):
      return [whole(value) for value in node]
    if isinstance(node, dict):
      if node.keys() == {_ARRAY}:
        return arrays[node[_ARRAY]]
      return {name: whole(value) for name, value in node.items()}
    return node

  return whole(text)
