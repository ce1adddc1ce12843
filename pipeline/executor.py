"""Executes a table: stages on devices, with one server for each stage.

A server of `asgd` on a stage's first device keeps the weights of the stage. A
ticket is a version number with the parameters that were read at that version.
A forward reads a ticket. Its backward reads the same ticket (a stash) or a
newer one. The server receives the gradient with the ticket of the forward, so
every algorithm against staleness works here without changes.

Each device has a lane, which executes the device's tasks in order:

  Executor.run -> `lanes.LaneRun`, on the threads of `lane_threads`

A task of slot t needs only results of slots before t. So a run can stop before
any slot with all entries in a `PipelineState`, and resume from that state.

One process may execute only some lanes: see `asgd.pipeline.processes`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, compression, device_memory, simulator
from asgd import stages as stage_lib
from asgd.pipeline import analyze, coded, instructions, residence, validate
from asgd.pipeline import lanes as lanes_lib
from asgd.pipeline import state as state_lib
from asgd.pipeline.instructions import TICKET, UPDATE
from asgd.pipeline.lane_threads import LaneInbox
from asgd.pipeline.stage import Part
from asgd.pipeline.state import AT_WORKER, SUM, PipelineResult, PipelineState
from asgd.pipeline.table import Schedule

_steps = functools.lru_cache(maxsize=64)(simulator.compile_steps)


@functools.lru_cache(maxsize=64)
def _jitted(
  message: optax.GradientTransformation | None,
) -> optax.GradientTransformationExtraArgs | None:
  """Returns a worker's transform with both of its functions compiled."""
  if message is None:
    return None
  transform = optax.with_extra_args_support(message)
  return optax.GradientTransformationExtraArgs(
    jax.jit(transform.init), jax.jit(transform.update)
  )


def _compile_parts(
  parts: Sequence[Part],
  extra: Callable[[int, int], Any],
  is_here: Sequence[bool],
  codec: compression.Codec | None,
) -> tuple[lanes_lib.CompiledPart, ...]:
  """Compiles each stage that has a lane in this process, from shapes."""
  compiled_parts, x = [], ()
  for index, part in enumerate(parts):
    for leaf in jax.tree.leaves(base.weights_of(part.params)):
      if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
          f"stage {index} has parameters of dtype {leaf.dtype}, which have no"
          " gradient: make them constants of its fn, or pass them in extra"
        )
    inputs, stage = extra(index, 0), None
    try:
      if is_here[index]:
        stage = stage_lib.compile_stage(part.fn, part.params, x, inputs)
        y = stage.y
        if codec is not None:
          last = index == len(parts) - 1
          stage = coded.with_codec(stage, codec, x, last=last)
        x = y
      else:
        # Later stages still need the shapes of this stage's output.
        x = jax.eval_shape(part.fn, part.params, x, inputs)[0]
    except Exception as error:
      raise lanes_lib.PipelineError(
        f"stage {index} cannot be compiled: {error}"
      ) from error
    steps, at_worker = _steps(part.server, None), _jitted(part.at_worker)
    compiled_parts.append(
      lanes_lib.CompiledPart(stage, steps, at_worker, part.correct)
    )
  is_scalar = getattr(x, "shape", None) == ()
  # The loss is a scalar: its gradient is 1.
  if not is_scalar or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      "the last stage must return its loss, float[], not"
      f" {jax.tree.map(lambda s: f'{s.dtype}{list(s.shape)}', x)}"
    )
  return tuple(compiled_parts)


