"""Documents as words: drawn from known topics, or read (a package or a file).

Index letters used in shape comments:
  n, m  documents of the training and the test part
  L     words of the longest document
  V     words of the vocabulary
  T     topics
"""

import collections
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.data import sources, text
from asgd.data.download import DataError

_EVERY = 10  # every 10th document is in the test part
_WORD = re.compile(r"[a-z]{3,}")
_MAX_SHARE = 0.5  # a word in a larger share of the documents is too common


class Documents(NamedTuple):
  """Documents of words 0 to V - 1; positions after a document's length are 0.
  Each has at least one word, in the test part at least two."""

  name: str
  source: str  # where they were found, or how they were drawn
  train_words: np.ndarray  # int32[n, L]
  train_lengths: np.ndarray  # int32[n]
  test_words: np.ndarray  # int32[m, L]
  test_lengths: np.ndarray  # int32[m]
  vocabulary: tuple[str, ...]  # [V]
  topics: np.ndarray | None = None  # float[T, V], the true topics, if known


def generated(
  documents: int = 400,
  *,
  side: int = 5,
  length: int = 60,
  concentration: float = 0.3,
  seed: int = 0,
) -> Documents:
  """Draws documents from topics that are bars of a grid of words.

  Words are the cells of a grid. Each topic is a row or a column of it, with
  equally frequent words. A document's topics are drawn from a Dirichlet.

  Args:
    documents: n + m, of which a tenth is the test part.
    side: side of the grid: V = side^2, T = 2 side; 2 or more.
    length: L, words of each document; 2 or more.
    concentration: the concentration of the Dirichlet distribution, positive.
    seed: the seed of all random numbers.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Griffiths and Steyvers, "Finding scientific topics", PNAS 2004, figure 1.

  Example:
    >>> from asgd.data import documents
    >>> drawn = documents.generated(20, side=3, length=8)
    >>> drawn.train_words.shape, drawn.topics.shape
    ((18, 8), (6, 9))
  """
  for key, value, least in (
    ("documents", documents, _EVERY), ("side", side, 2), ("length", length, 2)
  ):
    checks.integer(key, value, least, most=10**7)
  checks.positive("concentration", concentration)
  rng = np.random.default_rng(checks.integer("seed", seed, 0))
  grid = np.arange(side * side).reshape(side, side)
  topics = np.zeros((2 * side, side * side))
  for i in range(side):
    # Topic i is a row of the grid, topic side + i a column.
    topics[i, grid[i]] = topics[side + i, grid[:, i]] = 1 / side
  mixtures = rng.dirichlet([concentration] * len(topics), documents)
  documents_drawn = [
    rng.choice(side * side, length, p=mixture @ topics) for mixture in mixtures
  ]
  words = tuple(f"{i}.{j}" for i in range(side) for j in range(side))
  source = f"generated: {documents} documents of {length} words, seed {seed}"
  return _divide("generated", source, documents_drawn, words)._replace(
    topics=topics
  )


def load(
  name: str = "generated",
  *,
  data_dir: str | os.PathLike[str] | None = None,
  least: int = 3,
  most: int = 5000,
  longest: int = 100,
  **options: Any,
) -> Documents:
  """Loads documents; every tenth is in the test part.

    generated   documents of known topics; see `generated`
    pydoc       pages of the Python language reference, which is part of Python:
                about 450 pieces of pages (they vary with Python's version)
    newsgroups  20 newsgroups, if scikit-learn has stored them on disk, in
                `data_dir` or its default folder
    file        the file `data_dir`, UTF-8, one document per line

  Words have three letters or more, in lower case, without the stop words of
  scikit-learn. A document without a word of the vocabulary is left out;
  `source` says how many are.

  Args:
    name: one of these names.
    data_dir: see above.
    least: a word must be in this many documents.
    most: largest size of the vocabulary; the most frequent words are kept.
    longest: longer documents are cut into pieces of this many words.
    **options: of `generated`.

  Raises:
    ValueError: for a value out of its range, an unknown name, a line without a
      word, or an empty vocabulary.
    DataError: for a file that is missing or cannot be read.
  """
  documents = sources.draw_generated(
    "documents", name, _LOADERS, data_dir, options
  )
  if documents is not None:
    return documents
  checks.integer("least", least)
  checks.integer("most", most)
  checks.integer("longest", longest, 2)
  source, texts = _LOADERS[name](data_dir)
  return from_texts(
    texts, name, source, least=least, most=most, longest=longest
  )


