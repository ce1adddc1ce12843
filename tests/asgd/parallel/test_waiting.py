"""Expected times of steps agree with drawn durations and closed forms."""

import itertools

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
  times = np.sort(drawn(8, variation=variation), axis=1)
  for wait_for in (1, 6, 8):
    found = times[:, wait_for - 1]
    error = found.std() / len(found) ** 0.5
    wanted = waiting.expected_slowest(8, variation=variation, wait_for=wait_for)
    assert abs(found.mean() - wanted) < 4 * error


def test_machines_that_differ():
  # Clusters of 4 machines; a batch of each.
  times = drawn(8000, 1, machine_variation=0.6).reshape(-1, 4).max(1)
  wanted = waiting.expected_slowest(4, machine_variation=0.6)
  assert abs(times.mean() - wanted) < 4 * times.std() / len(times) ** 0.5
  assert wanted > 1.4 * waiting.expected_slowest(4)


def test_the_slowest_by_hand():
  # V = 1 is the exponential: the harmonic numbers.
  for workers in (2, 5):
    harmonic = sum(1 / i for i in range(1, workers + 1))
    found = waiting.expected_slowest(workers, variation=1.0)
    assert found == pytest.approx(harmonic, rel=1e-9)
  # The second of five: 1/5 + 1/4.
  found = waiting.expected_slowest(5, variation=1.0, wait_for=2)
  assert found == pytest.approx(0.45, rel=1e-9)
  assert waiting.expected_slowest(9, variation=0) == 1.0


def test_asynchronous_workers_wait_for_links_only():
  assert waiting.asynchronous_throughput(8, compute=0.5) == 16
  # 100 bytes there and back at 1000 bytes a second, and 2 messages of 0.05 s.
  link = costs.link(1000.0, 0.05)
  apart = dict(compute=0.5, size=100, shards=1, colocated=False, link=link)
  assert waiting.asynchronous_throughput(2, **apart) == pytest.approx(2 / 0.8)
  # One link carries 10 messages a second, each way.
  assert waiting.asynchronous_throughput(99, **apart) == 10
  # With shards on all workers, a device sends 2 (N - 1) / N S for N messages.
  found = waiting.asynchronous_throughput(4, compute=1e-9, size=100, link=link)
  cycle = 1e-9 + 6 * (0.05 + 25 / 1000)
  assert found == pytest.approx(min(4 / cycle, 4 * 1000 / 150))
  # Those of unequal machines are more, by 1 / (1 - V_m^2).
  found = waiting.asynchronous_throughput(8, compute=0.5, machine_variation=0.6)
  assert found == pytest.approx(16 / (1 - 0.36), rel=1e-6)


MISTAKES = {
  "wait_for": (
    lambda: waiting.expected_slowest(2, wait_for=3),
    "wait_for 3 of 2 workers",
  ),
  "variation": (
    lambda: waiting.expected_slowest(2, variation=-0.1),
    "variation must be from 0 to 3",
  ),
  "machines": (
    lambda: waiting.asynchronous_throughput(2, compute=1, machine_variation=1),
    "machine_variation must be from 0 to below 1",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  call, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    call()
