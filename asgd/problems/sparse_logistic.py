"""Sparse logistic regression with L1, by delayed block proximal steps.

  config.problem = dict(
    name="asgd.problems.sparse_logistic:sparse_logistic_regression", l1=0.002
  )

Index letters used in shape comments:
  n  examples; B of a batch
  Z  nonzero features of an example
  K  features
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks
from asgd import losses as losses_lib
from asgd.data import sparse
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Problem

_PROBE = 256  # examples
_TABLE = "weights"


def sparse_logistic_regression(
  batch_size: int,
  *,
  l1: float = 0.002,
  blocks: int = 4,
  examples: str = "generated",
  data_dir: str | None = None,
  generate: dict[str, Any] | None = None,
) -> Problem:
  """Logistic regression with an L1 penalty, features in blocks.

    F(w) = mean over n examples of log(1 + exp(-y w.x)) + l1 |w|_1,  y = 1, -1

  Each worker has a fixed part of the examples. A job is for one block of
  features (those with the same key modulo `blocks`). For each feature i of the
  block that occurs in its batch, it computes the gradient g_i and a bound of
  the curvature,

    u_i = 1/4 mean |x_i| sum of |x_j| over the block.

  The sum of u_i d_i^2 / 2 bounds the second order term of any step d of the
  block. The server takes the step of `tables.functions.proximal` when it has
  the batches of all workers. A worker may be ahead of the last step by the
  delay that `consistency` allows.

  An evaluation has the log loss and the accuracy of the test examples,
  `objective` (F of the training examples) and `nonzero` (the number of weights
  that are not 0).

  Args:
    batch_size: B. Worker i of N has the examples i, i + N, ..., in ceil(n / (N
      B)) batches. With that many jobs in a clock (`clock_every`), steps use
      full gradients, and converge to the minimum of F.
    l1: the penalty, positive; the function at the server uses it, too.
    blocks: number of blocks of features, 1 or more.
    examples: a name of `data.sparse.load`.
    data_dir: folder of the examples.
    generate: arguments of `data.sparse.generated`.

  Returns:
    A Problem with parameters {"weights": float32[K, 2]}: the weight of each
    feature and its curvature in the last step. It is keyed: a batch
    determines the rows that it needs. Its workers compute updates, for the
    recipe `table`.

  Raises:
    ValueError: for a value out of its range, and for invalid examples.

  Source:
    Li et al., "Communication efficient distributed machine learning with the
    parameter server", NIPS 2014, algorithm 3; "Scaling distributed machine
    learning with the parameter server", OSDI 2014, section 5.1.

  Example:
    >>> import jax
    >>> from asgd.problems import sparse_logistic
    >>> problem = sparse_logistic.sparse_logistic_regression(100, blocks=2)
    >>> batch = problem.batches(0, 4)(0, 0)
    >>> keys = problem.keyed.keys(batch)["weights"]
    >>> len(keys) < problem.init(jax.random.key(0))["weights"].shape[0]
    True
  """
  checks.positive("l1", l1)
  data = sparse.load(examples, data_dir=data_dir, **(generate or {}))
  checks.integer("blocks", blocks, most=data.features)

  def init(key):
    del key
    return {_TABLE: jnp.zeros((data.features, 2), jnp.float32)}

  # The loss of a constant prediction is the entropy of the labels.
  positive = float(data.train_labels.mean())
  entropy = -sum(p * np.log(p) for p in (positive, 1 - positive))

  return lib.of_data(
    *(functools.partial(_batches, data, blocks), batch_size, init, _loss),
    functools.partial(_evaluate, data, l1),
    guess=float(entropy),
    keyed=lib.keyed(
      lambda batch: {_TABLE: (batch[0], batch[1] != 0)},
      lambda batch, weights: (weights, *batch[1:]),
    ),
    updates=_updates,
    function=("proximal", {"l1": l1}),
  )


def _batches(
  data: sparse.Sparse, blocks: int, size: int
) -> tuple[Callable[..., Any], base.Batch, int]:
  """Returns (batches, probe, batches per epoch), as a `DataOf` does: a function
  (seed, workers) -> Batches, a batch to measure curvature on, and an int. A
  batch is (int32[B, Z] keys, float32[B, Z] values, int32[B] labels, float32[B]
  weights, bool[B, Z] whether a feature is in the block). Rows behind the last
  example of a worker have weight 0; the mean weight over all batches is 1."""
  n = len(data.train_labels)
  checks.integer("batch_size", size, most=n)

  def make_batch(rows, block, weight):
    # Programs need a fixed size: repeat rows, with weight 0.
    rows, is_example = np.resize(rows, size), np.arange(size) < len(rows)
    keys, values = data.train_keys[rows], data.train_values[rows]
    values = np.where(is_example[:, None], values, 0)
    weights = np.where(is_example, weight, 0).astype(np.float32)
    is_in_block = (values != 0) & (keys % blocks == block)
    return keys, values, data.train_labels[rows], weights, is_in_block

  def batches(seed, workers):
    if workers > n:
      raise ValueError(
        f"workers {workers} is more than the {n} training examples; use at most"
        f" {n}"
      )
    jobs = -(-n // (workers * size))  # of a worker in a pass over its part
    weight = workers * jobs * size / n

    def batch(worker, job):
      del worker  # job j always belongs to worker j % N
      worker_job, owner = divmod(int(job), workers)
      pass_index, batch_index = divmod(worker_job, jobs)
      cycle, position = divmod(pass_index, blocks)
      order = np.random.default_rng((seed, cycle)).permutation(blocks)
      worker_rows = np.arange(owner, n, workers)
      batch_rows = worker_rows[batch_index * size : (batch_index + 1) * size]
      return make_batch(batch_rows, order[position], weight)

    return batch

  probe = make_batch(lib.spread(n, min(_PROBE, size)), 0, 1.0)
  return batches, probe, max(n // size, 1)


def _logits(params, keys, values):
  """Returns w.x of sparse examples, float[B]."""
  return (params[_TABLE][:, 0][keys] * values).sum(1)


def _loss(
  params: Any, batch: base.Batch, key: jax.Array | None
) -> tuple[jax.Array, losses_lib.Aux]:
  """The mean log loss of a batch, without the penalty."""
  del key
  keys, values, labels, weights, _ = batch
  logits = _logits(params, keys, values)
  losses = jax.nn.softplus(logits) - labels * logits
  return (weights * losses).mean(), losses_lib.Aux(())


def _updates(
  params: Any, batch: base.Batch, key: jax.Array | None
) -> tuple[tuple[jax.Array, losses_lib.Aux], dict[str, jax.Array]]:
  """Returns the loss, and gradient and curvature of the block's features."""
  keys, values, labels, weights, is_in_block = batch
  logits = _logits(params, keys, values)
  # d loss / d logit of each example, float[B].
  slopes = weights * (jax.nn.sigmoid(logits) - labels)
  # Features outside of the block get no update from this job.
  values = values * is_in_block
  sizes = jnp.abs(values)
  # u_i = 1/4 mean |x_i| sum_j |x_j|; 1/4 bounds the second derivative of the
  # log loss in the logit.
  bounds = weights[:, None] * sizes * sizes.sum(1, keepdims=True) / 4
  sums = jnp.stack([slopes[:, None] * values, bounds], -1) / len(labels)
  # A feature may be in several rows: `add` sums its terms.
  updates = jnp.zeros_like(params[_TABLE]).at[keys].add(sums)
  return _loss(params, batch, key), {_TABLE: updates}


@jax.jit
def _score(params, keys, values, labels):
  """Returns (mean log loss, accuracy)."""
  logits = _logits(params, keys, values)
  losses = jax.nn.softplus(logits) - labels * logits
  return losses.mean(), ((logits > 0) == labels).mean()


def _evaluate(data: sparse.Sparse, l1: float, params: Any) -> Evaluation:
  """Evaluates weights on the test examples, and F on the training examples."""
  weights = np.asarray(params[_TABLE])[:, 0]
  loss, accuracy = _score(
    params, data.test_keys, data.test_values, data.test_labels
  )
  train, _ = _score(
    params, data.train_keys, data.train_values, data.train_labels
  )
  penalty = l1 * float(np.abs(weights, dtype=np.float64).sum())
  columns = {
    "objective": float(train) + penalty,
    "nonzero": int(np.count_nonzero(weights)),
  }
  return Evaluation(float(loss), float(accuracy), more=columns)
