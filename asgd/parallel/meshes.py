"""Meshes of devices, and the placement of arrays on them.

A mesh is a grid of devices with named axes: "data" for replicas, "island" for
the devices of a replica that takes local steps, "tensor" for the parts of a
layer, "rows" and "columns" for the parts of an image, "pipe" for stages. The
devices may belong to several processes, which then all call the same functions.

Inside shard_map with check_vma (the default) JAX tracks over which axes a value
varies. Where an operation combines a value that does not vary with a value that
varies, JAX casts the former, and the derivative of the cast is a sum over the
axis. `vary` is this cast.
"""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asgd import checks, internals

DATA, TENSOR, PIPE = "data", "tensor", "pipe"  # names of axes
ROWS, COLUMNS = "rows", "columns"
ISLAND = "island"
# Devices of a process. JAX takes a device above this number for a device of
# another process.
MAX_DEVICES = 2048


def cpu_devices() -> int:
  """Returns how many CPU devices JAX makes when it starts; -1 is JAX's default.
  """
  count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
  return count


def want_cpu_devices(count: int) -> None:
  """Gives JAX at least `count` CPU devices if it has not started yet. Raises
  ValueError for more than a process can have."""
  # Of several processes, which have started JAX, each has a part of `count`.
  if count > MAX_DEVICES and not internals.has_devices():
    raise ValueError(
      f"{count:,} devices are too many: JAX makes at most {MAX_DEVICES:,} in a"
      " process; use a smaller mesh"
    )
  if cpu_devices() < count:
    with contextlib.suppress(RuntimeError):  # JAX has started
      jax.config.update("jax_num_cpu_devices", count)


def find_devices() -> None:
  """Starts JAX; raises ValueError if it finds no device."""
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    # JAX raises AssertionError for a platform that is not installed.
    raise ValueError(
      f"JAX finds no device: {str(error) or 'none'}; see the variable"
      f" JAX_PLATFORMS, which is {os.environ.get('JAX_PLATFORMS', 'not set')}"
    ) from error


