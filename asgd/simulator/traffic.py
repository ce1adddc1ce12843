"""Bytes between workers and a server, counted from the sent arrays.

Without a codec, parameters and messages have the bytes of their layout
(`asgd.wire`); a code has the bytes of its packet. If a server's updates are
codes, a ticket has the updates since the worker's last ticket, or the complete
parameters if these are not more bytes, as for a new worker.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, wire
from asgd.compression import packing
from asgd.simulator.steps import PureSteps, Steps


class ReceivedMessage(NamedTuple):
  """The columns of a message from the trace and the packets, not computed."""

  time: float
  worker: int
  job: int
  bytes_up: int = 0  # 0 for a message that a peer sends to itself
  bytes_down: int = 0
  residual_norm: float = 0.0


class Sent(NamedTuple):
  """Sent bytes of a server with codes of updates; plain data."""

  total: int  # bytes of all updates so far
  version: int  # the server's version after the last of them
  seen: dict[int, int]  # worker -> total at its last ticket
  tickets: dict[tuple[int, int], int]  # (worker, seq) of an open one -> bytes


NOTHING_SENT = Sent(0, 0, {}, {})


class Traffic:
  """Bytes that one server or shard and its workers send each other."""

  def __init__(
    self,
    steps: Steps | PureSteps,
    state: base.ServerState,
    sent: Sent = NOTHING_SENT,
  ):
    """Reads only shapes and dtypes of a server's state; `sent` is that of the
    run to continue."""
    params = state.params
    self.dense = wire.layout(params, compress=steps.wire).nbytes
    self._packing = self._updates = None
    self.stats = wire.layout(getattr(params, "stats", ()))  # as they are
    if steps.codec is not None:
      self._packing = compression.layout(steps.codec, params)
    update = compression.last_update(state.opt_state)
    if update is not None:
      self._updates = packing.layout(update)
    self.sent = NOTHING_SENT
    self.resume(sent)

  def resume(self, sent: Sent) -> None:
    """Continues after what was sent before."""
    total, version, seen, tickets = sent
    self.sent = Sent(total, version, dict(seen), dict(tickets))

  def up(self, message: Any) -> tuple[int, float]:
    """Returns (bytes, residual norm) of a message; a code has NumPy arrays."""
    if self._packing is None:
      return self.dense, 0.0
    return len(packing.pack(self._packing, message)), float(message.residual)

  def send(self, worker: int, seq: int) -> int | None:
    """Counts a ticket with new parameters. Returns the bytes of its codes; None
    if it is sent as complete parameters."""
    if self._updates is None:
      return None
    sent = self.sent
    # A new worker counts as lacking more bytes than the parameters have.
    codes = sent.total - sent.seen.get(worker, -self.dense)
    # Statistics travel beside the codes of updates, as they are.
    size = codes + (self.stats.nbytes if codes else 0)
    sent.seen[worker] = sent.total
    sent.tickets[worker, seq] = min(size, self.dense)
    return codes if size < self.dense else None

  def sent_bytes(self, worker: int, seq: int) -> int:
    """Returns the bytes of a ticket that is open, and new."""
    if self._updates is None:
      return self.dense
    return self.sent.tickets[worker, seq]

  def join(self, worker: int) -> None:
    """Counts a new worker, which has no parameters."""
    self.sent.seen.pop(worker, None)

  def lose(self, worker: int, seq: int) -> None:
    """Counts a lost ticket."""
    self.sent.tickets.pop((worker, seq), None)

  def end(self, worker: int, seq: int, ticket: base.Ticket) -> int:
    """Counts a closed ticket; returns the bytes that it was sent with."""
    if self._updates is not None:
      return self.sent.tickets.pop((worker, seq), 0)
    return self.dense if ticket.fresh else 0

  def update(self, state: base.ServerState) -> None:
    """Counts the update of a received message, if there is one."""
    if self._updates is None or int(state.version) == self.sent.version:
      return
    code = compression.last_update(state.opt_state)
    # Copied: the next update donates the server's state.
    code = jax.tree.map(np.array, code)
    if not np.isfinite(code.residual):  # a diverged update is not encoded
      self.roll_back(state)
      return
    packet = packing.pack(self._updates, code)
    self.sent = self.sent._replace(
      total=self.sent.total + len(packet), version=int(state.version)
    )
    self._keep(packet)

  def roll_back(self, state: base.ServerState) -> None:
    """Makes each worker's next ticket complete parameters, because no codes
    lead to this state."""
    self.sent.seen.clear()
    self.sent = self.sent._replace(version=int(state.version))

  def _keep(self, packet: bytes) -> None:
    """Stores a new packet, in a subclass that sends it."""