def from_texts(
  texts: Sequence[str],
  name: str = "documents",
  source: str = "strings",
  *,
  least: int = 3,
  most: int = 5000,
  longest: int = 100,
) -> Documents:
  """Makes Documents from strings; see `load`.

  Raises:
    ValueError: for a string without a word (the error counts from 1), or if no
      word is left.

  Example:
    >>> from asgd.data import documents
    >>> made = documents.from_texts(["tree leaf", "rock wood"] * 6)
    >>> made.vocabulary, made.train_words[0].tolist()
    (('leaf', 'rock', 'tree', 'wood'), [2, 0])
    >>> documents.from_texts(["tree leaf", "?!"])
    Traceback (most recent call last):
    ValueError: document 2 of strings is empty: it has no word; leave it out
  """
  text_module = sources.scikit_learn(
    "feature_extraction.text", "the list of common English words"
  )
  pieces = []
  for number, string in enumerate(texts, 1):
    words = _WORD.findall(string.lower())
    if not words:
      raise ValueError(
        f"document {number} of {source} is empty: it has no word; leave it out"
      )
    words = [w for w in words if w not in text_module.ENGLISH_STOP_WORDS]
    cuts = range(0, max(len(words), 1), longest)
    pieces += [words[start : start + longest] for start in cuts]
  vocabulary = _vocabulary(pieces, source, least, most)
  index_of = {word: i for i, word in enumerate(vocabulary)}
  indices = [[index_of[w] for w in words if w in index_of] for words in pieces]
  documents = [np.array(row, np.int32) for row in indices if row]
  divided = _divide(name, source, documents, vocabulary)
  if len(documents) < len(indices):
    source += f", {len(indices) - len(documents)} without a known word left out"
  return divided._replace(source=source)


def _vocabulary(
  pieces: Sequence[Sequence[str]], source: str, least: int, most: int
) -> tuple[str, ...]:
  """Returns the words that are neither rare nor too common, sorted."""
  counts = collections.Counter(w for words in pieces for w in set(words))
  # With few documents, the upper limit must not fall below `least`.
  limit = max(_MAX_SHARE * len(pieces), least)
  frequent_words = [w for w, n in counts.most_common() if least <= n <= limit]
  if not frequent_words:
    raise ValueError(
      f"the vocabulary of {source} has no word: none of {len(counts)} words is"
      f" in at least {least} and at most half of {len(pieces)} documents; lower"
      " least, or give more documents"
    )
  return tuple(sorted(frequent_words[:most]))


def _divide(
  name: str,
  source: str,
  documents: Sequence[np.ndarray],
  vocabulary: tuple[str, ...],
) -> Documents:
  """Puts every tenth document into the test part, if it has two words."""
  in_test_part = [
    i % _EVERY == _EVERY - 1 and len(document) > 1
    for i, document in enumerate(documents)
  ]
  if not any(in_test_part) or all(in_test_part):
    raise ValueError(
      f"{source} has {len(documents)} documents: give {_EVERY} or more, of two"
      " words or more"
    )
  # L: all rows of an array are as long as the longest document.
  longest = max(map(len, documents))
  arrays = []  # words and lengths, of the training part and of the test part
  for part in (False, True):
    rows = [
      d
      for d, in_test in zip(documents, in_test_part, strict=True)
      if in_test == part
    ]
    # Padding is word 0; only the lengths distinguish it from a word.
    words = np.zeros((len(rows), longest), np.int32)
    for row, document in zip(words, rows, strict=True):
      row[: len(document)] = document
    arrays += [words, np.array([len(document) for document in rows], np.int32)]
  sources.freeze(arrays)
  return Documents(
    name, source, arrays[0], arrays[1], arrays[2], arrays[3], vocabulary
  )


def _load_pydoc(data_dir: Any) -> tuple[str, list[str]]:
  """Returns (source, pieces of the pages of Python's language reference)."""
  source, characters = text.read("pydoc", data_dir=data_dir)
  paragraphs = re.split(r"\n\s*\n", characters)
  # A document is a piece of 8 paragraphs.
  starts = range(0, len(paragraphs), 8)
  pieces = [" ".join(paragraphs[start : start + 8]) for start in starts]
  return source, [piece for piece in pieces if _WORD.search(piece.lower())]


def _load_newsgroups(
  data_dir: str | os.PathLike[str] | None,
) -> tuple[str, list[str]]:
  """Returns (source, the messages of 20 newsgroups)."""
  datasets = sources.scikit_learn("datasets", "the data 'newsgroups'")
  remove = "headers", "footers", "quotes"
  home = data_dir and os.fspath(checks.path("data_dir", data_dir))
  try:
    newsgroups = datasets.fetch_20newsgroups(
      data_home=home, subset="all", remove=remove, download_if_missing=False
    )
  except OSError as error:
    raise DataError(
      f"20 newsgroups is not on disk ({error}): fetch it once by"
      " sklearn.datasets.fetch_20newsgroups(), or use documents='pydoc'"
    ) from None
  # Without headers, footers and quotes, some messages have no words.
  texts = [
    message for message in newsgroups.data if _WORD.search(message.lower())
  ]
  return "scikit-learn (on disk)", texts


def _load_file(data_dir):
  source, characters = text.read("file", data_dir=data_dir)
  return source, characters.rstrip("\n").split("\n")


_LOADERS: dict[str, Callable[..., Any]] = {
  "generated": generated,
  "pydoc": _load_pydoc,
  "newsgroups": _load_newsgroups,
  "file": _load_file,
}
