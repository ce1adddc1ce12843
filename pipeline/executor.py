"""Obeys a table: stages on devices, and a server for the weights of each.

Every device has a lane: a thread that does the device's tasks in the order of
the table and waits for nothing else than what a task needs. What one lane makes
for another is put into the other's queue, moved by `jax.device_put`. A stage's
weights live in a server of `asgd` on its first device; a forward reads a
ticket, its backward the same ticket (a stash) or another, and the gradient is
received with the ticket of the forward, so that every algorithm against
staleness works here as it does anywhere.

Slots are cuts: no task of slot t needs anything of slot t or later. So a run
can stop before any slot, with all that is on its way in `State`, and go on.

A process may have some of the lanes only; `pipeline.processes` is about those
who have the others.
"""

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, sharding, simulator
from pipeline import analyze, program, validate
from pipeline import stage as stage_lib
from pipeline.program import UPDATE
from pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from pipeline.spans import Span

Key = tuple[str, int, int]  # ("x", stage, microbatch), ("g", ...), ("m", ...)


class PipelineError(RuntimeError):
  """A task failed; its text names stage and microbatch, its cause says why."""


class Part(NamedTuple):
  """One stage, for the executor."""

  fn: stage_lib.StageFn  # the last stage's y is the loss, float[]
  params: Any  # at first
  server: base.Server  # one update a message: the table says how many are one
  message: optax.GradientTransformation | None = None  # DANA-Slim's momentum


class State(NamedTuple):
  """A run before a slot. Keys are of the table: a checkpoint is this. Of a
  process that has some lanes only, it is their part, with None for the servers
  that are elsewhere."""

  slot: int  # the next
  microbatch: int  # that the first of the table stands for
  servers: tuple[base.ServerState, ...]  # S
  messages: dict[tuple[int, int], Any]  # (stage, replica), of `Part.message`
  tickets: dict[tuple[int, int, int], base.Ticket]  # stage, version, replica
  sums: dict[int, Any]  # stage -> gradients of the update to come
  on_their_way: dict[Key, Any]
  kept: dict[tuple[int, int], Any]  # (stage, microbatch), for the backward
  halves: dict[tuple[int, int], Any]  # the same, between I and W


class Result(NamedTuple):
  """What a run did."""

  state: State
  losses: dict[int, Any]  # microbatch -> float[], as its last stage found it
  records: tuple[base.Records, ...]  # S; a row an update
  spans: tuple[Span, ...]


class Stop:
  """What a lane's queue is told when another lane failed."""


