"""Steps of a model that is divided among machines: times by hand."""

import itertools

import pytest

from asgd.orders import phases
from asgd.orders.network import Network
from asgd.orders.phases import Phase

# In 2 operations a second, and 4 bytes a second.
NETWORK = Network(latency=0.5, up=4.0, port=4.0)


def seconds(*steps, network=NETWORK, **options):
  return phases.step_seconds(steps, network, flops=2.0, **options)


def test_a_machine_waits_for_what_it_is_sent_and_for_nothing_else():
  # Machine 1 has computed at 1, and its 8 bytes have come at 1 + 0.5 + 2; what
  # machine 0 has computed at 3 has come at 5.5. A second goes on top.
  swap = Phase([6, 2], [{1: 8}, {0: 8}])
  assert seconds(swap, Phase([2, 2], [{}, {}])) == 6.5
  # Machine 0 begins at 3.5 and is through at 7.5; machine 1 still at 6.5.
  assert seconds(swap, Phase([8, 2], [{}, {}])) == 7.5
  # Machine 1 is sent nothing, and is through with both at 2.
  alone = Phase([6, 2], [{}, {0: 8}])
  assert seconds(alone, Phase([2, 2], [{}, {}])) == 4.5


def test_messages_wait_for_each_other_where_they_begin_and_where_they_meet():
  network = NETWORK._replace(latency=0.0)
  meet = Phase([2, 2, 2], [{}, {0: 8}, {0: 8}])
  assert seconds(meet, network=network) == 1 + 2 + 2
  # Each is taken in 3 once all of it has come, the second after the first.
  slow = network._replace(service=3.0)
  assert seconds(meet, network=slow) == 1 + 2 + 3 + 3
  begin = Phase([2, 2, 2], [{1: 8, 2: 8}, {}, {}])
  assert seconds(begin, network=network) == 1 + 2 + 2
  fair = network._replace(incast="share")
  assert seconds(meet, network=fair) == 1 + 4


@pytest.mark.parametrize("machines", [2, 5, 8])
def test_machines_that_send_to_all_others_meet_nobody(machines):
  everyone = [
    {to: 8 for to in range(machines) if to != own} for own in range(machines)
  ]
  step = Phase([2] * machines, everyone)
  assert seconds(step) == 1 + 0.5 + 2 * (machines - 1)


def test_slow_machines_by_their_factors():
  swap = Phase([2, 2], [{1: 8}, {0: 8}])
  last = Phase([2, 2], [{}, {}])
  assert seconds(swap, last, factors=[[1, 1], [1, 1]]) == 1 + 2.5 + 1
  # The message of machine 1 comes at 2 + 2.5, and machine 0 takes 3 from there.
  assert seconds(swap, last, factors=[[1, 2], [3, 1]]) == 2 + 2.5 + 3


def test_a_step_takes_no_longer_than_all_of_it_in_turn():
  swap, network = Phase([6, 2], [{1: 8}, {0: 16}]), NETWORK._replace(service=1)
  most = phases.most_seconds([swap, swap], network, flops=2.0)
  assert most == 2 * (8 / 2 + 2 * 1.5 + 2 * 24 / 4)
  assert seconds(swap, swap, network=network) < most


def clock(**options):
  swap = Phase([6, 2], [{1: 8}, {0: 8}])
  return phases.partitioned([swap], NETWORK, flops=2.0, **options)


def test_times_of_jobs_are_in_steps_of_one_machine():
  alone = 8 / 2
  stream = clock(mean=3.0, variation=0.0).stream(0)
  assert [next(stream) for _ in range(2)] == [3.0 * 5.5 / alone] * 2

  def times(worker, seed):
    return list(itertools.islice(clock(seed=seed).stream(worker), 3))

  assert times(0, 1) == times(0, 1)
  drawn = {*times(0, 1), *times(1, 1), *times(0, 2)}
  assert len(drawn) == 9
  assert 0.8 < min(drawn) / (5.5 / alone) < max(drawn) / (5.5 / alone) < 1.25


@pytest.mark.parametrize(
  ("steps", "flops", "match"),
  [
    ([], 1.0, "at least one phase"),
    ([Phase([], [])], 1.0, "one phase and one machine"),
    ([Phase([1], [{}])], 0.0, "flops must be a positive"),
    ([Phase([1], [{}]), Phase([1, 1], [{}])], 1.0, "phase 1 .*not of 2 and 1"),
    ([Phase([-1], [{}])], 1.0, "flops of phase 0"),
    ([Phase([1, 1], [{1: -8}, {}])], 1.0, "bytes of phase 0"),
    ([Phase([1, 1], [{0: 8}, {}])], 1.0, "machine 0 of 2 cannot send to 0"),
    ([Phase([1, 1], [{}, {2: 8}])], 1.0, "machine 1 of 2 cannot send to 2"),
    ([Phase([0], [{}])], 1.0, "no operations"),
  ],
)
def test_phases_that_cannot_be_are_refused(steps, flops, match):
  with pytest.raises(ValueError, match=match):
    phases.partitioned(steps, NETWORK, flops=flops)
