"""Synchronous schedules in which microbatches enter from both ends."""

import collections
from collections.abc import Sequence

from asgd import checks
from asgd.pipeline.schedules.layout import synchronous, traits
from asgd.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule


def _check_even(**numbers: int) -> None:
  """Raises ValueError unless all counts are positive and even."""
  for name, value in numbers.items():
    checks.integer(name, value)
    if value % 2:
      raise ValueError(
        f"{name} must be even, because half of them go each way, not {value};"
        f" use {value + 1}"
      )


@traits()
def chimera(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """Chimera: two pipelines in opposite directions.

    idle / total = (p - 2) / (2 m + p - 2), if B = F and p divides m
    activations = p / 2 + 1 to p microbatches

  Stage s is on device s for the first half of a batch's microbatches (of an odd
  number, the larger one), and on device p - 1 - s for the second. Units of p
  microbatches follow each other ("direct concatenation"): the forwards of a
  unit fill what the backwards of the one before leave idle. Forward doubling
  and backward halving are left out: a table has no tasks of two or half a
  microbatch. With B = 2 F the ratio is the paper's for one unit, m = p:
  (p - 2) / (1.5 m + p - 2).

  Args:
    stages: p, an even number. There are p devices, with two stages on each.
    microbatches: m, of a batch.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or odd stages.

  Source:
    Li and Hoefler, "Chimera: efficiently training large-scale neural networks
    with bidirectional pipelines", SC 2021, arXiv:2107.06925, figure 3.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> chimera = schedules.chimera(4, 4)
    >>> print(table.to_text(chimera), end="")
    # chimera; every 4; flush
    0 | F0@0 F1@0 .    F2@3 B2@3 F3@3 B3@3 B0@0 .    B1@0
    1 | .    F0@1 F2@2 F1@1 F3@2 B2@2 B0@1 B3@2 B1@1 .
    2 | .    F2@1 F0@2 F3@1 F1@2 B0@2 B2@1 B1@2 B3@1 .
    3 | F2@0 F3@0 .    F0@3 B0@3 F1@3 B1@3 B2@0 .    B3@0
    >>> facts = analyze.analyze(chimera, analyze.costs(4, backward=1.0))
    >>> facts.bubble_of_total, facts.peak_activations.tolist()  # 2 / (8 + 2)
    (0.2, [3.0, 4.0, 4.0, 3.0])
  """
  _check_even(stages=stages)
  checks.integer("microbatches", microbatches)
  first_half_count = (microbatches + 1) // 2
  half = stages // 2
  orders = []
  for device in range(stages):
    tasks = []
    for i in range(microbatches):
      number = i if i < first_half_count else i - first_half_count
      stage = device if i < first_half_count else stages - 1 - device
      # Slots if all tasks take one: those of the two directions never meet.
      start = 2 * stages * (number // half) + 2 * (number % half)
      tasks.append((start + stage, FORWARD, stage, i))
      tasks.append((start + 2 * stages - 1 - stage, BACKWARD, stage, i))
    orders.append([task[1:] for task in sorted(tasks)])
  return synchronous("chimera", orders, microbatches, batches)


def _dualpipe(
  stages_here: Sequence[int],
  rank: int,
  ranks: int,
  microbatches: Sequence[Sequence[int]],
) -> list:
  """Returns the order of a device in DualPipe's eight steps.

  Args:
    stages_here: the device's stage in each direction.
    rank: distance from the nearer end, where the first direction starts.
    ranks: devices of one half, p / 2.
    microbatches: the number of microbatches of each direction.
  """
  order, pending_weights = [], collections.deque()
  # Each pair of iterators, by direction: the microbatches still to be done.
  forwards = [iter(numbers) for numbers in microbatches]
  backwards = [iter(numbers) for numbers in microbatches]

  def forward(direction):
    return FORWARD, stages_here[direction], next(forwards[direction])

  def backward(direction, split=False):
    microbatch = next(backwards[direction])
    if split:
      pending_weights.append((WEIGHT, stages_here[direction], microbatch))
    return INPUT if split else BACKWARD, stages_here[direction], microbatch

  to_middle = ranks - 1 - rank
  # [1] Fill the pipeline: forwards that enter at this end.
  for _ in range(2 * to_middle):
    order.append(forward(0))
  # [2] Forwards of both directions in turn.
  for _ in range(rank + 1):
    order += [forward(0), forward(1)]
  # [3] The first backwards, split, with their weights at once.
  for _ in range(to_middle):
    order += [backward(1, split=True), pending_weights.popleft(), forward(1)]
  # [4] Steady state: blocks of a forward and a backward.
  for turn in range(len(microbatches[0]) - 2 * ranks + rank + 1):
    pair = forward(0), backward(1)
    # As in DeepSeek's code, the middle devices run their first pair one after
    # the other: the neighbour waits for both.
    order += pair if turn == 0 and to_middle == 0 else [pair]
    order.append((forward(1), backward(0)))
  # [5] No forwards of the first direction remain.
  for _ in range(to_middle):
    order += [backward(1), (forward(1), backward(0))]
  # [6] Last backwards of both directions; later ones are split.
  for turn in range(2 * (rank + 1)):
    order.append(backward(1 - turn % 2, split=turn > rank))
  # [7] Weights fill the wait for the last backwards.
  for _ in range(to_middle):
    order += [pending_weights.popleft(), backward(0, split=True)]
  # [8] The remaining weights.
  return order + list(pending_weights)


@traits()
def dualpipe(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """DualPipe: forwards of one direction overlap backwards of the other.

    idle = (p / 2 - 1)(F&B + B - 3 W), at the most
    activations = p + 1 microbatches

  F&B is how long a block of a forward of one direction and a backward of the
  other takes. Where there is nothing to overlap with, backwards are split and
  their weights, W, done later. Stage s is on device s for the first half of a
  batch's microbatches, and on device p - 1 - s for the second.

  Args:
    stages, batches: as in `chimera`.
    microbatches: m, of a batch, an even number, 2 p at least.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are not even, or too few microbatches.

  Source:
    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, arXiv:2412.19437; the
    order is that of the README of its code.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> dual = schedules.dualpipe(2, 4)
    >>> print(table.to_text(dual), end="")
    # dualpipe; every 4; flush
    0 | F0@0 F2@1 F1@0 B2@1 F3@1&B0@0 B3@1 I1@0 W1@0
    1 | F2@0 F0@1 F3@0 B0@1 F1@1&B2@0 B1@1 I3@0 W3@0
    >>> facts = analyze.analyze(dual)
    >>> facts.idle.tolist(), facts.peak_activations.tolist()  # 2 / 2 - 1 = 0
    ([0.0, 0.0], [3.0, 3.0])
  """
  _check_even(stages=stages, microbatches=microbatches)
  if microbatches < 2 * stages:
    raise ValueError(
      f"dualpipe needs {2 * stages} microbatches for {stages} stages, not"
      f" {microbatches}; use more, or chimera"
    )
  halves = range(microbatches // 2), range(microbatches // 2, microbatches)
  orders = []
  for device in range(stages):
    mirror = stages - 1 - device
    is_near = device < mirror  # to the end where the first direction starts
    stages_here = (device, mirror) if is_near else (mirror, device)
    microbatches_of = halves if is_near else halves[::-1]
    rank = min(device, mirror)
    orders.append(_dualpipe(stages_here, rank, stages // 2, microbatches_of))
  return synchronous("dualpipe", orders, microbatches, batches)


@traits(chunks=2)
def dualpipe_v(
  devices: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """DualPipeV: DualPipe cut in half, so that nothing is replicated.

    stages s and 2 p - 1 - s are on device s
    idle = (p - 1)(F&B + B - 3 W), at the most
    activations = 2 p + 1 microbatches of a stage

  All microbatches go down and come up again. The order of device s is that of
  `dualpipe` with 2 p stages.

  Args:
    devices: p, each with two stages.
    microbatches: m, of a batch, 2 p at least.
    batches: as in `chimera`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: as `dualpipe`, which takes even counts only.

  Source:
    DeepSeek-AI, the README of DualPipe, 2025.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> dual = schedules.dualpipe_v(1, 2)
    >>> print(table.to_text(dual), end="")
    # dualpipe_v; every 2; flush
    0 | F0@0 F0@1 F1@0 B0@1 F1@1&B0@0 B1@1 I1@0 W1@0
    >>> facts = analyze.analyze(schedules.dualpipe_v(2, 4))
    >>> facts.idle.tolist()  # F&B = 3, B = 2, W = 1: (2 - 1) (3 + 2 - 3)
    [2.0, 2.0]
    >>> facts.peak_activations.tolist()
    [5.0, 5.0]
  """
  checks.integer("devices", devices)
  checks.integer("microbatches", microbatches)
  if microbatches < 2 * devices:
    raise ValueError(
      f"dualpipe_v needs {2 * devices} microbatches for {devices} devices, not"
      f" {microbatches}; use more, or zb_v"
    )
  streams = range(microbatches), range(microbatches)
  orders = [
    _dualpipe((device, 2 * devices - 1 - device), device, devices, streams)
    for device in range(devices)
  ]
  return synchronous("dualpipe_v", orders, microbatches, batches)
