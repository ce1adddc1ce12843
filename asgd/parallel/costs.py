"""What communication and waiting cost: formulas in seconds and bytes.

The alpha-beta model: a message of n bytes takes alpha + n / B seconds, alpha
being the link's latency and B its bandwidth. A device has one link, which sends
one message and receives one at the same time. Collectives go in rounds, so a
`Cost` is how many, and what the largest messages of all rounds add up to. Those
of `asgd.parallel.collectives` move exactly these bytes in these rounds.

Waiting: a synchronous step takes as long as its slowest worker. Batch times are
the gamma model of `asgd.durations`, of which this has the expectations.

Index letters:
  N  devices, or workers
  P  shards of a parameter server
  S  bytes of what is reduced

References:
  Hockney, "The communication challenge for MPP", Parallel Computing 1994.
  Thakur, Rabenseifner and Gropp, IJHPCA 2005.
  Zhang et al., "Poseidon: an efficient communication architecture for
  distributed deep learning on GPU clusters", ATC 2017, table 1, algorithm 1.
  Ali et al., "Task execution time modeling for heterogeneous computing
  systems", HCW 2000: the gamma model.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import scipy.integrate
import scipy.special
import scipy.stats


class Link(NamedTuple):
  """What connects devices."""

  bandwidth: float  # B, bytes a second, each way
  latency: float = 0.0  # alpha, seconds of a message of no bytes


class Cost(NamedTuple):
  """What a collective costs, whatever the link."""

  steps: int  # rounds, one after the other
  bytes: float  # the sum over rounds of the largest message on a link
  sent: float  # bytes that leave the busiest device, over all of its links


FREE = Cost(0, 0, 0)


def link(bandwidth: float, latency: float = 0.0) -> Link:
  """Returns a Link.

  Args:
    bandwidth: bytes a second, each way.
    latency: seconds.

  Raises:
    ValueError: for a bandwidth that is not positive, or a negative latency.
  """
  if not 0 < bandwidth < math.inf:
    raise ValueError(
      f"bandwidth must be positive and finite, in bytes a second, not"
      f" {bandwidth!r}"
    )
  if not 0 <= latency < math.inf:
    raise ValueError(
      f"latency must be 0 or more and finite, in seconds, not {latency!r}"
    )
  return Link(float(bandwidth), float(latency))


def seconds(cost: Cost, link: Link) -> float:
  """Returns steps x alpha + bytes / B."""
  return cost.steps * link.latency + cost.bytes / link.bandwidth


def add(*costs: Cost) -> Cost:
  """Returns the cost of several, one after the other."""
  return Cost(*(sum(column) for column in zip(FREE, *costs, strict=True)))


def _check(size, devices, grain):
  for name, value in (("devices", devices), ("grain", grain)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"{name} must be a positive whole number, not {value!r}")
  if not 0 <= size < math.inf:
    raise ValueError(f"bytes must be 0 or more and finite, not {size!r}")


def _chunk(size, pieces, grain):
  """Bytes of the largest of equal pieces, in whole elements."""
  return grain * math.ceil(size / grain / pieces)


# Collectives. `grain` is the bytes of an element: chunks hold whole ones.


def ring_reduce_scatter(size: float, devices: int, *, grain: int = 1) -> Cost:
  """(N - 1) / N S; an all-gather whose result has S bytes costs the same."""
  _check(size, devices, grain)
  moved = (devices - 1) * _chunk(size, devices, grain)
  return Cost(devices - 1, moved, moved)


def ring(size: float, devices: int, *, grain: int = 1) -> Cost:
  """2 (N - 1) / N S: reduce-scatter and all-gather.

  Example:
    >>> ring(800, 4)
    Cost(steps=6, bytes=1200, sent=1200)
  """
  half = ring_reduce_scatter(size, devices, grain=grain)
  return add(half, half)


def bidirectional_ring(size: float, devices: int, *, grain: int = 1) -> Cost:
  """A ring's rounds, of half its bytes on each of two links."""
  _check(size, devices, grain)
  steps = 2 * (devices - 1)
  moved = steps * _chunk(size, 2 * devices, grain)
  return Cost(steps, moved, 2 * moved)