class Executor:
  """Runs a table on devices."""

  def __init__(
    self,
    schedule: Schedule,
    parts: Sequence[Part],
    extra: Callable[[int, int], Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    weights: str | None = None,
    recompute: bool = False,
    together: bool = False,
    own: dict[str, Callable[[int], Any]] | None = None,
    clock: Callable[[], float] | None = None,
    elsewhere: dict[int, Any] | None = None,
  ):
    """Compiles the stages.

    Args:
      schedule: the table; it is validated.
      parts: the stages, S.
      extra: (stage, microbatch) -> what `Part.fn` gets besides parameters and
        the stage before's output: examples at the first, labels at the last,
        keys. Called by many threads.
      devices: D, or as many as lanes that are here; None is the first ones.
      weights: of which version a backward is, as in `analyze.versions`; None is
        "latest" for a synchronous schedule and "stash" for another.
      recompute: keep a stage's input instead of what its backward needs, and
        run its forward again; with "latest" weights, those of now.
      together: updates of a synchronous schedule are made at the end of each
        batch, and what they ask of `sharding.total` is of all stages, such as
        the norm that `sharding.clip_by_global_norm` clips to. Otherwise each
        stage makes its own, with its own norm.
      own: the user's actions: device -> anything.
      clock: seconds, for spans; without it there are none.
      elsewhere: lanes that another process has -> their queues, whose `put`
        takes (key, value). What they make for a lane that is here is to be put
        into its queue in `inboxes`. None is that all are here.

    Raises:
      ValueError: if these do not fit together, and as `validate.validate`.
    """
    validate.validate(schedule)
    self.schedule, self.parts, self._extra = schedule, tuple(parts), extra
    if len(parts) != schedule.stages:
      raise ValueError(
        f"the schedule has {schedule.stages} stages, and there are"
        f" {len(parts)} parts; give as many"
      )
    if (validate.rows(schedule).weight < 0).any():
      raise ValueError(
        f"{schedule.name} has no backward: there is nothing to train"
      )
    away = elsewhere or {}
    self.lanes = [d for d in range(schedule.devices) if d not in away]
    count, here = len(self.lanes), jax.local_devices()
    if devices is None:
      if len(here) < count:
        raise ValueError(
          f"the schedule has {count} devices, and there are {len(here)}; for"
          " CPU devices set jax.config.update('jax_num_cpu_devices', N) before"
          " JAX is used"
        )
      devices = here[:count]
    if len(devices) != count:
      raise ValueError(f"the schedule has {count} devices, not {len(devices)}")
    self.devices = dict(zip(self.lanes, devices, strict=True))
    self.inboxes = None
    if elsewhere is not None:
      self.inboxes = {lane: queue.SimpleQueue() for lane in self.lanes}
      self._queues = {**elsewhere, **self.inboxes}
    self._own = {
      name: function
      for name, function in (own or {}).items()
      if name not in validate.KNOWN
    }
    if UPDATE in schedule.action:
      raise ValueError(
        f"the schedule has actions {UPDATE!r}, which is what the executor calls"
        " its own updates: give them another name"
      )
    unknown = set(schedule.action) - set(self._own) - set(validate.KNOWN)
    if unknown:
      raise ValueError(
        f"the schedule has actions {sorted(map(str, unknown))}: give functions"
        " for them, own={name: function}"
      )
    if weights is None:
      weights = "latest" if schedule.flush else "stash"
    self._recompute = recompute
    self._clock = clock
    self._blocks = clock is not None or devices[0].platform == "cpu"
    self.weights = weights
    self.together = together
    self.program = program.write(
      schedule, analyze.versions(schedule, weights), together=together
    )
    self.places = self.program.places
    for stage, part in enumerate(self.parts):
      if part.server.workers not in (None, 1) and part.server.workers < len(
        self.places[stage]
      ):
        raise ValueError(
          f"stage {stage} has {len(self.places[stage])} replicas, and its"
          f" algorithm was built for {part.server.workers} workers"
        )
    self._compile()

  # Before a run.

  def _compile(self):
    """Compiles each stage that is here once, from shapes."""
    self.compiled: list[stage_lib.Stage | None] = []
    self._steps, self._transforms = [], []
    x: Any = ()
    for index, part in enumerate(self.parts):
      for leaf in jax.tree.leaves(base.weights_of(part.params)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
          raise ValueError(
            f"stage {index} has parameters of dtype {leaf.dtype}, which have no"
            " gradient: make them constants of its fn, or give them by extra"
          )
      extra, compiled = self._extra(index, 0), None
      try:
        if any(device in self.devices for device in self.places[index]):
          compiled = stage_lib.compile_stage(part.fn, part.params, x, extra)
          x = compiled.y
        else:
          x = jax.eval_shape(part.fn, part.params, x, extra)[0]
      except Exception as error:
        raise PipelineError(
          f"stage {index} cannot be compiled: {error}"
        ) from error
      self.compiled.append(compiled)
      self._steps.append(_steps(part.server))
      self._transforms.append(_transform(part.message))
    dtype = getattr(x, "dtype", None)
    real = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if getattr(x, "shape", None) != () or not real:
      raise ValueError(
        "the last stage must return its loss, float[], not"
        f" {jax.tree.map(lambda s: f'{s.dtype}{list(s.shape)}', x)}"
      )

  def start(self) -> State:
    """Returns the state before the first slot."""
    servers, messages = [None] * len(self.parts), {}
    for stage in self._homes():
      part = self.parts[stage]
      state = simulator.start(part.server, part.params)
      servers[stage] = jax.device_put(state, self._home(stage))
      if self._transforms[stage]:
        for mine, _ in enumerate(self.places[stage]):
          messages[stage, mine] = jax.device_put(
            self._transforms[stage].init(base.weights_of(state.params)),
            self._home(stage),
          )
    state = State(0, 0, tuple(servers), messages, {}, {}, {}, {}, {})
    return self._with_first_tickets(state)

  def _homes(self):
    """Stages whose servers are here."""
    return [s for s, held in enumerate(self.places) if held[0] in self.devices]

  def again(self, state: State) -> State:
    """Returns the state from which the table can be obeyed once more, with the
    microbatches that follow.

    Raises:
      ValueError: if the table is not done.
    """
    if state.slot != self.schedule.slots:
      raise ValueError(
        f"the table is at slot {state.slot} of {self.schedule.slots}: run it to"
        " its end first"
      )
    done = state.microbatch + self.schedule.microbatches
    return self._with_first_tickets(
      State(0, done, state.servers, state.messages, {}, {}, {}, {}, {})
    )

  def fetch(self, state: State) -> State:
    """Returns a state as a checkpoint may have it."""
    return state

  def place(self, state: State) -> State:
    """Puts a state that was read from a checkpoint on the devices that it is
    for; of one that is whole, what is for the lanes here.

    Raises:
      ValueError: for a state that is not of this table, or not whole.
    """

    self._check(state)

    def lane(field, key):
      return program.lane_of(self.program, self.schedule, field, key)

    def put(field):
      return {
        key: jax.device_put(value, self.devices[lane(field, key)])
        for key, value in getattr(state, field).items()
        if lane(field, key) in self.devices
      }

    servers = [None] * len(self.parts)
    for stage in self._homes():
      held = jax.device_put(state.servers[stage], self._home(stage))
      servers[stage] = jax.tree.map(jnp.copy, held)  # they are donated
    fields = {field: put(field) for field in State._fields[3:]}
    return state._replace(servers=tuple(servers), **fields)

  def _with_first_tickets(self, state):
    """Adds what is read of the weights as they are now. Tickets for lanes that
    are elsewhere are on their way."""
    tickets = {}
    for stage in self._homes():
      for mine in self.program.made.get((stage, 0), ()):
        made = self._ticket(stage, state.servers[stage], mine)
        lane = self.places[stage][mine]
        if lane in self.devices:
          tickets[stage, 0, mine] = made
        else:
          self._queues[lane].put((("w", stage, 0, mine), made))
    return state._replace(tickets=tickets)

  def _home(self, stage):
    return self.devices[self.places[stage][0]]

  def _ticket(self, stage, state, replica):
    """What a replica is sent, on its device."""
    ticket = self._steps[stage].send(state, jnp.int32(replica))
    lane = self.places[stage][replica]
    if lane not in self.devices:
      return ticket
    return jax.device_put(ticket, self.devices[lane])

  def params(self, state: State) -> list[Any]:
    """Returns the parameters of each stage, as they are: nothing that is on its
    way is waited for or disturbed."""
    return [server and server.params for server in state.servers]

  # Running.

  def run(self, state: State, until: int | None = None) -> Result:
    """Obeys the table up to, not including, slot `until` (None: all).

    Consumes `state`, whose buffers it donates.

    Raises:
      PipelineError: if a task fails, naming it. The state is lost.
      ValueError: for a slot that the table has not, or that is before that of
        the state; for a state that is not of this table, or was consumed.
    """
    until = check_until(self.schedule, state.slot, until)
    if self.inboxes is None:  # of one in parts, the rest may not have arrived
      self._check(state)
    run = _Run(self, state, until)
    return run.result()

  def _check(self, state):
    """Refuses what is no state of this table: its lanes would wait forever."""
    table = self.schedule
    if len(state.servers) != len(self.parts):
      raise ValueError(
        f"the state has {len(state.servers)} stages, and {table.name} has"
        f" {len(self.parts)}: it is of another table"
      )
    for leaf in jax.tree.leaves((state.servers, state.sums)):
      if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
          "this state was consumed by a run: go on with the one that the run"
          " returned"
        )
    wanted = program.held(
      self.program, table, state.slot, together=self.together
    )
    wanted["messages"] = {
      (stage, mine)
      for stage, places in enumerate(self.places)
      for mine, _ in enumerate(places if self._transforms[stage] else ())
    }
    for field, keys in wanted.items():
      found = set(getattr(state, field))
      # A version may be held that is read no more.
      if field == "tickets":
        found &= keys
      wrong = min(keys ^ found, default=None)
      if wrong is not None:
        raise ValueError(
          f"before slot {state.slot} of {table.name} a state has"
          f" {'no ' if wrong in found else ''}{field} {wrong}, unlike this one:"
          " it is of another table, or not whole"
        )


def check_until(schedule: Schedule, slot: int, until: int | None) -> int:
  """Returns the slot before which a run from `slot` is to stop; None: all.

  Raises:
    ValueError: if that is no slot from `slot` to the end of the table.
  """
  if until is None:
    return schedule.slots
  whole = isinstance(until, (int, np.integer)) and not isinstance(until, bool)
  if not whole or not slot <= until <= schedule.slots:
    raise ValueError(
      f"a run of {schedule.name} that is at slot {slot} can stop before slots"
      f" {slot} to {schedule.slots}, not {until!r}"
    )
  return int(until)


@functools.lru_cache(maxsize=64)
def _steps(server):
  return simulator.compile_steps(server, None)


class _Transform(NamedTuple):
  init: Callable
  update: Callable


@functools.lru_cache(maxsize=64)
def _transform(message):
  if message is None:
    return None
  transform = optax.with_extra_args_support(message)
  return _Transform(jax.jit(transform.init), jax.jit(transform.update))


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, tree):
  return jax.tree.map(jnp.add, total, tree)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _mean(total, count):
  return jax.tree.map(lambda x: x / count, total)


