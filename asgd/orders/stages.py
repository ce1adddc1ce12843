"""Stages: few workers at first, and more after given numbers of messages."""

from collections.abc import Sequence
from typing import Any

from asgd.checks import integer, shown

Stages = tuple[tuple[int, int], ...]  # (workers, messages), both increasing


def read(pairs: Any, round: int = 0, warm_start: int = 0) -> Stages:
  """Returns the stages of rules, as tuples.

  Args:
    pairs: pairs (workers, messages): `workers` workers may start jobs until
      `messages` messages have been received.
    round: `Rules.round`; rounds exclude stages.
    warm_start: `Rules.warm_start`; it excludes stages, as it is a stage of one
      worker.

  Raises:
    ValueError: for a stage that is no such pair, for numbers that do not
      increase, and for stages with rounds or a warm start.

  Example:
    >>> read([[1, 100], [4, 300]])
    ((1, 100), (4, 300))
  """
  stages: list[tuple[int, int]] = []
  for stage in pairs:
    if not isinstance(stage, tuple | list) or len(stage) != 2:
      raise ValueError(
        "stages must be pairs (workers, messages), as ((1, 100), (4, 300)), not"
        f" {shown(stage)}"
      )
    workers, messages = (integer("a number of stages", size) for size in stage)
    if stages and not (workers > stages[-1][0] and messages > stages[-1][1]):
      raise ValueError(
        "stages must have more workers and messages than those before, but"
        f" {(workers, messages)} follows {stages[-1]}"
      )
    stages.append((workers, messages))
  if stages and (round or warm_start):
    raise ValueError(
      "stages are for workers that do not wait for each other, not for rounds,"
      " and a warm start is the stage (1, messages): leave round and warm_start"
      " out"
    )
  return tuple(stages)


def ends(stages: Stages, received: int) -> bool:
  """Whether a stage has ended with the last of the received messages."""
  return any(received == messages for _, messages in stages)


def admitted(
  stages: Stages, received: int, present: Sequence[int]
) -> set[int]:
  """Returns the workers that the current stage admits: the first ones of
  `present`, which is sorted; after the last stage, all of them.

  Example:
    >>> admitted(((1, 100), (2, 300)), 100, [0, 3, 4])
    {0, 3}
  """
  counts = (workers for workers, messages in stages if received < messages)
  return {*present[: next(counts, len(present))]}
