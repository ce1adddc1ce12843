"""Consistency: what a worker may read, as one table of models.

The number of a worker's clocks is c. A row's clock is the least of all workers'
clocks when the row was read from the server: it has all their updates of the
clocks before that, and perhaps some later ones. The clock differential of a
read is (row's clock) - 1 - c.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from asgd import checks, names


def _within_bound(rules: "ConsistencyRules", clock: int) -> int:
  return max(0, clock - rules.bound)


def _any_clock(rules: "ConsistencyRules", clock: int) -> int:
  del rules, clock
  return 0


class Consistency(NamedTuple):
  """A consistency model: a row of `CONSISTENCIES`."""

  name: str
  # (rules, clock) -> the clock below which a row is too old to be read
  need: Callable[["ConsistencyRules", int], int] = _within_bound
  numbers: tuple[str, ...] = ()  # that it needs: "bound", "threshold", "budget"
  bound: int | None = None  # where a recipe gives none; None: it is needed
  anew: bool = False  # each job reads all its rows from the server
  deferred: bool = False  # updates of a clock are applied together
  by_clock: bool = False  # the server sends rows when all finish a clock
  by_value: bool = False  # it sends rows by what a worker's copy lacks


_MODELS = (
  # Exactly the updates of all clocks before c, and its own.
  Consistency("bulk_synchronous", deferred=True),
  # All updates of the clocks before c - s, and its own: cached copies, read
  # anew when one is older (Ho et al., NIPS 2013).
  Consistency("ssp", numbers=("bound",), bound=3),
  # The same; the server sends what changed when the slowest clock advances
  # (Dai et al., AAAI 2015).
  Consistency("essp", numbers=("bound",), bound=3, by_clock=True),
  # The same, but only the rows that changed most, as far as a budget goes (Wei
  # et al., SoCC 2015).
  Consistency("managed", numbers=("bound", "budget"), bound=3, by_clock=True),
  # Rows that lack updates of others which sum up to v0 / sqrt(c + 1) or less in
  # each element, those that filters and codecs hold back among them (Dai et
  # al., AAAI 2015).
  Consistency("value_bounded", _any_clock, ("threshold",), by_value=True),
  # What the server has, once all have finished the clocks before c - tau (Li et
  # al., OSDI 2014).
  Consistency("delay_bounded", numbers=("bound",), anew=True),
  # What the server has.
  Consistency("asynchronous", _any_clock, anew=True),
)
# By name; a new model is a row here.
CONSISTENCIES: dict[str, Consistency] = {model.name: model for model in _MODELS}


class ConsistencyRules(NamedTuple):
  """A consistency model and its numbers.

  Example:
    >>> from asgd import tables
    >>> rules = tables.rules("ssp", bound=3)
    >>> rules.need(clock=10), rules.need(clock=2)
    (7, 0)
  """

  consistency: Consistency
  bound: int = 0  # s or tau, in clocks
  threshold: float = math.inf  # v0, in the unit of a parameter
  budget: int = 0  # rows that the server may send to a worker in one clock
  # Of value_bounded: what filters and a codec may hold back of an element, at a
  # worker, and at all others than the one that reads.
  hold: float = math.inf
  held: float = 0.0

  @property
  def anew(self) -> bool:
    """Whether each job reads all its rows from the server."""
    return self.consistency.anew

  @property
  def deferred(self) -> bool:
    """Whether updates of a clock are applied together, when all have come."""
    return self.consistency.deferred

  @property
  def by_clock(self) -> bool:
    """Whether the server sends rows when the slowest clock advances."""
    return self.consistency.by_clock

  @property
  def by_value(self) -> bool:
    """Whether the server sends rows by what a worker's copy lacks."""
    return self.consistency.by_value

  @property
  def budgeted(self) -> bool:
    """Whether the server sends no more rows a clock than `budget`."""
    return "budget" in self.consistency.numbers

  @property
  def registers(self) -> bool:
    """Whether the server knows which rows a worker has."""
    return self.by_clock or self.by_value

  def need(self, clock: int) -> int:
    """Returns the clock below which a row is too old to be read at a clock."""
    return self.consistency.need(self, clock)

  def limit(self, clock: int) -> float:
    """Returns what an element may lack at a clock of what the server has: v0 /
    sqrt(c + 1), without what it may lack that other workers hold back."""
    return self.threshold / math.sqrt(clock + 1) - self.held

  def holding(self, workers: int, clocks: int) -> "ConsistencyRules":
    """Returns the rules of value_bounded for N workers that hold back updates.

    Half of the least bound, v0 / sqrt(C + 1), is for what they hold back: the
    other workers' shares add up to it, whatever their clocks.

    Args:
      workers: N.
      clocks: C, of the whole run.
    """
    half = self.threshold / math.sqrt(clocks + 1) / 2
    return self._replace(hold=half / max(workers - 1, 1), held=half)


def rules(
  consistency: str | Consistency,
  *,
  bound: int | None = None,
  threshold: float | None = None,
  budget: int | None = None,
) -> ConsistencyRules:
  """Returns the rules of a consistency model.

  Args:
    consistency: a name of CONSISTENCIES, or a Consistency.
    bound: s of ssp, essp and managed, tau of delay_bounded: clocks, 0 or more.
    threshold: v0 of value_bounded, positive.
    budget: rows a clock and worker of managed, 0 or more.

  Raises:
    ValueError: for an unknown model, and for a number that is missing, out of
      its range or of another model.
  """
  if not isinstance(consistency, Consistency):
    consistency = names.lookup("consistency", consistency, CONSISTENCIES)
  given = {"bound": bound, "threshold": threshold, "budget": budget}
  for key, value in given.items():
    wanted = key in consistency.numbers
    if wanted and value is None:
      raise ValueError(f"consistency {consistency.name!r} needs {key}")
    if not wanted and value is not None:
      raise ValueError(
        f"consistency {consistency.name!r} has no {key}, which is"
        f" {checks.shown(value)}; drop it"
      )
  if threshold is not None:
    checks.positive("threshold", threshold)
  return ConsistencyRules(
    consistency,
    0 if bound is None else checks.whole("bound", bound, 0),
    math.inf if threshold is None else float(threshold),
    0 if budget is None else checks.whole("budget", budget, 0),
  )
