"""Lanes: threads that obey a program, and what goes from one to another.

Every device has a lane, which does the device's instructions in their order and
waits for nothing else than what a task needs. What one lane makes for another
is put into the other's queue, moved by `jax.device_put`. A lane's box holds
what has come and was not needed yet.
"""

import functools
import queue
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, sharding, simulator
from asgd import server as server_lib
from pipeline import stage as stage_lib
from pipeline import state as state_lib
from pipeline.instructions import OF_NOW, UPDATE, Program, TicketKey
from pipeline.residence import STATE, SUM, WEIGHTS, DeviceMemory
from pipeline.spans import TaskSpan
from pipeline.state import PipelineResult, PipelineState
from pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT


class PipelineError(RuntimeError):
  """A task failed; its text names stage and microbatch, its cause says why."""


class CompiledPart(NamedTuple):
  """One stage's programs."""

  stage: stage_lib.Stage | None  # None where all of its lanes are elsewhere
  steps: simulator.Steps  # of its server
  at_worker: optax.GradientTransformationExtraArgs | None
  correct: Callable[[base.ServerState], Any] | None = None


class CompiledProgram(NamedTuple):
  """Compiled stages on the devices of a program's lanes."""

  program: Program
  parts: tuple[CompiledPart, ...]  # S
  devices: dict[int, jax.Device]  # of the lanes that are here
  queues: Mapping[int, Any] | None  # of all lanes, if some are elsewhere
  extra: Callable[[int, int], Any]
  own: Mapping[str, Callable[[int], Any]]  # the user's actions
  recompute: tuple[bool, ...]  # S
  clock: Callable[[], float] | None
  # Whether a lane waits for what it has started: its own core does the work, or
  # the time of the work is taken.
  waits: bool
  # Of lanes whose device does not hold all weights of its stages.
  memories: Mapping[int, DeviceMemory] = types.MappingProxyType({})

  def now(self, slot: int = 0) -> float:
    """Returns the time; without a clock it is that of the slot."""
    return self.clock() if self.clock else float(slot)

  def settle(self, value: Any) -> None:
    """Waits for a value, if lanes wait."""
    if self.waits:
      jax.block_until_ready(value)

  def homes(self) -> dict[int, jax.Device]:
    """Returns the devices of the servers that are here, by stage."""
    lanes = enumerate(places[0] for places in self.program.places)
    return {s: self.devices[lane] for s, lane in lanes if lane in self.devices}

  def tickets(
    self, stage: int, version: int, server: base.ServerState
  ) -> Iterator[tuple[TicketKey, int, base.Ticket]]:
    """Yields what replicas are sent of a version that they will read: (key,
    lane, ticket on the lane's device, if that is here)."""
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


class Stop:
  """What a lane's queue is told when another lane failed."""


class _Stopped(Exception):
  """Another lane failed."""


_add = functools.partial(jax.jit, donate_argnums=0)(optax.tree.add)
_mean = functools.partial(jax.jit, donate_argnums=0, static_argnums=1)(
  server_lib.mean
)


