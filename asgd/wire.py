"""A tree of arrays as bytes, in shared memory or in a message.

Sender and receiver know structure, shapes and dtypes, so only elements are
sent. A `Layout` puts each leaf at a multiple of 64 bytes, in the machine's byte
order. Writing copies each leaf once; reading returns views.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # bytes: a cache line; XLA needs it to alias a buffer
COMPRESSIONS = (None, "bfloat16")


class Field(NamedTuple):
  """The location of a leaf in a buffer."""

  path: str  # like ['w'], for errors
  offset: int  # bytes
  shape: tuple[int, ...]
  dtype: np.dtype  # in the tree
  stored: np.dtype  # in the buffer

  @property
  def stop(self) -> int:
    """The offset behind the leaf, in bytes."""
    return self.offset + math.prod(self.shape) * self.stored.itemsize


class Layout(NamedTuple):
  """The locations of a tree's leaves in a buffer; equal for equal trees."""

  structure: jax.tree_util.PyTreeDef
  fields: tuple[Field, ...]  # in jax.tree.leaves order
  nbytes: int  # of the buffer, a multiple of ALIGNMENT


def layout(tree: Any, *, compress: str | None = None) -> Layout:
  """Returns the Layout of `tree`, which depends on its structure, shapes and
  dtypes alone. Raises ValueError for an unknown compression, or for leaves that
  are not numbers.

  `compress="bfloat16"` stores floats of 32 and 64 bits in 16. Each is rounded
  to the nearest, ties to even (float64 first to float32). The relative error of
  a normal number is at most 2^-8; a number of 3.3962e38 or more becomes an
  infinity. Other dtypes are stored unchanged, and NaN stays NaN.
  """
  if compress not in COMPRESSIONS:
    raise ValueError(
      f"compress must be one of {COMPRESSIONS}, not {compress!r}"
    )
  leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  fields, end = [], 0
  for path, leaf in leaves:
    name = jax.tree_util.keystr(path)
    shape, dtype = shape_and_dtype(name, leaf)
    stored = dtype
    if compress and dtype in (np.float32, np.float64):
      stored = np.dtype(jnp.bfloat16)
    fields.append(Field(name, end, shape, dtype, stored))
    # Round up to the next multiple of ALIGNMENT.
    end = -(-fields[-1].stop // ALIGNMENT) * ALIGNMENT
  return Layout(structure, tuple(fields), end)


def shape_and_dtype(path: str, x: Any) -> tuple[tuple[int, ...], np.dtype]:
  """Returns the shape and dtype of a leaf in a layout; the dtype has the
  machine's byte order. Raises ValueError, naming the path, for a leaf that is
  not numbers."""
  x = x if hasattr(x, "dtype") else np.asarray(x)
  # JAX decides: NumPy does not know the dtypes of random keys, nor that
  # bfloat16 and smaller floats are numbers.
  is_number = jnp.issubdtype(x.dtype, jnp.number)
  if not is_number and not jnp.issubdtype(x.dtype, jnp.bool_):
    raise ValueError(
      f"the leaf {path} has dtype {x.dtype}, which is no number; send a random"
      " key as jax.random.key_data(key)"
    )
  return tuple(x.shape), np.dtype(x.dtype).newbyteorder("=")


def checked_leaves(fields: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
  """Returns leaves as arrays of NumPy or jax. Raises ValueError if one does not
  have the shape and dtype of its field."""
  # Keep this loop fast: it and the loop of `write` take most of the time of a
  # message of a few MB.
  leaves = [x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
  for field, x in zip(fields, leaves, strict=True):
    if x.shape != field.shape or x.dtype != field.dtype:
      raise ValueError(
        f"the leaf {field.path} is {x.dtype}{list(x.shape)}, but the layout has"
        f" {field.dtype}{list(field.shape)}"
      )
  return leaves


def write(layout: Layout, tree: Any, buffer: Any) -> None:
  """Copies the leaves of a tree to their offsets in a writable buffer.

  Leaves are NumPy arrays, or jax arrays of any device. The buffer has at least
  `nbytes`; bytes between and behind the leaves stay unchanged. Raises
  ValueError, before it writes anything, for a tree of another layout or a
  buffer that is too small."""
  leaves = _leaves(layout, tree)
  data = _bytes(layout, buffer)
  if not data.flags.writeable:
    raise ValueError("the buffer is read-only")
  _copy(leaves, [_view(field, data) for field in layout.fields])


def opened(
  layout: Layout, buffer: Any
) -> tuple[Callable[[Any], None], Callable[[], Any]]:
  """Returns (write, read) of a writable buffer that is used many times.

  `write(tree)` and `read()` do the same as the functions of this module, but
  create the views of the leaves only once.
  """
  data = _bytes(layout, buffer)
  targets = [_view(field, data) for field in layout.fields]
  # A leaf that is stored in another dtype has no view: each read converts it.
  views = jax.tree.leaves(read(layout, buffer))
  is_converted = any(field.stored != field.dtype for field in layout.fields)

  def write_tree(tree: Any) -> None:
    _copy(_leaves(layout, tree), targets)

  def read_tree() -> Any:
    if is_converted:
      return read(layout, buffer)
    return jax.tree.unflatten(layout.structure, views)

  return write_tree, read_tree


def _leaves(layout: Layout, tree: Any) -> list[Any]:
  """Returns the leaves of a tree of this layout, as arrays."""
  leaves, structure = jax.tree.flatten(tree)
  if structure != layout.structure:
    raise ValueError(_difference(layout, tree, structure))
  return checked_leaves(layout.fields, leaves)


def _copy(leaves: Sequence[Any], targets: Sequence[np.ndarray]) -> None:
  """Copies each leaf to its view of a buffer."""
  # Start all transfers from another device before waiting for the first one.
  # Leaves on the CPU need no transfer: they are copied once, into the buffer.
  if leaves and _is_off_cpu(leaves[0]):
    for x in leaves:
      if isinstance(x, jax.Array):
        x.copy_to_host_async()
  for target, x in zip(targets, leaves, strict=True):
    x = x if type(x) is np.ndarray else np.asarray(x)
    if target.dtype == x.dtype:
      target[...] = x
    else:  # a number too large for the stored dtype becomes an infinity
      with np.errstate(over="ignore"):
        target[...] = x


def read(layout: Layout, buffer: Any) -> Any:
  """Returns the tree in a buffer as read-only NumPy arrays: views of the
  buffer, or copies of leaves that are stored in another dtype. Raises
  ValueError if the buffer is too small."""
  data = _bytes(layout, buffer)
  leaves = []
  for field in layout.fields:
    x = _view(field, data)
    if field.stored != field.dtype:
      x = x.astype(field.dtype)
    # A write would change the buffer, which others may still read.
    x.flags.writeable = False
    leaves.append(x)
  return jax.tree.unflatten(layout.structure, leaves)


def _difference(
  layout: Layout, tree: Any, structure: jax.tree_util.PyTreeDef
) -> str:
  """Returns an error text: how a tree differs from the layout's tree."""
  layout_paths = [field.path for field in layout.fields]
  leaves = jax.tree.leaves_with_path(tree)
  tree_paths = [jax.tree_util.keystr(path) for path, _ in leaves]
  missing = [path for path in layout_paths if path not in tree_paths]
  extra = [path for path in tree_paths if path not in layout_paths]
  if not missing and not extra:
    return f"the layout is of a {layout.structure}, not of a {structure}"
  return (
    "the layout is of another tree: only the layout has"
    f" {', '.join(missing) or 'nothing'}, only the tree has"
    f" {', '.join(extra) or 'nothing'}"
  )


def _is_off_cpu(x: Any) -> bool:
  """Whether an array is a JAX array on a device that is not a CPU."""
  return isinstance(x, jax.Array) and _has_accelerator(x.sharding)


@functools.lru_cache(maxsize=32)  # each message asks again
def _has_accelerator(sharding: jax.sharding.Sharding) -> bool:
  return any(device.platform != "cpu" for device in sharding.device_set)


def _bytes(layout: Layout, buffer: Any) -> np.ndarray:
  """Returns the buffer as uint8[nbytes]; ValueError if it does not fit."""
  data = buffer
  if not isinstance(buffer, np.ndarray):
    is_empty = not memoryview(buffer).nbytes  # frombuffer refuses an empty one
    data = (
      np.empty(0, np.uint8) if is_empty else np.frombuffer(buffer, np.uint8)
    )
  if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
    raise ValueError(
      f"the buffer must be uint8[{layout.nbytes}] in one piece, not"
      f" {data.dtype}{list(data.shape)}"
    )
  if data.size < layout.nbytes:
    raise ValueError(
      f"the buffer has {data.size} bytes, the layout needs {layout.nbytes}"
    )
  return data


def _view(field: Field, data: np.ndarray) -> np.ndarray:
  """Returns a leaf as a view of the buffer, in the stored dtype."""
  return np.ndarray(field.shape, field.stored, data, field.offset)