class _Run:
  """One call of `Executor.run`."""

  def __init__(self, executor, state, until):
    self.executor, self.until = executor, until
    self.program = executor.program
    self.x64 = jax.config.jax_enable_x64
    self.first, self.offset = state.slot, state.microbatch
    self.servers = list(state.servers)
    self.messages = dict(state.messages)
    self.sums = dict(state.sums)
    self.kept, self.halves = dict(state.kept), dict(state.halves)
    self.losses, self.seen = {}, [[] for _ in executor.parts]
    self.spans = []
    if executor.inboxes is None:
      self.queues = {lane: queue.SimpleQueue() for lane in executor.lanes}
    else:  # which have been given something, perhaps
      self.queues = executor._queues
    self.boxes = {lane: {} for lane in executor.lanes}
    self.tickets = {lane: {} for lane in executor.lanes}
    self.left: dict[program.Ticket, int] = {}
    self.failed: list[PipelineError] = []
    for key, value in state.on_their_way.items():
      self.boxes[self._lane_of("on_their_way", key)][key] = value
    for key, ticket in state.tickets.items():
      self.tickets[self._lane_of("tickets", key)][key] = ticket

  def _lane_of(self, field, key):
    return program.lane_of(self.program, self.executor.schedule, field, key)

  def _count(self, line, lane):
    """Notes that what a line read of the tickets is read."""
    versions, at = self.program.versions, (line.stage, line.microbatch)
    for version in (versions.forward[at], versions.backward[at]):
      key = line.stage, int(version), line.replica
      if key not in self.left:
        self.left[key] = self.program.reads_left(key, self.first)
      self.left[key] -= 1
      if not self.left[key]:
        self.tickets[lane].pop(key, None)

  def result(self):
    lanes = [
      threading.Thread(
        target=self._lane, args=(index,), name=f"lane-{index}", daemon=True
      )
      for index in self.executor.lanes
    ]
    for lane in lanes:
      lane.start()
    for lane in lanes:
      lane.join()
    if self.failed:
      raise self.failed[0]
    on_their_way, tickets = {}, {}
    for index, box in self.boxes.items():
      while not self.queues[index].empty():
        self._take(index)
      tickets.update(self.tickets[index])
      for key, value in box.items():
        if key[0] == "w":
          tickets[key[1:]] = value
        else:
          on_their_way[key] = value
    state = State(
      *(self.until, self.offset, tuple(self.servers), self.messages, tickets),
      *(self.sums, on_their_way, self.kept, self.halves),
    )
    records = []
    for seen in self.seen:
      known = [(time, worker, group) for time, worker, group, _ in seen]
      records.append(simulator.records(known, [row for *_, row in seen]))
    spans = sorted(self.spans, key=lambda span: span.start)
    return Result(state, self.losses, tuple(records), tuple(spans))

  def _lane(self, index):
    # A context of the caller's thread, which is not that of this one.
    with jax.enable_x64(self.x64):
      self._obey(index)

  def _obey(self, index):
    line = None
    try:
      for line in self.program.lines(index, self.first, self.until):
        self._do(index, line)
    except _Stopped:
      pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, all stop
      what, slot = "what is to be done", self.first
      if line is not None:
        slot = line.slot
        what = f"{line.kind} of stage {line.stage}, microbatch"
        what += f" {line.microbatch}"
      failure = PipelineError(
        f"{what} (device {index}, slot {slot}) failed:"
        f" {type(error).__name__}: {error}"
      )
      failure.__cause__ = error
      self.failed.append(failure)
      for other in self.executor.lanes:
        self.queues[other].put(Stop)

  def _settle(self, value):
    """Waits, where a lane's own core does the work or its time is taken."""
    if self.executor._blocks:
      jax.block_until_ready(value)

  def _take(self, lane):
    said = self.queues[lane].get()
    if said is Stop:
      raise _Stopped
    key, value = said
    self.boxes[lane][key] = value

  def _wait(self, lane, key):
    """Returns what comes from another lane."""
    box = self.boxes[lane]
    while key not in box:
      self._take(lane)
    return box.pop(key)

  def _give(self, lane, key, value):
    target = self._lane_of("on_their_way", key)
    if target == lane:
      self.boxes[lane][key] = value
      return
    if target in self.executor.devices:
      value = jax.device_put(value, self.executor.devices[target])
    self.queues[target].put((key, value))

  def _read(self, lane, line, version):
    """Returns a ticket."""
    key = line.stage, int(version), line.replica
    table = self.tickets[lane]
    if key not in table:
      while (found := self.boxes[lane].pop(("w", *key), None)) is None:
        self._take(lane)
      table[key] = found
    return table[key]

  def _do(self, lane, line):
    executor = self.executor
    clock = executor._clock
    if line.kind == UPDATE:
      start = self._update(lane, line)
    elif line.kind in executor._own:
      start = clock() if clock else 0.0
      jax.block_until_ready(executor._own[line.kind](lane))
    else:
      start = self._task(lane, line)
    if clock:
      self.spans.append(
        Span(lane, line.stage, line.microbatch, line.kind, start, clock())
      )

  def _task(self, lane, line):
    """Runs a row of the table; returns when it began."""
    executor, (stage, number) = self.executor, (line.stage, line.microbatch)
    compiled, last = executor.compiled[stage], stage == len(executor.parts) - 1
    versions, at = self.program.versions, (line.stage, line.microbatch)
    clock = executor._clock or (lambda: 0.0)
    if line.kind == FORWARD:
      x = self._wait(lane, ("x", stage, number)) if stage else ()
      ticket = self._read(lane, line, versions.forward[at])
      extra = executor._extra(stage, self.offset + number)
      start = clock()
      y, aux, kept = compiled.forward(ticket.params, x, extra)
      if executor._recompute:
        kept = x, extra
      self.kept[at] = kept, aux
      if last:
        self.losses[self.offset + number] = y
      else:
        self._settle(y)
        self._give(lane, ("x", stage + 1, number), y)
      return start
    if line.kind == WEIGHT:
      ticket = self._read(lane, line, versions.backward[at])
      (kept, aux), half = self.kept.pop(at), self.halves.pop(at)
      start = clock()
      gradient = compiled.weight(ticket.params, kept, half)
      self._hand_in(lane, line, gradient, aux)
      return start
    # Backward, of the inputs at least.
    one = [np.ones((), compiled.y.dtype)] if last else None
    gy = one if last else self._wait(lane, ("g", stage, number))
    ticket = self._read(lane, line, versions.backward[at])
    kept, aux = self.kept[at]
    start = clock()
    if executor._recompute and line.kind == INPUT:
      kept = compiled.forward(ticket.params, *kept)[2]
      self.kept[at] = kept, aux
    if line.kind == INPUT:
      gx, self.halves[at] = compiled.input(ticket.params, kept, gy)
    else:
      del self.kept[at]
      if executor._recompute:
        gradient, gx = compiled.recompute(ticket.params, *kept, gy)
      else:
        gradient, gx = compiled.backward(ticket.params, kept, gy)
    if stage:
      self._settle(gx)
      self._give(lane, ("g", stage - 1, number), gx)
    if line.kind == BACKWARD:
      self._hand_in(lane, line, gradient, aux)
    return start

  def _hand_in(self, lane, line, gradient, aux):
    """Gives a gradient to the stage's server, with the forward's ticket."""
    self._settle(gradient)
    forward = self.program.versions.forward[line.stage, line.microbatch]
    ticket = self._read(lane, line, forward)
    if isinstance(gradient, base.Variables):
      gradient = gradient._replace(stats=aux)
    self._give(lane, ("m", line.stage, line.microbatch), (gradient, ticket))
    self._count(line, lane)

  def _update(self, lane, line):
    """Receives a message; the last of an update makes a new version. Returns
    when it began."""
    executor = self.executor
    lines = (line, *line.also)
    # Waits for the last that comes before the clock is looked at.
    came = [self._wait(lane, ("m", at.stage, at.microbatch)) for at in lines]
    start = executor._clock() if executor._clock else float(line.slot)
    arguments = [
      self._arguments(at, *got) for at, got in zip(lines, came, strict=True)
    ]
    if arguments[0] is None:  # there are more to come
      return start
    if executor.together:
      made = self._receive_together(lane, lines, arguments)
    else:
      made = [executor._steps[line.stage].receive(*arguments[0])]
    for at, (state, row) in zip(lines, made, strict=True):
      self._made(lane, at, state, row, start)
    return start

  def _arguments(self, line, message, ticket):
    """What a server is to receive; None before all of an update are there."""
    executor, stage = self.executor, line.stage
    every = executor.schedule.every
    if every > 1:
      if stage in self.sums:
        total, oldest = self.sums.pop(stage)
        message = _add(total, message)
        older = self._version(ticket) < self._version(oldest)
        ticket = ticket if older else oldest
      if not line.last:
        self.sums[stage] = message, ticket
        return None
      message = _mean(message, every)
    transform = executor._transforms[stage]
    if transform:
      weights, self.messages[stage, line.replica] = transform.update(
        *(base.weights_of(message), self.messages[stage, line.replica]),
        base.weights_of(ticket.params),
      )
      message = base.with_weights(message, weights)
    return self.servers[stage], ticket, message, np.float32(0)

  def _receive_together(self, lane, lines, arguments):
    """Receives what stages of several lanes have to add up to know."""
    executor, known = self.executor, ()
    steps = [executor._steps[line.stage].stage for line in lines]
    others = {held[0] for held in executor.places} - {lane}
    while True:
      outs = [
        step(known, *held) for step, held in zip(steps, arguments, strict=True)
      ]
      if isinstance(outs[0], sharding.Done):
        return [out.result for out in outs]
      operands = {
        line.stage: jax.device_get(out.operand)
        for line, out in zip(lines, outs, strict=True)
      }
      at = lines[0].group, len(known)
      for other in others:
        self.queues[other].put((("n", lane, *at), operands))
      for other in others:
        operands |= self._wait(lane, ("n", other, *at))
      # In the order of the stages, so that it is the same bits everywhere.
      ordered = [operands[stage] for stage in sorted(operands)]
      known += (sharding.add_up(ordered),)

  def _made(self, lane, line, state, row, start):
    """Keeps a new version, and sends it to those who read it."""
    executor, stage = self.executor, line.stage
    self._settle(state.params)
    self.servers[stage] = state
    time = executor._clock() if executor._clock else start
    self.seen[stage].append((time, line.replica, line.group, row))
    version = line.group + 1
    for mine in self.program.made.get((stage, version), ()):
      made = executor._ticket(stage, state, mine)
      target = executor.places[stage][mine]
      key = stage, version, mine
      if target == lane:
        self.tickets[lane][key] = made
      else:
        self.queues[target].put((("w", *key), made))

  @staticmethod
  def _version(ticket):
    return int(ticket.version)


class _Stopped(Exception):
  """Another lane failed."""
