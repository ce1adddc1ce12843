"""Totals: sums over the rows of all shards, for a rule that sees one shard.

An update rule that needs a number over all rows (a global norm) calls `total`,
which is the identity without shards. `staged` cuts the rule at its totals, so
that the host can add them up between shards.
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

# The function that turns this shard's summands into sums over all shards; None
# without shards. As a JAX user context it is part of the key of compiled
# functions: a function that was traced without shards is not reused with them.
_SUM_OVER_SHARDS = jax.make_user_context(default_value=None)


def total(x: Any) -> Any:
  """Returns the sum of `x` over all shards; without shards, x itself. `x` is an
  array or a tree of arrays, each a sum over this shard's rows, such as
  jnp.sum(jnp.square(g))."""
  sum_over_shards = _SUM_OVER_SHARDS.value
  return x if sum_over_shards is None else sum_over_shards(x)


class Ask(NamedTuple):
  """The result of a step if the function needs one more total."""

  operand: Any  # this shard's summands


class Done(NamedTuple):
  """The result of the last step: the function has returned."""

  result: Any


class _TotalNeeded(BaseException):
  """Leaves the rule at a total. `except Exception` in a rule does not catch
  it."""


_CURRENT = threading.local()  # .call: the staged call that runs in this thread


def _next_total(x: Any) -> Any:
  """Returns the next total of the call. If the host has not given it, leaves
  the function by an exception."""
  # call.totals: the totals that the host gave; call.asked: how many of them the
  # function has asked for.
  call = _CURRENT.call
  # An exception cannot leave an inner trace without breaking it.
  if internals.get_opaque_trace_state() != call.trace:
    raise ValueError(
      "sharding.total was called inside jit, cond, scan, vmap or grad, where a"
      " staged function cannot be left: call it outside, and pass the total in"
      " (a server that gates messages, or averages them with every > 1, updates"
      " inside a cond)"
    )
  call.asked += 1
  if call.asked > len(call.totals):
    # The host has not added up this total yet: return its summands.
    raise _TotalNeeded(x)
  value = call.totals[call.asked - 1]
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (x, value)]
  if shapes[0] != shapes[1]:
    raise ValueError(
      f"total {call.asked} was asked for shapes {shapes[0]}, but given as"
      f" {shapes[1]}"
    )
  # The host's sum may have a wider dtype than the rule's summands.
  return jax.tree.map(lambda t, x: jnp.asarray(t, jnp.result_type(x)), value, x)


def staged(fn: Callable[..., Any]) -> Callable[..., Ask | Done]:
  """Cuts a function at its calls of `total`.

  1. Each shard evaluates step(totals, *args) with the totals so far. The result
     is an Ask if `fn` needs one more total, otherwise a Done.
  2. The host adds up the operands of the Asks (`add_up`), and calls again.

  The code before the k-th total is recomputed in each of the later steps. Ask
  and Done are trees of arrays: jax.jit(step) compiles once for each number of
  totals. `fn` calls `total` equally often for every shard, and not inside jit,
  cond, scan, vmap or grad.

  Example:
    >>> step = jax.jit(staged(lambda x: x / total(x.sum())))
    >>> step((), np.float32([1, 2])).operand.item()
    3.0
    >>> step((np.float32(6),), np.float32([1, 2])).result.tolist()
    [0.1666666716337204, 0.3333333432674408]
  """

  def step(totals, *args, **kwargs):
    # A staged function may be called inside of another one.
    outer = getattr(_CURRENT, "call", None)
    _CURRENT.call = call = types.SimpleNamespace(
      totals=tuple(totals),
      asked=0,
      trace=internals.get_opaque_trace_state(),
    )
    try:
      with _SUM_OVER_SHARDS(_next_total):
        result = fn(*args, **kwargs)
    except _TotalNeeded as needed:
      return Ask(needed.args[0])
    finally:
      _CURRENT.call = outer
    if call.asked < len(call.totals):
      raise ValueError(
        f"{len(call.totals)} totals were given to a function that asks for only"
        f" {call.asked}"
      )
    return Done(result)

  return step


def add_up(operands: Sequence[Any]) -> Any:
  """Sums trees in the order of the shards, in their own dtypes. NumPy gives the
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
  arguments -> S results. Raises ValueError if shards ask for different numbers
  of totals."""
  totals: tuple[Any, ...] = ()
  while True:
    # Each pass computes up to the next total; the last one returns results.
    outs = [step(totals, *shard_args) for shard_args in args]
    results = [out.result for out in outs if isinstance(out, Done)]
    if len(results) == len(outs):
      return results
    if results:
      done_ids = [s for s, out in enumerate(outs) if isinstance(out, Done)]
      raise ValueError(
        f"after {len(totals)} totals shards {done_ids} are done and the others"
        " ask for more: the number of calls of total must not depend on a"
        " shard's rows"
      )
    totals += (add([out.operand for out in outs if isinstance(out, Ask)]),)


_MAX_NORM = 1e30  # the largest clipping norm; float32 must hold it


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """`optax.clip_by_global_norm` with the norm over all shards, by one `total`.

  Raises:
    ValueError: if `max_norm` is no positive number, or infinite.
  """
  kind = f"a positive number, at most {_MAX_NORM:g}"
  checks.real("max_norm", max_norm, lambda x: 0 < x <= _MAX_NORM, kind)
  max_norm = float(max_norm)

  def update_fn(updates, state, params=None):
    del params
    # Squares add up over shards; norms do not.
    norm = jnp.sqrt(total(optax.tree.norm(updates, squared=True)))

    def clip(g):
      # As optax's: the division comes first, so that the bits are the same.
      return jax.lax.select(
        norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm
      )

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
