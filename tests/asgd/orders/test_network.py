"""Networks: times by hand, queues, and where a server saturates."""

import itertools
import math
import re

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import base, orders
from asgd.orders import durations
from asgd.orders.network import Line, Links, Network, SharedLine, check
from asgd.orders.play import Play, Sizes, fixed
from asgd.orders.protocol import Rules

quick = settings(deadline=None, derandomize=True, max_examples=30)


def play(network, workers, messages, *, up=8.0, down=8.0, mean=4.0, **options):
  """Constant durations, and messages that are the same at each shard."""
  shards = network.shards
  order = orders.start(
    options.pop("name", "asynchronous"),
    durations.constant(mean),
    workers=workers,
    network=network,
    sizes=fixed([up / shards] * shards, [down / shards] * shards),
    **options,
  )
  order.until(messages)
  return order


def received(order):
  return [row.time for row in order.rows if row.action == base.RECEIVE]


# One worker.


def test_one_worker_waits_for_nobody():
  # Each way 1, and 8 bytes at 2 bytes a unit, the slower line: 5; 4 to
  # compute; 0.5 until the message is taken.
  network = Network(latency=1.0, up=4.0, down=8.0, port=2.0, service=0.5)
  order = play(network, 1, 3)
  assert received(order) == [14.5, 29.0, 43.5]
  assert [row.time for row in order.rows if row.action == base.SEND] == [
    *(0.0, 14.5, 29.0)
  ]
  use = order.links.use(order.now)
  assert use.waited == 0
  assert use.utilisation == 4 / 14.5  # of either way
  assert use.service == 0.5 / 14.5


@pytest.mark.parametrize(
  ("network", "time"),
  [
    (Network(), 4),
    (Network(latency=1.0), 6),
    (Network(up=4.0), 6),
    (Network(down=4.0), 6),
    (Network(port=4.0), 8),
    (Network(service=0.5), 4.5),
    (Network(up=2.0, port=4.0), 10),  # 4 up, 2 down, and not 4 + 2 up
    (Network(port=4.0, shards=2), 6),  # each has half of it
    (Network(up=4.0, shards=2), 6),  # the link of the worker is one
    (Network(service=0.5, shards=2), 4.5),  # both at the same time
  ],
)
@pytest.mark.parametrize("incast", ["queue", "share"])
def test_what_each_part_of_the_way_takes(network, time, incast):
  order = play(network._replace(incast=incast), 1, 2)
  assert received(order) == [time, 2 * time]
  assert order.links.use(order.now).waited == 0


def test_a_ticket_that_is_kept_takes_the_latency_alone():
  network = Network(latency=1.0, port=4.0)
  order = play(network, 1, 4, fetch_every=2)
  # With a ticket 3 + 4 + 3, without its parameters 1 + 4 + 3.
  assert received(order) == [10, 18, 28, 36]


def test_a_second_ticket_hides_the_way():
  # Of the tickets that came first both are there at 3 and 5. A message is on
  # its way, and the next ticket, while the other job is computed.
  network = Network(latency=1.0, port=4.0)
  order = play(network, 1, 6, mean=8.0, depth=2)
  times = np.diff(received(order))
  assert times.tolist() == [8.0] * 5


# Several workers, one shard.


def test_the_second_of_two_messages_that_meet_waits():
  network = Network(port=4.0)
  order = play(network, 2, 2, down=0.0)
  assert received(order) == [6, 8]
  assert order.links.use(order.now).waited == 1  # 0 and 2
  assert order.links.use(order.now).utilisation == 4 / 8


def test_two_messages_that_share_a_port_take_twice_as_long():
  network = Network(port=4.0, incast="share")
  order = play(network, 2, 2, down=0.0)
  assert received(order) == [8, 8]
  assert order.links.use(order.now).waited == 2


def test_slow_links_do_not_hold_up_the_port():
  # Each message takes its link 8, and the port 1: four of them meet there.
  network = Network(up=1.0, port=8.0)
  order = play(network, 4, 4, down=0.0)
  assert received(order) == [12, 13, 14, 15]
  assert order.links.use(order.now).waited == (0 + 1 + 2 + 3) / 4


def test_a_shard_takes_one_message_after_the_other():
  network = Network(service=1.5)
  order = play(network, 3, 3)
  assert received(order) == [5.5, 7.0, 8.5]
  assert order.links.use(order.now).service == 4.5 / 8.5


def test_a_round_waits_for_its_last_message():
  network = Network(port=4.0)
  order = play(network, 2, 4, name="bulk_synchronous", down=0.0)
  assert received(order) == [6, 8, 14, 16]


def test_messages_of_one_worker_do_not_overtake():
  # The first is of 16 bytes, the second of none.
  sizes = Sizes(
    lambda worker, seq: [16.0 * (seq == 0)], lambda worker, seq: [0.0]
  )
  streams = [itertools.repeat(1.0)]
  for incast in ("queue", "share"):
    network = Network(port=4.0, incast=incast)
    order = Play(Rules(depth=2), streams, network=network, sizes=sizes)
    order.until(2)
    assert received(order) == [5, 5]


# Saturation.


