"""Bytes on the way between workers and a server, counted on what is sent.

Without a codec, parameters and messages are the bytes of their layout
(`asgd.wire`); a code is packed, and its packet is counted.
"""

from typing import Any, NamedTuple

from asgd import base, compression, wire
from asgd.compression import packing
from asgd.simulator.steps import Steps


class Received(NamedTuple):
  """What a trace and the packets tell of a message; the rest is computed."""

  time: float
  worker: int
  job: int
  bytes_up: int
  bytes_down: int
  residual_norm: float


class Traffic:
  """What is sent up and down, of one server or shard."""

  def __init__(self, steps: Steps, params: base.Params):
    """Reads shapes and dtypes of the parameters only."""
    self._dense = wire.layout(params, compress=steps.wire).nbytes
    self._packing = None
    if steps.codec is not None:
      self._packing = compression.layout(steps.codec, params)

  def up(self, message: Any) -> tuple[int, float]:
    """Returns (bytes, residual norm) of a message, whose code is of NumPy
    arrays."""
    if self._packing is None:
      return self._dense, 0.0
    return len(packing.pack(self._packing, message)), float(message.residual)

  def down(self, ticket: base.Ticket) -> int:
    """Returns the bytes that a ticket was sent with."""
    return self._dense if ticket.fresh else 0
