"""Schedules that flush: all stages are updated at the end of a batch."""

import itertools

from asgd import checks
from asgd.pipeline.schedules import layout
from asgd.pipeline.table import BACKWARD, FORWARD, Schedule, check_positive

_FILLER = -1  # a microbatch that fills a short group; no step has it


@layout.traits()
def gpipe(
  stages: int, microbatches: int, *, batches: int = 1, reverse: bool = False
) -> Schedule:
  """GPipe: all forwards, then all backwards.

    idle = (p - 1)(F + B) on each device, (p - 1) / (m + p - 1) of the time
    activations = m microbatches

  F and B are the times of a stage's forward and backward.

  Args:
    stages: p, one on each device.
    microbatches: m, of a batch.
    batches: how many follow each other, with a flush between them.
    reverse: backwards start with the last microbatch, as in the paper's figure
      2c and as autograd does. The batch takes the same time in either order.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or a `reverse`
      that is not True or False.

  Source:
    Huang et al., "GPipe: efficient training of giant neural networks using
    pipeline parallelism", NeurIPS 2019, arXiv:1811.06965, figure 2c.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> gpipe = schedules.gpipe(2, 3)
    >>> print(table.to_text(gpipe), end="")
    # gpipe; every 3; flush
    0 | F0 F1 F2 .  .  B0 B1 B2
    1 | .  F0 F1 F2 B0 B1 B2 .
    >>> facts = analyze.analyze(gpipe)  # F = 1, B = 2
    >>> facts.idle.tolist(), facts.bubble_of_total  # (2 - 1) 3, 1 / 4
    ([3.0, 3.0], 0.25)
    >>> facts.peak_activations.tolist()
    [3.0, 3.0]
  """
  check_positive(stages=stages, microbatches=microbatches)
  checks.flag("reverse", reverse)
  step = -1 if reverse else 1
  orders = [
    [(FORWARD, stage, i) for i in range(microbatches)]
    + [(BACKWARD, stage, i) for i in range(microbatches)[::step]]
    for stage in range(stages)
  ]
  return layout.synchronous("gpipe", orders, microbatches, batches)


