"""FTPipe's partitioner: devices that hold several stages far apart.

If a device may hold stages that are not neighbours, loads can be levelled by
packing blocks in bins instead of cutting a chain. Eliad et al. do it in steps:

  coarsen   merge nodes until about L blocks are left (`coarsen`)
  assign    put the blocks on P devices, each on the one with the least load
            that has memory for it (`assign`)
  stages    merge neighbours on one device, unless two stages would then need
            each other (`connect`)
  refine    move nodes at the borders of stages to a stage next to them, while
            that lowers the objective (`refine`)

They repeat this for several L and take the best result, because it is not
monotone in L. The objective is the largest cost of a stage,

  C + max(0, comm_forward - C) + max(0, comm_backward - C),

where C is the work of all stages on its device and communication counts only
where it is not hidden behind work.

All stages but the last may have to run their forward again before the backward.
The nodes of the last stage are known only after the partition. So the search
repeats until the last stage is the one that it assumed.

Differences from the released code:
  1. Largest blocks are assigned first. That code sorts by size and then takes
     from the wrong end; `order="smallest_first"` does the same.
  2. The bytes sent decide between equal objectives. That code intends this, but
     compares with 0.
  3. A tensor that several nodes of a stage need is sent once, and nothing is
     sent between stages of one device (there: once per edge, at 550 GB/s).
  4. Stages that would need each other are never formed (there: an assertion).
  5. Nodes that must not be parted are merged with all that lies between them
     (there: left apart, if that closes a cycle).
  6. Centres are drawn at random if there are fewer blocks of known kinds than
     L (there: an error).

References:
  Eliad, Hakimi, De Jagger, Silberstein and Schuster, "Fine-tuning giant neural
    networks on commodity hardware with automatic pipeline model parallelism",
    USENIX ATC 2021.
  github.com/saareliad/FTPipe, autopipe/autopipe/model_partitioning/mixed_pipe.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.pipeline.partition import graph as graph_lib
from asgd.pipeline.partition import placement
from asgd.pipeline.partition.coarsen import Blocks, coarsen
from asgd.pipeline.partition.graph import Graph
from asgd.pipeline.partition.placement import Partition
from asgd.pipeline.table import check_positive

ORDERS = ("largest_first", "smallest_first")
RECOMPUTE = ("none", "all", "but_last")
_SLACK = 1e-12  # of the objective; smaller differences are rounding
_MAX_SWEEPS = 10  # sweeps before the search for a last stage becomes exhaustive


class Mixed(NamedTuple):
  """A partition, and the search that led to it."""

  partition: Partition
  objective: float  # seconds for a microbatch
  length: int  # the L of this partition
  tried: tuple[tuple[int, float], ...]  # (L, objective) of the last sweep
  recompute: tuple[int, ...]  # stages that run their forward again
  settled: bool  # whether the last stage is the assumed one


def assign(
  weights: Sequence[float],
  devices: int,
  sizes: Sequence[float] | None = None,
  memory: float | None = None,
  order: str = "largest_first",
) -> tuple[int, ...]:
  """Puts each item on the device with the least load that has room for it;
  returns the device of each.

  "largest_first" is within 4/3 of the best largest load (Graham 1969). If an
  item has no room in the order of weights, `assign` tries the order of sizes.

  Raises:
    ValueError: naming the number of the item for which there is no room.
  """
  checks.one_of("order", order, ORDERS)
  count, descending = len(weights), order == "largest_first"
  sizes = [0.0] * count if sizes is None else sizes
  room = math.inf if memory is None else memory
  failed_item: int | None = None  # the first item without room
  # The second pass sorts by bytes: it may find room where the first did not.
  for keys in (weights, sizes):
    load, used_bytes, device_of_item = (
      [0.0] * devices,
      [0.0] * devices,
      [0] * count,
    )
    for i in sorted(range(count), key=keys.__getitem__, reverse=descending):
      fitting_devices = [
        d for d in range(devices) if used_bytes[d] + sizes[i] <= room
      ]
      if not fitting_devices:
        failed_item = i if failed_item is None else failed_item
        break
      device_of_item[i] = device = min(fitting_devices, key=load.__getitem__)
      load[device] += weights[i]
      used_bytes[device] += sizes[i]
    else:
      return tuple(device_of_item)
  raise ValueError(
    f"no device of {devices} has room for item {failed_item} of"
    f" {sizes[failed_item or 0]} bytes among {sum(sizes)}; a device has"
    f" {memory}: give more memory or devices"
  )


def connect(blocks: Blocks, device: Mapping[int, int]) -> Blocks:
  """Returns the stages: the connected components of each device, or parts of
  components where two of them would need each other."""
  stages = blocks.copy()
  stages.merge_neighbours(lambda a, b: device[a] == device[b])
  return stages


class Refinement:
  """The stages of units, while units move between them."""

  def __init__(
    self,
    units: Blocks,
    stages: Sequence[Sequence[int]],
    devices: Sequence[int],
    bandwidth: float | None,
    sizes: Mapping[int, float],
    memory: float | None,
  ) -> None:
    self.units, self.devices, self.bandwidth = units, devices, bandwidth
    self.sizes, self.memory = sizes, memory
    stage_of = {i: s for s, stage in enumerate(stages) for i in stage}
    self.stage = {unit: stage_of[unit] for unit in units.members}
    self.score = self._cost()  # the objective, and the bytes sent

  def _cost(self):
    graph, weights = self.units.graph, self.units.weights
    return cost(graph, self.nodes(), self.devices, weights, self.bandwidth)

  def nodes(self) -> list[int]:
    """Returns the stage of each node."""
    return [self.stage[unit] for unit in self.units.block_of]

  def move(self, unit: int, stage: int) -> bool:
    """Moves a unit if this lowers the score; returns whether it moved."""
    current, device = self.stage[unit], self.devices[stage]
    if self.memory is not None and device != self.devices[current]:
      # Check the memory of the new device before any cost is computed.
      on_device = self.devices
      residents = (u for u, s in self.stage.items() if on_device[s] == device)
      if sum(self.sizes[u] for u in residents) + self.sizes[unit] > self.memory:
        return False
    self.stage[unit] = stage
    cost_after = self._cost()
    slack = _SLACK * self.score[0]
    is_equal = abs(cost_after[0] - self.score[0]) <= slack
    is_better = cost_after[0] < self.score[0] - slack
    if is_better or is_equal and cost_after[1] < self.score[1]:
      # Keep the least objective so far, or moves within the rounding could add
      # up.
      self.score = min(cost_after[0], self.score[0]), cost_after[1]
      return True
    self.stage[unit] = current
    return False


def cost(
  graph: Graph,
  stage: Sequence[int],
  devices: Sequence[int],
  weights: Sequence[float],
  bandwidth: float | None,
) -> tuple[float, float]:
  """Returns the objective, in seconds for a microbatch, and the bytes sent
  between devices; stages and weights are of nodes, devices of stages."""
  work: dict[int, float] = collections.defaultdict(float)
  for i, s in enumerate(stage):
    work[devices[s]] += weights[i]
  forward_bytes: dict[int, float] = collections.defaultdict(float)
  backward_bytes: dict[int, float] = collections.defaultdict(float)
  total = 0.0
  for (source, target), size in graph_lib.sent(graph, stage).items():
    s = stage[source]
    if devices[s] != devices[target]:
      forward_bytes[s] += size
      backward_bytes[target] += size
      total += size
  objective = 0.0
  for s in set(stage):
    device_work = work[devices[s]]
    seconds = device_work
    if bandwidth is not None:
      # Communication beyond the device's work is not hidden.
      seconds += max(0.0, forward_bytes[s] / bandwidth - device_work)
      seconds += max(0.0, backward_bytes[s] / bandwidth - device_work)
    objective = max(objective, seconds)
  return objective, total


def refine(state: Refinement) -> None:
  """Moves units at borders while that helps: to later stages, then to earlier.

  Stages stay in the order of the network: a unit stays before the units that
  need it, and after the units that it needs.
  """
  units, stage = state.units, state.stage
  has_improved = True
  while has_improved:
    has_improved = False
    for to_later in (True, False):
      neighbours_of = units.successors if to_later else units.predecessors
      for s in reversed(range(len(state.devices))):
        edges = sorted(
          (
            (unit, neighbour)
            for unit, its_stage in stage.items()
            if its_stage == s
            for neighbour in neighbours_of[unit]
            if stage[neighbour] != s
          ),
          reverse=to_later,
        )
        for unit, neighbour in edges:
          # A unit may only go to the nearest stage that it is connected to.
          target = stage[neighbour]
          neighbour_stages = {stage[o] for o in neighbours_of[unit]}
          if stage[unit] != s or target == s:
            continue
          nearest = min(neighbour_stages) if to_later else max(neighbour_stages)
          if target == nearest and state.move(unit, target):
            has_improved = True


class MixedPipeOptions(NamedTuple):
  """How a partition is searched: the options of `mixed_pipe`."""

  # Bytes per second; None: communication takes no time.
  bandwidth: float | None = None
  lengths: Sequence[int] | None = None  # the L to try; None is P, 2 P, ... 8 P
  # Bytes of a device; None: no limit. A node takes its stash and `copies` times
  # its parameters. Shared parameters count once for nodes that must be
  # together, and otherwise for each node.
  memory: float | None = None
  copies: float = 3  # weights, gradients and one moment
  order: str = "largest_first"  # in which blocks are assigned, as in `assign`
  tied: str = "allow"  # as in `pipedream`
  scopes: Sequence[str] = ()  # the nodes of a scope are merged first
  recompute: str = "none"  # stages that run forwards again; see `RECOMPUTE`
  seed: int = 0  # for the centres that are drawn at random


def mixed_pipe(graph: Graph, devices: int, **options: Any) -> Mixed:
  """Returns the partition of least objective over several L, on so many
  devices; the options are those of `MixedPipeOptions`.

  Raises:
    ValueError: for an option's value, or if blocks of no L fit in the memory.
  """
  check_positive(devices=devices)
  settings = MixedPipeOptions(**options)
  placement.check_limit("bandwidth", settings.bandwidth, "bytes a second")
  placement.check_limit("memory", settings.memory, "bytes")
  checks.one_of("tied", settings.tied, placement.TIED_MODES)
  checks.one_of("order", settings.order, ORDERS)
  checks.one_of("recompute", settings.recompute, RECOMPUTE)
  if settings.lengths is None:
    max_length = len(graph.nodes)
    lengths = sorted({min(n * devices, max_length) for n in range(1, 9)})
    settings = settings._replace(lengths=lengths)
  if not settings.lengths:
    raise ValueError("lengths must have one L or more, not none")
  for length in settings.lengths:
    check_positive(**{"each L": length})
  if settings.recompute == "but_last":
    return _repeat_until_consistent(graph, devices, settings)
  return _sweep(graph, devices, settings, frozenset())


class _NoRoom(ValueError):
  """The blocks of some L do not fit in the memory."""


def _repeat_until_consistent(
  graph: Graph, devices: int, options: MixedPipeOptions
) -> Mixed:
  """Repeats the search until it ends with the last stage that it assumed."""
  results: dict[frozenset[int], Mixed] = {}  # assumed -> the partition
  spared: frozenset[int] = frozenset()
  while len(results) < _MAX_SWEEPS and spared not in results:
    results[spared] = best = _sweep(graph, devices, options, spared)
    if best.settled:
      return best
    spared = frozenset(best.partition.stages[-1])
  # Then try each end of the first result's last stage as the assumed one.
  first_last_stage = results[frozenset()].partition.stages[-1]
  for start in range(len(first_last_stage)):
    spared = frozenset(first_last_stage[start:])
    if spared not in results:
      results[spared] = _sweep(graph, devices, options, spared)
  return min(results.values(), key=lambda r: (r.objective, not r.settled))


def _sweep(
  graph: Graph, devices: int, options: MixedPipeOptions, spared: frozenset[int]
) -> Mixed:
  """Returns the best of all L; the forward of the nodes `spared` is not
  recomputed."""
  recompute = options.recompute
  weights = [
    node.work(recompute != "none" and i not in spared)
    for i, node in enumerate(graph.nodes)
  ]
  units = Blocks(graph, weights)
  units.merge_all(placement.must_stay(graph, options.tied))
  sizes = {}
  for unit, nodes in units.members.items():
    stash = sum(graph.nodes[i].stash for i in nodes)
    sizes[unit] = options.copies * graph_lib.parameters(graph, nodes) + stash
  states, tried, failure = {}, [], None
  for length in options.lengths or ():
    try:
      states[length] = _attempt(units, length, sizes, devices, options)
      tried.append((length, float(states[length].score[0])))
    except _NoRoom as error:
      failure = f"with L={length}: {error}"
      tried.append((length, math.inf))
  if not states:
    raise ValueError(failure)
  length, best = min(states.items(), key=lambda entry: entry[1].score)
  # Some stages may have lost all their nodes.
  used_stages, stage_of = np.unique(best.nodes(), return_inverse=True)
  stage_indices = range(len(used_stages))
  stages = [np.flatnonzero(stage_of == s).tolist() for s in stage_indices]
  devices_of = [best.devices[s] for s in used_stages.tolist()]
  counts = {"none": 0, "but_last": len(stages) - 1, "all": len(stages)}
  recomputed = tuple(range(counts[recompute]))
  partition = placement.make(
    graph, stages, devices_of, count=devices, recompute=recomputed
  )
  stage_list = stage_of.tolist()
  # Recompute the objective: the last stage may differ from the assumed one.
  weights = [
    node.work(stage in recomputed)
    for node, stage in zip(graph.nodes, stage_list, strict=True)
  ]
  bandwidth = options.bandwidth
  objective = float(cost(graph, stage_list, devices_of, weights, bandwidth)[0])
  is_assumed_stage = recompute != "but_last" or spared == set(stages[-1])
  return Mixed(
    partition, objective, length, tuple(tried), recomputed, is_assumed_stage
  )


def _attempt(
  units: Blocks,
  length: int,
  sizes: Mapping[int, float],
  devices: int,
  options: MixedPipeOptions,
) -> Refinement:
  """Returns the refined stages of about `length` blocks."""
  bandwidth, memory = options.bandwidth, options.memory
  blocks = coarsen(units, length, bandwidth, options.scopes, options.seed)
  items = blocks.order()
  block_bytes = [
    sum(sizes[u] for u in {units.block_of[i] for i in blocks.members[b]})
    for b in items
  ]
  weights = [blocks.weight(b) for b in items]
  try:
    device_list = assign(weights, devices, block_bytes, memory, options.order)
  except ValueError as error:
    largest = units.graph.nodes[items[int(np.argmax(block_bytes))]].name
    why = f"{error} (the largest block begins with node {largest!r})"
    raise _NoRoom(why) from None
  device = dict(zip(items, device_list, strict=True))
  stages = connect(blocks, device)
  # Stages in the order of the network get the numbers 0, 1, ...
  ids = stages.order()
  members, places = [stages.members[s] for s in ids], [device[s] for s in ids]
  state = Refinement(units, members, places, bandwidth, sizes, memory)
  refine(state)
  return state