def _on_cube(size, devices, inner):
  """With the two rounds in which what is beyond a power of 2 lends its part."""
  power = 1 << (devices.bit_length() - 1)
  cost = inner(power)
  if power == devices:
    return cost
  # The busiest is the one that is lent to, and tells the sum.
  return Cost(cost.steps + 2, cost.bytes + 2 * size, cost.sent + size)


def recursive_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """log2 N rounds of S; N no power of 2: two rounds more."""
  _check(size, devices, grain)

  def inner(power):
    rounds = power.bit_length() - 1
    return Cost(rounds, rounds * size, rounds * size)

  return _on_cube(size, devices, inner)


def halving_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """2 log2 N rounds, 2 (N - 1) / N S; N no power of 2: 2 more of S."""
  _check(size, devices, grain)

  def inner(power):
    moved = 2 * (power - 1) * _chunk(size, power, grain)
    return Cost(2 * (power.bit_length() - 1), moved, moved)

  return _on_cube(size, devices, inner)


def tree(size: float, devices: int, *, grain: int = 1) -> Cost:
  """2 ceil(log2 N) rounds of S; the root sends half of them."""
  _check(size, devices, grain)
  depth = (devices - 1).bit_length()
  return Cost(2 * depth, 2 * depth * size, depth * size)


class Levels(NamedTuple):
  """Costs on the links inside of a node, and on those between nodes."""

  inside: Cost
  between: Cost


def hierarchical(
  size: float, inside: int, between: int, *, grain: int = 1
) -> Levels:
  """2 (g - 1) / g S inside, and 2 (n - 1) / n S / g between nodes.

  Args:
    size: S.
    inside: g, devices of a node.
    between: n, nodes.
    grain: bytes of an element.
  """
  _check(size, between, grain)
  outer = ring(_chunk(size, inside, grain), between, grain=grain)
  return Levels(ring(size, inside, grain=grain), outer)


def hierarchical_seconds(
  size: float, inside: int, between: int, near: Link, far: Link
) -> float:
  """Returns the time of `hierarchical`, by the links of its two levels."""
  cost = hierarchical(size, inside, between)
  return seconds(cost.inside, near) + seconds(cost.between, far)


def parameter_server(
  size: float,
  devices: int,
  *,
  shards: int | None = None,
  colocated: bool = True,
  grain: int = 1,
) -> Cost:
  """A push to P shards and a pull, of N workers that do so at once.

  Args:
    size: S.
    devices: N, workers.
    shards: P; None is N. At most N if they are the workers' own devices.
    colocated: the shards are on the first P workers: N - 1 of them send to each
      shard, one after the other, which is 2 (N - 1) / P S. Otherwise on
      machines of their own, which take 2 N / P S, and workers 2 S.
    grain: bytes of an element.

  Raises:
    ValueError: for another number of shards.
  """
  shards = devices if shards is None else shards
  _check(size, devices, grain)
  if type(shards) is not int or shards < 1:
    raise ValueError(f"shards must be a positive whole number, not {shards!r}")
  if colocated and shards > devices:
    raise ValueError(
      f"{shards} shards do not fit on {devices} workers: use fewer, or"
      " colocated=False"
    )
  chunk = _chunk(size, shards, grain)
  if colocated:
    steps = 2 * (devices - 1)
    sent = (devices - 1 + shards - 1) * chunk if devices > 1 else 0
    return Cost(steps, steps * chunk, sent)
  # Either all shards are busy all the time, or all workers are.
  rounds = max(devices, shards)
  return Cost(2 * rounds, 2 * rounds * chunk, rounds * chunk)


