"""Merges the nodes of a graph to about `length` blocks: the first step of
`mixed_pipe`.
"""

import collections
import copy
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from asgd.pipeline.partition import graph as graph_lib
from asgd.pipeline.partition.graph import Graph


class Blocks:
  """The graph with nodes merged to blocks; blocks never form a cycle.

  The number of a block is its first node. `weights` are the seconds of nodes.
  """

  def __init__(self, graph: Graph, weights: Sequence[float]):
    self.graph, self.weights = graph, weights
    self.block_of = list(range(len(graph.nodes)))
    # block -> its nodes
    self.members: dict[int, tuple[int, ...]] = {i: (i,) for i in self.block_of}
    successors, predecessors = graph_lib.neighbours(graph)
    self.successors = dict(enumerate(successors))
    self.predecessors = dict(enumerate(predecessors))

  def __len__(self) -> int:
    return len(self.members)

  def copy(self) -> "Blocks":
    """Returns a copy; merges in the copy do not change this object."""
    copied = copy.copy(self)
    copied.block_of, copied.members = self.block_of.copy(), self.members.copy()
    # Sets of neighbours are replaced, never changed.
    copied.successors = self.successors.copy()
    copied.predecessors = self.predecessors.copy()
    return copied

  def weight(self, block: int) -> float:
    """Returns the seconds of a block."""
    return sum(self.weights[i] for i in self.members[block])

  def kind(self, block: int) -> str:
    """Returns the kind of the first node that has one."""
    kinds = (self.graph.nodes[i].kind for i in self.members[block])
    return next(filter(None, kinds), "")

  def order(self) -> list[int]:
    """Returns the blocks in an order in which they can run."""
    missing_predecessors = {b: len(self.predecessors[b]) for b in self.members}
    # A sorted list is a heap.
    ready_blocks = sorted(b for b, n in missing_predecessors.items() if not n)
    order = []
    while ready_blocks:
      block = heapq.heappop(ready_blocks)
      order.append(block)
      for successor in self.successors[block]:
        missing_predecessors[successor] -= 1
        if not missing_predecessors[successor]:
          heapq.heappush(ready_blocks, successor)
    return order

  def _reaches(self, start: set[int], end: int) -> bool:
    """Returns whether a path leads from any block of `start` to `end`."""
    # Depth first search.
    visited, stack = set(start), list(start)
    while stack:
      block = stack.pop()
      if block == end:
        return True
      successors = self.successors[block] - visited
      visited |= successors
      stack.extend(successors)
    return False

  def _merge(self, a: int, b: int) -> int:
    """Merges two blocks under the lower number; returns that number."""
    low, high = sorted((a, b))
    for i in self.members[high]:
      self.block_of[i] = low
    members = self.members[low] + self.members.pop(high)
    self.members[low] = tuple(sorted(members))
    directions = self.successors, self.predecessors
    for adjacent, reverse in (directions, directions[::-1]):
      adjacent[low] = (adjacent[low] | adjacent.pop(high)) - {low, high}
      for block in adjacent[low]:
        reverse[block] = (reverse[block] - {high}) | {low}
    return low

  def try_merge(self, a: int, b: int) -> int | None:
    """Merges two blocks and returns the number of the result; None if the merge
    would close a cycle."""
    # A path from a to b besides the edge (a, b) would become a cycle.
    successors = self.successors[a] - {b}
    successors_of_b = self.successors[b] - {a}
    if self._reaches(successors, b) or self._reaches(successors_of_b, a):
      return None
    return self._merge(a, b)

  def merge_neighbours(self, may_merge: Callable[[int, int], bool]) -> None:
    """Merges blocks along edges (a, b) with may_merge(a, b), without cycles."""
    has_merged = True
    while has_merged:
      has_merged = False
      for a in self.order():
        if a in self.members:
          successors = sorted(self.successors[a])
          candidates = (b for b in successors if may_merge(a, b))
          has_merged |= self.merge_first(a, candidates)

  def merge_first(self, block: int, candidates: Iterable[int]) -> bool:
    """Merges a block with the first candidate that closes no cycle; returns
    whether there is one."""
    results = (self.try_merge(block, candidate) for candidate in candidates)
    return any(block_number is not None for block_number in results)

  def merge_all(self, groups: Sequence[Collection[int]]) -> None:
    """Merges each group of nodes, and the nodes on paths between them."""
    # Imported where it is needed: it takes a fifth of a command's start.
    from scipy import sparse
    from scipy.sparse import csgraph

    pairs = [
      (a, b) for a, successors in self.successors.items() for b in successors
    ]
    for group in groups:
      first_block, *later_blocks = (self.block_of[i] for i in group)
      # Edges both ways make the group a cycle, which is merged below.
      for later_block in later_blocks:
        pairs += [(first_block, later_block), (later_block, first_block)]
    rows, columns = np.array(pairs, int).reshape(-1, 2).T
    size = len(self.block_of)
    entries = np.ones(len(pairs)), (rows, columns)
    matrix = sparse.csr_array(entries, (size, size))
    _, component = csgraph.connected_components(matrix, connection="strong")
    first_of: dict[int, int] = {}  # component -> its first block
    for block in list(self.members):
      first_block = first_of.setdefault(component[block], block)
      if first_block != block:
        self._merge(first_block, block)

  def sent(self, block: int) -> float:
    """Returns the bytes that a block's forward sends to all other blocks."""
    nodes = set(self.members[block])
    return graph_lib.bytes_of(
      ((source, self.block_of[target]), size)
      for source, target, size, _ in self.graph.edges
      if source in nodes and target not in nodes
    )


