"""The benchmark of processes that share weights without locks."""

import contextlib
import os
import types

import numpy as np
import pytest

from asgd.data import sparse
from launch.bench import hogwild
from launch.bench.report import BenchReport

FREE = contextlib.nullcontext()


def test_two_workers_and_three_updates_by_hand():
  """eta = 0.05 and all weights are 0, so that a first gradient is 1/2 - y."""
  one = hogwild.Example(np.array([0, 2]), np.array([1.0, 2.0]), 1.0)
  two = hogwild.Example(np.array([1]), np.array([4.0]), 0.0)
  weights = np.zeros(3)
  # The features of the two workers differ, so that none loses an update.
  hogwild.train(weights, [one, two], np.array([0, 1]), FREE)
  np.testing.assert_allclose(weights, [0.025, -0.1, 0.05])
  hogwild.train(weights, [one, two], np.array([1]), FREE)
  step = 0.05 * 4 / (1 + np.exp(0.4))  # the prediction of 4 * -0.1
  np.testing.assert_allclose(weights, [0.025, -0.1 - step, 0.05])
  logits = np.array([0.025 + 2 * 0.05, 4 * weights[1]])
  loss = np.log1p(np.exp(-logits[0])) + np.log1p(np.exp(logits[1]))
  assert hogwild.loss_of(weights, [one, two]) == pytest.approx(loss / 2)


def test_values_that_fill_rows_are_no_features():
  rows = [([1, 2], [1.0, 1.0]), ([3], [1.0])] * 5
  data = sparse.from_rows(rows, [0, 1] * 5, features=4)
  for example in hogwild.examples_of(data):
    assert example.values.all()
    assert len(np.unique(example.keys)) == len(example.keys)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("has_lock", [False, True])
def test_processes_train_the_same_weights(has_lock):
  data = sparse.generated(100, 50, nonzeros=5, relevant=10)
  rate, loss = hogwild.measure(data, 2, 2000, has_lock=has_lock)
  assert rate > 0
  # Both have trained: the loss of one that makes half of the updates is larger.
  examples, weights = hogwild.examples_of(data), np.zeros(data.features)
  order = np.random.default_rng(0).integers(len(examples), size=1000)
  hogwild.train(weights, examples, order, FREE)
  assert loss < hogwild.loss_of(weights, examples) < np.log(2)


class Fatal(types.SimpleNamespace):
  """Data that end the process which reads them."""

  def __reduce__(self):
    return os._exit, (3,)


@pytest.mark.process
def test_a_process_that_fails_is_not_awaited_forever(monkeypatch):
  monkeypatch.setattr(hogwild, "_PATIENCE", 10.0)
  with pytest.raises(ValueError, match="one of 1 processes has failed"):
    hogwild.measure(Fatal(features=4), 1, 10, has_lock=False)


def test_processes_are_as_many_as_the_cores_of_this_process(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
  monkeypatch.setattr(hogwild, "measure", lambda *_, **__: (1.0, 1.0))
  report = BenchReport()
  hogwild.run(report, rounds=1)
  assert report.rows[-1]["name"] == "6 processes"
