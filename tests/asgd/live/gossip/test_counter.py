"""Numbers of jobs: each is assigned once, even if calls are lost or
repeated."""

from asgd.live.gossip.counter import JobCounter


def test_numbers_of_jobs_are_given_once_each():
  counter = JobCounter(5, taken=[0, 2])
  assert [counter.take(0, 0, 0), counter.take(1, 0, 0)] == [1, 3]
  counter.release(0, 0, begun=1, lost=[1])
  assert [counter.take(1, 0, ask) for ask in (1, 2, 3)] == [1, 4, None]


def test_a_call_that_is_made_twice_gets_one_number():
  counter = JobCounter(5)
  assert [counter.take(0, 0, 0), counter.take(0, 0, 0)] == [0, 0]
  assert counter.take(0, 0, 1) == 1
  assert counter.take(0, 0, 0) is None  # it comes late
  assert counter.take(1, 0, 0) == 2


def test_a_number_that_a_lost_peer_did_not_begin_is_given_again():
  counter = JobCounter(3)
  assert counter.take(0, 0, 0) == 0
  counter.release(0, 0, begun=0, lost=[])
  counter.release(0, 0, begun=0, lost=[])  # the driver asks again
  assert counter.take(0, 0, 0) is None  # of the incarnation before
  assert [counter.take(0, 1, ask) for ask in range(4)] == [0, 1, 2, None]


def test_who_asked_in_vain_asks_again():
  counter = JobCounter(1)
  assert counter.take(0, 0, 0) == 0
  assert counter.take(1, 0, 0) is None
  counter.release(0, 0, begun=1, lost=[0])
  assert counter.take(1, 0, 0) == 0
