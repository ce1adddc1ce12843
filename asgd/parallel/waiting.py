"""What waiting costs: expected times of synchronous and asynchronous steps.

A synchronous step takes as long as its slowest worker. Batch times follow the
gamma model of `asgd.orders.durations`, of which this has the expectations.

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
  """The expected time of a step that waits for all workers.

  E[max] of N gamma batch times, in mean times of a batch: the integral of
  1 - F(x)^N. `variation` is V, of `asgd.orders.durations.gamma`, from 0 to 3.

  Example:
    >>> expected_slowest(1), round(expected_slowest(64), 2)
    (1.0, 1.25)
  """
  checks.whole("workers", workers)
  if not 0 <= variation <= 3:
    raise ValueError(f"variation must be from 0 to 3, not {variation!r}")
  if workers == 1 or not variation:
    return 1.0
  # Imported where it is needed: it takes a quarter of a command's start.
  from scipy import integrate, special

  shape = 1 / variation**2

  def waiting(x):
    """Probability that some worker takes longer."""
    late = special.gammaincc(shape, x * shape)
    return special.betainc(1, workers, late)

  end = 2.0
  while waiting(end) > 1e-15:
    end *= 2
  # In pieces: the integrand falls from 1 to 0 within a few of them, which one
  # quadrature over the whole range would miss.
  edges = np.linspace(0, end, 33)
  pieces = (
    integrate.quad(waiting, a, b, epsabs=1e-12, epsrel=1e-10)[0]
    for a, b in itertools.pairwise(edges)
  )
  return float(sum(pieces))


def asynchronous_throughput(
  workers: int,
  *,
  compute: float,
  size: float,
  link: costs.LinkSpeed,
  shards: int,
) -> float:
  """Messages a second of N workers that wait for the server only.

  The lesser of two: what workers ask for, each of which computes, pushes S
  bytes and fetches S; and what the busiest link carries, that of a worker and
  shard: each way S (N + P - 2) / (P N) a message.

  Args:
    workers: N.
    compute: mean seconds of a batch; how batches vary changes nothing.
    size: S; 0 is free.
    link: of the workers.
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
  busiest = size / shards * ((workers + shards - 2) / workers)
  asked = workers * (1 / cycle)
  return min(asked, link.bandwidth / busiest) if busiest else asked