COSTS: dict[str, Callable[..., Cost]] = {
  "ring": ring,
  "bidirectional_ring": bidirectional_ring,
  "recursive_doubling": recursive_doubling,
  "halving_doubling": halving_doubling,
  "tree": tree,
  "parameter_server": parameter_server,
}  # and `hierarchical`, of two numbers of devices


# Sufficient factors.


def factors(
  rows: int, inputs: int, outputs: int, devices: int, *, grain: int = 4
) -> Cost:
  """All-gather of a dense layer's inputs and output gradients, by a ring.

  (N - 1) K (M + N'), K rows of each device, M inputs and N' outputs.

  Args:
    rows: K; of sequences, their number times their length.
    inputs: M.
    outputs: N'.
    devices: N.
    grain: bytes of an element.
  """
  each = rows * (inputs + outputs) * grain
  _check(each, devices, grain)
  moved = (devices - 1) * each
  return Cost(devices - 1, moved, moved)


def poseidon(
  rows: int,
  inputs: int,
  outputs: int,
  workers: int,
  shards: int | None = None,
) -> dict[str, float]:
  """Poseidon's table 1, for a node that is worker and shard.

  Args:
    rows: K, of a worker's batch.
    inputs: M.
    outputs: N of the paper.
    workers: P1.
    shards: P2; None is P1.

  Returns:
    Elements that such a node sends and receives, taken together:
      server    dense gradients to a parameter server, and parameters back
      factors   factors to all other workers
      adam      factors to the shard that owns the layer, and parameters back
                (project Adam, Chilimbi et al. 2014): what the owner moves
  """
  shards = workers if shards is None else shards
  dense, factored = inputs * outputs, rows * (inputs + outputs)
  return {
    "server": 2 * dense * (workers + shards - 2) / shards,
    "factors": 2 * factored * (workers - 1),
    "adam": (workers - 1) * (dense + factored),
  }


def prefers_factors(
  rows: int,
  inputs: int,
  outputs: int,
  workers: int,
  shards: int | None = None,
) -> bool:
  """Poseidon's rule, algorithm 1: whether factors move no more than gradients.

  2 K (P1 - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2. With shards on all workers,
  K <= 2 M N / (P (M + N)).

  Example:
    >>> prefers_factors(32, 4096, 4096, 128)
    True
    >>> prefers_factors(32, 4096, 4096, 129)
    False
  """
  moved = poseidon(rows, inputs, outputs, workers, shards)
  return moved["factors"] <= moved["server"]


# Waiting for the slowest.


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
  held = (weights > 0) & (moments > 0)
  weights, means = weights[held], moments[held] / weights[held]

  def slower(x):
    return scipy.special.gammaincc(shape, x / means * shape) @ weights

  return slower


def expected_slowest(
  workers: int,
  *,
  mean: float = 1.0,
  variation: float = 0.1,
  machine_variation: float = 0.0,
  wait_for: int | None = None,
) -> float:
  """The expected time of a step that waits for workers, in a gamma cluster.

  E[max] of N batch times for all of them: the integral of 1 - F(x)^N. With
  machines that differ, it is the expectation over clusters.

  Args:
    workers: N.
    mean: time of a batch.
    variation: V, of `asgd.durations.gamma`; 0 is none.
    machine_variation: V_m, of the same.
    wait_for: K, the step ends with the K-th fastest, and the others are backup
      workers; None is N.

  Raises:
    ValueError: for a number out of range.

  Example:
    >>> expected_slowest(1), round(expected_slowest(64), 2)
    (1.0, 1.25)
  """
  wait_for = workers if wait_for is None else wait_for
  for name, value in (("workers", workers), ("wait_for", wait_for)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"{name} must be a positive whole number, not {value!r}")
  if wait_for > workers:
    raise ValueError(f"wait_for {wait_for} of {workers} workers: ask for fewer")
  if not 0 < mean < math.inf:
    raise ValueError(f"mean must be positive and finite, not {mean!r}")
  for name, value in (
    ("variation", variation),
    ("machine_variation", machine_variation),
  ):
    if not 0 <= value <= 3:
      raise ValueError(f"{name} must be from 0 to 3, not {value!r}")
  if workers == 1 or not (variation or machine_variation):
    return float(mean)
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
  # In pieces, as the integrand falls from 1 to 0 within few of them.
  edges = np.linspace(0, end, 33)
  parts = (
    scipy.integrate.quad(waiting, a, b, epsabs=1e-12, epsrel=1e-10)[0]
    for a, b in itertools.pairwise(edges)
  )
  return mean * float(sum(parts))