class Executor:
  """Executes a table on devices.

  Attributes:
    devices: lane -> device, of the lanes in this process.
    inboxes: lane -> queue for entries from other processes; empty if this
      process has all lanes.
    compiled_program: the table's instructions with the compiled stages.
  """

  def __init__(
    self,
    schedule: Schedule,
    parts: Sequence[Part],
    extra: Callable[[int, int], Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    elsewhere: dict[int, Any] | None = None,
    **options: Any,
  ):
    """Compiles the stages.

    Args:
      schedule: the table; it is validated.
      parts: the stages, S.
      extra: (stage, microbatch) -> the further inputs of `Part.fn`: examples
        at the first stage, labels at the last, keys. Many threads call it.
      devices: one for each lane of this process, D if it has all lanes. None
        takes the first local devices.
      elsewhere: lane of another process -> its queue; `put` takes (key,
        value). The caller puts entries from those lanes for a local lane into
        the lane's queue in `inboxes`. None: this process has all lanes.
      **options: those of `lanes.ExecutorOptions`.

    Raises:
      ValueError: if the arguments do not fit together, or if
        `validate.validate` rejects the schedule.
    """
    self.schedule, self.parts = schedule, tuple(parts)
    settings = lanes_lib.ExecutorOptions(**options)
    _check_parts(schedule, self.parts, settings.own)
    lanes = [d for d in range(schedule.devices) if d not in (elsewhere or {})]
    self.devices = dict(zip(lanes, _devices(devices, len(lanes)), strict=True))
    self.inboxes: dict[int, LaneInbox] = {}
    if elsewhere is not None:
      self.inboxes = {lane: LaneInbox() for lane in lanes}
    # After a flush all versions are equal; otherwise stash one for each ticket.
    weights = settings.weights or ("latest" if schedule.flush else "stash")
    streams = _streams(schedule, self.parts, weights)
    program = instructions.write(
      schedule,
      analyze.versions(schedule, weights),
      streams=streams,
      together=settings.together,
    )
    self._at_worker = {  # keys of states
      (AT_WORKER, stage, worker)
      for stage, part in enumerate(self.parts)
      if part.at_worker
      for worker in range(streams[stage])
    }
    # Stages on lanes of other processes are not compiled here.
    is_here = [
      any(lane in self.devices for lane in places) for places in program.places
    ]
    compiled_parts = _compile_parts(
      self.parts, extra, is_here, settings.codec
    )
    self._earlier_traffic, memories = device_memory.DeviceTraffic(), {}
    if settings.room is not None:
      memories = _memories(program, self.parts, self.devices, settings.room)
    if isinstance(settings.recompute, bool):
      flags = [settings.recompute] * len(self.parts)
      settings = settings._replace(recompute=flags)
    if len(settings.recompute) != len(self.parts):
      raise ValueError(
        f"recompute must be a bool, or one for each of {len(parts)} stages,"
        f" not {settings.recompute!r}"
      )
    is_on_cpu = next(iter(self.devices.values())).platform == "cpu"
    self.compiled_program = lanes_lib.CompiledProgram(
      program=program,
      parts=compiled_parts,
      devices=self.devices,
      inboxes=self.inboxes,
      elsewhere=elsewhere or {},
      extra=extra,
      options=settings,
      # On a CPU the lane's core computes, so there is nothing to overlap.
      waits=settings.clock is not None or is_on_cpu,
      memories=memories,
    )

  def start(self) -> PipelineState:
    """Returns the state before the first slot."""
    # Homes: stage -> the device of its server, for servers in this process.
    entries, homes = {}, self.compiled_program.homes()
    servers: list[base.ServerState | None] = [None] * len(self.parts)
    # Servers with their first device in another process stay None.
    for stage in homes:
      part = self.parts[stage]
      state = simulator.start(part.server, part.params)
      servers[stage] = self._copy_to_home(stage, state)
    for key in sorted(self._at_worker):
      if (stage := key[1]) in homes:
        transform = self.compiled_program.parts[stage].at_worker
        state = transform.init(base.weights_of(servers[stage].params))
        entries[key] = jax.device_put(state, homes[stage])
    return self._with_first_tickets(0, servers, entries)

  def next_pass(self, state: PipelineState) -> PipelineState:
    """Returns the state before the first slot of another pass over the table.

    The next pass trains on the microbatches after those of this pass.

    Raises:
      ValueError: if `state` is not at the end of the table.
    """
    if state.slot != self.schedule.slots:
      raise ValueError(
        f"the table is at slot {state.slot} of {self.schedule.slots}: run it to"
        " its end first"
      )
    # Microbatches are numbered over all passes, as batches and keys need.
    microbatch = state.microbatch + self.schedule.microbatches
    # Only workers' transforms keep state between passes.
    entries = {k: v for k, v in state.entries.items() if k in self._at_worker}
    return self._with_first_tickets(microbatch, state.servers, entries)

  def fetch(self, state: PipelineState) -> PipelineState:
    """Returns a state that a checkpoint can store."""
    return state

  def place(self, state: PipelineState) -> PipelineState:
    """Puts a checkpointed state on this process's devices.

    Entries of lanes in other processes are left out.

    Raises:
      ValueError: for a state of another schedule, or an incomplete state.
    """
    program = self.compiled_program.program
    state_lib.check(state, program, self._at_worker)
    entries, memories = {}, self.compiled_program.memories
    for key, value in state.entries.items():
      lane = state_lib.lane_of(program, key)
      # Blocks that the lane swaps stay on the host until it needs them.
      if lane in memories and key[0] in (TICKET, SUM):
        entries[key] = memories[lane].to_host(value)
      elif lane in self.devices:
        entries[key] = jax.device_put(value, self.devices[lane])
    homes = self.compiled_program.homes()
    servers = tuple(
      self._copy_to_home(stage, server) if stage in homes else None
      for stage, server in enumerate(state.servers)
    )
    return state._replace(servers=servers, entries=entries)

  def _copy_to_home(
    self, stage: int, state: base.ServerState
  ) -> base.ServerState:
    """Copies a server's state to the stage's first device, or to the host if
    that device swaps its weights."""
    lane = self.compiled_program.program.places[stage][0]
    memories = self.compiled_program.memories
    if lane in memories:
      return memories[lane].to_host(state)
    # The run donates its buffers, so the caller's arrays must not be shared.
    return jax.device_put(state, self.devices[lane], may_alias=False)

  def traffic(self) -> device_memory.DeviceTraffic:
    """Returns the traffic of all lanes between devices and the host, and the
    largest peak; 0 without `room`."""
    memories = self.compiled_program.memories.values()
    lanes = [memory.traffic for memory in memories]
    return device_memory.add_up([self._earlier_traffic, *lanes])

  def reset_traffic(self, earlier: device_memory.DeviceTraffic) -> None:
    """Restarts the count of `traffic` at `earlier`."""
    self._earlier_traffic = earlier
    for memory in self.compiled_program.memories.values():
      memory.traffic = device_memory.DeviceTraffic()

  def _with_first_tickets(
    self,
    microbatch: int,
    servers: Sequence[base.ServerState | None],
    entries: dict[Any, Any],
  ) -> PipelineState:
    """Returns a state at slot 0 with the tickets of version 0. Sends tickets
    for lanes of other processes to these processes."""
    compiled = self.compiled_program
    for stage in compiled.homes():
      for key, lane, ticket in compiled.tickets(stage, 0, servers[stage]):
        # A ticket goes to the lane of the replica that reads it.
        if lane in self.devices:
          entries[key] = ticket
        else:
          compiled.elsewhere[lane].put((key, ticket))
    return PipelineState(0, microbatch, tuple(servers), entries)

  def params(self, state: PipelineState) -> list[Any]:
    """Returns the parameters of each stage; None if its server is in another
    process."""
    return [server and server.params for server in state.servers]

  def run(
    self, state: PipelineState, until: int | None = None
  ) -> PipelineResult:
    """Executes the table up to, not including, slot `until` (None: all).

    Consumes `state`: its buffers are donated.

    Raises:
      PipelineError: if a task fails, naming it. The state is lost.
      ValueError: if `until` is before the slot of the state or after the end
        of the table; if the state is of another table, or was consumed.
    """
    until = check_until(self.schedule, state.slot, until)
    # With lanes in other processes, entries may still be in transit.
    if not self.inboxes:
      program = self.compiled_program.program
      state_lib.check(state, program, self._at_worker)
    return lanes_lib.LaneRun(self.compiled_program, state, until).run()


def _memories(
  program: instructions.Program,
  parts: Sequence[Part],
  devices: dict[int, jax.Device],
  room: int,
) -> dict[int, residence.LaneMemory]:
  """Returns lane -> the memory that swaps weights between host and device,
  within `room` bytes."""
  schedule = program.schedule
  # Blocks of other processes' lanes cannot be evicted from here.
  if len(devices) < schedule.devices:
    raise ValueError(
      f"room={room} needs all {schedule.devices} devices of {schedule.name} in"
      f" one process, and this one has {len(devices)}: use one process, or"
      " drop room"
    )
  if program.together:
    raise ValueError(
      f"room={room} does not work with together=True: a norm over all stages"
      " needs all gradients at once. Drop the clipping by norm"
    )
  residence.check(schedule, parts, room)
  return {
    lane: residence.LaneMemory(
      program.lanes[lane], schedule.every, room, device
    )
    for lane, device in devices.items()
  }


def _check_parts(
  schedule: Schedule,
  parts: Sequence[Part],
  user_actions: Mapping[str, Any],
) -> None:
  """Raises ValueError unless the parts and the user's actions fit the table."""
  validate.validate(schedule)
  if len(parts) != schedule.stages:
    raise ValueError(
      f"the schedule has {schedule.stages} stages and parts has {len(parts)}:"
      " pass one part for each stage"
    )
  if (validate.rows(schedule).weight < 0).any():
    raise ValueError(
      f"{schedule.name} has no backward, so it trains nothing: add backwards"
    )
  if UPDATE in schedule.action:
    raise ValueError(
      f"the schedule has actions {UPDATE!r}, the executor's name for updates:"
      " rename them"
    )
  unknown = set(schedule.action) - set(user_actions) - set(validate.KNOWN)
  if unknown:
    raise ValueError(
      f"the schedule has unknown actions {sorted(map(str, unknown))}: pass"
      " their functions, own={name: function}"
    )


def _streams(
  schedule: Schedule, parts: Sequence[Part], weights: str
) -> list[int]:
  """Returns each stage's number of workers: its updates in flight, or 1 if its
  algorithm was built for one worker."""
  streams = []
  # An algorithm that keeps a state for each worker needs one worker for each
  # update in flight.
  for stage, count in enumerate(analyze.in_flight(schedule, weights).tolist()):
    workers = parts[stage].server.workers
    if workers not in (None, 1) and workers < count:
      raise ValueError(
        f"stage {stage} has {count} updates in flight, and its algorithm was"
        f" built for {workers} workers: build it for {count}"
      )
    streams.append(1 if workers == 1 else count)
  return streams


def _devices(
  devices: Sequence[jax.Device] | None, count: int
) -> Sequence[jax.Device]:
  """Returns `count` devices: the caller's, or the first local ones."""
  if devices is None:
    local_devices = jax.local_devices()
    if len(local_devices) < count:
      raise ValueError(
        f"the schedule needs {count} devices and this process has"
        f" {len(local_devices)}: for CPU devices call"
        f" jax.config.update('jax_num_cpu_devices', {count}) before JAX is used"
      )
    devices = local_devices[:count]
  if len(devices) != count:
    raise ValueError(
      f"the schedule needs {count} devices, and devices has {len(devices)}"
    )
  return devices


def check_until(schedule: Schedule, slot: int, until: int | None) -> int:
  """Returns the slot before which a run from `slot` stops; None is the end.

  Raises:
    ValueError: if `until` is not an integer from `slot` to the table's end.
  """
  if until is None:
    return schedule.slots
  is_int = isinstance(until, (int, np.integer)) and not isinstance(until, bool)
  if not is_int or not slot <= until <= schedule.slots:
    raise ValueError(
      f"until={until!r}: a run of {schedule.name} at slot {slot} can stop"
      f" before slots {slot} to {schedule.slots}"
    )
  return int(until)