class _Mail:
  """What lanes give each other, tickets among it: of each lane here a queue,
  and a box for what has come."""

  def __init__(self, compiled, state):
    self._compiled, self._program = compiled, compiled.program
    self._queues = compiled.queues  # which hold something already, perhaps
    if compiled.queues is None:
      self._queues = {lane: queue.SimpleQueue() for lane in compiled.devices}
    self._boxes = {lane: {} for lane in compiled.devices}
    for key, value in state.on_their_way.items():
      self._boxes[self._lane_of(key)][key] = value
    for key, ticket in state.tickets.items():
      lane = state_lib.lane_of(self._program, "tickets", key)
      self._boxes[lane]["w", *key] = ticket

  def _lane_of(self, key):
    return state_lib.lane_of(self._program, "on_their_way", key)

  def _take(self, lane):
    item = self._queues[lane].get()
    if item is Stop:
      raise _Stopped
    key, value = item
    self._boxes[lane][key] = value

  def _box_with(self, lane, key):
    box = self._boxes[lane]
    while key not in box:
      self._take(lane)
    return box

  def wait(self, lane, key):
    return self._box_with(lane, key).pop(key)

  def ticket(self, lane, op, *, backward=False):
    """Returns the ticket that a microbatch's forward reads, or its backward."""
    key = "w", *self._program.tickets_of(op)[backward]
    return self._box_with(lane, key)[key]

  def release(self, lane, op):
    """Drops the tickets that no microbatch after this one reads."""
    for key in self._program.tickets_of(op):
      if self._program.last_reads[key] == op.slot:
        self._boxes[lane].pop(("w", *key), None)

  def give(self, lane, key, value):
    """Moves what a lane has made to the lane that needs it."""
    target = self._lane_of(key)
    if target == lane:
      self._boxes[lane][key] = value
      return
    if target in self._compiled.devices:
      value = jax.device_put(value, self._compiled.devices[target])
    self.post(target, key, value)

  def post(self, lane, key, value):
    self._queues[lane].put((key, value))

  def stop(self):
    for lane in self._compiled.devices:
      self._queues[lane].put(Stop)

  def rest(self):
    """Returns the tickets and all else that nothing has waited for."""
    tickets, others = {}, {}
    for lane, box in self._boxes.items():
      while not self._queues[lane].empty():
        self._take(lane)
      for key, value in box.items():
        if key[0] == "w":
          tickets[key[1:]] = value
        else:
          others[key] = value
    return {"tickets": tickets, "on_their_way": others}


