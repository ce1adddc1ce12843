"""A state for each worker, updated in place.

Multi-ASGD, DANA and the per-worker form of DC-ASGD keep one momentum or one
accumulator for each worker: an ordinary transform, wrapped in `per_worker`. An
update costs one row of `WorkerRows`, whatever the number of workers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks


class WorkerRows(NamedTuple):
  """A tree for each worker; an update reads and writes one of them.

  XLA copies a complete [N, ...] buffer if one program reads a row and then
  writes it. So a new row waits beside the buffer, and is written just before
  the next read: XLA does a write followed by a read in place.
  """

  stored: optax.OptState  # every leaf [N, ...]; row `owner` is out of date
  pending: optax.OptState  # every leaf [...], the current row of `owner`
  owner: jax.Array  # int32[], the worker with the pending row


def make_rows(row: optax.OptState, workers: int) -> WorkerRows:
  """Returns rows of N workers that all equal `row`, a tree of arrays."""
  stored = jax.tree.map(
    lambda x: jnp.repeat(jnp.asarray(x)[None], workers, axis=0), row
  )
  # Worker 0 owns the pending row at first: it equals its stored one.
  return WorkerRows(stored, row, jnp.zeros([], jnp.int32))


def get_row(rows: jax.Array, index: jax.Array) -> jax.Array:
  """Returns a row of [N, ...]. The caller ensures that `index`, int32[], is in
  range: the checks of `rows[index]` take time."""
  return jax.lax.dynamic_index_in_dim(rows, index, keepdims=False)


def put_row(rows: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
  """Returns [N, ...] with a row replaced; `index` is as in `get_row`. Unlike
  `rows.at[index].set`, it does not read the old row."""
  return jax.lax.dynamic_update_index_in_dim(rows, row, index, 0)


def settle(rows: WorkerRows) -> optax.OptState:
  """Returns all rows, every leaf [N, ...]."""
  return jax.tree.map(
    lambda stored, pending: put_row(stored, pending, rows.owner),
    rows.stored,
    rows.pending,
  )


def read(
  rows: WorkerRows, worker: jax.Array
) -> tuple[optax.OptState, WorkerRows]:
  """Returns the row of a worker, int32[], and the rows to `write` to."""
  # Write the pending row before any read, so that XLA works in place.
  stored = settle(rows)
  row = jax.tree.map(lambda x: get_row(x, worker), stored)
  return row, rows._replace(stored=stored)


def write(
  rows: WorkerRows, worker: jax.Array, row: optax.OptState
) -> WorkerRows:
  """Replaces the row of a worker; `rows` are those that `read` returned."""
  # `read` has stored the row that was pending, so nothing is lost here.
  return rows._replace(pending=row, owner=worker)


def peek(rows: WorkerRows, worker: jax.Array) -> Any:
  """Returns the state of one worker from the rows of all; writes nothing.

  Args:
    rows: the rows of all workers, such as `PerWorkerState.inner`.
    worker: int32[], below N.

  Returns:
    The tree of that worker, its leaves [...].

  Source:
    none: it is bookkeeping.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import transforms
    >>> tx = transforms.per_worker(optax.trace(0.5), workers=2)
    >>> state = tx.init(jnp.float32(0.0))
    >>> _, state = tx.update(jnp.float32(4.0), state, worker=jnp.int32(1))
    >>> for worker in range(2):
    ...   print(transforms.peek(state.inner, jnp.int32(worker)).trace)
    0.0
    4.0
  """
  # The stored row of `owner` is out of date: return its pending row.
  return jax.tree.map(
    lambda stored, pending: jnp.where(
      worker == rows.owner, pending, stored[worker]
    ),
    rows.stored,
    rows.pending,
  )


class PerWorkerState(NamedTuple):
  """State of `per_worker`."""

  inner: WorkerRows  # the wrapped transform's states


def per_worker(
  tx: optax.GradientTransformation, workers: int
) -> base.Transform:
  """Gives each worker a separate state of a transform.

    state^i, u <- tx(g, state^i),   i the worker that sent g

  Args:
    tx: any transform. If it takes extra args, it gets the Delay.
    workers: N, the number of states.

  Returns:
    A transform. Its update needs the extra arg `worker`, int32[]. An index of
    N or more is not detected under jit; runtimes check it (`Server.workers`).

  Source:
    Hakimi et al. 2019: with a momentum it is Multi-ASGD.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> tx = asgd.per_worker(optax.trace(0.5), workers=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for worker in (0, 0, 1):
    ...   u, state = tx.update(jnp.ones(()), state, worker=jnp.int32(worker))
    ...   print(u)
    1.0
    1.5
    1.0
  """
  checks.integer("workers", workers)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return PerWorkerState(make_rows(tx.init(params), workers))

  def update_fn(updates, state, params=None, *, worker, **extra_args):
    row, rows = read(state.inner, worker)
    # `tx` may read the worker, too, as a nested per-worker transform does.
    updates, row = tx.update(updates, row, params, worker=worker, **extra_args)
    return updates, PerWorkerState(write(rows, worker, row))

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]
