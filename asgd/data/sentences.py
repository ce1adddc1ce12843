"""Tasks: sentences, or pairs of sentences, and their classes as arrays.

Index letters used in shape comments:
  n, m  examples
  T     positions of an example

References:
  Wang et al., "GLUE: A multi-task benchmark and analysis platform for natural
  language understanding", ICLR 2019.
"""

import collections
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from asgd import checks, names
from asgd.data import formats, sources
from asgd.data.download import DataError, damaged

PADDING = 0  # number of the word [PAD], which fills short examples


class Sentences(NamedTuple):
  """A task as arrays. [:, 0] of tokens are words; [:, 1] is 1 in the second
  sentence of a pair, as `models.encoder` needs it."""

  name: str
  source: str
  train_tokens: np.ndarray  # int32[n, 2, T]
  train_labels: np.ndarray  # int32[n]
  test_tokens: np.ndarray  # int32[m, 2, T]
  test_labels: np.ndarray  # int32[m]
  classes: int  # labels are 0..classes-1
  vocabulary: int  # words are 0..vocabulary-1
  measure: str | None = None  # key of MEASURES, reported beside accuracy


class Examples(NamedTuple):
  """One part of a task, before its sentences become numbers."""

  sentences: list[tuple[str, ...]]  # for each example one sentence, or a pair
  labels: np.ndarray  # int32[n]


def load(
  name: str = "topics",
  *,
  context: int,
  data_dir: str | os.PathLike[str] | None = None,
  tokenizer: str | os.PathLike[str] | None = None,
) -> Sentences:
  """Loads a task; the test part of GLUE's tasks is the authors' dev part.

    topics  the topic (of four) of a sentence of Python's manual, which is part
            of Python: about 780 / 190 sentences (they vary with Python's
            version)
    sst2    SST-2, whether a phrase of a film review is positive: 67,349 / 872
    cola    CoLA, whether a sentence is grammatical: 8,551 / 1,043, Matthews
            correlation
    mrpc    MRPC, whether two sentences mean the same: 3,667 / 408, F1
    rte     RTE, whether the first sentence implies the second: 2,490 / 277

  Args:
    name: one of these names.
    context: T. Longer examples are cut to it (in a pair, the longer sentence
      first), shorter ones padded.
    data_dir: for tasks of GLUE. It is their archive, or a folder that contains
      SST-2, CoLA, MRPC and RTE (folders with train.tsv and dev.tsv), or one of
      these folders.
    tokenizer: a folder with the tokenizer.json of a pretrained model; it needs
      the package tokenizers. None makes a vocabulary of the training part's
      words.

  Raises:
    ValueError: for an unknown name, a context without room for a word, or a
      missing path.
    DataError: for a file that cannot be read, or has another format.

  Example:
    >>> task = load("topics", context=12)
    >>> task.classes, task.train_tokens.shape[1:]
    (4, (2, 12))
  """
  loader = names.lookup("task of sentences", name, TASKS)
  checks.integer("context", context, _MIN_CONTEXT)
  source, classes, train, test = loader(name, data_dir)
  if tokenizer is None:
    vocabulary, encode = _word_vocabulary(train)
  else:
    vocabulary, encode = _pretrained_tokenizer(Path(tokenizer))
  train_x, test_x = encode(train, context), encode(test, context)
  sources.freeze([train_x, train.labels, test_x, test.labels])
  measure = _FORMS[name].measure if name in _FORMS else None
  return Sentences(
    *(name, source, train_x, train.labels, test_x, test.labels),
    *(classes, vocabulary, measure),
  )


# From sentences to numbers.

_MIN_CONTEXT = 5  # fewest positions: [CLS] word [SEP] word [SEP]
_MIN_COUNT = 2  # rarer words of the training part share one number
_MOST_WORDS = 30_000
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_UNKNOWN, _START, _END = 1, 2, 3
_WORD = re.compile(r"\w+|[^\w\s]")


def split(sentence: str) -> list[str]:
  """Returns words and punctuation marks, in lower case."""
  return _WORD.findall(sentence.lower())


