"""k-means on tables: means of all examples, and scikit-learn's end."""

import jax
import numpy as np
import pytest
import table_kit
from sklearn import cluster

from asgd import data
from asgd.problems import clustering

NAME = "asgd.problems.clustering:k_means"


def test_a_job_adds_each_example_to_the_nearest_centre():
  problem = clustering.k_means(32, clusters=4)
  params = np.array(problem.init(jax.random.key(0)))
  examples = problem.batches(0, 1)(0, 0)[0]
  (loss, _), updates = jax.jit(problem.updates)(params, (examples, None), None)
  means = params[:, :-1] / params[:, -1:]
  squares = ((examples[:, None] - means) ** 2).sum(2)
  expected = np.zeros_like(params)
  for example, k in zip(examples, squares.argmin(1), strict=True):
    expected[k] += [*example, 1]
  np.testing.assert_allclose(updates, expected, rtol=1e-5)
  assert loss == pytest.approx(squares.min(1).mean(), rel=1e-4)


def test_stale_workers_end_where_scikit_learn_ends():
  exp = table_kit.build(
    {"name": NAME, "clusters": 10},
    {"ssp": {"bound": 3, "shards": 2}},
    batch_size=64,
    epochs=4.0,
  )
  params, row = table_kit.ends(exp)["ssp"]
  problem = exp.problem_of(exp.runs["ssp"])
  digits = data.load("digits").train_images.reshape(-1, 64).astype(float)
  # Each example is counted once an epoch, and one began each centre.
  assert params[:, -1].sum() == 10 + 64 * row["message"]
  first = np.array(problem.init(jax.random.split(jax.random.key(0))[0]))
  batched = cluster.MiniBatchKMeans(
    10, init=first[:, :-1], n_init=1, batch_size=64, max_iter=4, random_state=0
  ).fit(digits)
  whole = cluster.KMeans(10, init=first[:, :-1], n_init=1).fit(digits)
  assert row["inertia"] < 1.04 * batched.inertia_ / len(digits)
  assert row["inertia"] < 1.1 * whole.inertia_ / len(digits)


def test_what_cannot_be_clustered_is_refused(monkeypatch):
  with pytest.raises(ValueError, match="clusters must be at most 1437"):
    clustering.k_means(8, clusters=2000)
  drawn = data.load("diabetes")
  broken = drawn.train_images.copy()
  broken[7, 2] = np.nan
  monkeypatch.setattr(
    data, "load", lambda *a, **k: drawn._replace(train_images=broken)
  )
  with pytest.raises(ValueError, match="example 7 of the training part is not"):
    clustering.k_means(8)