@layout.traits()
def one_f_one_b(
  stages: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """1F1B with a flush: one forward and one backward in turn.

    idle = (p - 1)(F + B) on each device, as of `gpipe`
    activations = min(p - s, m) microbatches at stage s

  Args:
    stages, microbatches, batches: as in `gpipe`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers.

  Source:
    Fan et al., "DAPPLE: a pipelined data parallel approach for training large
    models", PPoPP 2021, arXiv:2007.01045; PipeDream-Flush of Narayanan et al.,
    "Memory-efficient pipeline-parallel DNN training", ICML 2021,
    arXiv:2006.09503.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> flush = schedules.one_f_one_b(2, 3)
    >>> print(table.to_text(flush), end="")
    # one_f_one_b; every 3; flush
    0 | F0 F1 .  B0 F2 B1 .  B2
    1 | .  F0 B0 F1 B1 F2 B2 .
    >>> facts = analyze.analyze(flush)  # F = 1, B = 2
    >>> facts.idle.tolist(), facts.peak_activations.tolist()
    ([3.0, 3.0], [2.0, 1.0])
  """
  check_positive(stages=stages, microbatches=microbatches)
  orders = layout.straight(range(1, stages + 1)[::-1], microbatches)
  return layout.synchronous("one_f_one_b", orders, microbatches, batches)


@layout.traits(chunks=2)
def interleaved(
  devices: int,
  chunks: int,
  microbatches: int,
  *,
  group: int | None = None,
  batches: int = 1,
) -> Schedule:
  """Interleaved 1F1B: several stages on a device.

    stage s is on device s mod p
    idle = (p - 1)(F + B) / v on each device, with F and B of all its stages
    activations <= p v + p - 1, each of a microbatch in one of v stages

  A device takes a group of microbatches through its first stage, then through
  its second, and so on. (The formulas hold for groups of p, if p divides m.)

  Args:
    devices: p.
    chunks: v, stages on each device.
    microbatches: m, of a batch.
    group: microbatches that a device takes through a stage before the next
      one, p by default. With fewer, also in a shorter last group, devices wait
      longer.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers.

  Source:
    Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM", SC 2021, arXiv:2104.04473, figure 4.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> loops = schedules.interleaved(2, 2, 2)
    >>> print(table.to_text(loops), end="")
    # interleaved; every 2; flush
    0 | F0@0 F1@0 F0@2 F1@2 .    B0@2 .    B1@2 B0@0 B1@0
    1 | .    F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1 .
    >>> half = analyze.costs(4, forward=0.5, backward=1.0)
    >>> analyze.analyze(loops, half).idle.tolist()  # (2 - 1) (1 + 2) / 2
    [1.5, 1.5]
  """
  check_positive(devices=devices, chunks=chunks, microbatches=microbatches)
  group = devices if group is None else group
  check_positive(group=group)
  # Short groups can deadlock, and Megatron-LM refuses them. So a short group is
  # first filled up to `devices` microbatches, and the fillers are deleted from
  # the orders at the end. To delete microbatches cannot cause a deadlock.
  visits, group_sizes = [], []  # visits: (chunk, microbatch)
  for start in range(0, microbatches, group):
    count = min(group, microbatches - start)
    size = count if chunks == 1 else max(count, devices)
    members = [start + i if i < count else _FILLER for i in range(size)]
    visits += itertools.product(range(chunks), members)
    group_sizes.append(size)
  orders = []
  for device in range(devices):
    forwards = [(FORWARD, c * devices + device, i) for c, i in visits]
    backwards = [
      (BACKWARD, (chunks - 1 - c) * devices + device, i) for c, i in visits
    ]
    # The last device alternates once the first group is at its last stage. Each
    # device before it has two more forwards in flight: one for the way to the
    # last device, one for the way back. With one chunk one is enough.
    in_flight = 1 + (chunks - 1) * group_sizes[0]
    in_flight += (1 if chunks == 1 else 2) * (devices - 1 - device)
    order = layout.alternate(forwards, backwards, in_flight)
    orders.append([step for step in order if step[2] != _FILLER])
  return layout.synchronous("interleaved", orders, microbatches, batches)


@layout.traits(chunks=2)
def breadth_first(
  devices: int, chunks: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """Breadth-first: `gpipe` in loops, with several stages on a device.

    stage s is on device s mod p
    idle = (p - 1)(F + B) / v on each device, with F and B of all its stages
    activations = m v, each of a microbatch in one of v stages

  A device takes all microbatches through a stage before its next one, forward
  and back. (The formula of the idle time holds for m >= p.)

  Args:
    devices, chunks, microbatches, batches: as in `interleaved`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers.

  Source:
    Lamy-Poirier, "Breadth-first pipeline parallelism", 2022, arXiv:2211.05953.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> loops = schedules.breadth_first(2, 2, 2)
    >>> print(table.to_text(loops), end="")
    # breadth_first; every 2; flush
    0 | F0@0 F1@0 F0@2 F1@2 .    .    B0@2 B1@2 B0@0 B1@0
    1 | .    F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1 .
    >>> half = analyze.costs(4, forward=0.5, backward=1.0)
    >>> analyze.analyze(loops, half).idle.tolist()  # (2 - 1) (1 + 2) / 2
    [1.5, 1.5]
  """
  check_positive(devices=devices, chunks=chunks, microbatches=microbatches)
  orders = []
  for device in range(devices):
    stages = range(device, devices * chunks, devices)
    forwards = itertools.product([FORWARD], stages, range(microbatches))
    backwards = itertools.product([BACKWARD], stages[::-1], range(microbatches))
    orders.append([*forwards, *backwards])
  return layout.synchronous("breadth_first", orders, microbatches, batches)
