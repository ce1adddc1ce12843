"""Parameters that a worker rebuilds from the packed updates of shards.

A new worker's ticket carries the complete parameters. Later tickets carry the
packed updates since the previous ticket. The worker decodes the updates and
adds them one after the other, as the shard did. So the parameters of the worker
and of the shard have the same bits.
"""

import functools
from typing import Any

import jax
import numpy as np

from asgd import base, compression, wire
from asgd.compression import packing
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.slots import PARAMS, UPDATES, WrongSlot, message_stamp


class OutOfStep(Exception):
  """A ticket does not follow the last one that the worker has read."""


@functools.lru_cache(maxsize=32)
def compile_rebuild(codec: compression.Codec) -> Any:
  """Returns the compiled function (parameters, code) -> updated parameters."""
  return jax.jit(functools.partial(compression.rebuild, codec))


@functools.cache
def _cpu() -> jax.Device | None:
  """Returns the CPU device: shards add updates there, too. Returns None, which
  stands for JAX's default device, in a process without the CPU platform."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None


class RebuiltParams:
  """A shard's part of the parameters, for one incarnation of a worker."""

  def __init__(self, codec: compression.Codec, shapes: Any):
    """Starts without parameters; `shapes` has the shapes and dtypes of the
    shard's parameters."""
    weights = base.weights_of(shapes)  # codes carry weights, no statistics
    self._shapes, self._rebuild = shapes, compile_rebuild(codec)
    self._layout = compression.layout(codec, weights)
    self._make_blank = functools.partial(compression.blank, codec, weights)
    stats = getattr(shapes, "stats", ())
    self._stats_layout = wire.layout(stats) if jax.tree.leaves(stats) else None
    self._params, self._version = None, -1

  def warm_up(self) -> None:
    """Compiles the addition of an update, by a call with zeros."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._shapes)
    with jax.default_device(_cpu()):
      jax.block_until_ready(self._rebuild(zeros, self._make_blank().code))

  def take(self, memory: Any, ticket: Frame) -> Any:
    """Returns the shard's part of the parameters of a ticket, as arrays that do
    not share memory with a slot. After an error the object is unchanged.

    Raises:
      WrongSlot: the slot of the ticket has been overwritten.
      OutOfStep: the ticket does not follow the last one.
      BadCode: the updates cannot be unpacked.
    """
    if ticket.flag == frames.WHOLE:
      self._params = _copy_params(memory, ticket)
    elif self._version != (
      ticket.version if ticket.flag == frames.KEPT else int(ticket.value)
    ):
      raise OutOfStep(f"{ticket} does not follow version {self._version}")
    elif ticket.flag == frames.UPDATES:
      stamp = message_stamp(ticket.worker, ticket.seq)
      data = memory.read(UPDATES, ticket.message, stamp)
      codes, stats = self._read_updates(data)
      params = self._params
      with jax.default_device(_cpu()):
        for code in codes:
          params = self._rebuild(params, code)
        params = jax.tree.map(np.asarray, params)
      self._params = params if stats is None else params._replace(stats=stats)
    self._version = ticket.version
    return self._params

  def _read_updates(self, data: np.ndarray) -> tuple[list[Any], Any]:
    """Unpacks a ticket's updates, uint8[n]. Returns (codes, statistics), with
    None as statistics if `data` has none. Raises BadCode."""
    codes, stats = [], None
    end = data.size  # the end of the codes
    if end and self._stats_layout is not None:
      end = max(end - self._stats_layout.nbytes, 0)
      if data.size < self._stats_layout.nbytes:
        raise packing.BadCode(
          f"{data.size} bytes of updates are too few: the statistics at their"
          f" end have {self._stats_layout.nbytes}"
        )
      aligned = data[end:].copy()
      views = wire.read(self._stats_layout, aligned)
      stats = jax.tree.map(np.array, views)
    start = 0
    while start < end:
      packet_size = packing.first_length(data[start:end])
      packet = data[start : start + packet_size]
      codes.append(packing.unpack(self._layout, packet).code)
      start += packet_size
    return codes, stats


def _copy_params(memory: Any, ticket: Frame) -> Any:
  """Returns a copy of the complete parameters of a ticket. Raises WrongSlot if
  the shard reused their slot meanwhile."""
  stamp = int(ticket.value)
  params = jax.tree.map(np.array, memory.read(PARAMS, ticket.params, stamp))
  # The check follows the copy: the slot may be overwritten during it.
  if memory.stamp(PARAMS, ticket.params) != stamp:
    raise WrongSlot("what the shard sent", PARAMS, ticket.params)
  return params
