"""k-means with a table as parameters.

A row of the table is a cluster: the sum of its examples and their number.

  config.problem = dict(name="asgd.problems.clustering:k_means", clusters=10)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks, data
from asgd import losses as losses_lib
from asgd.data import partitions
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Problem

_ROWS_PER_CALL = 2000  # examples of one call in an evaluation


def k_means(
  batch_size: int,
  *,
  clusters: int = 10,
  dataset: str = "digits",
  data_dir: str | None = None,
  partition: partitions.Partition = partitions.SHARED,
) -> Problem:
  """Mini-batch k-means: a centre is the mean of all examples assigned to it.

    c = argmin_k |x - s_k / n_k|^2;   s_c <- s_c + x;   n_c <- n_c + 1

  This is Sculley's step with the rate 1 / n_c, written as increments. They
  commute, so workers may send them in any order. A centre begins as one
  example.

  The loss of an evaluation is the mean squared distance of the test examples to
  their centres; `inertia` is this mean over the training examples. The measure
  is the part of the test examples' variance that the centres explain.

  Args:
    batch_size: B, examples of a batch.
    clusters: k, 2 or more, at most the training examples.
    dataset: a name of `data.DATASETS`; examples are flattened.
    data_dir: folder of its files.
    partition: the partition of examples, see `asgd.data.partitions`.

  Returns:
    A Problem with parameters float32[k, d + 1], the sum and the number of each
    cluster. Its workers compute updates, for the recipe `table`.

  Raises:
    ValueError: for a value out of its range, and for an example that is not
      finite; the error has its index.

  Source:
    Sculley, "Web-scale k-means clustering", WWW 2010, algorithm 1.

  Example:
    >>> import jax
    >>> from asgd.problems import clustering
    >>> problem = clustering.k_means(8, clusters=3)
    >>> params = problem.init(jax.random.key(0))
    >>> batch = problem.batches(0, 1)(0, 0)
    >>> _, updates = problem.updates(params, batch, None)
    >>> int(updates[:, -1].sum())  # each example counts once
    8
  """
  loaded_data = data.load(dataset, data_dir=data_dir)
  train, test = (
    np.asarray(x, np.float32).reshape(len(x), -1)
    for x in (loaded_data.train_images, loaded_data.test_images)
  )
  checks.integer("clusters", clusters, 2, most=len(train))
  for part, examples in (("training", train), ("test", test)):
    is_nonfinite = ~np.isfinite(examples).all(1)
    if is_nonfinite.any():
      raise ValueError(
        f"example {int(np.argmax(is_nonfinite))} of the {part} part is not"
        f" finite ({int(is_nonfinite.sum())} of {len(examples)}): leave it out"
      )

  def init(key):
    # Without replacement: of two equal centres `argmin` uses only the first.
    rows = jax.random.choice(key, len(train), (clusters,), replace=False)
    centres = jnp.asarray(train)[rows]
    return jnp.pad(centres, [(0, 0), (0, 1)]).at[:, -1].set(1)

  # The variance of the test examples, times their number.
  test_sum_of_squares = float(np.square(test - test.mean(0), dtype=float).sum())

  def evaluate(params):
    loss = _mean_squared_distance(params, test)
    measure = float("nan")
    if test_sum_of_squares:
      measure = 1 - loss * len(test) / test_sum_of_squares
    inertia = _mean_squared_distance(params, train)
    return Evaluation(loss, measure=measure, more={"inertia": inertia})

  data_of = lib.examples_of(train, loaded_data.train_labels, partition)
  train_variance = float(
    np.square(train - train.mean(0), dtype=float).sum(1).mean()
  )

  return lib.of_data(
    *(data_of, batch_size, init, _loss, evaluate),
    guess=train_variance,
    updates=_updates,
  )


def centres(params: jax.Array) -> jax.Array:
  """Returns the centres [k, d] of clusters, from sums and numbers [k, d +
  1]."""
  return params[:, :-1] / params[:, -1:]


def _squared_distances(params: jax.Array, examples: jax.Array) -> jax.Array:
  """Returns the squared distance of each example to each centre, float[B,
  k]."""
  means = centres(params)
  cross = examples @ means.T
  return (
    # |x - c|^2 = |x|^2 - 2 x.c + |c|^2: one matrix product for all pairs.
    jnp.square(examples).sum(1)[:, None] - 2 * cross + jnp.square(means).sum(1)
  )


@jax.jit
def _total_squared_distance(params, examples):
  return _squared_distances(params, examples).min(1).sum()


def _mean_squared_distance(params: jax.Array, examples: np.ndarray) -> float:
  """Returns the mean squared distance to the nearest centre."""
  total = lib.totals(
    *(functools.partial(_total_squared_distance, params), [examples]),
    _ROWS_PER_CALL,
  )
  return float(total) / len(examples)


def _loss(params, batch: base.Batch, key):
  del key
  squares = _squared_distances(params, jnp.asarray(batch[0], params.dtype))
  return squares.min(1).mean(), losses_lib.Aux(())


def _updates(
  params: jax.Array, batch: base.Batch, key: jax.Array | None
) -> tuple[tuple[jax.Array, losses_lib.Aux], jax.Array]:
  """Returns the loss, and the sum and number of each cluster's examples."""
  del key
  examples = jnp.asarray(batch[0], params.dtype)
  squares = _squared_distances(params, examples)
  is_nearest = jax.nn.one_hot(
    squares.argmin(1), len(params), dtype=params.dtype
  )
  ones = jnp.ones((len(examples), 1), params.dtype)
  # Sums and numbers per cluster, float[k, d + 1], in one product.
  increments = is_nearest.T @ jnp.concatenate([examples, ones], 1)
  return (squares.min(1).mean(), losses_lib.Aux(())), increments