def make(
  shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Lays devices out in a grid, with all axes `AxisType.Auto`.

  Args:
    shape: size of each axis, outermost first. One size may be -1: this axis
      gets all devices that are left.
    devices: the devices; None: those of all processes. If there are more than
      the mesh has, a single process uses the first of them.

  Raises:
    ValueError: for no axis, for a size that is not positive and whole, for
      fewer devices than the mesh has, and for more devices if there are several
      processes.

  Example:
    >>> make({"data": 1, "tensor": 1}).shape_tuple
    (('data', 1), ('tensor', 1))
  """
  devices = list(jax.devices() if devices is None else devices)
  if not shape:
    raise ValueError("a mesh needs an axis, as {'data': 8}")
  sizes = dict(shape)
  unsized = [name for name, size in sizes.items() if size == -1]
  if len(unsized) > 1:
    raise ValueError(
      f"only one axis can have all remaining devices, not {unsized}"
    )
  for name, size in sizes.items():
    if size != -1:
      checks.integer(f"the size of the mesh's axis {name!r}", size)
  if unsized:
    n_others = -math.prod(sizes.values())  # the unsized axis is -1
    if len(devices) % n_others:
      raise ValueError(
        f"{len(devices)} devices cannot be divided by {n_others}, the other"
        f" axes of the mesh {text(sizes)}"
      )
    sizes[unsized[0]] = max(len(devices) // n_others, 1)
  n_devices = math.prod(sizes.values())
  if n_devices > len(devices):
    raise ValueError(
      f"the mesh {text(sizes)} needs {n_devices} devices and there are"
      f" {len(devices)}; for {n_devices} on this host's CPU, call"
      f" jax.config.update('jax_num_cpu_devices', {n_devices}) before JAX is"
      " used (and set JAX_PLATFORMS=cpu)"
    )
  if n_devices < len(devices) and jax.process_count() > 1:
    raise ValueError(
      f"the mesh {text(sizes)} needs {n_devices} devices and the"
      f" {jax.process_count()} processes have {len(devices)}: use all of them"
    )
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  devices, lengths = devices[:n_devices], tuple(sizes.values())
  # jax.make_mesh orders the devices of one slice for fast links. The order of
  # several slices is kept: devices of a slice are together, slices outermost.
  if len({getattr(device, "slice_index", None) for device in devices}) > 1:
    grid = np.array(devices).reshape(lengths)
    return Mesh(grid, tuple(sizes), axis_types=axis_types)
  return jax.make_mesh(
    lengths, tuple(sizes), axis_types=axis_types, devices=devices
  )


def text(sizes: Mapping[str, int]) -> str:
  """Returns a mesh as text: "data 2 x tensor 4"."""
  return " x ".join(f"{name} {size}" for name, size in sizes.items())


def size(mesh: Mesh, axis: str) -> int:
  """Returns how many devices an axis has; ValueError for an unknown axis."""
  if axis not in mesh.shape:
    raise ValueError(
      f"the mesh has axes {tuple(mesh.axis_names)} and none named {axis!r}"
    )
  return mesh.shape[axis]


def place(tree: Any, mesh: Mesh, specs: Any = None) -> Any:
  """Puts whole arrays on a mesh as global arrays: each device has its part.

  Args:
    tree: a tree of arrays. Every process has the same arrays, or the arrays are
      global already. Given shapes (jax.ShapeDtypeStruct), the result is these
      shapes with shardings.
    mesh: a mesh of the devices of one or more processes.
    specs: a tree of PartitionSpecs like `tree`, or one PartitionSpec for all
      leaves; None puts each array on every device.

  Raises:
    ValueError: for a PartitionSpec that does not divide its array.
  """
  common = PartitionSpec() if specs is None else specs
  if isinstance(common, PartitionSpec):
    specs = jax.tree.map(lambda _: common, tree)

  def put(path, x, spec):
    sharding = NamedSharding(mesh, spec)
    try:
      sharding.shard_shape(np.shape(x))
    except (IndexError, ValueError) as error:  # too few axes, or not divided
      raise ValueError(
        f"the array {jax.tree_util.keystr(path) or '(the only one)'} of shape"
        f" {np.shape(x)} cannot be divided as {spec} over the mesh"
        f" {text(mesh.shape)}"
      ) from error
    if isinstance(x, jax.ShapeDtypeStruct):
      return x.update(sharding=sharding)
    if isinstance(x, jax.core.Tracer):
      return jax.lax.with_sharding_constraint(x, sharding)
    # A global array of several processes: only a program can move it.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if jax.process_count() == 1:
      return jax.device_put(x, sharding)
    # Without x64 float64 becomes float32, as in jax.device_put.
    x = np.asarray(x)
    x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree_util.tree_map_with_path(put, tree, specs)


def are_shapes(tree: Any) -> bool:
  """Returns whether the leaves are jax.ShapeDtypeStruct instead of arrays."""
  leaves = jax.tree.leaves(tree)
  return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def place_batch(batch: Any, mesh: Mesh) -> Any:
  """Puts a batch on a mesh, the examples divided over the axis "data"."""
  size(mesh, DATA)
  return place(batch, mesh, PartitionSpec(DATA))


def repeat(tree: Any, count: int) -> Any:
  """Repeats each leaf on a new leading axis."""
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree
  )


def bytes_here(tree: Any) -> int:
  """Returns the bytes that the first local device holds of global arrays."""
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
    if shard.device == jax.local_devices()[0]
  )


def part(x: jax.Array, axis: str, dim: int) -> jax.Array:
  """Returns this device's part of an array along `dim`, inside shard_map."""
  length = x.shape[dim] // jax.lax.axis_size(axis)
  start = jax.lax.axis_index(axis) * length
  return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


def replicated(tree: Any, mesh: Mesh) -> Any:
  """Copies global arrays; every device gets the whole arrays."""
  return copy(tree, NamedSharding(mesh, PartitionSpec()))


def copy(tree: Any, shardings: Any) -> Any:
  """Copies arrays to the given shardings, for a step that donates the copies.
  """
  return jax.jit(_copy_leaves, out_shardings=shardings)(tree)


def _copy_leaves(tree: Any) -> Any:  # a function that JAX compiles once
  return jax.tree.map(jnp.copy, tree)


def varying(x: jax.Array) -> frozenset[str]:
  """Returns the manual axes over which a traced value may vary. There are none
  outside shard_map and with check_vma=False."""
  return jax.typeof(x).mat.varying


def vary(tree: Any, axes: str | Sequence[str]) -> Any:
  """Casts values so that they vary over `axes`, too. The derivative of the cast
  is a sum over these axes. With check_vma=False `vary` is the identity."""
  axes = (axes,) if isinstance(axes, str) else tuple(axes)

  def cast(x):
    # pcast refuses an axis over which the value varies already.
    new_axes = tuple(axis for axis in axes if axis not in varying(x))
    return jax.lax.pcast(x, new_axes, to="varying") if new_axes else x

  return jax.tree.map(cast, tree)
