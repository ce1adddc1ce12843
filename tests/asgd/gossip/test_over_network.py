"""Orders of peers over a network, against those without, and by hand."""

import numpy as np
import pytest

from asgd import base, orders
from asgd.gossip import orders as peer_orders
from asgd.gossip import topologies
from asgd.gossip.over_network import PeerNetwork
from asgd.orders import durations, trace
from asgd.orders.network import Network

CLOCK = durations.gamma(variation=0.5, seed=3)
INSTANT = Network()


def over(network, make, clock, topology, **options):
  """An order over a network, with messages of 8 bytes; and the links' use."""
  links = PeerNetwork(network, topology.workers, nbytes=8)
  found = make(clock, topology, links=links, **options)
  return found, links.use(float(found.time.max()))


@pytest.mark.parametrize("put_first", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_without_delays_rounds_are_those_of_an_order_without_a_network(
  put_first, every
):
  topology = topologies.ring(5)
  options = {"messages": 35, "put_first": put_first, "every": every}
  found, _ = over(INSTANT, peer_orders.rounds, CLOCK, topology, **options)
  orders.check(found)
  expected = peer_orders.rounds(CLOCK, topology, **options)
  # Rows at equal times are in another order.
  assert sorted(trace.events(found)) == sorted(trace.events(expected))


def test_without_delays_pairs_are_those_of_an_order_without_a_network():
  topology, options = topologies.ring(5), {"messages": 40, "seed": 2}
  found, _ = over(INSTANT, peer_orders.pairs, CLOCK, topology, **options)
  expected = peer_orders.pairs(CLOCK, topology, **options)
  assert list(trace.events(found)) == list(trace.events(expected))


def test_without_delays_arrivals_are_those_of_an_order_without_a_network():
  topology = topologies.full(4)
  found, _ = over(INSTANT, peer_orders.arrivals, CLOCK, topology, messages=40)
  orders.check(found)
  expected = peer_orders.arrivals(CLOCK, topology, messages=40)
  # Rows at equal times are in another order.
  assert sorted(trace.events(found)) == sorted(trace.events(expected))


def test_a_message_is_mixed_when_it_arrives_also_after_the_last_job():
  # Peer 0 sends at 1 and 2, and peer 1 takes at 1.75 and 2.75; peer 1, which
  # takes 9 for its job, ends none.
  found, _ = over(
    *(Network(latency=0.75), peer_orders.arrivals),
    *(durations.constant(slowdown=[1, 9]), topologies.full(2)),
    messages=2,
  )
  orders.check(found)
  assert times_of(found, base.PUT) == [1.0, 2.0]
  assert times_of(found, base.TAKE) == [1.75, 2.75]
  assert times_of(found, base.MIX) == [1.0, 1.75, 2.0, 2.75]


def times_of(found, action):
  return found.time[found.action == action].tolist()


def test_copies_of_a_message_follow_each_other_on_the_link_of_their_sender():
  # Each of three peers puts two copies at 1; a copy takes 2 on a link up, so
  # that the second begins at 3 and has arrived at 5.
  network = Network(up=4.0)
  clock, topology = durations.constant(), topologies.full(3)
  found, use = over(network, peer_orders.rounds, clock, topology, messages=6)
  orders.check(found)
  assert times_of(found, base.MIX) == [5.0] * 3 + [10.0] * 3
  assert use.waited == 0.0


def test_messages_wait_at_the_link_of_their_receiver():
  # Peer 0 of a star takes three messages, one after the other, 2 each.
  network = Network(down=4.0)
  clock, topology = durations.constant(), topologies.star(4)
  found, use = over(network, peer_orders.rounds, clock, topology, messages=4)
  assert times_of(found, base.MIX) == [3.0, 3.0, 3.0, 7.0]
  # Of the six messages the second and the third wait 2 and 4.
  assert use.waited == pytest.approx(1.0)
  assert use.utilisation == pytest.approx(6 / 7)


def test_a_message_put_before_a_job_travels_during_it():
  network = Network(latency=0.75)
  ends = [
    over(
      *(network, peer_orders.rounds, durations.constant(), topologies.ring(4)),
      messages=8,
      put_first=put_first,
    )[0].time[-1]
    for put_first in (True, False)
  ]
  np.testing.assert_allclose(ends, [2.0, 3.5])


def test_of_two_peers_that_meet_only_the_one_that_ended_its_job_waits():
  # Peer 1 takes 9, peer 0 1 and two ways of 2.
  clock = durations.constant(slowdown=[1, 9])
  found, _ = over(
    *(Network(latency=2.0), peer_orders.pairs, clock, topologies.full(2)),
    messages=3,
  )
  orders.check(found)
  received = found.action == base.RECEIVE
  assert found.time[received].tolist() == [5.0, 10.0, 13.0]
  assert found.worker[received].tolist() == [0, 0, 1]


def test_messages_that_no_peer_takes_do_not_use_links_after_the_last_round():
  # A message put at 1 takes 2.5, so the second round ends at 3.5. The third
  # round ends at 4.5 and puts a message, which would begin on the links down,
  # idle since 3.5, at 5.
  found, use = over(
    *(Network(latency=0.5, up=4.0, down=4.0), peer_orders.rounds),
    *(durations.constant(), topologies.full(2)),
    messages=6,
    every=2,
  )
  orders.check(found)
  assert times_of(found, base.MIX) == [3.5, 3.5]
  assert float(found.time.max()) == 4.5
  # A link down is busy from 1.5 to 3.5.
  assert use.utilisation == pytest.approx(2.0 / 4.5)
