"""Plans: which rows of which leaf each shard of a server holds.

Each of S shards holds some rows (indices of the leading axis) of every leaf. It
runs the pure Server on these rows as if they were all parameters.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base
from asgd.checks import integer

SMALL = 64 * 1024  # bytes; leaves up to this size are split only if necessary


class ShardPlan(NamedTuple):
  """Which rows of which leaf a shard holds, for L leaves in jax.tree.leaves
  order. It holds plain numbers: it can be compared, printed and sent."""

  shards: int  # S
  shapes: tuple[tuple[int, ...], ...]  # [L], of the full leaves
  cuts: tuple[tuple[int, ...], ...]  # [L][S + 1], shard s: [cut[s], cut[s + 1])


def make_plan(params: optax.Params, shards: int) -> ShardPlan:
  """Splits parameters so that S shards hold about the same number of bytes.

  The leaves are laid end to end and cut at S - 1 points. Each point is the end
  of an equal part, moved to the nearest end of a piece. A piece is a row of a
  leaf, or a complete leaf if it is small: at most 64 KiB and at most an eighth
  of a shard. So a shard holds at most the S-th part and one piece more, and no
  shard is empty. If there are fewer pieces than shards, small leaves are split,
  too. Only shapes and dtypes are read. Raises ValueError if `shards` is not a
  positive integer, or is more than there are rows.

  Example:
    >>> params = {"b": np.zeros(6), "w": np.zeros((4, 3))}
    >>> make_plan(params, 2).cuts
    ((0, 6, 6), (0, 1, 4))
  """
  integer("shards", shards)
  leaves = [shape_of(x) for x in jax.tree.leaves(params)]
  rows = [x.shape[0] if x.shape else 1 for x in leaves]
  sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
  n_rows = sum(n for n, size in zip(rows, sizes, strict=True) if size)
  if shards > max(n_rows, 1):
    raise ValueError(
      f"shards must be at most {max(n_rows, 1)}, the rows (of the leading axes)"
      f" of these parameters, not {shards}"
    )
  nbytes = sum(sizes)
  small = min(SMALL, nbytes // (8 * shards))
  # Leaves without bytes need no shard.
  nonempty = [i for i, size in enumerate(sizes) if size]
  # [1] How many pieces each of these leaves has: its rows, or 1 if it is small.
  pieces = [1 if sizes[i] <= small else rows[i] for i in nonempty]
  if sum(pieces) < shards:
    pieces = [rows[i] for i in nonempty]
  first_piece = list(itertools.accumulate(pieces, initial=0))
  first_byte = list(
    itertools.accumulate((sizes[i] for i in nonempty), initial=0)
  )

  def nearest_piece(shard):
    """Returns the piece that starts nearest to the end of an equal part."""
    leaf = bisect.bisect_right(first_byte, shard * nbytes // shards) - 1
    # Both sizes are in S-ths of a byte, to stay with integers.
    offset = shard * nbytes - first_byte[leaf] * shards
    piece_size = (
      (first_byte[leaf + 1] - first_byte[leaf]) * shards // pieces[leaf]
    )
    # offset / piece_size, rounded to the nearest integer.
    return first_piece[leaf] + (2 * offset + piece_size) // (2 * piece_size)

  # [2] The first piece of each shard, and the end: S + 1 numbers that ascend.
  bounds = [0]
  for shard in range(1, shards):
    # Leave one piece for each of the later shards.
    latest = first_piece[-1] - (shards - shard)
    bounds.append(min(max(nearest_piece(shard), bounds[-1] + 1), latest))
  bounds.append(first_piece[-1])

  # [3] Bounds in pieces become cuts in rows of each leaf. A leaf without bytes
  # belongs to the first shard.
  cuts = [(0,) + (n,) * shards for n in rows]
  for i, start, count in zip(nonempty, first_piece, pieces, strict=False):
    step = rows[i] // count  # rows of a piece
    cuts[i] = tuple(min(max(b - start, 0), count) * step for b in bounds)
  return ShardPlan(shards, tuple(x.shape for x in leaves), tuple(cuts))


def trained_sizes(plan: ShardPlan, params: optax.Params) -> tuple[int, ...]:
  """Returns the trained elements (`base.weights_of`) of each shard, int[S]."""
  parts = split(plan, jax.tree.map(shape_of, params))
  return tuple(
    sum(math.prod(x.shape) for x in jax.tree.leaves(base.weights_of(part)))
    for part in parts
  )


def part(plan: ShardPlan, tree: optax.Params, shard: int) -> optax.Params:
  """Returns one shard's part of a tree of arrays, or of their shapes.

  Each leaf is a slice of the leading axis, without rows if the shard holds
  none; a leaf without axes becomes [1] or [0]. NumPy leaves are views, and jax
  leaves that are not divided are the given arrays. Raises ValueError if the
  shapes are not the plan's; dtypes may differ.
  """
  leaves, structure = jax.tree.flatten(tree)
  _check_shapes(tree, leaves, plan.shapes, "the plan")
  parts = [
    _rows(x, cut[shard], cut[shard + 1])
    for x, cut in zip(leaves, plan.cuts, strict=True)
  ]
  return jax.tree.unflatten(structure, parts)


def split(plan: ShardPlan, tree: optax.Params) -> list[optax.Params]:
  """Returns the `part` of each shard, S trees."""
  return [part(plan, tree, s) for s in range(plan.shards)]


def join(plan: ShardPlan, parts: Sequence[optax.Params]) -> optax.Params:
  """Joins the S parts of `split`: trees of one structure, with jax arrays on
  one device. A leaf that lies in one shard is not copied. Raises ValueError for
  another number of parts, or shapes that are not the plan's."""
  if len(parts) != plan.shards:
    raise ValueError(f"the plan has {plan.shards} shards, not {len(parts)}")
  structure: Any = jax.tree.structure(parts[0])
  leaves_of_part = []  # [S][L]
  for s, tree in enumerate(parts):
    leaves, part_structure = jax.tree.flatten(tree)
    if structure != part_structure:
      raise ValueError(f"part {s} is a {part_structure}, part 0 a {structure}")
    # A leaf without axes is [1] or [0] in a part.
    shapes = [
      (cut[s + 1] - cut[s], *shape[1:])
      for shape, cut in zip(plan.shapes, plan.cuts, strict=True)
    ]
    _check_shapes(tree, leaves, shapes, f"part {s} of the plan")
    leaves_of_part.append(leaves)
  full_leaves = []
  for i, (shape, cut) in enumerate(zip(plan.shapes, plan.cuts, strict=True)):
    # No shard has rows of an empty leaf: use the part of shard 0.
    owners = [s for s in range(plan.shards) if cut[s] < cut[s + 1]] or [0]
    pieces = [leaves_of_part[s][i] for s in owners]
    if len(pieces) == 1:
      full_leaves.append(pieces[0] if shape else pieces[0].reshape(()))
    else:
      # NumPy leaves stay NumPy: a transfer to a device would cost time.
      are_numpy = all(isinstance(x, np.ndarray) for x in pieces)
      full_leaves.append((np if are_numpy else jnp).concatenate(pieces))
  return jax.tree.unflatten(structure, full_leaves)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an array or a number."""
  x = x if hasattr(x, "dtype") else np.asarray(x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _rows(x: Any, start: int, stop: int) -> Any:
  """Returns rows [start, stop) of a leaf: a view if it is NumPy's."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((stop - start, *x.shape[1:]), x.dtype)
  x = x if isinstance(x, jax.Array) else np.asarray(x)
  x = x if x.ndim else x.reshape(1)
  return x if stop - start == x.shape[0] else x[start:stop]


