"""Checks of steps: options that exclude one another, batches, and layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from asgd import base, models, problems
from asgd.parallel import meshes

# Beginnings of errors, for `check_alone`.
PMAP = "the form 'pmap' (use 'shard_map') needs"
REDUCER = "compressed gradients need"
SEARCH = "an optimizer that searches along a line (lbfgs) needs"
ISLANDS = "local steps need"
# Values of options that a reducer and a search along a line need. In a search
# each device decides by numbers that it computes from the whole parameters.
REDUCER_VALUES = {"zero": 0, "form": "shard_map"}
SEARCH_VALUES = {**REDUCER_VALUES, "clip_norm": None, "reducer": None}
# Islands run the recipe's worker and server, which have none of these options.
ISLANDS_VALUES = {**REDUCER_VALUES, "accumulate": 1, "precision": "unchanged"}
ISLANDS_VALUES |= {"loss_scale": None, "compress": None}


def check_alone(
  beginning: str,
  mesh: Mesh,
  options: Mapping[str, Any],
  needed: Mapping[str, Any],
  axes: Sequence[str] = (meshes.DATA,),
) -> None:
  """Raises ValueError for an option that has another value than `needed`, or a
  mesh with an axis that is none of `axes`. `beginning` is the subject and the
  verb of the message."""
  for name, value in needed.items():
    if options[name] != value:
      raise ValueError(
        f"{beginning} {name}={_as_text(value)}, not {_as_text(options[name])}"
      )
  if set(mesh.axis_names) - set(axes):
    names = " and ".join(map(repr, axes))
    raise ValueError(
      f"{beginning} a mesh of the axis {names} alone, not of"
      f" {tuple(mesh.axis_names)}"
    )


def _as_text(value: Any) -> str:
  """Returns plain data as code, and any other value as its name or type."""
  if value is None or isinstance(value, str | int | float):
    return repr(value)
  return getattr(value, "__name__", f"a {type(value).__name__}")


def layers_of(pieces: problems.Pieces) -> models.Layers:
  """Returns the layers of a problem's pieces."""
  layers = pieces.layers
  # A problem has no pieces if its model cannot be cut (`problems.problem`).
  assert not isinstance(layers, models.Model)
  return layers


def check_batch(batch: base.Batch, pieces: int) -> None:
  """Raises ValueError for a batch that cannot be cut into `pieces` pieces."""
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
