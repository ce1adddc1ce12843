"""The planner's list of the collectives in a step on a mesh.

Each entry gives the axes, the number of elements and the number of calls. The
list follows from shapes and shardings alone, by formulas of the papers that
`data_parallel`, `tensor`, `circular` and `peers` cite. `asgd.parallel.ahead`
compares it with compiled programs.

Index letters:
  L  blocks of a GPT, of all stages
  B  sequences of a replica, of one accumulated piece
  T  positions
  C  features
  M  microbatches
  S  stages, v rounds
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import base, gossip
from asgd.parallel import memory, meshes, peers, zero

REDUCE, SCATTER, GATHER, PERMUTE = (
  *("all-reduce", "reduce-scatter", "all-gather", "collective-permute"),
)


class Transfer(NamedTuple):
  """Collectives along some axes, for arrays of one size."""

  kind: str  # REDUCE, SCATTER, GATHER or PERMUTE
  axes: frozenset[str]  # the axes along which devices send
  # Elements of the whole array of a device: before a scatter, after a gather.
  elements: int
  itemsize: int  # largest number of bytes of an element
  times: int  # largest number of calls in a step
  least: int | None = None  # least number of calls in a step; None: `times`
  pairs: tuple[tuple[int, int], ...] = ()  # for PERMUTE: (from, to)
  label: str = ""
  # XLA may scatter each array along another axis first, and then add up only a
  # part of it, 1 / parts.
  parts: int = 1

  @property
  def bytes(self) -> int:
    """Bytes of a device's whole arrays in a step."""
    return self.elements * self.itemsize * self.times


class Replicas(NamedTuple):
  """Options of the axis "data", as in `data_parallel.StepOptions`."""

  zero: int = 0
  accumulate: int = 1
  compute: int = 4  # bytes of a number in the loss
  reduce: int = 4  # bytes of a number in the sum of gradients


def add_up(transfers: Iterable[Transfer]) -> list[Transfer]:
  """Returns one transfer of each sort, with the sums of `times` and `least`."""
  sums: dict[Any, Transfer] = {}
  for transfer in transfers:
    least = transfer.times if transfer.least is None else transfer.least
    # Transfers that differ only in the number of calls are of one sort.
    sort = transfer._replace(times=0, least=0)
    total = sums.get(sort, sort)
    times, least = total.times + transfer.times, (total.least or 0) + least
    sums[sort] = transfer._replace(times=times, least=least)
  return list(sums.values())


def _count_local(leaf: Any, mesh: Mesh, spec: P) -> int:
  """Returns the number of elements of a device's part of an array."""
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return math.prod(sharding.shard_shape(leaf.shape))


def parameters_here(params: Any, mesh: Mesh) -> int:
  """Returns the number of parameters on a device of one replica. `params` are
  shapes with shardings, as `data_parallel.Step.init` returns; a division along
  the axis "data" does not count."""
  return sum(
    _count_local(leaf, mesh, _without_data(leaf.sharding.spec))
    for leaf in jax.tree.leaves(base.weights_of(params))
  )


def _without_data(spec: P) -> P:
  return P(*(None if entry == meshes.DATA else entry for entry in spec))


def of_weights(
  params: Any,
  mesh: Mesh,
  replicas: Replicas,
  *,
  extra_axes: frozenset[str] = frozenset(),
  turns: int = 1,
) -> Iterator[Transfer]:
  """Yields the transfers of gradients and weights between replicas.

  Args:
    params: shapes with their shardings, as `data_parallel.Step.init` returns.
    mesh: a mesh with the axis "data".
    replicas: options of the step.
    extra_axes: axes beside "data" along which devices add up the gradients of
      weights that the axis does not divide: "tensor", if the stream is split
      by positions.
    turns: turns of a pipeline, which adds up a block's gradients in each turn.
  """
  data, parts = frozenset({meshes.DATA}), mesh.shape[meshes.DATA]
  pieces, size = replicas.accumulate, replicas.reduce
  for leaf in jax.tree.leaves(base.weights_of(params)):
    spec = _without_data(leaf.sharding.spec)
    count = _count_local(leaf, mesh, spec)
    zero_spec = spec
    if replicas.zero:
      zero_spec = zero.add_data_axis(leaf.shape, spec, parts)
    is_whole = zero.dimension(zero_spec) == zero.WHOLE
    # [1] Along the extra axes, on which the weight is whole.
    for axis in extra_axes - {axis for axis in spec if axis is not None}:
      part, along = 1 if is_whole else parts, frozenset({axis})
      transfer = Transfer(REDUCE, along, count, size, pieces, 1, parts=part)
      # A pipeline's stack [v, L / v, ...]: a block's gradient in each turn.
      if meshes.PIPE in spec:
        blocks = leaf.shape[1] // mesh.shape[meshes.PIPE]
        block = count // (leaf.shape[0] * blocks)
        times = blocks * turns * pieces
        transfer = Transfer(REDUCE, along, block, size, times)
      yield transfer._replace(label="gradients")
    # [2] Along "data": devices all-reduce, or with ZeRO scatter and gather.
    if parts == 1:
      continue
    if is_whole:
      yield Transfer(REDUCE, data, count, size, 1, label="gradients")
      continue
    # XLA may add pieces up first, because the order of sums does not matter.
    times = pieces if replicas.zero > 1 else 1
    yield Transfer(SCATTER, data, count, size, times, 1, label="gradients")
    if replicas.zero < 3:
      itemsize = leaf.dtype.itemsize
      yield Transfer(GATHER, data, count, itemsize, 1, label="weights")
    else:  # the backward does not need all weights again
      itemsize = max(replicas.compute, 4)  # XLA sends biases in float32
      times = 2 * pieces
      yield Transfer(GATHER, data, count, itemsize, times, 1, label="weights")


