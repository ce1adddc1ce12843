"""Records of a simulation: fetched from the device, joined and cut."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.simulator.steps import Observation
from asgd.simulator.traffic import ReceivedMessage


def fetch(tree: Any) -> Any:
  """Returns a tree as NumPy arrays. `jax.device_get` does the same, but is slow
  for arrays that are in the host's memory already."""
  first_leaf = next(iter(jax.tree.leaves(tree)), None)
  if isinstance(first_leaf, jax.Array) and (
    not first_leaf.is_fully_replicated
    or any(device.platform != "cpu" for device in first_leaf.devices())
  ):
    return jax.device_get(tree)
  return jax.tree.map(np.asarray, tree)


def records(
  messages: list[ReceivedMessage], observations: list[Observation]
) -> base.Records:
  """Fetches the Observations of all messages in one call, and returns the
  records of these messages."""
  columns = zip(*messages, strict=True) if messages else ((),) * 6
  rows = fetch(observations)
  integers = np.array([row.integers for row in rows], np.int32).reshape(-1, 3)
  reals = np.array([row.reals for row in rows], np.float32).reshape(-1, 4)
  return of_columns(*columns, integers=integers, reals=reals)


def of_columns(
  time: npt.ArrayLike,
  worker: npt.ArrayLike,
  job: npt.ArrayLike,
  bytes_up: npt.ArrayLike,
  bytes_down: npt.ArrayLike,
  residual_norm: npt.ArrayLike,
  *,
  integers: npt.NDArray[np.int32],
  reals: npt.NDArray[np.float32],
) -> base.Records:
  """Returns records of U messages.

  Args:
    time, worker, job, bytes_up, bytes_down, residual_norm: [U], the fields of
      `ReceivedMessage`.
    integers: int32[U, 3], as in an Observation.
    reals: float32[U, 4], as in an Observation.
  """
  version, staleness, accepted = integers.T
  gap, loss, message_norm, update_norm = reals.T
  # A job that pushes nothing sends no message (`server.pushed`).
  is_sent = accepted.astype(bool) | (message_norm != 0)
  return base.Records(
    version,
    np.asarray(time, np.float64),
    np.asarray(worker, np.int32),
    np.asarray(job, np.int32),
    staleness,
    gap,
    loss,
    accepted.astype(bool),
    message_norm,
    update_norm,
    np.where(is_sent, np.asarray(bytes_up, np.int64), 0),
    np.asarray(bytes_down, np.int64),
    np.asarray(residual_norm, np.float32),
  )


def concatenate(parts: list[base.Records]) -> base.Records:
  """Joins records of consecutive parts of a run."""
  if not parts:
    return records([], [])
  return base.Records(*map(np.concatenate, zip(*parts, strict=True)))


def end_of_message(trace: base.Trace) -> npt.NDArray[np.intp]:
  """Returns int[U]: the row after each RECEIVE, where a run can be cut."""
  return np.flatnonzero(np.asarray(trace.action) == base.RECEIVE) + 1
