"""Orders made in columns are those that are played, to the bit; so is what is
read of columns at once what is read of them row by row."""

import itertools
import math
import random

import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.orders import checking, columns, durations, play, trace
from asgd.orders.protocol import Rules


def clocks(rng):
  """Times that are all different, equal now and then, and equal throughout."""
  seed = rng.randrange(99)
  few = [[rng.choice([0.5, 1.0, 1.5, 3.0]) for _ in range(5)] for _ in range(9)]
  return rng.choice([
    durations.heterogeneous(seed=seed),
    durations.gamma(variation=1.5, seed=seed),
    durations.constant(slowdown=rng.choice([[], [1.5, 3.0, 40.0], [0.01]])),
    durations.measured(few, resample=rng.random() < 0.5, seed=seed),
  ])


def any_rules(rng):
  warm_start = rng.choice([0, 0, 1, 7])
  every = rng.choice([1, 1, 3])
  kind = rng.choice(["free", "bound", "round"])
  if kind == "round":
    return Rules(round=rng.randint(1, 6), backup=rng.randint(0, 6))
  bound = math.inf if kind == "free" else rng.choice([0, 1, 2.5, 4, 60])
  return Rules(bound=bound, warm_start=warm_start, fetch_every=every)


def played(rules, clock, workers, messages):
  order = play.begin(rules, clock, workers)
  order.until(messages)
  return order.trace()


@pytest.mark.parametrize("part", range(2))
def test_columns_are_the_order_that_is_played(part, monkeypatch):
  for seed in range(50 * part, 50 * (part + 1)):
    rng = random.Random(seed)
    monkeypatch.setattr(columns, "_BLOCK", rng.choice([2, 1024]))
    given = any_rules(rng), clocks(rng)
    workers, messages = rng.randint(1, 9), rng.choice([1, 5, 30, 150])
    made = columns.make(*given, workers, messages)
    kit.same_bits(made, played(*given, workers, messages))
    present = orders.check(made, depth=200)
    rows = trace.events(made)
    assert present == orders.check(rows, depth=200)


@pytest.mark.parametrize(
  "rules",
  [Rules(), Rules(bound=3), Rules(bound=0), Rules(round=60, backup=20)],
)
def test_columns_of_more_workers(rules):
  clock = durations.pareto(tail=1.2, seed=1)
  made = columns.make(rules, clock, 80, 900)
  kit.same_bits(made, played(rules, clock, 80, 900))


@pytest.mark.parametrize(
  "rules", [Rules(depth=2), Rules(bound=2, cache=True), Rules(round=2, late=2)]
)
def test_other_protocols_are_played(rules):
  assert columns.make(rules, durations.constant(), 2, 4) is None
  rows = play.play_rules(rules, durations.constant(), 2, 4)
  kit.same_bits(rows, played(rules, durations.constant(), 2, 4))


@pytest.mark.parametrize("times", [[1.0, 0.0], [1e17, 1.0], [1.0] * 5])
def test_times_that_columns_do_not_count_are_played(times):
  def stream(worker):
    ends = len(times) == 5  # too few for a block, and enough for the order
    return iter(times) if ends else itertools.cycle(times)

  clock = durations.Durations(stream)
  assert columns.make(Rules(), clock, 2, 6) is None
  made = orders.asynchronous(clock, workers=2, messages=6)
  kit.same_bits(made, played(Rules(), clock, 2, 6))


# Reading.


def changed(whole, rng):
  """A trace of which one row was changed, or two were swapped."""
  out = base.Trace(*(column.copy() for column in whole))
  row, other = rng.randrange(len(out.time)), rng.randrange(len(out.time))
  column = out[rng.randrange(5)]
  if rng.random() < 0.4:
    column[[row, other]] = column[[other, row]]
  else:
    column[row] = rng.choice([-1, 0, 1, 2, column[row] + 1])
  return out


def outcome(read, *args, **kwargs):
  try:
    return np.asarray(read(*args, **kwargs)).tolist()
  except trace.TraceError as error:
    return str(error)


@pytest.mark.parametrize("depth", [1, 2, 1.5, math.inf])
def test_columns_are_read_as_rows_are(depth):
  clock, refused = durations.heterogeneous(seed=2), 0
  for seed in range(70):
    rng = random.Random(seed)
    options = dict(depth=rng.randint(1, 2), fetch_every=rng.randint(1, 3))
    sizes = dict(workers=3, messages=rng.choice([2, 12]))
    whole = orders.asynchronous(clock, **sizes, **options)
    one = whole if seed % 5 == 0 else changed(whole, rng)
    at_once = outcome(orders.check, one, depth)
    rows = list(trace.events(one))
    assert at_once == outcome(orders.check, rows, depth)
    refused += isinstance(at_once, str)
    assert checking._is_valid(one, depth) <= (not isinstance(at_once, str))
    for every in (1, 2):
      expected = outcome(trace._staleness_by_rows, one, every)
      assert outcome(orders.staleness, one, every) == expected
  assert 20 < refused < 65


def test_rows_that_are_not_of_tickets_alone_are_read_one_by_one():
  rows = kit.trace("0,0,0,join", "0,0,0,send", "1,0,0,receive")
  assert trace.pair(rows) is None
  assert orders.check(rows) == 1
  assert orders.staleness(rows).tolist() == [0]
