"""Expected times of steps agree with drawn durations and closed forms."""

import itertools

import kit
import numpy as np
import pytest

from asgd.orders import durations
from asgd.parallel import costs, waiting


def drawn(workers, steps=4000, *, seed=3, **options):
  """Times of batches: float[steps, workers]."""
  made = durations.gamma(seed=seed, **options)
  return np.stack(
    [
      np.fromiter(itertools.islice(made.stream(worker), steps), float)
      for worker in range(workers)
    ],
    axis=1,
  )


@pytest.mark.parametrize("variation", [0.1, 0.7])
def test_the_slowest_is_that_of_drawn_durations(variation):
  times = drawn(8, variation=variation).max(1)
  wanted = waiting.expected_slowest(8, variation=variation)
  assert abs(times.mean() - wanted) < 4 * times.std() / len(times) ** 0.5


def test_the_slowest_by_hand():
  # V = 1 is the exponential: the harmonic numbers.
  for workers in (2, 5):
    harmonic = sum(1 / i for i in range(1, workers + 1))
    found = waiting.expected_slowest(workers, variation=1.0)
    assert found == pytest.approx(harmonic, rel=1e-9)
  assert waiting.expected_slowest(9, variation=0) == 1.0


def test_asynchronous_workers_wait_for_links_only():
  link = costs.link(1000.0, 0.05)

  def found(workers, compute, size, shards):
    return waiting.asynchronous_throughput(
      workers, compute=compute, size=size, shards=shards, link=link
    )

  # 100 bytes there and back at 1000 bytes a second, and 2 messages of 0.05 s.
  assert found(2, 0.5, 100, 1) == pytest.approx(2 / 0.8)
  assert found(2, 0.5, 0, 1) == pytest.approx(2 / 0.6)
  # The shard's link carries 98 of 99 workers' 10 messages a second, each way.
  assert found(99, 0.5, 100, 1) == pytest.approx(10 * 99 / 98)
  # With shards on all workers, a device sends 2 (N - 1) / N S for N messages.
  cycle = 1e-9 + 6 * (0.05 + 25 / 1000)
  assert found(4, 1e-9, 100, 4) == pytest.approx(min(4 / cycle, 4 * 1000 / 150))


MISTAKES = {
  "variation": (
    lambda: waiting.expected_slowest(2, variation=-0.1),
    "variation must be from 0 to 3",
  ),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
