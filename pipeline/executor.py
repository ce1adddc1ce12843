"""Obeys a table: stages on devices, and a server for the weights of each.

A stage's weights live in a server of `asgd` on its first device; a forward
reads a ticket, its backward the same ticket (a stash) or another, and the
gradient is received with the ticket of the forward, so that every algorithm
against staleness works here as it does anywhere. `lanes` does the work, in the
threads of `lane_threads`.

Slots are cuts: no task of slot t needs anything of slot t or later. So a run
can stop before any slot, with all entries in a `PipelineState`, and resume.

A process may have some of the lanes only; `pipeline.processes` has the others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, simulator
from pipeline import analyze, instructions, residence, validate
from pipeline import lanes as lanes_lib
from pipeline import stage as stage_lib
from pipeline import state as state_lib
from pipeline.instructions import TICKET, UPDATE
from pipeline.lane_threads import Inbox
from pipeline.state import AT_WORKER, SUM, PipelineResult, PipelineState
from pipeline.table import Schedule

_steps = functools.lru_cache(maxsize=64)(simulator.compile_steps)


@functools.lru_cache(maxsize=64)
def _transform(message):
  if message is None:
    return None
  transform = optax.with_extra_args_support(message)
  return optax.GradientTransformationExtraArgs(
    jax.jit(transform.init), jax.jit(transform.update)
  )


def _compile_parts(parts, extra, here):
  """Compiles each stage that has a lane in this process, from shapes."""
  out, x = [], ()
  for index, part in enumerate(parts):
    for leaf in jax.tree.leaves(base.weights_of(part.params)):
      if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
          f"stage {index} has parameters of dtype {leaf.dtype}, which have no"
          " gradient: make them constants of its fn, or give them by extra"
        )
    inputs, compiled = extra(index, 0), None
    try:
      if here[index]:
        compiled = stage_lib.compile_stage(part.fn, part.params, x, inputs)
        x = compiled.y
      else:
        x = jax.eval_shape(part.fn, part.params, x, inputs)[0]
    except Exception as error:
      raise lanes_lib.PipelineError(
        f"stage {index} cannot be compiled: {error}"
      ) from error
    steps, message = _steps(part.server, None), _transform(part.at_worker)
    out.append(lanes_lib.CompiledPart(compiled, steps, message, part.correct))
  scalar = getattr(x, "shape", None) == ()
  if not scalar or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      "the last stage must return its loss, float[], not"
      f" {jax.tree.map(lambda s: f'{s.dtype}{list(s.shape)}', x)}"
    )
  return tuple(out)


class Executor:
  """Runs a table on devices."""

  def __init__(
    self,
    schedule: Schedule,
    parts: Sequence[stage_lib.Part],
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
      extra: (stage, microbatch) -> what `Part.fn` gets besides parameters and
        the stage before's output: examples at the first, labels at the last,
        keys. Called by many threads.
      devices: D, or as many as lanes that are here; None is the first ones.
      elsewhere: lanes that another process has -> their queues: `put` takes
        (key, value). What these lanes make for a lane that is here is to be
        put into its queue in `inboxes`. None is that all are here.
      **options: those of `lanes.ExecutorOptions`.

    Raises:
      ValueError: if these do not fit together, and as `validate.validate`.
    """
    self.schedule, self.parts = schedule, tuple(parts)
    how = lanes_lib.ExecutorOptions(**options)
    _check_parts(schedule, self.parts, how.own)
    lanes = [d for d in range(schedule.devices) if d not in (elsewhere or {})]
    self.devices = dict(zip(lanes, _devices(devices, len(lanes)), strict=True))
    self.inboxes: dict[int, Inbox] = {}
    if elsewhere is not None:
      self.inboxes = {lane: Inbox() for lane in lanes}
    weights = how.weights or ("latest" if schedule.flush else "stash")
    streams = _streams(schedule, self.parts, weights)
    program = instructions.write(
      schedule,
      analyze.versions(schedule, weights),
      streams=streams,
      together=how.together,
    )
    self._at_worker = {  # keys of states
      (AT_WORKER, stage, worker)
      for stage, part in enumerate(self.parts)
      if part.at_worker
      for worker in range(streams[stage])
    }
    here = [any(d in self.devices for d in each) for each in program.places]
    compiled = _compile_parts(self.parts, extra, here)
    self._before, memories = residence.DeviceTraffic(), {}
    if how.room is not None:
      memories = _memories(program, self.parts, self.devices, how.room)
    if isinstance(how.recompute, bool):
      how = how._replace(recompute=[how.recompute] * len(self.parts))
    if len(how.recompute) != len(self.parts):
      raise ValueError(
        f"recompute must be a bool, or one for each of {len(parts)} stages,"
        f" not {how.recompute!r}"
      )
    on_cpu = next(iter(self.devices.values())).platform == "cpu"
    self.compiled = lanes_lib.CompiledProgram(
      program=program,
      parts=compiled,
      devices=self.devices,
      inboxes=self.inboxes,
      elsewhere=elsewhere or {},
      extra=extra,
      how=how,
      waits=how.clock is not None or on_cpu,
      memories=memories,
    )

  def start(self) -> PipelineState:
    """Returns the state before the first slot."""
    entries, homes = {}, self.compiled.homes()
    servers: list[base.ServerState | None] = [None] * len(self.parts)
    for stage in homes:
      part = self.parts[stage]
      state = simulator.start(part.server, part.params)
      servers[stage] = self._server(stage, state)
    for key in sorted(self._at_worker):
      if (stage := key[1]) in homes:
        transform = self.compiled.parts[stage].at_worker
        state = transform.init(base.weights_of(servers[stage].params))
        entries[key] = jax.device_put(state, homes[stage])
    return self._with_first_tickets(0, servers, entries)

  def again(self, state: PipelineState) -> PipelineState:
    """Returns the state from which the table, which is done (else ValueError),
    can be obeyed once more, with the microbatches that follow."""
    if state.slot != self.schedule.slots:
      raise ValueError(
        f"the table is at slot {state.slot} of {self.schedule.slots}: run it to"
        " its end first"
      )
    done = state.microbatch + self.schedule.microbatches
    entries = {k: v for k, v in state.entries.items() if k in self._at_worker}
    return self._with_first_tickets(done, state.servers, entries)

  def fetch(self, state: PipelineState) -> PipelineState:
    """Returns a state as a checkpoint may have it."""
    return state

  def place(self, state: PipelineState) -> PipelineState:
    """Puts the entries of a whole state, read from a checkpoint, on the devices
    of the lanes here. Raises ValueError for a state of another table, or one
    that is not whole."""
    state_lib.check(state, self.compiled.program, self._at_worker)
    entries, memories = {}, self.compiled.memories
    for key, value in state.entries.items():
      lane = state_lib.lane_of(self.compiled.program, key)
      if lane in memories and key[0] in (TICKET, SUM):
        entries[key] = memories[lane].to_host(value)
      elif lane in self.devices:
        entries[key] = jax.device_put(value, self.devices[lane])
    homes = self.compiled.homes()
    servers = tuple(
      self._server(stage, server) if stage in homes else None
      for stage, server in enumerate(state.servers)
    )
    return state._replace(servers=servers, entries=entries)

  def _server(self, stage, state):
    """A copy of a server's state, where it is kept."""
    lane = self.compiled.program.places[stage][0]
    if lane in self.compiled.memories:
      return self.compiled.memories[lane].to_host(state)
    # A copy, as they are donated.
    return jax.device_put(state, self.devices[lane], may_alias=False)

  def traffic(self) -> residence.DeviceTraffic:
    """Returns the traffic of all lanes between devices and the host, and the
    largest peak; 0 where devices hold all."""
    lanes = [memory.traffic for memory in self.compiled.memories.values()]
    return residence.add_up([self._before, *lanes])

  def count_anew(self, before: residence.DeviceTraffic) -> None:
    """Counts `traffic` from now on, beginning with `before`."""
    self._before = before
    for memory in self.compiled.memories.values():
      memory.traffic = residence.DeviceTraffic()

  def _with_first_tickets(self, microbatch, servers, entries):
    """A state with the first tickets of the present weights. Tickets for lanes
    in other processes are sent."""
    for stage in self.compiled.homes():
      for key, lane, ticket in self.compiled.tickets(stage, 0, servers[stage]):
        if lane in self.devices:
          entries[key] = ticket
        else:
          self.compiled.elsewhere[lane].put((key, ticket))
    return PipelineState(0, microbatch, tuple(servers), entries)

  def params(self, state: PipelineState) -> list[Any]:
    """Returns the present parameters of each stage."""
    return [server and server.params for server in state.servers]

  def run(
    self, state: PipelineState, until: int | None = None
  ) -> PipelineResult:
    """Obeys the table up to, not including, slot `until` (None: all).

    Consumes `state`: its buffers are donated.

    Raises:
      PipelineError: if a task fails, naming it. The state is lost.
      ValueError: for a slot that the table has not, or that is before that of
        the state; for a state that is not of this table, or was consumed.
    """
    until = check_until(self.schedule, state.slot, until)
    if not self.inboxes:  # of one in parts, the rest may not have arrived
      state_lib.check(state, self.compiled.program, self._at_worker)
    return lanes_lib.LaneRun(self.compiled, state, until).result()


