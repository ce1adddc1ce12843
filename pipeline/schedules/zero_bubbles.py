"""Zero bubble: backwards of weights fill the times in which devices wait.

References:
  Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241.
  Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
  arXiv:2405.15362.

The makers take p stages, one on each device, or p devices with two stages on
each, the microbatches of a batch, and `costs` of stages.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from asgd.pipeline.analyze import Costs
from asgd.pipeline.schedules import layout, search
from asgd.pipeline.table import INPUT, Schedule, Step, check_positive

Times = Costs | None  # of F, I, W and transfers; None is 1, 1, 1 and 0


def _best(
  name: str,
  places: Sequence[tuple[int, ...]],
  microbatches: int,
  costs: Times,
  limits: Sequence[int],
  batches: int,
) -> Schedule:
  """Returns the table of the best orders that `search` finds within the limits.

  The search also tries the orders of named schedules on these devices, and
  their numbers of activations as limits.
  """
  costs = layout.costs_of(costs, len(places))
  p, named_limits = 1 + max(map(max, places)), []
  if places == _line(p):
    named_limits = [p, 2 * p - 1]

    def known_orders(limits):
      for multiple in (1, 2) if max(limits) <= p else (2, 1):  # as deep as 1F1B
        deepest = range(1, multiple * p + 1, multiple)[::-1]
        depths = list(map(min, limits, deepest))
        yield layout.straight(depths, microbatches, INPUT)

  elif places == _vee(p):
    named_limits = [activations_of(p) for activations_of in _OF_VEE.values()]

    def known_orders(limits):
      return _orders_of_vee(p, microbatches, min(limits))

  else:

    def known_orders(limits):
      del limits
      return ()

  orders = search.best(
    places, microbatches, costs, limits, known_orders, named_limits
  )
  return layout.synchronous(name, orders, microbatches, batches, max(limits))


@layout.traits(listed=True)
def zero_bubble(
  devices: Sequence[int],
  microbatches: int,
  *,
  max_activations: int | Sequence[int],
  costs: Times = None,
  batches: int = 1,
) -> Schedule:
  """Split backwards for any placement of stages, within a limit of memory.

    minimize max over devices of (end of its last task - begin of its first)
    forwards - backwards of weights <= max_activations on each device, always

  The orders come from a bounded search (`search.best`) over greedy orders and
  the orders of named schedules for the same devices. It then moves their tasks
  into idle time (`search.Gaps`). It is a heuristic: no minimum is proved.

  Args:
    devices: the device of each stage.
    microbatches: m, of a batch.
    max_activations: the most forwards on each device without an ended backward
      of weights; the number of its stages or more.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for devices not named from 0, or a memory that is too small.

  Source:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241,
    for the cost and the memory; the search is this library's.

  Example:
    >>> from asgd.pipeline import schedules, table
    >>> zero = schedules.zero_bubble((0, 1, 0), 2, max_activations=(3, 1))
    >>> print(table.to_text(zero), end="")
    # zero_bubble; every 2; flush
    0 | F0@0 F1@0 F0@2 I0@2 W0@2 I0@0 W0@0 F1@2 I1@2 W1@2 I1@0 W1@0
    1 | .    F0@1 .    .    I0@1 W0@1 F1@1 .    .    I1@1 W1@1 .
  """
  places = layout.places_of(devices, without_replicas="zero_bubble")
  stages_by_device = layout.stages_of(places)
  if isinstance(max_activations, (int, np.integer)):
    max_activations = [max_activations] * len(stages_by_device)
  check_positive(microbatches=microbatches)
  limits = layout.listed(max_activations, len(stages_by_device))
  if limits is None:
    raise ValueError(
      f"max_activations must be one number, or {len(stages_by_device)}, one for"
      f" each device, not {max_activations!r}"
    )
  for device, (limit, stages) in enumerate(
    zip(limits, stages_by_device, strict=True)
  ):
    check_positive(max_activations=limit)
    if limit < len(stages):
      raise ValueError(
        f"device {device} has {len(stages)} stages and cannot do with"
        f" max_activations={limit}; it needs {len(stages)}"
      )
  return _best("zero_bubble", places, microbatches, costs, limits, batches)


def _line(devices):
  """Returns the devices of stages, one stage on each device."""
  return [(device,) for device in range(devices)]


def _of_line(
  name: str,
  stages: int,
  microbatches: int,
  costs: Times,
  batches: int,
  times: int,
) -> Schedule:
  """Returns the best table of one stage on each device, with the activations of
  1F1B (`times` = 1) or about twice as many (2)."""
  check_positive(stages=stages, microbatches=microbatches)
  limits = [times * stages - times + 1] * stages
  places = _line(stages)
  return _best(name, places, microbatches, costs, limits, batches)


@layout.traits()
def zb_h1(
  stages: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """ZB-H1: zero bubble with the memory of 1F1B (also called ZB1P).

    idle = (p - 1) max(F + I - W, F, I) on each device
    activations = p microbatches

  If all stages take the same time, it is 1F1B with backwards of weights where
  1F1B waits.

  Args:
    stages: p, one on each device.
    microbatches: m, of a batch.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or costs of other
      stages.

  Source:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241,
    figure 2.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> zero = schedules.zb_h1(2, 3)
    >>> print(table.to_text(zero), end="")
    # zb_h1; every 3; flush
    0 | F0 F1 .  I0 W0 F2 I1 W1 I2 W2
    1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    >>> facts = analyze.analyze(zero)  # F = I = W = 1
    >>> facts.idle.tolist(), facts.peak_activations.tolist()
    ([1.0, 1.0], [2.0, 2.0])
  """
  return _of_line("zb_h1", stages, microbatches, costs, batches, 1)


@layout.traits()
def zb_h2(
  stages: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """ZB-H2: zero bubble with twice the memory (also called ZB2P).

    engaged - busy = (p - 1) max(F + I - 2 W, 0) of a device, at the most, if
      W <= F and m >= 2 p - 1
    activations = 2 p - 1 microbatches, at the most

  A device is engaged from its first task to its last. If F, I and W take the
  same time and m >= 2 p - 1, it never waits in between. Device s begins s F
  later than the first, so batches follow each other without a gap only if
  updates need not wait for all stages; the paper checks updates afterwards.

  Args:
    stages, microbatches, costs, batches: as in `zb_h1`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: as `zb_h1`.

  Source:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241.

  Example:
    No device waits between its first task and its last.

    >>> from asgd.pipeline import analyze, schedules, table
    >>> zero = schedules.zb_h2(2, 3)
    >>> print(table.to_text(zero), end="")
    # zb_h2; every 3; flush
    0 | F0 F1 F2 I0 W0 I1 W1 I2 W2 .
    1 | .  F0 I0 F1 I1 F2 I2 W0 W1 W2
    >>> analyze.analyze(zero).peak_activations.tolist()
    [3.0, 3.0]
  """
  return _of_line("zb_h2", stages, microbatches, costs, batches, 2)


@layout.traits(chunks=2)
def zb_v(
  devices: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """ZB-V: zero bubble with the memory of 1F1B, in a V.

    stages s and 2 p - 1 - s are on device s
    engaged - busy = 0 of each device, if F = I = W and m >= 2 p - 1
    activations = 2 p half stages, at the most, as much as p whole ones

  A device is engaged from its first task to its last. At other costs the order
  is the shortest that `zero_bubble` finds; it also tries that of F = I = W.

  Args:
    devices: p, each with two stages.
    microbatches, costs, batches: as in `zb_h1`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: as `zb_h1`.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> zero = schedules.zb_v(1, 2)
    >>> print(table.to_text(zero), end="")
    # zb_v; every 2; flush
    0 | F0@0 F0@1 I0@1 W0@1 F1@0 I0@0 W0@0 F1@1 I1@1 W1@1 I1@0 W1@0
    >>> analyze.analyze(schedules.zb_v(2, 3)).peak_activations.tolist()
    [4.0, 4.0]
  """
  return _of_vee("zb_v", devices, microbatches, costs, batches)


def _vee(devices):
  """Returns the devices of stages from the first device to the last and back.
  """
  return [(device,) for device in (*range(devices), *range(devices)[::-1])]


def _of_vee(
  name: str, devices: int, microbatches: int, costs: Times, batches: int
) -> Schedule:
  """Returns the best table of a V within the memory of its schedule."""
  check_positive(devices=devices, microbatches=microbatches)
  limits = [_OF_VEE[name](devices)] * devices
  places = _vee(devices)
  return _best(name, places, microbatches, costs, limits, batches)


# Devices p -> the most half stages on each device.
_OF_VEE = {
  "zb_v": lambda p: 2 * p,
  "v_half": lambda p: 2 * ((p + 2) // 2),
  "v_min": lambda p: 2 * ((p + 4) // 3),
}


def _orders_of_vee(
  devices: int, microbatches: int, limit: int
) -> Iterator[list[list[Step]]]:
  """Yields the orders of V schedules within `limit` activations, for equal
  times of F, I and W. The schedule with the most activations comes first."""
  p = devices
  fitting_names = {
    name
    for name, activations_of in _OF_VEE.items()
    if min(activations_of(p), 2 * microbatches) <= limit
  }
  if "zb_v" in fitting_names and microbatches >= 2 * p - 1:
    yield [_zb_v(d, p, microbatches) for d in range(p)]
  if "v_half" in fitting_names:
    shift = 0 if p % 2 else 3  # of backwards: then they meet no forward
    slots = [
      (2 * d, 3 * p - d - 2, 3 * p + shift + 2 * d - 1, 6 * p + shift - d - 2)
      for d in range(p)
    ]
    yield _pattern(slots, microbatches)
  if "v_min" in fitting_names:
    shift = 0 if p % 3 else 2
    slots = [
      (d, 2 * p - d - 1, 2 * p + shift + d, 4 * p + shift - d - 1)
      for d in range(p)
    ]
    yield _pattern(slots, microbatches)


def _zb_v(device: int, devices: int, microbatches: int) -> list[Step]:
  """Returns the order of a device if F, I and W take the same time."""
  stages = device, 2 * devices - 1 - device
  counts = collections.Counter()
  order = []

  def add(actions, chunk):
    for action in actions:
      order.append((action, stages[chunk], counts[action, chunk]))
      counts[action, chunk] += 1

  remaining = devices - device
  # Warm-up: chunk 0 of more microbatches on devices farther from the turn.
  add("F" * (2 * remaining - 1), 0)
  for chunk in (1, 0) * device:
    add("F", chunk)
  add("FIW" * remaining, 1)
  # Steady state: F, I and W of both chunks in turn.
  while counts["F", 1] < microbatches:
    add("FIW" if counts["F", 0] < microbatches else "IW", 0)
    add("FIW", 1)
  # Drain: the remaining backwards of inputs, then of weights.
  for chunk in (0, 1) * device:
    add("I", chunk)
  add("IW" * remaining, 0)
  for chunk in (1, 0):
    add("W" * (microbatches - counts["W", chunk]), chunk)
  return order


def _pattern(
  times: Sequence[tuple[int, ...]], microbatches: int
) -> list[list[Step]]:
  """Returns the orders of a V in which forwards and backwards repeat every 6
  slots. `times` has for each device the first slots of F down, F up, I up and I
  down."""
  orders = []
  for device, slots in enumerate(times):
    up = 2 * len(times) - 1 - device
    # A period of 6 slots has F, I and W of both chunks.
    pattern = zip(slots, "FFII", (device, up, up, device), strict=True)
    tasks = itertools.product(pattern, range(microbatches))
    ordered = sorted((t + 6 * i, action, s, i) for (t, action, s), i in tasks)
    orders.append([task[1:] for task in ordered])
  return orders


@layout.traits(chunks=2)
def v_half(
  devices: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """V-Half: half the memory of 1F1B, in a V.

    stages s and 2 p - 1 - s are on device s
    activations = 2 floor((p + 2) / 2) half stages, at the most; 1F1B has 2 p
    engaged - busy = 6 ceil(p / 2) - 7, if F = I = W = 1 and m >= p >= 3

  It has about half the bubble of 1F1B. A device is engaged from its first task
  to its last. The order is the shortest that `zero_bubble` finds.

  Args:
    devices, microbatches, costs, batches: as in `zb_v`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: as `zb_h1`.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from asgd.pipeline import analyze, schedules
    >>> facts = analyze.analyze(schedules.v_half(6, 18))
    >>> print(facts.peak_activations.max())  # 6 + 2 of 12
    8.0
  """
  return _of_vee("v_half", devices, microbatches, costs, batches)


@layout.traits(chunks=2)
def v_min(
  devices: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """V-Min: a third of the memory of 1F1B, in a V.

    stages s and 2 p - 1 - s are on device s
    activations = 2 floor((p + 4) / 3) half stages, at the most; 1F1B has 2 p
    engaged - busy = 4 p - 7, 4 p - 5 or 4 p - 9 for p mod 3 = 0, 1 or 2, if
      F = I = W = 1 and m >= p >= 3

  It has about two thirds of the bubble of 1F1B if F, I and W take the same
  time; else its bubble grows with the number of microbatches. A device is
  engaged from its first task to its last. The order is the shortest that
  `zero_bubble` finds.

  Args:
    devices, microbatches, costs, batches: as in `zb_v`.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: as `zb_h1`.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from asgd.pipeline import analyze, schedules
    >>> facts = analyze.analyze(schedules.v_min(6, 18))
    >>> print(facts.peak_activations.max())  # 2 floor(10 / 3) of 12
    6.0
  """
  return _of_vee("v_min", devices, microbatches, costs, batches)
