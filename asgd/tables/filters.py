"""Filters: they select the rows of a message that are sent.

A filter may hold back rows. The worker adds up the updates of such a row, and
sends the sum at the end of the run at the latest. Under value_bounded a worker
may hold back little (`ConsistencyRules.hold`).

Only `kkt` drops rows: gradients that cannot change the weights. The last
message of a worker bypasses all filters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks, names
from asgd.tables.rows import largest, largest_first


class Verdict(NamedTuple):
  """A filter's decision on the rows of a message."""

  send: np.ndarray  # bool[n]; rows neither sent nor dropped are held back
  drop: np.ndarray | None = None  # bool[n]; None: drops no row


# (the worker's copies of the rows [n, ...], values to be pushed [n, ...],
# generator) -> Verdict
Filter = Callable[[Any, Any, np.random.Generator], Verdict]


def significantly_modified(
  threshold: float, *, relative: bool = False
) -> Filter:
  """Sends a row once its summed updates exceed a threshold.

    sent if max_i |v_i| > threshold,   relative: > threshold max_i |w_i|

  Args:
    threshold: 0 or more, and finite.
    relative: whether the threshold is a fraction of the row's largest value.

  Raises:
    ValueError: for a threshold out of its range; an infinite one would hold
      back every row.

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
    limit = threshold * (largest(rows) if relative else 1.0)
    return Verdict(largest(values) > limit)

  return apply


def random_skip(probability: float) -> Filter:
  """Holds back each row with a probability, until a later message.

  Args:
    probability: from 0, below 1.

  Raises:
    ValueError: for a probability out of its range; 1 would hold back every row.

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
    # `>=` sends every row at probability 0, as random numbers are in [0, 1).
    return Verdict(rng.random(len(values)) >= probability)

  return apply


def kkt(
  l1: float, *, slack: float = 0.0, column: int | None = None
) -> Filter:
  """Drops gradients that an L1 penalty would keep from changing a row of zeros.

    dropped if w = 0 and max_i |g_i| <= l1 - slack

  A weight of 0 is optimal if its gradient does not exceed the penalty
  (Karush-Kuhn-Tucker conditions). Values must be gradients, and the function at
  the server must have this penalty, as `ftrl_proximal` and `proximal` do.

  The filter sees one worker's part of the gradient and decides as if it were
  the full gradient. With a larger slack, fewer weights stay at 0 although the
  full gradient would move them.

  Args:
    l1: the penalty, positive, in the unit of a gradient.
    slack: from 0, below `l1`; gradients within `slack` of the penalty are sent.
    column: the column of the weights in rows, and of the gradients in values,
      where rows have other columns, too; None: all columns are weights.

  Returns:
    A Filter.

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
    checks.integer("column", column, 0)
  if slack >= l1:
    raise ValueError(
      f"slack {slack} must be below l1, which is {l1}: no gradient would be"
      " dropped"
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
    # The worker's copy stands for the server's row, which may differ by the
    # updates that the copy lacks.
    drop = (largest(rows) == 0) & (largest(values) <= l1 - slack)
    return Verdict(~drop, drop)

  return apply


def largest_change(nbytes: int) -> Filter:
  """Sends the rows with the largest relative change, within a budget of bytes.

    sent in the order of max_i |v_i| / max_i |w_i| while they fit

  The consistency model `managed` does the same for the server's messages. With
  `push_every` a worker sends its most important updates several times per
  clock. With `bandwidth` it sends them when the link is free
  (`tables.bandwidth`).

  Args:
    nbytes: the most bytes per table and message, before a codec; a key counts 8
      bytes.

  Returns:
    A Filter.

  Raises:
    ValueError: for a number that is not positive.

  Source:
    Wei et al., "Managed communication and consistency for fast data-parallel
    iterative analytics", SoCC 2015.

  Example:
    A row of two values has 8 + 16 bytes: one row fits into 40.

    >>> import numpy as np
    >>> from asgd import tables
    >>> keep = tables.filters.largest_change(40)
    >>> values = np.array([[4.0, 1.0], [3.0, 0.0]])
    >>> keep(np.array([[8.0, 8.0], [1.0, 1.0]]), values, None).send.tolist()
    [False, True]
  """
  checks.integer("nbytes", nbytes)

  def apply(rows: Any, values: Any, rng: np.random.Generator) -> Verdict:
    del rng
    row_bytes = 8 + np.asarray(values).nbytes // max(len(values), 1)
    send = np.zeros(len(values), bool)
    send[largest_first(values, rows)[: nbytes // row_bytes]] = True
    return Verdict(send)

  return apply


FILTERS: dict[str, Callable[..., Filter]] = {
  maker.__name__: maker
  for maker in (significantly_modified, random_skip, kkt, largest_change)
}


def check(values: Any) -> tuple[str | Mapping[str, Any], ...]:
  """Returns the filters of a config as a tuple. Raises ValueError unless they
  are a list of names and dicts."""
  is_list = isinstance(values, Sequence) and not isinstance(values, str)
  if not is_list or not all(
    isinstance(value, str | Mapping) for value in values
  ):
    raise ValueError(
      "filters must be a list of names and of dicts of a name and options, as"
      " dict(name='random_skip', probability=0.5), not"
      f" {checks.shown(values)}"
    )
  return tuple(values)


def named(value: str | Mapping[str, Any]) -> Filter:
  """Returns the filter that a config describes: a name, or a dict of a `name`
  and options.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, and
      for a value that the filter rejects.

  Example:
    >>> from asgd import tables
    >>> keep = tables.filters.named(dict(name="random_skip", probability=0.5))
  """
  (value,) = check([value])
  options = {"name": value} if isinstance(value, str) else dict(value)
  name = options.pop("name", None)
  maker = names.resolve("filter", name, FILTERS)
  return names.call("filter", name, maker, options)
