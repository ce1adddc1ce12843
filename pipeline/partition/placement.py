"""Which nodes make a stage, and which devices hold it.

In a `Partition` each node is placed exactly once, and tensors go from earlier
stages to later ones. `make` checks stages that the caller chose. Three
functions choose stages: `balance` here, for a chain if communication costs
nothing, `pipedream` for stages that may be replicated, `mixed_pipe` for several
stages on a device.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asgd.pipeline.partition.graph import Graph

TIED_MODES = ("allow", "together")


class Partition(NamedTuple):
  """Stages are numbered along the network: no tensor goes back."""

  stages: tuple[tuple[int, ...], ...]  # S x nodes, in ascending order
  devices: tuple[tuple[int, ...], ...]  # S x devices; several: replicas
  load: np.ndarray  # float[D], seconds of work for each microbatch
  shared: tuple[tuple[int, ...], ...]  # stages with parameters to synchronise


def make(
  graph: Graph,
  stages: Iterable[Collection[int]],
  devices: Iterable[int | Collection[int]] | None = None,
  *,
  count: int | None = None,
  recompute: Collection[int] = (),
) -> Partition:
  """Checks the stages and returns them as a Partition.

  Args:
    graph: the network.
    stages: the nodes of each stage, in the order of the network.
    devices: the device of each stage, or its devices (replicas). By default
      stage s is on device s.
    count: the number of devices; by default as many as `devices` names.
    recompute: stages that run their forward again before the backward.

  Raises:
    ValueError: for stages or devices that are no valid partition of the graph.
  """
  stage_nodes = tuple(tuple(sorted(stage)) for stage in stages)
  stage_devices = tuple(
    tuple(sorted(d)) if isinstance(d, Collection) else (int(d),)
    for d in (range(len(stage_nodes)) if devices is None else devices)
  )
  n_named = 1 + max((d for stage in stage_devices for d in stage), default=-1)
  count = n_named if count is None else count
  if n_named > count:
    raise ValueError(f"device {n_named - 1} is not one of {count} devices")
  stage_of = _stage_of_nodes(graph, stage_nodes, stage_devices)
  load = np.zeros(count)
  placed_stages = zip(stage_nodes, stage_devices, strict=True)
  for s, (nodes, replicas) in enumerate(placed_stages):
    work = sum(graph.nodes[i].work(s in recompute) for i in nodes)
    for d in replicas:
      load[d] += work / len(replicas)
  # Stages that share parameters must add up the gradients of these.
  owners = (sorted({stage_of[i] for i in tie.nodes}) for tie in graph.tied)
  shared = tuple(tuple(group) for group in owners if len(group) > 1)
  return Partition(stage_nodes, stage_devices, load, shared)


def balance(costs: Sequence[float], stages: int) -> tuple[tuple[int, ...], ...]:
  """Cuts a chain into stages so that the largest load is as small as possible.

  Returns the nodes of each stage. Each stage has at least one node. Equal costs
  always give the same stages.

  Raises:
    ValueError: for fewer nodes than stages, or costs that are negative or not
      finite.

  Example:
    >>> balance([3, 1, 1, 1], 2)
    ((0,), (1, 2, 3))
  """
  array = np.asarray(costs, np.float64)
  if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
    raise ValueError(
      f"costs must be a list of numbers, finite and not negative, not {costs!r}"
    )
  if not 1 <= stages <= len(array):
    raise ValueError(
      f"{len(array)} nodes make 1 to {len(array)} stages, not {stages}"
    )
  prefix = np.concatenate([[0.0], np.cumsum(array)])
  span_load = prefix - prefix[:, None]  # [i, j]: load of nodes i to j - 1
  span_load[np.tril_indices(len(prefix))] = np.inf
  # best[j]: the smallest possible largest load of the first j nodes, cut into
  # the stages that the loop has counted so far.
  best, stage_starts = span_load[0], []
  for _ in range(stages - 1):
    # [i, j]: the largest load if the last of the stages has nodes i to j - 1.
    largest_load = np.maximum(best[:, None], span_load)
    stage_starts.append(largest_load.argmin(0))
    best = largest_load.min(0)
  # Walk back through the best starts, from the last stage.
  end, last_stages = len(array), []
  for start_of in reversed(stage_starts):
    last_stages.append(tuple(range(start_of[end], end)))
    end = start_of[end]
  return (tuple(range(end)), *reversed(last_stages))


def cuts(partition: Partition) -> tuple[int, ...]:
  """Returns the S + 1 boundaries of a chain's stages, as node indices: the
  first is 0 and the last N. Raises ValueError for a stage that is not a piece
  of a chain."""
  boundaries = [0]
  for s, stage in enumerate(partition.stages):
    start = boundaries[-1]
    if stage != tuple(range(start, start + len(stage))):
      raise ValueError(
        f"stage {s} has nodes {stage}; a stage of a chain has consecutive"
        f" nodes, here from {start} on"
      )
    boundaries.append(start + len(stage))
  return tuple(boundaries)


def _stage_of_nodes(
  graph: Graph,
  stages: Sequence[Sequence[int]],
  devices: Sequence[Sequence[int]],
) -> dict[int, int]:
  """Returns the stage of each node, if these are stages of the graph."""
  names = [node.name for node in graph.nodes]
  stage_of: dict[int, int] = {}
  for s, stage in enumerate(stages):
    if not stage:
      raise ValueError(f"stage {s} has no nodes; leave it out")
    for i in stage:
      if not 0 <= i < len(names):
        raise ValueError(
          f"stage {s} has node {i}; the graph has {len(names)} nodes"
        )
      if i in stage_of:
        raise ValueError(
          f"node {names[i]!r} is in stage {stage_of[i]} and in stage {s}: put"
          " it into one of them"
        )
      stage_of[i] = s
  for i, name in enumerate(names):
    if i not in stage_of:
      raise ValueError(f"node {name!r} is in no stage: add it to one")
  if len(devices) != len(stages):
    raise ValueError(f"devices are of {len(devices)} stages, not {len(stages)}")
  for s, replicas in enumerate(devices):
    if not replicas or len(set(replicas)) != len(replicas) or min(replicas) < 0:
      raise ValueError(
        f"stage {s} of node {names[stages[s][0]]!r} needs a device or several"
        f" different ones, not {tuple(replicas)}"
      )
  for source, target, _, cut in graph.edges:
    source_stage, target_stage = stage_of[source], stage_of[target]
    if source_stage > target_stage:
      raise ValueError(
        f"node {names[target]!r} in stage {target_stage} needs"
        f" {names[source]!r} of stage {source_stage}: stages must be in the"
        " order of the network, and no two may need each other"
      )
    if source_stage != target_stage and not cut:
      raise ValueError(
        f"the edge from node {names[source]!r} (stage {source_stage}) to"
        f" {names[target]!r} (stage {target_stage}) must not be cut"
      )
  return stage_of


def check_limit(name: str, value: float | None, unit: str) -> None:
  """Raises ValueError for a limit that is neither None nor positive."""
  if value is not None and not value > 0:
    raise ValueError(f"{name} must be positive, in {unit}, not {value!r}")


def must_stay(graph: Graph, tied: str) -> list[tuple[int, ...]]:
  """Returns groups of nodes that no cut may part."""
  groups: list[tuple[int, ...]] = [
    (e.source, e.target) for e in graph.edges if not e.cut
  ]
  if tied == "together":
    groups += [tie.nodes for tie in graph.tied]
  return groups
