"""A text as words: Python's manual, or a file.

Index letters used in shape comments:
  n, m  words of the training and the test part
  V     different words
"""

import collections
import re
from typing import NamedTuple

import numpy as np

from asgd import checks
from asgd.data import sources, text

_TEST_SHARE = 0.1  # the end of a text is the test part
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


class Words(NamedTuple):
  """A text, cut into a training and a test part. Rare words are left out, and
  the words around them become neighbours."""

  name: str
  source: str
  train: np.ndarray  # int32[n]
  test: np.ndarray  # int32[m]
  vocabulary: tuple[str, ...]  # [V], the most frequent first
  counts: np.ndarray  # int64[V], of the training part


def load(
  name: str = "pydoc",
  *,
  data_dir: str | None = None,
  least: int = 5,
  most: int = 20_000,
) -> Words:
  """Loads a text as words, in lower case; its last tenth is the test part.

  Args:
    name: a name of `data.text.load`: "pydoc", or "file".
    data_dir: path of the file.
    least: a word must occur this often in the training part.
    most: largest size of the vocabulary; the most frequent words are kept.

  Raises:
    ValueError: for a value out of its range, or an empty vocabulary.
    DataError: for a file that cannot be read.

  Example:
    >>> from asgd.data import words
    >>> text = words.load(most=50)
    >>> text.vocabulary[0], len(text.vocabulary)
    ('the', 50)
  """
  source, characters = text.read(name, data_dir=data_dir)
  return from_string(characters, name, source, least=least, most=most)


def from_string(
  characters: str,
  name: str = "text",
  source: str = "a string",
  *,
  least: int = 5,
  most: int = 20_000,
) -> Words:
  """Makes Words from a string; see `load`."""
  checks.integer("least", least)
  checks.integer("most", most, 2)
  words = _WORD.findall(characters.lower())
  cut = len(words) - int(len(words) * _TEST_SHARE)
  word_counts = collections.Counter(words[:cut])
  ordered = sorted(word_counts.items(), key=lambda pair: (-pair[1], pair[0]))
  frequent_words = [word for word, count in ordered if count >= least][:most]
  if len(frequent_words) < 2:
    raise ValueError(
      f"the vocabulary of {source} has {len(frequent_words) or 'no'} word: of"
      f" {len(word_counts)} different words only these occur {least}"
      " times or more; lower least, or give a longer text"
    )
  index_of = {word: i for i, word in enumerate(frequent_words)}
  train, test = (
    np.array([index_of[w] for w in part if w in index_of], np.int32)
    for part in (words[:cut], words[cut:])
  )
  sources.freeze([train, test])
  counts = np.bincount(train, minlength=len(frequent_words))
  return Words(name, source, train, test, tuple(frequent_words), counts)
