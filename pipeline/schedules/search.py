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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asgd.pipeline import analyze
from asgd.pipeline.schedules import layout
from asgd.pipeline.schedules.layout import Orders
from asgd.pipeline.schedules.play import Rule, play
from asgd.pipeline.table import FORWARD, INPUT, WEIGHT, Step

_ACTIONS = FORWARD, INPUT, WEIGHT
Score = tuple[float, float]
Limits = tuple[int, ...]  # the most activations of each device
Ways = Callable[[Limits], Iterable[Orders]]  # known orders within limits: the
# F and I of each device, or all steps
_LARGE = 20_000  # tasks; of a larger table one order is tried for given costs
_SMALL = 1_000  # tasks; of a larger table one order is shortened
_WORK = 2_000  # tasks, in sum over the limits for which a table is tried
_PATIENCE = (1.0, 0.5, 0.0)  # the part of a W that must fit before what comes
_SHORTENED = 3  # orders of a small table that are shortened
_ROUNDS = 4  # at the most, of shortening an order


def _score_of(begin: Sequence[float], end: Sequence[float]) -> Score:
  """Returns the longest time that a device is engaged, from the begin of its
  first task to the end of its last, then the time of all.

  The first is the time of a batch if devices do not wait for each other between
  batches (the zero bubble papers' cost).
  """
  longest = max(last - first for first, last in zip(begin, end, strict=True))
  # Sums of the same numbers in another order are the same time.
  return float(f"{longest:.9g}"), float(f"{max(end):.9g}")


class _Direction(NamedTuple):
  """One direction of time. Steps are numbered."""

  needs: list[list[tuple[int, float]]]  # of each step: a need, and the time
  # from its start until the step may start
  held: list[int]  # of each step: the change of the activations held


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
    long = min(self._time) > 1e-9 * sum(self._time)
    self._slack = 1 + 1e-12 * long
    moved = [a != b for a, b in zip(places, places[1:], strict=False)]
    there = (costs.transfer * moved).tolist()
    back = (costs.transfer_back * moved).tolist()
    count = len(self._time)
    before, after = ([[] for _ in range(count)] for _ in range(2))

    def need(later, earlier, transfer=0.0):
      for microbatch in range(microbatches):
        a, b = ((*step, microbatch) for step in (earlier, later))
        a, b = self._number(a), self._number(b)
        before[b].append((a, self._time[a] + transfer))
        after[a].append((b, self._time[b] + transfer))

    for stage in range(len(places)):
      need((INPUT, stage), (FORWARD, stage))
      need((WEIGHT, stage), (INPUT, stage))
      if stage:
        need((FORWARD, stage), (FORWARD, stage - 1), there[stage - 1])
        need((INPUT, stage - 1), (INPUT, stage), back[stage - 1])
    third = count // 3
    held = [1] * third + [0] * third + [-1] * third
    self._before = _Direction(before, held)
    self._after = _Direction(after, held[::-1])

  def score(self, orders: Orders) -> Score:
    """Returns the score of orders that can be run."""
    numbers = [list(map(self._number, order)) for order in orders]
    return self._score(numbers, self._earliest(numbers, self._before))

  def shorten(
    self, orders: Orders, limits: Sequence[int], rounds: int
  ) -> tuple[Score, Orders]:
    """Returns the best orders that are found, and their score, from orders that
    can be run within the limits, the most activations of each device. A round
    is two passes; one that does not shorten the table is the last."""
    orders = [list(map(self._number, order)) for order in orders]
    start = self._earliest(orders, self._before)
    best = self._score(orders, start), orders
    for _ in range(rounds):
      for direction, back in (
        (self._before, self._after),
        (self._after, self._before),
      ):
        orders = self._pull(orders, start, direction, limits)
        orders = [order[::-1] for order in orders]
        start = self._earliest(orders, back)
      found = self._score(orders, start)
      if found >= best[0]:
        break
      best = found, orders
    return best[0], [list(map(self._step, order)) for order in best[1]]

  def _number(self, step: Step) -> int:
    stages, microbatches = self._shape
    action, stage, microbatch = step
    place = _ACTIONS.index(action) * stages + stage
    return place * microbatches + microbatch

  def _step(self, number: int) -> Step:
    place, microbatch = divmod(number, self._shape[1])
    action, stage = divmod(place, self._shape[0])
    return _ACTIONS[action], stage, microbatch

  def _score(self, orders, start):
    ends = [start[order[-1]] + self._time[order[-1]] for order in orders]
    return _score_of([start[order[0]] for order in orders], ends)

  def _earliest(self, orders, direction):
    """Returns when each step starts, at the earliest."""
    needs, time = direction.needs, self._time
    start = [-1.0] * len(time)  # negative: not known yet
    at, free, left = [0] * len(orders), [0.0] * len(orders), len(time)
    while left:
      for device, order in enumerate(orders):
        i, begin, first = at[device], free[device], at[device]
        while i < len(order):
          step = order[i]
          for need, after in needs[step]:
            when = start[need]
            if when < 0:
              break
            if when + after > begin:
              begin = when + after
          else:
            start[step] = begin
            begin += time[step]
            free[device] = begin
            i += 1
            continue
          break
        at[device] = i
        left -= i - first
    return start

  def _pull(self, orders, start, direction, limits):
    """Returns orders in which each step is in the earliest gap for it; `start`
    becomes when it starts there, or later than it could."""
    needs, change, time = direction.needs, direction.held, self._time
    orders = [list(order) for order in orders]
    held = []  # of each device, activations before each of its steps
    for order in orders:
      held.append([0])
      for step in order:
        held[-1].append(held[-1][-1] + change[step])
    rows = sorted(
      (start[step], device, place)
      for device, order in enumerate(orders)
      for place, step in enumerate(order)
    )
    # A step moves only to an earlier index, so the indices of later rows hold.
    for began, device, place in rows:
      order, count = orders[device], held[device]
      step = order[place]
      ready = 0.0
      for need, after in needs[step]:
        ready = max(ready, start[need] + after)
      if ready >= began:
        continue
      most = limits[device] if change[step] > 0 else len(time)
      here, until, found = place, began + time[step], None
      while True:
        last = order[here - 1] if here else None
        end = 0.0 if last is None else start[last] + time[last]
        begin = max(end, ready)
        if begin < began and begin + time[step] <= until * self._slack:
          found = here, begin
        if end <= ready or count[here] >= most or count[here - 1] >= most:
          break
        here, until = here - 1, start[last]
      if found is None:
        continue
      here, start[step] = found
      order.insert(here, order.pop(place))
      for i in range(here, place):
        count[i + 1] = count[i] + change[order[i]]
    return orders


