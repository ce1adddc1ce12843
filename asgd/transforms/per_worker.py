"""A state for each worker: wraps any transform.

Multi-ASGD, DANA and the per-worker form of DC-ASGD keep one momentum or one
accumulator for each worker. They are the ordinary transform, wrapped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class PerWorkerState(NamedTuple):
  """The wrapped transform's states, stacked."""

  inner: optax.OptState  # every leaf [N, ...], row i for worker i


def read_row(stacked: optax.OptState, worker: jax.Array) -> optax.OptState:
  """Returns one worker's row of a stacked tree."""
  return jax.tree.map(lambda x: x[worker], stacked)


def write_row(
  stacked: optax.OptState, worker: jax.Array, row: optax.OptState
) -> optax.OptState:
  """Returns the stacked tree with one worker's row replaced."""
  return jax.tree.map(lambda x, y: x.at[worker].set(y), stacked, row)


def stack(tree: optax.OptState, workers: int) -> optax.OptState:
  """Returns the tree repeated along a new leading axis of workers."""
  return jax.tree.map(
    lambda x: jnp.repeat(jnp.asarray(x)[None], workers, axis=0), tree
  )


def check_workers(workers: int) -> None:
  """Raises ValueError unless `workers` is a positive whole number."""
  if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
    raise ValueError(
      f"workers must be a positive whole number, not {workers!r}"
    )


def per_worker(
  tx: optax.GradientTransformation, workers: int
) -> optax.GradientTransformationExtraArgs:
  """Gives each worker its own state of `tx`.

  Args:
    tx: any transform.
    workers: N, how many workers there are. A worker number of N or more is
      not detected under jit: `orders.check` finds it in a trace.

  Returns:
    A transform whose update needs the extra arg `worker`, int32[].

  Example:
    >>> import jax.numpy as jnp
    >>> tx = per_worker(optax.trace(0.5), workers=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for worker in (0, 0, 1):
    ...   u, state = tx.update(jnp.ones(()), state, worker=worker)
    ...   print(u)
    1.0
    1.5
    1.0
  """
  check_workers(workers)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return PerWorkerState(stack(tx.init(params), workers))

  def update_fn(updates, state, params=None, *, worker, **extra_args):
    row = read_row(state.inner, worker)
    updates, row = tx.update(updates, row, params, worker=worker, **extra_args)
    return updates, PerWorkerState(write_row(state.inner, worker, row))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