def rate(workers, shards=1, *, count=40):
  """Messages a unit of time, once all is settled."""
  network = Network(port=2.0, shards=shards)
  times = received(play(network, workers, count, down=0.0, mean=12.0))
  return (count // 2) / (times[-1] - times[-1 - count // 2])


def test_throughput_bends_where_bytes_and_bandwidth_say():
  # A message takes 12 and then the port for 8 / 2 = 4: one worker makes 1 / 16,
  # and no more than 1 / 4 pass. So they bend at N = 16 / 4.
  assert [rate(n) * 16 for n in (1, 2, 4)] == [1, 2, 4]
  assert [rate(n) * 16 for n in (5, 8)] == [4, 4]


def test_the_bend_moves_when_a_shard_is_added():
  # 12 and then 2 at each of two ports: 1 / 14 each, and bends at N = 14 / 2.
  assert [rate(n, 2, count=28) * 14 for n in (1, 7, 14)] == [1, 7, 7]


def test_a_port_that_is_saturated_is_always_busy():
  order = play(Network(port=2.0), 8, 400, down=0.0, mean=12.0)
  use = order.links.use(order.now)
  assert use.utilisation == 1600 / (12 + 1600)
  # Each comes 12 after it was received, and is received 8 x 4 after the last:
  # it waits 16. The first ones wait 0, 4, 8, ... 28.
  assert use.waited == pytest.approx((sum(range(0, 32, 4)) + 392 * 16) / 400)


# Equal to no network.


@pytest.mark.parametrize("incast", ["queue", "share"])
@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("asynchronous", {}),
    ("asynchronous", {"depth": 2, "fetch_every": 3}),
    ("stale_synchronous", {"bound": 1, "cache": True}),
    ("bulk_synchronous", {}),
    ("backup_workers", {"backup": 2}),
    ("backup_tasks", {"late": 1.2}),
    ("asynchronous", {"warm_start": 7}),
  ],
)
def test_a_network_without_limits_changes_no_bit(name, options, incast):
  for clock in (
    durations.heterogeneous(seed=1),
    durations.constant(slowdown=(1, 1.5, 2)),
  ):
    plain = orders.build(name, clock, workers=5, messages=60, **options)
    # So wide that it adds nothing to any time, but all the lines are passed.
    for network in (Network(), Network(up=1e300, shards=2, incast=incast)):
      order = orders.start(
        *(name, clock),
        workers=5,
        network=network,
        sizes=fixed([8.0] * network.shards, [8.0] * network.shards),
        **options,
      )
      order.until(60)
      kit.same(order.trace(), plain)


# Lines, by their definitions.


def test_parts_on_a_shared_line_by_hand():
  # The first alone until 2, then halves: the second is through at 4, having
  # got 1 of 2; the first has 3 - 2 - 1 = 0 left at 4, too.
  line = SharedLine()
  line.join(0.0, 3.0, "a")
  assert line.next_end() == (3.0, "a")
  line.join(2.0, 0.5, "b")
  assert line.next_end() == (3.0, "b")
  line.leave(3.0)
  assert line.next_end() == (3.5, "a")
  line.leave(3.5)
  assert line.next_end() is None
  assert line.busy_time(5.0) == 3.5


LENGTHS = st.lists(
  st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=12
)


@quick
@given(LENGTHS)
def test_no_line_idles_while_there_is_something_to_carry(parts):
  """Both kinds end at the same time, whatever comes when."""
  parts = sorted(parts)
  queue, shared = Line(), SharedLine()
  ends = []
  for number, (time, length) in enumerate(parts):
    while (due := shared.next_end()) and due[0] <= time:
      shared.leave(due[0])
      ends.append(due[0])
    queue.take(time, length)
    shared.join(time, length, number)
  while due := shared.next_end():
    shared.leave(due[0])
    ends.append(due[0])
  assert len(ends) == len(parts)
  assert ends == sorted(ends)
  assert ends[-1] == pytest.approx(queue.free_at)
  end = max(queue.free_at, ends[-1])
  total = sum(length for _, length in parts)
  assert queue.busy_time(end) == pytest.approx(total)
  assert shared.busy_time(end) == pytest.approx(total)


def test_a_line_was_busy_until_now_only():
  line = Line()
  line.take(1.0, 4.0)
  assert line.take(2.0, 4.0) == 5.0
  assert line.busy_time(3.0) == 2.0


# Errors.


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"latency": math.nan}, "latency must be 0 or more, not nan"),
    ({"latency": -1.0}, "latency must be 0 or more, not -1.0"),
    ({"service": math.inf}, "service must be 0 or more, not inf"),
    ({"port": 0}, "port must be a bandwidth above 0, .* not 0; leave it out"),
    ({"up": -2.0}, "up must be a bandwidth above 0, .* not -2.0"),
    ({"down": math.nan}, "down must be a bandwidth above 0, .* not nan"),
    ({"down": "fast"}, "down must be a bandwidth above 0, .* not 'fast'"),
    ({"shards": 0}, "shards must be a positive whole number, not 0"),
    ({"incast": "drop"}, "incast must be one of queue, share, not 'drop'"),
  ],
)
def test_a_network_out_of_range_is_refused(change, said):
  with pytest.raises(ValueError, match=f"^{said}"):
    check(Network()._replace(**change))
  with pytest.raises(ValueError, match=f"^{said}"):
    Links(Network()._replace(**change), workers=1)


def test_an_order_without_times_is_refused():
  with pytest.raises(ValueError, match="'fixed_delay' is an order that a"):
    orders.start("fixed_delay", durations.constant(), workers=2)
  with pytest.raises(ValueError, match=re.escape("unknown order 'sync'")):
    orders.start("sync", durations.constant(), workers=2)
