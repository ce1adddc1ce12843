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
import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeline import graph as graph_lib
from pipeline import partition as partition_lib
from pipeline.graph import Graph
from pipeline.partition import Partition

ORDERS = ("largest_first", "smallest_first")
RECOMPUTE = ("none", "all", "but_last")
_RUNS = 10  # before the search for a last stage becomes exhaustive
_SLACK = 1e-12  # of the objective: differences below it are rounding


class Mixed(NamedTuple):
  """A partition, and what was tried for it."""

  partition: Partition
  objective: float  # seconds for a microbatch
  length: int  # the L it is of
  tried: tuple[tuple[int, float], ...]  # (L, objective) of the last sweep
  recompute: tuple[int, ...]  # stages that run their forward again
  settled: bool  # whether the last stage is the one assumed


class UnionFind:
  """Disjoint sets of numbers; a set is known by its smallest."""

  def __init__(self, count: int):
    self._up = list(range(count))

  def find(self, i: int) -> int:
    """Returns the smallest of the set that `i` is in."""
    while self._up[i] != i:
      self._up[i] = self._up[self._up[i]]
      i = self._up[i]
    return i

  def union(self, i: int, j: int) -> int:
    """Joins two sets, and returns their smallest."""
    low, high = sorted((self.find(i), self.find(j)))
    self._up[high] = low
    return low

  def copy(self) -> "UnionFind":
    """Returns another one of the same sets."""
    out = UnionFind(0)
    out._up = list(self._up)
    return out


class Blocks:
  """The graph with nodes merged to blocks; blocks never form a cycle.

  A block is known by its first node. `weights` are the seconds of nodes.
  """

  def __init__(self, graph: Graph, weights: Sequence[float]):
    self.graph, self.weights = graph, weights
    self.sets = UnionFind(len(graph.nodes))
    self.members = {i: (i,) for i in range(len(graph.nodes))}
    after, before = graph_lib.neighbours(graph)
    self.after, self.before = dict(enumerate(after)), dict(enumerate(before))

  def __len__(self) -> int:
    """Returns the number of blocks."""
    return len(self.members)

  def copy(self) -> "Blocks":
    """Returns blocks that can be merged without a trace here."""
    out = Blocks.__new__(Blocks)
    out.graph, out.weights = self.graph, self.weights
    out.sets, out.members = self.sets.copy(), dict(self.members)
    out.after = {b: set(s) for b, s in self.after.items()}
    out.before = {b: set(s) for b, s in self.before.items()}
    return out

  def weight(self, block: int) -> float:
    """Returns the seconds of a block."""
    return sum(self.weights[i] for i in self.members[block])

  def kind(self, block: int) -> str:
    """Returns the kind of the first node that has one."""
    kinds = (self.graph.nodes[i].kind for i in self.members[block])
    return next(filter(None, kinds), "")

  def order(self) -> list[int]:
    """Returns the blocks in an order in which they can run."""
    missing = {b: len(self.before[b]) for b in self.members}
    ready = [b for b, n in missing.items() if not n]
    heapq.heapify(ready)
    out = []
    while ready:
      block = heapq.heappop(ready)
      out.append(block)
      for other in self.after[block]:
        missing[other] -= 1
        if not missing[other]:
          heapq.heappush(ready, other)
    return out

  def closes_cycle(self, a: int, b: int) -> bool:
    """Whether a path from block a to b leads through others, or any back."""
    return self._reaches(self.after[a] - {b}, b) or self._reaches(
      self.after[b] - {a}, a
    )

  def _reaches(self, start, end):
    seen, stack = set(start), list(start)
    while stack:
      block = stack.pop()
      if block == end:
        return True
      new = self.after[block] - seen
      seen |= new
      stack.extend(new)
    return False

  def merge(self, a: int, b: int) -> int:
    """Makes one block of two; it must not close a cycle."""
    low = self.sets.union(a, b)
    high = b if low == a else a
    self.members[low] = tuple(
      sorted(self.members[low] + self.members.pop(high))
    )
    for mine, other in (
      (self.after, self.before),
      (self.before, self.after),
    ):
      mine[low] = (mine[low] | mine.pop(high)) - {low, high}
      for block in mine[low]:
        other[block] = (other[block] - {high}) | {low}
    return low

  def try_merge(self, a: int, b: int) -> int | None:
    """Merges two blocks unless that closes a cycle; then returns None."""
    return None if self.closes_cycle(a, b) else self.merge(a, b)

  def merge_all(self, groups: Sequence[Collection[int]]) -> None:
    """Merges each group of nodes, and what lies between its nodes."""
    after = {b: set(s) for b, s in self.after.items()}
    for group in groups:
      first, *rest = (self.sets.find(i) for i in group)
      for other in rest:  # both ways: the group is then a cycle, to be merged
        after[first].add(other)
        after[other].add(first)
    for component in _components(after):
      low, *rest = sorted(component)
      for other in rest:
        self.merge(low, other)

  def sent(self, block: int) -> float:
    """Returns the bytes of the forward cut: what a block sends to others."""
    sizes: dict[tuple[int, int], float] = {}
    inside = set(self.members[block])
    for source, target, size, _ in self.graph.edges:
      if source in inside and target not in inside:
        key = source, self.sets.find(target)
        sizes[key] = max(sizes.get(key, 0.0), size)
    return sum(sizes.values())