def _word_vocabulary(
  train: Examples,
) -> tuple[int, Callable[[Examples, int], np.ndarray]]:
  """Returns (size, encode) of a vocabulary of complete words."""
  counts: collections.Counter[str] = collections.Counter()
  for column in zip(*train.sentences, strict=True):
    counts.update(word for sentence in column for word in split(sentence))
  common = [w for w, n in counts.most_common(_MOST_WORDS) if n >= _MIN_COUNT]
  number_of = {w: i for i, w in enumerate((*_SPECIAL, *common))}

  def numbers(sentence):
    return [number_of.get(word, _UNKNOWN) for word in split(sentence)]

  def encode(examples, context):
    tokens = np.full((len(examples.sentences), 2, context), PADDING)
    tokens[:, 1] = 0
    for row, sentences in enumerate(examples.sentences):
      parts = [numbers(sentence) for sentence in sentences]
      # [CLS] and a [SEP] for each sentence take a position each.
      room = context - 1 - len(parts)
      while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
      words, types = [_START], [0]
      for index, part in enumerate(parts):
        words += [*part, _END]
        types += [index] * (len(part) + 1)
      tokens[row, :, : len(words)] = words, types
    return tokens.astype(np.int32)

  return len(number_of), encode


def _pretrained_tokenizer(
  folder: Path,
) -> tuple[int, Callable[[Examples, int], np.ndarray]]:
  """Returns (size, encode) of the tokenizer of a pretrained model."""
  path = folder / "tokenizer.json"
  if not path.is_file():
    raise DataError(f"{folder} lacks tokenizer.json; give the model's folder")
  tokenizer = sources.read_tokenizer(path)

  def encode(examples, context):
    tokenizer.enable_truncation(context, strategy="longest_first")
    tokenizer.enable_padding(length=context, pad_id=PADDING)
    batch = [
      sentences if len(sentences) > 1 else sentences[0]
      for sentences in examples.sentences
    ]
    rows = [(row.ids, row.type_ids) for row in tokenizer.encode_batch(batch)]
    return np.array(rows, np.int32).reshape(-1, 2, context)

  return tokenizer.get_vocab_size(), encode


# The embedded task.

_TOPICS = 4
_EVERY = 5  # the test part is every 5th sentence of a topic
_SHORTEST = 5  # sentences with at most so many words are left out
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_BREAK = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def _load_topics(
  name: str, data_dir: str | os.PathLike[str] | None
) -> tuple[str, int, *tuple[Examples, ...]]:
  """Returns (source, classes, training part, test part) of the largest topics
  of Python's manual.

  Topics share sentences. So the size of a topic is the number of its sentences
  that are in no topic selected before, and a sentence in two of the selected
  topics is left out.
  """
  if data_dir is not None:
    raise ValueError(f"{name} is part of Python: leave data_dir out")
  from pydoc_data import topics

  prose = {key: _prose(topics.topics[key]) for key in sorted(topics.topics)}
  labels: list[str] = []
  selected: set[str] = set()  # sentences of the selected topics
  for _ in range(_TOPICS):
    # Count only sentences that no selected topic has.
    new_counts = {key: len(set(prose[key]) - selected) for key in prose}
    labels.append(max(new_counts, key=new_counts.__getitem__))
    selected.update(prose[labels[-1]])
  topic_counts = collections.Counter(s for key in labels for s in prose[key])
  # (sentence, label) of the training part and of the test part
  parts: tuple[list[tuple[str, int]], ...] = [], []
  for label, key in enumerate(labels):
    # A sentence of two topics has no single label.
    unambiguous = [s for s in prose[key] if topic_counts[s] == 1]
    for i, sentence in enumerate(unambiguous):
      parts[i % _EVERY == _EVERY - 1].append((sentence, label))
  return "Python (embedded)", len(labels), *map(_examples, parts)


def _prose(manual: str) -> list[str]:
  """Returns the different sentences of a topic, without headings and code."""
  paragraphs = (" ".join(each.split()) for each in _PARAGRAPH.split(manual))
  complete_sentences = (
    sentence
    for paragraph in paragraphs
    for sentence in _SENTENCE_BREAK.split(paragraph)
    if sentence[:1].isupper() and sentence[-1] in ".!?"
  )
  return list(
    dict.fromkeys(s for s in complete_sentences if len(split(s)) > _SHORTEST)
  )


def _examples(rows: Sequence[tuple[Any, ...]]) -> Examples:
  """Makes Examples of rows (sentence, label) or (sentence, sentence, label)."""
  labels = np.array([row[-1] for row in rows], np.int32)
  return Examples([row[:-1] for row in rows], labels)


# GLUE.


class _Form(NamedTuple):
  """The file format of a task."""

  folder: str
  columns: int
  label: int  # column of the label
  sentences: tuple[int, ...]  # columns of the sentences
  header: bool = True
  labels: tuple[str, ...] = ("0", "1")  # text of each class
  measure: str | None = None


_FORMS = {
  "sst2": _Form("SST-2", 2, 1, (0,)),
  "cola": _Form("CoLA", 4, 1, (3,), header=False, measure="matthews"),
  "mrpc": _Form("MRPC", 5, 0, (3, 4), measure="f1"),
  "rte": _Form("RTE", 4, 3, (1, 2), labels=("entailment", "not_entailment")),
}
_ARCHIVE = "glue_sst2_rte_mrpc_cola.tar.xz"
_FILES = ("train.tsv", "dev.tsv")


