"""Proof that an algorithm may be split into shards: that it keeps rows apart.

Its functions are traced at two numbers of rows for each leaf. The two programs
must be the same but for extents, and an axis whose extents differ is an axis of
rows. So it is enough to follow, from one operation to the next, what a value
holds of the parameters. An operation that is not known is taken to mix rows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, sharding

EXAMPLE = "asgd.sharding.clip_by_global_norm"  # of a shard-aware transform


class _Kind(NamedTuple):
  """What a value of the program holds."""

  name: str
  rows: tuple[int, ...] = ()  # ROWS: the leaf, and its two numbers of rows
  why: str = ""  # PARTIAL, MIXED: the operation that made it so


# Nothing of the parameters; the same at each row, if it has rows.
_FREE = _Kind("free")
# At each row, something of the same row of one leaf.
_ROWS = "rows"
# A sum over the rows that are here: the whole's is the sum over shards.
_PARTIAL = "partial"
# Something of several rows that a shard cannot know.
_MIXED = "mixed"


class _Differs(Exception):
  """The programs at two numbers of rows are not the same."""


class _Refused(Exception):
  """Says what is not the same on shards."""


class _Op(NamedTuple):
  """One operation of both programs."""

  name: str
  params: tuple[dict, dict]
  ins: list[tuple]  # of pairs of shapes
  outs: list[tuple]
  kinds: list[_Kind]  # of what goes in
  zeros: list[bool]  # which of it is the number 0
  same: bool  # all plain parameters but extents agree

  def axis(self, i: int) -> int | None:
    """Returns the axis of rows of what goes in, None if it has none."""
    return _axis(self.ins[i])

  def mixed(self) -> _Kind:
    return _Kind(_MIXED, why=self.name)


def _axes(shapes):
  one, two = shapes
  if len(one) != len(two):
    raise _Differs
  return [k for k, (n, m) in enumerate(zip(one, two, strict=True)) if n != m]


def _axis(shapes):
  axes = _axes(shapes)
  return axes[0] if axes else None


def _join(kinds, op_name="an operation"):
  """What a value holds that is made of all these, at each element."""
  named = {kind.name: kind for kind in reversed(kinds)}
  if _MIXED in named:
    return named[_MIXED]
  if _PARTIAL in named:
    partial = named[_PARTIAL]
    return partial if len(named) == 1 else _Kind(_MIXED, why=partial.why)
  found = {kind for kind in kinds if kind.name == _ROWS}
  if len(found) > 1:
    return _Kind(_MIXED, why=f"{op_name} of two leaves")
  return found.pop() if found else _FREE


_NAMES = """
  abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
  bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy cos
  cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
  igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
  lt_to max min mul mulhi ne neg nextafter not or polygamma population_count
  pow real reduce_precision regularized_incomplete_beta rem round rsqrt
  select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
  sqrt square stop_gradient sub tan tanh xor zeta
