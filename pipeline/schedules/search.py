"""A bounded search for short orders of split backwards, within a memory.

Rules are asked in simulated time what each device does next, and their orders
are shortened (`gaps`). How many orders are tried depends on the size of the
table, never on a clock, so the same arguments lead to the same table.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline import analyze
from pipeline.schedules import layout
from pipeline.schedules.gaps import Gaps, Score
from pipeline.schedules.gaps import score as score_of
from pipeline.schedules.layout import Orders
from pipeline.schedules.play import Rule, play
from pipeline.table import FORWARD, INPUT, WEIGHT

Limits = tuple[int, ...]  # the most activations of each device
Ways = Callable[[Limits], Iterable[Orders]]  # known orders within limits: the
# F and I of each device, or all steps
_LARGE = 20_000  # tasks; of a larger table one order is tried for given costs
_SMALL = 1_000  # tasks; of a larger table one order is shortened
_WORK = 2_000  # tasks, in sum over the limits for which a table is tried
_PATIENCE = (1.0, 0.5, 0.0)  # the part of a W that must fit before what comes
_SHORTENED = 3  # orders of a small table that are shortened
_ROUNDS = 4  # at the most, of shortening an order


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


def best(
  places: Sequence[tuple[int]],
  microbatches: int,
  costs: analyze.Costs,
  limits: Sequence[int],
  ways: Ways,
  named: Sequence[int] = (),
) -> Orders:
  """Returns the orders of a batch with the least cost that the search finds.

  The cost is `gaps.score`. Within given limits, the search takes the best of
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
    costs: how long F, I, W and transfers take.
    limits: the most activations of each device.
    ways: limits -> known orders that fit, the best for much memory first.
    named: activations of a device, of the named schedules on these places.
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
  """Orders for some places, in simulated time."""

  def __init__(self, places, microbatches, ways):
    self._places, self._microbatches = places, microbatches
    self._ways = ways
    self._owned = layout.stages_of(places)
    self.even = analyze.costs(len(places))
    self.tasks = 3 * len(places) * microbatches
    self.least = max(map(len, self._owned))  # activations that any rule needs

  def useful(self, limits: Sequence[int]) -> Limits:
    """Returns limits that are not above what a device can hold at all."""
    each = (len(own) * self._microbatches for own in self._owned)
    return tuple(map(min, limits, each))

  def least_engaged(self, costs) -> float:
    """Returns a lower bound of any score: the work of the busiest device."""
    work = (costs.forward + costs.input + costs.weight) * self._microbatches
    most = max(work[own].sum() for own in self._owned)
    return score_of([0.0], [float(most)])[0]

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
    """Yields rules that obey known orders, and greedy ones."""
    for orders in ways:
      for part in patience:
        yield _follow(orders, limits, costs, part)
    for part in patience:
      yield _greedy(self._owned, limits, costs, part)

  def _shortest(self, tried, rules, costs, limits):
    """The best of some orders and those of rules, after shortening."""
    places, count = self._places, self._microbatches
    large = self.tasks > _LARGE
    tried += [
      play(rule, places, count, costs, every=count, flush=True)
      for rule in itertools.islice(rules, 1 if large else None)
    ]
    gaps = Gaps(places, count, costs)
    scores = [(gaps.score(orders), i) for i, orders in enumerate(tried)]
    # Of orders with one score, the first.
    scores = dict(sorted(scores, reverse=True))
    first = sorted(scores.items())[: _SHORTENED if self.tasks <= _SMALL else 1]
    if large:
      return first[0][0], tried[first[0][1]]
    return min(
      (gaps.shorten(tried[i], limits, _ROUNDS) for _, i in first),
      key=lambda item: item[0],
    )