def _load_glue(
  name: str, data_dir: str | os.PathLike[str] | None
) -> tuple[str, int, *tuple[Examples, ...]]:
  """Returns (source, classes, training part, test part) of a task of GLUE, from
  a folder or the archive."""
  form = _FORMS[name]
  if data_dir is None:
    raise ValueError(
      f"the task {name!r} needs data_dir: the archive of GLUE's tasks, or the"
      f" folder that contains {form.folder}/{_FILES[0]}"
    )
  location = Path(os.path.expanduser(checks.path("data_dir", data_dir)))
  if location.is_dir() and (location / _ARCHIVE).is_file():
    location = location / _ARCHIVE
  read = _from_folder if location.is_dir() else _from_archive
  files = read(form, location)
  parts = [_parse(form, where, content) for where, content in files]
  return f"file {location}", len(form.labels), *parts


def _from_folder(form: _Form, location: Path) -> list[tuple[str, bytes]]:
  """Returns (path, content) of a task's files in a folder."""
  roots = location, location / form.folder, location / "glue_data" / form.folder
  for folder in roots:
    paths = [folder / file for file in _FILES]
    if all(path.is_file() for path in paths):
      return [(str(path), path.read_bytes()) for path in paths]
  raise DataError(
    f"{location} has no {' and '.join(_FILES)}, neither in it nor in"
    f" {form.folder}/ or glue_data/{form.folder}/, and no {_ARCHIVE}"
  )


def _from_archive(form: _Form, location: Path) -> list[tuple[str, bytes]]:
  """Returns (path, content) of a task's files in the archive."""
  if not location.is_file():
    raise DataError(f"{location} does not exist; give a folder or an archive")
  files = {}
  for member, content in formats.tar_files(location):
    path = PurePosixPath(member)
    if path.parent.name == form.folder and path.name in _FILES:
      files[path.name] = f"{location}/{member}", content
  if missing_files := [file for file in _FILES if file not in files]:
    raise damaged(f"{location} lacks {form.folder}/{missing_files[0]}")
  return [files[file] for file in _FILES]


def _parse(form: _Form, where: str, content: bytes) -> Examples:
  """Reads lines of columns between tabs; quotes have no special meaning."""
  try:
    lines = content.decode("utf-8-sig").split("\n")
  except UnicodeDecodeError as error:
    raise DataError(f"{where} is not UTF-8 text: {error}") from None
  rows, label_names = [], ", ".join(form.labels)
  for number, line in enumerate(lines, 1):
    line = line.removesuffix("\r")
    if not line or (form.header and number == 1):
      continue
    cells, line_name = line.split("\t"), f"{where}, line {number}"
    if len(cells) != form.columns:
      raise damaged(
        f"{line_name}: expected {form.columns} columns, found {len(cells)}"
      )
    label = cells[form.label]
    if label not in form.labels:
      raise DataError(
        f"{line_name}: the label is {label!r}, expected one of {label_names}"
      )
    rows.append((*(cells[i] for i in form.sentences), form.labels.index(label)))
  if not rows:
    raise damaged(f"{where} has no examples")
  return _examples(rows)


TASKS: dict[str, Callable[..., Any]] = {
  "topics": _load_topics,
  **dict.fromkeys(_FORMS, _load_glue),
}


# Measures besides accuracy, as the tasks' authors report them.


def _matthews(labels: np.ndarray, predicted: np.ndarray) -> float:
  """Returns the correlation of labels and predictions, 0 if one is constant."""
  n = float(len(labels))
  classes = 1 + int(max(labels.max(), predicted.max()))
  n_labels, n_predicted = (
    np.bincount(x, minlength=classes) for x in (labels, predicted)
  )
  covariance = n * np.sum(labels == predicted) - n_labels @ n_predicted
  variances = (n * n - n_labels @ n_labels) * (
    n * n - n_predicted @ n_predicted
  )
  return float(covariance / np.sqrt(variances)) if variances else 0.0


def _f1(labels: np.ndarray, predicted: np.ndarray) -> float:
  """Returns 2 precision recall / (precision + recall) of class 1; 0 if labels
  and predictions have no 1."""
  count_of_ones = np.sum(labels == 1) + np.sum(predicted == 1)
  count_of_hits = np.sum((labels == 1) & (predicted == 1))
  return float(2 * count_of_hits / count_of_ones) if count_of_ones else 0.0


MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
  "matthews": _matthews,
  "f1": _f1,
}
