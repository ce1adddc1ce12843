"""Which blocks a device holds: by hand, in any order of uses."""

import pytest

from asgd.device_memory import BlockMemory

A, B, C = [(stage, "weights") for stage in range(3)]


def loaded(uses, room, passes=1):
  """Returns what is fetched, of blocks of one byte, without looking ahead."""
  memory, fetched = BlockMemory(uses, room), []
  for _ in range(passes):
    for at, blocks in enumerate(uses):
      for block in blocks:
        if block not in memory.held:
          fetched.append(block)
          memory.admit(block, 1, at)
      assert memory.bytes() <= room
  return fetched


def test_what_is_used_last_gives_way():
  # A B C B A: with room for two, C takes the place of A, whose next use comes
  # after that of B.
  uses = [[A], [B], [C], [B], [A]]
  assert loaded(uses, 2) == [A, B, C, A]
  assert loaded(uses, 3) == [A, B, C]
  assert loaded(uses, 1) == [A, B, C, B, A]
  # Over and over: at the last A it is C that is used later, in the next pass.
  assert loaded(uses, 2, passes=2) == [A, B, C, A, C, A]


def test_what_comes_next_is_fetched_if_it_is_not_in_the_way():
  memory = BlockMemory([[A], [B], [C], [B], [A]], 2)
  memory.admit(A, 1, 0)
  assert memory.ahead(0, lambda block: 1) == [B]
  memory.admit(B, 1, 0)
  assert memory.ahead(0, lambda block: 1) == []  # A and B are needed before C
  assert memory.ahead(1, lambda block: 1) == [C]  # in the place of A
  assert memory.admit(C, 1, 1) == [A]


def test_an_instruction_that_needs_more_than_there_is_room_for():
  memory = BlockMemory([[A, B]], 1)
  memory.admit(A, 1, 0)
  with pytest.raises(ValueError, match="needs 2 bytes at once"):
    memory.admit(B, 1, 0)
