"""Parameters that are split over the shards of a server.

A server that is too large or too busy for one place is cut into S shards. Each
holds some rows (indices of the leading axis) of every leaf, runs the pure
Server on them as if they were all there is, and talks to workers by itself. A
`Plan` says who holds what; `split` and `join` go there and back.

That is the same training as without shards if the algorithm keeps rows apart:
SGD, Adam, delay compensation, gap-awareness and DANA do, all in each element.
`elementwise.check` proves it of an algorithm, or names what reads other rows.
A rule that needs one number of the whole (a global norm) asks for it by
`total`, which is the identity without shards; `staged` cuts such a rule at its
totals, so that a host can carry them between shards. `clip_by_global_norm` is
written so.

What a Server reports is of its own part: `combine` makes the whole's of them.
"""

import bisect
import contextlib
import functools
import itertools
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base

SMALL = 64 * 1024  # bytes; a leaf of no more is not split, if it can be helped


class Plan(NamedTuple):
  """Which rows of which leaf a shard holds; L leaves as jax.tree.leaves has
  them. Plain numbers: it can be compared, printed and sent."""

  shards: int  # S
  shapes: tuple[tuple[int, ...], ...]  # [L] of the whole leaves
  row_bytes: tuple[int, ...]  # [L]
  cuts: tuple[tuple[int, ...], ...]  # [L][S + 1], shard s: [cut[s], cut[s + 1])


