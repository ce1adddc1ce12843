"""FTPipe's partitioner: devices that hold several stages far apart.

If a device may hold stages that are not neighbours, loads can be levelled by
packing blocks in bins instead of cutting a chain. Eliad et al. do it in steps:

  coarsen   merge nodes until about L blocks are left (`coarsen`)
  assign    put the blocks on P devices, each on the one with the least load
            that has memory for it (`assign`)
  stages    merge neighbours on one device, as far as no two stages come to
            need each other (`connect`)
  refine    move nodes at the borders of stages to a stage next to them, while
            that lowers the objective (`refine`)

and keep the best of several L, as the result is not monotone in L. The
objective is the largest cost of a stage,

  C + max(0, comm_forward - C) + max(0, comm_backward - C),

where C is the work of all stages on its device and communication counts only
where it is not hidden behind work.

All but the last stage may have to run their forward again before the backward.
Which nodes are spared is known only when the partition is, so it is repeated
until the last stage is what it was assumed to be.

Where this is not the released code:
  1. Largest blocks are assigned first. That code sorts by size and then takes
     from the wrong end; `order="smallest_first"` does as it does.
  2. Equal objectives are told apart by the bytes sent. That code means to, and
     compares with 0.
  3. A tensor that several nodes of a stage need is sent once, and nothing is
     sent between stages of one device (there: once an edge, at 550 GB/s).
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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asgd import checks
from pipeline.partition import graph as graph_lib
from pipeline.partition import placement
from pipeline.partition.blocks import Blocks
from pipeline.partition.coarsen import coarsen
from pipeline.partition.graph import Graph
from pipeline.partition.placement import Partition
from pipeline.partition.refine import Refinement, objective, refine
from pipeline.table import check_positive

ORDERS = ("largest_first", "smallest_first")
RECOMPUTE = ("none", "all", "but_last")
_RUNS = 10  # before the search for a last stage becomes exhaustive


class Mixed(NamedTuple):
  """A partition, and what was tried for it."""

  partition: Partition
  objective: float  # seconds for a microbatch
  length: int  # the L it is of
  tried: tuple[tuple[int, float], ...]  # (L, objective) of the last sweep
  recompute: tuple[int, ...]  # stages that run their forward again
  settled: bool  # whether the last stage is the one assumed


def assign(
  weights: Sequence[float],
  devices: int,
  *,
  sizes: Sequence[float] | None = None,
  memory: float | None = None,
  order: str = "largest_first",
) -> tuple[int, ...]:
  """Puts each item on the device with the least load that has room for it.

  If the order of weights does not work out, that of sizes is tried.

  Args:
    weights: of each item.
    devices: how many.
    sizes: bytes of each item; None: nothing.
    memory: bytes of a device; None: without end.
    order: "largest_first" is within 4/3 of the best largest load (Graham
      1969); "smallest_first" is what the released code does.

  Returns:
    The device of each item.

  Raises:
    ValueError: for another order, or naming the number of the item for which
      there is no room.
  """
  checks.one_of("order", order, ORDERS)
  sizes = [0.0] * len(weights) if sizes is None else sizes
  failed = None
  for keys in (weights, sizes):
    ranked = sorted(
      range(len(weights)),
      key=lambda i: keys[i],  # noqa: B023 - used at once
      reverse=order == "largest_first",
    )
    load, used = [0.0] * devices, [0.0] * devices
    out = [0] * len(weights)
    for i in ranked:
      fitting = [
        d
        for d in range(devices)
        if memory is None or used[d] + sizes[i] <= memory
      ]
      if not fitting:
        failed = i if failed is None else failed
        break
      device = min(fitting, key=load.__getitem__)
      out[i] = device
      load[device] += weights[i]
      used[device] += sizes[i]
    else:
      return tuple(out)
  raise ValueError(
    f"no device of {devices} has room for item {failed} of {sizes[failed]}"
    f" bytes among {sum(sizes)}; a device has {memory}: give more memory or"
    " devices"
  )


def connect(blocks: Blocks, device: Mapping[int, int]) -> Blocks:
  """Returns the stages: neighbours on one device merged, without cycles.

  These are the connected components of each device, if no two of them need
  each other, and parts of them otherwise.

  Args:
    blocks: what was assigned.
    device: of each block.
  """
  stages = blocks.copy()
  where = {b: device[b] for b in blocks.members}
  merged = True
  while merged:
    merged = False
    for a in stages.order():
      if a not in stages.members:
        continue
      for b in sorted(stages.after[a]):
        if where[a] == where[b] and stages.try_merge(a, b) is not None:
          merged = True
          break
  return stages


def mixed_pipe(
  graph: Graph,
  devices: int,
  *,
  bandwidth: float | None = None,
  lengths: Sequence[int] | None = None,
  memory: float | None = None,
  copies: float = 3,
  order: str = "largest_first",
  tied: str = "allow",
  scopes: Sequence[str] = (),
  recompute: str = "none",
  seed: int = 0,
) -> Mixed:
  """Returns the partition of least objective over several L.

  Args:
    graph: the profile.
    devices: P.
    bandwidth: bytes a second between devices; None: communication is free.
    lengths: the L to try; None is P, 2 P, ... 8 P, as far as there are nodes.
    memory: bytes of a device; None: without end. A node takes its stash and
      `copies` times its parameters; what nodes share counts once where they
      must be together, and otherwise for each.
    copies: of parameters; 3 are weights, gradients and one moment.
    order: in which blocks are assigned, as in `assign`.
    tied: "together" keeps nodes with common parameters in one stage; "allow"
      does not, and the partition says which stages have to synchronise them.
    scopes: of which the nodes are blocks to begin with.
    recompute: which stages run their forward again before the backward: "none",
      "all", or all "but_last".
    seed: of the centres drawn at random.

  Returns:
    The partition and what was tried.

  Raises:
    ValueError: for unknown options, or if blocks of no L fit in the memory.
  """
  check_positive(devices=devices)
  placement.check_bandwidth(bandwidth)
  checks.one_of("tied", tied, placement.TIED)
  checks.one_of("order", order, ORDERS)
  checks.one_of("recompute", recompute, RECOMPUTE)
  placement.check_memory(memory)
  count = len(graph.nodes)
  if lengths is None:
    lengths = sorted({min(n * devices, count) for n in range(1, 9)})
  if not lengths:
    raise ValueError("lengths must have one L or more, not none")
  for length in lengths:
    check_positive(**{"each L": length})
  search = _Search(
    *(graph, devices, bandwidth, tuple(lengths), memory, copies, order),
    *(placement.must_stay(graph, tied), scopes, seed, recompute != "none"),
  )
  if recompute == "but_last":
    return _settle(search)
  best = _sweep(search, frozenset())
  again = range(len(best.partition.stages)) if recompute == "all" else ()
  return _finish(search, best, tuple(again), True)


class _NoRoom(ValueError):
  """The blocks of some L do not fit in the memory."""


class _Search(NamedTuple):
  """What `mixed_pipe` was asked for."""

  graph: Graph
  devices: int
  bandwidth: float | None
  lengths: tuple[int, ...]
  memory: float | None
  copies: float
  order: str
  groups: list[tuple[int, ...]]  # of nodes that must be together
  scopes: Sequence[str]
  seed: int
  recompute: bool


def _settle(search):
  """Repeats a partition until the last stage is the one assumed."""
  last_of: dict[frozenset[int], frozenset[int]] = {}  # assumed -> what it was
  candidates = []

  def attempt(spared):
    best = _sweep(search, spared)
    stages = best.partition.stages
    last_of[spared] = frozenset(stages[-1])
    again = tuple(range(len(stages) - 1))
    candidates.append(_finish(search, best, again, last_of[spared] == spared))
    return candidates[-1]

  spared = frozenset()
  for _ in range(_RUNS):
    candidate = attempt(spared)
    if candidate.settled:
      return candidate
    spared = last_of[spared]
    if spared in last_of:  # going round in circles
      break
  # Any end of the stage that was last at first may be what to assume.
  first = sorted(last_of[frozenset()])
  for start in range(len(first)):
    spared = frozenset(first[start:])
    if spared not in last_of:
      attempt(spared)
  return min(candidates, key=lambda each: (each.objective, not each.settled))


def _finish(search, best, again, settled):
  """The partition with the loads and the objective of what runs again."""
  partition = placement.make(
    *(search.graph, best.partition.stages, best.partition.devices),
    count=search.devices,
    recompute=again,
  )
  value = objective(
    partition, search.graph, bandwidth=search.bandwidth, recompute=again
  )
  return best._replace(
    partition=partition,
    objective=float(value),
    recompute=again,
    settled=settled,
  )


def _sweep(search, spared):
  """Returns the best of all L, for nodes that are spared recomputing."""
  graph = search.graph
  weights = [
    (2 if search.recompute and i not in spared else 1) * node.forward
    + node.backward
    for i, node in enumerate(graph.nodes)
  ]
  units = Blocks(graph, weights)
  units.merge_all(search.groups)
  sizes = {
    unit: search.copies * graph_lib.parameters(graph, nodes)
    + sum(graph.nodes[i].stash for i in nodes)
    for unit, nodes in units.members.items()
  }
  tried, best, failure = [], None, None
  for length in search.lengths:
    try:
      state = _attempt(search, units, sizes, length)
    except _NoRoom as error:
      failure = f"with L={length}: {error}"
      tried.append((length, float("inf")))
      continue
    tried.append((length, float(state.now[0])))
    if best is None or state.now < best[0]:
      best = state.now, length, state
  if best is None:
    raise ValueError(failure)
  (value, _), length, state = best
  nodes = collections.defaultdict(list)
  for i, s in enumerate(state.nodes()):
    nodes[s].append(i)
  stages = sorted(nodes)
  partition = placement.make(
    graph,
    [nodes[s] for s in stages],
    [state.devices[s] for s in stages],
    count=search.devices,
  )
  return Mixed(partition, float(value), length, tuple(tried), (), True)


def _attempt(search, units, sizes, length):
  """Returns the refined stages of about `length` blocks."""
  blocks = coarsen(
    *(units, length),
    bandwidth=search.bandwidth,
    scopes=search.scopes,
    seed=search.seed,
  )
  items = blocks.order()
  bytes_ = [
    sum(sizes[u] for u in {units.sets.find(i) for i in blocks.members[b]})
    for b in items
  ]
  try:
    placed = assign(
      *([blocks.weight(b) for b in items], search.devices),
      sizes=bytes_,
      memory=search.memory,
      order=search.order,
    )
  except ValueError as error:
    largest = search.graph.nodes[items[int(np.argmax(bytes_))]].name
    raise _NoRoom(
      f"{error} (the largest block begins with node {largest!r})"
    ) from None
  device = dict(zip(items, placed, strict=True))
  stages = connect(blocks, device)
  ids = stages.order()
  state = Refinement(
    *(units, [stages.members[s] for s in ids], [device[s] for s in ids]),
    *(units.weights, search.bandwidth, sizes, search.memory),
  )
  refine(state)
  return state
