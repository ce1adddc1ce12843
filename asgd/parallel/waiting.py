"""Expected times of synchronous and asynchronous steps.

A synchronous step takes as long as its slowest worker. Batch times follow the
gamma model of `asgd.orders.durations`.

Index letters:
  N  workers
  P  shards of a parameter server
  S  bytes of a gradient, and of the parameters

Reference:
  Ali et al., "Task execution time modeling for heterogeneous computing
  systems", HCW 2000: the gamma model.
"""

import itertools

import numpy as np

from asgd import checks
from asgd.parallel import costs


def expected_slowest(workers: int, *, variation: float = 0.1) -> float:
  """Returns the expected time of a step that waits for all workers, in mean
  times of a batch: E[max] of N gamma batch times, the integral of 1 - F(x)^N.
  `variation` is V of `asgd.orders.durations.gamma`, from 0 to 3.

  Example:
    >>> expected_slowest(1), round(expected_slowest(64), 2)
    (1.0, 1.25)
  """
  checks.whole("workers", workers)
  if not 0 <= variation <= 3:
    raise ValueError(f"variation must be from 0 to 3, not {variation!r}")
  if workers == 1 or not variation:
    return 1.0
  # Imported here: it takes a quarter of a command's start.
  from scipy import integrate, special

  shape = 1 / variation**2  # alpha of the gamma model, at a mean of 1

  def waiting(x):
    """Probability that some worker takes longer than x: 1 - F(x)^N."""
    late = special.gammaincc(shape, x * shape)  # 1 - F(x), of one worker
    # As 1 - (1 - late)^N, which would lose small numbers to rounding.
    return special.betainc(1, workers, late)

  # The end of the range: behind it the integrand is 0 in float64.
  end = 2.0
  while waiting(end) > 1e-15:
    end *= 2
  # In pieces: one quadrature over the whole range would miss where the
  # integrand falls from 1 to 0.
  pieces = itertools.pairwise(np.linspace(0, end, 33))
  exact = {"epsabs": 1e-12, "epsrel": 1e-10}
  return float(sum(integrate.quad(waiting, *ab, **exact)[0] for ab in pieces))


def asynchronous_throughput(
  workers: int,
  *,
  compute: float,
  size: float,
  link: costs.LinkSpeed,
  shards: int,
) -> float:
  """Returns the messages a second of N workers that wait for the server only.

  It is the lesser of two rates: that of the workers, each of which computes,
  pushes S bytes and fetches S; and that of the busiest link, between a worker
  and a shard, which carries S (N + P - 2) / (P N) each way for a message.

  Args:
    workers: N.
    compute: mean seconds of a batch.
    size: S; 0 is free.
    link: the workers' links.
    shards: P, which are on the first P workers; ValueError for more than N.

  Example:
    >>> link = costs.link(1000.0)  # bytes a second
    >>> asynchronous_throughput(4, compute=0.5, size=100, link=link, shards=4)
    6.153846153846153
  """
  # Raises for shards that do not fit.
  costs.parameter_server(size, workers, shards=shards)
  checks.positive("compute", compute)
  # A worker's slice for the shard on its own device is no message.
  messages = 2 * (shards - int(shards == workers))
  cycle = compute + messages * (link.latency + size / shards / link.bandwidth)
  # Bytes on the busiest link for each message of a worker.
  busiest = size / shards * ((workers + shards - 2) / workers)
  demand = workers * (1 / cycle)
  return min(demand, link.bandwidth / busiest) if busiest else demand
