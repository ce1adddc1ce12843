"""A state for each worker: wraps any transform.

Multi-ASGD, DANA and the per-worker form of DC-ASGD keep one momentum or one
accumulator for each worker. They are the ordinary transform, wrapped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Rows(NamedTuple):
  """A tree for each worker, of which one is read and written at a time.

  XLA copies a whole [N, ...] buffer when a row of it is read and then written
  in one program. So a new row waits beside the buffer and is written before
  the next one is read: a write followed by a read is done in place.
  """

  stored: optax.OptState  # every leaf [N, ...], stale in row `owner`
  pending: optax.OptState  # every leaf [...], the present row of `owner`
  owner: jax.Array  # int32[]


def make_rows(row: optax.OptState, workers: int) -> Rows:
  """Returns the same row for each of N workers."""
  stored = jax.tree.map(
    lambda x: jnp.repeat(jnp.asarray(x)[None], workers, axis=0), row
  )
  return Rows(stored, row, jnp.zeros([], jnp.int32))


def settle(rows: Rows) -> optax.OptState:
  """Returns all rows, every leaf [N, ...]."""
  return jax.tree.map(
    lambda x, y: x.at[rows.owner].set(y), rows.stored, rows.pending
  )


def read(rows: Rows, worker: jax.Array) -> tuple[optax.OptState, Rows]:
  """Returns a worker's row, and the rows to `write` to."""
  stored = settle(rows)
  return jax.tree.map(lambda x: x[worker], stored), rows._replace(stored=stored)


def write(rows: Rows, worker: jax.Array, row: optax.OptState) -> Rows:
  """Returns the rows, that came from `read`, with the worker's row replaced."""
  return rows._replace(pending=row, owner=worker)


def peek(rows: Rows, worker: jax.Array) -> optax.OptState:
  """Returns a worker's row where nothing is to be written."""
  return jax.tree.map(
    lambda x, y: jnp.where(worker == rows.owner, y, x[worker]),
    rows.stored,
    rows.pending,
  )


class PerWorkerState(NamedTuple):
  """State of `per_worker`."""

  inner: Rows  # the wrapped transform's states


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
    ...   u, state = tx.update(jnp.ones(()), state, worker=jnp.int32(worker))
    ...   print(u)
    1.0
    1.5
    1.0
  """
  check_workers(workers)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return PerWorkerState(make_rows(tx.init(params), workers))

  def update_fn(updates, state, params=None, *, worker, **extra_args):
    row, rows = read(state.inner, worker)
    updates, row = tx.update(updates, row, params, worker=worker, **extra_args)
    return updates, PerWorkerState(write(rows, worker, row))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
