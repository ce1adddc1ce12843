"""Costs of communication: formulas in seconds and bytes.

The alpha-beta model: a message of n bytes takes alpha + n / B seconds, alpha
being the link's latency and B its bandwidth. A device has one link, which sends
one message and receives one at the same time. A `Cost` counts the rounds of a
collective and the bytes of the largest message of each round, exactly those of
`asgd.parallel.collectives`.

Index letters:
  N  devices
  P  shards of a parameter server
  S  bytes of the reduced array

References:
  Hockney, "The communication challenge for MPP", Parallel Computing 1994.
  Thakur, Rabenseifner and Gropp, IJHPCA 2005.
  Zhang et al., "Poseidon: an efficient communication architecture for
  distributed deep learning on GPU clusters", ATC 2017, table 1, algorithm 1.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from asgd import checks


class LinkSpeed(NamedTuple):
  """The alpha-beta model of a link."""

  bandwidth: float  # B, bytes a second, each way
  latency: float = 0.0  # alpha, seconds of a message of no bytes


class Cost(NamedTuple):
  """The cost of a collective, for any link."""

  steps: int  # rounds, one after the other
  bytes: float  # the sum over rounds of the largest message on a link
  sent: float  # bytes that leave the busiest device, over all of its links


FREE = Cost(0, 0, 0)


def link(bandwidth: float, latency: float = 0.0) -> LinkSpeed:
  """Returns a LinkSpeed; ValueError for a bandwidth that is not positive or a
  negative latency."""
  checks.positive("bandwidth", bandwidth)
  checks.nonnegative("latency", latency)
  return LinkSpeed(float(bandwidth), float(latency))


def seconds(cost: Cost, link: LinkSpeed) -> float:
  """Returns steps x alpha + bytes / B."""
  return cost.steps * link.latency + cost.bytes / link.bandwidth


def add(*costs: Cost) -> Cost:
  """Returns the cost of several, one after the other."""
  return Cost(*(sum(column) for column in zip(FREE, *costs, strict=True)))


def _check(size: float, devices: int, grain: int) -> None:
  checks.whole("devices", devices)
  checks.whole("grain", grain)
  checks.nonnegative("bytes", size)


def _chunk(size: float, pieces: int, grain: int) -> int:
  """Bytes of the largest of equal pieces, in whole elements."""
  return grain * math.ceil(size / grain / pieces)


# Collectives. `grain` is the bytes of an element: chunks hold whole ones.


def ring_reduce_scatter(size: float, devices: int, *, grain: int = 1) -> Cost:
  """(N - 1) / N S; an all-gather to S bytes costs the same."""
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
  return add(half, half)  # an all-gather costs the same


def bidirectional_ring(size: float, devices: int, *, grain: int = 1) -> Cost:
  """A ring's rounds, of half its bytes on each of two links."""
  _check(size, devices, grain)
  steps = 2 * (devices - 1)
  moved = steps * _chunk(size, 2 * devices, grain)
  return Cost(steps, moved, 2 * moved)  # both links send at once


def _on_cube(cost: Cost, size: float, devices: int) -> Cost:
  """Adds the two rounds in which devices beyond a power of 2 lend a part."""
  if not devices & (devices - 1):
    return cost
  # The busiest device receives a lent part and sends the sum back.
  return Cost(cost.steps + 2, cost.bytes + 2 * size, cost.sent + size)


def recursive_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """log2 N rounds of S; N no power of 2: two rounds more."""
  _check(size, devices, grain)
  rounds = devices.bit_length() - 1
  return _on_cube(Cost(rounds, rounds * size, rounds * size), size, devices)


def halving_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """2 log2 N rounds, 2 (N - 1) / N S; N no power of 2: 2 more of S."""
  _check(size, devices, grain)
  rounds = devices.bit_length() - 1
  # Halves, quarters, ... add up to 2^k - 1 chunks of a 2^k-th, twice.
  moved = 2 * ((1 << rounds) - 1) * _chunk(size, 1 << rounds, grain)
  return _on_cube(Cost(2 * rounds, moved, moved), size, devices)


def tree(size: float, devices: int, *, grain: int = 1) -> Cost:
  """2 ceil(log2 N) rounds of S; the root sends half of them."""
  _check(size, devices, grain)
  depth = (devices - 1).bit_length()
  return Cost(2 * depth, 2 * depth * size, depth * size)