"""
_ELEMENTWISE = frozenset(_NAMES.split())


def _elementwise(op):
  joined = _join(op.kinds, op.name)
  partial = [kind for kind in op.kinds if kind.name == _PARTIAL]
  if not partial:
    return joined
  # A sum stays a sum when it is added to others, and when it is scaled.
  others = [kind for kind in op.kinds if kind.name != _PARTIAL]
  if op.name in ("add", "add_any", "sub", "neg", "copy"):
    sums = zip(op.kinds, op.zeros, strict=True)
    if all(kind.name == _PARTIAL or zero for kind, zero in sums):
      return partial[0]
  elif op.name == "convert_element_type":
    if np.issubdtype(op.params[0]["new_dtype"], np.inexact):
      return partial[0]
  elif others == [_FREE]:
    divided = op.name == "div" and op.kinds[1] == _FREE
    if divided or op.name == "mul":
      return partial[0]
  return _Kind(_MIXED, why=partial[0].why)


def _reduce(op):
  axis = op.axis(0)
  if axis is not None and axis in op.params[0]["axes"]:
    summed = op.name == "reduce_sum"
    return _Kind(_PARTIAL, why=op.name) if summed else op.mixed()
  if op.kinds[0].name == _PARTIAL and op.name != "reduce_sum":
    return _Kind(_MIXED, why=op.kinds[0].why)
  return op.kinds[0]


def _along(name):
  """Rule of what mixes along one axis, and only there."""

  def rule(op):
    axis = op.params[0][name]
    if any(op.axis(i) == axis for i in range(len(op.ins))):
      return op.mixed()
    return _join(op.kinds, op.name)

  return rule


def _stack(op):
  return _join(op.kinds, op.name)


def _tile(op):
  axis = op.axis(0)
  once = axis is None or op.params[0]["reps"][axis] == 1
  return op.kinds[0] if once else op.mixed()


def _rev(op):
  return op.mixed() if op.axis(0) in op.params[0]["dimensions"] else op.kinds[0]


def _broadcast(op):
  axis, out = op.axis(0), _axis(op.outs[0])
  if axis is not None and op.params[0]["broadcast_dimensions"][axis] != out:
    return op.mixed()
  return op.kinds[0]


def _reshape(op):
  kind, axis, out = op.kinds[0], op.axis(0), _axis(op.outs[0])
  if axis is None:
    return kind
  before = math.prod(op.ins[0][0][:axis])
  if out is None or before != math.prod(op.outs[0][0][:out]):
    return op.mixed()
  # Rows may be drawn out along the axis, [n, k] -> [n k], never be joined.
  now = [shape[out] for shape in op.outs[0]]
  if kind.name != _ROWS:
    return kind if now == [shape[axis] for shape in op.ins[0]] else op.mixed()
  _, first, second = kind.rows
  if now[0] % first or now[0] * second != now[1] * first:
    return op.mixed()
  return kind


def _keep(op):
  return op.kinds[0]


def _slice(op):
  axis, starts = op.axis(0), []
  for params, shape in zip(op.params, op.ins[0], strict=True):
    start, stop = params["start_indices"], params["limit_indices"]
    if axis is not None:
      step = params["strides"][axis] if params["strides"] else 1
      if (start[axis], stop[axis], step) != (0, shape[axis], 1):
        return op.mixed()
    starts.append(start)
  return op.kinds[0] if starts[0] == starts[1] else op.mixed()


def _pad(op):
  axis = op.axis(0)
  if axis is not None and any(op.params[0]["padding_config"][axis]):
    return op.mixed()
  return _join(op.kinds, op.name)


def _dynamic_slice(op):
  axis, (one, two) = op.axis(0), op.ins[0]
  starts = list(op.kinds[1:])
  if axis is not None:
    sizes = [params["slice_sizes"][axis] for params in op.params]
    if sizes != [one[axis], two[axis]]:
      return op.mixed()
    starts[axis] = _FREE  # a slice of all rows starts at the first
  return _indexed(op, [op.kinds[0]], starts)


def _dynamic_update_slice(op):
  axis = op.axis(0)
  starts = list(op.kinds[2:])
  if axis is not None:
    if op.axis(1) != axis or any(
      whole[axis] != new[axis]
      for whole, new in zip(op.ins[0], op.ins[1], strict=True)
    ):
      return op.mixed()
    starts[axis] = _FREE
  elif op.axis(1) is not None:
    return op.mixed()
  return _indexed(op, op.kinds[:2], starts)


def _gather(op):
  axis = op.axis(0)
  numbers = op.params[0]["dimension_numbers"]
  if op.axis(1) is not None:
    return op.mixed()
  if axis is not None:
    sizes = [params["slice_sizes"][axis] for params in op.params]
    if sizes != [shape[axis] for shape in op.ins[0]] or axis in (
      *numbers.start_index_map,
      *numbers.operand_batching_dims,
    ):
      return op.mixed()
  return _indexed(op, [op.kinds[0]], [op.kinds[1]])


def _scatter(op):
  axis = op.axis(0)
  numbers = op.params[0]["dimension_numbers"]
  outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
  window = [k for k in range(len(op.ins[0][0])) if k not in outside]
  place = dict(zip(window, numbers.update_window_dims, strict=True))
  if op.axis(1) is not None or op.axis(2) != place.get(axis):
    return op.mixed()
  if axis is not None and (
    axis in numbers.scatter_dims_to_operand_dims
    or [shape[axis] for shape in op.ins[0]]
    != [shape[place[axis]] for shape in op.ins[2]]
  ):
    return op.mixed()
  return _indexed(op, [op.kinds[0], op.kinds[2]], [op.kinds[1]])


def _indexed(op, kinds, indices):
  where = _join(indices)
  if where != _FREE:
    return _Kind(_MIXED, why=where.why or op.name)
  return _join(kinds, op.name)


def _dot_general(op):
  (left, right), _ = op.params[0]["dimension_numbers"]
  one, two = op.axis(0), op.axis(1)
  if one in left and two in right and left.index(one) == right.index(two):
    both = _join(op.kinds, op.name)
    return both if both.name == _MIXED else _Kind(_PARTIAL, why=op.name)
  return _other(op)


def _iota(op):
  rows = _axis(op.outs[0])
  return op.mixed() if rows == op.params[0]["dimension"] else _FREE


def _total(op):
  kind = op.kinds[0]
  if kind.name == _MIXED:
    return kind
  if kind.name == _PARTIAL:
    return _FREE
  return _Kind(_MIXED, why="total of what is no sum over rows")


def _other(op):
  """An operation that nothing is known of."""
  rows = any(map(_axes, (*op.ins, *op.outs)))
  return op.mixed() if rows or set(op.kinds) - {_FREE} else _FREE


_REDUCTIONS = (
  *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"),
  *("reduce_or", "reduce_xor", "argmax", "argmin"),
)
_SCATTERS = (
  *("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min"),
  *("scatter-max",),
)
_RULES = {
  **dict.fromkeys(_ELEMENTWISE, _elementwise),
  **dict.fromkeys(_REDUCTIONS, _reduce),
  **dict.fromkeys(
    ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")
  ),
  **dict.fromkeys(_SCATTERS, _scatter),
  **dict.fromkeys(("squeeze", "transpose"), _keep),
  "sort": _along("dimension"),
  "concatenate": _along("dimension"),
  "split": _along("axis"),
  "unstack": _along("axis"),
  "stack": _stack,
  "tile": _tile,
  "rev": _rev,
  "broadcast_in_dim": _broadcast,
  "reshape": _reshape,
  "slice": _slice,
  "pad": _pad,
  "dynamic_slice": _dynamic_slice,
  "dynamic_update_slice": _dynamic_update_slice,
  "gather": _gather,
  "dot_general": _dot_general,
  "iota": _iota,
  "asgd_total": _total,
}
# These can tell which of their indices matter.
_SLICES = ("dynamic_slice", "dynamic_update_slice")
# These know what becomes of a sum.
_LINEAR = {
  *_ELEMENTWISE,
  *("reduce_sum", "squeeze", "transpose", "concatenate", "stack"),
  *("broadcast_in_dim", "reshape", "slice", "asgd_total"),
}
_CALLED = {  # name -> where its program is
  **dict.fromkeys(("jit", "pjit", "remat2", "closed_call"), "jaxpr"),
  **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
# Parameters that are, or may hold, extents.
_EXTENTS = {
  *("shape", "new_sizes", "slice_sizes", "limit_indices", "start_indices"),
  *("sizes",),
}


def _apply(op: _Op) -> list[_Kind]:
  """What comes out of one operation."""
  if not op.same:
    why = f"{op.name}, set by the number of rows"
    return [_Kind(_MIXED, why=why)] * len(op.outs)
  if op.name in _CALLED:
    programs = [params[_CALLED[op.name]] for params in op.params]
    return _walk(*programs, op.kinds)
  if op.name in _CONTROL:
    return _CONTROL[op.name](op)
  if op.name == "optimization_barrier":
    return op.kinds
  rule = _RULES.get(op.name, _other)
  made = any(map(_axes, op.outs)) and not any(map(_axes, op.ins))
  if made and rule not in (_broadcast, _iota):
    return [op.mixed()] * len(op.outs)
  for kind in op.kinds:
    if kind.name == _MIXED and op.name not in _SLICES:
      return [kind] * len(op.outs)
    if kind.name == _PARTIAL and op.name not in _LINEAR:
      return [_Kind(_MIXED, why=kind.why)] * len(op.outs)
  return [rule(op)] * len(op.outs)


def _cond(op):
  chosen = op.kinds[0]
  if chosen != _FREE:
    return [_Kind(_MIXED, why=chosen.why or op.name)] * len(op.outs)
  branches = zip(*(params["branches"] for params in op.params), strict=True)
  outs = [_walk(*programs, op.kinds[1:]) for programs in branches]
  return [_join(kinds, op.name) for kinds in zip(*outs, strict=True)]


def _while(op):
  first, second = op.params
  tests, bodies = first["cond_nconsts"], first["body_nconsts"]
  of_test, of_body = op.kinds[:tests], op.kinds[tests : tests + bodies]

  def turn(carry):
    programs = first["cond_jaxpr"], second["cond_jaxpr"]
    (goes_on,) = _walk(*programs, of_test + carry)
    if goes_on != _FREE:
      return [_Kind(_MIXED, why=goes_on.why or op.name)] * len(carry)
    return _walk(first["body_jaxpr"], second["body_jaxpr"], of_body + carry)

  return _settle(turn, op.kinds[tests + bodies :])


def _scan(op):
  first, second = op.params
  consts, carries = first["num_consts"], first["num_carry"]
  fixed, xs = op.kinds[:consts], op.kinds[consts + carries :]

  def body(carry):
    return _walk(first["jaxpr"], second["jaxpr"], fixed + carry + xs)

  start = op.kinds[consts : consts + carries]
  carry = _settle(lambda carry: body(carry)[:carries], start)
  return carry + body(carry)[carries:]


_CONTROL = {"cond": _cond, "while": _while, "scan": _scan}


def _settle(turn, kinds):
  """What a state holds that goes through `turn` again and again."""
  while True:
    new = [_join(pair) for pair in zip(kinds, turn(kinds), strict=True)]
    if new == kinds:
      return kinds
    kinds = new


def _walk(first, second, kinds: list[_Kind]) -> list[_Kind]:
  """Follows both programs from what goes in to what comes out."""
  literal = jax.extend.core.Literal
  known, partner = {}, {}

  def define(one, two, kind):
    axes = _axes((one.aval.shape, two.aval.shape))
    if len(axes) > 1 or kind.name == _PARTIAL and axes:
      kind = _Kind(_MIXED, why=kind.why or "an array of rows by rows")
    elif kind.name == _ROWS and not axes:
      kind = _Kind(_MIXED, why="rows that are laid out anew")
    known[one], partner[one] = kind, two

  def read(one, two):
    if isinstance(one, literal) and isinstance(two, literal):
      return _constant(one.val, two.val)
    if isinstance(one, literal) or partner[one] is not two:
      raise _Differs
    return known[one]

  consts = []
  for program in (first, second):
    consts.append(list(getattr(program, "consts", ())))
  first, second = (getattr(p, "jaxpr", p) for p in (first, second))
  if len(consts[0]) != len(consts[1]) or len(first.eqns) != len(second.eqns):
    raise _Differs
  held = [_constant(*pair) for pair in zip(*consts, strict=True)]
  ones = (*first.constvars, *first.invars)
  twos = (*second.constvars, *second.invars)
  for one, two, kind in zip(ones, twos, held + list(kinds), strict=True):
    define(one, two, kind)
  for one, two in zip(first.eqns, second.eqns, strict=True):
    if one.primitive.name != two.primitive.name:
      raise _Differs
    op = _Op(
      name=one.primitive.name,
      params=(one.params, two.params),
      ins=_shapes(one.invars, two.invars),
      outs=_shapes(one.outvars, two.outvars),
      kinds=[read(*pair) for pair in zip(one.invars, two.invars, strict=True)],
      zeros=[isinstance(x, literal) and not np.any(x.val) for x in one.invars],
      same=_plain(one.params) == _plain(two.params),
    )
    for *pair, kind in zip(one.outvars, two.outvars, _apply(op), strict=True):
      define(*pair, kind)
  return [read(*p) for p in zip(first.outvars, second.outvars, strict=True)]


def _shapes(ones, twos):
  if len(ones) != len(twos):
    raise _Differs
  pairs = zip(ones, twos, strict=True)
  return [(tuple(x.aval.shape), tuple(y.aval.shape)) for x, y in pairs]


def _plain(params):
  plain = (bool, int, float, str, tuple, np.dtype, type(None))
  return {
    key: value
    for key, value in params.items()
    if isinstance(value, plain) and key not in _EXTENTS and key != "branches"
  }


def _constant(one, two):
  one, two = (
    np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in (one, two)
  )
  if one.shape == two.shape:
    same = one.tobytes() == two.tobytes()
  else:  # the same at each row?
    same = len({x.tobytes() for x in (*one.ravel(), *two.ravel())}) <= 1
  return _FREE if same else _Kind(_MIXED, why="the number of rows")


def _is_key(x):
  return isinstance(x, jax.Array) and jnp.issubdtype(
    x.dtype, jax.dtypes.prng_key
  )


_total_p = jax.extend.core.Primitive("asgd_total")
_total_p.def_abstract_eval(lambda x: x)


def _mark(x):
  return jax.tree.map(_total_p.bind, x)


def _with_rows(second: bool, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """A leaf as shards see it, at its number of rows, and at very few.

  Not at one, which is treated apart: arrays of one row are broadcast.
  """
  if not math.prod(x.shape):
    return x
  n = max(x.shape[0] if x.shape else 1, 2)
  if second:
    n = 2 if n > 2 else 3
  return jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)


def check(
  algorithm: base.Algorithm | optax.GradientTransformation,
  params: optax.Params,
  *,
  totals: bool = False,
) -> None:
  """Raises unless an algorithm does the same on parts as on the whole.

  It does, if what it makes of a row (of the leading axis) of a leaf, and what
  it sends of it, depend on nothing but the same row of the parameters, messages
  and tickets, and on what is nobody's, like a count or a learning rate. That is
  proved from the traced program, for all values and branches; nothing is
  computed. So norms, factored and matrix statistics, means, tests for NaN and
  noise are refused, unless they reach neither parameters nor tickets. What does
  something else on fewer rows is refused if it does so on two. An operation
  that is not known here is refused, too.

  A leaf without axes is taken as one row. Gates, the transforms of single
  messages (`per_message`; check them alone) and workers are not looked at.

  Args:
    algorithm: an Algorithm or an optax transform.
    params: what its `init` is given; shapes and dtypes are enough.
    totals: whether the host carries totals between shards (`staged`,
      `totals`); then a `total` of sums over rows may be used.

  Raises:
    ValueError: naming the leaf, the operation and the remedy.

  Example:
    >>> params = {"w": jnp.zeros((4, 3))}
    >>> check(optax.adam(1e-3), params)
    >>> check(optax.lamb(1e-3), params)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ... the update of ['w'] reads more than its own rows...
  """
  if not hasattr(algorithm, "send"):
    algorithm = base.as_algorithm(algorithm)
  structs = jax.tree.map(sharding.shape_of, params)
  # The algorithm's own errors, at the shapes it is for, are not ours.
  state = jax.eval_shape(algorithm.init, structs)
  number = jax.ShapeDtypeStruct((), np.int32)
  jax.eval_shape(_update(algorithm), structs, state, structs, number)

  pair = [
    jax.tree.map(functools.partial(_with_rows, second), structs)
    for second in (False, True)
  ]
  leaves = [
    _Kind(_ROWS, (i, x.shape[0], y.shape[0])) if x.shape != y.shape else _FREE
    for i, (x, y) in enumerate(zip(*map(jax.tree.leaves, pair), strict=True))
  ]
  try:
    with sharding.totals(_mark if totals else None):
      _prove(algorithm, pair, leaves, sharding.paths_of(structs))
  except (_Differs, _Refused) as error:
    what = str(error) or "is another program at another number of rows"
    remedy = f", or transforms made for shards, such as {EXAMPLE}"
    raise ValueError(
      f"this algorithm is not the same on shards: {what}; use one shard"
      f" (--config.server.shards=1){remedy if totals else ''}"
    ) from error.__cause__


def _update(algorithm):
  def update(updates, state, params, number):
    delay = base.Delay(number, number, params)
    return algorithm.update(updates, state, params, **delay._asdict())

  return update


def _prove(algorithm, pair, leaves, paths):
  def trace(fn, args):
    """The programs of `fn` at both numbers of rows, and what they return."""
    try:
      made = [jax.make_jaxpr(fn, return_shape=True)(*a) for a in args]
    except Exception as error:
      raise _Refused("cannot be traced at another number of rows") from error
    (one, out), (two, other) = made
    if jax.tree.structure(out) != jax.tree.structure(other):
      raise _Differs
    return (one, two), (out, other)

  shapes = [[x.shape for x in jax.tree.leaves(params)] for params in pair]

  def check(what, kinds, outs):
    kinds, outs = kinds[: len(leaves)], [out[: len(leaves)] for out in outs]
    if [[x.shape for x in out] for out in outs] != shapes:
      raise _Refused(f"{what} the parameters has other shapes than they")
    for leaf, kind, path in zip(leaves, kinds, paths, strict=True):
      if kind not in (leaf, _FREE):
        why = kind.why or "rows of another leaf"
        raise _Refused(
          f"{what} {path} reads more than its own rows, through {why}"
        )

  number = jax.ShapeDtypeStruct((), np.int32)
  programs, states = trace(algorithm.init, [(p,) for p in pair])
  start = _walk(*programs, leaves)
  programs, outs = trace(
    _update(algorithm),
    [(p, s, p, number) for p, s in zip(pair, states, strict=True)],
  )

  def update(state):
    return _walk(*programs, [*leaves, *state, *leaves, _FREE])

  state = _settle(lambda state: update(state)[len(leaves) :], start)
  check("the update of", update(state), list(map(jax.tree.leaves, outs)))
  programs, outs = trace(
    lambda s, p, worker: algorithm.send(s, p, worker=worker),
    [(s, p, number) for p, s in zip(pair, states, strict=True)],
  )
  sent = _walk(*programs, [*state, *leaves, _FREE])
  check("what is sent of", sent, list(map(jax.tree.leaves, outs)))
