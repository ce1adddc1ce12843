"""Zero bubble: backwards of inputs at once, of weights where there is time.

References:
  Qi et al., "Zero bubble pipeline parallelism", ICLR 2024. Qi et al., "Pipeline
  parallelism with controllable memory", NeurIPS 2024.

The makers take p stages, one on each device, or p devices with two stages on
each, the microbatches of a batch, and `costs` of stages.
"""

import collections
import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.analyze import Costs
from pipeline.schedules import layout
from pipeline.schedules.play import Rule, play
from pipeline.table import FORWARD, INPUT, WEIGHT, Schedule, check_positive

Times = Costs | None  # of F, I, W and transfers; None is 1, 1, 1 and 0
_TRIED = 20_000  # tasks of a table, up to which all ways are tried
_PATIENCE = (1.0, 0.5, 0.0)  # the part of a W that must fit before what comes


def _weight(state, costs, patience, full):
  """The next W, if memory is full or it fits before what is known to come."""
  step = state.first(WEIGHT)
  if step is None or full:
    return step
  wait = state.soon - state.time
  return step if wait >= (patience - 1e-9) * costs.weight[step[1]] else None


def _follow(orders, limits, costs, patience) -> Rule:
  """Does what `orders` say; weights that they do not name, in between."""
  at = [0] * len(orders)
  named = [any(step[0] == WEIGHT for step in order) for order in orders]

  def rule(device, state):
    order, full = orders[device], False
    if at[device] < len(order):
      action, stage, microbatch = step = order[at[device]]
      queue = state.queues(action)[stage]
      if queue and queue[0] == microbatch:
        in_flight = sum(state.in_flight.values())
        full = action == FORWARD and in_flight >= limits[device]
        if not full:
          at[device] += 1
          return step
    return None if named[device] else _weight(state, costs, patience, full)

  return rule


def _greedy(owned, limits, costs, patience) -> Rule:
  """Backwards of inputs, then forwards that memory allows, then weights.

  A forward leaves room for one microbatch at every later stage of the device
  that has none. So the oldest microbatch can always go on, and no device
  waits forever.
  """

  def rule(device, state):
    step = state.first(INPUT)
    if step:
      return step
    room, full = limits[device] - sum(state.in_flight.values()), False
    for stage in owned[device]:  # the last one first
      if state.forward[stage]:
        if room > 0:
          return FORWARD, stage, state.forward[stage][0]
        full = True
      room -= not state.in_flight[stage]
    return _weight(state, costs, patience, full)

  return rule


def _best(name, places, microbatches, costs, limits, ways, batches) -> Schedule:
  """The best of orders to follow and of greedy ones, within the limits."""
  costs = layout.costs_of(costs, len(places))
  owned = layout.stages_of(places)
  rules = [
    _follow(orders, limits, costs, patience)
    for orders in ways
    for patience in _PATIENCE
  ]
  rules += [_greedy(owned, limits, costs, patience) for patience in _PATIENCE]
  if 3 * len(places) * microbatches > _TRIED:
    del rules[1:]
  tried = (
    play(rule, places, microbatches, costs, every=microbatches, flush=True)
    for rule in rules
  )
  orders = min(tried, key=lambda played: played.score()).orders
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
  """Split backwards for any stages on any devices, within a memory.

    minimize max over devices of (end of its last task - begin of its first)
    forwards - backwards of weights <= max_activations of a device, ever

  A device does a backward of inputs as soon as it can, a forward if memory
  allows, and weights when it would wait or needs the memory. Ways that differ
  in how long a wait must be for that are tried, and the best is taken. (Of a
  table of more than 20,000 tasks, the first.) So it is a heuristic: no minimum
  is proved.

  Args:
    devices: the device of each stage.
    microbatches: m, of a batch.
    max_activations: forwards with the backward of weights still to come, on
      each device, at most; as many as it has stages, at least.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for devices that are not named from 0, or a memory that is too
      small.

  Source:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241,
    whose cost and memory they are; the ways are this library's.

  Example:
    >>> from pipeline import schedules, table
    >>> zero = schedules.zero_bubble((0, 1, 0), 2, max_activations=(3, 1))
    >>> print(table.to_text(zero), end="")
    # zero_bubble; every 2; flush
    0 | F0@0 F1@0 F0@2 I0@2 W0@2 I0@0 W0@0 F1@2 I1@2 W1@2 I1@0 W1@0
    1 | .    F0@1 .    .    I0@1 W0@1 F1@1 .    .    I1@1 W1@1 .
  """
  places = layout.places_of(devices, without_replicas="zero_bubble")
  owned = layout.stages_of(places)
  if isinstance(max_activations, (int, np.integer)):
    max_activations = [max_activations] * len(owned)
  check_positive(microbatches=microbatches)
  limits = layout.listed(max_activations, len(owned))
  if limits is None:
    raise ValueError(
      f"max_activations must be one number, or {len(owned)}, one for each"
      f" device, not {max_activations!r}"
    )
  for device, (limit, own) in enumerate(zip(limits, owned, strict=True)):
    check_positive(max_activations=limit)
    if limit < len(own):
      raise ValueError(
        f"device {device} has {len(own)} stages and cannot do with"
        f" max_activations={limit}; it needs {len(own)}"
      )
  ways = []
  if places == [(stage,) for stage in range(len(places))]:
    ways = [_straight(microbatches, limits, times) for times in (1, 2)]
  return _best(
    "zero_bubble", places, microbatches, costs, limits, ways, batches
  )


