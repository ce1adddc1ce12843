"""A linear regression, as users train it by calls of asgd.

A test imports it with `import linear`; see `pythonpath` in pyproject.toml.
"""

import itertools

import jax.numpy as jnp
import kit
import numpy as np
import pytest

import asgd

X = np.float32(kit.normal(48, 3))
DATA = X, X.sum(1)
PARAMS = np.zeros(3, np.float32)
DANA = asgd.dana_zero(0.02, workers=4)


def squares(params, batch):
  """Returns the mean square error; a batch is (x, y)."""
  x, y = batch
  return ((x @ params - y) ** 2).mean()


def criterion(output, batch):
  """Returns the same of a model's output, float[n, 1]."""
  return ((output[:, 0] - batch[1]) ** 2).mean()


def quadratic(params, batch):
  """Returns half the square distance to a batch: the gradient is w - b."""
  return 0.5 * jnp.sum((params - batch) ** 2)


def call(
  function, recipe=DANA, *, loss=squares, params=PARAMS, data=DATA, **options
):
  """Calls a function that trains: 12 messages, unless options say how many."""
  if not {"messages", "epochs", "trace"} & {*options}:
    options["messages"] = 12
  options = {"batch_size": 8, "progress": False, **options}
  return function(loss, params, data, recipe, **options)


class Interrupted(BaseException):
  """Ends a run in an evaluation, as Ctrl-C does."""


def interrupted(train, folder, loss=squares, data=DATA):
  """Interrupts a training at its second evaluation, and goes on with it."""
  count = itertools.count(1)

  def evaluate(params):
    if next(count) == 2:
      raise Interrupted
    return float(loss(params, data))

  with pytest.raises(Interrupted):
    train(evaluate=evaluate, folder=folder)
  return train(evaluate=evaluate, folder=folder)


def simulate(recipe=DANA, **options):
  """Calls `asgd.simulate`."""
  return call(asgd.simulate, recipe, **options)


def live(recipe=DANA, **options):
  """Calls `asgd.train_live`."""
  return call(asgd.train_live, recipe, **options)


def mesh(recipe=DANA, **options):
  """Calls `asgd.train_mesh`."""
  return call(asgd.train_mesh, recipe, **options)
