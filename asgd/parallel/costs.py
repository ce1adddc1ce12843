"""Costs of communication: formulas in seconds and bytes.

The alpha-beta model: a message of n bytes takes alpha + n / B seconds; alpha is
the latency of the link, and B its bandwidth. A device has one link, which sends
one message and receives one message at the same time. A `Cost` counts the
rounds of a collective and the bytes of the largest message of each round,
exactly as `asgd.parallel.collectives` sends them.

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

  bandwidth: float  # B, bytes per second in each direction
  latency: float = 0.0  # alpha, seconds that a message without bytes takes


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
  """Returns the cost of several collectives, one after the other."""
  return Cost(*(sum(column) for column in zip(FREE, *costs, strict=True)))


def _check(size: float, devices: int, grain: int) -> None:
  checks.integer("devices", devices)
  checks.integer("grain", grain)
  checks.nonnegative("bytes", size)


def _chunk(size: float, pieces: int, grain: int) -> int:
  """Returns the bytes of the largest of nearly equal pieces of whole elements.
  """
  return grain * math.ceil(size / grain / pieces)


# Collectives. `grain` is the bytes of an element: a chunk has whole elements.


def ring_reduce_scatter(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of N - 1 rounds with (N - 1) / N S bytes in all; an
  all-gather to S bytes costs the same."""
  _check(size, devices, grain)
  link_bytes = (devices - 1) * _chunk(size, devices, grain)
  return Cost(devices - 1, link_bytes, link_bytes)


def ring(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of a reduce-scatter and an all-gather: 2 (N - 1) / N S
  bytes.

  Example:
    >>> ring(800, 4)
    Cost(steps=6, bytes=1200, sent=1200)
  """
  half = ring_reduce_scatter(size, devices, grain=grain)
  return add(half, half)  # an all-gather costs the same


def bidirectional_ring(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of a ring's rounds with half of the bytes on each of two
  links."""
  _check(size, devices, grain)
  steps = 2 * (devices - 1)
  link_bytes = steps * _chunk(size, 2 * devices, grain)
  return Cost(steps, link_bytes, 2 * link_bytes)  # both links send at once


def _add_pair_rounds(cost: Cost, size: float, devices: int) -> Cost:
  """Adds two rounds if N is no power of 2: the even device of a pair sends its
  array to the odd device, and the odd device sends the sum back."""
  if not devices & (devices - 1):
    return cost
  return Cost(cost.steps + 2, cost.bytes + 2 * size, cost.sent + size)


def recursive_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of log2 N rounds of S bytes each; of two rounds more if N
  is no power of 2."""
  _check(size, devices, grain)
  rounds = devices.bit_length() - 1
  cost = Cost(rounds, rounds * size, rounds * size)
  return _add_pair_rounds(cost, size, devices)


def halving_doubling(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of 2 log2 N rounds with 2 (N - 1) / N S bytes in all; of
  two more rounds of S bytes each if N is no power of 2."""
  _check(size, devices, grain)
  rounds = devices.bit_length() - 1
  # Halves, quarters, ... add up to 2^k - 1 chunks of a 2^k-th. They are sent
  # twice.
  link_bytes = 2 * ((1 << rounds) - 1) * _chunk(size, 1 << rounds, grain)
  cost = Cost(2 * rounds, link_bytes, link_bytes)
  return _add_pair_rounds(cost, size, devices)


def tree(size: float, devices: int, *, grain: int = 1) -> Cost:
  """Returns the cost of 2 ceil(log2 N) rounds of S bytes each; the root sends
  in half of them."""
  _check(size, devices, grain)
  depth = (devices - 1).bit_length()
  return Cost(2 * depth, 2 * depth * size, depth * size)


def hierarchical(
  size: float, inside: int, between: int, *, grain: int = 1
) -> tuple[Cost, Cost]:
  """Returns (cost inside nodes, cost between nodes): 2 (g - 1) / g S bytes on
  the links inside, 2 (n - 1) / n S / g bytes on those between. `inside` is g,
  the devices of a node, and `between` is n, the number of nodes."""
  _check(size, between, grain)
  # Each device of a node sends its chunk around a ring between nodes.
  between_cost = ring(_chunk(size, inside, grain), between, grain=grain)
  return ring(size, inside, grain=grain), between_cost


def parameter_server(
  size: float, devices: int, *, shards: int | None = None, grain: int = 1
) -> Cost:
  """Returns the cost of a push to P shards and a pull, by N workers at once:
  2 (N - 1) / P S bytes. The shards (None: N shards) are on the first P workers.
  N - 1 workers send to each shard, one after the other. Raises ValueError for
  more than N shards."""
  shards = devices if shards is None else shards
  _check(size, devices, grain)
  checks.integer("shards", shards)
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
}  # without `hierarchical`, which takes two numbers of devices


def fastest(
  size: float,
  devices: int,
  link: LinkSpeed,
  among: Iterable[str] = tuple(COSTS),
  *,
  grain: int = 1,
) -> str:
  """Returns the name of the collective that takes the least time, by `COSTS`;
  if several take equally long, the first of them in `among`.

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
  """Returns the cost of a dense layer's factors: a ring gathers K rows of M
  inputs and N' output gradients from each device. That is (N - 1) K (M + N')
  elements of `grain` bytes."""
  device_bytes = rows * (inputs + outputs) * grain
  _check(device_bytes, devices, grain)
  link_bytes = (devices - 1) * device_bytes
  return Cost(devices - 1, link_bytes, link_bytes)


def prefers_factors(rows: int, inputs: int, outputs: int, workers: int) -> bool:
  """Returns whether factors move no more bytes than gradients, by Poseidon's
  rule (algorithm 1).

  2 K (P - 1) (M + N) <= 2 M N (2 P - 2) / P elements in and out of a node that
  is one of P workers and P shards (table 1), with K rows of a worker's batch, M
  inputs and N outputs. That is K <= 2 M N / (P (M + N)).

  Example:
    >>> prefers_factors(32, 4096, 4096, 128)
    True
    >>> prefers_factors(32, 4096, 4096, 129)
    False
  """
  # Table 1, column for a node that is server and worker: its rows PS and SFB.
  gradient_elements = 2 * inputs * outputs * (2 * workers - 2) / workers
  factor_elements = 2 * rows * (inputs + outputs) * (workers - 1)
  return factor_elements <= gradient_elements


def hybrid(
  dense: Iterable[tuple[int, int]],
  others: float,
  rows: int,
  devices: int,
  *,
  grain: int = 4,
) -> Cost:
  """Returns the cost of Poseidon's hybrid communication: an all-gather of the
  factors of the layers for which the rule prefers factors, and a ring
  all-reduce of all other gradients.

  `dense` are (inputs, outputs) of each dense layer. `others` are the bytes of
  all other parameters, biases among them. `rows` is the number of rows of one
  device's batch.
  """
  # Kernels without factors are reduced with the other parameters, in one ring.
  size, factor_costs = float(others), []
  for inputs, outputs in dense:
    if devices > 1 and prefers_factors(rows, inputs, outputs, devices):
      factor_costs.append(factors(rows, inputs, outputs, devices, grain=grain))
    else:
      size += inputs * outputs * grain
  return add(ring(size, devices), *factor_costs)
