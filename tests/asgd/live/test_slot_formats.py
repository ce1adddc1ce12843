"""What lies in slots: bytes of trees, and packed codes of their own length."""

import kit
import numpy as np
import pytest

from asgd import compression
from asgd.compression import packing
from asgd.live.links.remote import _LocalSlots
from asgd.live.slots import MESSAGES, PARAMS, SharedMemory, SlotCounts

PART = {"w": np.arange(6, dtype=np.float32)}
CODE = compression.Values(np.array([0, 0, 5, 0, 0, 0], np.float32))
LAYOUT = packing.layout(CODE)


def shared(folder):
  like = PART, LAYOUT, PART
  return SharedMemory(folder / "shard-0", SlotCounts(2, 2), like)


def test_a_code_has_the_bytes_that_it_needs(tmp_path):
  memory, worker = shared(tmp_path), shared(tmp_path)
  worker.write(MESSAGES, 1, CODE, 7)
  data = packing.pack(LAYOUT, CODE)
  assert memory.content_nbytes(MESSAGES, 1) == len(data) < LAYOUT.most
  kit.same(memory.read(MESSAGES, 1, 7), CODE)
  memory.write(PARAMS, 0, PART, 3)
  assert memory.content_nbytes(PARAMS, 0) == 64
  # What is packed already is taken as it is.
  memory.write(MESSAGES, 0, np.frombuffer(data, np.uint8), 8)
  kit.same(memory.read(MESSAGES, 0, 8), CODE)


def test_what_does_not_unpack_is_a_bad_code(tmp_path):
  memory = shared(tmp_path)
  memory.write(MESSAGES, 0, CODE, 7)
  memory._slots[MESSAGES][0][26] ^= 4
  with pytest.raises(packing.BadCode, match="its CRC-32 differs"):
    memory.read(MESSAGES, 0, 7)
  for length in (-(2**62), 2**62, 3):  # what the file says is not believed
    memory._lengths[MESSAGES][0] = length
    assert 0 <= memory.content_nbytes(MESSAGES, 0) <= LAYOUT.most
    with pytest.raises(packing.BadCode):
      memory.read(MESSAGES, 0, 7)
  with pytest.raises(packing.BadCode, match="1,000 bytes, where .* at most 49"):
    memory.write(MESSAGES, 0, np.zeros(1000, np.uint8), 9)
  with pytest.raises(ValueError, match="does not hold what"):
    memory.read(MESSAGES, 0, 9)


def test_a_worker_elsewhere_keeps_its_messages_packed():
  memory = _LocalSlots(LAYOUT)
  memory.write(MESSAGES, 0, CODE, 7)
  data = memory.read(MESSAGES, 0, 7)
  assert data.dtype == np.uint8
  assert data.tobytes() == packing.pack(LAYOUT, CODE)
  dense = _LocalSlots(PART)
  dense.write(MESSAGES, 0, PART, 7)
  assert dense.read(MESSAGES, 0, 7) is PART
