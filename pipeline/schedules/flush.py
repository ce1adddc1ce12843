"""Schedules that flush: all stages are updated at the end of a batch."""

import itertools

from pipeline.schedules import layout
from pipeline.table import BACKWARD, FORWARD, Schedule, check_positive

_ABSENT = -1  # a microbatch that fills a short group


@layout.traits()
def gpipe(
  stages: int, microbatches: int, *, batches: int = 1, reverse: bool = False
) -> Schedule:
  """All forwards, then all backwards (GPipe, Huang et al. 2019).

  With `reverse`, backwards start with the last microbatch, as in the paper's
  figure 2c and as autograd does; it takes as long.
  """
  check_positive(stages=stages, microbatches=microbatches)
  layout.check_bool("reverse", reverse)
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
  """One forward, one backward, then a flush (DAPPLE, Fan et al. 2021;
  PipeDream-Flush, Narayanan et al. 2021).

  As long as `gpipe`, but stage s holds p - s microbatches at most.
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
  """1F1B with several stages on a device (Narayanan et al. 2021, Megatron-LM).

  Stage s is on device s % devices, `chunks` of them on each. A device takes
  `group` microbatches, as many as devices by default, through its first stage,
  then through its second, and so on. Groups smaller than `devices`, also a last
  one, can be run, but wait.
  """
  check_positive(devices=devices, chunks=chunks, microbatches=microbatches)
  group = devices if group is None else group
  check_positive(group=group)
  # Short groups can deadlock, and Megatron-LM refuses them. So they are filled
  # up to `devices` with microbatches that are left out at last: orders that can
  # be run can be run with fewer microbatches.
  turns, widths = [], []
  for start in range(0, microbatches, group):
    count = min(group, microbatches - start)
    widths.append(count if chunks == 1 else max(count, devices))
    own = [start + i if i < count else _ABSENT for i in range(widths[-1])]
    turns += itertools.product(range(chunks), own)
  orders = []
  for device in range(devices):
    forwards = [(FORWARD, c * devices + device, i) for c, i in turns]
    backwards = [
      (BACKWARD, (chunks - 1 - c) * devices + device, i) for c, i in turns
    ]
    # The last device begins to alternate when the group is at its last stage;
    # each device before it is one step earlier on the way there and back.
    depth = 1 + (chunks - 1) * widths[0]
    depth += (1 if chunks == 1 else 2) * (devices - 1 - device)
    steps = layout.alternate(forwards, backwards, depth)
    orders.append([step for step in steps if step[2] != _ABSENT])
  return layout.synchronous("interleaved", orders, microbatches, batches)


@layout.traits(chunks=2)
def breadth_first(
  devices: int, chunks: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """All microbatches through a stage before the next one of the device, forward
  and back (Lamy-Poirier 2022).

  Stage s is on device s % devices: `gpipe` in loops.
  """
  check_positive(devices=devices, chunks=chunks, microbatches=microbatches)
  orders = []
  for device in range(devices):
    own = range(device, devices * chunks, devices)
    forwards = itertools.product([FORWARD], own, range(microbatches))
    backwards = itertools.product([BACKWARD], own[::-1], range(microbatches))
    orders.append([*forwards, *backwards])
  return layout.synchronous("breadth_first", orders, microbatches, batches)
