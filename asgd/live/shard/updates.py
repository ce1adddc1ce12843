"""Packed updates, which a shard sends to workers in place of parameters.

Each update is packed once. A ticket carries the updates since the worker's
previous ticket, in order, or the parameters if these are fewer bytes. The rule
is the simulator's, so a replay counts the same bytes. The shard keeps only the
packets that a ticket may need: fewer bytes than the parameters have. A slot
beside each snapshot holds them for a recovery.
"""

import collections
from typing import Any

import jax
import numpy as np

from asgd import base, simulator, wire
from asgd.live.slots import UPDATES, message_stamp
from asgd.simulator.traffic import Sent

WHOLE = -1  # the base of a ticket that carries the parameters


class Updates(simulator.Traffic):
  """The bytes that a shard sends, and the packets of its last updates."""

  def __init__(self, steps: simulator.Steps, state: base.ServerState):
    """Reads only shapes and dtypes of the server's state."""
    super().__init__(steps, state)
    self._packets: collections.deque[bytes] = collections.deque()
    self._nbytes = 0  # sum over the packets
    self._turn = 0  # which of the two slots beside snapshots is written next

  @property
  def are_sent(self) -> bool:
    """Whether workers are sent updates, not parameters with each ticket."""
    return self._updates is not None

  def _keep(self, packet: bytes) -> None:
    """Keeps a packet, and drops the oldest ones that no ticket needs."""
    self._packets.append(packet)
    self._nbytes += len(packet)
    # A ticket that would need so many bytes carries the parameters instead.
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
    """Writes the updates that a ticket carries to its slot.

    Args:
      memory: of the shard.
      slot: updates slot of the ticket, with the index of its message slot.
      key: (worker, seq) of the ticket.
      params: the server's parameters, which the ticket is a version of.
      new: False in a recovery, where the updates lie in the slot already.

    Returns:
      The version that the updates are added to, or WHOLE if the ticket carries
      the parameters.
    """
    nbytes = self.send(*key)
    if nbytes is None:
      return WHOLE
    # `send` gives the bytes of the updates: the latest packets of that size.
    packets: list[bytes] = []
    while nbytes:
      packets.insert(0, self._packets[-1 - len(packets)])
      nbytes -= len(packets[0])
    if new:
      pieces = [np.frombuffer(packet, np.uint8) for packet in packets]
      if packets and self.stats.nbytes:
        # Updates do not move statistics (BatchNorm), so their values follow.
        pieces.append(np.zeros(self.stats.nbytes, np.uint8))
        stats = jax.tree.map(np.asarray, params.stats)
        wire.write(self.stats, stats, pieces[-1])
      # The empty array: `concatenate` refuses a list of none.
      content = np.concatenate([np.empty(0, np.uint8), *pieces])
      memory.write(UPDATES, slot, content, message_stamp(*key))
    # A packet is one update, which raised the version by 1.
    return self.sent.version - len(packets)

  def recount(self, memory: Any, slots: dict[tuple[int, int], int]) -> None:
    """Sets the bytes of each open ticket to those of its updates in memory, or
    of the parameters; `slots` gives the message slots of tickets."""
    for key in self.sent.tickets.keys() & slots.keys():
      slot, nbytes = slots[key], self.dense
      # A ticket that carries the parameters left an older stamp there.
      if memory.stamp(UPDATES, slot) == message_stamp(*key):
        nbytes = memory.length(UPDATES, slot)
      self.sent.tickets[key] = nbytes

  def describe(self) -> dict[str, Any]:
    """Returns the counts of sent bytes, as JSON."""
    total, version, seen, tickets = self.sent
    open_tickets = sorted((*key, nbytes) for key, nbytes in tickets.items())
    return {"sent": [total, version, sorted(seen.items()), open_tickets]}

  def save(self, memory: Any, first: int, rows: int) -> dict[str, Any]:
    """Writes the packets to one of the two slots `first` and `first + 1`, for
    the snapshot after `rows` rows; returns their position, as JSON."""
    # The slots take turns: a kill during the write leaves the packets of the
    # previous snapshot, which is still the valid one.
    slot, self._turn = first + self._turn, 1 - self._turn
    data = np.frombuffer(b"".join(self._packets), np.uint8)
    memory.write(UPDATES, slot, data, rows + 1)  # 0 is the stamp of a new slot
    return {"slot": slot, "lengths": list(map(len, self._packets))}

  def load(self, meta: dict[str, Any], memory: Any, first: int) -> None:
    """Restores the counts, and the packets at `meta["packets"]`. A checkpoint
    has no packets: after it all workers are new, and need parameters."""
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
