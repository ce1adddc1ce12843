"""Sparse examples: drawn, binned, read, and what is refused."""

import numpy as np
import pytest

from asgd.data import sparse
from asgd.data.download import DataError


def test_drawn_examples_have_a_bias_and_different_features():
  drawn = sparse.generated(50, 30, nonzeros=5, relevant=4)
  keys = np.concatenate([drawn.train_keys, drawn.test_keys])
  assert keys.shape == (50, 6)
  assert not keys[:, 0].any()
  assert all(len(set(row)) == 6 for row in keys.tolist())
  counts = np.bincount(keys.ravel(), minlength=30)
  assert counts[1:6].sum() > counts[-5:].sum()  # most are in few examples


def test_numbers_and_pairs_of_them_are_binned():
  data = sparse.load("breast_cancer")
  assert data.features == 1 + 30 * 8 + 45 * 64
  assert data.train_keys.shape == (456, 1 + 30 + 45)
  assert all(len(set(row)) == 76 for row in data.train_keys.tolist())
  # Eighths of the training part.
  counts = np.bincount(data.train_keys.ravel(), minlength=data.features)
  assert set(counts[1:9]) <= {56, 57, 58}


def test_a_file_of_pairs_is_read(tmp_path):
  path = tmp_path / "examples"
  path.write_text("-1 2:0.5 7:1\n+1 1:2\n" * 5)
  read = sparse.load("file", data_dir=str(path))
  assert read.features == 8
  assert read.train_keys[:2].tolist() == [[0, 2, 7], [0, 1, 0]]
  assert read.train_values[:2].tolist() == [[1, 0.5, 1], [1, 2, 0]]
  assert read.train_labels.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
  ("line", "wrong"),
  [
    ("1 3:1 3:2", "as lines of a label and KEY:VALUE: .*sorted and unique"),
    ("1 3:nan", "example 11 of .* has the value nan of feature 3: leave"),
    ("1 word", "as lines of a label and KEY:VALUE"),
    ("2 1:1", "has 3 different labels; give 2"),
  ],
)
def test_a_bad_line_is_refused(tmp_path, line, wrong):
  path = tmp_path / "examples"
  path.write_text("0 2:0.5 3:1\n1 1:2\n" * 5 + line + "\n")
  with pytest.raises(ValueError, match=wrong):
    sparse.load("file", data_dir=str(path))


@pytest.mark.parametrize(
  ("row", "wrong"),
  [
    (([0], [1.0]), "example 2 of arrays has feature 0, out of range: .* 1 to"),
    (([9], [1.0]), "feature 9, out of range"),
    (([2, 5, 2], [1.0] * 3), "has feature 2 twice: add up its values"),
    (([2], [np.inf]), "has the value inf of feature 2"),
    (([2], [1.0, 2.0]), "has 1 keys and 2 values"),
  ],
)
def test_a_bad_row_is_refused(row, wrong):
  rows = [([1], [1.0]), row, *[([3], [1.0])] * 8]
  with pytest.raises(ValueError, match=wrong):
    sparse.from_rows(rows, [0, 1] * 5, features=9)


def test_what_is_not_there_is_named(tmp_path):
  with pytest.raises(DataError, match="cannot be read"):
    sparse.load("file", data_dir=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="has the label 2: use 0 or 1"):
    sparse.from_rows([([1], [1.0])], [2])
  with pytest.raises(ValueError, match="has only one class"):
    sparse.from_rows([([1], [1.0])] * 5, [1] * 5)
  with pytest.raises(ValueError, match="has 4 examples: give 5 or more"):
    sparse.from_rows([([1], [1.0])] * 4, [0, 1] * 2)
  with pytest.raises(ValueError, match="has an empty test part: set `test`"):
    sparse.from_rows([([1], [1.0])] * 6, [0, 1] * 3, test=np.zeros(6, bool))


@pytest.mark.parametrize("form", [list, np.array])
def test_the_test_part_may_be_marked_by_numbers(form):
  rows = [([1, number], [1.0, 2.0]) for number in range(2, 8)]
  marks = form([0, 1, 0, 0, 1, 0])
  divided = sparse.from_rows(rows, [0, 1] * 3, test=marks)
  assert divided.train_keys[:, 2].tolist() == [2, 4, 5, 7]
  assert divided.test_keys[:, 2].tolist() == [3, 6]