def _straight(microbatches, limits, times):
  """1F1B orders of a straight pipeline, so many times as deep as 1F1B."""
  deepest = range(1, times * len(limits) + 1, times)[::-1]
  return layout.straight(list(map(min, limits, deepest)), microbatches, INPUT)


def _of_line(name, stages, microbatches, costs, batches, times) -> Schedule:
  """The best table of a straight pipeline that is so deep."""
  check_positive(stages=stages, microbatches=microbatches)
  limits = [times * stages - times + 1] * stages
  ways = [_straight(microbatches, limits, times)]
  places = [(stage,) for stage in range(stages)]
  return _best(name, places, microbatches, costs, limits, ways, batches)


@layout.traits()
def zb_h1(
  stages: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """ZB-H1: zero bubble with the memory of 1F1B (also called ZB1P).

    idle = (p - 1)(F + I - W) on each device
    activations = p microbatches

  It is 1F1B, with weights where it waits.

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
    >>> from pipeline import analyze, schedules, table
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

    engaged - busy = (p - 1)(F + I - 2 W) of a device, at the most
    activations = 2 p - 1 microbatches, at the most

  A device is engaged from its first task to its last. If F, I and W take the
  same, it never waits in between. Device s begins s F later than the
  first, so batches follow each other without a gap only if updates need not
  wait for all stages; the paper checks them afterwards.

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
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241.

  Example:
    Nobody waits between its first task and its last.

    >>> from pipeline import analyze, schedules, table
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

  A device is engaged from its first task to its last.

  Args:
    devices: p, each with two stages.
    microbatches: m, of a batch.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or costs of other
      stages.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from pipeline import analyze, schedules, table
    >>> zero = schedules.zb_v(1, 2)
    >>> print(table.to_text(zero), end="")
    # zb_v; every 2; flush
    0 | F0@0 F0@1 I0@1 W0@1 F1@0 I0@0 W0@0 F1@1 I1@1 W1@1 I1@0 W1@0
    >>> analyze.analyze(schedules.zb_v(2, 3)).peak_activations.tolist()
    [4.0, 4.0]
  """
  check_positive(devices=devices, microbatches=microbatches)
  p, ways = devices, []
  even = not costs or np.ptp([costs.forward, costs.input, costs.weight]) == 0
  if even and microbatches >= 2 * p - 1:
    ways = [[_zb_v(d, p, microbatches) for d in range(p)]]
  limits = [2 * p] * p
  return _best("zb_v", _vee(p), microbatches, costs, limits, ways, batches)


def _vee(devices):
  """The places of stages that go down the devices and come up again."""
  return [(device,) for device in (*range(devices), *range(devices)[::-1])]


def _zb_v(device, devices, microbatches):
  """The order of a device if F, I and W take the same."""
  stages = device, 2 * devices - 1 - device
  counts = collections.Counter()
  order = []

  def add(actions, chunk):
    for action in actions:
      order.append((action, stages[chunk], counts[action, chunk]))
      counts[action, chunk] += 1

  left = devices - device
  add("F" * (2 * left - 1), 0)
  for chunk in (1, 0) * device:
    add("F", chunk)
  add("FIW" * left, 1)
  while counts["F", 1] < microbatches:
    add("FIW" if counts["F", 0] < microbatches else "IW", 0)
    add("FIW", 1)
  for chunk in (0, 1) * device:
    add("I", chunk)
  add("IW" * left, 0)
  for chunk in (1, 0):
    add("W" * (microbatches - counts["W", chunk]), chunk)
  return order


def _pattern(times, microbatches):
  """Orders of a V in which forwards and backwards repeat every 6 slots; `times`
  are of each device the slots of F and F, I and I, on the way down and up."""
  orders = []
  for device, slots in enumerate(times):
    up = 2 * len(times) - 1 - device
    first = zip(slots, "FFII", (device, up, up, device), strict=True)
    tasks = itertools.product(first, range(microbatches))
    ordered = sorted((t + 6 * i, action, s, i) for (t, action, s), i in tasks)
    orders.append([task[1:] for task in ordered])
  return orders


@layout.traits(chunks=2)
def v_half(
  devices: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """V-Half: half the memory of 1F1B, in a V.

    stages s and 2 p - 1 - s are on device s
    activations = p + 2 half stages, at the most; 1F1B has 2 p

  It has about half the bubble of 1F1B.

  Args:
    devices: p, each with two stages.
    microbatches: m, of a batch.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or costs of other
      stages.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from pipeline import analyze, schedules
    >>> facts = analyze.analyze(schedules.v_half(6, 18))
    >>> print(facts.peak_activations.max())  # 6 + 2 of 12
    8.0
  """
  check_positive(devices=devices, microbatches=microbatches)
  p, more = devices, 0 if devices % 2 else 3
  times = [
    (2 * d, 3 * p - d - 2, 3 * p + more + 2 * d - 1, 6 * p + more - d - 2)
    for d in range(p)
  ]
  ways = [_pattern(times, microbatches)]
  limits = [p + 2] * p
  return _best("v_half", _vee(p), microbatches, costs, limits, ways, batches)


@layout.traits(chunks=2)
def v_min(
  devices: int, microbatches: int, *, costs: Times = None, batches: int = 1
) -> Schedule:
  """V-Min: a third of the memory of 1F1B, in a V.

    stages s and 2 p - 1 - s are on device s
    activations = 2 ceil(p / 3) + 2 half stages, at the most; 1F1B has 2 p

  It has about two thirds of the bubble of 1F1B, if F, I and W take the same; if
  not, a bubble that grows with the number of microbatches.

  Args:
    devices: p, each with two stages.
    microbatches: m, of a batch.
    costs: how long F, I, W and transfers take; None is 1, 1, 1 and 0.
    batches: how many follow each other, with a flush between them.

  Returns:
    A valid Schedule with one update for each batch.

  Raises:
    ValueError: for counts that are no positive whole numbers, or costs of other
      stages.

  Source:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.

  Example:
    >>> from pipeline import analyze, schedules
    >>> facts = analyze.analyze(schedules.v_min(6, 18))
    >>> print(facts.peak_activations.max())  # 2 2 + 2 of 12
    6.0
  """
  check_positive(devices=devices, microbatches=microbatches)
  p, more = devices, 0 if devices % 3 else 2
  times = [
    (d, 2 * p - d - 1, 2 * p + more + d, 4 * p + more - d - 1) for d in range(p)
  ]
  limits = [2 * -(-p // 3) + 2] * p
  ways = [_pattern(times, microbatches)]
  return _best("v_min", _vee(p), microbatches, costs, limits, ways, batches)
