"""The parallel benchmark, small: what is compared does the same, and the cost
model is fitted to the numbers that it has."""

import jax
import numpy as np
import pytest

from asgd.parallel import collectives, costs
from launch import bench_parallel


def test_a_link_is_found_again():
  link = costs.link(2e9, 3e-5)
  known = [
    (cost, costs.seconds(cost, link))
    for cost in (bench_parallel.cost("ring", x, 8) for x in (1, 64))
  ]
  found = bench_parallel.fit(*known)
  assert found == pytest.approx(link, rel=1e-6)
  # Where a large one takes more than its share, it alone is right.
  (small, time), (large, longer) = known
  found = bench_parallel.fit((small, time), (large, 9 * longer))
  assert found.latency == 0
  assert costs.seconds(large, found) == pytest.approx(9 * longer)


def test_costs_of_all_that_are_measured():
  mb = 4_000_000
  ring = costs.ring(mb, 8)
  assert bench_parallel.cost("ring", 4, 8) == ring
  # Two of a node, four nodes: as many bytes as a ring, in fewer messages.
  both = bench_parallel.cost("hierarchical", 4, 8)
  assert (both.steps, both.bytes) == (2 * (1 + 3), ring.bytes)


def test_collectives_are_measured_and_told():
  found = bench_parallel.measure(2, (0.001,), 2)
  # Two devices have no levels.
  names = set(collectives.COLLECTIVES) - {"hierarchical"}
  assert {name for name, _ in found} == names
  assert all(len(each) == 2 for times in found.values() for each in times)
  said = bench_parallel.tabulate(found, 2, costs.link(1e3)).splitlines()
  assert len(said) == 2 + len(found)
  ring = next(line for line in said if " ring " in line).split()
  # Two messages of half of 1,000 bytes, in milliseconds.
  assert float(ring[-2]) == pytest.approx(1000)


def test_one_device_and_two_compute_the_same():
  one, two = bench_parallel.tensor_steps(8, 4).values()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    *(one(), two()),
  )


def test_all_take_turns():
  order = []
  found = bench_parallel.take_turns(
    {name: lambda name=name: order.append(name) for name in "ab"}, 2, calls=2
  )
  assert "".join(order) == "aabb" * 3  # the first is not counted
  assert {name: each.shape for name, each in found.items()} == {
    "a": (2,),
    "b": (2,),
  }
