"""Merges blocks until few are left: the first step of `mixed_pipe`.

Each way of merging stops at `length` blocks, if it comes so far.
"""

import collections
from collections.abc import Sequence

import numpy as np

from pipeline.partition.blocks import Blocks


def merge_scopes(blocks: Blocks, scopes: Sequence[str]) -> None:
  """Merges the nodes of each scope, such as "encoder/block3", along edges."""
  for scope in scopes:
    names = enumerate(f"{node.name}/" for node in blocks.graph.nodes)
    inside = {i for i, name in names if name.startswith(f"{scope}/")}
    if not inside:
      raise ValueError(f"no node is in scope {scope!r}; leave it out")

    def within(a, b, inside=inside):
      return inside.issuperset(blocks.members[a] + blocks.members[b])

    blocks.merge_neighbours(within)


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

  def rank(other):
    return blocks.weight(other), other

  return any(
    blocks.merge_first(block, sorted(side[block], key=rank)) for side in sides
  )


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
      others = sorted(trial.before[block] - protected, reverse=True)
      if not trial.merge_first(block, others):
        break
      block = trial.block_of[block]
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
    if kind := blocks.kind(block):
      kinds[kind].append(block)
  count = sum(map(len, kinds.values()))
  centers = []
  for _, mine in sorted(kinds.items()):
    share = min(length * len(mine) // count, len(mine))
    centers += [mine[i * len(mine) // share] for i in range(share)]
  left = [block for block in order if block not in centers]
  rng = np.random.default_rng(seed)
  drawn = rng.choice(len(left), length - len(centers), replace=False)
  centers += [left[i] for i in sorted(drawn.tolist())]
  for side, latest in ((blocks.after, False), (blocks.before, True)):
    queue = collections.deque(centers)
    idle = 0
    while len(blocks) > length and idle < len(queue):
      center = queue.popleft()
      place = {b: n for n, b in enumerate(blocks.order())}
      others = side[center].difference(queue)
      others = sorted(others, key=place.__getitem__, reverse=latest)
      idle = 0 if blocks.merge_first(center, others) else idle + 1
      queue.append(blocks.block_of[center])
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
