"""Costs of communication by formula agree with their papers.

That collectives move what their formulas say is in test_collectives.
"""

import itertools
import math

import kit

from asgd.parallel import costs


def test_collectives_by_their_formulas():
  size, n = 9600, 8
  assert costs.ring(size, n) == (14, 2 * 7 / 8 * size, 2 * 7 / 8 * size)
  assert costs.ring_reduce_scatter(size, n) == (7, 7 / 8 * size, 7 / 8 * size)
  assert costs.bidirectional_ring(size, n).bytes == 7 / 8 * size
  assert costs.recursive_doubling(size, n) == (3, 3 * size, 3 * size)
  assert costs.halving_doubling(size, n) == (6, 1.75 * size, 1.75 * size)
  assert costs.tree(size, n) == (6, 6 * size, 3 * size)
  # Six devices are four, and two that lend their part.
  assert costs.recursive_doubling(size, 6) == (4, 4 * size, 3 * size)
  near, far = costs.hierarchical(size, 4, 2)
  assert near.bytes == 2 * 3 / 4 * size
  assert far.bytes == 2 * 1 / 2 * size / 4
  for name, cost in costs.COSTS.items():
    assert cost(size, 1) == costs.FREE, name
  # Chunks hold whole elements: 10 of 4 bytes in 4 chunks of 3.
  assert costs.ring(40, 4, grain=4).bytes == 6 * 12


def test_a_parameter_server_beside_its_workers():
  size, n = 9600, 8
  # With a shard on each worker it is a ring's traffic.
  assert costs.parameter_server(size, n) == costs.ring(size, n)
  one = costs.parameter_server(size, n, shards=1)
  assert one == (14, 14 * size, 7 * size)


def test_seconds_are_latency_and_bytes():
  link = costs.link(100.0, 0.5)
  assert costs.seconds(costs.Cost(3, 400, 0), link) == 3 * 0.5 + 4
  small, large = 8, 8 << 20
  link = costs.link(1e9, 1e-5)

  def fastest(size):
    return min(
      ("ring", "recursive_doubling"),
      key=lambda name: costs.seconds(costs.COSTS[name](size, 64), link),
    )

  assert fastest(small) == "recursive_doubling"
  assert fastest(large) == "ring"
  far = costs.link(1e8, 1e-5)
  flat = costs.seconds(costs.ring(large, 64), far)
  inside, between = costs.hierarchical(large, 8, 8)
  levels = costs.seconds(inside, link) + costs.seconds(between, far)
  assert levels < flat / 4


def test_poseidons_rule():
  for workers, inputs, outputs in itertools.product((2, 9, 64), (64,), (96,)):
    bound = 2 * inputs * outputs / (workers * (inputs + outputs))
    most = math.floor(bound)
    if most:
      assert costs.prefers_factors(most, inputs, outputs, workers)
    assert not costs.prefers_factors(most + 1, inputs, outputs, workers)
  # Of a model: the large layer goes as factors, all else by the ring.
  cost = costs.hybrid([(512, 512), (8, 8)], 160, 16, 4)
  assert cost == costs.add(
    costs.ring(160 + 256, 4), costs.factors(16, 512, 512, 4)
  )


MISTAKES = {
  "bandwidth": (lambda: costs.link(0), "bandwidth must be a positive finite"),
  "latency": (lambda: costs.link(1, -1), "latency must be 0 or more"),
  "devices": (lambda: costs.ring(8, 0), "devices must be a positive whole"),
  "bytes": (lambda: costs.ring(-1, 2), "bytes must be 0 or more"),
  "shards": (
    lambda: costs.parameter_server(8, 2, shards=3),
    "3 shards do not fit on 2 workers",
  ),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
