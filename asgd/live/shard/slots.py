"""Free and used slots of a shard's memory."""

import collections
from collections.abc import Iterable
from typing import Any

from asgd.live.slots import PARAMS, SlotCounts


class SlotTable:
  """Counts the uses of each slot.

  A parameters slot is free when no ticket, no snapshot and no later SEND of the
  same version refers to it. A message slot belongs to its ticket, then to the
  log until the next snapshot.
  """

  def __init__(self, memory: Any, counts: SlotCounts):
    self.memory, self.counts = memory, counts
    self.uses = collections.Counter[int]()  # params slot -> number of uses
    # The latest parameters that were sent, and their slot.
    self.published: tuple[Any, int] | None = None
    # Params slots that the snapshot refers to.
    self.snapshot_slots: list[int] = []
    self.log_slots: list[int] = []  # message slots since the snapshot
    # Stacks: the slot that was freed last is used first.
    self.free_params = list(range(counts.params))[::-1]
    self.free_messages = list(range(counts.messages))[::-1]
    # Worker -> message slots of its lost tickets. A worker that does not know
    # of the loss may still write to these slots. So they are not free until the
    # next incarnation joins.
    self.lost_slots: dict[int, list[int]] = {}

  def publish(self, params: Any, stamp: int, slot: int = -1) -> int:
    """Makes parameters readable for workers. Returns their slot, after counting
    one more use.

    Args:
      params: the parameters. Each version is a new object and is written once.
      stamp: identifies the content of the slot; unique in the run.
      slot: in a recovery, the slot in which the parameters lie already.
    """
    if self.published and self.published[0] is params:  # no update since then
      slot = self.published[1]
      self.uses[slot] += 1
      return slot
    if slot < 0:
      slot = self.free_params.pop()
      self.memory.write(PARAMS, slot, params, stamp)
    else:
      # The parameters were written before the kill and are not written again:
      # a worker may be reading later parameters from the same slot.
      self.free_params.remove(slot)
    if self.published:
      self.release(self.published[1])
    self.published = params, slot
    self.uses[slot] += 2  # the ticket, and `published`
    return slot

  def use(self, slot: int) -> None:
    """Adds a use of a params slot."""
    if not self.uses[slot]:
      self.free_params.remove(slot)
    self.uses[slot] += 1

  def release(self, slot: int) -> None:
    """Ends a use of a params slot."""
    self.uses[slot] -= 1
    if self.uses[slot] == 0:
      self.free_params.append(slot)

  def take_message(self, slot: int = -1) -> int:
    """Reserves a free message slot, or in a recovery `slot`; returns it."""
    if slot < 0:
      return self.free_messages.pop()
    self.free_messages.remove(slot)
    return slot

  def keep_lost(self, worker: int, slot: int) -> None:
    """Adds the message slot of a lost ticket to `lost_slots`."""
    self.lost_slots.setdefault(worker, []).append(slot)

  def free_lost(self, worker: int) -> None:
    """Frees the message slots of earlier incarnations of a worker."""
    self.free_messages += self.lost_slots.pop(worker, [])

  def save(self, state: Any, meta: Any, params_slots: list[int]) -> None:
    """Saves a snapshot, and frees the message slots of the log. `params_slots`
    are the params slots that `meta` (JSON) refers to."""
    # The slots are freed after the write: until then, a recovery needs them.
    self.memory.save(state, meta)
    self.free_messages += self.log_slots
    self.log_slots = []
    # Add the uses of the new snapshot before the uses of the previous snapshot
    # end: a slot of both must never become free.
    for slot in params_slots:
      self.uses[slot] += 1
    for slot in self.snapshot_slots:
      self.release(slot)
    self.snapshot_slots = params_slots

  def recount(
    self, params_slots: Iterable[int], message_slots: Iterable[int]
  ) -> None:
    """Recomputes the counts from the slots of all tickets. The slots of the
    snapshot and of lost tickets stay in use; all others are free."""
    self.published = None
    self.uses.clear()
    self.uses.update(params_slots)
    self.uses.update(self.snapshot_slots)
    counts = self.counts
    taken_messages = set(message_slots).union(*self.lost_slots.values())
    # The messages of the log are lost, so their slots are free.
    self.free_params = [
      slot for slot in range(counts.params) if not self.uses[slot]
    ]
    self.free_messages = [
      slot for slot in range(counts.messages) if slot not in taken_messages
    ]
