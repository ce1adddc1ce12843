"""Columns of a Hugging Face data set are arrays."""

import kit
import numpy as np
import pytest
from linear import X, simulate

from asgd.data import columns
from asgd.problems import streams

TABLE = kit.Table({"x": X, "y": X.sum(1), "text": ["a"] * 48})
NUMBERS = kit.Table({"x": X, "y": X.sum(1)})


def test_a_table_trains_as_its_arrays():
  found = simulate(data=columns.arrays(TABLE, ["x", "y"]))
  kit.same(found.params, simulate().params)
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