def _weight(state, costs, patience, full):
  """The next W, if memory is full or it fits before the next known step."""
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
  that has none, so the oldest microbatch can always advance.
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


def best(
  places: Sequence[tuple[int]],
  microbatches: int,
  costs: analyze.Costs,
  limits: Sequence[int],
  ways: Ways,
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
    microbatches: of the batch.
    costs: the times of F, I, W and transfers.
    limits: the most activations of each device.
    ways: limits -> known orders that fit, the best for much memory first.
    named: activations per device of the named schedules with these `places`.
  """
  search = _Search(places, microbatches, ways)
  transfers = costs.transfer.any() or costs.transfer_back.any()
  if not transfers and not np.ptp((costs.forward, costs.input, costs.weight)):
    costs = search.even
  limits = search.useful(limits)
  others = (*named, *range(max(limits))[: search.least - 1 : -1])
  others = (search.useful([most] * len(limits)) for most in others)
  count = max(_WORK // search.tasks, 1)
  least, found = search.least_engaged(costs), None
  for most in list(dict.fromkeys([limits, *others]))[:count]:
    score, orders = search.run(costs, most)
    better = found is None or score < found[0]
    if better and search.fits(orders, limits):
      found = score, orders
    if found[0][0] <= least:
      break
  return found[1]


class _Search:
  """Simulates orders for one assignment of stages to devices."""

  def __init__(self, places, microbatches, ways):
    self._places, self._microbatches = places, microbatches
    self._ways = ways
    self._owned = layout.stages_of(places)
    self.even = analyze.costs(len(places))
    self.tasks = 3 * len(places) * microbatches
    self.least = max(map(len, self._owned))  # activations that any rule needs

  def useful(self, limits: Sequence[int]) -> Limits:
    """Returns the limits, lowered to all activations of the device's stages."""
    each = (len(own) * self._microbatches for own in self._owned)
    return tuple(map(min, limits, each))

  def least_engaged(self, costs) -> float:
    """Returns a lower bound of any score: the work of the busiest device."""
    work = (costs.forward + costs.input + costs.weight) * self._microbatches
    most = max(work[own].sum() for own in self._owned)
    return _score_of([0.0], [float(most)])[0]

  def fits(self, orders: Orders, limits: Limits) -> bool:
    """Returns whether orders hold no more activations than the limits."""
    change = {FORWARD: 1, INPUT: 0, WEIGHT: -1}
    held = (itertools.accumulate(change[step[0]] for step in o) for o in orders)
    return all(max(h) <= limit for h, limit in zip(held, limits, strict=True))

  def run(self, costs, limits) -> tuple[Score, Orders]:
    """Returns the best orders within the limits, and their score."""
    even = self.even
    # Where all tasks take one unit, no device ever waits for a part of it.
    rules = self._rules(self._ways(limits), even, limits, _PATIENCE[:1])
    found = self._shortest([], rules, even, limits)
    if costs is not even:
      early = [[s for s in o if s[0] != WEIGHT] for o in found[1]]
      rules = self._rules([early], costs, limits, _PATIENCE)
      found = self._shortest([found[1]], rules, costs, limits)
    return found

  def _rules(self, ways, costs, limits, patience):
    """Yields rules that follow known orders, and greedy ones."""
    for orders in ways:
      for part in patience:
        yield _follow(orders, limits, costs, part)
    for part in patience:
      yield _greedy(self._owned, limits, costs, part)

  def _shortest(self, tried, rules, costs, limits):
    """Returns the best of some orders and the rules' orders, shortened."""
    places, count = self._places, self._microbatches
    large = self.tasks > _LARGE
    tried += [
      play(rule, places, count, costs, every=count, flush=True)
      for rule in itertools.islice(rules, 1 if large else None)
    ]
    gaps = Gaps(places, count, costs)
    scores = [(gaps.score(orders), i) for i, orders in enumerate(tried)]
    # Keep the first of the orders with equal scores.
    scores = dict(sorted(scores, reverse=True))
    first = sorted(scores.items())[: _SHORTENED if self.tasks <= _SMALL else 1]
    if large:
      return first[0][0], tried[first[0][1]]
    return min(
      (gaps.shorten(tried[i], limits, _ROUNDS) for _, i in first),
      key=lambda item: item[0],
    )
