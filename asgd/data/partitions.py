"""Partitions: which training examples each worker draws from.

  shared     all workers draw from all examples
  sharded    worker i has the examples i, i + N, i + 2 N, ...: similar labels
  dirichlet  the labels of a worker's examples are skewed

A partition is given by name, or as a dict of a name and options.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from asgd import checks

SHARED, SHARDED, DIRICHLET = NAMES = "shared", "sharded", "dirichlet"
Partition = str | Mapping[str, Any]

_MAX_CONCENTRATION = 1e9  # with it, all shards have about the same labels
_BINS = 10  # for labels that are numbers, not classes
_SKEW_KEY = 2**32  # no job number: the keys of jobs are (seed, worker, job)


def _parse(partition: Partition) -> tuple[str, float]:
  """Returns (name, concentration), checked."""
  entries = partition if isinstance(partition, Mapping) else {"name": partition}
  # A copy: `pop` must not change the caller's dict.
  options = dict(entries)
  checks.one_of("partition", name := options.pop("name", None), NAMES)
  concentration = 1.0
  if name == DIRICHLET:
    concentration = options.pop("concentration", concentration)
    checks.positive("partition.concentration", concentration)
    checks.real(
      "partition.concentration",
      concentration,
      lambda value: value <= _MAX_CONCENTRATION,
      f"at most {_MAX_CONCENTRATION:.0e}",
      ": for labels that are alike use partition 'sharded'",
    )
  for key in options:
    raise ValueError(
      f"partition {name!r} has no option {checks.shown(key)}: leave it out"
    )
  return name, concentration


def divides(partition: Partition) -> bool:
  """Whether each worker has its own examples. Raises ValueError for a partition
  that is not known, or has a wrong option."""
  return _parse(partition)[0] != SHARED


def shards(
  partition: Partition, labels: np.ndarray, workers: int, seed: int
) -> list[np.ndarray]:
  """Returns the examples of each worker, for a partition that divides them.

  Shards are disjoint and complete, and their sizes differ by at most one.

  Args:
    partition: "sharded" or "dirichlet", or a dict of the name and options.
    labels: [n], of the examples; "dirichlet" takes classes, or floats, which it
      divides into ten bins of equal size.
    workers: N.
    seed: the seed of "dirichlet"; each seed has other shards.

  Returns:
    int64[n // N or one more] for each worker.

  Raises:
    ValueError: for labels of several numbers, which "dirichlet" cannot skew.

  Example:
    >>> from asgd.data import partitions
    >>> labels = np.arange(12) % 3
    >>> print(partitions.shards("sharded", labels, 3, seed=0)[1])
    [ 1  4  7 10]
    >>> skewed = dict(name="dirichlet", concentration=0.01)
    >>> for rows in partitions.shards(skewed, labels, 3, seed=0):
    ...   print(labels[rows])
    [1 1 1 1]
    [2 2 2 2]
    [0 0 0 0]
  """
  name, concentration = _parse(partition)
  if name == SHARDED:
    n = len(labels)
    return [np.arange(worker, n, workers) for worker in range(workers)]
  return _label_skew(_classes(labels), workers, seed, concentration)


def _classes(labels: np.ndarray) -> np.ndarray:
  """Returns the class of each label, int[n] from 0."""
  if labels.ndim != 1:
    raise ValueError(
      "partition 'dirichlet' skews labels, one for an example, and these have"
      f" the shape {labels.shape}: use partition 'sharded'"
    )
  if labels.dtype.kind not in "biu":
    edges = np.quantile(labels, np.linspace(0, 1, _BINS + 1)[1:-1])
    labels = np.searchsorted(edges, labels)
  return np.unique(labels, return_inverse=True)[1]


def _label_skew(
  classes: np.ndarray, workers: int, seed: int, concentration: float
) -> list[np.ndarray]:
  """Draws the shards of a label skew.

    q_i ~ Dirichlet(alpha p),   p_c the fraction of class c in the examples left

  The workers draw one after the other, without replacement: worker i draws the
  classes of its examples from q_i. If a class is used up, the worker draws a
  new q_i for its other examples. So the last workers get what others left. If
  alpha is small, a worker has few classes.

  Source:
    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution
    for federated visual classification", 2019, arXiv:1909.06335.
  """
  rng = np.random.default_rng((seed, workers, _SKEW_KEY))
  # Two seeds, or two numbers of workers, have unrelated shards.
  order = rng.permutation(len(classes))
  # The examples of each class, in random order.
  stocks = [order[classes[order] == c] for c in range(classes.max() + 1)]
  remaining = np.array([len(stock) for stock in stocks])  # by class
  shards_so_far: list[np.ndarray] = []
  for worker in range(workers):
    size = len(range(worker, len(classes), workers))
    counts = _draw_classes(rng, remaining, size, concentration)
    # A worker takes the next `counts[c]` examples of each stock c.
    ends = [len(stock) for stock in stocks] - remaining + counts
    remaining = remaining - counts
    parts = zip(stocks, ends - counts, ends, strict=True)
    shards_so_far.append(np.concatenate([stock[i:j] for stock, i, j in parts]))
  return shards_so_far


def _draw_classes(
  rng: np.random.Generator,
  remaining: np.ndarray,
  size: int,
  concentration: float,
) -> np.ndarray:
  """Returns how many examples of each class a worker takes, int64[classes]:
  `size` in all, and at most the `remaining` ones of each class."""
  counts = np.zeros_like(remaining)
  while missing_count := size - counts.sum():
    available = np.flatnonzero(remaining - counts)
    left = (remaining - counts)[available]
    # A new q_i after a class was used up: it favours few of the other classes.
    shares = rng.dirichlet(concentration * left / left.sum())
    counts[available] += np.minimum(
      rng.multinomial(missing_count, shares), left
    )
  return counts