class LaneRun:
  """One call of `executor.Executor.run`: from a state to a slot."""

  def __init__(
    self, compiled: CompiledProgram, state: PipelineState, until: int
  ):
    self._compiled, self._program = compiled, compiled.program
    # The state that the lanes change, while they have its mail.
    changed = ("messages", "sums", "kept", "halves")
    copies = {field: dict(getattr(state, field)) for field in changed}
    copies |= {"tickets": {}, "on_their_way": {}}
    self._state = state._replace(servers=list(state.servers), **copies)
    for lane, memory in compiled.memories.items():
      self._adopt(lane, memory)
    self._until, self._losses, self._spans = until, {}, []
    self._failures: list[PipelineError] = []
    self._mail = _Mail(compiled, state)
    self._rows = [[] for _ in compiled.parts]  # of records
    # What does an instruction of a lane, and returns when it began.
    self._does = {
      UPDATE: self._receive,
      FORWARD: self._forward,
      **dict.fromkeys((BACKWARD, INPUT), self._backward),
      WEIGHT: self._weight,
    }

  def result(self) -> PipelineResult:
    """Obeys the program until all lanes are at the last slot; raises the first
    PipelineError of any lane."""
    # A context of the caller's thread, which is not that of a lane.
    x64 = jax.config.jax_enable_x64
    lanes = [
      threading.Thread(
        target=self._obey, args=(lane, x64), name=f"lane-{lane}", daemon=True
      )
      for lane in self._compiled.devices
    ]
    for lane in lanes:
      lane.start()
    for lane in lanes:
      lane.join()
    if self._failures:
      raise self._failures[0]
    rest = self._mail.rest()
    for lane, memory in self._compiled.memories.items():
      self._give_back(lane, memory, rest["tickets"])
    servers = tuple(self._state.servers)
    state = self._state._replace(slot=self._until, servers=servers, **rest)
    records = tuple(
      simulator.records(
        [simulator.ReceivedMessage(*row[:3]) for row in rows],
        [row[3] for row in rows],
      )
      for rows in self._rows
    )
    spans = tuple(sorted(self._spans, key=lambda span: span.start))
    return PipelineResult(state, self._losses, records, spans)

  def _stages_of(self, lane):
    return [s for s, at in enumerate(self._program.places) if at[0] == lane]

  def _adopt(self, lane, memory):
    """Has a lane's memory begin with what the state has of its stages."""
    for stage in self._stages_of(lane):
      server = self._state.servers[stage]
      memory.adopt((stage, WEIGHTS), server.params)
      memory.adopt((stage, STATE), server._replace(params=()))
      memory.drop((stage, SUM))
      if stage in self._state.sums:
        total, oldest = self._state.sums[stage]
        memory.adopt((stage, SUM), total)
        self._state.sums[stage] = None, oldest

  def _give_back(self, lane, memory, tickets):
    """Puts what is in the host's memory into the state."""
    for stage in self._stages_of(lane):
      params = memory.host((stage, WEIGHTS))
      server = memory.host((stage, STATE))
      self._state.servers[stage] = server._replace(params=params)
      if stage in self._state.sums:
        oldest = self._state.sums[stage][1]
        self._state.sums[stage] = memory.host((stage, SUM)), oldest
      for key, ticket in tickets.items():
        if key[0] == stage:
          tickets[key] = ticket._replace(params=params)

  def _params(self, lane, op, *, backward=False):
    """The weights that a forward or a backward reads."""
    ticket = self._mail.ticket(lane, op, backward=backward)
    if lane in self._compiled.memories:
      return self._compiled.memories[lane].get((op.stage, WEIGHTS))
    return ticket.params

  def _obey(self, lane, x64):
    op, memory = None, self._compiled.memories.get(lane)
    try:
      with jax.enable_x64(x64):
        for op in self._program.of_lane(lane, self._state.slot, self._until):
          if memory is not None:
            memory.begin(op)
          start = self._does.get(op.kind, self._own)(lane, op)
          if self._compiled.clock:
            span = lane, op.stage, op.microbatch, op.kind, start
            self._spans.append(TaskSpan(*span, self._compiled.now()))
    except _Stopped:
      pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, all stop
      what, slot = "what is to be done", self._state.slot
      if op is not None:
        what = f"{op.kind} of stage {op.stage}, microbatch {op.microbatch}"
        slot = op.slot
      failure = PipelineError(
        f"{what} (device {lane}, slot {slot}) failed:"
        f" {type(error).__name__}: {error}"
      )
      failure.__cause__ = error
      self._failures.append(failure)
      self._mail.stop()

  def _own(self, lane, op):
    start = self._compiled.now()
    jax.block_until_ready(self._compiled.own[op.kind](lane))
    return start

  def _forward(self, lane, op):
    compiled, (stage, number) = self._compiled, (op.stage, op.microbatch)
    x = self._mail.wait(lane, ("x", stage, number)) if stage else ()
    params = self._params(lane, op)
    extra = compiled.extra(stage, self._state.microbatch + number)
    start = self._compiled.now()
    y, aux, kept = compiled.parts[stage].stage.forward(params, x, extra)
    if compiled.recompute[stage]:
      kept = x, extra
    self._state.kept[stage, number] = kept, aux
    if stage == len(compiled.parts) - 1:
      self._losses[self._state.microbatch + number] = y
    else:
      self._compiled.settle(y)
      self._mail.give(lane, ("x", stage + 1, number), y)
    return start

  def _weight(self, lane, op):
    at = op.stage, op.microbatch
    params = self._params(lane, op, backward=True)
    (kept, aux), half = self._state.kept.pop(at), self._state.halves.pop(at)
    start = self._compiled.now()
    stage = self._compiled.parts[op.stage].stage
    self._hand_in(lane, op, stage.weight(params, kept, half), aux)
    return start

  def _backward(self, lane, op):
    whole, at = self._compiled, (op.stage, op.microbatch)
    stage, number = at
    compiled = whole.parts[stage].stage
    if stage == len(whole.parts) - 1:
      gy = [np.ones((), compiled.y.dtype)]
    else:
      gy = self._mail.wait(lane, ("g", stage, number))
    params = self._params(lane, op, backward=True)
    kept, aux = self._state.kept[at]
    start = self._compiled.now()
    if op.kind == INPUT:
      if whole.recompute[stage]:
        kept = compiled.forward(params, *kept)[2]
        self._state.kept[at] = kept, aux
      gx, self._state.halves[at] = compiled.input(params, kept, gy)
    else:
      del self._state.kept[at]
      if whole.recompute[stage]:
        gradient, gx = compiled.recompute(params, *kept, gy)
      else:
        gradient, gx = compiled.backward(params, kept, gy)
    if stage:
      self._compiled.settle(gx)
      self._mail.give(lane, ("g", stage - 1, number), gx)
    if op.kind == BACKWARD:
      self._hand_in(lane, op, gradient, aux)
    return start

  def _hand_in(self, lane, op, gradient, aux):
    """Gives a gradient to the stage's server, with the forward's ticket."""
    self._compiled.settle(gradient)
    ticket = self._mail.ticket(lane, op)
    if isinstance(gradient, base.Variables):
      gradient = gradient._replace(stats=aux)
    key = "m", op.stage, op.microbatch
    self._mail.give(lane, key, (gradient, ticket))
    self._mail.release(lane, op)

  def _receive(self, lane, op):
    """Receives a message; the last of an update makes a new version."""
    ops, parts = (op, *op.also), self._compiled.parts
    # Waits for the last that comes before the clock is looked at.
    messages = [
      self._mail.wait(lane, ("m", each.stage, each.microbatch)) for each in ops
    ]
    start = self._compiled.now(op.slot)
    arguments = [
      self._arguments(lane, each, *message)
      for each, message in zip(ops, messages, strict=True)
    ]
    if arguments[0] is None:  # there are more to come
      return start
    if self._compiled.program.together:
      results = self._receive_together(lane, ops, arguments)
    else:
      results = [parts[op.stage].steps.receive(*arguments[0])]
    for each, (server, row) in zip(ops, results, strict=True):
      self._publish(lane, each, server, row)
    return start

  def _arguments(self, lane, op, message, ticket):
    """What a server is to receive; None before all of an update are there."""
    stage, every = op.stage, self._compiled.program.schedule.every
    memory = self._compiled.memories.get(lane)
    if every > 1:
      if stage in self._state.sums:
        total, oldest = self._state.sums.pop(stage)
        if memory is not None:
          total = memory.take((stage, SUM))
        message, ticket = server_lib.gather(
          total, oldest, message, ticket, add=_add
        )
      if not op.last:
        if memory is not None:
          memory.keep((stage, SUM), message)
          message = None
        self._state.sums[stage] = message, ticket
        return None
      message = _mean(message, every)
    transform = self._compiled.parts[stage].at_worker
    if transform:
      states, key = self._state.messages, (stage, op.worker)
      params = base.weights_of(ticket.params)
      weights, states[key] = transform.update(
        base.weights_of(message),
        states[key],
        params,
        version=ticket.version,
        sent_params=params,
      )
      message = base.with_weights(message, weights)
    server = self._state.servers[stage]
    if memory is not None:
      params = memory.get((stage, WEIGHTS))
      server = memory.take((stage, STATE))._replace(params=params)
      ticket = ticket._replace(params=params)
    return server, ticket, message, np.float32(0)

  def _receive_together(self, lane, ops, arguments):
    """Receives what stages of several lanes have to add up to know."""
    program, totals = self._compiled.program, ()
    steps = [self._compiled.parts[op.stage].steps.stage for op in ops]
    others = {lanes[0] for lanes in program.places} - {lane}
    while True:
      outs = [
        step(totals, *given)
        for step, given in zip(steps, arguments, strict=True)
      ]
      if isinstance(outs[0], sharding.Done):
        return [out.result for out in outs]
      operands = {
        op.stage: jax.device_get(out.operand)
        for op, out in zip(ops, outs, strict=True)
      }
      at = ops[0].group, len(totals)
      for other in others:
        self._mail.post(other, ("n", lane, *at), operands)
      for other in others:
        operands |= self._mail.wait(lane, ("n", other, *at))
      # In the order of the stages, so that it is the same bits everywhere.
      ordered = [operands[stage] for stage in sorted(operands)]
      totals += (sharding.add_up(ordered),)

  def _publish(self, lane, op, server, row):
    """Keeps a new version, and sends it to the lanes that read it."""
    self._compiled.settle(server.params)
    if lane in self._compiled.memories:
      memory, params = self._compiled.memories[lane], server.params
      server = server._replace(params=())  # they are kept apart
      memory.keep((op.stage, WEIGHTS), params)
      memory.keep((op.stage, STATE), server)
    self._state.servers[op.stage] = server
    time, version = self._compiled.now(op.slot), op.group + 1
    self._rows[op.stage].append((time, op.worker, op.group, row))
    for key, lane, ticket in self._compiled.tickets(op.stage, version, server):
      self._mail.post(lane, ("w", *key), ticket)
