"""Names: what is not found is answered with what is there."""

import pytest

from asgd import names

TABLE = {"asynchronous": 1, "bulk_synchronous": None, "fixed_delay": 3}


def test_nearest_hints_at_a_close_name_and_lists_all_sorted():
  assert names.nearest("asynchronus", reversed(TABLE)) == (
    "did you mean 'asynchronous'? known: asynchronous, bulk_synchronous,"
    " fixed_delay"
  )


def test_nearest_does_not_guess_without_a_close_name():
  assert names.nearest("zzz", ["b", "a", "b"]) == "known: a, b"
  assert names.nearest(7, ["b", "a"]) == "known: a, b"


def test_nearest_knows_initials_of_several_words():
  known = ["learning_rate", "learning_rate_schedule", "order", "l"]
  assert names.nearest("lr", known).startswith("did you mean 'learning_rate'?")
  assert "'learning_rate_schedule'?" in names.nearest("lrs", known)
  assert names.nearest("o", ["order", "x"]).startswith("known: ")


def test_lookup_returns_the_entry_itself():
  assert names.lookup("order", "fixed_delay", TABLE) == 3
  assert names.lookup("order", "bulk_synchronous", TABLE) is None


def test_lookup_of_an_unknown_name_shows_kind_name_and_nearest():
  words = "^unknown order 'fixed'; did you mean 'fixed_delay'. known: asyn"
  with pytest.raises(ValueError, match=words):
    names.lookup("order", "fixed", TABLE)


@pytest.fixture
def calls():
  return []


@pytest.fixture
def maker(calls):
  def make(size, *, depth=2, width):
    calls.append((size, depth, width))
    return calls[-1]

  return make


def test_call_passes_arguments_by_name(maker):
  kwargs = {"width": 3, "size": 1}
  assert names.call("model", "net", maker, kwargs) == (1, 2, 3)
  kwargs["depth"] = None
  assert names.call("model", "net", maker, kwargs) == (1, None, 3)


def test_call_of_an_unknown_argument_names_the_nearest(maker, calls):
  words = (
    "^model 'net' takes no argument 'widht'; did you mean 'width'. known:"
    " depth, size, width$"
  )
  with pytest.raises(ValueError, match=words):
    names.call("model", "net", maker, {"size": 1, "width": 3, "widht": 3})
  assert not calls


def test_call_of_what_takes_nothing_says_so():
  words = "^codec 'onebit' takes no argument 'x'; it takes no options$"
  with pytest.raises(ValueError, match=words):
    names.call("codec", "onebit", lambda: None, {"x": 1})


def test_call_names_a_missing_argument(maker, calls):
  words = "^model 'net' needs the argument 'width'$"
  with pytest.raises(ValueError, match=words):
    names.call("model", "net", maker, {"size": 1})
  assert not calls