def _components(after: Mapping[int, set[int]]) -> list[list[int]]:
  """Returns the strongly connected components (Kosaraju)."""
  done, finished = set(), []
  for root in after:
    if root in done:
      continue
    done.add(root)
    stack = [(root, iter(sorted(after[root])))]
    while stack:
      block, others = stack[-1]
      for other in others:
        if other not in done:
          done.add(other)
          stack.append((other, iter(sorted(after[other]))))
          break
      else:
        finished.append(block)
        stack.pop()
  before = collections.defaultdict(set)
  for block, others in after.items():
    for other in others:
      before[other].add(block)
  out, done = [], set()
  for root in reversed(finished):
    if root in done:
      continue
    done.add(root)
    component, stack = [], [root]
    while stack:
      block = stack.pop()
      component.append(block)
      new = before[block] - done
      done |= new
      stack.extend(new)
    out.append(component)
  return out


# The steps of coarsening. All stop at `length` blocks, if they come so far.


def merge_scopes(blocks: Blocks, scopes: Sequence[str]) -> None:
  """Merges the nodes of each scope, such as "encoder/block3", along edges."""
  for scope in scopes:
    inside = {
      i
      for i, node in enumerate(blocks.graph.nodes)
      if node.name == scope or node.name.startswith(scope + "/")
    }
    if not inside:
      raise ValueError(f"no node is in scope {scope!r}; leave it out")
    merged = True
    while merged:
      merged = False
      for a in blocks.order():
        if a not in blocks.members or not inside.issuperset(blocks.members[a]):
          continue
        for b in sorted(blocks.after[a]):
          if inside.issuperset(blocks.members[b]) and (
            blocks.try_merge(a, b) is not None
          ):
            merged = True
            break


def merge_weightless(blocks: Blocks, length: int) -> None:
  """Merges blocks that take no time into a predecessor, else a successor."""
  merged = True
  while merged and len(blocks) > length:
    merged = any(
      _merge_lightest(blocks, block, (blocks.before, blocks.after))
      for block in blocks.order()
      if blocks.weight(block) <= 0
    )


def _merge_lightest(blocks, block, sides):
  """Merges a block with its lightest neighbour that closes no cycle."""
  for side in sides:
    for other in sorted(side[block], key=lambda b: (blocks.weight(b), b)):
      if blocks.try_merge(block, other) is not None:
        return True
  return False


def merge_bounded(
  blocks: Blocks, length: int, bandwidth: float | None
) -> Blocks:
  """Grows blocks that send for longer than they work; returns the result.

  In the order of what they send, the most first, each absorbs predecessors
  until its work takes longer than its forward cut, and is then protected from
  being absorbed. A block that does not come so far stays what it was.
  """
  if bandwidth is None:
    return blocks
  protected: set[int] = set()

  def bounded(blocks, block):
    return blocks.weight(block) <= blocks.sent(block) / bandwidth

  for start in sorted(blocks.order(), key=blocks.sent, reverse=True):
    if len(blocks) <= length:
      break
    if start not in blocks.members or start in protected:
      continue
    if not blocks.sent(start) or not bounded(blocks, start):
      continue
    trial, block = blocks.copy(), start
    while bounded(trial, block) and len(trial) > length:
      for other in sorted(trial.before[block] - protected, reverse=True):
        low = trial.try_merge(other, block)
        if low is not None:
          block = low
          break
      else:
        break
    if not bounded(trial, block):
      blocks = trial
      protected.add(block)
  return blocks


