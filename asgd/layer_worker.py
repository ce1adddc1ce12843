"""A gradient worker with room on its device for a part of the model.

The parameters of a ticket are in the host's memory, as in GeePS's parameter
cache in CPU memory. A job is a list of instructions, known in advance: the
forward of each group of layers, from the first to the last, then the backward
of each, from the last to the first. A group is one layer with weights, and the
layers without weights before it; the last group also has those after it. An
instruction needs blocks of arrays:

  weights    of the group, read from the ticket
  batch      read by the first and the last group
  input      of the group: the output of the group before
  residuals  values of the forward that the backward needs (GeePS: local data)
  cotangent  gradient of the group's output
  gradient   of the group's weights; it goes to the host at once
  stats      statistics of the batch (BatchNorm), which go to the host, too

`asgd.device_memory` holds the blocks within the room of the device. It keeps
those that are used next, writes others to the host, and prefetches.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from asgd import base, checks
from asgd.device_memory import (
  Block,
  DeviceMemory,
  DeviceTraffic,
  HostCopies,
  copies,
  nbytes,
)
from asgd.problems import Pieces
from asgd.problems.cuts import joined, slice_of, stage_fn
from asgd.stages import Stage, compile_stage, floating
from asgd.worker import WorkerState

_WEIGHTS, _INPUT, _RESIDUALS = "weights", "input", "residuals"
_COTANGENT, _GRADIENT, _STATS = "cotangent", "gradient", "stats"
_BATCH: Block = (0, "batch")
# Blocks of a backward, which no later instruction uses.
_BACKWARD_BLOCKS = _WEIGHTS, _RESIDUALS, _COTANGENT, _GRADIENT
_NO_COPIES = HostCopies(lambda tree: tree, lambda tree: tree)  # for shapes


class Group(NamedTuple):
  """Consecutive layers. Their weights are on the device together."""

  layers: tuple[int, int]  # index of the first, and 1 + that of the last
  stage: Stage

  def slice(self, params: Any) -> Any:
    """Returns the parameters of the group's layers."""
    return slice_of(params, *self.layers)


class JobPlan(NamedTuple):
  """The instructions of a job and their blocks. Instruction g is the forward of
  group g of G, and instruction 2 G - 1 - g its backward."""

  shapes: tuple[Any, Any, Any]  # of parameters, batch and key
  groups: tuple[Group, ...]
  inputs: tuple[Mapping[Block, int], ...]  # blocks read -> bytes
  outputs: tuple[Mapping[Block, int], ...]  # blocks computed -> bytes
  ones: Any  # the gradient of the loss with respect to the loss

  @property
  def least(self) -> int:
    """Bytes of the smallest device: one that holds any one instruction."""
    pairs = zip(self.inputs, self.outputs, strict=True)
    return max(sum({**read, **computed}.values()) for read, computed in pairs)

  def memory(self, room: int, copies: HostCopies) -> DeviceMemory:
    """Returns an empty memory of `room` bytes for one job. Raises ValueError
    if the job needs more."""
    if room < self.least:
      raise ValueError(
        f"one layer needs {self.least / 1e6:.6f} MB on the device"
        f" at once, and there is room for {room / 1e6:.6f}: give at least"
        f" {self.least / 1e6:.6f} MB, or use smaller batches"
      )
    pairs = zip(self.inputs, self.outputs, strict=True)
    blocks = [(*read, *computed) for read, computed in pairs]
    return DeviceMemory(blocks, room, copies)

  def traffic(self, room: int) -> DeviceTraffic:
    """Returns the bytes that one job moves, uses and holds on a device with
    `room` bytes. They follow from shapes alone; nothing is computed."""
    memory = self.memory(room, _NO_COPIES)
    _run(self, memory, *self.shapes, call=jax.eval_shape)
    return memory.traffic


