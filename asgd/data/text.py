"""Text as numbers: the characters of a file, or of Python's own manual.

A number stands for a character, a byte, or a token of a tokenizer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import checks, names
from asgd.data import sources
from asgd.data.download import DataError
from asgd.stacking import Batches

_TEST_SHARE = 0.1  # the end of a text is the test part
_MIN_COUNT = 10  # rarer characters share one number, "unknown"
_UNKNOWN = "\ufffd"
CHARACTERS, BYTES = "characters", "bytes"
_MIN_CHARACTERS = 1000  # of a text


class Text(NamedTuple):
  """A text as numbers, cut into a training and a test part."""

  name: str
  source: str
  train: np.ndarray  # int32[n]
  test: np.ndarray  # int32[m]
  # The character of each number; or, for other tokens, their count.
  vocabulary: str | int

  @property
  def classes(self) -> int:
    """Number of different characters, or of other tokens."""
    if isinstance(self.vocabulary, int):
      return self.vocabulary
    return len(self.vocabulary)


def load(
  name: str = "pydoc",
  *,
  data_dir: str | None = None,
  tokenizer: str = CHARACTERS,
) -> Text:
  """Loads a text, by default as characters; its last tenth is the test part.

    pydoc  the Python language reference, which is part of Python: about 460,000
           characters of English (they vary with Python's version)
    file   the file `data_dir`, UTF-8

  Args:
    name: one of these names.
    data_dir: path of the file.
    tokenizer: see `from_string`.

  Raises:
    ValueError: for an unknown name, or a missing path.
    DataError: for a file that cannot be read, or is too short.

  Example:
    >>> text = load("pydoc")
    >>> text.classes < 110, len(text.train) > 9 * len(text.test) - 10
    (True, True)
  """
  source, characters = read(name, data_dir=data_dir)
  return from_string(characters, name, source, tokenizer=tokenizer)


def read(name: str, *, data_dir: str | None = None) -> tuple[str, str]:
  """Returns the source of a text, and its characters; see `load`."""
  return names.lookup("text", name, _LOADERS)(data_dir)


def from_string(
  characters: str,
  name: str = "text",
  source: str = "a string",
  *,
  tokenizer: str = CHARACTERS,
) -> Text:
  """Makes a Text from a string; its last tenth is the test part.

  Args:
    characters: 1,000 or more.
    name: the name of the text.
    source: where it is from.
    tokenizer: "characters": those that occur less than 10 times share one
      number; "bytes": of UTF-8; a file of the package tokenizers, which ends in
      .json; or MODULE:FUNCTION of a function string -> list of ints from 0. The
      function may have an attribute `size`, the number of different tokens;
      without it, `size` is the largest int in this text + 1.
  """
  if len(characters) < _MIN_CHARACTERS:
    raise DataError(
      f"{source} has {len(characters)} characters; give a text of 1,000 or more"
    )
  vocabulary: str | int
  if tokenizer == CHARACTERS:
    tokens, vocabulary = _by_character(characters)
  elif tokenizer == BYTES:
    tokens = np.frombuffer(characters.encode(), np.uint8).astype(np.int32)
    vocabulary = 256
  elif tokenizer.endswith(".json"):
    tokens, vocabulary = _by_file(tokenizer, characters)
  elif names.is_import(tokenizer):
    tokens, vocabulary = _by_function(tokenizer, characters)
  else:
    tokenizers = CHARACTERS, BYTES, "FILE.json", "MODULE:FUNCTION"
    checks.one_of("tokenizer", tokenizer, tokenizers)
  # The test part is the end of the text: no window is in both parts.
  cut = len(tokens) - int(len(tokens) * _TEST_SHARE)
  return Text(name, source, tokens[:cut], tokens[cut:], vocabulary)


def _by_character(characters: str) -> tuple[np.ndarray, str]:
  """Returns (tokens, vocabulary) with a number for each common character."""
  characters_sorted, counts = np.unique(list(characters), return_counts=True)
  frequent = characters_sorted[counts >= _MIN_COUNT]
  vocabulary = "".join(frequent) + _UNKNOWN
  # A table from code point to number; rare characters share the last number.
  codes = np.full(
    int(characters_sorted.view(np.uint32)[-1]) + 1, len(frequent), np.int32
  )
  codes[frequent.view(np.uint32)] = np.arange(len(frequent))
  return codes[np.array(list(characters)).view(np.uint32)], vocabulary


def _by_file(path: str, characters: str) -> tuple[np.ndarray, int]:
  """Returns (tokens, size) of a tokenizer's file."""
  if not Path(path).is_file():
    raise ValueError(f"tokenizer {path} is no file")
  tokenizer = sources.read_tokenizer(Path(path))
  tokens = tokenizer.encode(characters, add_special_tokens=False).ids
  return np.array(tokens, np.int32), tokenizer.get_vocab_size()


def _by_function(name: str, characters: str) -> tuple[np.ndarray, int]:
  """Returns (tokens, size) of a user's function."""
  encode = names.import_function("tokenizer", name)
  tokens = np.asarray(encode(characters))
  if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
    raise ValueError(
      f"tokenizer {name!r} returned {checks.shown(tokens.tolist())} for a text;"
      " return a list of ints"
    )
  least, most = int(tokens.min()), int(tokens.max())
  size = checks.integer("size", getattr(encode, "size", most + 1))
  if least < 0 or most >= size:
    raise ValueError(
      f"tokenizer {name!r} returned ints from {least} to {most}; return 0 to"
      f" {size - 1}, or set its size"
    )
  return tokens.astype(np.int32), size


def _load_pydoc(data_dir: str | None) -> tuple[str, str]:
  """Returns (source, characters) of the Python language reference."""
  if data_dir is not None:
    raise ValueError(
      "pydoc is part of Python: leave data_dir out, or use 'file'"
    )
  from pydoc_data import topics

  pages = (page for _, page in sorted(topics.topics.items()))
  return "Python (embedded)", "\n".join(pages)


def _load_file(data_dir: str | None) -> tuple[str, str]:
  """Returns (path, characters) of a UTF-8 file."""
  path = sources.file_of("text", data_dir)
  try:
    return str(path), path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise DataError(f"{path} is not UTF-8 text: {error}") from None
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error.strerror}") from None


_LOADERS: dict[str, Callable[..., tuple[str, str]]] = {
  "pydoc": _load_pydoc,
  "file": _load_file,
}


def make_batches(
  tokens: np.ndarray, *, batch_size: int, context: int, seed: int
) -> Batches:
  """Makes the function that returns the batch of a job: random windows.

  Args:
    tokens: int32[n].
    batch_size: B, windows of a batch.
    context: T, tokens that are predicted in each window.
    seed: at least 0.

  Returns:
    (worker, job) -> int32[B, T + 1], a function of (seed, job) alone.
  """
  checks.integer("batch_size", batch_size)
  checks.integer("context", context)
  windows = windows_of(tokens, context, "a text")

  def batch(worker, job):
    del worker
    rng = np.random.default_rng((seed, int(job)))
    return windows[rng.integers(0, len(windows), batch_size)]

  return batch


def windows_of(tokens: np.ndarray, context: int, name: str) -> np.ndarray:
  """Returns all windows of context + 1 tokens, a view int32[n - T, T + 1].
  Raises ValueError, with the name of the tokens, if there is none."""
  if len(tokens) <= context:
    raise ValueError(
      f"{name} of {len(tokens)} tokens has no windows of {context + 1}; use"
      " a shorter context"
    )
  return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
