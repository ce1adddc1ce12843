"""The nodes of a graph, merged to blocks that never form a cycle."""

import copy
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from pipeline.partition import graph as graph_lib
from pipeline.partition.graph import Graph


class Blocks:
  """The graph with nodes merged to blocks; blocks never form a cycle.

  A block is known by its first node. `weights` are the seconds of nodes.
  """

  def __init__(self, graph: Graph, weights: Sequence[float]):
    self.graph, self.weights = graph, weights
    self.block_of = list(range(len(graph.nodes)))
    self.members = {i: (i,) for i in self.block_of}
    after, before = graph_lib.neighbours(graph)
    self.after, self.before = dict(enumerate(after)), dict(enumerate(before))

  def __len__(self) -> int:
    return len(self.members)

  def copy(self) -> "Blocks":
    """Returns blocks that can be merged without a trace here."""
    out = copy.copy(self)
    out.block_of, out.members = self.block_of.copy(), self.members.copy()
    # Sets of neighbours are replaced, never changed.
    out.after, out.before = self.after.copy(), self.before.copy()
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
    ready = sorted(b for b, n in missing.items() if not n)  # a heap
    out = []
    while ready:
      block = heapq.heappop(ready)
      out.append(block)
      for other in self.after[block]:
        missing[other] -= 1
        if not missing[other]:
          heapq.heappush(ready, other)
    return out

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

  def _merge(self, a, b):
    low, high = sorted((a, b))
    for i in self.members[high]:
      self.block_of[i] = low
    members = self.members[low] + self.members.pop(high)
    self.members[low] = tuple(sorted(members))
    sides = self.after, self.before
    for mine, other in (sides, sides[::-1]):
      mine[low] = (mine[low] | mine.pop(high)) - {low, high}
      for block in mine[low]:
        other[block] = (other[block] - {high}) | {low}
    return low

  def try_merge(self, a: int, b: int) -> int | None:
    """Merges two blocks unless that closes a cycle; then returns None."""
    around, back = self.after[a] - {b}, self.after[b] - {a}
    if self._reaches(around, b) or self._reaches(back, a):
      return None
    return self._merge(a, b)

  def merge_neighbours(self, may: Callable[[int, int], bool]) -> None:
    """Merges blocks along edges (a, b) with may(a, b), without cycles."""
    merged = True
    while merged:
      merged = False
      for a in self.order():
        if a in self.members:
          others = (b for b in sorted(self.after[a]) if may(a, b))
          merged |= self.merge_first(a, others)

  def merge_first(self, block: int, others: Iterable[int]) -> bool:
    """Merges a block with the first of others that closes no cycle."""
    return any(self.try_merge(block, other) is not None for other in others)

  def merge_all(self, groups: Sequence[Collection[int]]) -> None:
    """Merges each group of nodes, and what lies between its nodes."""
    # Imported where it is needed: it takes a fifth of a command's start.
    from scipy import sparse
    from scipy.sparse import csgraph

    ends = [(a, b) for a, others in self.after.items() for b in others]
    for group in groups:
      first, *rest = (self.block_of[i] for i in group)
      for other in rest:  # both ways: the group is then a cycle, to be merged
        ends += [(first, other), (other, first)]
    rows, columns = np.array(ends, int).reshape(-1, 2).T
    size = len(self.block_of)
    entries = np.ones(len(ends)), (rows, columns)
    matrix = sparse.csr_array(entries, (size, size))
    _, component = csgraph.connected_components(matrix, connection="strong")
    first_of = {}
    for block in list(self.members):
      first = first_of.setdefault(component[block], block)
      if first != block:
        self._merge(first, block)

  def sent(self, block: int) -> float:
    """Returns the bytes of the forward cut: what a block sends to others."""
    inside = set(self.members[block])
    return graph_lib.bytes_of(
      ((source, self.block_of[target]), size)
      for source, target, size, _ in self.graph.edges
      if source in inside and target not in inside
    )