def plan_job(pieces: Pieces, params: base.Params, batch: Any) -> JobPlan:
  """Compiles the groups of a model, and returns the plan of its jobs.

  Args:
    pieces: the model's layers, with input and loss.
    params: parameters of all layers, or their shapes.
    batch: the batch of any job, or its shapes.
  """
  key = jax.eval_shape(jax.random.key, 0)
  leaves, tree = jax.tree.flatten((params, batch))
  shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves]
  return _plan_of_shapes(pieces, jax.tree.unflatten(tree, shapes), key)


def _plan_of_shapes(pieces: Pieces, data: tuple[Any, Any], key: Any) -> JobPlan:
  """Returns the plan for shapes of (parameters, batch) and of a key."""
  params, batch = data
  cuts = _cuts(base.weights_of(params))
  last, y = len(cuts) - 2, ()  # the last group; the output of the group before
  groups: list[Group] = []
  inputs: list[dict[Block, Any]] = [{} for _ in range(2 * last + 2)]
  outputs: list[dict[Block, Any]] = [{} for _ in inputs]
  for g, layers in enumerate(itertools.pairwise(cuts)):
    part, x = slice_of(params, *layers), y
    extra = batch if g in (0, last) else (), key
    stage = compile_stage(stage_fn(pieces, *layers), part, x, extra)
    groups.append(Group(layers, stage))
    y, stats, residuals = jax.eval_shape(stage.forward, part, x, extra)
    gradient, input_cotangent = jax.eval_shape(
      stage.backward, part, residuals, floating(y)
    )
    # [1] The forward.
    inputs[g] = {(g, _WEIGHTS): part, (g, _INPUT): x, _BATCH: extra[0]}
    outputs[g] = {
      (g, _RESIDUALS): residuals, (g + 1, _INPUT): y, (g, _STATS): stats
    }
    # [2] The backward.
    inputs[~g] = {
      (g, _WEIGHTS): part,
      (g, _RESIDUALS): residuals,
      (g, _COTANGENT): floating(y),
    }
    outputs[~g] = {
      (g, _GRADIENT): gradient, (g - 1, _COTANGENT): input_cotangent
    }
  ones = [np.ones((), y.dtype)]
  sizes = map(_block_bytes, inputs), map(_block_bytes, outputs)
  return JobPlan((params, batch, key), tuple(groups), *map(tuple, sizes), ones)


def _block_bytes(blocks: Mapping[Block, Any]) -> dict[Block, int]:
  """Returns the bytes of those blocks that have any."""
  sizes = {block: nbytes(tree) for block, tree in blocks.items()}
  return {block: size for block, size in sizes.items() if size}


def _cuts(weights: Any) -> list[int]:
  """Returns where groups begin, and the end. Each layer with weights ends a
  group; layers after the last such layer belong to the last group."""
  ends = [i + 1 for i, layer in enumerate(weights) if jax.tree.leaves(layer)]
  return [0, *ends[:-1], len(weights)]


def _run(
  plan: JobPlan,
  memory: DeviceMemory,
  params: Any,
  batch: Any,
  key: Any,
  *,
  call: Callable[..., Any],
) -> tuple[Any, list[Any], list[Any]]:
  """Runs a job; `call` calls a function, or computes only its result's shapes.
  Returns (loss, statistics of each group, gradient of each group) on the host.
  """
  last = len(plan.groups) - 1
  for g, group in enumerate(plan.groups):
    memory.adopt((g, _WEIGHTS), group.slice(params))
  memory.adopt(_BATCH, batch)
  memory.adopt((last, _COTANGENT), plan.ones)
  stats, gradients = [], []
  # [1] Forward.
  for g, group in enumerate(plan.groups):
    memory.begin(g, plan.outputs[g])
    extra = memory.get(_BATCH) if g in (0, last) else (), key
    x = memory.get((g, _INPUT)) if g else ()
    y, group_stats, residuals = call(
      group.stage.forward, memory.get((g, _WEIGHTS)), x, extra
    )
    memory.keep((g, _RESIDUALS), residuals)
    memory.keep((g + 1, _INPUT), y)
    memory.keep((g, _STATS), group_stats)
    del extra, x, y, group_stats, residuals  # only the memory may hold arrays
    stats.append(memory.host((g, _STATS)))
    _drop(memory, [(g, _INPUT), (g, _STATS)])
  loss = memory.host((last + 1, _INPUT))
  _drop(memory, [(last + 1, _INPUT), _BATCH])
  # [2] Backward.
  for g in range(last, -1, -1):
    instruction = 2 * last + 1 - g
    memory.begin(instruction, plan.outputs[instruction])
    values = [memory.get((g, kind)) for kind in _BACKWARD_BLOCKS[:-1]]
    gradient, input_cotangent = call(plan.groups[g].stage.backward, *values)
    memory.keep((g, _GRADIENT), gradient)
    if g:
      memory.keep((g - 1, _COTANGENT), input_cotangent)
    del values, gradient, input_cotangent
    gradients.insert(0, memory.host((g, _GRADIENT)))
    _drop(memory, [(g, kind) for kind in _BACKWARD_BLOCKS])
  return loss, stats, gradients


