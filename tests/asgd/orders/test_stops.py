"""Orders in which computations are stopped."""

import itertools

import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.orders import durations, trace

CLOCKS = {
  "unequal": durations.heterogeneous(seed=1),
  "heavy tail": durations.pareto(seed=4, tail=1.5),
  "equal": durations.constant(),
}


def with_stops(clock, messages=80, workers=5, **options):
  counts = {"workers": workers, "messages": messages}
  made = orders.with_stops(clock, **counts, **options)
  assert orders.check(made) == workers
  assert (made.action == base.RECEIVE).sum() == messages
  assert made.action[-1] == base.RECEIVE
  return made


@pytest.mark.parametrize("name", CLOCKS)
def test_without_stops_it_is_the_asynchronous_order(name):
  clock = CLOCKS[name]
  expected = orders.asynchronous(clock, workers=5, messages=80)
  kit.same(with_stops(clock), expected)
  kit.same(with_stops(clock, stop_after=10**6, budget=1e9), expected)


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("name", CLOCKS)
def test_no_message_is_as_stale_as_the_limit(name, limit):
  made = with_stops(CLOCKS[name], stop_after=limit)
  assert orders.staleness(made).max() < limit
  # A job is stopped when, and only when, its delay reaches the limit.
  received, sent = 0, {}
  for row in trace.events(made):
    if row.action == base.SEND:
      sent[row.key] = received
      continue
    delay = received - sent.pop(row.key)
    assert (delay == limit) == (row.action == base.STOP)
    received += row.action == base.RECEIVE


@pytest.mark.parametrize("name", ["unequal", "heavy tail"])
def test_no_job_takes_longer_than_its_budget(name):
  budgets = [0.8, 1.0, 1.2, 1.5, 2.0]
  made = with_stops(CLOCKS[name], budget=budgets)
  started, stops = {}, 0
  times = [CLOCKS[name].stream(worker) for worker in range(5)]
  for row in trace.events(made):
    if row.action == base.SEND:
      started[row.key] = row.time, next(times[row.worker])
      continue
    start, length = started[row.key]
    budget = budgets[row.worker]
    assert row.time == start + min(length, budget)
    assert (length > budget) == (row.action == base.STOP)
    stops += row.action == base.STOP
  assert stops > 5


def test_a_stopped_worker_starts_the_next_job_at_once():
  made = with_stops(CLOCKS["unequal"], stop_after=2, budget=1.1)
  rows = list(trace.events(made))
  jobs = [row.job for row in rows if row.action == base.SEND]
  assert jobs == list(range(len(jobs)))
  for row, following in itertools.pairwise(rows):
    if row.action == base.STOP:
      assert following.time == row.time
      assert following.action in (base.SEND, base.STOP)
  # A file keeps the action.
  text = orders.dump(made)
  assert ",stop\n" in text
  kit.same(trace.load(text.splitlines(keepends=True)), made)


def test_a_job_that_takes_its_budget_is_not_stopped():
  made = with_stops(durations.constant(2.0), budget=2.0)
  assert not (made.action == base.STOP).any()


def test_a_shorter_order_is_the_beginning_of_a_longer_one():
  options = {"stop_after": 3, "budget": 1.2}
  short = with_stops(CLOCKS["unequal"], 20, **options)
  long = with_stops(CLOCKS["unequal"], 60, **options)
  for x, y in zip(short, long, strict=True):
    np.testing.assert_array_equal(x, y[: len(x)])


test_a_wrong_stop_is_refused = kit.refuses(
  [
    ({"stop_after": 0}, "stop_after must be a positive whole number"),
    ({"budget": 0.0}, "budget must be a positive finite number, not 0"),
    ({"budget": [1.0, 2.0]}, r"one for each of the 5 workers, not .*1.0, 2.0"),
    ({"budget": [1.0] * 4 + ["a"]}, "budget must be a positive finite"),
    ({"budget": 0.5}, "100,000 jobs in a row took longer .* make it larger"),
  ],
  lambda options: with_stops(CLOCKS["equal"], **options),
)
