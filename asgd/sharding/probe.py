"""A probe that decides whether an algorithm may be split into shards by rows.

The whole algorithm and its two parts are run on the same random messages, in
float64, over several steps and scales, with delays and with a message that is
not finite. Parts that end with other updates, or send other parameters, than
the whole read more than their own rows.
"""

import math
import operator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base
from asgd.sharding import totals as totals_lib
from asgd.sharding.plan import ShardPlan, join, paths_of, shape_of, split

_ROWS = 5  # of a leaf, at most
_ELEMENTS = 4096  # of all leaves, about at most; rows are never shortened more
# Scales of the messages; those that clip, damp or branch do so at one of them.
_SCALES = (1e-3, 1.0, 1e3)
_STEPS = 5  # at each scale
_STALEST = 3  # updates
# Compiling takes most of the time.
_QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}
# Relative to the largest element of a leaf: schedules make their rates in
# float32, which compilers round in more than one way.
_CLOSE = 1e-6


class _Refused(Exception):
  """Says what is not the same on parts."""


def _shorten(structs: Any, most: float, widest: float = math.inf) -> Any:
  """Shapes of at least two and at most so many rows, of this size at most."""

  def shorten(x):
    if not math.prod(x.shape):
      return x
    rows = min(max(x.shape[0] if x.shape else 1, 2), most)
    others = (min(size, widest) for size in x.shape[1:])
    return jax.ShapeDtypeStruct((rows, *others), x.dtype)

  return jax.tree.map(shorten, structs)


def _halves(structs: Any) -> ShardPlan:
  """Cuts the leaves at different rows; of the last of four, part 1 has all."""
  leaves = jax.tree.leaves(structs)
  cuts = []
  for i, x in enumerate(leaves):
    rows = x.shape[0]
    whole = rows < 2 or (i % 4 == 3 and i < len(leaves) - 1)
    cuts.append((0, 0 if whole else 1 + i % (rows - 1), rows))
  shapes = tuple(x.shape for x in leaves)
  return ShardPlan(2, shapes, (0,) * len(leaves), tuple(cuts))


def _operations(jaxpr: Any) -> list[str]:
  """Names the operations of a program and of those within it, in order."""
  names = []
  for eqn in jaxpr.eqns:
    names.append(eqn.primitive.name)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      names += _operations(inner)
  return names


def _update(algorithm, updates, state, params, *delay):
  delay = base.Delay(*delay)._asdict()
  return algorithm.update(updates, state, params, **delay)


def _compare(plan: ShardPlan, what: str, whole: Any, *parts: Any) -> None:
  """Raises _Refused unless the parts are the whole."""
  try:
    joined = join(plan, jax.tree.map(np.asarray, parts))
  except ValueError as error:
    what = f"{what} the parameters has other shapes than they"
    raise _Refused(f"{what} ({error})") from error
  paths, leaves = paths_of(whole), jax.tree.leaves(jax.device_get(whole))
  for path, x, y in zip(paths, leaves, jax.tree.leaves(joined), strict=True):
    scale = np.abs(x, where=np.isfinite(x), out=np.zeros(x.shape))
    limit = _CLOSE * max(scale.max(initial=0.0), 1e-30)
    if not np.allclose(x, y, rtol=0, atol=limit, equal_nan=True):
      raise _Refused(f"{what} {path} reads more than its own rows")


