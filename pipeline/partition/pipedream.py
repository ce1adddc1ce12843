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

The released code has another formula (`formula="code"`):
  1. T adds communication to compute, and sends twice as much:
     (1 / m) (sum of T_l + 4 (m - 1) sum of |w_l| / (B m)).
  2. Transfers between stages take no time unless activations are compressed;
     then 2 a / (B m'), before and after the last stage, over the ratio.
  3. A DAG may be cut along antichains, not only along the nodes' order: along
     those that are reached from the first source by one successor at a time.
     Another source comes with the first node that needs it.
  4. Memory: ceil((M - m) / m') (outputs + parameters) must fit, where M is the
     number of machines of the level, m that up to this stage, m' that of the
     stage. The microbatch that the stage computes is not counted, and neither
     are other levels.
  5. At an outer level the communication of the first stage, and of no other,
     is divided by the machines of the level within.

References:
  Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
    training", SOSP 2019.
  github.com/msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py.
"""

import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.pipeline.partition import graph as graph_lib
from asgd.pipeline.partition import placement
from asgd.pipeline.partition.graph import Graph
from asgd.pipeline.partition.placement import Partition
from asgd.pipeline.table import check_positive

CUTS = ("order", "antichains", "released")
MOST_STATES = 2000  # sets of nodes before a cut


class PipeDreamPlan(NamedTuple):
  """A partition, with its pace and memory."""

  partition: Partition
  replicas: tuple[int, ...]  # of each stage
  time: float  # seconds between microbatches, by the formula
  noam: int  # microbatches in flight that keep all devices busy
  memory: np.ndarray  # float[S], bytes on each device of the stage


class _Level(NamedTuple):
  machines: int
  bandwidth: float
  within: int  # machines of the level below; 1 for the first
  size: int  # devices of a machine


class PipeDreamOptions(NamedTuple):
  """The options of `pipedream`: its objective and its constraints."""

  formula: str = "paper"  # or "code"
  straight: bool = False  # no stage has replicas
  fewer: bool = False  # machines may stay idle where more do not help
  memory: float | None = None  # bytes of a device; None: no limit
  # "together" keeps nodes with common parameters in one stage; "allow" does
  # not, and the partition says which stages have to synchronise them.
  tied: str = "allow"
  # "order" cuts between two nodes, in their order; "antichains" along any
  # antichain; "released" along those that the released code enumerates (point 3
  # above). None is "order" for the paper, "released" for the code.
  cuts: str | None = None
  compression: float | None = None  # of activations between stages, in the code


def pipedream(
  graph: Graph,
  machines: int | Sequence[int],
  bandwidth: float | Sequence[float],
  **options: Any,
) -> PipeDreamPlan:
  """Returns the partition of least time for a microbatch.

  Takes O(S^2 M^2) on one level, for S possible cuts and M machines; with more
  levels this is solved for all S^2 ranges. With the paper's formula, a stage of
  m replicas with `later` devices after it stores 1 + ceil(later / m) stashes,
  and as many versions of its parameters.

  Args:
    graph: the profile.
    machines: the number of machines of each level, the innermost first: (8, 2)
      for two servers of eight devices. All are used, unless `fewer`.
    bandwidth: the bandwidth of each level, in bytes per second.
    **options: those of `PipeDreamOptions`.

  Raises:
    ValueError: for unknown options, if nothing fits, and for more than 2,000
      sets of nodes that may lie before a cut.
  """
  levels, settings = _levels(machines, bandwidth), PipeDreamOptions(**options)
  searches = {"paper": _Paper, "code": _Code}
  checks.one_of("formula", settings.formula, list(searches))
  cuts = settings.cuts
  if cuts is None:
    cuts = "order" if settings.formula == "paper" else "released"
  checks.one_of("cuts", cuts, CUTS)
  checks.one_of("tied", settings.tied, placement.TIED_MODES)
  placement.check_limit("memory", settings.memory, "bytes")
  ratio = settings.compression
  if ratio is not None and (settings.formula == "paper" or not ratio > 0):
    raise ValueError(
      f"compression must be positive, and is for formula 'code' only; it is"
      f" {ratio!r} with formula {settings.formula!r}"
    )
  states = _states(graph, cuts, placement.must_stay(graph, settings.tied))
  search = searches[settings.formula](graph, states, levels, settings)
  k, end, no_devices = len(levels), len(states) - 1, Fraction(0)
  total = math.prod(level.machines for level in levels)
  time, count = search.least_time(k, 0, end, no_devices)
  if math.isinf(time):
    raise ValueError(_explain_failure(graph, total, end, settings))
  stages = search.stages(k, 0, end, count, no_devices, (0,))
  nodes, devices = zip(*stages, strict=True)
  partition = placement.make(graph, nodes, devices, count=total)
  replicas = tuple(map(len, devices))
  used_machines = sum(replicas)
  # Later stages delay a backward, so early stages hold more microbatches.
  sizes, later = [], used_machines
  for stage, count_of_stage in zip(nodes, replicas, strict=True):
    later -= count_of_stage
    in_flight = 1 + -(-later // count_of_stage)
    stash = sum(graph.nodes[i].stash for i in stage)
    sizes.append(in_flight * (stash + graph_lib.parameters(graph, stage)))
  noam = -(-used_machines // replicas[0])
  return PipeDreamPlan(partition, replicas, time, noam, np.array(sizes, float))


def _levels(
  machines: int | Sequence[int], bandwidth: float | Sequence[float]
) -> list[_Level]:
  """Returns the levels, checked, the innermost first."""
  counts = machines if isinstance(machines, Sequence) else (machines,)
  speeds = bandwidth if isinstance(bandwidth, Sequence) else (bandwidth,)
  if not counts or len(counts) != len(speeds):
    raise ValueError(
      f"each level of machines needs its bandwidth: there are {len(counts)} and"
      f" {len(speeds)}"
    )
  result, size, inner_count = [], 1, 1
  for count, speed in zip(counts, speeds, strict=True):
    check_positive(**{"machines of a level": count})
    if speed is None:
      raise ValueError("a level's bandwidth must be a number, not None")
    placement.check_limit("bandwidth", speed, "bytes a second")
    result.append(_Level(count, speed, inner_count, size))
    size, inner_count = size * count, count
  return result


def _explain_failure(
  graph: Graph, total: int, places: int, settings: PipeDreamOptions
) -> str:
  """Returns why no partition fits, with the remedy, as text."""
  if settings.memory is None:
    return (
      f"{total} machines cannot all be used: there are {places} places to end a"
      f" stage (straight={settings.straight}); set fewer=True or give fewer"
      " machines"
    )
  node = max(graph.nodes, key=lambda n: (n.parameters + n.stash, n.name))
  return (
    f"nothing fits in {settings.memory} bytes on each of {total} machines; the"
    f" largest node is {node.name!r} with {node.parameters} bytes of parameters"
    f" and {node.stash} of stash for each microbatch in flight; give more"
    " memory or machines"
  )


def _states(
  graph: Graph, cuts: str, groups: Sequence[Sequence[int]]
) -> list[int]:
  """Returns the sets of nodes that may lie before a cut, as bit masks."""
  count = len(graph.nodes)
  if cuts == "order":
    prefixes = ((1 << i) - 1 for i in range(count + 1))
    group_masks = [sum(1 << i for i in group) for group in groups]
    # A cut may not part a group: all of its nodes are before it, or none.
    return [
      prefix
      for prefix in prefixes
      if all(prefix & mask in (0, mask) for mask in group_masks)
    ]
  successors, predecessors = graph_lib.neighbours(graph)
  successor_masks = [sum(1 << j for j in nodes) for nodes in successors]
  all_nodes, closures = (1 << count) - 1, _closures(predecessors, groups)
  states, queue = {0}, [0]
  while queue:
    state = queue.pop()
    candidates = all_nodes & ~state
    if cuts == "released":
      masks = (successor_masks[i] for i in _nodes_in(state))
      reachable = functools.reduce(operator.or_, masks, 0)
      # Where nothing follows, the first of the other nodes is the next source.
      candidates = reachable & candidates or candidates & -candidates
    new_states = {state | closures[i] for i in _nodes_in(candidates)} - states
    states |= new_states
    queue += new_states
    if len(states) > MOST_STATES:
      raise ValueError(
        f"the graph of {count} nodes has more than {MOST_STATES} antichains;"
        " use cuts='released' or cuts='order', or merge nodes that are alike"
      )
  return sorted(states, key=lambda s: (s.bit_count(), s))


def _nodes_in(mask):
  """Yields the numbers of the nodes in a bit mask."""
  return (i for i in range(mask.bit_length()) if mask >> i & 1)


def _closures(
  predecessors: Sequence[set[int]], groups: Sequence[Sequence[int]]
) -> list[int]:
  """Returns for each node, as a bit mask, the nodes that are before a cut if
  this node is: itself, its group, and all predecessors of these with theirs."""
  direct = [set(nodes) for nodes in predecessors]
  for group in groups:
    for i in group:
      direct[i] |= set(group)
  closures, has_changed = [1 << i for i in range(len(direct))], True
  while has_changed:
    previous = list(closures)
    for i, nodes in enumerate(direct):
      closures[i] |= functools.reduce(
        operator.or_, (closures[j] for j in nodes), 0
      )
    has_changed = closures != previous
  return closures


class _Search:
  """The recursion; states have indices, and a stage is between two states.

  `downstream` is the number of devices downstream of this pipeline, per copy of
  the pipeline. The microbatches in flight depend on it; it is 0 where they do
  not matter. Subclasses have the formulas, `stage_time` and `transfer_time`.
  """

  tracks_downstream = True

  def __init__(self, graph, states, levels, settings):
    self.graph, self.states = graph, states
    self.levels, self.settings = levels, settings
    # The recursion asks for the same range again and again.
    self.sums = functools.cache(self._sums)
    self.best = functools.cache(self._best)
    self.boundary_bytes = [
      graph_lib.bytes_of(
        (edge.source, edge.bytes)
        for edge in graph.edges
        if state >> edge.source & 1 and not state >> edge.target & 1
      )
      for state in states
    ]
    self.subsets = [
      [i for i in range(j) if states[i] & states[j] == states[i]]
      for j in range(len(states))
    ]

  def nodes(self, i, j):
    return tuple(_nodes_in(self.states[j] & ~self.states[i]))

  def stage_time(
    self, k: int, i: int, j: int, m: int, end: int, downstream: Fraction
  ) -> float:
    """Returns the time of stage [i, j) on m machines of level k. The pipeline
    up to this stage has `end` machines."""
    raise NotImplementedError

  def transfer_time(self, k: int, s: int, j: int, m: int) -> float:
    """Returns the transfer time, both ways, of a last stage [s, j) on m
    machines."""
    raise NotImplementedError

  def _sums(self, i: int, j: int) -> tuple[float, float, float, float]:
    """Returns time, parameters, stash and outputs of the nodes between states i
    and j."""
    indices = self.nodes(i, j)
    nodes = [self.graph.nodes[n] for n in indices]
    parameters = graph_lib.parameters(self.graph, indices)
    work = sum(node.work() for node in nodes)
    stash = sum(node.stash for node in nodes)
    return work, parameters, stash, sum(node.activation for node in nodes)

  def least_time(self, k, i, j, downstream):
    """Returns the least time on a whole level, and the machines used."""
    if k == 0:
      return self.sums(i, j)[0], 1
    machines = self.levels[k - 1].machines
    counts = range(1, machines + 1) if self.settings.fewer else (machines,)
    return min((self.best(k, i, j, m, downstream)[0], m) for m in counts)

  def _best(
    self, k: int, i: int, j: int, m: int, downstream: Fraction
  ) -> tuple[float, int | None, int]:
    """Returns (A, state before the last stage, machines of the last stage);
    None for the state if the last stage is the only one."""
    may_be_single = m == 1 or not self.settings.straight
    time = (
      self.stage_time(k, i, j, m, m, downstream) if may_be_single else math.inf
    )
    best_so_far: tuple[float, int | None, int] = time, None, m
    for s in self.subsets[j] if m > 1 else ():
      if s <= i or self.states[i] & self.states[s] != self.states[i]:
        continue
      for last_machines in range(1, 2 if self.settings.straight else m):
        transfer = self.transfer_time(k, s, j, last_machines)
        if transfer >= best_so_far[0]:
          continue
        stage_time = self.stage_time(k, s, j, last_machines, m, downstream)
        time = max(transfer, stage_time)
        if time >= best_so_far[0]:
          continue
        # The last stage is [s, j) on `last_machines`; recursion solves the
        # rest.
        inner_downstream = self.downstream_before(k, last_machines, downstream)
        rest_time = self.best(k, i, s, m - last_machines, inner_downstream)[0]
        if max(time, rest_time) < best_so_far[0]:
          best_so_far = max(time, rest_time), s, last_machines
    return best_so_far

  def downstream_before(self, k, last, downstream):
    """Returns `downstream` for the stages before one with `last` machines."""
    if self.settings.memory is None or not self.tracks_downstream:
      return downstream
    return downstream + last * self.levels[k - 1].size

  def stages(self, k, i, j, m, downstream, copies):
    """Returns nodes and devices of the stages of the best pipeline."""
    if k == 0:
      return [(self.nodes(i, j), tuple(sorted(copies)))]
    _, s, last = self.best(k, i, j, m, downstream)
    earlier_stages = []
    if s is not None:
      inner_downstream = self.downstream_before(k, last, downstream)
      earlier_stages = self.stages(k, i, s, m - last, inner_downstream, copies)
      i = s
    size = self.levels[k - 1].size
    copies = [c + n * size for c in copies for n in range(m - last, m)]
    downstream /= last
    used_machines = self.least_time(k - 1, i, j, downstream)[1]
    last_stages = self.stages(k - 1, i, j, used_machines, downstream, copies)
    return earlier_stages + last_stages


class _Paper(_Search):
  """The formula of the paper."""

  def stage_time(self, k, i, j, m, end, downstream):
    del end
    level, downstream = self.levels[k - 1], downstream / m
    _, parameters, stash, _ = self.sums(i, j)
    if k == 1 and self.settings.memory is not None:
      in_flight = 1 + math.ceil(downstream)
      if in_flight * (stash + parameters) > self.settings.memory:
        return math.inf
    work, _ = self.least_time(k - 1, i, j, downstream)
    return max(work, 2 * (m - 1) * parameters / level.bandwidth) / m

  def transfer_time(self, k, s, j, m):
    del j, m
    return 2 * self.boundary_bytes[s] / self.levels[k - 1].bandwidth


class _Code(_Search):
  """The formula of the released code."""

  tracks_downstream = False

  def stage_time(self, k, i, j, m, end, downstream):
    level = self.levels[k - 1]
    _, parameters, _, outputs = self.sums(i, j)
    if self.settings.memory is not None:
      copies = -(-(level.machines - end) // m)
      if copies * (outputs + parameters) > self.settings.memory:
        return math.inf
    work, _ = self.least_time(k - 1, i, j, downstream)
    sync_streams = level.within if end == m else 1  # of the first stage only
    sync = 4 * (m - 1) * parameters / (level.bandwidth * m) / sync_streams
    return (work + sync) / m

  def transfer_time(self, k, s, j, m):
    if self.settings.compression is None:
      return 0.0
    # After the last layer nothing is sent.
    bytes_sent = max(self.boundary_bytes[s], self.boundary_bytes[j])
    bandwidth = self.levels[k - 1].bandwidth
    return 2 * bytes_sent / (bandwidth * m * self.settings.compression)
