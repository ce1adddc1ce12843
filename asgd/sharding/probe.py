"""A probe that decides whether an algorithm may be split into shards by rows.

The algorithm runs on all rows and on two parts of them, with the same random
messages, in float64. It takes several steps at several scales, with delays and
with one message that is not finite. If the parts differ from the complete run
in updates or sent parameters, the algorithm reads more than its own rows.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, internals
from asgd.sharding import totals as totals_lib
from asgd.sharding.plan import ShardPlan, join, paths_of, shape_of, split

_ROWS = 5  # largest number of rows of a leaf
_ELEMENTS = 4096  # wanted for all leaves; axes of 4 are not shortened for it
# Relative to the largest element of a leaf. Schedules compute rates in float32,
# which compilers round in more than one way.
_CLOSE = 1e-6


def _shorten(
  structs: optax.Params, most_rows: float, widest: float = math.inf
) -> optax.Params:
  """Returns the shapes with 2 to `most_rows` rows, and at most `widest`
  elements along each other axis. Leaves without axes stay: a shard has them
  whole, but as [1]."""

  def shorten(x):
    if not math.prod(x.shape) or not x.shape:
      return x
    # Two rows at least, so that each part can have one.
    rows = min(max(x.shape[0], 2), most_rows)
    other_sizes = (min(size, widest) for size in x.shape[1:])
    return jax.ShapeDtypeStruct((rows, *other_sizes), x.dtype)

  return jax.tree.map(shorten, structs)


def _halves(structs: optax.Params) -> ShardPlan:
  """Returns a plan of two parts, which cuts leaves at different rows. Part 1
  gets every fourth leaf undivided."""
  shapes = tuple(x.shape for x in jax.tree.leaves(structs))
  cuts = []
  for i, (rows, *_) in enumerate(shape or (1,) for shape in shapes):
    is_undivided = rows < 2 or (i % 4 == 3 and i < len(shapes) - 1)
    cuts.append((0, 0 if is_undivided else 1 + i % (rows - 1), rows))
  return ShardPlan(2, shapes, tuple(cuts))


def _train_step(
  algorithm: base.Algorithm,
  worker: Any,
  staleness: Any,
  params: Any,
  state: Any,
  sent: Any,
  message: Any,
) -> tuple[Any, Any, Any, Any]:
  """Applies a message and makes the next ticket. Returns (parameters, state,
  update, sent parameters)."""
  delay = base.Delay(worker, staleness, sent)._asdict()
  updates, state = algorithm.update(message, state, params, **delay)
  params = optax.apply_updates(params, updates)
  ticket = algorithm.send(state, params, worker=worker)
  return params, state, updates, ticket


def _compare(
  plan: ShardPlan, quantity: str, whole: Any, *parts: Any
) -> Iterator[str]:
  """Yields a text for each leaf in which the joined parts differ from `whole`,
  the result for all rows."""
  try:
    joined = join(plan, jax.tree.map(np.asarray, parts))
  except ValueError as error:
    yield f"{quantity} the parameters has other shapes than those ({error})"
    return
  paths, leaves = paths_of(whole), jax.tree.leaves(jax.device_get(whole))
  for path, shape, expected, actual in zip(
    paths, plan.shapes, leaves, jax.tree.leaves(joined), strict=True
  ):
    # NaN and infinity have no size; they must be the same in both.
    scale = np.abs(
      expected, where=np.isfinite(expected), out=np.zeros(expected.shape)
    )
    limit = _CLOSE * max(scale.max(initial=0.0), 1e-30)
    if not np.allclose(expected, actual, rtol=0, atol=limit, equal_nan=True):
      axes = "" if shape else " or the number of its axes, 1 on a shard"
      yield f"{quantity} {path} reads more than its own rows{axes}"


def differences(
  algorithm: base.Algorithm, structs: optax.Params, *, totals: bool = False
) -> Iterator[str]:
  """Yields a text for each difference between an algorithm on two parts and on
  all rows, trained on random messages in one program.

  Args:
    algorithm: the algorithm to be probed.
    structs: arrays, or shapes and dtypes, of a few rows of each leaf.
    totals: see `check`.
  """
  plan, rng = _halves(structs), np.random.default_rng(0)
  compile_fast = functools.partial(  # compiling takes most of the time
    jax.jit,
    compiler_options={
      "xla_backend_optimization_level": 0,
      "xla_llvm_disable_expensive_passes": True,
    },
  )

  def draw(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
      return rng.standard_normal(x.shape)
    return rng.integers(0, 3, x.shape).astype(x.dtype)

  def with_parts(tree):
    return [tree, *split(plan, tree)]

  def evaluate(fn: Callable[..., Any], *columns: Any) -> list[Any]:
    """Calls `fn` for all rows and for both parts."""
    whole, *parts = zip(*columns, strict=True)
    if not totals:
      return [fn(*args) for args in (whole, *parts)]
    # The parts exchange their totals, as shards do through the host.
    add = functools.partial(jax.tree.map, operator.add)
    step = totals_lib.staged(fn)
    return [fn(*whole), *totals_lib.run_staged(step, parts, lambda x: add(*x))]

  @compile_fast
  def train_step(worker, staleness, params, states, sent, message):
    step = functools.partial(_train_step, algorithm, worker, staleness)
    outs = evaluate(step, params, states, sent, with_parts(message))
    return [list(column) for column in zip(*outs, strict=True)]

  # Lists of three trees: of all rows, and of the two parts.
  params = with_parts(jax.tree.map(draw, structs))
  states = compile_fast(functools.partial(evaluate, algorithm.init))(params)
  drift = jax.tree.map(draw, structs)  # a direction common to all gradients
  sent = [params]  # the parameters of all tickets so far
  # Rules that clip, damp or branch act at one of these scales.
  for step, scale in enumerate(np.repeat((1e-3, 1.0, 1e3), (5, 5, 7))):
    message = jax.tree.map(
      lambda x, d: np.asarray(scale * (d + draw(x))), structs, drift  # noqa: B023
    )
    if step == 15:  # the message before the last has a NaN
      # One NaN must stay in its own row, too.
      leaf = max(jax.tree.leaves(message), key=np.size)
      leaf[(-1,) * leaf.ndim] = np.nan
    staleness = step % 4
    params, states, updates, ticket = train_step(
      *(np.int32(step % 2), np.int32(staleness)),
      *(params, states, sent[-1 - staleness], message),
    )
    sent.append(ticket)
    yield from _compare(plan, "the update of", *updates)
    yield from _compare(plan, "the sent value of", *ticket)


def check(
  algorithm: base.Algorithm | optax.GradientTransformation,
  params: optax.Params,
  *,
  totals: bool = False,
) -> None:
  """Raises ValueError, naming the leaf, unless an algorithm does the same on
  parts as on all rows.

  It does so if each row (of the leading axis) of updates and sent parameters
  depends only on the same row of parameters, messages and tickets, and on state
  without rows, such as a count or a learning rate. The probe uses random
  numbers, so a rule that reads other rows only in rare cases passes. The probe
  uses small random arrays; at the given shapes it checks only that the traced
  program is the same. Gates, transforms of single messages (`at_server`; check
  them separately) and workers are not probed.

  Args:
    algorithm: an Algorithm or an optax transform.
    params: for its `init`; shapes and dtypes are enough.
    totals: whether the host carries totals between shards (`staged`); then a
      `total` of sums over rows may be used.

  Example:
    >>> params = {"w": jnp.zeros((4, 3))}
    >>> check(optax.adam(1e-3), params)
    >>> check(optax.lamb(1e-3), params)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ... the update of ['w'] reads more than its own rows...
  """
  if not isinstance(algorithm, base.Algorithm):
    algorithm = base.as_algorithm(algorithm)
  structs = jax.tree.map(shape_of, params)
  large = _shorten(structs, math.inf)
  # Shorten the other axes only as far as the number of elements requires.
  for widest in (math.inf, 256, 64, 16, 4):
    small = _shorten(structs, _ROWS, widest)
    if sum(math.prod(x.shape) for x in jax.tree.leaves(small)) <= _ELEMENTS:
      break

  def first_step(x, number):
    return _train_step(algorithm, number, number, x, algorithm.init(x), x, x)

  # [1] Errors of the algorithm itself, at its own shapes, are raised unchanged.
  number = jax.ShapeDtypeStruct((), np.int32)
  jax.eval_shape(first_step, structs, number)
  reason = failure = None
  try:
    # [2] A rule may depend on the number of rows: compare its traced programs.
    if small != large:
      programs = [jax.make_jaxpr(first_step)(x, number) for x in (small, large)]
      operations = [list(internals.operations(program)) for program in programs]
      if operations[0] != operations[1]:
        reason = "its traced program depends on the number of rows"
    # [3] Train on all rows and on two parts; the first difference is enough.
    with jax.enable_x64(True):
      texts = differences(algorithm, small, totals=totals)
      reason = reason or next(texts, None)
  except Exception as error:
    # For example, a rule with a fixed shape runs on all rows but on no part.
    error_type, failure = type(error).__name__, error
    reason = f"it fails on a part of the rows ({error_type}: {error})"
  if reason:
    remedy = ", or transforms made for shards, such as"
    remedy += " asgd.sharding.clip_by_global_norm"
    raise ValueError(
      f"this algorithm is not the same on shards: {reason}; use one shard"
      f"{remedy if totals else ''}"
    ) from failure
