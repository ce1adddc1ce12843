"""Slots in shared memory: what does not fit, is damaged or was removed."""

import mmap
import os
import shutil

import jax
import kit
import numpy as np
import pytest

from asgd import wire
from asgd.live.slots import (
  MESSAGES,
  PARAMS,
  DamagedSnapshot,
  SharedMemory,
  SlotCounts,
  WrongSlot,
  check_room,
  message_stamp,
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
  nbytes = slots_nbytes(SlotCounts(3, 10**30), (PART, PART))
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
  with pytest.raises(ValueError, match="resume from the last checkpoint"):
    shared(tmp_path, log=5)


@pytest.mark.parametrize("text", ["{}", "[]", "", "\0what", '{"image": 7}'])
def test_a_snapshot_that_cannot_be_read_is_told_apart_from_none(tmp_path, text):
  held = shared(tmp_path)
  assert held.load() is None
  held.save(PART, {"rows": 1})
  tree, meta = shared(tmp_path).load()
  np.testing.assert_array_equal(tree["w"], PART["w"])
  assert meta == {"rows": 1}
  (tmp_path / "shard-0" / "snapshot").write_text(text)
  again = shared(tmp_path)
  with pytest.raises(DamagedSnapshot, match="snapshot is damaged and is"):
    again.load()
  again.save(PART, {"rows": 2})
  assert again.load()[1] == {"rows": 2}
  again.forget()
  assert again.load() is None


def test_memory_that_is_removed_meanwhile_says_how_to_go_on(tmp_path):
  held = shared(tmp_path)
  held.save(PART, {})
  shutil.rmtree(tmp_path / "shard-0")
  with pytest.raises(ValueError, match="is missing: it was .*same command"):
    held.save(PART, {})


def test_a_slot_that_holds_another_message_is_refused(tmp_path):
  memory = shared(tmp_path)
  memory.write(MESSAGES, 1, PART, message_stamp(0, 5))
  read = memory.read(MESSAGES, 1, message_stamp(0, 5))
  np.testing.assert_array_equal(read["w"], PART["w"])
  for stamp in (message_stamp(1, 5), message_stamp(0, 6)):
    with pytest.raises(WrongSlot, match="messages slot 1 .* from the last"):
      memory.read(MESSAGES, 1, stamp)
  with pytest.raises(WrongSlot, match="messages slot 0"):  # never written
    memory.read(MESSAGES, 0, message_stamp(0, 0))


def test_a_writer_that_is_killed_on_the_way_leaves_no_message(
  tmp_path, monkeypatch
):
  memory, stamp = shared(tmp_path), message_stamp(2, 7)
  memory.write(MESSAGES, 0, PART, stamp)

  def killed(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(wire, "_copy", killed)
  with pytest.raises(KeyboardInterrupt):
    memory.write(MESSAGES, 0, PART, stamp)
  with pytest.raises(WrongSlot):
    memory.read(MESSAGES, 0, stamp)


def test_a_device_view_is_made_once_and_shows_what_is_written_later(tmp_path):
  memory, stamp = shared(tmp_path), message_stamp(0, 1)
  memory.write(MESSAGES, 0, PART, stamp)
  view = memory.device_view(MESSAGES, 0, stamp)
  double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))
  kit.same_bits(double(view), double(PART))
  other = jax.tree.map(lambda x: x + 1, PART)
  memory.write(MESSAGES, 0, other, stamp + 1)
  again = memory.device_view(MESSAGES, 0, stamp + 1)
  assert again is view
  kit.same_bits(double(view), double(other))
  with pytest.raises(WrongSlot):
    memory.device_view(MESSAGES, 0, stamp)


def test_a_device_view_of_numbers_that_are_converted_is_what_read_returns(
  tmp_path,
):
  memory = SharedMemory(
    tmp_path / "shard-0", SlotCounts(1, 1), (PART, PART, PART),
    compress="bfloat16",
  )
  for scale in (1, 2):
    memory.write(PARAMS, 0, {"w": scale * PART["w"]}, scale)
    found = memory.device_view(PARAMS, 0, scale)
    kit.same_bits(found, memory.read(PARAMS, 0, scale))


def test_files_removed_under_a_run_are_seen_to_be_others(tmp_path):
  """A worker that comes later writes to files that the shard does not see."""
  shard = shared(tmp_path)
  shutil.rmtree(tmp_path / "shard-0")
  worker, stamp = shared(tmp_path), message_stamp(0, 0)
  worker.write(MESSAGES, 0, PART, stamp)
  with pytest.raises(WrongSlot, match="was removed or changed"):
    shard.read(MESSAGES, 0, stamp)
  (tmp_path / "shard-0" / "params").unlink()
  assert shared(tmp_path).is_new  # though there are messages
