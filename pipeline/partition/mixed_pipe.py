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

import math
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
  """Puts each item on the device with the least load that has room for it;
  returns the device of each.

  "largest_first" is within 4/3 of the best largest load (Graham 1969). If the
  order of weights does not work out, that of sizes, in bytes, is tried.

  Raises:
    ValueError: naming the number of the item for which there is no room.
  """
  checks.one_of("order", order, ORDERS)
  count, largest = len(weights), order == "largest_first"
  sizes = [0.0] * count if sizes is None else sizes
  room = math.inf if memory is None else memory
  failed = None
  for keys in (weights, sizes):
    load, used, out = [0.0] * devices, [0.0] * devices, [0] * count
    for i in sorted(range(count), key=keys.__getitem__, reverse=largest):
      fitting = [d for d in range(devices) if used[d] + sizes[i] <= room]
      if not fitting:
        failed = i if failed is None else failed
        break
      out[i] = device = min(fitting, key=load.__getitem__)
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
  """Returns the stages: the connected components of each device, or parts of
  them where two would need each other."""
  stages = blocks.copy()
  stages.merge_neighbours(lambda a, b: device[a] == device[b])
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
    tied: as in `pipedream`.
    scopes: of which the nodes are blocks to begin with.
    recompute: which stages run their forward again before the backward: "none",
      "all", or all "but_last".
    seed: of the centres drawn at random.

  Raises:
    ValueError: for unknown options, or if blocks of no L fit in the memory.
  """
  check_positive(devices=devices)
  placement.check_limit("bandwidth", bandwidth, "bytes a second")
  checks.one_of("tied", tied, placement.TIED)
  checks.one_of("order", order, ORDERS)
  checks.one_of("recompute", recompute, RECOMPUTE)
  placement.check_limit("memory", memory, "bytes")
  count = len(graph.nodes)
  if lengths is None:
    lengths = sorted({min(n * devices, count) for n in range(1, 9)})
  if not lengths:
    raise ValueError("lengths must have one L or more, not none")
  for length in lengths:
    check_positive(**{"each L": length})
  search = _Search(
    graph=graph,
    devices=devices,
    bandwidth=bandwidth,
    lengths=lengths,
    memory=memory,
    copies=copies,
    order=order,
    groups=placement.must_stay(graph, tied),
    scopes=scopes,
    seed=seed,
    recompute=recompute,
  )
  if recompute == "but_last":
    return _settle(search)
  return _sweep(search, frozenset())


class _NoRoom(ValueError):
  """The blocks of some L do not fit in the memory."""


class _Search(NamedTuple):
  """What `mixed_pipe` was asked for."""

  graph: Graph
  devices: int
  bandwidth: float | None
  lengths: Sequence[int]
  memory: float | None
  copies: float
  order: str
  groups: list[tuple[int, ...]]  # of nodes that must be together
  scopes: Sequence[str]
  seed: int
  recompute: str


def _settle(search):
  """Repeats a partition until the last stage is the one assumed."""
  results = {}  # assumed -> the partition
  spared = frozenset()
  while len(results) < _RUNS and spared not in results:
    results[spared] = best = _sweep(search, spared)
    if best.settled:
      return best
    spared = frozenset(best.partition.stages[-1])
  # Any end of the stage that was last at first may be what to assume.
  first = results[frozenset()].partition.stages[-1]
  for start in range(len(first)):
    spared = frozenset(first[start:])
    if spared not in results:
      results[spared] = _sweep(search, spared)
  return min(results.values(), key=lambda r: (r.objective, not r.settled))


def _sweep(search, spared):
  """Returns the best of all L, for nodes that are spared recomputing."""
  graph, recompute = search.graph, search.recompute
  weights = [
    node.work(recompute != "none" and i not in spared)
    for i, node in enumerate(graph.nodes)
  ]
  units = Blocks(graph, weights)
  units.merge_all(search.groups)
  sizes = {
    unit: search.copies * graph_lib.parameters(graph, nodes)
    + sum(graph.nodes[i].stash for i in nodes)
    for unit, nodes in units.members.items()
  }
  tried, best, best_length, failure = [], None, None, None
  for length in search.lengths:
    try:
      state = _attempt(search, units, sizes, length)
    except _NoRoom as error:
      failure = f"with L={length}: {error}"
      tried.append((length, math.inf))
      continue
    tried.append((length, float(state.now[0])))
    if best is None or state.now < best.now:
      best, best_length = state, length
  if best is None:
    raise ValueError(failure)
  where = np.array(best.nodes())
  kept = np.unique(where).tolist()  # stages may have lost all their nodes
  stages = [np.flatnonzero(where == s).tolist() for s in kept]
  devices = [best.devices[s] for s in kept]
  counts = {"none": 0, "but_last": len(stages) - 1, "all": len(stages)}
  again = tuple(range(counts[recompute]))
  partition = placement.make(
    graph, stages, devices, count=search.devices, recompute=again
  )
  value = float(objective(partition, graph, search.bandwidth, again))
  settled = recompute != "but_last" or spared == set(stages[-1])
  return Mixed(partition, value, best_length, tuple(tried), again, settled)


def _attempt(search, units, sizes, length):
  """Returns the refined stages of about `length` blocks."""
  blocks = coarsen(
    units,
    length,
    bandwidth=search.bandwidth,
    scopes=search.scopes,
    seed=search.seed,
  )
  items = blocks.order()
  bytes_ = [
    sum(sizes[u] for u in {units.block_of[i] for i in blocks.members[b]})
    for b in items
  ]
  try:
    placed = assign(
      [blocks.weight(b) for b in items],
      search.devices,
      sizes=bytes_,
      memory=search.memory,
      order=search.order,
    )
  except ValueError as error:
    largest = search.graph.nodes[items[int(np.argmax(bytes_))]].name
    why = f"{error} (the largest block begins with node {largest!r})"
    raise _NoRoom(why) from None
  device = dict(zip(items, placed, strict=True))
  stages = connect(blocks, device)
  ids = stages.order()
  state = Refinement(
    units,
    [stages.members[s] for s in ids],
    [device[s] for s in ids],
    search.bandwidth,
    sizes,
    search.memory,
  )
  refine(state)
  return state
