"""Orders of shards that are out of step."""

import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.orders import durations, protocol, shards
from asgd.orders.network import Network

SMALL = {"workers": 2, "messages": 3, "shards": 2}
IN_STEP = {
  "asynchronous": ("asynchronous", {}),
  "ahead": ("stale_synchronous", {"bound": 2, "cache": True, "depth": 2}),
  "kept": ("asynchronous", {"fetch_every": 3, "warm_start": 4}),
}


@pytest.mark.parametrize("label", IN_STEP)
def test_shards_in_step_have_the_order_of_one_server(label):
  name, options = IN_STEP[label]
  clock = durations.constant(slowdown=(1, 1, 2))  # with ties
  counts = {"workers": 4, "messages": 25}
  one = orders.build(name, clock, **counts, **options)
  rules = protocol.Rules(**options)
  for trace in shards.out_of_step(rules, clock, **counts, shards=3):
    assert kit.steps(trace) == kit.steps(one)


def test_shards_out_of_step_by_hand():
  # Worker 0 is heard after 0 and 3, worker 1 after 1 and 0.
  ways = durations.Durations(lambda way: iter([[0.0, 3, 1, 0][way]] * 9))
  lead, other = shards.out_of_step(
    protocol.Rules(), durations.constant(), ways, **SMALL
  )
  assert kit.steps(lead) == [
    "0.0  send 0:0  send 1:1",
    # receive 1:1: its ticket was there at once; its way is 1
    "2.0  receive 1:1  send 1:2",
    # receive 0:0: its ticket came at 3
    "4.0  receive 0:0  send 0:3  receive 1:2",
  ]
  assert kit.steps(other) == [
    "0.0  send 1:1",
    "1.0  receive 1:1",
    "2.0  send 1:2",
    # send 0:0: of one version more than at the lead
    "3.0  send 0:0  receive 1:2",
    "7.0  receive 0:0  send 0:3",
  ]
  assert shards.spreads([lead, other]).tolist() == [0, 1, 0]


def check_same_messages(traces, *, depth, workers, messages):
  """Asserts that shards' traces are valid, and receive the same messages."""
  sets = []
  for trace in traces:
    assert orders.check(trace, depth=depth) == workers
    ends = trace.action == base.RECEIVE
    assert ends.sum() == messages
    sets.append(set(zip(trace.worker[ends], trace.seq[ends], strict=True)))
  assert all(keys == sets[0] for keys in sets)


def test_what_shards_out_of_step_do_can_be_obeyed():
  rules = protocol.Rules(depth=2, fetch_every=2)
  ways = durations.heterogeneous(0.7, seed=5)
  clock, counts = durations.homogeneous(), {"workers": 3, "messages": 40}
  traces = shards.out_of_step(rules, clock, ways, shards=4, **counts)
  check_same_messages(traces, depth=2, **counts)
  assert shards.spreads(traces).max() > 0
  assert not np.array_equal(traces[0].worker, traces[1].worker)


def test_rounds_are_not_for_shards_out_of_step():
  rules, clock = protocol.Rules(round=2), durations.constant()
  with pytest.raises(ValueError, match="rounds of 2 messages need shards"):
    shards.out_of_step(rules, clock, **SMALL)


# Over a network.

NETWORK = Network(latency=0.5, port=4.0, service=0.25, shards=2)


def test_one_worker_and_two_shards_over_a_network_by_hand():
  (lead, other), use = shards.over_network(
    protocol.Rules(), durations.constant(2.0), NETWORK,
    nbytes=(8, 4), workers=1, messages=2,
  )
  # The lead's part is 8 / 4 on the port. The request takes 0.5 + 0.25, the
  # other shard's part 0.5 + 4 / 4.
  ticket = 2.0 + 0.5
  ask, part = 0.75, 1.5
  end = ticket + ask + part + 2.0
  received = end + 0.5 + 2.0 + 0.25  # by the lead; the other shard is faster
  assert lead.time.tolist() == [0.0, received, received, 2 * received]
  there = ticket + ask, end + 0.5 + 1.0 + 0.25
  assert other.time.tolist() == [*there, *(received + t for t in there)]
  assert use.waited == 0.0
  assert use.service == pytest.approx(2 * (2 * 0.25) / (2 * received))


@pytest.mark.parametrize("options", [{}, {"depth": 2, "fetch_every": 2}])
@pytest.mark.parametrize("incast", ["queue", "share"])
def test_shards_over_a_network_can_be_obeyed(options, incast):
  network = NETWORK._replace(up=64.0, shards=3, incast=incast)
  counts = {"workers": 4, "messages": 40}
  traces, use = shards.over_network(
    protocol.Rules(**options), durations.homogeneous(), network,
    nbytes=(8, 2, 0.5), **counts,
  )
  check_same_messages(traces, depth=8, **counts)
  assert shards.spreads(traces).max() > 0
  assert use.waited > 0 and 0 < use.utilisation <= 1


def test_jobs_in_flight_at_the_end_do_not_count_as_use():
  traces, use = shards.over_network(
    protocol.Rules(), durations.constant(slowdown=[1, 1000]),
    Network(latency=0.1, port=8, service=0.05, shards=2),
    nbytes=(8, 8), workers=2, messages=10,
  )
  assert traces[0].worker.tolist().count(1) == 1  # its ticket alone
  assert 0 < use.service < use.utilisation <= 1


def test_a_network_without_limits_has_the_order_of_one_server():
  clock = durations.homogeneous(seed=1)  # no ties
  counts = {"workers": 4, "messages": 25}
  one = orders.build("asynchronous", clock, **counts)
  wide = Network(up=1e30, shards=3)
  traces, _ = shards.over_network(
    protocol.Rules(), clock, wide, nbytes=(1, 1, 1), **counts
  )
  for trace in traces:
    assert kit.steps(trace) == kit.steps(one)
