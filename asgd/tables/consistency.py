"""Consistency models: how old the rows may be that a worker reads.

A worker that has finished c clocks is at clock c. A row that a worker has
pulled has a clock r: the clock of the slowest worker at the time when the
server read the row. The row has all updates of the clocks before r, and perhaps
some later updates. The clock differential of a read compares the last clock
that is complete in the row, r - 1, with the worker's clock: (r - 1) - c.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from asgd import checks, names


def _within_bound(rules: "ConsistencyRules", clock: int) -> int:
  """Returns the least clock of a row within the bound."""
  return max(0, clock - rules.bound)


def _any_clock(rules: "ConsistencyRules", clock: int) -> int:
  del rules, clock
  return 0


class Consistency(NamedTuple):
  """A consistency model: a row of `_MODELS`, a value of `CONSISTENCIES`."""

  name: str
  # (rules, worker's clock) -> the least clock that a row must have to be read
  need: Callable[["ConsistencyRules", int], int] = _within_bound
  # Names of the options that the model requires: some of "bound", "threshold"
  # and "budget".
  numbers: tuple[str, ...] = ()
  # `bound` of a recipe that does not set it; None: the recipe must set it.
  bound: int | None = None
  pulls_all: bool = False  # each job pulls all its rows from the server
  deferred: bool = False  # updates of a clock are applied together
  # The server sends rows when the slowest clock advances.
  by_clock: bool = False
  # The server sends a row when a cached copy lacks too much of its changes.
  by_value: bool = False


_MODELS = (
  # A read has exactly the updates of all clocks before c, and the worker's own.
  Consistency("bulk_synchronous", deferred=True),
  # A read has all updates of the clocks before c - s, and the worker's own. The
  # worker reads cached copies, and pulls a row if its copy is older (Ho et al.,
  # NIPS 2013).
  Consistency("ssp", numbers=("bound",), bound=3),
  # As ssp; the server also sends changed rows when the slowest clock advances
  # (Dai et al., AAAI 2015).
  Consistency("essp", numbers=("bound",), bound=3, by_clock=True),
  # As essp, but the server sends the rows that changed most, within a budget
  # (Wei et al., SoCC 2015).
  Consistency("managed", numbers=("bound", "budget"), bound=3, by_clock=True),
  # In each element a read lacks at most v0 / sqrt(c + 1) of others' updates,
  # including what filters and codecs hold back (Dai et al., AAAI 2015).
  Consistency("value_bounded", _any_clock, ("threshold",), by_value=True),
  # A read waits until all workers have finished the clocks before c - tau, and
  # then has the server's present values (Li et al., OSDI 2014).
  Consistency("delay_bounded", numbers=("bound",), pulls_all=True),
  # A read has the server's present values; no worker waits.
  Consistency("asynchronous", _any_clock, pulls_all=True),
)
# Models by name; a new model is a row of _MODELS.
CONSISTENCIES: dict[str, Consistency] = {model.name: model for model in _MODELS}


class ConsistencyRules(NamedTuple):
  """A consistency model and the numbers that it requires.

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
  # value_bounded: the most that filters and a codec may hold back of an
  # element's updates, in the unit of a parameter.
  hold: float = math.inf  # by one worker
  held: float = 0.0  # by all workers except the reader, in total

  @property
  def pulls_all(self) -> bool:
    """Whether each job pulls all its rows from the server."""
    return self.consistency.pulls_all

  @property
  def deferred(self) -> bool:
    """Whether updates of a clock are applied together, once all have
    arrived."""
    return self.consistency.deferred

  @property
  def by_clock(self) -> bool:
    """Whether the server sends rows when the slowest clock advances."""
    return self.consistency.by_clock

  @property
  def by_value(self) -> bool:
    """Whether the server sends a row when a worker's copy lacks too much of the
    row's changes."""
    return self.consistency.by_value

  @property
  def budgeted(self) -> bool:
    """Whether the server sends at most `budget` rows per clock."""
    return "budget" in self.consistency.numbers

  @property
  def registers(self) -> bool:
    """Whether the server tracks which rows a worker has."""
    return self.by_clock or self.by_value

  def need(self, clock: int) -> int:
    """Returns the least clock of a row that a worker at `clock` may read."""
    return self.consistency.need(self, clock)

  def limit(self, clock: int) -> float:
    """Returns the largest |server's value - copy| of an element that a read at
    clock c = `clock` allows: v0 / sqrt(c + 1) - `held`."""
    return self.threshold / math.sqrt(clock + 1) - self.held

  def holding(self, workers: int, clocks: int) -> "ConsistencyRules":
    """Returns these rules of value_bounded with `hold` and `held` set.

    The tightest limit of the run is v0 / sqrt(C + 1). Half of this limit is
    reserved for updates that workers hold back:

      held = v0 / sqrt(C + 1) / 2,   hold = held / (N - 1)

    With one worker, hold = held.

    Args:
      workers: N.
      clocks: C, the clocks of the complete run.
    """
    reserved = self.threshold / math.sqrt(clocks + 1) / 2
    return self._replace(hold=reserved / max(workers - 1, 1), held=reserved)


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
    budget: rows of managed that the server may send a worker per clock, 0 or
      more.

  Raises:
    ValueError: for an unknown model, and for a number that is missing, out of
      its range, or not used by the model.
  """
  if not isinstance(consistency, Consistency):
    consistency = names.lookup("consistency", consistency, CONSISTENCIES)
  numbers = {"bound": bound, "threshold": threshold, "budget": budget}
  for key, value in numbers.items():
    is_used = key in consistency.numbers
    if is_used and value is None:
      raise ValueError(f"consistency {consistency.name!r} needs {key}")
    if not is_used and value is not None:
      raise ValueError(
        f"consistency {consistency.name!r} has no {key}, which is"
        f" {checks.shown(value)}; drop it"
      )
  if threshold is not None:
    checks.positive("threshold", threshold)
  return ConsistencyRules(
    consistency,
    0 if bound is None else checks.integer("bound", bound, 0),
    math.inf if threshold is None else float(threshold),
    0 if budget is None else checks.integer("budget", budget, 0),
  )
