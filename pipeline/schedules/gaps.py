"""Moves tasks of split backwards into idle time, to shorten a table.

The method is forward-backward improvement, known from project scheduling. A
pass takes the tasks in the order in which they start, and moves each into the
earliest gap of its device that is long enough. The next pass does the same with
time reversed.

Reference:
  Li and Willis, "An iterative scheduling technique for resource-constrained
    project scheduling", European Journal of Operational Research 56, 1992.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pipeline import analyze
from pipeline.schedules.layout import Orders
from pipeline.table import FORWARD, INPUT, WEIGHT, Step

_ACTIONS = FORWARD, INPUT, WEIGHT
Score = tuple[float, float]


def score(begin: Sequence[float], end: Sequence[float]) -> Score:
  """Returns the longest time that a device is engaged, from the begin of its
  first task to the end of its last, then the time of all.

  The first is what a batch costs if devices need not wait for each other
  between batches (the zero bubble papers' cost).
  """
  longest = max(last - first for first, last in zip(begin, end, strict=True))
  # Sums of the same numbers in another order are the same time.
  return float(f"{longest:.9g}"), float(f"{max(end):.9g}")


class _Direction(NamedTuple):
  """One direction of time. Steps are numbered."""

  needs: list[list[tuple[int, float]]]  # of each step: a need, and the time
  # from its start until the step may start
  held: list[int]  # of each step: what it adds to the activations held


class Gaps:
  """The tasks of a batch, whose orders are scored and shortened. `places` are
  the device of each stage, each in a tuple."""

  def __init__(
    self, places: Sequence, microbatches: int, costs: analyze.Costs
  ):
    self._shape = len(places), microbatches
    columns = costs.forward, costs.input, costs.weight
    self._time = [
      time for c in columns for time in c.tolist() for _ in range(microbatches)
    ]
    # A gap may be too short by rounding; not if there are steps that take (next
    # to) no time, because orders could then wait for each other.
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
    return score([start[order[0]] for order in orders], ends)

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
    # A step is moved among those that were before it, so places hold.
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
