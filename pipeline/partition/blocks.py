"""The nodes of a graph, merged to blocks that never form a cycle."""

import collections
import heapq
from collections.abc import Collection, Mapping, Sequence

from pipeline.partition import graph as graph_lib
from pipeline.partition.graph import Graph


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
    inside = set(self.members[block])
    return graph_lib.bytes_of(
      ((source, self.sets.find(target)), size)
      for source, target, size, _ in self.graph.edges
      if source in inside and target not in inside
    )


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
