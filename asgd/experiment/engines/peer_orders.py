"""The order of a simulated cell of peers, computed before the simulation or
during it.

Over a network an order depends on the bytes of messages. A codec makes the
bytes depend on the values. Such an order is computed event by event while the
peers compute, so the size of each message is known when it is sent.
"""

from typing import Any

import numpy as np

from asgd import base, simulator
from asgd.orders.network import LinkUse


class FixedPeerOrder:
  """An order that is known before the first message.

  Attributes:
    peers: the peers of the cell.
  """

  def __init__(self, plan: Any, seed: int):
    """Makes the order of a cell."""
    # A user's order has given times, so no network delays it.
    self._links = None if plan.has_own_order() else plan.links()
    self._trace: base.Trace = plan.trace(seed, links=self._links)
    self.peers: simulator.Peers = plan.peers(seed, self._trace)
    # The rows from a RECEIVE up to the next RECEIVE run together: a row after a
    # message, such as a mix, belongs to that message.
    end_rows = simulator.end_of_message(self._trace)[1:] - 1
    self._end_rows = np.append(end_rows, len(self._trace.time))

  def until(self, messages: int) -> simulator.PeerRecords:
    """Simulates until `messages` are received in all; returns the records of
    the new ones."""
    return self.peers.run(int(self._end_rows[messages - 1]))

  def use(self) -> LinkUse | None:
    """Returns the use of the links until the end; None without a network."""
    return self._links and self._links.use(float(self._trace.time.max()))

  def save(self) -> None:
    """Returns None: a checkpoint need not store this order."""

  def rebuild(self, rows: int, saved: Any) -> None:
    """Does nothing: the order has all its rows."""


class GrownPeerOrder:
  """An order over a network that is computed during the simulation.

  Attributes:
    peers: the peers of the cell.
  """

  def __init__(self, plan: Any, seed: int):
    """Starts the order of a cell."""
    self._total = plan.messages
    self._links = plan.links(self._size)
    self._queue = plan.begin(seed, self._links)
    self.peers: simulator.Peers = plan.peers(seed, self._queue.rows)
    self._parts: list[simulator.PeerRecords] = []  # of this call of `until`
    self._received = 0
    # Sizes in the order of the calls of `_size`, and how many of them this
    # object has used. After a resume the first ones are from the checkpoint.
    self._sizes: list[float] = []
    self._n_used = 0
    self._size_of: dict[tuple[int, int], float] = {}  # by (sender, seq)

  def until(self, messages: int) -> simulator.PeerRecords:
    """Simulates until `messages` are received in all; returns the records of
    the new ones."""
    self._parts = []
    while self._received < messages or self._row_follows():
      rows, end = self._queue.rows, self.peers.event
      if end == len(rows):
        self._queue.advance()
        continue
      # An event of the queue makes at most one RECEIVE row. All its rows are
      # simulated before the next event.
      while end < len(rows) and (
        self._received < messages or rows[end].action != base.RECEIVE
      ):
        end += 1
      self._run_rows(end)
    return simulator.join_records(self._parts)

  def _row_follows(self) -> bool:
    """Whether a row that belongs to the last message may follow: a row before
    the next RECEIVE."""
    rows, event = self._queue.rows, self.peers.event
    if event < len(rows):
      return rows[event].action != base.RECEIVE
    if self._received == self._total:  # no RECEIVE follows
      return self._queue.next_time is not None
    return not self._queue.next_receives

  def _run_rows(self, end: int) -> None:
    """Simulates the rows up to, not including, row `end`."""
    part = self.peers.run(end)
    self._received += len(part.loss)
    self._parts.append(part)

  def _size(self, sender: int, seq: int | None) -> float:
    """Returns the bytes of the message that a peer sends now."""
    # Each receiver gets a copy of a message, with the same size.
    if seq is not None and (sender, seq) in self._size_of:
      return self._size_of[sender, seq]
    if self._n_used == len(self._sizes):
      # The message must exist before it has a size.
      self._run_rows(len(self._queue.rows))
      self._sizes.append(self.peers.nbytes(sender, seq))
    nbytes = self._sizes[self._n_used]
    self._n_used += 1
    if seq is not None:
      self._size_of[sender, seq] = nbytes
    return nbytes

  def use(self) -> LinkUse:
    """Returns the use of the links until the last row."""
    return self._links.use(self._queue.rows[self.peers.event - 1].time)

  def save(self) -> list[float]:
    """Returns the sizes so far, in the order of the calls of `_size`."""
    return self._sizes

  def rebuild(self, rows: int, saved: list[float] | None) -> None:
    """Computes the first `rows` rows again, from saved sizes."""
    self._sizes = list(saved or ())
    while len(self._queue.rows) < rows:
      self._queue.advance()
    past_rows = self._queue.rows[:rows]
    self._received = sum(row.action == base.RECEIVE for row in past_rows)


Order = FixedPeerOrder | GrownPeerOrder


def order_of(plan: Any, seed: int) -> Order:
  """Returns the order of a cell."""
  is_coded = plan.gossip.compressed and plan.call_network is not None
  grows = is_coded and not plan.has_own_order()
  return (GrownPeerOrder if grows else FixedPeerOrder)(plan, seed)
