"""Totals: numbers of the whole for a rule that runs on one shard.

A rule that needs one number of all rows (a global norm) calls `total`, which is
the identity without shards. `staged` cuts the rule at its totals, so that a
host can carry them between shards.
"""

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import checks, internals

# This shard's summands -> the sums over shards; part of the key of compiled
# functions, so that none that was traced without shards is used with them.
_EXCHANGE = jax.make_user_context(default_value=None)


def total(x: Any) -> Any:
  """Returns the sum of `x` over all shards; without shards, x itself. It is an
  array or a tree of arrays, each a sum over this shard's rows, like
  jnp.sum(jnp.square(g))."""
  exchange = _EXCHANGE.value
  return x if exchange is None else exchange(x)


class Ask(NamedTuple):
  """A staged function needs one more total."""

  operand: Any  # this shard's summands


class Done(NamedTuple):
  """A staged function has ended."""

  result: Any


class _Asked(BaseException):
  """Leaves the rule at a total; its `except Exception` does not catch this."""


_CALLS = threading.local()  # .now: the staged function at work in this thread


def _ask(x):
  call = _CALLS.now
  if internals.get_opaque_trace_state() != call.trace:
    raise ValueError(
      "sharding.total was called inside jit, cond, scan, vmap or grad, where a"
      " staged function cannot be left: call it outside, and pass the total in"
      " (a server that gates or averages messages, every > 1, updates inside a"
      " cond)"
    )
  call.asked += 1
  if call.asked > len(call.totals):
    raise _Asked(x)
  given = call.totals[call.asked - 1]
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (x, given)]
  if shapes[0] != shapes[1]:
    raise ValueError(
      f"total number {call.asked} is asked for {shapes[0]}, but given as"
      f" {shapes[1]}"
    )
  return jax.tree.map(lambda t, x: jnp.asarray(t, jnp.result_type(x)), given, x)


def staged(fn: Callable[..., Any]) -> Callable[..., Ask | Done]:
  """Cuts a function at its calls of `total`.

  Each shard evaluates step(totals, *args) with the totals so far, which returns
  an Ask if `fn` needs one more, otherwise a Done; the host between them adds up
  the operands (`add_up`) and calls them again. The code before the k-th total
  is computed again in each of the steps after it. Both are trees of arrays:
  jax.jit(step) compiles once for each number of totals. `fn` calls `total`
  equally often for every shard, and not inside jit, cond, scan, vmap or grad.

  Example:
    >>> step = jax.jit(staged(lambda x: x / total(x.sum())))
    >>> step((), np.float32([1, 2])).operand.item()
    3.0
    >>> step((np.float32(6),), np.float32([1, 2])).result.tolist()
    [0.1666666716337204, 0.3333333432674408]
  """

  def step(totals, *args, **kwargs):
    outer = getattr(_CALLS, "now", None)
    _CALLS.now = call = types.SimpleNamespace(
      totals=tuple(totals),
      asked=0,
      trace=internals.get_opaque_trace_state(),
    )
    try:
      with _EXCHANGE(_ask):
        result = fn(*args, **kwargs)
    except _Asked as asked:
      return Ask(asked.args[0])
    finally:
      _CALLS.now = outer
    if call.asked < len(call.totals):
      raise ValueError(
        f"{len(call.totals)} totals were given to a function that asks for"
        f" {call.asked}"
      )
    return Done(result)

  return step


def add_up(operands: Sequence[Any]) -> Any:
  """Sums trees in the order of the shards, in their own dtypes, with NumPy: the
  same bits on any machine."""
  return jax.tree.map(
    lambda *xs: functools.reduce(np.add, map(np.asarray, xs)), *operands
  )


def run_staged(
  step: Callable[..., Ask | Done],
  args: Sequence[Sequence[Any]],
  add: Callable[[Sequence[Any]], Any] = add_up,
) -> list[Any]:
  """Evaluates a staged function for S shards in one process: S tuples of
  arguments -> S results. Raises ValueError if some shards ask for more totals
  than others."""
  totals = ()
  while True:
    outs = [step(totals, *these) for these in args]
    done = [isinstance(out, Done) for out in outs]
    if all(done):
      return [out.result for out in outs]
    if any(done):
      raise ValueError(
        f"after {len(totals)} totals shards {np.flatnonzero(done).tolist()} are"
        " done and the others ask for more: the calls of total may not depend"
        " on what a shard holds"
      )
    totals += (add([out.operand for out in outs]),)


_MOST_NORM = 1e30  # so that float32 holds it


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """`optax.clip_by_global_norm`, of the norm over all shards: one total.

  Raises:
    ValueError: if `max_norm` is no positive number, or infinite.
  """
  kind = f"a positive number, at most {_MOST_NORM:g}"
  checks.real("max_norm", max_norm, lambda x: 0 < x <= _MOST_NORM, kind)
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
