"""Packed updates, which a shard sends to workers instead of parameters.

Each update is packed once. A ticket carries the updates since the worker's
previous ticket, in order. If the parameters have no more bytes than these
updates, the ticket carries the parameters. The simulator has the same rule
(`Traffic.count_ticket`), so a replay counts the same bytes. The shard keeps the
latest packets that together have fewer bytes than the parameters: no ticket
needs more. For a recovery, each of the two snapshots has an updates slot with
the packets that the shard had at the time of the snapshot.
"""

import collections
from typing import Any

import jax
import numpy as np

from asgd import base, simulator, wire
from asgd.live.slots import UPDATES, message_stamp
from asgd.simulator.traffic import Sent

WHOLE = -1  # returned by `write` if the ticket carries the parameters


class SentUpdates(simulator.Traffic):
  """Counts the bytes that a shard sends, and stores its latest packets."""

  def __init__(self, steps: simulator.Steps, state: base.ServerState):
    """Reads only shapes and dtypes of the server's state."""
    super().__init__(steps, state)
    self._packets: collections.deque[bytes] = collections.deque()
    self._nbytes = 0  # sum over the packets
    self._next_slot = 0  # 0 or 1: the slot for the packets of the next snapshot

  @property
  def are_enabled(self) -> bool:
    """Whether tickets carry updates; otherwise all carry the parameters."""
    return self._update_layout is not None

  def _store_packet(self, packet: bytes) -> None:
    """Stores a packet, and drops the oldest packets that no ticket needs."""
    self._packets.append(packet)
    self._nbytes += len(packet)
    # A ticket carries the parameters if its updates need as many bytes or more.
    while self._nbytes >= self.dense_nbytes:
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
    writes: bool,
  ) -> int:
    """Counts a new ticket, and writes the updates that it carries to its slot.

    Args:
      memory: the memory of the shard.
      slot: index of the ticket's updates slot and of its message slot.
      key: (worker, seq) of the ticket.
      params: the server's parameters at the ticket's version.
      writes: False in a recovery, where the updates lie in the slot already.

    Returns:
      The version that the updates are added to, or WHOLE if the ticket carries
      the parameters.
    """
    nbytes = self.count_ticket(*key)
    if nbytes is None:
      return WHOLE
    # `nbytes` is the total of the updates that the worker lacks: select the
    # latest packets until they have that size.
    packets: list[bytes] = []
    while nbytes:
      packets.insert(0, self._packets[-1 - len(packets)])
      nbytes -= len(packets[0])
    if writes:
      pieces = [np.frombuffer(packet, np.uint8) for packet in packets]
      if packets and self.stats_layout.nbytes:
        # Updates do not contain BatchNorm statistics: append their values.
        pieces.append(np.zeros(self.stats_layout.nbytes, np.uint8))
        stats = jax.tree.map(np.asarray, params.stats)
        wire.write(self.stats_layout, stats, pieces[-1])
      # The empty array is needed because `concatenate` refuses an empty list.
      content = np.concatenate([np.empty(0, np.uint8), *pieces])
      memory.write(UPDATES, slot, content, message_stamp(*key))
    # A packet is one update, which raised the version by 1.
    return self.sent.version - len(packets)

  def recount(self, memory: Any, slots: dict[tuple[int, int], int]) -> None:
    """Sets the number of bytes that each open ticket carried, after a recovery:
    the bytes of the updates in the ticket's slot, or of the parameters.

    Args:
      memory: the memory of the shard.
      slots: (worker, seq) of a ticket -> its message slot.
    """
    for key in self.sent.tickets.keys() & slots.keys():
      slot, nbytes = slots[key], self.dense_nbytes
      # If the ticket carried the parameters, the slot has an older stamp.
      if memory.stamp(UPDATES, slot) == message_stamp(*key):
        nbytes = memory.content_nbytes(UPDATES, slot)
      self.sent.tickets[key] = nbytes

  def describe(self) -> dict[str, Any]:
    """Returns the counts of sent bytes, as data for JSON."""
    total, version, total_at_last_ticket, tickets = self.sent
    totals = sorted(total_at_last_ticket.items())
    open_tickets = sorted((*key, nbytes) for key, nbytes in tickets.items())
    return {"sent": [total, version, totals, open_tickets]}

  def save(self, memory: Any, first_slot: int, rows: int) -> dict[str, Any]:
    """Writes the packets to the slot `first_slot` or the next one, in turn.

    Args:
      memory: the memory of the shard.
      first_slot: the first of the two updates slots of snapshots.
      rows: number of rows of the journal before the snapshot.

    Returns:
      The slot and the lengths of the packets, as data for JSON.
    """
    # The slots take turns: a kill during the write leaves the packets of the
    # previous snapshot, which is still the valid one.
    slot = first_slot + self._next_slot
    self._next_slot = 1 - self._next_slot
    data = np.frombuffer(b"".join(self._packets), np.uint8)
    memory.write(UPDATES, slot, data, rows + 1)  # 0 is the stamp of a new slot
    return {"slot": slot, "lengths": list(map(len, self._packets))}

  def load(self, meta: dict[str, Any], memory: Any, first_slot: int) -> None:
    """Restores the counts, and the packets at `meta["packets"]`. A checkpoint
    has no packets: after it all workers are new, and need parameters."""
    total, version, totals, open_tickets = meta["sent"]
    tickets = {(worker, seq): nbytes for worker, seq, nbytes in open_tickets}
    packets = meta.get("packets")
    total_at_last_ticket = dict(totals) if packets else {}
    self.resume(Sent(total, version, total_at_last_ticket, tickets))
    if packets:
      slot, lengths = packets["slot"], packets["lengths"]
      data = memory.read(UPDATES, slot, meta["rows"] + 1).tobytes()
      ends = np.cumsum(lengths).tolist()
      self._packets.extend(
        data[end - length : end]
        for end, length in zip(ends, lengths, strict=True)
      )
      self._nbytes = sum(lengths)
      self._next_slot = 1 - (slot - first_slot)