def _memories(program, parts, devices, room):
  """The memories of lanes whose devices do not hold all weights."""
  schedule = program.schedule
  if len(devices) < schedule.devices:
    raise ValueError(
      "a part of the weights can be held by devices of one process only"
    )
  if program.together:
    raise ValueError(
      "updates that are made together, by a norm of all stages, need all"
      " weights at once: leave the clipping by a norm out"
    )
  residence.check(schedule, parts, room)
  return {
    lane: residence.DeviceMemory(
      program.lanes[lane], schedule.every, room, device
    )
    for lane, device in devices.items()
  }


def _check_parts(schedule, parts, own):
  """Refuses parts and actions that are not those of the table."""
  validate.validate(schedule)
  if len(parts) != schedule.stages:
    raise ValueError(
      f"the schedule has {schedule.stages} stages, and there are {len(parts)}"
      " parts; give as many"
    )
  if (validate.rows(schedule).weight < 0).any():
    raise ValueError(
      f"{schedule.name} has no backward: there is nothing to train"
    )
  if UPDATE in schedule.action:
    raise ValueError(
      f"the schedule has actions {UPDATE!r}, which is what the executor calls"
      " its own updates: give them another name"
    )
  unknown = set(schedule.action) - set(own) - set(validate.KNOWN)
  if unknown:
    raise ValueError(
      f"the schedule has actions {sorted(map(str, unknown))}: give functions"
      " for them, own={name: function}"
    )