def _train(algorithm: base.Algorithm, structs: Any, totals: bool) -> None:
  """Trains the whole and both parts, compiled as one program, on random
  messages; raises _Refused where they differ."""
  plan = _halves(structs)
  rng = np.random.default_rng(0)

  def draw(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
      return rng.standard_normal(x.shape)
    return rng.integers(0, 3, x.shape).astype(x.dtype)

  def pieces(tree):
    return [tree, *split(plan, tree)]

  def each(fn, *columns):
    """Calls `fn` for the whole and for both parts."""
    whole, *parts = zip(*columns, strict=True)
    if not totals:
      return [fn(*args) for args in (whole, *parts)]
    step = totals_lib.staged(fn)
    add = lambda operands: jax.tree.map(operator.add, *operands)  # noqa: E731
    return [fn(*whole), *totals_lib.run_staged(step, parts, add)]

  def start(params):
    params = pieces(params)
    return params, each(algorithm.init, params)

  def turn(params, states, sent, message, worker, staleness):
    """One update and one ticket."""

    def update(message, state, params, sent):
      return _update(
        algorithm, message, state, params, worker, staleness, sent
      )

    def send(state, params):
      return algorithm.send(state, params, worker=worker)

    outs = each(update, pieces(message), states, params, sent)
    updates, states = map(list, zip(*outs, strict=True))
    params = list(map(optax.apply_updates, params, updates))
    return params, states, updates, each(send, states, params)

  start, turn = (jax.jit(fn, compiler_options=_QUICK) for fn in (start, turn))
  params, states = start(jax.tree.map(draw, structs))
  drift = jax.tree.map(draw, structs)  # gradients agree about a direction
  sent = [params]
  scales = [scale for scale in _SCALES for _ in range(_STEPS)]
  scales += 2 * [_SCALES[-1]]
  for step, scale in enumerate(scales):
    message = jax.tree.map(lambda x, d: scale * (d + draw(x)), structs, drift)  # noqa: B023
    if step == len(scales) - 2:
      leaf = max(jax.tree.leaves(message), key=np.size)
      leaf[(-1,) * leaf.ndim] = np.nan
    staleness = min(step % (_STALEST + 1), step)
    numbers = np.int32(step % 2), np.int32(staleness)
    params, states, updates, ticket = turn(
      params, states, sent[-1 - staleness], message, *numbers
    )
    sent.append(ticket)
    _compare(plan, "the update of", *updates)
    _compare(plan, "what is sent of", *ticket)


def check(
  algorithm: base.Algorithm | optax.GradientTransformation,
  params: optax.Params,
  *,
  totals: bool = False,
) -> None:
  """Raises unless an algorithm does the same on parts as on the whole.

  It does, if what it makes of a row (of the leading axis) of a leaf, and what
  it sends of it, depend on nothing but the same row of the parameters, messages
  and tickets, and on what no row holds, like a count or a learning rate. That
  is tried on random numbers, so a rule that reads other rows only in a case
  that the probe does not meet passes. Parameters are small random arrays; of
  large ones, the program has to be the same as at the shapes that are given.
  Gates, the transforms of single messages (`per_message`; check them alone) and
  workers are not looked at.

  Args:
    algorithm: an Algorithm or an optax transform.
    params: what its `init` is given; shapes and dtypes are enough.
    totals: whether the host carries totals between shards (`staged`,
      `exchanging`); then a `total` of sums over rows may be used.

  Raises:
    ValueError: naming the leaf, and the remedy.

  Example:
    >>> params = {"w": jnp.zeros((4, 3))}
    >>> check(optax.adam(1e-3), params)
    >>> check(optax.lamb(1e-3), params)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ... the update of ['w'] reads more than its own rows...
  """
  if not hasattr(algorithm, "send"):
    algorithm = base.as_algorithm(algorithm)
  structs = jax.tree.map(shape_of, params)
  number = jax.ShapeDtypeStruct((), np.int32)
  large = _shorten(structs, math.inf)
  for widest in (math.inf, 256, 64, 16, 4):
    small = _shorten(structs, _ROWS, widest)
    if sum(math.prod(x.shape) for x in jax.tree.leaves(small)) <= _ELEMENTS:
      break

  def once(params, worker):
    state = algorithm.init(params)
    update = _update(
      algorithm, params, state, params, worker, worker, params
    )
    return update, algorithm.send(state, params, worker=worker)

  # The algorithm's own errors, at the shapes it is for, are not ours.
  jax.eval_shape(once, structs, number)
  try:
    if small != large:
      programs = [jax.make_jaxpr(once)(x, number) for x in (small, large)]
      if _operations(programs[0]) != _operations(programs[1]):
        raise _Refused("it is another program at another number of rows")
    with jax.enable_x64(True):
      _train(algorithm, small, totals)
  except Exception as error:
    reason = error
    if not isinstance(error, _Refused):
      kind = type(error).__name__
      reason = f"it fails on a part of the rows ({kind}: {error})"
    remedy = ", or transforms made for shards, such as"
    remedy += " asgd.sharding.clip_by_global_norm"
    raise ValueError(
      f"this algorithm is not the same on shards: {reason}; use one shard"
      f"{remedy if totals else ''}"
    ) from error
