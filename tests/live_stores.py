"""What outlives a shard, in memory: it is lost with the process."""

import jax
import numpy as np

from asgd import base, simulator, wire
from asgd.live.shard import ShardStorage
from asgd.live.slots import WrongSlot


class Memory(dict):
  """Slots that hold references, in place of a `SharedMemory`: (kind, slot) ->
  (content, stamp)."""

  name = "memory"
  has_updates = False

  def __init__(self):
    super().__init__()
    self.is_new = False  # it is never lost while the journal is in memory
    self._snapshot = None

  def write(self, kind, slot, tree, stamp):
    self[kind, slot] = tree, stamp

  def read(self, kind, slot, stamp):
    tree, written = self[kind, slot]
    if written != stamp:
      raise WrongSlot(self.name, kind, slot)
    return tree

  device_view = read

  def content_nbytes(self, kind, slot):
    tree, _ = self[kind, slot]
    return wire.layout(tree).nbytes

  def stamp(self, kind, slot):
    return self.get((kind, slot), (None, 0))[1]

  def read_copy(self, kind, slot):
    return self[kind, slot][0]

  def save(self, tree, meta):
    self._snapshot = jax.tree.map(np.array, tree), meta

  def load(self):
    return self._snapshot

  def adopt(self):
    self.is_new = False

  def forget(self):
    self._snapshot = None


class Journal:
  """Rows, in place of a `FileJournal`."""

  name = "journal"

  def __init__(self):
    self._events = []

  def append(self, event):
    self._events.append(event)

  def events(self):
    return list(self._events)

  def sync(self):
    pass

  close = sync


class Sink:
  """Records, in place of a `FileSink`."""

  name = "records"

  def __init__(self):
    self._parts = []

  def append(self, records):
    self._parts.append(records)

  def truncate(self, count):
    records = self.records()
    self._parts = [base.Records(*(column[:count] for column in records))]

  @property
  def count(self):
    return sum(len(part.loss) for part in self._parts)

  def records(self):
    return simulator.concatenate(self._parts)

  def sync(self):
    pass

  close = sync


def make_store(**fields):
  """An empty store of a shard, but for the given fields."""
  return ShardStorage(Memory(), Journal(), Sink())._replace(**fields)
