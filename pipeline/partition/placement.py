"""Which nodes make a stage, and which devices hold it.

Every partitioner returns a `Partition`, in which each node is placed exactly
once and tensors go from earlier stages to later ones. There are three:
`balance` here, for a chain if communication costs nothing, `pipedream` for
stages that may be replicated, `mixed_pipe` for several stages on a device.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asgd.pipeline.partition.graph import Graph

TIED = ("allow", "together")


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
  """Returns the partition of these stages, along the network, if it is one.

  Stage s is on device s if `devices` do not say where; there are `count` of
  them, or as many as are named. Stages of `recompute` run their forward again
  before the backward.
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
  both = zip(stage_nodes, stage_devices, strict=True)
  for s, (nodes, replicas) in enumerate(both):
    work = sum(graph.nodes[i].work(s in recompute) for i in nodes)
    for d in replicas:
      load[d] += work / len(replicas)
  # Stages that share parameters must add up the gradients of these.
  owners = (sorted({stage_of[i] for i in tie.nodes}) for tie in graph.tied)
  shared = tuple(tuple(tied) for tied in owners if len(tied) > 1)
  return Partition(stage_nodes, stage_devices, load, shared)


def balance(costs: Sequence[float], stages: int) -> tuple[tuple[int, ...], ...]:
  """Cuts a chain in stages so that the largest load is as small as can be.

  Returns the nodes of each stage, one or more; among equals always the same.

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
  load = prefix - prefix[:, None]  # [i, j]: of the nodes from i to j - 1
  load[np.tril_indices(len(prefix))] = np.inf
  # best[j]: the largest load of the first j nodes, in as many stages as yet.
  best, froms = load[0], []
  for _ in range(stages - 1):
    loads = np.maximum(best[:, None], load)
    froms.append(loads.argmin(0))
    best = loads.min(0)
  # Walk back through the best cuts, from the last stage.
  end, out = len(array), []
  for start in reversed(froms):
    out.append(tuple(range(start[end], end)))
    end = start[end]
  return (tuple(range(end)), *reversed(out))


def cuts(partition: Partition) -> tuple[int, ...]:
  """Returns where a chain is cut: S + 1 numbers of nodes, from 0 to N. Raises
  ValueError for a stage that is not a piece of a chain."""
  out = [0]
  for s, stage in enumerate(partition.stages):
    if stage != tuple(range(out[-1], out[-1] + len(stage))):
      raise ValueError(
        f"stage {s} is nodes {stage}, not all from {out[-1]} to another: the"
        " stages are not pieces of a chain"
      )
    out.append(out[-1] + len(stage))
  return tuple(out)


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
