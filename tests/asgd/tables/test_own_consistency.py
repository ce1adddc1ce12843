"""A consistency model outside the package: one value and one line."""

import functools

import kit
import pytest

from asgd import tables
from asgd.experiment import replay
from asgd.tables import Consistency

BATCHES = 12  # of each worker


def tightening(rules, clock):
  """Allows rows that are `bound` clocks old at first, and none from clock 6
  on."""
  return max(0, clock - (rules.bound if clock < 6 else 0))


@pytest.fixture
def registered(monkeypatch):
  model = Consistency("tightening", tightening, numbers=("bound",), bound=4)
  monkeypatch.setitem(tables.CONSISTENCIES, model.name, model)


build = functools.partial(
  kit.build,
  {
    "problem": {
      "name": "asgd.problems.factorisation:matrix_factorisation",
      "rank": 2,
    },
    "runs": {"run": {"recipe": "table", "consistency": "tightening"}},
    "workers": (2,),
    "batch_size": 50,
    "examples": 50 * 2 * BATCHES,
    "learning_rate": 4.0,
    "evaluations": 2,
    "curvature_checks": 0,
    "durations": {"name": "heterogeneous"},
  },
)


@pytest.mark.usefixtures("registered")
def test_it_trains_in_simulated_time(tmp_path):
  result, _ = kit.train(build(), tmp_path)[:2]
  assert result["order"] == "tightening"
  assert result["bound"] == 4
  # -1 - bound is the least differential at first, and -1 in the end.
  assert -5 <= result["differential_least"] < -1
  rules = tables.rules("tightening", bound=4)
  assert [rules.need(clock) for clock in (3, 5, 9)] == [0, 1, 9]


@pytest.mark.usefixtures("registered")
def test_it_trains_live_and_is_replayed(tmp_path):
  result, place = kit.train(build(engine="threads"), tmp_path)[:2]
  assert result["messages"] == 2 * BATCHES
  assert result["order"] == "tightening"
  assert replay.replay(place).same


def test_it_is_unknown_without_its_line():
  with pytest.raises(ValueError, match="unknown consistency 'tightening'"):
    build()
