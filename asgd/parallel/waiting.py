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
import math

import numpy as np
import scipy.integrate
import scipy.special
import scipy.stats

from asgd import checks
from asgd.parallel import costs

_CELLS = 2000  # into which the means of machines are put


def _slower(variation, machine_variation):
  """Returns x -> probability that a batch takes longer, of mean 1."""
  shape = 1 / variation**2
  if not machine_variation:
    return lambda x: scipy.special.gammaincc(shape, x * shape)
  machine = 1 / machine_variation**2
  last = scipy.special.gammainccinv(machine, 1e-16) / machine
  edges = np.append(np.linspace(0, last, _CELLS), np.inf)
  # The probability of each cell, and the mean of the machines in it.
  weights = np.diff(scipy.special.gammainc(machine, edges * machine))
  moments = np.diff(scipy.special.gammainc(machine + 1, edges * machine))
  cells = (weights > 0) & (moments > 0)
  weights, means = weights[cells], moments[cells] / weights[cells]
  return lambda x: scipy.special.gammaincc(shape, x / means * shape) @ weights


def expected_slowest(
  workers: int,
  *,
  variation: float = 0.1,
  machine_variation: float = 0.0,
  wait_for: int | None = None,
) -> float:
  """The expected time of a step that waits for workers, in a gamma cluster.

  In mean times of a batch. E[max] of N batch times for all of them: the
  integral of 1 - F(x)^N. If machines differ, the expectation over clusters.

  Args:
    workers: N.
    variation: V, of `asgd.orders.durations.gamma`; 0 is none.
    machine_variation: V_m, of the same.
    wait_for: K, the step ends with the K-th fastest, and the others are backup
      workers; None is N.

  Example:
    >>> expected_slowest(1), round(expected_slowest(64), 2)
    (1.0, 1.25)
  """
  wait_for = workers if wait_for is None else wait_for
  checks.whole("workers", workers)
  checks.whole("wait_for", wait_for)
  if wait_for > workers:
    raise ValueError(f"wait_for {wait_for} of {workers} workers: ask for fewer")
  variations = {"variation": variation, "machine_variation": machine_variation}
  for name, value in variations.items():
    if not 0 <= value <= 3:
      raise ValueError(f"{name} must be from 0 to 3, not {value!r}")
  if workers == 1 or not (variation or machine_variation):
    return 1.0
  if not variation:
    variation, machine_variation = machine_variation, 0.0
  slower = _slower(variation, machine_variation)

  def waiting(x):
    """Probability that fewer than K have ended."""
    late = slower(x)
    return scipy.special.betainc(workers - wait_for + 1, wait_for, late)

  end = 2.0
  while waiting(end) > 1e-15:
    end *= 2
  # In pieces: the integrand falls from 1 to 0 within a few of them, which one
  # quadrature over the whole range would miss.
  edges = np.linspace(0, end, 33)
  return float(_integrate(waiting, edges, epsabs=1e-12, epsrel=1e-10))


def _integrate(function, edges, **options):
  """Adds up the integrals between edges."""
  return sum(
    scipy.integrate.quad(function, a, b, **options)[0]
    for a, b in itertools.pairwise(edges)
  )


def asynchronous_throughput(
  workers: int,
  *,
  compute: float,
  size: float = 0.0,
  link: costs.LinkSpeed | None = None,
  shards: int | None = None,
  colocated: bool = True,
  machine_variation: float = 0.0,
) -> float:
  """Messages a second of workers that wait for the server only.

  The lesser of two: what workers ask for, each of which computes, pushes S
  bytes and fetches S; and what the busiest link carries, each way S / P a
  message, or S (N + P - 2) / (P N) if it is a shard's and a worker's.

  Args:
    workers: N.
    compute: mean seconds of a batch; how batches vary changes nothing.
    size: S; 0 is free.
    link: of workers and shards; None is free.
    shards: P; None is N.
    colocated: the shards are on the first P workers.
    machine_variation: V_m, below 1: beyond, the expected speed of a machine is
      infinite. Fast machines send more than slow ones less.

  Example:
    >>> asynchronous_throughput(8, compute=0.5)
    16.0
  """
  shards = workers if shards is None else shards
  # Raises for shards that do not fit.
  costs.parameter_server(size, workers, shards=shards, colocated=colocated)
  if not 0 <= machine_variation < 1:
    raise ValueError(
      f"machine_variation must be from 0 to below 1, not {machine_variation!r}"
    )
  checks.positive("compute", compute)
  waiting, most = 0.0, math.inf
  if link is not None:
    # A worker's slice for the shard on its own device is no message.
    messages = 2 * (shards - int(colocated and shards == workers))
    waiting = messages * (link.latency + size / shards / link.bandwidth)
    busiest = size / shards
    if colocated:
      busiest *= (workers + shards - 2) / workers
    most = link.bandwidth / busiest if busiest else math.inf
  return min(workers * _rate(compute, waiting, machine_variation), most)


def _rate(compute, waiting, variation):
  """E[1 / (m + waiting)] of the mean m of a machine."""
  if not variation:
    return 1 / (compute + waiting)
  shape = 1 / variation**2
  law = scipy.stats.gamma(shape, scale=compute / shape)
  edges = (0, compute / 2, compute, 2 * compute, math.inf)
  return _integrate(lambda m: law.pdf(m) / (m + waiting), edges)