def _drop(memory: DeviceMemory, blocks: Iterable[Block]) -> None:
  for block in blocks:
    memory.drop(block)


def layer_worker(pieces: Pieces, room: int) -> base.Worker:
  """A gradient worker that holds `room` bytes on its device at once.

  It sends the message of `asgd.gradient_worker(problems.whole_loss(pieces))`,
  as NumPy arrays, up to rounding: the layers are separate programs. `room`
  counts the arrays of the blocks above. It counts neither the temporary memory
  of a program, nor the job's key, nor the ticket's parameters, which a live
  worker has in the host's memory and a simulation wherever its server is.

  Args:
    pieces: a model that can be cut between layers, with input and loss.
    room: bytes, at least `plan_job(...).least`.

  Returns:
    A Worker that is not traceable: its work calls compiled functions.

  Raises:
    ValueError: for a room that is no positive integer; from `work`, if a layer
      does not fit.

  Source:
    Cui et al., "GeePS: scalable deep learning on distributed GPUs with a
    GPU-specialized parameter server", EuroSys 2016.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd import models, problems
    >>> from asgd.layer_worker import layer_worker, plan_job
    >>> layers = models.build("mlp", 3, hidden=(4, 4))
    >>> pieces = problems.Pieces(
    ...   layers, lambda batch, key, dtype: batch, lambda y, batch: y.sum()
    ... )
    >>> batch = jnp.ones((2, 4, 4, 1))
    >>> params = models.init(layers, jax.random.key(0), batch)
    >>> plan_job(pieces, params, batch).least
    712
    >>> worker = layer_worker(pieces, room=712)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), params)
    >>> _, message, _ = worker.work(
    ...   worker.init(params), ticket, batch, jax.random.key(0)
    ... )
    >>> bias, _ = jax.tree.leaves(message[-1])
    >>> print(bias)  # each of two examples adds 1
    [2. 2. 2.]
  """
  checks.integer("room", room)

  @functools.lru_cache(maxsize=8)  # one for the shapes of each batch
  def plan_of(tree: Any, *shapes: tuple[Any, Any]) -> JobPlan:
    leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return plan_job(pieces, *jax.tree.unflatten(tree, leaves))

  def work(
    state: WorkerState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> tuple[WorkerState, optax.Updates, base.Metrics]:
    params: Any = ticket.params
    leaves, tree = jax.tree.flatten((params, batch))
    plan = plan_of(tree, *((np.shape(x), x.dtype) for x in leaves))
    (device,) = key.devices()  # the device of the worker's thread
    memory = plan.memory(room, copies(device))
    loss, stats, gradients = _run(
      plan, memory, params, batch, key, call=lambda fn, *args: fn(*args)
    )
    parts = gradients
    if isinstance(params, base.Variables):
      weights = map(base.weights_of, gradients)
      parts = list(map(base.Variables, weights, stats))
    return state, joined(parts), base.Metrics(np.asarray(loss))

  def init(params: base.Params) -> WorkerState:
    del params
    return WorkerState(optax.EmptyState())

  return base.Worker(init, work, traceable=False)
