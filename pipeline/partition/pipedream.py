"""PipeDream's partitioner: stages with replicas, by dynamic programming.

One microbatch after another goes through the stages, so the slowest stage or
border sets the pace. With A(j, m) the pace of the best pipeline of the first j
layers on m machines, a_s the bytes between layers s and s + 1, w_l a layer's
bytes of parameters, T_l its time and B the bandwidth (Narayanan et al.,
section 3.1):

  A(j, m)      = min(T(1 -> j, m),
                     min over s < j, m' < m of
                       max(A(s, m - m'), 2 a_s / B, T(s + 1 -> j, m')))
  T(i -> j, m) = (1 / m) max(sum of T_l, 2 (m - 1) sum of |w_l| / B)

Machines come in levels, such as devices in a server and servers in a room. The
machines of level k are whole pipelines of level k - 1: the sum of T_l becomes
the A of level k - 1, and B that of level k.

References:
  Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
    training", SOSP 2019.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from asgd import checks
from pipeline.partition import graph as graph_lib
from pipeline.partition import placement
from pipeline.partition.graph import Graph
from pipeline.partition.placement import Partition
from pipeline.table import check_positive


class PipeDreamPlan(NamedTuple):
  """A partition, and what it promises."""

  partition: Partition
  replicas: tuple[int, ...]  # of each stage
  time: float  # seconds between microbatches, as by the formula
  noam: int  # microbatches in flight that keep all busy
  memory: np.ndarray  # float[S], bytes on each device of the stage


class _Level(NamedTuple):
  machines: int
  bandwidth: float
  size: int  # devices of a machine


def pipedream(
  graph: Graph,
  machines: int | Sequence[int],
  bandwidth: float | Sequence[float],
  *,
  straight: bool = False,
  fewer: bool = False,
  memory: float | None = None,
  tied: str = "allow",
) -> PipeDreamPlan:
  """Returns the partition of least time for a microbatch.

  Takes O(S^2 M^2) on one level, for S places to cut and M machines; more levels
  solve that for all S^2 ranges. A stage of m replicas that `later` devices
  follow has 1 + ceil(later / m) microbatches' stashes and versions of its
  parameters in memory. A graph is cut between two nodes, in their order.

  Args:
    graph: the profile.
    machines: of each level from the innermost, (8, 2) for two servers of eight
      devices; all are used, unless `fewer`.
    bandwidth: of each level, in bytes a second.
    straight: no stage has replicas.
    fewer: machines may be left idle where more do not help.
    memory: bytes of a device; None: without end.
    tied: "together" keeps nodes with common parameters in one stage; "allow"
      does not, and the partition says which stages have to synchronise them.

  Raises:
    ValueError: for unknown options, and if nothing fits.
  """
  levels = _levels(machines, bandwidth)
  checks.one_of("tied", tied, placement.TIED)
  placement.check_limit("memory", memory, "bytes")
  ends = _ends(graph, placement.must_stay(graph, tied))
  search = _Search(graph, ends, levels, straight, fewer, memory)
  k, end, none = len(levels), len(ends) - 1, Fraction(0)
  total = math.prod(level.machines for level in levels)
  time, count = search.whole(k, 0, end, none)
  if math.isinf(time):
    raise ValueError(_why_not(graph, total, end, straight, memory))
  stages = search.stages(k, 0, end, count, none, (0,))
  nodes, devices = zip(*stages, strict=True)
  partition = placement.make(graph, nodes, devices, count=total)
  replicas = tuple(map(len, devices))
  used = sum(replicas)
  sizes, later = [], used
  for stage, places in zip(nodes, replicas, strict=True):
    later -= places
    flying = 1 + -(-later // places)
    stash = sum(graph.nodes[i].stash for i in stage)
    sizes.append(flying * (stash + graph_lib.parameters(graph, stage)))
  noam = -(-used // replicas[0])
  return PipeDreamPlan(partition, replicas, time, noam, np.array(sizes, float))


def _levels(machines, bandwidth):
  counts = machines if isinstance(machines, Sequence) else (machines,)
  speeds = bandwidth if isinstance(bandwidth, Sequence) else (bandwidth,)
  if not counts or len(counts) != len(speeds):
    raise ValueError(
      f"each level of machines needs its bandwidth: there are {len(counts)} and"
      f" {len(speeds)}"
    )
  out, size = [], 1
  for count, speed in zip(counts, speeds, strict=True):
    check_positive(**{"machines of a level": count})
    if speed is None:
      raise ValueError("a level's bandwidth must be a number, not None")
    placement.check_limit("bandwidth", speed, "bytes a second")
    out.append(_Level(count, speed, size))
    size *= count
  return out


def _why_not(graph, total, places, straight, memory):
  if memory is None:
    return (
      f"{total} machines cannot all be used: there are {places} places to end a"
      f" stage (straight={straight}); set fewer=True or give fewer machines"
    )
  node = max(graph.nodes, key=lambda n: (n.parameters + n.stash, n.name))
  return (
    f"nothing fits in {memory} bytes on each of {total} machines; the largest"
    f" node is {node.name!r} with {node.parameters} bytes of parameters and"
    f" {node.stash} of stash for each microbatch in flight; give more memory or"
    " machines"
  )


def _ends(graph, groups):
  """Returns how many nodes may lie before a cut, which parts no group."""
  return [
    i
    for i in range(len(graph.nodes) + 1)
    if not any(min(group) < i <= max(group) for group in groups)
  ]


class _Search:
  """The recursion; cuts are numbered, and a stage is between two of them.

  `down` is the number of devices that work on what this pipeline sends on, for
  each copy of the pipeline: how much is in flight depends on it. It is 0
  throughout where that does not matter.
  """

  def __init__(self, graph, ends, levels, straight, fewer, memory):
    self.graph, self.ends, self.levels = graph, ends, levels
    self.straight, self.fewer, self.memory = straight, fewer, memory
    self.sums = functools.cache(self.sums)
    self.best = functools.cache(self.best)
    self.border = [
      graph_lib.bytes_of(
        (edge.source, edge.bytes)
        for edge in graph.edges
        if edge.source < end <= edge.target
      )
      for end in ends
    ]

  def nodes(self, i, j):
    return tuple(range(self.ends[i], self.ends[j]))

  def sums(self, i, j):
    """Returns time, parameters and stash of the nodes between."""
    numbers = self.nodes(i, j)
    nodes = [self.graph.nodes[n] for n in numbers]
    parameters = graph_lib.parameters(self.graph, numbers)
    work = sum(node.work() for node in nodes)
    return work, parameters, sum(node.stash for node in nodes)

  def whole(self, k, i, j, down):
    """Returns the least time on a whole level, and the machines used."""
    if k == 0:
      return self.sums(i, j)[0], 1
    most = self.levels[k - 1].machines
    counts = range(1, most + 1) if self.fewer else (most,)
    return min((self.best(k, i, j, m, down)[0], m) for m in counts)

  def best(self, k, i, j, m, down):
    """Returns A: its time, and cut and machines of its last stage."""
    alone = m == 1 or not self.straight
    least = self.stage(k, i, j, m, down) if alone else math.inf, None, m
    for s in range(i + 1, j) if m > 1 else ():
      border = 2 * self.border[s] / self.levels[k - 1].bandwidth
      if border >= least[0]:
        continue
      for last in range(1, 2 if self.straight else m):
        time = max(border, self.stage(k, s, j, last, down))
        if time >= least[0]:
          continue
        left = self.best(k, i, s, m - last, self.after(k, last, down))[0]
        if max(time, left) < least[0]:
          least = max(time, left), s, last
    return least

  def stage(self, k, i, j, m, down):
    """Returns T: the time of a stage on m machines."""
    level, down = self.levels[k - 1], down / m
    _, parameters, stash = self.sums(i, j)
    if k == 1 and self.memory is not None:
      flying = 1 + math.ceil(down)
      if flying * (stash + parameters) > self.memory:
        return math.inf
    work, _ = self.whole(k - 1, i, j, down)
    return max(work, 2 * (m - 1) * parameters / level.bandwidth) / m

  def after(self, k, last, down):
    """Returns `down` of the stages before one that has `last` machines."""
    if self.memory is None:
      return down
    return down + last * self.levels[k - 1].size

  def stages(self, k, i, j, m, down, copies):
    """Returns nodes and devices of the stages of the best pipeline."""
    if k == 0:
      return [(self.nodes(i, j), tuple(sorted(copies)))]
    _, s, last = self.best(k, i, j, m, down)
    out = []
    if s is not None:
      after = self.after(k, last, down)
      out = self.stages(k, i, s, m - last, after, copies)
      i = s
    size = self.levels[k - 1].size
    copies = [c + n * size for c in copies for n in range(m - last, m)]
    down /= last
    used = self.whole(k - 1, i, j, down)[1]
    return out + self.stages(k - 1, i, j, used, down, copies)