def _ring(mesh: Mesh, step: int) -> tuple[tuple[int, int], ...]:
  """Returns the pairs (stage, stage + `step`) along the axis "pipe"."""
  return _pairs(
    mesh, meshes.PIPE, [(s, s + step) for s in range(mesh.shape[meshes.PIPE])]
  )


def _pairs(
  mesh: Mesh, axis: str, pairs: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
  """Returns pairs along an axis as pairs of the mesh's devices, by number."""
  # Rows [groups, n]: each row has the devices along the axis, for one index of
  # the other axes.
  grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
  rows = np.moveaxis(grid, list(mesh.shape).index(axis), -1)
  rows = rows.reshape(-1, mesh.shape[axis])
  n = mesh.shape[axis]
  return tuple(
    sorted((int(row[i % n]), int(row[j % n])) for row in rows for i, j in pairs)
  )


def turns_of(stream: memory.GptStream, mesh: Mesh) -> int:
  """Returns the turns of a pipeline in a step, v M + S - 1; 1 without one."""
  stages = mesh.shape.get(meshes.PIPE, 1)
  return stream.microbatches * stream.rounds + stages - 1 if stages > 1 else 1


def of_stream(
  stream: memory.GptStream, mesh: Mesh, replicas: Replicas
) -> Iterator[Transfer]:
  """Yields the transfers of a GPT's activations between the devices of a
  replica, forward and backward."""
  depth, width, _, length, _ = stream.gpt
  tensor = mesh.shape.get(meshes.TENSOR, 1)
  stages = mesh.shape.get(meshes.PIPE, 1)
  pieces, size = replicas.accumulate, replicas.compute
  positions = stream.sequences * length
  stream_size = positions * width  # numbers of a replica
  # Blocks that a device applies in a turn, and numbers of the stream in a turn.
  turns, blocks, micro = turns_of(stream, mesh), depth, stream_size
  if stages > 1:
    micro = stream_size // stream.microbatches
    blocks = depth // (stages * stream.rounds)
  # [1] Between tensor parallel devices. If the stream is split by positions, a
  # gather and a scatter replace each all-reduce.
  if tensor > 1:
    axes = frozenset({meshes.TENSOR})
    kinds = [REDUCE]
    if stream.sequence:
      kinds = [GATHER, SCATTER]
    for kind in kinds:
      # Embedding and logits have one transfer each. A block has two in the
      # forward and two in the backward.
      yield Transfer(kind, axes, stream_size, size, 2 * pieces, label="ends")
      # If a block is computed again, its last sum is left out: it is not read.
      repeats = (2 if kind == GATHER else 1) if stream.recompute else 0
      times = (4 + repeats) * blocks * turns * pieces
      yield Transfer(kind, axes, micro, size, times, label="blocks")
    # The largest logit, the sum of exponentials, and the label's logit.
    yield Transfer(REDUCE, axes, positions, 4, 3 * pieces, label="loss")
  # [2] Between stages: all stages get the last stage's result and the gradient
  # of the embedding's output; and the messages of each turn.
  if stages > 1:
    axes, part = frozenset({meshes.PIPE}), tensor if stream.sequence else 1
    elements = stream_size // part
    yield Transfer(REDUCE, axes, elements, size, 2 * pieces, label="ends")
    for step, direction in ((1, "forward"), (-1, "backward")):
      # The message of the last turn is not read, so XLA may leave it out.
      times = turns * pieces
      pairs = _ring(mesh, step)
      yield Transfer(
        *(PERMUTE, axes, micro // part, size, times, times - pieces),
        *(pairs, f"stages, {direction}"),
      )


def of_round(
  exchange: gossip.Gossip, code: Any, mesh: Mesh, axis: str, phases: Any
) -> Iterator[Transfer]:
  """Yields the transfers of peers in a round. `code` are the shapes of a
  message, and `phases` is (phase, puts, mixes) of `peers`. A round that does
  not mix sends nothing."""
  phase, _, mixes = phases
  if not mixes:
    return
  for pairs in peers.turns(exchange.topology, phase).pairs:
    for leaf in jax.tree.leaves(code):
      sizes = math.prod(leaf.shape), leaf.dtype.itemsize
      yield Transfer(
        *(PERMUTE, frozenset({axis}), *sizes),
        times=1,
        pairs=_pairs(mesh, axis, pairs),
        label="messages",
      )
