"""Lanes run the instructions of a program and exchange the tasks' results.

Every device has a lane, which runs the device's instructions in their order and
waits only for the inputs of a task. Lanes exchange the entries of a state
(`asgd.pipeline.state`): a lane puts an entry into the box of another lane,
copied to the device of that lane. `asgd.pipeline.lane_threads` has the threads.
"""

import collections
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, compression, sharding, simulator
from asgd import server as server_lib
from asgd.pipeline.instructions import (
  OF_NOW,
  TICKET,
  UPDATE,
  Instruction,
  Program,
  TicketKey,
)
from asgd.pipeline.lane_threads import LaneInbox, LaneThreads, Stop
from asgd.pipeline.residence import STATE, WEIGHTS, LaneMemory
from asgd.pipeline.spans import TaskSpan
from asgd.pipeline.state import (
  AT_WORKER,
  HALF,
  RESIDUALS,
  SUM,
  PipelineResult,
  PipelineState,
  lane_of,
)
from asgd.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT


class PipelineError(RuntimeError):
  """A task failed. The message names stage and microbatch; see `__cause__`."""


class ExecutorOptions(NamedTuple):
  """Options of an Executor, which runs the table of a schedule."""

  # As in `analyze.versions`. None: "latest" if synchronous, otherwise "stash".
  weights: str | None = None
  # Whether a backward runs its forward again, from the stored input; one
  # bool, or one for each stage. With weights="latest" it reads the newest.
  recompute: bool | Sequence[bool] = False
  # Whether all stages of a synchronous schedule are updated together at the end
  # of a batch, with norms (`sharding.total`) over all stages, not of each.
  together: bool = False
  # The user's actions: device -> anything.
  own: Mapping[str, Callable[[int], Any]] = types.MappingProxyType({})
  clock: Callable[[], float] | None = None  # seconds, for spans; None: no spans
  # Bytes of weights, optimizer states and sums of gradients that a device holds
  # at once; the host holds the rest (`residence`). None: the device holds all.
  room: int | None = None
  codec: compression.Codec | None = None  # of messages between stages


class CompiledPart(NamedTuple):
  """One stage's programs."""

  stage: Any  # stages.Stage; None where all of its lanes are elsewhere
  steps: simulator.Steps  # compiled steps of its server
  at_worker: optax.GradientTransformationExtraArgs | None
  correct: Callable[[base.ServerState], Any] | None = None


class CompiledProgram(NamedTuple):
  """Compiled stages on the devices of a program's lanes."""

  program: Program
  parts: tuple[CompiledPart, ...]  # S, one for each stage
  devices: dict[int, jax.Device]  # lane of this process -> its device
  inboxes: Mapping[int, LaneInbox]  # lane here -> entries of other processes
  elsewhere: Mapping[int, Any]  # lane of another process -> its queue
  extra: Callable[[int, int], Any]
  options: ExecutorOptions
  waits: bool  # whether lanes wait for results: on a CPU, or if tasks are timed
  memories: Mapping[int, LaneMemory]  # lane -> memory; {} without `room`

  def now(self, slot: int = 0) -> float:
    """Returns the time of the clock; without a clock, the slot."""
    return self.options.clock() if self.options.clock else float(slot)

  def homes(self) -> dict[int, jax.Device]:
    """Returns stage -> device of its server, for servers of this process."""
    lanes = enumerate(places[0] for places in self.program.places)
    return {s: self.devices[lane] for s, lane in lanes if lane in self.devices}

  def tickets(
    self, stage: int, version: int, server: base.ServerState
  ) -> Iterator[tuple[TicketKey, int, base.Ticket]]:
    """Yields the tickets of a version for the replicas that will read it: (key,
    lane, ticket). A lane of this process gets it on the lane's device."""
    for key in self.program.readers.get((stage, version), ()):
      *_, replica, worker = key
      if worker == OF_NOW:
        correct = self.parts[stage].correct
        params = correct(server) if correct else server.params
        ticket = base.Ticket(jnp.int32(worker), server.version, params)
      else:
        ticket = self.parts[stage].steps.send(server, jnp.int32(worker))
      lane = self.program.places[stage][replica]
      if lane in self.devices and lane not in self.memories:
        ticket = jax.device_put(ticket, self.devices[lane])
      yield key, lane, ticket


_SMALL = 2**16  # bytes; up to this size a copy is faster than `device_put`


class _Stopped(Exception):
  """Another lane failed."""


add = functools.partial(jax.jit, donate_argnums=0)(optax.tree.add)
_mean = functools.partial(jax.jit, donate_argnums=0, static_argnums=1)(
  server_lib.mean
)


@functools.lru_cache(maxsize=256)
def _copies(device):
  """Returns a program that copies trees to a device."""
  place = jax.sharding.SingleDeviceSharding(device)
  return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=place)


