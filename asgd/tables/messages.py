"""Messages between clients and the server: plain data.

A list of keys that the receiver has cached is sent as its digest (key caching).
Values are an array, or the packet of a codec.
"""

import collections
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import compression
from asgd.compression import packing
from asgd.tables import functions
from asgd.tables.keys import Keys

_HEADER_BYTES = 16  # of a message: kind, sender, clock
_MAX_LISTS = 64  # lists of keys that each side remembers


class KeyList(NamedTuple):
  """Keys in a message."""

  digest: bytes  # 8 bytes, of the keys
  keys: Keys | None  # None: the receiver has cached them

  @property
  def nbytes(self) -> int:
    """Bytes on the wire."""
    return len(self.digest) + (0 if self.keys is None else 8 * len(self.keys))


class RowValues(NamedTuple):
  """Values for rows of one table."""

  keys: KeyList
  values: Any  # a NumPy array [n, ...], or a codec's packet as bytes

  @property
  def nbytes(self) -> int:
    """Bytes on the wire."""
    values = self.values
    size = len(values) if isinstance(values, bytes) else values.nbytes
    return self.keys.nbytes + size


class Push(NamedTuple):
  """A worker's message at the end of a clock, or of a job."""

  worker: int
  clock: int  # clocks that the worker has finished with this message
  tables: Mapping[str, RowValues]

  @property
  def nbytes(self) -> int:
    """Bytes on the wire."""
    return _HEADER_BYTES + sum(
      row_values.nbytes for row_values in self.tables.values()
    )


class Rows(NamedTuple):
  """Rows that the server sends to a worker: the requested rows, or changed rows
  of which the worker has copies."""

  clock: int  # the least of all workers' clocks
  tables: Mapping[str, tuple[Keys, Any]]  # name -> (keys, rows [n, ...])
  asked: bool = True  # whether the worker requested them: then it has the keys
  # In a server push at the end of a clock: keys of copies that stay outdated,
  # because `tables` lacks them; all other copies of the worker are now as of
  # `clock`. Otherwise None.
  late: Mapping[str, Keys] | None = None

  @property
  def nbytes(self) -> int:
    """Bytes on the wire."""
    size = _HEADER_BYTES
    for keys, rows in self.tables.values():
      size += rows.nbytes + (0 if self.asked else 8 * len(keys))
    return size + sum(8 * len(keys) for keys in (self.late or {}).values())


class KeyCache:
  """One side's cache of lists of keys. A sender and a receiver that process the
  same lists in the same order have the same cache.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> sender, receiver = tables.KeyCache(), tables.KeyCache()
    >>> keys = np.arange(1000)
    >>> first, again = sender.pack(keys), sender.pack(keys)
    >>> first.nbytes, again.nbytes
    (8008, 8)
    >>> receiver.unpack(first).size, receiver.unpack(again).size
    (1000, 1000)
  """

  def __init__(
    self,
    lists: Iterable[tuple[bytes, Keys]] = (),
    *,
    sends_digests: bool = True,
  ):
    """Takes the cached (digest, keys), the oldest first. Without
    `sends_digests` a sender sends every list in full."""
    self.lists = collections.OrderedDict(lists)
    self._sends_digests = sends_digests

  def _remember(self, digest: bytes, keys: Keys) -> None:
    """Caches a list as the latest, and drops the oldest beyond `_MAX_LISTS`."""
    self.lists[digest] = keys
    self.lists.move_to_end(digest)
    if len(self.lists) > _MAX_LISTS:
      self.lists.popitem(last=False)

  def pack(self, keys: Keys) -> KeyList:
    """Returns the KeyList to send, and caches the keys."""
    digest = hashlib.blake2b(keys.tobytes(), digest_size=8).digest()
    is_known = self._sends_digests and digest in self.lists
    self._remember(digest, keys)
    return KeyList(digest, None if is_known else keys)

  def unpack(self, key_list: KeyList) -> Keys:
    """Returns the keys of a message, and caches them.

    Raises:
      KeyError: for a digest that is not cached; the sender must send the keys.
    """
    keys = (
      self.lists[key_list.digest] if key_list.keys is None else key_list.keys
    )
    self._remember(key_list.digest, keys)
    return keys


class ValueCodec:
  """A codec for values of any number of rows.

  Values are padded to a power of two of rows, so that the codec is compiled for
  few shapes. The client, not this class, does the error feedback: it keeps the
  part of the values that the codec leaves out.
  """

  def __init__(self, name: str, **options: Any):
    """Takes the arguments of `compression.named`."""
    self._codec = compression.named(name, error_feedback=False, **options)
    if self._codec.feedback == compression.codec.OWN:
      raise ValueError(
        f"codec {name!r} keeps the part of values that it does not send, which"
        " needs values of one fixed shape; use another codec for rows, such as"
        " top_k or int8"
      )
    self._encode = jax.jit(
      lambda x, rng_key: self._codec.encode(self._codec.init(x), x, rng_key)[0]
    )
    self._decode = jax.jit(self._codec.decode)
    self._layout = functools.cache(self._make_layout)

  def _make_layout(self, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the layout of a packet for values of a shape."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    rng_key = jax.eval_shape(lambda: jax.random.key(0))
    return packing.layout(jax.eval_shape(self._encode, like, rng_key))

  def pack(self, values: np.ndarray, key: jax.Array) -> bytes:
    """Returns values [n, ...] as a packet; `key` is the codec's JAX key."""
    padded_values = functions.padded(values, functions.bucket(len(values)))
    code = jax.device_get(self._encode(padded_values, key))
    return bytes(
      packing.pack(self._layout(padded_values.shape, padded_values.dtype), code)
    )

  def unpack(
    self, packet: bytes, count: int, shape: tuple[int, ...], dtype: Any
  ) -> np.ndarray:
    """Returns the values [count, *shape] of a packet."""
    padded_shape = functions.bucket(count), *shape
    code = packing.unpack(self._layout(padded_shape, np.dtype(dtype)), packet)
    return np.asarray(self._decode(code))[:count]
