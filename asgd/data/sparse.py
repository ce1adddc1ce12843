"""Examples with few nonzero features out of many, in two classes.

Index letters used in shape comments:
  n, m  examples of the training and the test part
  Z     features of the example with the most
  K     features
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.data import sentences, sources
from asgd.data.download import DataError

_TEST_EVERY = 5  # the test part is every 5th example
_BINS = 8  # bins of a number
_SPECIAL = 4  # the first numbers in `sentences` stand for no word
_CONTEXT = 64  # words of a sentence


class Sparse(NamedTuple):
  """Examples as keys and values of their features. Rows are filled up to Z with
  values of 0. Feature 0 is 1 in each example: the bias."""

  name: str
  source: str  # where they were found, or how they were drawn
  train_keys: np.ndarray  # int32[n, Z]
  train_values: np.ndarray  # float32[n, Z]
  train_labels: np.ndarray  # int32[n], 0 or 1
  test_keys: np.ndarray  # int32[m, Z]
  test_values: np.ndarray  # float32[m, Z]
  test_labels: np.ndarray  # int32[m]
  features: int  # K


def generated(
  examples: int = 2000,
  features: int = 1000,
  *,
  nonzeros: int = 20,
  relevant: int = 50,
  seed: int = 0,
) -> Sparse:
  """Draws examples from a logistic model with few nonzero weights. As in data
  of clicks, some features are in many examples, most in few.

  Args:
    examples: n + m, of which a fifth is the test part.
    features: K, with the bias.
    nonzeros: features of an example, besides the bias.
    relevant: number of features with a weight, from N(0, 2^2); they are the
      most frequent ones.
    seed: the seed of all random numbers.

  Raises:
    ValueError: for a value out of its range.

  Example:
    >>> from asgd.data import sparse
    >>> drawn = sparse.generated(100, 50, nonzeros=5, relevant=10)
    >>> drawn.train_keys.shape, drawn.features
    ((80, 6), 50)
  """
  checks.integer("examples", examples, _TEST_EVERY, most=10**8)
  checks.integer("features", features, 2, most=10**9)
  checks.integer("nonzeros", nonzeros, most=features - 1)
  checks.integer("relevant", relevant, most=features - 1)
  rng = np.random.default_rng(checks.integer("seed", seed, 0))
  # Each feature gets a random exponential time of its rate. The features with
  # the smallest times are a draw without replacement, with probabilities in
  # proportion to the rates.
  rates = 1 / np.arange(1, features)
  times = rng.exponential(size=(examples, features - 1)) / rates
  # Key 0 is the bias.
  keys = 1 + np.argpartition(times, nonzeros - 1, 1)[:, :nonzeros]
  weights = np.zeros(features)
  weights[1 : relevant + 1] = rng.normal(0, 2, relevant)
  logits = weights[keys].sum(1)
  labels = rng.random(examples) < 1 / (1 + np.exp(logits.mean() - logits))
  source = (
    f"generated: {examples} examples of {nonzeros} of {features} features, seed"
    f" {seed}"
  )
  values = np.ones(keys.shape)
  rows = list(zip(keys, values, strict=True))
  return from_rows(rows, labels, "generated", source, features=features)


def load(
  name: str = "generated",
  *,
  data_dir: str | os.PathLike[str] | None = None,
  **options: Any,
) -> Sparse:
  """Loads examples; every fifth is in the test part, except for sst2.

    generated      see `generated`
    breast_cancer  569 examples, embedded in scikit-learn; 3,121 features: the
                   bias, 8 bins for each of 30 numbers, and 64 pairs of bins for
                   each two of the 10 means
    sst2           the different words of sentences of SST-2, in `data_dir`, see
                   `data.sentences.load`
    file           the file `data_dir`, lines of a label and KEY:VALUE pairs
                   (libsvm), keys from 1; feature 0 is added

  Args:
    name: one of these names.
    data_dir: see above.
    **options: of `generated`.

  Raises:
    ValueError: for an unknown name, a missing path, and the errors of
      `from_rows`.
    DataError: for a file that cannot be read.
  """
  generated_examples = sources.draw_generated(
    "sparse examples", name, _LOADERS, data_dir, options
  )
  if generated_examples is not None:
    return generated_examples
  return _LOADERS[name](data_dir)


def from_rows(
  rows: list[tuple[Any, Any]],
  labels: Any,
  name: str = "examples",
  source: str = "arrays",
  *,
  features: int | None = None,
  test: Any = None,
) -> Sparse:
  """Makes Sparse from the keys and values of each example, and adds the bias.

  Args:
    rows: (integers from 1, the same number of floats) for each example.
    labels: 0 or 1 for each example.
    name: the name of the data, for people.
    source: where the data are from, for people.
    features: K, above all keys; None: the smallest possible.
    test: bool for each example; None: every fifth is in the test part.

  Raises:
    ValueError: for a key out of range or twice in an example, a value that is
      not finite, a label that is neither 0 nor 1, an empty test part, and
      training examples of one class. The error counts examples from 1.

  Example:
    >>> from asgd.data import sparse
    >>> rows = [([1, 3], [1.0, 2.0]), ([2], [0.5])] * 3
    >>> made = sparse.from_rows(rows, [1, 0] * 3)
    >>> made.train_keys[0].tolist(), made.train_values[1].tolist()
    ([0, 1, 3], [1.0, 0.5, 0.0])
    >>> sparse.from_rows([([1, 1], [1.0, 2.0])], [1])
    Traceback (most recent call last):
    ValueError: example 1 of arrays has feature 1 twice: add up its values
  """
  rows = [(np.asarray(k), np.asarray(v, np.float64)) for k, v in rows]
  labels = np.asarray(labels).astype(np.float64)
  if features is None:
    features = 1 + max((int(k.max(initial=0)) for k, _ in rows), default=0)
  for number, ((keys, values), label) in enumerate(
    zip(rows, labels, strict=True), 1
  ):
    fault = _fault_of(keys, values, label, features)
    if fault:
      raise ValueError(f"example {number} of {source} {fault}")
  width = 1 + max((len(k) for k, _ in rows), default=0)
  all_keys = np.zeros((len(rows), width), np.int32)
  all_values = np.zeros((len(rows), width), np.float32)
  all_values[:, 0] = 1
  for i, (keys, values) in enumerate(rows):
    all_keys[i, 1 : 1 + len(keys)] = keys
    all_values[i, 1 : 1 + len(keys)] = values
  if test is None:
    test = np.arange(len(rows)) % _TEST_EVERY == _TEST_EVERY - 1
    if not test.any():
      raise ValueError(
        f"{source} has {len(rows)} examples: give {_TEST_EVERY} or more"
      )
  test = np.asarray(test, bool)
  if not test.any():
    raise ValueError(
      f"{source} has an empty test part: set `test` to True for some examples"
    )
  if len(np.unique(labels[~test])) < 2:
    raise ValueError(
      f"the training part of {source} has only one class: give examples of both"
    )

  def part(is_chosen: np.ndarray) -> Any:
    part_labels = labels[is_chosen].astype(np.int32)
    return all_keys[is_chosen], all_values[is_chosen], part_labels

  train_part, test_part = part(~test), part(test)
  sources.freeze([*train_part, *test_part])
  return Sparse._make((name, source, *train_part, *test_part, features))


def _fault_of(
  keys: np.ndarray, values: np.ndarray, label: float, features: int
) -> str | None:
  """Returns the fault of an example, as the end of a sentence, or None."""
  if keys.shape != values.shape or keys.ndim != 1:
    return f"has {keys.size} keys and {values.size} values"
  is_out_of_range = (keys < 1) | (keys >= features)
  if is_out_of_range.any():
    key = keys[np.argmax(is_out_of_range)]
    return f"has feature {key}, out of range: there are 1 to {features - 1}"
  # Equal keys are neighbours in sorted order.
  sorted_keys = np.sort(keys)
  is_repeated = sorted_keys[1:] == sorted_keys[:-1]
  if is_repeated.any():
    key = sorted_keys[1:][np.argmax(is_repeated)]
    return f"has feature {key} twice: add up its values"
  is_nonfinite = ~np.isfinite(values)
  if is_nonfinite.any():
    i = np.argmax(is_nonfinite)
    return f"has the value {values[i]} of feature {keys[i]}: leave it out"
  return None if label in (0, 1) else f"has the label {label:g}: use 0 or 1"


def _load_breast_cancer(data_dir: str | os.PathLike[str] | None) -> Sparse:
  """Returns the breast cancer data, with numbers as bins."""
  sources.refuse_folder("breast_cancer", data_dir, "scikit-learn")
  datasets = sources.scikit_learn("datasets", "the data 'breast_cancer'")
  numbers, labels = datasets.load_breast_cancer(return_X_y=True)
  is_training = np.arange(len(labels)) % _TEST_EVERY != _TEST_EVERY - 1
  inner_edges = np.arange(1, _BINS) / _BINS  # as fractions of the examples
  bins = np.stack(
    [
      np.searchsorted(np.quantile(number[is_training], inner_edges), number)
      for number in numbers.T
    ],
    1,
  )
  count = numbers.shape[1]
  # A feature for each bin of each number.
  keys = [1 + _BINS * np.arange(count) + bins]
  first_key, pair_bins = 1 + _BINS * count, bins[:, :10]
  for i in range(10):
    for j in range(i):
      # A feature for each pair of bins of numbers i and j.
      keys.append(
        (first_key + _BINS * pair_bins[:, i] + pair_bins[:, j])[:, None]
      )
      first_key += _BINS * _BINS
  table = np.concatenate(keys, 1)
  rows = list(zip(table, np.ones(table.shape), strict=True))
  source = "scikit-learn (embedded)"
  return from_rows(rows, labels, "breast_cancer", source, features=first_key)


def _load_sst2(data_dir: str | os.PathLike[str] | None) -> Sparse:
  """Returns the sentences of SST-2 as sets of words."""
  task = sentences.load("sst2", context=_CONTEXT, data_dir=data_dir)
  tokens = np.concatenate([task.train_tokens, task.test_tokens])[:, 0]
  words = [np.unique(sentence[sentence >= _SPECIAL]) for sentence in tokens]
  rows = [
    (1 + sentence - _SPECIAL, np.ones(len(sentence))) for sentence in words
  ]
  labels = np.concatenate([task.train_labels, task.test_labels])
  is_test = np.arange(len(labels)) >= len(task.train_labels)
  features = 1 + task.vocabulary - _SPECIAL
  return from_rows(
    rows, labels, "sst2", task.source, features=features, test=is_test
  )


def _load_file(path: str | os.PathLike[str] | None) -> Sparse:
  """Returns the examples of a libsvm file."""
  path = sources.file_of("data", path)
  datasets = sources.scikit_learn("datasets", "a file of libsvm")
  try:
    matrix, labels = datasets.load_svmlight_file(str(path), zero_based=False)
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error.strerror}") from None
  except (ValueError, OverflowError) as error:
    raise ValueError(
      f"{path} cannot be read as lines of a label and KEY:VALUE: {error}"
    ) from None
  classes = np.unique(labels)
  if len(classes) != 2:
    raise ValueError(f"{path} has {len(classes)} different labels; give 2")
  ends = matrix.indptr
  rows = [
    (matrix.indices[start:stop].astype(np.int64) + 1, matrix.data[start:stop])
    for start, stop in zip(ends[:-1], ends[1:], strict=True)
  ]
  return from_rows(rows, labels == classes[1], path.name, str(path))


_LOADERS: dict[str, Callable[..., Any]] = {
  "generated": generated,
  "breast_cancer": _load_breast_cancer,
  "sst2": _load_sst2,
  "file": _load_file,
}