def merge_scopes(blocks: Blocks, scopes: Sequence[str]) -> None:
  """Merges the nodes of each scope, such as "encoder/block3", along edges."""
  for scope in scopes:
    names = enumerate(f"{node.name}/" for node in blocks.graph.nodes)
    scope_nodes = {i for i, name in names if name.startswith(f"{scope}/")}
    if not scope_nodes:
      raise ValueError(f"no node is in scope {scope!r}; leave it out")

    def is_within_scope(a, b, scope_nodes=scope_nodes):
      return scope_nodes.issuperset(blocks.members[a] + blocks.members[b])

    blocks.merge_neighbours(is_within_scope)


def merge_weightless(blocks: Blocks, length: int) -> None:
  """Merges blocks that take no time into a predecessor, else a successor."""
  has_merged = True
  while has_merged and len(blocks) > length:
    has_merged = any(
      _merge_lightest(blocks, block, (blocks.predecessors, blocks.successors))
      for block in blocks.order()
      if blocks.weight(block) <= 0
    )


def _merge_lightest(
  blocks: Blocks, block: int, adjacencies: Iterable[dict[int, set[int]]]
) -> bool:
  """Merges a block with its lightest neighbour that closes no cycle."""

  def rank(neighbour):
    return blocks.weight(neighbour), neighbour

  return any(
    blocks.merge_first(block, sorted(adjacent[block], key=rank))
    for adjacent in adjacencies
  )


def merge_bounded(
  blocks: Blocks, length: int, bandwidth: float | None
) -> Blocks:
  """Grows blocks that send for longer than they work; returns the result.

  Blocks that send the most bytes go first. Each absorbs predecessors until it
  works for longer than its forward sends; then no other block may absorb it. A
  block that cannot reach this stays unchanged.
  """
  if bandwidth is None:
    return blocks
  protected: set[int] = set()

  def is_send_bound(blocks, block):
    return blocks.weight(block) <= blocks.sent(block) / bandwidth

  for start in sorted(blocks.order(), key=blocks.sent, reverse=True):
    if len(blocks) <= length:
      break
    if start not in blocks.members or start in protected:
      continue
    if not blocks.sent(start) or not is_send_bound(blocks, start):
      continue
    # Grow a copy, and keep it only if the block then works longer than it
    # sends.
    trial, block = blocks.copy(), start
    while is_send_bound(trial, block) and len(trial) > length:
      predecessors = sorted(trial.predecessors[block] - protected, reverse=True)
      if not trial.merge_first(block, predecessors):
        break
      block = trial.block_of[block]
    if not is_send_bound(trial, block):
      blocks = trial
      protected.add(block)
  return blocks


def merge_around_centers(blocks: Blocks, length: int, seed: int) -> None:
  """Merges blocks into `length` centres, successors first.

  Each kind of blocks gets centres in proportion to its number of blocks, spread
  evenly over them. The remaining centres are drawn at random.
  """
  if len(blocks) <= length:
    return
  order = blocks.order()
  kinds = collections.defaultdict(list)
  for block in order:
    if kind := blocks.kind(block):
      kinds[kind].append(block)
  count = sum(map(len, kinds.values()))
  centers = []
  for _, kind_blocks in sorted(kinds.items()):
    n_centers = min(length * len(kind_blocks) // count, len(kind_blocks))
    centers += [
      kind_blocks[i * len(kind_blocks) // n_centers] for i in range(n_centers)
    ]
  other_blocks = [block for block in order if block not in centers]
  # Blocks without a kind, and remainders of the division, are drawn.
  rng = np.random.default_rng(seed)
  indices = rng.choice(len(other_blocks), length - len(centers), replace=False)
  centers += [other_blocks[i] for i in sorted(indices.tolist())]
  # Centres take turns; the last round is one in which no centre can merge.
  directions = (blocks.successors, False), (blocks.predecessors, True)
  for adjacent, is_reversed in directions:
    queue = collections.deque(centers)
    n_idle = 0
    while len(blocks) > length and n_idle < len(queue):
      center = queue.popleft()
      position = {b: n for n, b in enumerate(blocks.order())}
      neighbours = sorted(
        adjacent[center].difference(queue),
        key=position.__getitem__,
        reverse=is_reversed,
      )
      n_idle = 0 if blocks.merge_first(center, neighbours) else n_idle + 1
      queue.append(blocks.block_of[center])
    centers = list(queue)


def merge_smallest(blocks: Blocks, length: int) -> None:
  """Merges the smallest block with its smallest successor, again and again."""
  has_merged = True
  while has_merged and len(blocks) > length:
    # The number breaks ties: the result is deterministic.
    ranked = sorted(blocks.members, key=lambda b: (blocks.weight(b), b))
    has_merged = any(
      _merge_lightest(blocks, b, (blocks.successors,)) for b in ranked
    )


def coarsen(
  units: Blocks,
  length: int,
  bandwidth: float | None = None,
  scopes: Sequence[str] = (),
  seed: int = 0,
) -> Blocks:
  """Returns about `length` blocks; more, if the graph is in pieces."""
  # [1] Scopes, [2] blocks without time, [3] bounded blocks, [4] centres and [5]
  # the smallest blocks; each step leaves fewer blocks to the next.
  blocks = units.copy()
  merge_scopes(blocks, scopes)
  merge_weightless(blocks, length)
  blocks = merge_bounded(blocks, length, bandwidth)
  merge_around_centers(blocks, length, seed)
  merge_smallest(blocks, length)
  return blocks
