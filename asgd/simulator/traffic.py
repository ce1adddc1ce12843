"""Bytes between workers and a server, counted from the sent arrays.

Without a codec, parameters and messages have the bytes of their layout
(`asgd.wire`); a code has the bytes of its packet. If a server's updates are
codes, a ticket carries the updates since the worker's last ticket; if the
complete parameters take no more bytes, as for a new worker, it carries these.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, wire
from asgd.compression import packing
from asgd.simulator.steps import PureSteps, Steps


class ReceivedMessage(NamedTuple):
  """The columns of a record that are read from the trace and the packets; the
  server computes the other columns."""

  time: float
  worker: int
  job: int
  bytes_up: int = 0  # 0 for a message that a peer sends to itself
  bytes_down: int = 0
  residual_norm: float = 0.0


class Sent(NamedTuple):
  """Sent bytes of a server that sends its updates as codes; plain data."""

  total: int  # bytes of all updates so far
  version: int  # the server's version after the last counted update
  total_at_ticket: dict[int, int]  # worker -> `total` at its last ticket
  tickets: dict[tuple[int, int], int]  # (worker, seq), open ticket -> bytes


NOTHING_SENT = Sent(0, 0, {}, {})


class Traffic:
  """Bytes that one server or shard and its workers send each other."""

  def __init__(
    self,
    steps: Steps | PureSteps,
    state: base.ServerState,
    sent: Sent = NOTHING_SENT,
  ):
    """Reads only shapes and dtypes of a server's state; `sent` has the bytes
    that were sent before, in a run that is continued."""
    params = state.params
    self.dense_nbytes = wire.layout(params, compress=steps.wire).nbytes
    self._code_layout = self._update_layout = None
    # Statistics travel without a codec.
    self.stats_layout = wire.layout(getattr(params, "stats", ()))
    if steps.codec is not None:
      self._code_layout = compression.layout(steps.codec, params)
    update = compression.last_update(state.opt_state)
    if update is not None:
      self._update_layout = packing.layout(update)
    self.sent = NOTHING_SENT
    self.resume(sent)

  def resume(self, sent: Sent) -> None:
    """Continues after the bytes that were sent before."""
    self.sent = Sent(
      *(sent.total, sent.version),
      *(dict(sent.total_at_ticket), dict(sent.tickets)),
    )

  def measure_message(self, message: Any) -> tuple[int, float]:
    """Returns (bytes, residual norm) of a message; a code has NumPy arrays."""
    if self._code_layout is None:
      return self.dense_nbytes, 0.0
    packet = packing.pack(self._code_layout, message)
    return len(packet), float(message.residual)

  def count_ticket(self, worker: int, seq: int) -> int | None:
    """Counts a ticket with new parameters. Returns the bytes of its codes; None
    if the ticket carries the complete parameters."""
    if self._update_layout is None:
      return None
    sent = self.sent
    # A new worker counts as lacking as many bytes as the parameters have.
    last_total = sent.total_at_ticket.get(worker, -self.dense_nbytes)
    code_nbytes = sent.total - last_total
    # Statistics travel beside the codes of updates.
    nbytes = code_nbytes + (self.stats_layout.nbytes if code_nbytes else 0)
    sent.total_at_ticket[worker] = sent.total
    sent.tickets[worker, seq] = min(nbytes, self.dense_nbytes)
    return code_nbytes if nbytes < self.dense_nbytes else None

  def sent_bytes(self, worker: int, seq: int) -> int:
    """Returns the bytes of an open ticket with new parameters."""
    if self._update_layout is None:
      return self.dense_nbytes
    return self.sent.tickets[worker, seq]

  def forget_worker(self, worker: int) -> None:
    """Forgets the last ticket of an index: a worker that joins has none."""
    self.sent.total_at_ticket.pop(worker, None)

  def drop_ticket(self, worker: int, seq: int) -> None:
    """Drops the bytes of a lost ticket."""
    self.sent.tickets.pop((worker, seq), None)

  def close_ticket(self, worker: int, seq: int, ticket: base.Ticket) -> int:
    """Drops the bytes of a closed ticket, and returns them; 0 for a ticket that
    a worker had kept."""
    if self._update_layout is not None:
      return self.sent.tickets.pop((worker, seq), 0)
    return self.dense_nbytes if ticket.fresh else 0

  def count_update(self, state: base.ServerState) -> None:
    """Counts the update of a received message, if there is one."""
    if self._update_layout is None or int(state.version) == self.sent.version:
      return
    code = compression.last_update(state.opt_state)
    # Copied: the next update donates the server's state.
    code = jax.tree.map(np.array, code)
    if not np.isfinite(code.residual):  # a diverged update is not encoded
      self.roll_back(state)
      return
    packet = packing.pack(self._update_layout, code)
    self.sent = self.sent._replace(
      total=self.sent.total + len(packet), version=int(state.version)
    )
    self._store_packet(packet)

  def roll_back(self, state: base.ServerState) -> None:
    """Makes each worker's next ticket carry complete parameters, because no
    codes lead to this state."""
    self.sent.total_at_ticket.clear()
    self.sent = self.sent._replace(version=int(state.version))

  def _store_packet(self, packet: bytes) -> None:
    """Does nothing; a subclass that sends packets stores a new one."""
