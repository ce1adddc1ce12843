"""Documents: drawn, made of texts, and what is refused."""

import numpy as np
import pytest

from asgd.data import documents
from asgd.data.download import DataError


def test_drawn_documents_have_words_of_their_bars():
  drawn = documents.generated(50, side=3, length=200, concentration=1e-3)
  assert drawn.topics.shape == (6, 9)
  bars = {tuple(np.flatnonzero(topic)) for topic in drawn.topics}
  # A document of so low a concentration is of one topic.
  of_one = [tuple(np.unique(row)) in bars for row in drawn.train_words]
  assert np.mean(of_one) > 0.9
  again = documents.generated(50, side=3, length=200, concentration=1e-3)
  np.testing.assert_array_equal(again.train_words, drawn.train_words)


def test_a_file_has_a_document_a_line(tmp_path):
  path = tmp_path / "documents"
  lines = ["Tree trunk and leaf leaf", "Trees TRUNKS and leaf"] * 10
  lines[3] = "Unknown words alone"
  path.write_text("\n".join(lines) + "\n")
  read = documents.load("file", data_dir=str(path), least=2)
  # `leaf` is in more than half of the documents; `and` is a stop word.
  assert read.vocabulary == ("tree", "trees", "trunk", "trunks")
  assert read.source.endswith("documents, 1 without a known word left out")
  assert read.train_words[:3].tolist() == [[0, 2], [1, 3], [0, 2]]


def test_long_documents_are_cut_and_a_tenth_is_held_out():
  text = " ".join(["wood leaf branch"] * 10)
  texts = [text] * 10 + ["stone rock cliff"] * 50
  made = documents.from_texts(texts, longest=6)
  assert made.train_words.shape == (90, 6)
  assert len(made.test_lengths) == 10
  assert (made.test_lengths > 1).all()


@pytest.mark.parametrize(
  ("text", "wrong"),
  [
    ("tree leaf\n\nleaf\n", "document 2 of .* is empty: it has no word; leave"),
    ("tree\nleaf\n", "the vocabulary of .* has no word: none of 2 words is in"),
    ("tree leaf\ntree\n" * 3 + "a wood\n" * 20, "give 10 or more, of two w"),
  ],
)
def test_documents_that_cannot_be_used_are_refused(tmp_path, text, wrong):
  path = tmp_path / "documents"
  path.write_text(text)
  with pytest.raises(ValueError, match=wrong):
    documents.load("file", data_dir=str(path))


def test_what_is_not_there_is_named(tmp_path):
  with pytest.raises(DataError, match="20 newsgroups is not on disk"):
    documents.load("newsgroups", data_dir=tmp_path)
  with pytest.raises(ValueError, match="are drawn: leave data_dir"):
    documents.load("generated", data_dir="here")
  with pytest.raises(DataError, match="cannot be read"):
    documents.load("file", data_dir=str(tmp_path / "none"))
