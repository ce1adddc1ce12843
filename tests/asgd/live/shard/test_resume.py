"""Shards of a consistent run go on from memory together, or none does."""

import numpy as np
import pytest

from asgd import base
from asgd.live.journal import FileJournal, journal_path
from asgd.live.setup import Setup
from asgd.live.shard.recovery import align_journals
from asgd.live.slots import SharedMemory, SlotCounts
from asgd.orders.protocol import Rules
from asgd.orders.trace import NO_SEQ, Event

PART = {"w": np.arange(3, dtype=np.float32)}
SETUP = Setup(Rules(), workers=2, jobs=9, shards=2, consistent=True)


def shard(folder, index, rows, saved):
  """A shard that wrote so many rows, and a snapshot at one of them."""
  journal = FileJournal(journal_path(folder, index))
  for worker in range(rows):
    journal.append(Event(1.0, worker, NO_SEQ, 0, base.JOIN))
  counts, like = SlotCounts(2, 2), (PART, PART, PART)
  memory = SharedMemory(folder / f"shard-{index}", counts, like)
  memory.save(PART, {"rows": saved})
  memory.adopt()


def fresh(folder):
  """Whether each shard would begin without its memory."""
  like = PART, PART, PART
  return [
    SharedMemory(folder / f"shard-{index}", SlotCounts(2, 2), like).is_new
    for index in range(2)
  ]


def journals(folder):
  return [journal_path(folder, index).read_bytes() for index in range(2)]


def test_shards_whose_memory_is_whole_go_on_from_it(tmp_path):
  shard(tmp_path, 0, rows=3, saved=2)
  shard(tmp_path, 1, rows=2, saved=1)  # it is behind, and will hear of the rest
  before = journals(tmp_path)
  assert align_journals(SETUP, tmp_path, tmp_path)
  assert fresh(tmp_path) == [False, False]
  assert journals(tmp_path) == before


@pytest.mark.parametrize("how", ["removed", "damaged", "too new"])
def test_if_one_cannot_none_does(tmp_path, how):
  shard(tmp_path, 0, rows=3, saved=2)
  shard(tmp_path, 1, rows=2, saved=3 if how == "too new" else 1)
  snapshot = tmp_path / "shard-1" / "snapshot"
  if how == "removed":
    (tmp_path / "shard-1" / "messages").unlink()
  elif how == "damaged":
    data = snapshot.read_bytes()
    snapshot.write_bytes(data.replace(b'"rows": 1', b'"rows": 2'))
  assert not align_journals(SETUP, tmp_path, tmp_path)
  assert fresh(tmp_path) == [True, True]
  lead, follower = journals(tmp_path)
  assert follower == lead
  independent = SETUP._replace(consistent=False)
  assert align_journals(independent, tmp_path, tmp_path)  # each for itself
