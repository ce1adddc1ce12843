"""Bytes on the way between workers and a server, counted on what is sent.

Without a codec, parameters and messages are the bytes of their layout
(`asgd.wire`); a code is packed, and its packet is counted. Of a server whose
updates are codes, a ticket is the updates since the one before of its worker,
or the parameters if those are fewer bytes, as for a worker that is new.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, wire
from asgd.compression import packing
from asgd.simulator.steps import Steps


class Received(NamedTuple):
  """What a trace and the packets tell of a message; the rest is computed."""

  time: float
  worker: int
  job: int
  bytes_up: int = 0  # 0 where it does not travel: a peer's to itself
  bytes_down: int = 0
  residual_norm: float = 0.0


class Sent(NamedTuple):
  """What a server with codes of updates has sent; plain data."""

  total: int  # bytes of all updates so far
  version: int  # of the last of them
  seen: dict[int, int]  # worker -> total at its last ticket
  tickets: dict[tuple[int, int], int]  # (worker, seq) -> bytes of an open one


NOTHING_SENT = Sent(0, 0, {}, {})


class Traffic:
  """What is sent up and down, of one server or shard."""

  def __init__(
    self, steps: Steps, state: base.ServerState, sent: Sent = NOTHING_SENT
  ):
    """Reads shapes and dtypes of a server's state only; `sent` is what was
    before, if its updates are codes."""
    params = state.params
    self._dense = wire.layout(params, compress=steps.wire).nbytes
    self._packing = self._updates = None
    if steps.codec is not None:
      self._packing = compression.layout(steps.codec, params)
    update = compression.last_update(state.opt_state)
    if update is not None:
      self._updates = packing.layout(update)
      stats = getattr(params, "stats", ())  # they are sent as they are
      self._stats = wire.layout(stats).nbytes
    total, version, seen, tickets = sent
    self.sent = Sent(total, version, dict(seen), dict(tickets))

  def up(self, message: Any) -> tuple[int, float]:
    """Returns (bytes, residual norm) of a message, whose code is of NumPy
    arrays."""
    if self._packing is None:
      return self._dense, 0.0
    return len(packing.pack(self._packing, message)), float(message.residual)

  def send(self, worker: int, seq: int) -> None:
    """A ticket is sent for a job, with parameters that are new."""
    if self._updates is None:
      return
    sent = self.sent
    since = sent.total - sent.seen.get(worker, -self._dense)
    sent.seen[worker] = sent.total
    sent.tickets[worker, seq] = min(since, self._dense)

  def sent_bytes(self, worker: int, seq: int) -> int:
    """Returns the bytes of a ticket that is open, and new."""
    if self._updates is None:
      return self._dense
    return self.sent.tickets[worker, seq]

  def join(self, worker: int) -> None:
    """A place has a new worker, which has no parameters."""
    self.sent.seen.pop(worker, None)

  def end(self, worker: int, seq: int, ticket: base.Ticket) -> int:
    """A ticket is closed; returns the bytes that it was sent with."""
    if self._updates is not None:
      return self.sent.tickets.pop((worker, seq), 0)
    return self._dense if ticket.fresh else 0

  def update(self, state: base.ServerState) -> None:
    """A message was received; an update may have been made."""
    if self._updates is None or int(state.version) == self.sent.version:
      return
    code = compression.last_update(state.opt_state)
    # Copied: the server's state is given up to the next update.
    code = jax.tree.map(np.array, code)
    more = len(packing.pack(self._updates, code)) + self._stats
    total = self.sent.total + more
    self.sent = self.sent._replace(total=total, version=int(state.version))
