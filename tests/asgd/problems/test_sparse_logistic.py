"""Sparse logistic regression on tables, beside scikit-learn's solver."""

import functools

import jax
import kit
import numpy as np
import pytest
import scipy.sparse
import table_kit
from sklearn import linear_model

from asgd import tables
from asgd.data import sparse
from asgd.problems import sparse_logistic

SMALL = {"examples": 300, "features": 60, "nonzeros": 6, "relevant": 10}
L1 = 0.01
PROBLEM = {
  "name": "asgd.problems.sparse_logistic:sparse_logistic_regression",
  "l1": L1,
  "blocks": 2,
  "generate": SMALL,
}


@functools.cache
def reference():
  """The objective and the weights of scikit-learn."""
  data = sparse.generated(**SMALL)
  n, most = data.train_keys.shape
  places = np.repeat(np.arange(n), most), data.train_keys.ravel()
  shape = n, data.features
  x = scipy.sparse.csr_matrix((data.train_values.ravel(), places), shape=shape)
  solver = linear_model.LogisticRegression(
    l1_ratio=1, C=1 / (n * L1), solver="liblinear", fit_intercept=False,
    tol=1e-6,
  )
  weights = solver.fit(x, data.train_labels).coef_[0]
  logits, labels = x @ weights, data.train_labels
  loss = (np.logaddexp(0, logits) - labels * logits).mean()
  return loss + L1 * np.abs(weights).sum(), weights


def test_delayed_steps_end_where_scikit_learn_ends():
  delayed = {"consistency": "delay_bounded", "bound": 2}
  kkt = {"name": "kkt", "slack": L1 / 2}
  exp = table_kit.build(
    PROBLEM,
    {"delayed": {**delayed, "shards": 2}, "kkt": {**delayed, "filters": [kkt]}},
    batch_size=80,
    epochs=60.0,
    learning_rate=1.0,
  )
  objective, weights = reference()
  for params, row in table_kit.ends(exp).values():
    assert objective - 1e-6 < row["objective"] < 1.01 * objective
    own = np.asarray(params["weights"])[:, 0]
    assert ((own != 0) == (weights != 0)).mean() > 0.9
    assert row["nonzero"] == (own != 0).sum() < 50
  assert exp.plan(exp.cells[1]).settings.direct


def test_the_curvature_bounds_the_loss_of_any_step_of_the_block():
  problem = sparse_logistic.sparse_logistic_regression(240, generate=SMALL)
  batch, rng = problem.batches(0, 1)(0, 0), np.random.default_rng(0)
  start = problem.init(jax.random.key(0))["weights"]
  start = np.asarray(start) + [1.0, 0.0] * rng.normal(size=start.shape)
  (loss, _), updates = problem.updates({"weights": start}, batch, None)
  g, u = np.asarray(updates["weights"]).T
  inside = np.unique(batch[0][batch[-1]])
  assert not np.delete(u, inside).any()
  assert (u[inside] > 0).all()
  for scale in (0.01, 0.3, 3.0):
    step = np.where(u > 0, rng.normal(0, scale, len(u)), 0)
    moved = {"weights": start + np.stack([step, 0 * step], 1)}
    more = g @ step + (u * step**2).sum() / 2
    assert problem.loss(moved, batch, None)[0] <= loss + more + 1e-5


def test_each_example_has_the_same_weight_whoever_has_it():
  problem = sparse_logistic.sparse_logistic_regression(50, generate=SMALL)
  start = {"weights": np.random.default_rng(0).normal(size=(60, 2))}
  losses = {}
  for workers, jobs in ((1, 5), (3, 2)):
    batches = problem.batches(0, workers)
    each = [batches(j % workers, j) for j in range(workers * jobs)]
    losses[workers] = np.mean([problem.loss(start, b, None)[0] for b in each])
  assert losses[1] == pytest.approx(losses[3], rel=1e-5)


def test_a_step_is_taken_once_all_workers_have_sent():
  function = tables.functions.proximal(l1=0.25, messages=2)

  def server_after(order):
    rules = tables.rules("delay_bounded", bound=1)
    table = tables.Table(np.zeros((3, 2)), function)
    server = tables.TableServer({"w": table}, rules, workers=[0, 1])
    clients = [tables.Client(w, server.specs, rules) for w in (0, 1)]
    clients[0].write({"w": (np.array([0, 1]), np.array([[1.0, 1], [-3, 2]]))})
    clients[1].write({"w": (np.array([1]), np.array([[1.0, 2.0]]))})
    versions = []
    for worker in order:
      server.receive(clients[worker].flush(1))
      versions.append(server.version)
    assert versions == [0, 1]
    return server.tables["w"].whole()

  rows = server_after([0, 1])
  # g = 1/2, u = 1/2: 0 - (1/2 - 1/4) / (1/2); g = -1, u = 2: (1 - 1/4) / 2.
  np.testing.assert_allclose(rows, [[-0.5, 0.5], [0.375, 2.0], [0.0, 0.0]])
  np.testing.assert_array_equal(server_after([1, 0]), rows)


test_runs_that_do_not_fit_are_refused = kit.refuses(
  [
    ({"recipe": "asgd"}, "not gradients; the recipe 'asgd' of"),
    ({"ftrl": {"l1": 0.1}}, "ftrl and proximal are both the function"),
    ({"proximal": {"l1": 0.1}}, "proximal.l1 follows from config.problem"),
  ],
  lambda run: table_kit.build(PROBLEM, {"run": run}, batch_size=80),
)


def test_a_problem_of_gradients_has_no_use_for_the_proximal_function():
  factors = {
    "name": "asgd.problems.factorisation:matrix_factorisation",
    "generate": {"users": 9, "items": 9, "ratings": 50},
  }
  with pytest.raises(ValueError, match="proximal needs a problem with"):
    table_kit.build(factors, {"run": {"proximal": {"l1": 1.0}}}, batch_size=5)