def plan(params: optax.Params, shards: int) -> Plan:
  """Splits parameters so that shards hold about the same number of bytes.

  The leaves are laid one after the other and cut at S - 1 places: where equal
  parts would end, moved to the nearest end of a piece. A piece is a row of a
  leaf, or a whole leaf if it is small: no more than 64 KiB and than an eighth
  of a shard. So a shard holds at most the S-th part and one piece more, and
  none holds nothing. If there are fewer pieces than shards, small leaves are
  split too.

  Args:
    params: any tree of arrays, `base.Variables` too; only shapes and dtypes
      are read, `jax.ShapeDtypeStruct` will do.
    shards: S.

  Returns:
    The Plan, a function of shapes and dtypes alone.

  Raises:
    ValueError: if `shards` is not a positive whole number, or more than there
      are rows.

  Example:
    >>> params = {"b": np.zeros(6), "w": np.zeros((4, 3))}
    >>> plan(params, 2).cuts
    ((0, 6, 6), (0, 1, 4))
    >>> bytes_of(plan(params, 2))
    (72, 72)
  """
  if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
    raise ValueError(f"shards must be a positive whole number, not {shards!r}")
  leaves = [shape_of(x) for x in jax.tree.leaves(params)]
  rows = [x.shape[0] if x.shape else 1 for x in leaves]
  row_bytes = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in leaves]
  sizes = [n * size for n, size in zip(rows, row_bytes, strict=True)]
  most = sum(n for n, size in zip(rows, sizes, strict=True) if size)
  if shards > max(most, 1):
    raise ValueError(
      f"shards must be at most {max(most, 1)}, the rows (of the leading axes)"
      f" of these parameters, not {shards}"
    )
  whole = sum(sizes)
  small = min(SMALL, whole // (8 * shards))
  held = [i for i, size in enumerate(sizes) if size]
  pieces = [1 if sizes[i] <= small else rows[i] for i in held]
  if sum(pieces) < shards:
    pieces = [rows[i] for i in held]
  first_piece = list(itertools.accumulate(pieces, initial=0))
  first_byte = list(itertools.accumulate((sizes[i] for i in held), initial=0))

  def nearest(shard):
    """The piece that starts nearest to where an equal part would."""
    at = bisect.bisect_right(first_byte, shard * whole // shards) - 1
    # In units of an S-th of a byte, to stay with whole numbers.
    inside = shard * whole - first_byte[at] * shards
    piece = (first_byte[at + 1] - first_byte[at]) * shards // pieces[at]
    return first_piece[at] + (2 * inside + piece) // (2 * piece)

  bounds = [0]
  for shard in range(1, shards):
    latest = first_piece[-1] - (shards - shard)  # leaves one for each to come
    bounds.append(min(max(nearest(shard), bounds[-1] + 1), latest))
  bounds.append(first_piece[-1])

  # What has no bytes is shown where the tree starts.
  cuts = [(0,) + (n,) * shards for n in rows]
  for i, start, count in zip(held, first_piece, pieces, strict=False):
    step = rows[i] // count
    cuts[i] = tuple(min(max(b - start, 0), count) * step for b in bounds)
  shapes = tuple(x.shape for x in leaves)
  return Plan(shards, shapes, tuple(row_bytes), tuple(cuts))


def plan_of(params: optax.Params, owners: Sequence[int]) -> Plan:
  """Gives each leaf to a shard, whole.

  Args:
    params: as in `plan`.
    owners: the shard of each leaf, int[L], as jax.tree.leaves has them; none of
      the shards from 0 to the last is without a leaf.

  Raises:
    ValueError: for another number of owners, or a shard without a leaf.

  Example:
    >>> plan_of({"b": np.zeros(6), "w": np.zeros((4, 3))}, [1, 0]).cuts
    ((0, 0, 6), (0, 4, 4))
  """
  leaves = [shape_of(x) for x in jax.tree.leaves(params)]
  if len(owners) != len(leaves):
    raise ValueError(
      f"owners must name a shard for each of {len(leaves)} leaves, not"
      f" {len(owners)}"
    )
  shards = max(owners, default=-1) + 1
  if set(owners) != set(range(shards)):
    raise ValueError(
      f"owners must name every shard from 0 to the last, not {sorted(owners)}"
    )
  rows = [x.shape[0] if x.shape else 1 for x in leaves]
  return Plan(
    shards,
    tuple(x.shape for x in leaves),
    tuple(math.prod(x.shape[1:]) * x.dtype.itemsize for x in leaves),
    tuple(
      tuple(n * (shard > owner) for shard in range(shards + 1))
      for n, owner in zip(rows, owners, strict=True)
    ),
  )


def bytes_of(plan: Plan) -> tuple[int, ...]:
  """Returns the bytes that each shard holds, int[S]."""
  return tuple(
    sum(
      (cut[s + 1] - cut[s]) * size
      for cut, size in zip(plan.cuts, plan.row_bytes, strict=True)
    )
    for s in range(plan.shards)
  )


def trained_sizes(plan: Plan, params: optax.Params) -> tuple[int, ...]:
  """Returns the trained elements (`base.weights_of`) of each shard, int[S]."""
  parts = split(plan, jax.tree.map(shape_of, params))
  return tuple(
    sum(math.prod(x.shape) for x in jax.tree.leaves(base.weights_of(part)))
    for part in parts
  )


def part(plan: Plan, tree: optax.Params, shard: int) -> optax.Params:
  """Returns what one shard holds of a tree.

  Args:
    plan: made for leaves of these shapes; dtypes may be others.
    tree: NumPy or jax arrays, or `jax.ShapeDtypeStruct`.
    shard: from 0 to S - 1.

  Returns:
    A tree of the same structure. Each leaf is a slice of the leading axis, with
    no rows where the shard holds none; a leaf without axes is shown as [1] or
    [0]. NumPy leaves are views, and jax leaves that are not split the very
    arrays.

  Raises:
    ValueError: if the shapes are not the plan's.
  """
  leaves, structure = jax.tree.flatten(tree)
  _check_shapes(tree, leaves, plan.shapes, "the plan")
  out = [
    _rows(x, cut[shard], cut[shard + 1])
    for x, cut in zip(leaves, plan.cuts, strict=True)
  ]
  return jax.tree.unflatten(structure, out)


def split(plan: Plan, tree: optax.Params) -> list[optax.Params]:
  """Returns the `part` of each shard, S trees."""
  return [part(plan, tree, s) for s in range(plan.shards)]


def join(plan: Plan, parts: Sequence[optax.Params]) -> optax.Params:
  """Puts together what `split` split.

  Args:
    plan: as given to `split`.
    parts: S trees of one structure; jax arrays on one device.

  Returns:
    The whole tree. A leaf that lies in one shard is not copied.

  Raises:
    ValueError: for another number of parts, or shapes that are not the plan's.
  """
  if len(parts) != plan.shards:
    raise ValueError(f"the plan is of {plan.shards} shards, not {len(parts)}")
  structure = jax.tree.structure(parts[0])
  columns = []
  for s, tree in enumerate(parts):
    leaves, other = jax.tree.flatten(tree)
    if other != structure:
      raise ValueError(f"part {s} is a {other}, part 0 a {structure}")
    shapes = [
      (cut[s + 1] - cut[s], *shape[1:])
      for shape, cut in zip(plan.shapes, plan.cuts, strict=True)
    ]
    _check_shapes(tree, leaves, shapes, f"part {s} of the plan")
    columns.append(leaves)
  out = []
  for i, (shape, cut) in enumerate(zip(plan.shapes, plan.cuts, strict=True)):
    held = [s for s in range(plan.shards) if cut[s] < cut[s + 1]] or [0]
    pieces = [columns[s][i] for s in held]
    if len(pieces) == 1:
      out.append(pieces[0] if shape else pieces[0].reshape(()))
    else:
      numpy = all(isinstance(x, np.ndarray) for x in pieces)
      out.append((np if numpy else jnp).concatenate(pieces))
  return jax.tree.unflatten(structure, out)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an array or a number."""
  x = x if hasattr(x, "dtype") else np.asarray(x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _rows(x, start, stop):
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((stop - start, *x.shape[1:]), x.dtype)
  x = x if isinstance(x, jax.Array) else np.asarray(x)
  x = x if x.ndim else x.reshape(1)
  return x if stop - start == x.shape[0] else x[start:stop]


def _check_shapes(tree, leaves, shapes, whose):
  if len(leaves) != len(shapes):
    raise ValueError(
      f"a tree of {len(leaves)} leaves, where {whose} has {len(shapes)}"
    )
  for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True)):
    found = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
    if found != shape:
      raise ValueError(
        f"the leaf {paths_of(tree)[i]} has shape {found}, in {whose} {shape}"
      )


def paths_of(tree: Any) -> list[str]:
  """Returns what the leaves of a tree are called."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [jax.tree_util.keystr(path) or "(the only one)" for path, _ in leaves]


def combine(
  reports: Sequence[base.Report], sizes: Sequence[int]
) -> base.Report:
  """Makes the Report of a message from those of its parts.

  Args:
    reports: S Reports, of numbers, or of columns of one length.
    sizes: trained elements of each shard (`trained_sizes`).

  Returns:
    A Report of NumPy arrays: root mean squares over all trained elements, the
    largest staleness, and accepted if it was by all.

  Raises:
    ValueError: if there is not one size for each report, or none.
  """
  if len(reports) != len(sizes) or not reports:
    raise ValueError(f"{len(reports)} reports and {len(sizes)} sizes")

  def column(field):
    return np.stack([np.asarray(getattr(report, field)) for report in reports])

  def rms(field):
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


# Totals: numbers of the whole.

Exchange = Callable[[Any], Any]  # this shard's summands -> the sums over shards
# Part of the key of compiled functions, so that none that was traced without
# shards is used with them.
_EXCHANGE = jax.make_user_context(default_value=None)


def total(x: Any) -> Any:
  """Returns the sum of `x` over all shards; without shards, x itself.

  Args:
    x: an array or a tree of arrays, a sum over the rows that are here, like
      jnp.sum(jnp.square(g)).

  Returns:
    The same for all rows of the parameters, whoever holds them.
  """
  exchange = _EXCHANGE.value
  return x if exchange is None else exchange(x)


@contextlib.contextmanager
def totals(exchange: Exchange | None) -> Iterator[None]:
  """Lets `total` call `exchange` in what is traced here.

  Args:
    exchange: is called while tracing, with traced arrays, for one a collective
      like `lambda x: jax.lax.psum(x, "shards")`. Compiled functions are kept
      for each exchange, so pass the same object each time. None is no shards.
  """
  with _EXCHANGE(exchange):
    yield


class Ask(NamedTuple):
  """A staged function cannot go on without a total."""

  operand: Any  # this shard's summands


class Done(NamedTuple):
  """A staged function came to its end."""

  result: Any


class _Asked(BaseException):
  """Leaves the rule at a total. Nobody's `except Exception` may catch it."""


class _Call:
  """A staged function at work."""

  def __init__(self, known):
    self.known = known
    self.asked = 0
    self.operand = None
    self.trace = jax.extend.core.get_opaque_trace_state()


_CALLS = threading.local()  # .now: the _Call of this thread


def _ask(x):
  call = _CALLS.now
  if jax.extend.core.get_opaque_trace_state() != call.trace:
    raise ValueError(
      "sharding.total was called inside jit, cond, scan, vmap or grad, where a"
      " staged function cannot be left: call it outside, and pass the total in"
      " (a server that gates or averages messages, every > 1, updates inside a"
      " cond)"
    )
  call.asked += 1
  if call.asked > len(call.known):
    call.operand = x
    raise _Asked
  known = call.known[call.asked - 1]
  if jax.tree.map(jnp.shape, known) != jax.tree.map(jnp.shape, x):
    raise ValueError(
      f"total number {call.asked} is asked for {jax.tree.map(jnp.shape, x)},"
      f" but known as {jax.tree.map(jnp.shape, known)}"
    )
  return jax.tree.map(lambda k, x: jnp.asarray(k, jnp.result_type(x)), known, x)


def staged(fn: Callable[..., Any]) -> Callable[..., Ask | Done]:
  """Cuts a function at its calls of `total`.

  For places that are not joined by collectives: each evaluates `step` with the
  totals it knows, and whoever is between them adds up what they ask for
  (`add_up`) and lets them go on with one total more. What comes before the k-th
  total is computed again in each of the steps after it, as far as it is needed.

  Args:
    fn: any function; calls `total` as often for every shard, and not inside
      jit, cond, scan, vmap or grad.

  Returns:
    step(known, *args): `known` is a tuple of totals. Ask, if `fn` needs one
    more, otherwise Done. Both are trees of arrays: jax.jit(step) compiles once
    for each number of totals.

  Example:
    >>> step = jax.jit(staged(lambda x: x / total(x.sum())))
    >>> step((), np.float32([1, 2])).operand.item()
    3.0
    >>> step((np.float32(6),), np.float32([1, 2])).result.tolist()
    [0.1666666716337204, 0.3333333432674408]
  """

  def step(known, *args, **kwargs):
    outer = getattr(_CALLS, "now", None)
    _CALLS.now = call = _Call(tuple(known))
    try:
      with _EXCHANGE(_ask):
        result = fn(*args, **kwargs)
    except _Asked:
      return Ask(call.operand)
    finally:
      _CALLS.now = outer
    if call.asked < len(call.known):
      raise ValueError(
        f"{len(call.known)} totals were given to a function that asks for"
        f" {call.asked}"
      )
    return Done(result)

  return step


def add_up(operands: Sequence[Any]) -> Any:
  """Sums trees in the order of the shards, in their own dtypes, with NumPy.

  The order and the precision are said so that it gives the same bits wherever
  it is done.
  """
  return jax.tree.map(
    lambda *xs: functools.reduce(np.add, map(np.asarray, xs)), *operands
  )


def run_staged(
  step: Callable[..., Ask | Done], args: Sequence[Sequence[Any]]
) -> list[Any]:
  """Evaluates a staged function for all shards, in one place.

  Args:
    step: from `staged`, compiled or not.
    args: S tuples of arguments.

  Returns:
    S results.

  Raises:
    ValueError: if some shards ask for more totals than others.
  """
  known = ()
  while True:
    outs = [step(known, *these) for these in args]
    done = [isinstance(out, Done) for out in outs]
    if all(done):
      return [out.result for out in outs]
    if any(done):
      raise ValueError(
        f"after {len(known)} totals shards {np.flatnonzero(done).tolist()} are"
        " done and the others ask for more: the calls of total may not depend"
        " on what a shard holds"
      )
    known += (add_up([out.operand for out in outs]),)


_MOST_NORM = 1e30  # so that float32 holds it


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """`optax.clip_by_global_norm`, of the norm over all shards.

  Without shards it is the same. Asks for one total.

  Args:
    max_norm: the largest norm of an update.

  Raises:
    ValueError: if it is no positive number, or infinite.
  """
  number = isinstance(max_norm, numbers.Real) and max_norm is not True
  if not number or not 0 < max_norm <= _MOST_NORM:
    raise ValueError(
      f"max_norm must be a positive number, at most {_MOST_NORM:g}, not"
      f" {max_norm!r}"
    )
  max_norm = float(max_norm)

  def update_fn(updates, state, params=None):
    del params
    norm = jnp.sqrt(total(optax.tree.norm(updates, squared=True)))

    def clip(g):
      return jax.lax.select(
        norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm
      )

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
