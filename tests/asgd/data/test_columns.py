"""Columns of a Hugging Face data set are arrays."""

import kit
import numpy as np
import pytest

import asgd
from asgd.data import columns
from asgd.problems import streams

X = np.float32(kit.normal(48, 3))
TABLE = kit.Table({"x": X, "y": X.sum(1), "text": ["a"] * 48})
NUMBERS = kit.Table({"x": X, "y": X.sum(1)})


def loss(w, batch):
  return ((batch[0] @ w - batch[1]) ** 2).mean()


def test_a_table_trains_as_its_arrays():
  given = {"messages": 12, "batch_size": 8, "progress": False}
  recipe = asgd.asgd(0.02, workers=3)

  def train(data):
    return asgd.simulate(loss, np.zeros(3, np.float32), data, recipe, **given)

  expected = train((X, X.sum(1)))
  kit.same(train(columns.arrays(TABLE, ["x", "y"])).params, expected.params)
  first = streams.read_data(NUMBERS, 8).first
  kit.same(first, {"x": X[:8], "y": X.sum(1)[:8]})


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: columns.arrays(TABLE, ["z"]), "no column 'z'; its columns are x"),
    (lambda: columns.arrays(TABLE), "column 'text' is no array of numbers"),
    (
      lambda: columns.arrays(kit.Table({"x": [np.ones(2), np.ones(3)]})),
      "column 'x' is no array of numbers of one shape",
    ),
    (lambda: columns.arrays({"train": TABLE}), "choose a split"),
    (lambda: streams.read_data({"train": TABLE}, 8), r"data\['train'\]"),
    (lambda: streams.read_data(NUMBERS), "batch_size=32"),
  ],
)
def test_a_mistake_is_one_line_with_the_remedy(make, words):
  with pytest.raises(ValueError, match=words) as caught:
    make()
  assert "\n" not in str(caught.value)