def _streams(schedule, parts, weights):
  """The workers of each stage: the updates in flight there, or one where the
  algorithm was built for one."""
  out = []
  for stage, count in enumerate(analyze.in_flight(schedule, weights).tolist()):
    workers = parts[stage].server.workers
    if workers not in (None, 1) and workers < count:
      raise ValueError(
        f"stage {stage} has {count} updates in flight, and its algorithm was"
        f" built for {workers} workers: build it for {count}"
      )
    out.append(1 if workers == 1 else count)
  return out


def _devices(devices, count):
  if devices is None:
    here = jax.local_devices()
    if len(here) < count:
      raise ValueError(
        f"the schedule has {count} devices, and there are {len(here)}; for CPU"
        " devices set jax.config.update('jax_num_cpu_devices', N) before JAX is"
        " used"
      )
    devices = here[:count]
  if len(devices) != count:
    raise ValueError(f"the schedule has {count} devices, not {len(devices)}")
  return devices


def check_until(schedule: Schedule, slot: int, until: int | None) -> int:
  """Returns the slot before which a run from `slot` is to stop; None: all.
  Raises ValueError unless that is a slot from `slot` to the table's end."""
  if until is None:
    return schedule.slots
  whole = isinstance(until, (int, np.integer)) and not isinstance(until, bool)
  if not whole or not slot <= until <= schedule.slots:
    raise ValueError(
      f"a run of {schedule.name} that is at slot {slot} can stop before slots"
      f" {slot} to {schedule.slots}, not {until!r}"
    )
  return int(until)
