"""Text as numbers: what is in a vocabulary, in a window, and in an error."""

import numpy as np
import pytest

from asgd.data import DataError, text


@pytest.fixture
def written(tmp_path):
  """Writes a text and loads it."""

  def write(content, name="text.txt"):
    path = tmp_path / name
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
    return text.load("file", data_dir=str(path))

  return write


def decode(held, tokens):
  return "".join(held.vocabulary[token] for token in tokens)


def test_rare_characters_share_the_last_number(written):
  held = written("ab" * 600 + "c" * 10 + "d" * 9 + "é" * 3)
  assert held.vocabulary == "abc\ufffd"
  assert held.classes == 4
  whole = np.concatenate([held.train, held.test])
  assert decode(held, whole[:4]) == "abab"
  assert decode(held, whole[-13:]) == "c" + "\ufffd" * 12
  assert whole.dtype == np.int32


def test_the_last_tenth_is_held_out(written):
  held = written("a" * 900 + "b" * 105)
  assert len(held.test) == 100
  assert len(held.train) == 905
  assert set(decode(held, held.test)) == {"b"}


def test_pydoc_is_english_of_a_useful_length():
  held = text.load()
  assert held.name == "pydoc"
  assert len(held.train) > 100_000
  assert held.classes < 110
  assert "statement" in decode(held, held.train)
  assert held.train.min() >= 0 and held.train.max() < held.classes


def test_windows_are_a_function_of_seed_and_job_alone():
  tokens = np.arange(100, dtype=np.int32)
  batches = text.make_batches(tokens, batch_size=5, context=7, seed=3)
  again = text.make_batches(tokens, batch_size=5, context=7, seed=3)
  other = text.make_batches(tokens, batch_size=5, context=7, seed=4)
  batches(0, 1)
  np.testing.assert_array_equal(batches(0, 9), again(2, 9))
  np.testing.assert_array_equal(batches(0, np.int32(9)), again(0, 9))
  assert (batches(0, 9) != batches(0, 10)).any()
  assert (batches(0, 9) != other(0, 9)).any()


def test_a_window_is_a_piece_of_the_text_and_may_be_any():
  tokens = np.arange(20, dtype=np.int32)
  batches = text.make_batches(tokens, batch_size=64, context=4, seed=0)
  windows = np.concatenate([batches(0, job) for job in range(8)])
  assert windows.shape == (512, 5)
  assert (np.diff(windows, axis=1) == 1).all()
  assert set(windows[:, 0]) == set(range(16))


MISTAKES = {
  "name": (lambda: text.load("pydok"), "unknown text 'pydok'.*'pydoc'"),
  "no file": (lambda: text.load("file"), "needs data_dir"),
  "a file of pydoc": (lambda: text.load(data_dir="x"), "leave data_dir out"),
  "not there": (
    lambda: text.load("file", data_dir="/nowhere/x.txt"),
    "/nowhere/x.txt cannot be read: No such file",
  ),
  "batch_size": (
    lambda: text.make_batches(
      np.zeros(9, np.int32), batch_size=0, context=2, seed=0
    ),
    "batch_size must be a positive whole number, not 0",
  ),
  "context": (
    lambda: text.make_batches(
      np.zeros(9, np.int32), batch_size=1, context=True, seed=0
    ),
    "context must be a positive whole number, not True",
  ),
  "too short": (
    lambda: text.make_batches(
      np.zeros(9, np.int32), batch_size=1, context=9, seed=0
    ),
    "9 tokens has no windows of 10; use a shorter context",
  ),
  "too short a test part": (
    lambda: text.windows_of(np.zeros(3, np.int32), 3, "a test part"),
    "a test part of 3 tokens has no windows of 4; use a shorter context",
  ),
}


def test_a_text_of_one_window_has_it_in_all_batches():
  tokens = np.arange(5, dtype=np.int32)
  batches = text.make_batches(tokens, batch_size=2, context=4, seed=0)
  assert batches(0, 3).tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  call, message = MISTAKES[name]
  with pytest.raises((ValueError, DataError), match=message):
    call()


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"\xff\xfe" * 900, "is not UTF-8 text"),
    ("ab" * 400, "has 800 characters; give a text of 1,000 or more"),
    ("", "has 0 characters; give a text of 1,000 or more"),
  ],
  ids=["not UTF-8", "short", "empty"],
)
def test_a_file_that_is_no_such_text_is_refused(written, content, message):
  with pytest.raises(DataError, match=message):
    written(content)


def test_a_text_whose_characters_are_all_rare_is_one_of_unknowns(written):
  held = written("".join(map(chr, range(0x4E00, 0x4E00 + 1000))))
  assert held.vocabulary == "\ufffd"
  assert (held.train == 0).all()


def test_the_shortest_text_has_its_windows():
  tokens = np.arange(6, dtype=np.int32)
  batches = text.make_batches(tokens, batch_size=3, context=4, seed=0)
  assert batches(0, 0).shape == (3, 5)


SENTENCE = "to be or not to be, " * 60


def lengths(string):
  return [len(word) for word in string.split()]


def test_a_text_may_be_bytes_or_what_a_function_makes_of_it(monkeypatch):
  held = text.from_string(SENTENCE + "\u00e9", tokenizer="bytes")
  assert held.classes == 256
  assert held.test[-2:].tolist() == [0xC3, 0xA9]
  name = f"{__name__}:lengths"
  held = text.from_string(SENTENCE, tokenizer=name)
  assert held.classes == 4  # the longest is "be," and one
  assert held.train[:6].tolist() == [2, 2, 2, 3, 2, 3]
  monkeypatch.setattr(lengths, "size", 7, raising=False)
  assert text.from_string(SENTENCE, tokenizer=name).classes == 7
  monkeypatch.setattr(lengths, "size", 2)
  with pytest.raises(ValueError, match="ints from 2 to 3; return 0 to 1, or"):
    text.from_string(SENTENCE, tokenizer=name)


def test_a_text_may_be_of_the_pieces_of_a_tokenizers_file(tmp_path):
  tokenizers = pytest.importorskip("tokenizers")
  words = {"to": 0, "be": 1, "or": 2, "not": 3, ",": 4, "?": 5}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="?")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  path = tmp_path / "tokenizer.json"
  tokenizer.save(str(path))
  held = text.from_string(SENTENCE, tokenizer=str(path))
  assert held.classes == 6
  assert held.train[:7].tolist() == [0, 1, 2, 3, 0, 1, 4]
  with pytest.raises(ValueError, match="nothing.json is no file"):
    text.from_string(SENTENCE, tokenizer="nothing.json")


def test_an_unknown_tokenizer_is_told():
  words = "tokenizer must be one of characters, bytes, FILE.json, MODULE:"
  with pytest.raises(ValueError, match=words):
    text.from_string(SENTENCE, tokenizer="words")
