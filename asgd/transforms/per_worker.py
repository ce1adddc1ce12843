"""A state for each worker: wraps any transform.

Multi-ASGD, DANA and the per-worker form of DC-ASGD keep one momentum or one
accumulator for each worker. They are the ordinary transform, wrapped.
"""

from typing import NamedTuple

import optax

from asgd.transforms import rows as rows_lib


class PerWorkerState(NamedTuple):
  """State of `per_worker`."""

  inner: rows_lib.Rows  # the wrapped transform's states


def per_worker(
  tx: optax.GradientTransformation, workers: int
) -> optax.GradientTransformationExtraArgs:
  """Gives each worker its own state of `tx`.

  Args:
    tx: any transform.
    workers: N, how many workers there are. A worker number of N or more is
      not detected under jit; runtimes check it (`Server.workers`).

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
  rows_lib.check_workers(workers)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params):
    return PerWorkerState(rows_lib.make_rows(tx.init(params), workers))

  def update_fn(updates, state, params=None, *, worker, **extra_args):
    row, rows = rows_lib.read(state.inner, worker)
    updates, row = tx.update(updates, row, params, worker=worker, **extra_args)
    return updates, PerWorkerState(rows_lib.write(rows, worker, row))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
