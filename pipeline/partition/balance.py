"""Cuts a chain in stages where communication costs nothing."""

from collections.abc import Sequence

import numpy as np


def balance(costs: Sequence[float], stages: int) -> tuple[tuple[int, ...], ...]:
  """Cuts a chain in stages so that the largest load is as small as can be.

  Returns the nodes of each stage, one or more; among equals always the same.

  Raises:
    ValueError: for fewer nodes than stages, or costs that are negative or not
      finite.

  Example:
    >>> balance([3, 1, 1, 1], 2)
    ((0,), (1, 2, 3))
  """
  array = np.asarray(costs, np.float64)
  if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
    raise ValueError(
      f"costs must be a list of numbers, finite and not negative, not {costs!r}"
    )
  if not 1 <= stages <= len(array):
    raise ValueError(
      f"{len(array)} nodes make 1 to {len(array)} stages, not {stages}"
    )
  upto = np.concatenate([[0.0], np.cumsum(array)])
  load = upto - upto[:, None]  # [i, j]: of the nodes from i to j - 1
  load[np.tril_indices(len(upto))] = np.inf
  # best[j]: the largest load of the first j nodes, in as many stages as yet.
  best, froms = load[0], []
  for _ in range(stages - 1):
    loads = np.maximum(best[:, None], load)
    froms.append(loads.argmin(0))
    best = loads.min(0)
  end, out = len(array), []
  for start in reversed(froms):
    out.append(tuple(range(start[end], end)))
    end = start[end]
  return (tuple(range(end)), *reversed(out))
