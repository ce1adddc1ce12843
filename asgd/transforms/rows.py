"""Storage for one tree per worker, updated in place.

Whatever keeps something for each worker (momentum, accumulators) keeps it in
`Rows`, and pays for one row per update whatever the number of workers.
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


def check_workers(workers: int) -> None:
  """Raises ValueError unless `workers` is a positive whole number."""
  if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
    raise ValueError(
      f"workers must be a positive whole number, not {workers!r}"
    )
