"""Records of a simulation: fetched from the device, joined and cut."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.simulator.steps import Observation
from asgd.simulator.traffic import ReceivedMessage


def fetch(tree: Any) -> Any:
  """Returns a tree as NumPy arrays, like `jax.device_get`, which takes its time
  over each array that is here already."""
  first = next(iter(jax.tree.leaves(tree)), None)
  if isinstance(first, jax.Array) and (
    not first.is_fully_replicated
    or any(device.platform != "cpu" for device in first.devices())
  ):
    return jax.device_get(tree)
  return jax.tree.map(np.asarray, tree)


def records(
  messages: list[ReceivedMessage], observations: list[Observation]
) -> base.Records:
  """Fetches, once for all, what `Steps.receive` returned of each message."""
  time, worker, job, bytes_up, bytes_down, residual_norm = (
    zip(*messages, strict=True) if messages else ((),) * 6
  )
  rows = fetch(observations)
  whole = np.array([row.whole for row in rows], np.int32).reshape(-1, 3).T
  real = np.array([row.real for row in rows], np.float32).reshape(-1, 4).T
  version, staleness, accepted = whole
  gap, loss, message_norm, update_norm = real
  # What pushes nothing is not sent (`server.pushed`).
  sent = accepted.astype(bool) | (message_norm != 0)
  return base.Records(
    version,
    np.array(time, np.float64),
    np.array(worker, np.int32),
    np.array(job, np.int32),
    staleness,
    gap,
    loss,
    accepted.astype(bool),
    message_norm,
    update_norm,
    np.where(sent, np.array(bytes_up, np.int64), 0),
    np.array(bytes_down, np.int64),
    np.array(residual_norm, np.float32),
  )


def concatenate(parts: list[base.Records]) -> base.Records:
  """Joins records of consecutive stretches of a run."""
  if not parts:
    return records([], [])
  return base.Records(*map(np.concatenate, zip(*parts, strict=True)))


def end_of_message(trace: base.Trace) -> npt.NDArray[np.intp]:
  """Returns int[U]: the row after each RECEIVE, where a run can be cut."""
  return np.flatnonzero(np.asarray(trace.action) == base.RECEIVE) + 1
