"""Filters: which rows of a message are sent.

What a filter holds back stays with the worker, is added to what comes later,
and is sent at the end of the run; value_bounded has them hold back little
(`ConsistencyRules.hold`). Only `kkt` drops, what can make no difference. At the
end of a run nothing is held back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks, names


class Verdict(NamedTuple):
  """What becomes of the rows of a message."""

  send: np.ndarray  # bool[n]
  drop: np.ndarray | None = None  # bool[n]; None: none


# (the worker's copies of the rows [n, ...], values to be pushed [n, ...],
# generator) -> Verdict
Filter = Callable[[Any, Any, np.random.Generator], Verdict]


def _largest(values: Any) -> np.ndarray:
  """The largest absolute value of each row, float[n]."""
  return np.abs(np.asarray(values)).reshape(len(values), -1).max(1, initial=0)


def significantly_modified(
  threshold: float, *, relative: bool = False
) -> Filter:
  """Sends rows whose values have added up to more than a threshold.

    sent if max_i |v_i| > threshold,   relative: > threshold max_i |w_i|

  Args:
    threshold: 0 or more, and finite.
    relative: to the row.

  Raises:
    ValueError: for a threshold out of its range: an infinite one would send
      nothing.

  Source:
    Li et al., "Scaling distributed machine learning with the parameter
    server", OSDI 2014, section 3.3.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> keep = tables.filters.significantly_modified(0.5)
    >>> values = np.array([[0.1, -0.9], [0.2, 0.3]])
    >>> keep(np.zeros((2, 2)), values, None).send.tolist()
    [True, False]
  """
  checks.nonnegative("threshold", threshold)

  def apply(rows: Any, values: Any, rng: np.random.Generator) -> Verdict:
    del rng
    limit = threshold * (_largest(rows) if relative else 1.0)
    return Verdict(_largest(values) > limit)

  return apply


def random_skip(probability: float) -> Filter:
  """Holds back each row with a probability, until a later message.

  Args:
    probability: from 0, below 1.

  Raises:
    ValueError: for a probability out of its range: 1 would send nothing.

  Source:
    Li et al., "Communication efficient distributed machine learning with the
    parameter server", NIPS 2014, section 4: random skip.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> skip, rng = tables.filters.random_skip(0.25), np.random.default_rng(0)
    >>> rows = np.zeros((1000, 2))
    >>> 700 < int(skip(rows, rows, rng).send.sum()) < 800
    True
  """
  checks.fraction("probability", probability)

  def apply(rows: Any, values: Any, rng: np.random.Generator) -> Verdict:
    del rows
    return Verdict(rng.random(len(values)) >= probability)

  return apply


def kkt(
  l1: float, *, slack: float = 0.0, column: int | None = None
) -> Filter:
  """Drops gradients that L1 would not let change a row of zeros.

    dropped if w = 0 and max_i |g_i| <= l1 - slack

  A weight of 0 is optimal where its gradient is not above the penalty
  (Karush-Kuhn-Tucker). It is for gradients, and a server whose function has
  that penalty, as `ftrl_proximal` and `proximal`. What is dropped is a part
  of the gradient, of one worker's examples, that stands for all of it: the
  more slack, the less often a weight that should move stays at 0.

  Args:
    l1: the penalty, positive, in the unit of a gradient.
    slack: from 0, below `l1`: how near to it gradients are sent.
    column: of rows and values that have more than weights and gradients: where
      these are; None: all are.

  Returns:
    A Filter, which drops.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Li et al., "Scaling distributed machine learning with the parameter
    server", OSDI 2014, section 5.1: the KKT filter.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> drop = tables.filters.kkt(1.0, slack=0.1)
    >>> rows, gradients = np.array([[0.0], [0.0], [2.0]]), np.array([[0.5]] * 3)
    >>> gradients[1] = 0.95
    >>> drop(rows, gradients, None).drop.tolist()
    [True, False, False]
  """
  checks.positive("l1", l1)
  checks.nonnegative("slack", slack)
  if column is not None:
    checks.whole("column", column, 0)
  if slack >= l1:
    raise ValueError(
      f"slack {slack} must be below l1, {l1}: nothing would be dropped"
    )

  def apply(rows: Any, values: Any, rng: np.random.Generator) -> Verdict:
    del rng
    if column is not None:
      if np.shape(rows)[1:2] <= (column,):
        raise ValueError(
          f"column {column} of the filter kkt is out of range: rows are of the"
          f" shape {np.shape(rows)[1:]}"
        )
      rows, values = rows[:, column], values[:, column]
    drop = (_largest(rows) == 0) & (_largest(values) <= l1 - slack)
    return Verdict(~drop, drop)

  return apply


FILTERS: dict[str, Callable[..., Filter]] = {
  maker.__name__: maker for maker in (significantly_modified, random_skip, kkt)
}


def check(values: Any) -> tuple[str | Mapping[str, Any], ...]:
  """Returns filters as a config has them; ValueError if they are no list of
  names and dicts."""
  listed = isinstance(values, Sequence) and not isinstance(values, str)
  if not listed or not all(isinstance(x, str | Mapping) for x in values):
    raise ValueError(
      "filters must be a list of names and of dicts of a name and options, as"
      " dict(name='random_skip', probability=0.5), not"
      f" {checks.shown(values)}"
    )
  return tuple(values)


def named(value: str | Mapping[str, Any]) -> Filter:
  """Returns a filter as a config has it: a dict of its `name` and options.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, and
      for what the filter raises it for.

  Example:
    >>> from asgd import tables
    >>> keep = tables.filters.named(dict(name="random_skip", probability=0.5))
  """
  (value,) = check([value])
  options = {"name": value} if isinstance(value, str) else dict(value)
  name = options.pop("name", None)
  maker = names.resolve("filter", name, FILTERS)
  return names.call("filter", name, maker, options)
