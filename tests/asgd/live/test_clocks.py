"""What one machine's clock shows when another's shows something."""

import math

import pytest

from asgd.live.links import notes


def test_nothing_is_known_before_the_first_answer():
  offset = notes.ClockOffset()
  assert math.isnan(offset.seconds)
  assert offset.error == math.inf


def test_the_truth_is_between_the_question_and_the_answer():
  offset = notes.ClockOffset()
  offset.learn(100.0, 7.0, 104.0)  # theirs is ours less 93 to 97
  assert (offset.seconds, offset.error) == (-95.0, 2.0)


@pytest.mark.parametrize("answers", [1, -1])
def test_the_bounds_of_all_answers_hold(monkeypatch, answers):
  monkeypatch.setattr(notes, "_DRIFT", 0.0)
  offset = notes.ClockOffset()
  # Theirs is ours less 95: of one question the way there is the slow one, of
  # the other the way back, and together they are exact.
  for question in [(100.0, 9.0, 104.0), (200.0, 105.0, 208.0)][::answers]:
    offset.learn(*question)
  assert (offset.seconds, offset.error) == (-95.0, 0.0)


def test_bounds_widen_as_clocks_drift(monkeypatch):
  monkeypatch.setattr(notes, "_DRIFT", 0.25)
  offset = notes.ClockOffset()
  offset.learn(100.0, 10.0, 100.0)
  offset.learn(100.0, 10.0, 108.0)  # a slow answer, eight seconds later
  # -90 at 100; 2 either way at 108, of which the answer has -98 to -90.
  assert (offset.seconds, offset.error) == (-91.0, 1.0)


def test_the_last_of_two_answers_that_contradict_each_other_counts():
  offset = notes.ClockOffset()
  offset.learn(100.0, 10.0, 100.0)
  offset.learn(102.0, 52.0, 104.0)  # theirs was set, or ours stood still
  assert (offset.seconds, offset.error) == (-51.0, 1.0)
