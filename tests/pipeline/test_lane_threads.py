"""Lanes make progress whatever their tasks wait for, on few threads or many."""

import threading

import jax.numpy as jnp
import pytest

from asgd.pipeline.lane_threads import LaneInbox, LaneThreads, Stop


def run_lanes(scripts, inboxes=None):
  """Obeys scripts, lane -> steps: a key to wait for, or a function that is
  given the threads. Returns what the lanes have done, in its order."""
  steps = {lane: list(script) for lane, script in scripts.items()}
  done = []

  def run_lane(lane):
    while steps[lane]:
      step = steps[lane][0]
      if callable(step):
        step(threads)
      elif not threads.has(lane, [step]):
        return False
      done.append((lane, steps[lane].pop(0)))
    return True

  threads = LaneThreads(run_lane, scripts)
  threads.run(inboxes or {})
  return threads, done


def give(lane, *key):
  return lambda threads: threads.put(lane, key, None)


def test_lanes_take_turns_at_what_they_give_one_another():
  count = 50
  there = [s for i in range(count) for s in (give(1, "x", i), ("g", i))]
  back = [s for i in range(count) for s in (("x", i), give(0, "g", i))]
  _, done = run_lanes({0: there, 1: back})
  keys = [step for _, step in done if isinstance(step, tuple)]
  assert keys == [(kind, i) for i in range(count) for kind in "xg"]


def test_tasks_may_wait_for_one_another():
  """Each lane then gets a separate thread."""
  meeting = threading.Barrier(4, timeout=60)
  _, done = run_lanes(dict.fromkeys(range(4), [lambda _: meeting.wait()]))
  assert len(done) == 4


def test_an_instruction_may_wait_in_its_middle():
  def meet(lane, other):
    def step(threads):
      threads.put(other, ("n", lane), lane)
      assert threads.wait(lane, ("n", other)) == other

    return step

  threads, done = run_lanes({0: [meet(0, 1)], 1: [meet(1, 0)]})
  assert len(done) == 2
  assert threads.boxes == {0: {}, 1: {}}


def test_entries_of_other_processes_arrive_before_and_during_a_run():
  inbox = LaneInbox()
  inbox.put((("x", 0), 1))
  later = threading.Thread(target=inbox.put, args=((("x", 1), 2),))
  script = [("x", 0), lambda _: later.start(), ("x", 1)]
  threads, done = run_lanes({0: script}, {0: inbox})
  assert len(done) == 3
  assert threads.boxes == {0: {("x", 0): 1, ("x", 1): 2}}
  inbox.put((("x", 2), 3))  # of the next run
  assert inbox.take() == [(("x", 2), 3)]


def test_a_stop_ends_lanes_that_wait():
  inbox = LaneInbox()
  found = []
  script = [
    lambda _: threading.Thread(target=inbox.put, args=(Stop,)).start(),
    lambda threads: found.append(threads.wait(0, ("n", 1))),
  ]
  _, done = run_lanes({0: script, 1: [("x", 0)]}, {0: inbox})
  assert found == [None]
  assert all(lane == 0 for lane, _ in done)


@pytest.mark.parametrize("value", [jnp.ones(3), [], {"a": jnp.zeros(())}])
def test_a_value_is_waited_for(value):
  _, done = run_lanes({0: [lambda threads: threads.settle(value)]})
  assert len(done) == 1
