"""A bounded search for short orders of split backwards, within a memory.

Rules are asked in simulated time what each device does next, and their orders
are shortened (`Gaps`). How many orders are tried depends on the size of the
table, never on a clock, so the same arguments lead to the same table.

Orders are shortened by forward-backward improvement, known from project
scheduling. A pass takes the tasks in the order in which they start, and moves
each into the earliest gap of its device that is long enough. The next pass does
the same with time reversed.

Reference:
  Li and Willis, "An iterative scheduling technique for resource-constrained
    project scheduling", European Journal of Operational Research 56, 1992.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd.pipeline import analyze
from asgd.pipeline.schedules import layout
from asgd.pipeline.schedules.layout import Orders
from asgd.pipeline.schedules.play import Rule, RuleState, play
from asgd.pipeline.table import FORWARD, INPUT, WEIGHT, Step

_ACTIONS = FORWARD, INPUT, WEIGHT
Score = tuple[float, float]
Limits = tuple[int, ...]  # the most activations of each device
# Limits -> known orders within them: the F and I of each device, or all steps.
KnownOrders = Callable[[Limits], Iterable[Orders]]
_LARGE = 20_000  # tasks; of a larger table one order is tried for given costs
_SMALL = 1_000  # tasks; of a larger table one order is shortened
_WORK = 2_000  # largest number of tasks, summed over the limits that are tried
# Parts of a W that must fit before the next known step, to start it.
_PATIENCES = (1.0, 0.5, 0.0)
_MAX_SHORTENED = 3  # largest number of a small table's orders to shorten
_ROUNDS = 4  # largest number of rounds that shorten an order


def _score_of(starts: Sequence[float], ends: Sequence[float]) -> Score:
  """Returns (the longest time that a device is engaged, from the start of its
  first task to the end of its last; the end of all tasks).

  The first number is the time of a batch if devices do not wait for each other
  between batches (the zero bubble papers' cost).
  """
  longest = max(stop - start for start, stop in zip(starts, ends, strict=True))
  # Sums of the same numbers in another order are the same time.
  return float(f"{longest:.9g}"), float(f"{max(ends):.9g}")


class _Direction(NamedTuple):
  """One direction of time. Steps are numbered."""

  # For each step: the steps that it needs, with the time from the start of each
  # until this step may start.
  inputs: list[list[tuple[int, float]]]
  # For each step: the change of its device's number of activations.
  activation_change: list[int]


class Gaps:
  """Scores and shortens orders of the tasks of a batch. `places` has the device
  of each stage, each in a tuple."""

  def __init__(self, places: Sequence, microbatches: int, costs: analyze.Costs):
    self._shape = len(places), microbatches
    columns = costs.forward, costs.input, costs.weight
    self._time = [
      time for c in columns for time in c.tolist() for _ in range(microbatches)
    ]
    # A gap may be too short by rounding errors. With steps of (almost) no time
    # there is no slack, because orders could then wait for each other.
    has_long_tasks = min(self._time) > 1e-9 * sum(self._time)
    self._slack = 1 + 1e-12 * has_long_tasks
    is_remote = [a != b for a, b in zip(places, places[1:], strict=False)]
    forward_delay = (costs.transfer * is_remote).tolist()
    backward_delay = (costs.transfer_back * is_remote).tolist()
    count = len(self._time)
    predecessors, successors = ([[] for _ in range(count)] for _ in range(2))

    def add_dependency(step_after, step_before, transfer=0.0):
      for microbatch in range(microbatches):
        a, b = ((*step, microbatch) for step in (step_before, step_after))
        a, b = self._index_of(a), self._index_of(b)
        predecessors[b].append((a, self._time[a] + transfer))
        successors[a].append((b, self._time[b] + transfer))

    # [1] Steps depend on their own microbatch alone.
    for stage in range(len(places)):
      add_dependency((INPUT, stage), (FORWARD, stage))
      add_dependency((WEIGHT, stage), (INPUT, stage))
      if stage:
        add_dependency(
          (FORWARD, stage), (FORWARD, stage - 1), forward_delay[stage - 1]
        )
        add_dependency(
          (INPUT, stage - 1), (INPUT, stage), backward_delay[stage - 1]
        )
    third = count // 3
    activation_change = [1] * third + [0] * third + [-1] * third
    self._forward_time = _Direction(predecessors, activation_change)
    self._reverse_time = _Direction(successors, activation_change[::-1])

  def score(self, orders: Orders) -> Score:
    """Returns the score of orders that can be run."""
    indices = [list(map(self._index_of, order)) for order in orders]
    starts = self._earliest_starts(indices, self._forward_time)
    return self._score_of_starts(indices, starts)

  def shorten(
    self, orders: Orders, limits: Sequence[int], rounds: int
  ) -> tuple[Score, Orders]:
    """Returns (score, orders) of the best orders found, starting with orders
    that can be run within the limits, the most activations of each device. A
    round is two passes; one that does not shorten the table is the last."""
    indices = [list(map(self._index_of, order)) for order in orders]
    start = self._earliest_starts(indices, self._forward_time)
    best = self._score_of_starts(indices, start), indices
    for _ in range(rounds):
      for direction, opposite in (
        (self._forward_time, self._reverse_time),
        (self._reverse_time, self._forward_time),
      ):
        indices = self._pull_forward(indices, start, direction, limits)
        indices = [order[::-1] for order in indices]
        start = self._earliest_starts(indices, opposite)
      score = self._score_of_starts(indices, start)
      if score >= best[0]:
        break
      best = score, indices
    return best[0], [list(map(self._step_at, order)) for order in best[1]]

  def _index_of(self, step: Step) -> int:
    stages, microbatches = self._shape
    action, stage, microbatch = step
    position = _ACTIONS.index(action) * stages + stage
    return position * microbatches + microbatch

  def _step_at(self, index: int) -> Step:
    position, microbatch = divmod(index, self._shape[1])
    action, stage = divmod(position, self._shape[0])
    return _ACTIONS[action], stage, microbatch

  def _score_of_starts(self, orders, start):
    ends = [start[order[-1]] + self._time[order[-1]] for order in orders]
    return _score_of([start[order[0]] for order in orders], ends)

  def _earliest_starts(
    self, orders: Sequence[Sequence[int]], direction: _Direction
  ) -> list[float]:
    """Returns when each step starts, at the earliest."""
    inputs, time = direction.inputs, self._time
    start = [-1.0] * len(time)  # negative: not known yet
    next_index, free_at = [0] * len(orders), [0.0] * len(orders)
    remaining = len(time)
    # Rounds over the devices: each runs until a step lacks an input.
    while remaining:
      for device, order in enumerate(orders):
        i = first_index = next_index[device]
        step_start = free_at[device]
        while i < len(order):
          step = order[i]
          for input_step, delay in inputs[step]:
            input_start = start[input_step]
            if input_start < 0:
              break
            if input_start + delay > step_start:
              step_start = input_start + delay
          else:
            start[step] = step_start
            step_start += time[step]
            free_at[device] = step_start
            i += 1
            continue
          break
        next_index[device] = i
        remaining -= i - first_index
    return start

  def _pull_forward(
    self,
    orders: list[list[int]],
    start: list[float],
    direction: _Direction,
    limits: Sequence[int],
  ) -> list[list[int]]:
    """Returns orders in which each step is in the earliest gap for it. Sets
    `start` to the new starts, which may be later than necessary."""
    inputs, time = direction.inputs, self._time
    activation_change = direction.activation_change
    orders = [list(order) for order in orders]
    counts = []  # of each device, activations before each of its steps
    for order in orders:
      counts.append([0])
      for step in order:
        counts[-1].append(counts[-1][-1] + activation_change[step])
    rows = sorted(
      (start[step], device, old_index)
      for device, order in enumerate(orders)
      for old_index, step in enumerate(order)
    )
    # A step moves only to an earlier index, so the indices of later rows hold.
    for old_start, device, old_index in rows:
      order, count = orders[device], counts[device]
      step = order[old_index]
      # [1] Find when the inputs of the step are ready.
      ready_at = 0.0
      for input_step, delay in inputs[step]:
        ready_at = max(ready_at, start[input_step] + delay)
      if ready_at >= old_start:
        continue
      limit = limits[device] if activation_change[step] > 0 else len(time)
      # [2] Walk to earlier gaps while the inputs allow it and memory has room.
      index, gap_end, target = old_index, old_start + time[step], None
      while True:
        previous = order[index - 1] if index else None
        previous_end = (
          0.0 if previous is None else start[previous] + time[previous]
        )
        step_start = max(previous_end, ready_at)
        fits = step_start + time[step] <= gap_end * self._slack
        if step_start < old_start and fits:
          target = index, step_start
        if (
          previous_end <= ready_at
          or count[index] >= limit
          or count[index - 1] >= limit
        ):
          break
        index, gap_end = index - 1, start[order[index - 1]]
      # [3] Move the step, and correct the activations between the two indices.
      if target is None:
        continue
      index, start[step] = target
      order.insert(index, order.pop(old_index))
      for i in range(index, old_index):
        count[i + 1] = count[i] + activation_change[order[i]]
    return orders


def _next_weight(
  state: RuleState, costs: analyze.Costs, patience: float, is_memory_full: bool
) -> Step | None:
  """Returns the next W if memory is full, or if it fits before the next known
  step; else None."""
  step = state.first(WEIGHT)
  if step is None or is_memory_full:
    return step
  wait = state.soon - state.time
  return step if wait >= (patience - 1e-9) * costs.weight[step[1]] else None


def _follow(
  orders: Sequence[Sequence[Any]],
  limits: Limits,
  costs: analyze.Costs,
  patience: float,
) -> Rule:
  """Returns a rule that follows `orders`, and does the W that they lack in
  between."""
  next_index = [0] * len(orders)
  names_weights = [any(step[0] == WEIGHT for step in order) for order in orders]

  def rule(device, state):
    order, is_memory_full = orders[device], False
    if next_index[device] < len(order):
      action, stage, microbatch = step = order[next_index[device]]
      queue = state.queues(action)[stage]
      if queue and queue[0] == microbatch:
        in_flight = sum(state.in_flight.values())
        is_memory_full = action == FORWARD and in_flight >= limits[device]
        if not is_memory_full:
          next_index[device] += 1
          return step
    if names_weights[device]:
      return None
    return _next_weight(state, costs, patience, is_memory_full)

  return rule


def _greedy(
  stages_by_device: Sequence[Sequence[int]],
  limits: Limits,
  costs: analyze.Costs,
  patience: float,
) -> Rule:
  """Returns a rule: backwards of inputs, then forwards that memory allows, then
  W.

  A forward leaves room for one microbatch at every later stage of the device
  that has none, so the oldest microbatch can always advance.
  """

  def rule(device, state):
    step = state.first(INPUT)
    if step:
      return step
    room, is_memory_full = limits[device] - sum(state.in_flight.values()), False
    for stage in stages_by_device[device]:  # the last one first
      if state.forward[stage]:
        if room > 0:
          return FORWARD, stage, state.forward[stage][0]
        is_memory_full = True
      room -= not state.in_flight[stage]
    return _next_weight(state, costs, patience, is_memory_full)

  return rule


def best(
  places: Sequence[tuple[int, ...]],
  microbatches: int,
  costs: analyze.Costs,
  limits: Sequence[int],
  known_orders: KnownOrders,
  named: Sequence[int] = (),
) -> Orders:
  """Returns the orders of a batch with the least cost that the search finds.

  The cost is `_score_of`. Within given limits, the search takes the best of
  the known orders and a greedy one for F = I = W = 1. For other costs it then
  tries that order, its F and I with weights in other positions, and greedy
  orders. It shortens the best three, or one if there are more than 1,000 tasks.

  A smaller memory can lead to a shorter table, so the search is repeated with
  other limits, for at most 2,000 tasks in sum: first with those of the named
  schedules, then with smaller ones. Of a table of more than 20,000 tasks it
  simulates 2 orders, and shortens none.

  Args:
    places: the device of each stage, in a tuple.
    microbatches: the number of microbatches of the batch.
    costs: the times of F, I, W and transfers.
    limits: the most activations of each device.
    known_orders: limits -> orders that fit, the best for much memory first.
    named: activations per device of the named schedules with these `places`.
  """
  search = _Search(places, microbatches, known_orders)
  transfers = costs.transfer.any() or costs.transfer_back.any()
  if not transfers and not np.ptp((costs.forward, costs.input, costs.weight)):
    costs = search.even
  limits = search.useful(limits)
  activation_limits = (
    *named,
    *range(max(limits))[: search.min_activations - 1 : -1],
  )
  other_limits = (
    search.useful([limit] * len(limits)) for limit in activation_limits
  )
  count = max(_WORK // search.tasks, 1)
  lower_bound, best_found = search.least_engaged(costs), None
  for tried_limits in list(dict.fromkeys([limits, *other_limits]))[:count]:
    score, orders = search.run(costs, tried_limits)
    is_better = best_found is None or score < best_found[0]
    if is_better and search.fits(orders, limits):
      best_found = score, orders
    # No order can be shorter than the busiest device's work.
    if best_found[0][0] <= lower_bound:
      break
  return best_found[1]


class _Search:
  """Simulates orders for one assignment of stages to devices."""

  def __init__(self, places, microbatches, known_orders):
    self._places, self._microbatches = places, microbatches
    self._known_orders = known_orders
    self._stages_by_device = layout.stages_of(places)
    self.even = analyze.costs(len(places))
    self.tasks = 3 * len(places) * microbatches
    # No rule can do with fewer activations on the device with most stages.
    self.min_activations = max(map(len, self._stages_by_device))

  def useful(self, limits: Sequence[int]) -> Limits:
    """Returns the limits; none exceeds all activations of a device's stages."""
    stage_counts = map(len, self._stages_by_device)
    totals = (count * self._microbatches for count in stage_counts)
    return tuple(map(min, limits, totals))

  def least_engaged(self, costs) -> float:
    """Returns a lower bound of any score: the work of the busiest device."""
    work = (costs.forward + costs.input + costs.weight) * self._microbatches
    longest = max(work[stages].sum() for stages in self._stages_by_device)
    return _score_of([0.0], [float(longest)])[0]

  def fits(self, orders: Orders, limits: Limits) -> bool:
    """Returns whether orders hold no more activations than the limits."""
    change = {FORWARD: 1, INPUT: 0, WEIGHT: -1}
    counts = (
      itertools.accumulate(change[step[0]] for step in order)
      for order in orders
    )
    return all(
      max(count) <= limit for count, limit in zip(counts, limits, strict=True)
    )

  def run(self, costs, limits) -> tuple[Score, Orders]:
    """Returns the best orders within the limits, and their score."""
    even = self.even
    # If all tasks take one unit, no device ever waits for a part of a unit.
    orders = self._known_orders(limits)
    rules = self._rules(orders, even, limits, _PATIENCES[:1])
    best_found = self._shortest([], rules, even, limits)
    if costs is not even:
      without_weights = [
        [step for step in order if step[0] != WEIGHT] for order in best_found[1]
      ]
      rules = self._rules([without_weights], costs, limits, _PATIENCES)
      best_found = self._shortest([best_found[1]], rules, costs, limits)
    return best_found

  def _rules(
    self,
    known_orders: Iterable[Orders],
    costs: analyze.Costs,
    limits: Limits,
    patiences: Sequence[float],
  ) -> Iterator[Rule]:
    """Yields rules that follow known orders, and greedy ones."""
    for orders in known_orders:
      for patience in patiences:
        yield _follow(orders, limits, costs, patience)
    for patience in patiences:
      yield _greedy(self._stages_by_device, limits, costs, patience)

  def _shortest(
    self,
    candidates: list[Orders],
    rules: Iterable[Rule],
    costs: analyze.Costs,
    limits: Limits,
  ) -> tuple[Score, Orders]:
    """Returns the best of some orders and the rules' orders, shortened."""
    places, count = self._places, self._microbatches
    is_large = self.tasks > _LARGE
    candidates += [
      play(rule, places, count, costs, every=count, flush=True)
      for rule in itertools.islice(rules, 1 if is_large else None)
    ]
    gaps = Gaps(places, count, costs)
    scores = [(gaps.score(orders), i) for i, orders in enumerate(candidates)]
    # Keep the first of the orders with equal scores.
    scores = dict(sorted(scores, reverse=True))
    n_shortened = _MAX_SHORTENED if self.tasks <= _SMALL else 1
    best_first = sorted(scores.items())[:n_shortened]
    if is_large:
      return best_first[0][0], candidates[best_first[0][1]]
    return min(
      (gaps.shorten(candidates[i], limits, _ROUNDS) for _, i in best_first),
      key=lambda item: item[0],
    )
