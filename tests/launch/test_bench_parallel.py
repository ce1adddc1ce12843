"""The parallel benchmark, small: what is compared computes the same, and the
cost model is fitted to the numbers that it has."""

import jax
import numpy as np
import pytest

from asgd.parallel import collectives, costs
from launch.bench import parallel
from launch.bench.report import BenchReport


def test_a_link_is_found_again():
  link = costs.link(2e9, 3e-5)
  measured = [
    (cost, costs.seconds(cost, link))
    for cost in (parallel.cost("ring", x, 8) for x in (1, 64))
  ]
  assert parallel.fit(*measured) == pytest.approx(link, rel=1e-6)
  # Where a large one takes more than its share, or less than the small one, it
  # alone is right.
  (small, time), (large, longer) = measured
  for seconds in (9 * longer, time / 2):
    fitted = parallel.fit((small, time), (large, seconds))
    assert fitted.latency == 0
    assert costs.seconds(large, fitted) == pytest.approx(seconds)


def test_costs_of_all_that_are_measured():
  mb = 4_000_000
  ring = costs.ring(mb, 8)
  assert parallel.cost("ring", 4, 8) == ring
  # Two of a node, four nodes: as many bytes as a ring, in fewer messages.
  both = parallel.cost("hierarchical", 4, 8)
  assert (both.steps, both.bytes) == (2 * (1 + 3), ring.bytes)


def test_collectives_are_measured_and_told():
  # Two devices have no levels.
  assert set(parallel.shapes(2)) == (
    set(collectives.COLLECTIVES) - {"hierarchical"}
  )
  for name in parallel.shapes(2):
    times = parallel.measure(name, 2, 0.001, 2)
    assert times.shape == (2, 2, 2) and (times > 0).all()
    cells = parallel.cells(name, 2, 0.001, times, costs.link(1e3))
    *milliseconds, new, in_place = cells
    assert len(milliseconds) == 2 + 2
    if name == "psum":
      assert new is in_place is None  # it is the measure
    if name == "ring":
      # Two messages of half of 1,000 bytes, in milliseconds.
      assert milliseconds[2] == pytest.approx(1000)


def test_one_device_and_two_compute_the_same():
  one, two = parallel.tensor_steps(8, 4).values()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    *(one(), two()),
  )


def test_a_speed_is_named_after_its_baseline(monkeypatch):
  names = {"data_steps": "one device", "reductions": "all at the end"}
  for maker in ("data_steps", "tensor_steps", "reductions"):
    steps = {name: lambda: 0 for name in (names.get(maker, "one device"), "b")}
    monkeypatch.setattr(parallel, maker, lambda steps=steps: steps)
  monkeypatch.setattr(jax.config, "update", lambda *_: None)
  report = BenchReport()
  monkeypatch.setattr(report, "add_from", lambda *_: None)
  parallel.run(report, rounds=1)
  columns = [next(iter(row["measured"])) for row in report.rows]
  assert columns == ["speed / one device"] * 2 + ["speed / all at the end"]