def merge_around_centers(blocks: Blocks, length: int, seed: int) -> None:
  """Merges blocks into `length` centres, successors first.

  The centres are spread evenly over the blocks of each kind, in proportion to
  their number; those left over are drawn at random.
  """
  if len(blocks) <= length:
    return
  order = blocks.order()
  kinds = collections.defaultdict(list)
  for block in order:
    if blocks.kind(block):
      kinds[blocks.kind(block)].append(block)
  known = sum(map(len, kinds.values()))
  centers: list[int] = []
  for _, mine in sorted(kinds.items()):
    share = min(length * len(mine) // known, len(mine))
    centers += [mine[i * len(mine) // share] for i in range(share)]
  left = [block for block in order if block not in centers]
  drawn = np.random.default_rng(seed).choice(
    len(left), length - len(centers), replace=False
  )
  centers += [left[i] for i in sorted(drawn.tolist())]
  for side, latest in ((blocks.after, False), (blocks.before, True)):
    queue = collections.deque(centers)
    idle = 0
    while len(blocks) > length and idle < len(queue):
      center = queue.popleft()
      others = set(queue)
      place = {b: n for n, b in enumerate(blocks.order())}
      for other in sorted(
        side[center] - others, key=place.__getitem__, reverse=latest
      ):
        low = blocks.try_merge(center, other)
        if low is not None:
          center, idle = low, -1
          break
      queue.append(center)
      idle += 1
    centers = list(queue)


def merge_smallest(blocks: Blocks, length: int) -> None:
  """Merges the smallest block with its smallest successor, again and again."""
  merged = True
  while merged and len(blocks) > length:
    ranked = sorted(blocks.members, key=lambda b: (blocks.weight(b), b))
    merged = any(_merge_lightest(blocks, b, (blocks.after,)) for b in ranked)


def coarsen(
  units: Blocks,
  length: int,
  *,
  bandwidth: float | None = None,
  scopes: Sequence[str] = (),
  seed: int = 0,
) -> Blocks:
  """Returns about `length` blocks; more, if the graph is in pieces."""
  blocks = units.copy()
  merge_scopes(blocks, scopes)
  merge_weightless(blocks, length)
  blocks = merge_bounded(blocks, length, bandwidth)
  merge_around_centers(blocks, length, seed)
  merge_smallest(blocks, length)
  return blocks


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
  if order not in ORDERS:
    raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
  sizes = [0.0] * len(weights) if sizes is None else sizes
  failed = None
  for keys in (weights, sizes):
    ranked = sorted(
      range(len(weights)),
      key=lambda i: keys[i],  # noqa: B023 - used at once
      reverse=order == "largest_first",
    )
    load, held = [0.0] * devices, [0.0] * devices
    out = [0] * len(weights)
    for i in ranked:
      fitting = [
        d
        for d in range(devices)
        if memory is None or held[d] + sizes[i] <= memory
      ]
      if not fitting:
        failed = i if failed is None else failed
        break
      device = min(fitting, key=load.__getitem__)
      out[i] = device
      load[device] += weights[i]
      held[device] += sizes[i]
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


class _State:
  """Stages of units while they are refined."""

  def __init__(self, units, stages, devices, weights, bandwidth, sizes, memory):
    self.units, self.devices = units, devices
    self.weights, self.bandwidth = weights, bandwidth
    self.sizes, self.memory = sizes, memory
    self.stage = {}
    node_stage = {i: s for s, stage in enumerate(stages) for i in stage}
    for unit in units.members:
      self.stage[unit] = node_stage[unit]
    self.now = self.cost()

  def cost(self):
    """Returns the objective and the bytes sent."""
    return _cost(
      *(self.units.graph, self.nodes(), self.devices, self.weights),
      self.bandwidth,
    )

  def nodes(self):
    """Returns the stage of each node."""
    out = [0] * len(self.units.graph.nodes)
    for unit, stage in self.stage.items():
      for i in self.units.members[unit]:
        out[i] = stage
    return out

  def has_room(self, unit, stage):
    device = self.devices[stage]
    if self.memory is None or device == self.devices[self.stage[unit]]:
      return True
    held = sum(
      self.sizes[u] for u, s in self.stage.items() if self.devices[s] == device
    )
    return held + self.sizes[unit] <= self.memory

  def move(self, unit, stage):
    """Moves a unit, if that is better; returns whether it is."""
    before = self.stage[unit]
    if not self.has_room(unit, stage):
      return False
    self.stage[unit] = stage
    new = self.cost()
    slack = _SLACK * self.now[0]
    same = abs(new[0] - self.now[0]) <= slack
    if new[0] < self.now[0] - slack or same and new[1] < self.now[1]:
      # The least yet, lest moves within the rounding add up.
      self.now = min(new[0], self.now[0]), new[1]
      return True
    self.stage[unit] = before
    return False


def _cost(graph, stage, devices, weights, bandwidth):
  """Returns the objective and the bytes sent between devices."""
  work = collections.defaultdict(float)
  for i, s in enumerate(stage):
    work[devices[s]] += weights[i]
  out, back = collections.defaultdict(float), collections.defaultdict(float)
  total = 0.0
  for (source, target), size in graph_lib.sent(graph, stage).items():
    s = stage[source]
    if devices[s] != devices[target]:
      out[s] += size
      back[target] += size
      total += size
  most = 0.0
  for s in set(stage):
    own = work[devices[s]]
    cost = own
    if bandwidth is not None:
      cost += max(0.0, out[s] / bandwidth - own)
      cost += max(0.0, back[s] / bandwidth - own)
    most = max(most, cost)
  return most, total


def objective(
  partition: Partition,
  graph: Graph,
  *,
  bandwidth: float | None = None,
  recompute: Collection[int] = (),
) -> float:
  """Returns the largest cost of a stage, in seconds for a microbatch.

  Args:
    partition: of the graph, without replicas.
    graph: the profile.
    bandwidth: bytes a second between devices; None: communication is free.
    recompute: stages that run their forward again before the backward.

  Raises:
    ValueError: for a stage with replicas.
  """
  for s, places in enumerate(partition.devices):
    if len(places) > 1:
      raise ValueError(f"stage {s} has replicas, which this does not cost")
  partition_lib.check_bandwidth(bandwidth)
  stage = partition_lib.stage_of(partition)
  weights = [
    (2 if s in recompute else 1) * node.forward + node.backward
    for node, s in zip(graph.nodes, stage, strict=True)
  ]
  devices = [places[0] for places in partition.devices]
  return _cost(graph, stage, devices, weights, bandwidth)[0]


def refine(state: _State) -> None:
  """Moves units at borders while that helps: to later stages, then to earlier.

  Stages stay in the order of the network: a unit goes no further on than what
  needs it, and no further back than what it needs.
  """
  units, stage = state.units, state.stage
  moved = True
  while moved:
    moved = False
    for later in (True, False):
      side = units.after if later else units.before
      for s in reversed(range(len(state.devices))):
        edges = sorted(
          (
            (unit, other)
            for unit, mine in stage.items()
            if mine == s
            for other in side[unit]
            if stage[other] != s
          ),
          reverse=later,
        )
        for unit, other in edges:
          to, around = stage[other], {stage[o] for o in side[unit]}
          if stage[unit] != s or to == s:
            continue
          nearest = min(around) if later else max(around)
          if to == nearest and state.move(unit, to):
            moved = True


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
  partition_lib.check_count("devices", devices)
  partition_lib.check_bandwidth(bandwidth)
  partition_lib.check_tied(tied)
  if order not in ORDERS:
    raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
  if recompute not in RECOMPUTE:
    raise ValueError(
      f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}"
    )
  if memory is not None and not memory > 0:
    raise ValueError(f"memory must be positive, in bytes, not {memory!r}")
  count = len(graph.nodes)
  if lengths is None:
    lengths = sorted({min(n * devices, count) for n in range(1, 9)})
  if not lengths:
    raise ValueError("lengths must have one L or more, not none")
  for length in lengths:
    partition_lib.check_count("each L", length)
  groups = partition_lib.must_stay(graph, tied)

  def run(spared):
    return _sweep(
      *(graph, devices, bandwidth, lengths, memory, copies, order, groups),
      *(scopes, seed, recompute, spared),
    )

  if recompute != "but_last":
    found = run(frozenset())
    again = range(len(found.partition.stages)) if recompute == "all" else ()
    return _finish(found, graph, bandwidth, tuple(again), True)
  return _settle(run, graph, bandwidth)


def _settle(run, graph, bandwidth):
  """Repeats a partition until the last stage is the one assumed."""
  spared, known, candidates = frozenset(), {}, []

  def attempt(spared):
    found = run(spared)
    stages = found.partition.stages
    last = frozenset(stages[-1])
    again = tuple(range(len(stages) - 1))
    known[spared] = last
    made = _finish(found, graph, bandwidth, again, last == spared)
    candidates.append(made)
    return made, last

  for _ in range(_RUNS):
    made, last = attempt(spared)
    if made.settled:
      return made
    spared = last
    if spared in known:  # going round in circles
      break
  # Any end of the stage that was last at first may be what to assume.
  first = sorted(known[frozenset()])
  for start in range(len(first)):
    spared = frozenset(first[start:])
    if spared not in known:
      attempt(spared)
  return min(candidates, key=lambda made: (made.objective, not made.settled))


def _finish(found, graph, bandwidth, again, settled):
  partition = partition_lib.make(
    *(graph, found.partition.stages, found.partition.devices),
    count=len(found.partition.load),
    recompute=again,
  )
  value = objective(partition, graph, bandwidth=bandwidth, recompute=again)
  return found._replace(
    partition=partition,
    objective=float(value),
    recompute=again,
    settled=settled,
  )


def _sweep(
  graph,
  devices,
  bandwidth,
  lengths,
  memory,
  copies,
  order,
  groups,
  scopes,
  seed,
  recompute,
  spared,
):
  """Returns the best of all L, for nodes that are spared recomputing."""
  again = recompute != "none"
  weights = [
    (2 if again and i not in spared else 1) * node.forward + node.backward
    for i, node in enumerate(graph.nodes)
  ]
  units = Blocks(graph, weights)
  units.merge_all(groups)

  def size(nodes):
    stash = sum(graph.nodes[i].stash for i in nodes)
    return copies * graph_lib.parameters(graph, nodes) + stash

  sizes = {unit: size(nodes) for unit, nodes in units.members.items()}
  tried, best, failed = [], None, None
  for length in lengths:
    blocks = coarsen(
      units, length, bandwidth=bandwidth, scopes=scopes, seed=seed
    )
    items = blocks.order()
    bytes_ = [
      sum(sizes[u] for u in {units.sets.find(i) for i in blocks.members[b]})
      for b in items
    ]
    try:
      placed = assign(
        [blocks.weight(b) for b in items],
        devices,
        sizes=bytes_,
        memory=memory,
        order=order,
      )
    except ValueError as error:
      largest = items[int(np.argmax(bytes_))]
      failed = (
        f"with L={length}: {error} (the largest block begins with node"
        f" {graph.nodes[largest].name!r})"
      )
      tried.append((length, float("inf")))
      continue
    device = dict(zip(items, placed, strict=True))
    stages = connect(blocks, device)
    ids = stages.order()
    state = _State(
      *(units, [stages.members[s] for s in ids], [device[s] for s in ids]),
      *(weights, bandwidth, sizes, memory),
    )
    refine(state)
    tried.append((length, float(state.now[0])))
    if best is None or state.now < best[0]:
      best = state.now, length, state
  if best is None:
    raise ValueError(failed)
  (value, _), length, state = best
  nodes = collections.defaultdict(list)
  for i, s in enumerate(state.nodes()):
    nodes[s].append(i)
  kept = sorted(nodes)
  partition = partition_lib.make(
    graph,
    [nodes[s] for s in kept],
    [state.devices[s] for s in kept],
    count=devices,
  )
  return Mixed(partition, float(value), length, tuple(tried), (), True)
