"""Moves nodes between stages that are next to each other while that lowers the
objective of `mixed_pipe`: the largest cost of a stage."""

import collections

from pipeline.partition import graph as graph_lib

_SLACK = 1e-12  # of the objective: differences below it are rounding


class Refinement:
  """Stages of units while they are refined."""

  def __init__(self, units, stages, devices, bandwidth, sizes, memory):
    self.units, self.devices, self.bandwidth = units, devices, bandwidth
    self.sizes, self.memory = sizes, memory
    stage_of = {i: s for s, stage in enumerate(stages) for i in stage}
    self.stage = {unit: stage_of[unit] for unit in units.members}
    self.now = self._cost()  # the objective, and the bytes sent

  def _cost(self):
    graph, weights = self.units.graph, self.units.weights
    return cost(graph, self.nodes(), self.devices, weights, self.bandwidth)

  def nodes(self) -> list[int]:
    """Returns the stage of each node."""
    return [self.stage[unit] for unit in self.units.block_of]

  def move(self, unit: int, stage: int) -> bool:
    """Moves a unit, if that is better; returns whether it is."""
    before, device = self.stage[unit], self.devices[stage]
    if self.memory is not None and device != self.devices[before]:
      there = (u for u, s in self.stage.items() if self.devices[s] == device)
      if sum(self.sizes[u] for u in there) + self.sizes[unit] > self.memory:
        return False
    self.stage[unit] = stage
    new = self._cost()
    slack = _SLACK * self.now[0]
    same = abs(new[0] - self.now[0]) <= slack
    if new[0] < self.now[0] - slack or same and new[1] < self.now[1]:
      # The least yet, lest moves within the rounding add up.
      self.now = min(new[0], self.now[0]), new[1]
      return True
    self.stage[unit] = before
    return False


def cost(graph, stage, devices, weights, bandwidth) -> tuple[float, float]:
  """Returns the objective, in seconds for a microbatch, and the bytes sent
  between devices; stages and weights are of nodes, devices of stages."""
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
    seconds = own
    if bandwidth is not None:
      seconds += max(0.0, out[s] / bandwidth - own)
      seconds += max(0.0, back[s] / bandwidth - own)
    most = max(most, seconds)
  return most, total


def refine(state: Refinement) -> None:
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
