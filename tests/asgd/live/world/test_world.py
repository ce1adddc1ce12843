"""Live runs in a simulated world: whatever is done to them, they come to what
their traces say; and what was wrong once would be found again."""

import collections

import pytest

from asgd.live.world import explore, scenario
from asgd.live.world.scheduler import Hung, Scheduler

SEEDS = 200


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
  """What is compiled is compiled quickly."""


def test_seeds_come_to_what_their_traces_say():
  injected = collections.Counter()
  for outcome in explore.run_seeds(range(SEEDS)):
    assert not outcome.error, explore.explain(outcome)
    injected.update(outcome.injected)
  assert set(injected) == set(scenario.KINDS)  # each of them came


def test_a_seed_is_the_same_run_again():
  first, again = (explore.run_seed(11) for _ in range(2))
  assert first == again
  assert first.steps > 100


def test_processes_that_wait_for_each_other_are_found():
  scheduler = Scheduler(0)
  scheduler.start("one", lambda: scheduler.wait(lambda: False, None))
  with pytest.raises(Hung, match="all wait for each other: one"):
    scheduler.run(lambda: False, 10.0, 1000)
  scheduler.close()
  scheduler.start("two", lambda: scheduler.sleep(100.0))
  with pytest.raises(Hung, match="still running after 10 s"):
    scheduler.run(lambda: False, 10.0, 1000)
  scheduler.close()