def synchronous_step(
  workers: int,
  *,
  communication: float,
  compute: float,
  variation: float = 0.1,
  machine_variation: float = 0.0,
  overlap: float = 0.0,
) -> float:
  """Seconds of a synchronous step: E[max] + what communication is not hidden.

  Args:
    workers: N.
    communication: seconds of a step's.
    compute: mean seconds of a worker's.
    variation: V.
    machine_variation: V_m.
    overlap: part of `compute` that communication can hide behind, such as 2/3,
      the backward's, with wait-free backpropagation.

  Raises:
    ValueError: as `expected_slowest`.
  """
  slowest = expected_slowest(
    workers,
    mean=compute,
    variation=variation,
    machine_variation=machine_variation,
  )
  return slowest + max(communication - overlap * compute, 0.0)


def asynchronous_throughput(
  workers: int,
  *,
  compute: float,
  size: float = 0.0,
  link: Link | None = None,
  shards: int | None = None,
  colocated: bool = True,
  machine_variation: float = 0.0,
) -> float:
  """Messages a second of workers that wait for nobody but the server.

  The lesser of two: what workers ask for, each of whom computes, pushes S bytes
  and fetches S; and what the busiest link carries, each way S / P a message, or
  S (N + P - 2) / (P N) if it is a shard's and a worker's.

  Args:
    workers: N.
    compute: mean seconds of a batch. How batches vary on one machine changes
      nothing.
    size: S; 0 is free.
    link: of workers and shards; None is free.
    shards: P; None is N.
    colocated: the shards are on the first P workers.
    machine_variation: V_m; fast machines send more than slow ones less. Below
      1: beyond, the expected speed of a machine is infinite.

  Raises:
    ValueError: for a number out of range.

  Example:
    >>> asynchronous_throughput(8, compute=0.5)
    16.0
  """
  shards = workers if shards is None else shards
  parameter_server(size, workers, shards=shards, colocated=colocated)  # checks
  if not 0 <= machine_variation < 1:
    raise ValueError(
      f"machine_variation must be from 0 to below 1, not {machine_variation!r}"
    )
  if not 0 < compute < math.inf:
    raise ValueError(
      f"compute must be positive and finite seconds, not {compute!r}"
    )
  waiting, most = 0.0, math.inf
  if link is not None:
    # What goes to its own shard is no message.
    at_home = int(colocated and shards == workers)
    messages = 2 * (shards - at_home)
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
  return sum(
    scipy.integrate.quad(lambda m: law.pdf(m) / (m + waiting), a, b)[0]
    for a, b in itertools.pairwise(edges)
  )


def hybrid(
  dense: Mapping[str, tuple[int, int]],
  others: float,
  rows: int,
  devices: int,
  *,
  grain: int = 4,
) -> Cost:
  """Poseidon's hybrid communication of a model.

  Args:
    dense: (inputs, outputs) of each dense layer, by its name.
    others: bytes of all other parameters, biases among them.
    rows: K, of a device.
    devices: N.
    grain: bytes of an element.

  Returns:
    The cost of a ring all-reduce of everything that goes dense, and an
    all-gather of the factors of the layers of which the rule prefers them.
  """
  size, gathered = float(others), []
  for inputs, outputs in dense.values():
    if devices > 1 and prefers_factors(rows, inputs, outputs, devices):
      gathered.append(factors(rows, inputs, outputs, devices, grain=grain))
    else:
      size += inputs * outputs * grain
  return add(ring(size, devices), *gathered)
