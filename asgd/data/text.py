"""Text as numbers: the characters of a file, or of Python's own manual."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import checks, names
from asgd.data.batches import Batches
from asgd.data.download import DataError

_TEST = 0.1  # the last part of a text, held out
_RARE = 10  # characters less frequent than that are one, "unknown"
_UNKNOWN = "\ufffd"


class Text(NamedTuple):
  """A text, cut into a training and a test part."""

  name: str
  source: str
  train: np.ndarray  # int32[n]
  test: np.ndarray  # int32[m]
  vocabulary: str  # the character of each number

  @property
  def classes(self) -> int:
    """The number of different characters."""
    return len(self.vocabulary)


def load(name: str = "pydoc", *, data_dir: str | None = None) -> Text:
  """Loads a text, character by character.

  The last tenth is the test part. Characters that occur less than 10 times
  share one number.

    pydoc  the Python language reference, which is in Python itself: about
           460,000 characters of English (they vary with Python's version)
    file   the file `data_dir`, UTF-8

  Raises:
    ValueError: for an unknown name, or a file that is not given.
    DataError: for a file that cannot be read, or is too short.

  Example:
    >>> text = load("pydoc")
    >>> text.classes < 110, len(text.train) > 9 * len(text.test) - 10
    (True, True)
  """
  loader = names.lookup("text", name, _LOADERS)
  source, characters = loader(data_dir)
  different, counts = np.unique(list(characters), return_counts=True)
  if len(characters) < 1000:
    raise DataError(
      f"{source} has {len(characters)} characters; give a text of 1,000 or more"
    )
  common = different[counts >= _RARE]
  vocabulary = "".join(common) + _UNKNOWN
  codes = np.full(int(different.view(np.uint32)[-1]) + 1, len(common), np.int32)
  codes[common.view(np.uint32)] = np.arange(len(common))
  tokens = codes[np.array(list(characters)).view(np.uint32)]
  cut = len(tokens) - int(len(tokens) * _TEST)
  return Text(name, source, tokens[:cut], tokens[cut:], vocabulary)


def _load_pydoc(data_dir):
  if data_dir is not None:
    raise ValueError("pydoc is in Python: leave data_dir out, or use 'file'")
  from pydoc_data import topics

  pages = (page for _, page in sorted(topics.topics.items()))
  return "Python (embedded)", "\n".join(pages)


def _load_file(data_dir):
  if data_dir is None:
    raise ValueError("the text 'file' needs data_dir, the path of a file")
  path = Path(os.path.expanduser(data_dir))
  try:
    return str(path), path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise DataError(f"{path} is not UTF-8 text: {error}") from None
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error.strerror}") from None


_LOADERS: dict[str, Callable] = {"pydoc": _load_pydoc, "file": _load_file}


def make_batches(
  tokens: np.ndarray, *, batch_size: int, context: int, seed: int
) -> Batches:
  """Makes the function that gives the batch of a job: random windows.

  Args:
    tokens: int32[n].
    batch_size: B, windows of a batch.
    context: T, characters that are predicted in each.
    seed: at least 0.

  Returns:
    (worker, job) -> int32[B, T + 1], a function of (seed, job) alone.
  """
  checks.whole("batch_size", batch_size)
  checks.whole("context", context)
  if len(tokens) <= context + 1:
    raise ValueError(
      f"a text of {len(tokens)} characters has no windows of {context + 1}; use"
      " a shorter context"
    )
  windows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)

  def batch(worker, job):
    del worker
    rng = np.random.default_rng((seed, int(job)))
    return windows[rng.integers(0, len(windows), batch_size)]

  return batch