def _check_shapes(
  tree: Any,
  leaves: Sequence[Any],
  shapes: Sequence[tuple[int, ...]],
  plan_name: str,
) -> None:
  """Raises ValueError unless the leaves of a tree have the shapes of a plan."""
  if len(leaves) != len(shapes):
    raise ValueError(
      f"a tree of {len(leaves)} leaves, where {plan_name} has {len(shapes)}"
    )
  for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True)):
    if np.shape(x) != shape:
      raise ValueError(
        f"the leaf {paths_of(tree)[i]} has shape {np.shape(x)}, in {plan_name}"
        f" {shape}"
      )


def paths_of(tree: Any) -> list[str]:
  """Returns the names of the leaves of a tree."""
  leaves = jax.tree.leaves_with_path(tree)
  return [jax.tree_util.keystr(path) or "(the only one)" for path, _ in leaves]


def combine(
  reports: Sequence[base.Report], sizes: Sequence[int]
) -> base.Report:
  """Makes the Report of a message from the S reports of its parts.

  The reports hold numbers, or columns of one length; `sizes` are the
  `trained_sizes`. The result holds NumPy arrays: root mean squares over all
  trained elements, the largest staleness, and `accepted` if all parts accepted
  the message.
  """
  if len(reports) != len(sizes) or not reports:
    raise ValueError(f"{len(reports)} reports and {len(sizes)} sizes")

  def column(field):
    return np.stack([np.asarray(getattr(report, field)) for report in reports])

  def rms(field):
    # The weight of a part's mean square is its number of elements, or 0.
    squares = np.square(column(field).astype(np.float64))
    total = np.tensordot(np.asarray(sizes, np.float64), squares, axes=1)
    return np.float32(np.sqrt(total / max(sum(sizes), 1)))

  return base.Report(
    staleness=column("staleness").max(axis=0),
    gap=rms("gap"),
    accepted=column("accepted").all(axis=0),
    message_norm=rms("message_norm"),
    update_norm=rms("update_norm"),
  )
