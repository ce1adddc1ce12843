"""Slots in shared memory: what does not fit, is damaged or was removed."""

import mmap
import os
import shutil

import numpy as np
import pytest

from asgd.live.slots import (
  DamagedSnapshot,
  SharedMemory,
  SlotCounts,
  check_room,
  slots_nbytes,
)

PART = {"w": np.arange(6, dtype=np.float32)}


def shared(folder, log=4):
  like = PART, PART, PART
  return SharedMemory(folder / "shard-0", SlotCounts(3, log), like)


def test_memory_that_does_not_fit_is_refused_before_it_is_taken(
  tmp_path, monkeypatch
):
  with pytest.raises(ValueError, match=r"no room for \d+ MB of shared memory"):
    shared(tmp_path, log=10**14)
  assert not (tmp_path / "shard-0" / "messages").exists()
  nbytes = slots_nbytes(SlotCounts(3, 10**30), PART)
  assert nbytes == (3 + 10**30) * mmap.PAGESIZE
  with pytest.raises(ValueError, match="a smaller log .server.log"):
    check_room(tmp_path, nbytes)
  check_room(tmp_path, 1)

  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "posix_fallocate", full)
  with pytest.raises(ValueError, match="no room .*No space left on device"):
    shared(tmp_path / "other")
  assert not (tmp_path / "other" / "shard-0" / "params").exists()


def test_memory_of_other_settings_is_named_with_the_remedy(tmp_path):
  shared(tmp_path)
  with pytest.raises(ValueError, match="go on from the last checkpoint"):
    shared(tmp_path, log=5)


@pytest.mark.parametrize("text", ["{}", "[]", "", "\0what", '{"image": 7}'])
def test_a_snapshot_that_cannot_be_read_is_told_apart_from_none(tmp_path, text):
  held = shared(tmp_path)
  assert held.load() is None
  held.save(PART, {"rows": 1})
  tree, meta = shared(tmp_path).load()
  np.testing.assert_array_equal(tree["w"], PART["w"])
  assert meta == {"rows": 1}
  (tmp_path / "shard-0" / "snapshot.json").write_text(text)
  again = shared(tmp_path)
  with pytest.raises(DamagedSnapshot, match=r"snapshot.json is damaged and is"):
    again.load()
  again.save(PART, {"rows": 2})
  assert again.load()[1] == {"rows": 2}
  again.forget()
  assert again.load() is None


def test_memory_that_is_removed_meanwhile_says_how_to_go_on(tmp_path):
  held = shared(tmp_path)
  held.save(PART, {})
  shutil.rmtree(tmp_path / "shard-0")
  with pytest.raises(ValueError, match="is gone: it was .*same command"):
    held.save(PART, {})