def copier_of(device: jax.Device, tree: Any) -> Callable[[Any], Any]:
  """Returns a function that copies trees like this one to a device.

  Leaves, of NumPy or any device, share no memory with the copy. Small trees
  reach a CPU by a compiled program: `device_put` takes ten times as long."""
  leaves = jax.tree.leaves(tree)
  # Keys have dtypes that NumPy does not know.
  is_numeric = all(isinstance(getattr(x, "dtype", x), np.dtype) for x in leaves)
  is_small = is_numeric and sum(x.nbytes for x in leaves) <= _SMALL
  if device.platform != "cpu" or not is_small:
    return lambda tree: jax.device_put(tree, device, may_alias=False)
  copies = _copies(device)
  return lambda tree: copies(jax.tree.map(np.asarray, tree))


@functools.lru_cache
def _scalar_one(dtype):
  return np.ones((), dtype)


class LaneRun:
  """One call of `executor.Executor.run`: from a state to a stop slot."""

  def __init__(
    self, compiled: CompiledProgram, state: PipelineState, until: int
  ):
    self._compiled, self._program = compiled, compiled.program
    self._state, self._stop_slot = state, until
    self._servers = list(state.servers)
    self._threads = LaneThreads(self._run_lane, compiled.devices)
    self._boxes = self._threads.boxes
    for key, value in state.entries.items():
      self._boxes[lane_of(self._program, key)][key] = value
    self._ops = {
      lane: collections.deque(self._program.of_lane(lane, state.slot, until))
      for lane in self._boxes
    }
    self._copiers: dict[tuple, Callable] = {}  # copy entries to other lanes
    self._begun_op: dict[int, Any] = {}  # lane with a memory -> instruction
    for lane in compiled.memories:
      self._adopt(lane)
    self._losses, self._spans = {}, []
    self._failures: list[PipelineError] = []
    self._rows = [[] for _ in compiled.parts]  # stage -> rows of its records
    # Kind -> method that runs an instruction and returns its start time.
    self._handlers = {
      UPDATE: self._receive,
      FORWARD: self._forward,
      BACKWARD: self._backward,
      INPUT: self._backward,
      WEIGHT: self._weight,
    }

  def run(self) -> PipelineResult:
    """Runs all lanes to the stop slot; raises their first PipelineError."""
    self._threads.run(self._compiled.inboxes)
    if self._failures:
      raise self._failures[0]
    entries = {}
    for lane, inbox in self._compiled.inboxes.items():
      arrivals = [item for item in inbox.take() if item is not Stop]
      self._boxes[lane].update(arrivals)
    for lane, box in self._boxes.items():
      if lane in self._compiled.memories:
        self._give_back(lane)
      entries |= box
    state = self._state._replace(
      slot=self._stop_slot, servers=tuple(self._servers), entries=entries
    )
    records = tuple(
      simulator.records([msg for msg, _ in rows], [row for _, row in rows])
      for rows in self._rows
    )
    spans = tuple(sorted(self._spans, key=lambda span: span.start))
    return PipelineResult(state, self._losses, records, spans)

  # Entries.

  def _deliver(self, lane: int, key: tuple[Any, ...], value: Any) -> None:
    """Moves an entry that a lane has made to the lane that needs it."""
    target, devices = lane_of(self._program, key), self._compiled.devices
    if target == lane:
      self._boxes[lane][key] = value
    elif target in devices:
      copier_key = *key[:2], target
      if copier_key not in self._copiers:
        self._copiers[copier_key] = copier_of(devices[target], value)
      self._send(target, key, self._copiers[copier_key](value))
    else:
      self._send(target, key, value)

  def _send(self, lane, key, value):
    if lane in self._boxes:
      self._threads.put(lane, key, value)
    else:
      self._compiled.elsewhere[lane].put((key, value))

  def _settle(self, value):
    """Waits for a value, if lanes wait."""
    if self._compiled.waits:
      self._threads.settle(value)

  def _params(self, lane, op, *, backward=False):
    """Returns the weights that a forward or a backward reads."""
    if lane in self._compiled.memories:
      return self._compiled.memories[lane].get((op.stage, WEIGHTS))
    return self._boxes[lane][op.tickets[backward]].params

  # Weights that are not all on a lane's device.

  def _stages_of(self, lane):
    places = self._program.places
    return [stage for stage, lanes in enumerate(places) if lanes[0] == lane]

  def _adopt(self, lane: int) -> None:
    """Starts a lane's memory with the state of its stages."""
    memory, box = self._compiled.memories[lane], self._boxes[lane]
    for stage in self._stages_of(lane):
      server = self._servers[stage]
      memory.adopt((stage, WEIGHTS), server.params)
      memory.adopt((stage, STATE), server._replace(params=()))
      memory.drop((stage, SUM))
      if (SUM, stage) in box:
        total, oldest = box[SUM, stage]
        memory.adopt((stage, SUM), total)
        box[SUM, stage] = None, oldest

  def _give_back(self, lane: int) -> None:
    """Moves the lane's memory on the host into servers and entries."""
    memory, box = self._compiled.memories[lane], self._boxes[lane]
    for stage in self._stages_of(lane):
      params = memory.host((stage, WEIGHTS))
      server = memory.host((stage, STATE))
      self._servers[stage] = server._replace(params=params)
      if (SUM, stage) in box:
        _, oldest = box[SUM, stage]
        box[SUM, stage] = memory.host((stage, SUM)), oldest
      for key, value in box.items():
        if key[:2] == (TICKET, stage):
          box[key] = value._replace(params=params)

  # Instructions.

  def _run_lane(self, lane: int) -> bool:
    """Runs a lane until it lacks an entry; returns whether it is done."""
    op, ops = None, self._ops[lane]
    memory = self._compiled.memories.get(lane)
    try:
      while ops:
        op = ops[0]
        if memory is not None and self._begun_op.get(lane) is not op:
          memory.begin_op(op)
          self._begun_op[lane] = op
        if not self._threads.has(lane, op.needs):
          return False
        start = self._handlers.get(op.kind, self._user_action)(lane, op)
        if self._compiled.options.clock:
          span = lane, op.stage, op.microbatch, op.kind, start
          self._spans.append(TaskSpan(*span, self._compiled.now()))
        ops.popleft()
    except _Stopped:
      pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, all stop
      task, slot = "the search for the next task", self._state.slot
      if op is not None:
        task = f"{op.kind} of stage {op.stage}, microbatch {op.microbatch}"
        slot = op.slot
      failure = PipelineError(
        f"{task} (device {lane}, slot {slot}) failed:"
        f" {type(error).__name__}: {error}"
      )
      failure.__cause__ = error
      self._failures.append(failure)
      self._threads.stop()
    return True

  def _user_action(self, lane, op):
    start = self._compiled.now()
    jax.block_until_ready(self._compiled.options.own[op.kind](lane))
    return start

  def _forward(self, lane: int, op: Instruction) -> float:
    """Does a forward; returns its start time."""
    compiled, (stage, number) = self._compiled, (op.stage, op.microbatch)
    x = self._boxes[lane].pop(("x", stage, number)) if stage else ()
    params = self._params(lane, op)
    extra = compiled.extra(stage, self._state.microbatch + number)
    start = compiled.now()
    y, aux, residuals = compiled.parts[stage].stage.forward(params, x, extra)
    if compiled.options.recompute[stage]:
      residuals = x, extra
    self._boxes[lane][RESIDUALS, stage, number] = residuals, aux
    if stage == len(compiled.parts) - 1:
      self._losses[self._state.microbatch + number] = y
    else:
      self._settle(y)
      self._deliver(lane, ("x", stage + 1, number), y)
    return start

  def _weight(self, lane: int, op: Instruction) -> float:
    """Does a backward of weights; returns its start time."""
    cell, box = (op.stage, op.microbatch), self._boxes[lane]
    params = self._params(lane, op, backward=True)
    (residuals, aux), half = box.pop((RESIDUALS, *cell)), box.pop((HALF, *cell))
    start = self._compiled.now()
    stage = self._compiled.parts[op.stage].stage
    gradient = stage.weight(params, residuals, half)
    self._settle(gradient)
    self._submit(lane, op, gradient, aux)
    return start

  def _backward(self, lane: int, op: Instruction) -> float:
    """Does a backward, B or I; returns its start time."""
    compiled, box = self._compiled, self._boxes[lane]
    stage, number = cell = op.stage, op.microbatch
    stage_fns = compiled.parts[stage].stage
    if stage == len(compiled.parts) - 1:
      gy = [_scalar_one(stage_fns.y.dtype)]
    else:
      gy = box.pop(("g", stage, number))
    params = self._params(lane, op, backward=True)
    residuals, aux = box.pop((RESIDUALS, *cell))
    start, recomputes = compiled.now(), compiled.options.recompute[stage]
    if op.kind == INPUT:
      if recomputes:
        residuals = stage_fns.residuals(params, *residuals)
      box[RESIDUALS, *cell] = residuals, aux
      gx, box[HALF, *cell] = stage_fns.input(params, residuals, gy)
    elif recomputes:  # one program takes less time than two
      gradient, gx = stage_fns.recompute(params, *residuals, gy)
    else:
      gradient, gx = stage_fns.backward(params, residuals, gy)
    # All results of a program are ready at the same time: wait for one.
    self._settle(gx if op.kind == INPUT else gradient)
    if stage:
      self._deliver(lane, ("g", stage - 1, number), gx)
    if op.kind == BACKWARD:
      self._submit(lane, op, gradient, aux)
    return start

  def _submit(
    self, lane: int, op: Instruction, gradient: Any, aux: Any
  ) -> None:
    """Sends a gradient to its server, and drops tickets without later reads."""
    ticket = self._boxes[lane][op.tickets[0]]
    if isinstance(gradient, base.Variables):
      gradient = gradient._replace(stats=aux)
    self._deliver(lane, ("m", op.stage, op.microbatch), (gradient, ticket))
    for key in op.tickets:
      if self._program.last_reads[key] == op.slot:
        self._boxes[lane].pop(key, None)

  def _receive(self, lane: int, op: Instruction) -> float:
    """Receives a message; the last of an update makes a new version."""
    ops = op, *op.also
    box = self._boxes[lane]
    messages = [box.pop(("m", m.stage, m.microbatch)) for m in ops]
    start = self._compiled.now(op.slot)
    arguments = [
      self._arguments(lane, update_op, *message)
      for update_op, message in zip(ops, messages, strict=True)
    ]
    if arguments[0] is None:  # the update lacks messages
      return start
    if self._program.together:
      results = self._receive_together(lane, ops, arguments)
    else:
      steps = self._compiled.parts[op.stage].steps
      results = [steps.receive(*arguments[0])]
    for update_op, (server, row) in zip(ops, results, strict=True):
      self._publish(lane, update_op, server, row)
    return start

  def _arguments(
    self, lane: int, op: Instruction, message: Any, ticket: base.Ticket
  ) -> tuple[Any, ...] | None:
    """Returns (server, ticket, message, loss); None if messages are missing."""
    stage, box = op.stage, self._boxes[lane]
    every = self._program.schedule.every
    memory = self._compiled.memories.get(lane)
    if every > 1:
      if (SUM, stage) in box:
        total, oldest = box.pop((SUM, stage))
        if memory is not None:
          total = memory.take((stage, SUM))
        message, ticket = server_lib.gather(
          total, oldest, message, ticket, add=add
        )
      if not op.last:
        if memory is not None:
          memory.keep((stage, SUM), message)
          message = None
        box[SUM, stage] = message, ticket
        return None
      message = _mean(message, every)
    transform = self._compiled.parts[stage].at_worker
    if transform:
      params = base.weights_of(ticket.params)
      key = AT_WORKER, stage, op.worker
      weights, box[key] = transform.update(
        base.weights_of(message),
        box[key],
        params,
        version=ticket.version,
        sent_params=params,
      )
      message = base.with_weights(message, weights)
    server = self._servers[stage]
    if memory is not None:
      params = memory.get((stage, WEIGHTS))
      server = memory.take((stage, STATE))._replace(params=params)
      ticket = ticket._replace(params=params)
    return server, ticket, message, np.float32(0)

  def _receive_together(
    self, lane: int, ops: Sequence[Instruction], arguments: Sequence[Any]
  ) -> list[Any]:
    """Receives with totals over all stages: lanes exchange their summands."""
    totals = ()
    steps = [self._compiled.parts[op.stage].steps.stage for op in ops]
    other_lanes = {lanes[0] for lanes in self._program.places} - {lane}
    while True:
      outs = [
        step(totals, *args)
        for step, args in zip(steps, arguments, strict=True)
      ]
      if isinstance(outs[0], sharding.Done):
        return [out.result for out in outs]
      operands = {
        op.stage: jax.device_get(out.operand)
        for op, out in zip(ops, outs, strict=True)
      }
      round_key = ops[0].group, len(totals)
      for other_lane in other_lanes:
        self._send(other_lane, ("n", lane, *round_key), operands)
      for other_lane in other_lanes:
        received = self._threads.wait(lane, ("n", other_lane, *round_key))
        if received is None:
          raise _Stopped
        operands |= received
      # In the order of the stages: all lanes then have the same bits.
      sorted_operands = [operands[stage] for stage in sorted(operands)]
      totals += (sharding.add_up(sorted_operands),)

  def _publish(
    self, lane: int, op: Instruction, server: base.ServerState, row: Any
  ) -> None:
    """Stores a new version, and sends it to the lanes that read it."""
    self._settle(server.params)
    if lane in self._compiled.memories:
      memory = self._compiled.memories[lane]
      memory.keep((op.stage, WEIGHTS), server.params)
      server = server._replace(params=())  # they have a separate block
      memory.keep((op.stage, STATE), server)
    self._servers[op.stage] = server
    time = self._compiled.now(op.slot)
    message = simulator.ReceivedMessage(time, op.worker, op.group)
    self._rows[op.stage].append((message, row))
    for key, lane, ticket in self._compiled.tickets(
      op.stage, op.group + 1, server
    ):
      self._send(lane, key, ticket)
