"""The updates of a shard that sends these to workers, not parameters.

Each update is packed once. A ticket is the updates since the one before of its
worker, in their order, or the parameters if these are not more bytes; the rule
is the simulator's, so that a replay counts the same. As many packets are kept
as a ticket may need: fewer bytes than the parameters have. They lie in a slot
beside each snapshot of the shard, for its recovery.
"""

import collections
from typing import Any

import jax
import numpy as np

from asgd import base, simulator, wire
from asgd.live.slots import UPDATES, message_stamp
from asgd.simulator.traffic import Sent

WHOLE = -1  # the base of a ticket that is the parameters


class Updates(simulator.Traffic):
  """The bytes that a shard sends, and the packets of its last updates."""

  def __init__(self, steps: simulator.Steps, state: base.ServerState):
    """Reads shapes and dtypes of a server's state only."""
    super().__init__(steps, state)
    self._packets: collections.deque[bytes] = collections.deque()
    self._nbytes = 0  # of them
    self._turn = 0  # of the slots beside snapshots, that to be written next

  @property
  def are_sent(self) -> bool:
    """Whether workers are sent updates, not parameters with each ticket."""
    return self._updates is not None

  def _keep(self, packet: bytes) -> None:
    self._packets.append(packet)
    self._nbytes += len(packet)
    while self._nbytes >= self.dense:
      self._nbytes -= len(self._packets.popleft())

  def roll_back(self, state: base.ServerState) -> None:
    """See the base."""
    super().roll_back(state)
    self._packets.clear()
    self._nbytes = 0

  def write(
    self,
    memory: Any,
    slot: int,
    key: tuple[int, int],
    params: Any,
    *,
    new: bool,
  ) -> int:
    """Sends a ticket of the present parameters, with its updates in a slot of
    their own; in a recovery they lie there already. Returns the version that
    they are added to; WHOLE: the ticket is the parameters."""
    codes = self.send(*key)
    if codes is None:
      return WHOLE
    packets: list[bytes] = []
    while codes:
      packets.insert(0, self._packets[-1 - len(packets)])
      codes -= len(packets[0])
    if new:
      data = [np.frombuffer(packet, np.uint8) for packet in packets]
      if packets and self.stats.nbytes:
        data.append(np.zeros(self.stats.nbytes, np.uint8))
        stats = jax.tree.map(np.asarray, params.stats)
        wire.write(self.stats, stats, data[-1])
      content = np.concatenate([np.empty(0, np.uint8), *data])
      memory.write(UPDATES, slot, content, message_stamp(*key))
    return self.sent.version - len(packets)

  def recount(self, memory: Any, slots: dict[tuple[int, int], int]) -> None:
    """Counts open tickets, of these message slots, by their updates in
    memory."""
    for key in self.sent.tickets.keys() & slots.keys():
      slot, size = slots[key], self.dense
      if memory.stamp(UPDATES, slot) == message_stamp(*key):
        size = memory.length(UPDATES, slot)
      self.sent.tickets[key] = size

  def describe(self) -> dict[str, Any]:
    """Returns the counts of sent bytes, as JSON."""
    total, version, seen, tickets = self.sent
    open_tickets = sorted((*key, nbytes) for key, nbytes in tickets.items())
    return {"sent": [total, version, sorted(seen.items()), open_tickets]}

  def save(self, memory: Any, first: int, rows: int) -> dict[str, Any]:
    """Writes the packets to a slot, of the two from `first` on, beside the
    snapshot after so many rows; returns their position, as JSON."""
    slot, self._turn = first + self._turn, 1 - self._turn
    data = np.frombuffer(b"".join(self._packets), np.uint8)
    memory.write(UPDATES, slot, data, rows + 1)
    return {"slot": slot, "lengths": list(map(len, self._packets))}

  def load(self, meta: dict[str, Any], memory: Any, first: int) -> None:
    """Continues from a snapshot, with the packets of `meta["packets"]`. A
    checkpoint has none: all workers will be new."""
    total, version, seen, open_tickets = meta["sent"]
    tickets = {(worker, seq): nbytes for worker, seq, nbytes in open_tickets}
    packets = meta.get("packets")
    self.resume(Sent(total, version, dict(seen) if packets else {}, tickets))
    if packets:
      slot, lengths = packets["slot"], packets["lengths"]
      data = memory.read(UPDATES, slot, meta["rows"] + 1).tobytes()
      ends = np.cumsum(lengths).tolist()
      self._packets.extend(
        data[end - length : end]
        for end, length in zip(ends, lengths, strict=True)
      )
      self._nbytes = sum(lengths)
      self._turn = 1 - (slot - first)
