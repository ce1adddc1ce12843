"""Finds values that are not finite in the data of a run that has failed.

One NaN among the examples makes the loss NaN, whatever the learning rate is.
Data are not searched before a run: that would cost time in each run, and a loss
may leave such values out.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd.problems.problem import Problem


def first_fault(tree: Any, label: str) -> str:
  """Returns a text about the first value of a tree that is not finite.

  Args:
    tree: a tree of arrays.
    label: name of the tree in the text.

  Returns:
    The array, the index and the value; "" if all values are finite.

  Example:
    >>> first_fault({"x": np.array([[1.0, 2.0], [3.0, np.nan]])}, "data")
    "data['x'][1, 1] is nan"
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      continue
    values = np.asarray(leaf)
    is_wrong = ~np.isfinite(values)
    count = int(is_wrong.sum())
    if not count:
      continue
    index = np.unravel_index(int(is_wrong.argmax()), values.shape)
    where = f"[{', '.join(map(str, index))}]" if index else ""
    text = f"{label}{jax.tree_util.keystr(path)}{where} is {values[index]}"
    return text + f" ({count:,} such values in this array)" * (count > 1)
  return ""


def find_fault(
  problem: Problem,
  stored: Iterable[tuple[str, Any]] | None,
  *,
  seed: int,
  workers: int,
  jobs: Iterable[tuple[int, int]],
) -> str:
  """Searches the initial parameters and the data of a run.

  Args:
    problem: the problem of the run.
    stored: (label, tree of arrays) for data in memory; None for the problem of
      a config.
    seed: the seed of the run.
    workers: N.
    jobs: (worker, job) of the batches that are searched.

  Returns:
    A text about the first value that is not finite; "" if none is found. Data
    from an iterator are not searched, because that would move its position.
  """
  key, _ = jax.random.split(jax.random.key(seed))
  label = "batches(seed, workers)" if stored is None else "data"
  batches = problem.batches(seed, workers)
  drawn = (
    (f"{label}({worker}, {job})", batches(worker, job))
    for worker, job in (() if problem.sequential else jobs)
  )
  trees = itertools.chain([("params", problem.init(key))], stored or (), drawn)
  faults = (first_fault(tree, name) for name, tree in trees)
  try:
    return next(filter(None, faults), "")
  except Exception:  # of a user's function: the error of the run is raised
    return ""
