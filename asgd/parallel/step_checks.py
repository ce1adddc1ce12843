"""What data parallel steps refuse: forms, reducers, searches and batches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from asgd import base
from asgd.parallel import meshes
from asgd.parallel import zero as zero_lib

# Options of a step whose optimizer searches along a line.
OF_A_SEARCH = {
  "form": "shard_map",
  "zero": 0,
  "clip_norm": None,
  "reducer": None,
}


def check_pmap(mesh: Mesh, zero: int, specs: zero_lib.Specs) -> None:
  """Raises ValueError for a step that the form "pmap" cannot make."""
  if tuple(mesh.axis_names) != (meshes.DATA,):
    raise ValueError(
      f"the form 'pmap' is for a mesh of the axis {meshes.DATA!r} alone, not of"
      f" {tuple(mesh.axis_names)}; use 'shard_map'"
    )
  if zero or specs is not zero_lib.replicated:
    raise ValueError(
      "the form 'pmap' keeps everything whole on each device; use 'shard_map'"
      f" for zero={zero!r} or parameters that are divided"
    )
  if jax.process_count() > 1:
    raise ValueError(
      f"the form 'pmap' is for one process, not {jax.process_count()}; use"
      " 'shard_map'"
    )


def check_reducer(mesh: Mesh, zero: int, form: str) -> None:
  """Raises ValueError for a step that takes no reducer."""
  if tuple(mesh.axis_names) != (meshes.DATA,) or zero or form != "shard_map":
    raise ValueError(
      f"compressed gradients are for a mesh of the axis {meshes.DATA!r} alone,"
      f" zero=0 and the form 'shard_map', not for {tuple(mesh.axis_names)},"
      f" zero={zero!r} and {form!r}"
    )


def check_search(mesh: Mesh, **options: Any) -> None:
  """Raises ValueError for a step that cannot be made with a search, which
  decides by numbers that each device computes from the whole parameters."""
  for name, value in options.items():
    if value != OF_A_SEARCH[name]:
      raise ValueError(
        "an optimizer that searches along a line (lbfgs) needs"
        f" {name}={OF_A_SEARCH[name]!r}, not {_shown(value)}"
      )
  if tuple(mesh.axis_names) != (meshes.DATA,):
    raise ValueError(
      "an optimizer that searches along a line (lbfgs) needs a mesh of the axis"
      f" {meshes.DATA!r} alone, not of {tuple(mesh.axis_names)}"
    )


def _shown(value):
  """A value of plain data; of anything else, what it is."""
  if isinstance(value, str | int | float):
    return repr(value)
  return f"a {type(value).__name__}"


def check_batch(batch: base.Batch, pieces: int) -> None:
  """Raises ValueError for a batch that cannot be cut into so many pieces."""
  shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
  lengths = {shape[:1] for shape in shapes}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      "all arrays of a batch must have one leading axis, of examples; not"
      f" {sorted(shapes)}"
    )
  ((length,),) = lengths
  if length % pieces or not length:
    raise ValueError(
      f"a batch of {length} examples cannot be divided into {pieces} pieces"
      " (devices of the data axis times accumulate): use a multiple"
    )