def hierarchical(
  size: float, inside: int, between: int, *, grain: int = 1
) -> tuple[Cost, Cost]:
  """Returns the costs on the links inside of nodes, 2 (g - 1) / g S, and
  between them, 2 (n - 1) / n S / g; `inside` is g, the devices of a node,
  `between` n, the nodes."""
  _check(size, between, grain)
  # Each device of a node takes its chunk around the ring between nodes.
  outer = ring(_chunk(size, inside, grain), between, grain=grain)
  return ring(size, inside, grain=grain), outer


def parameter_server(
  size: float, devices: int, *, shards: int | None = None, grain: int = 1
) -> Cost:
  """2 (N - 1) / P S: a push to P shards and a pull, of N workers at once. The
  shards (None is N of them) are on the first P workers: N - 1 workers send to
  each, one after the other. ValueError for more than N."""
  shards = devices if shards is None else shards
  _check(size, devices, grain)
  checks.whole("shards", shards)
  if shards > devices:
    raise ValueError(
      f"{shards} shards do not fit on {devices} workers: use fewer"
    )
  steps, chunk = 2 * (devices - 1), _chunk(size, shards, grain)
  # A shard sends its sum to N - 1 workers, and as a worker its chunks to P - 1
  # other shards.
  sent = (devices - 1 + shards - 1) * chunk if devices > 1 else 0
  return Cost(steps, steps * chunk, sent)


COSTS: dict[str, Callable[..., Cost]] = {
  "ring": ring,
  "bidirectional_ring": bidirectional_ring,
  "recursive_doubling": recursive_doubling,
  "halving_doubling": halving_doubling,
  "tree": tree,
  "parameter_server": parameter_server,
}  # and `hierarchical`, of two numbers of devices


def fastest(
  size: float,
  devices: int,
  link: LinkSpeed,
  among: Iterable[str] = tuple(COSTS),
  *,
  grain: int = 1,
) -> str:
  """Returns the collective of `COSTS` that takes the least time on such links;
  of several, the first of `among`.

  Example:
    A small array is sent whole, as a round costs more than its bytes.

    >>> slow_start = link(1e9, 1e-3)
    >>> one_link = ("ring", "halving_doubling", "recursive_doubling")
    >>> [fastest(size, 8, slow_start, one_link) for size in (1e3, 1e8)]
    ['recursive_doubling', 'halving_doubling']
  """

  def duration(name: str) -> float:
    return seconds(COSTS[name](size, devices, grain=grain), link)

  return min(among, key=duration)


def factors(
  rows: int, inputs: int, outputs: int, devices: int, *, grain: int = 4
) -> Cost:
  """(N - 1) K (M + N') elements of `grain` bytes: an all-gather, by a ring, of
  a dense layer's M inputs and N' output gradients in K rows of each device."""
  device_bytes = rows * (inputs + outputs) * grain
  _check(device_bytes, devices, grain)
  moved = (devices - 1) * device_bytes
  return Cost(devices - 1, moved, moved)


def prefers_factors(rows: int, inputs: int, outputs: int, workers: int) -> bool:
  """Poseidon's rule, algorithm 1: whether factors move no more than gradients.

  2 K (P - 1) (M + N) <= 2 M N (2 P - 2) / P elements in and out of a node that
  is one of P workers and P shards (table 1), with K rows of a worker's batch, M
  inputs and N outputs. That is K <= 2 M N / (P (M + N)).

  Example:
    >>> prefers_factors(32, 4096, 4096, 128)
    True
    >>> prefers_factors(32, 4096, 4096, 129)
    False
  """
  # Table 1, the column for a node that is server and worker: PS, then SFB.
  dense = 2 * inputs * outputs * (2 * workers - 2) / workers
  return 2 * rows * (inputs + outputs) * (workers - 1) <= dense


def hybrid(
  dense: Iterable[tuple[int, int]],
  others: float,
  rows: int,
  devices: int,
  *,
  grain: int = 4,
) -> Cost:
  """Poseidon's hybrid communication: an all-gather of the factors of the layers
  for which the rule prefers them, and a ring all-reduce of the rest.

  `dense` are (inputs, outputs) of each dense layer, `others` the bytes of all
  other parameters, biases among them, and `rows` those of a device.
  """
  # Kernels without factors are reduced with the other parameters, in one ring.
  size, gathered = float(others), []
  for inputs, outputs in dense:
    if devices > 1 and prefers_factors(rows, inputs, outputs, devices):
      gathered.append(factors(rows, inputs, outputs, devices, grain=grain))
    else:
      size += inputs * outputs * grain
  return add(ring(size, devices), *gathered)
