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
  """Returns the expected time of a step that waits for all workers. The unit is
  the mean time of a batch.

  It is E[max] of N gamma batch times, the integral of 1 - F(x)^N. `variation`
  is V of `asgd.orders.durations.gamma`, from 0 to 3.

  Example:
    >>> expected_slowest(1), round(expected_slowest(64), 2)
    (1.0, 1.25)
  """
  checks.integer("workers", workers)
  if not 0 <= variation <= 3:
    raise ValueError(f"variation must be from 0 to 3, not {variation!r}")
  if workers == 1 or not variation:
    return 1.0
  # Imported here: the import takes a quarter of the start of a command.
  from scipy import integrate, special

  shape = 1 / variation**2  # alpha of the gamma model, at a mean of 1

  def probability_later(x):
    """Returns the probability that a worker takes longer than x: 1 - F(x)^N."""
    late = special.gammaincc(shape, x * shape)  # 1 - F(x), of one worker
    # This is 1 - (1 - late)^N, but does not round small numbers to 0.
    return special.betainc(1, workers, late)

  # The end of the range, after which the integrand is 0 in float64.
  end = 2.0
  while probability_later(end) > 1e-15:
    end *= 2
  # Integrate in pieces: one quadrature over the whole range could miss the
  # times at which the integrand falls from 1 to 0.
  pieces = itertools.pairwise(np.linspace(0, end, 33))
  exact = {"epsabs": 1e-12, "epsrel": 1e-10}
  integrals = (
    integrate.quad(probability_later, *piece, **exact)[0] for piece in pieces
  )
  return float(sum(integrals))


def asynchronous_throughput(
  workers: int,
  *,
  compute: float,
  size: float,
  link: costs.LinkSpeed,
  shards: int,
) -> float:
  """Returns the messages per second of N workers that wait for the server only.

  It is the lesser of two rates. One is the rate of the workers: each worker
  computes, pushes S bytes and fetches S bytes. The other is the rate of the
  busiest link, of a worker that also has a shard: it carries S (N + P - 2) /
  (P N) bytes in each direction for a message.

  Args:
    workers: N.
    compute: mean seconds of a batch.
    size: S; with 0, messages take no time but the latency.
    link: the link of each worker.
    shards: P, on the first P workers. Raises ValueError for more than N.

  Example:
    >>> link = costs.link(1000.0)  # bytes per second
    >>> asynchronous_throughput(4, compute=0.5, size=100, link=link, shards=4)
    6.153846153846153
  """
  # Raises for shards that do not fit.
  costs.parameter_server(size, workers, shards=shards)
  checks.positive("compute", compute)
  # A worker sends no message to a shard on its own device.
  messages = 2 * (shards - int(shards == workers))
  cycle = compute + messages * (link.latency + size / shards / link.bandwidth)
  # Bytes on the busiest link for each message of a worker.
  busiest_nbytes = size / shards * ((workers + shards - 2) / workers)
  worker_rate = workers * (1 / cycle)
  if not busiest_nbytes:
    return worker_rate
  return min(worker_rate, link.bandwidth / busiest_nbytes)
