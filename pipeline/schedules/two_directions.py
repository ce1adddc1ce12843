"""Synchronous schedules in which microbatches enter from both ends."""

import collections

from asgd import checks
from pipeline.schedules.layout import check_even, synchronous, traits
from pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule


@traits()
def chimera(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """Two pipelines in opposite directions (Li and Hoefler 2021).

  Stage s is on device s for the first half of a batch's microbatches (of an odd
  number, the larger one), and on device p - 1 - s for the second. Units of p
  microbatches follow each other ("direct concatenation"): the forwards of a
  unit fill what the backwards of the one before leave idle. Forward doubling
  and backward halving need tasks of two or half a microbatch, which no table
  has.
  """
  check_even(stages=stages)
  checks.whole("microbatches", microbatches)
  down = (microbatches + 1) // 2
  half = stages // 2
  orders = []
  for device in range(stages):
    tasks = []
    for i in range(microbatches):
      number = i if i < down else i - down
      stage = device if i < down else stages - 1 - device
      # Slots if all tasks take one: those of the two directions never meet.
      start = 2 * stages * (number // half) + 2 * (number % half)
      tasks.append((start + stage, FORWARD, stage, i))
      tasks.append((start + 2 * stages - 1 - stage, BACKWARD, stage, i))
    orders.append([task[1:] for task in sorted(tasks)])
  return synchronous("chimera", orders, microbatches, batches)


def _dualpipe(own, rank, ranks, microbatches):
  """The order of a device in DualPipe's eight steps; `own` are its two stages
  and `microbatches` those of each direction, `rank`, of so many `ranks`, is its
  distance from the nearer end, where its first direction starts."""
  order, waiting = [], collections.deque()
  forwards, backwards = ([iter(way) for way in microbatches] for _ in "FB")

  def forward(way):
    return FORWARD, own[way], next(forwards[way])

  def backward(way, split=False):
    microbatch = next(backwards[way])
    if split:
      waiting.append((WEIGHT, own[way], microbatch))
    return INPUT if split else BACKWARD, own[way], microbatch

  ahead = ranks - 1 - rank
  for _ in range(2 * ahead):
    order.append(forward(0))
  for _ in range(rank + 1):
    order += [forward(0), forward(1)]
  for _ in range(ahead):
    order += [backward(1, split=True), waiting.popleft(), forward(1)]
  for turn in range(len(microbatches[0]) - 2 * ranks + rank + 1):
    pair = forward(0), backward(1)
    # DeepSeek does not overlap the first ones in the middle: each is wanted
    # next door as soon as can be.
    order += pair if turn == 0 and ahead == 0 else [pair]
    order.append((forward(1), backward(0)))
  for _ in range(ahead):
    order += [backward(1), (forward(1), backward(0))]
  for turn in range(2 * (rank + 1)):
    order.append(backward(1 - turn % 2, split=turn > rank))
  for _ in range(ahead):
    order += [waiting.popleft(), backward(0, split=True)]
  return order + list(waiting)


@traits()
def dualpipe(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """Two directions; their forwards and backwards overlap (DeepSeek-V3, 2024).

  Stage s is on device s for the first half of a batch's microbatches, and on
  device p - 1 - s for the second. A forward of one direction and a backward of
  the other are one block; where there is nothing to overlap with, backwards are
  split and their weights done later.
  The stages, p, and the microbatches are even, and these 2 p at least.
  """
  check_even(stages=stages, microbatches=microbatches)
  if microbatches < 2 * stages:
    raise ValueError(
      f"dualpipe needs {2 * stages} microbatches for {stages} stages, not"
      f" {microbatches}; use more, or chimera"
    )
  half = range(microbatches // 2), range(microbatches // 2, microbatches)
  orders = []
  for device in range(stages):
    other = stages - 1 - device
    near = device < other  # to the end where the first direction starts
    own = (device, other) if near else (other, device)
    ways = half if near else half[::-1]
    rank = min(device, other)
    orders.append(_dualpipe(own, rank, stages // 2, ways))
  return synchronous("dualpipe", orders, microbatches, batches)


@traits(chunks=2)
def dualpipe_v(
  devices: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """DualPipe cut in half (DeepSeek 2025): stages s and 2 p - 1 - s are on
  device s, and all microbatches go down and come up again.

  The order of device s is that of `dualpipe` with 2 p stages; nothing is
  replicated. There are 2 p microbatches at least.
  """
  checks.whole("devices", devices)
  checks.whole("microbatches", microbatches)
  if microbatches < 2 * devices:
    raise ValueError(
      f"dualpipe_v needs {2 * devices} microbatches for {devices} devices, not"
      f" {microbatches}; use more, or zb_v"
    )
  both = range(microbatches), range(microbatches)
  orders = [
    _dualpipe((device, 2 * devices - 1 - device), device, devices, both)
    for device in range(devices)
  ]
  return synchronous("dualpipe_v", orders, microbatches, batches)
