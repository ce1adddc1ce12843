"""Texts as words."""

from asgd.data import words


def test_rare_words_are_left_out_and_the_last_tenth_held_back():
  made = words.from_string("It's a bit; a BIT more. " * 9 + "a end", least=9)
  assert made.vocabulary == ("a", "bit", "it's")
  assert made.counts.tolist() == [17, 17, 9]
