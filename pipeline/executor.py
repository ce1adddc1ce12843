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
"""

import collections
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, simulator
from pipeline import analyze, validate
from pipeline import stage as stage_lib
from pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from pipeline.spans import Span

Key = tuple[str, int, int]  # ("x", stage, microbatch), ("g", ...), ("w", ...)


class PipelineError(RuntimeError):
  """A task failed; its text names stage and microbatch, its cause says why."""


class Part(NamedTuple):
  """One stage, for the executor."""

  fn: stage_lib.StageFn  # the last stage's y is the loss, float[]
  params: Any  # at first
  server: base.Server  # one update a message: the table says how many are one
  message: optax.GradientTransformation | None = None  # DANA-Slim's momentum


class State(NamedTuple):
  """A run before a slot. Keys are of the table: a checkpoint is this."""

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


class _Op(NamedTuple):
  """A line of a lane's program: a row of the table, or an update."""

  slot: int
  kind: str  # an action, or "update"
  stage: int
  microbatch: int
  replica: int
  last: bool = False  # of an update's microbatches
  group: int = 0  # the update


class _Stop:
  """Tells a lane that another one failed."""


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
    own: dict[str, Callable[[int], Any]] | None = None,
    clock: Callable[[], float] | None = None,
  ):
    """Compiles the stages.

    Args:
      schedule: the table; it is validated.
      parts: the stages, S.
      extra: (stage, microbatch) -> what `Part.fn` gets besides parameters and
        the stage before's output: examples at the first, labels at the last,
        keys. Called by many threads.
      devices: D; None is the first ones that are here.
      weights: of which version a backward is, as in `analyze.versions`; None is
        "latest" for a synchronous schedule and "stash" for another.
      recompute: keep a stage's input instead of what its backward needs, and
        run its forward again; with "latest" weights, those of now.
      own: the user's actions: device -> anything.
      clock: seconds, for spans; without it there are none.

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
    self.where = validate.rows(schedule)
    if (self.where.weight < 0).any():
      raise ValueError(
        f"{schedule.name} has no backward: there is nothing to train"
      )
    here = jax.local_devices()
    if devices is None:
      if len(here) < schedule.devices:
        raise ValueError(
          f"the schedule has {schedule.devices} devices, and there are"
          f" {len(here)}; for CPU devices set"
          " jax.config.update('jax_num_cpu_devices', N) before JAX is used"
        )
      devices = here[: schedule.devices]
    if len(devices) != schedule.devices:
      raise ValueError(
        f"the schedule has {schedule.devices} devices, not {len(devices)}"
      )
    self.devices = tuple(devices)
    self._own = dict(own or {})
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
    self._versions = analyze.versions(schedule, weights)
    self.places = schedule.places()
    for stage, part in enumerate(self.parts):
      if part.server.workers not in (None, 1) and part.server.workers < len(
        self.places[stage]
      ):
        raise ValueError(
          f"stage {stage} has {len(self.places[stage])} replicas, and its"
          f" algorithm was built for {part.server.workers} workers"
        )
    self._compile()
    self._plan()

  # Before a run.

  def _compile(self):
    """Compiles each stage once, from shapes."""
    self.compiled: list[stage_lib.Stage] = []
    self._steps, self._transforms = [], []
    x: Any = ()
    for index, part in enumerate(self.parts):
      extra = self._extra(index, 0)
      try:
        compiled = stage_lib.compile_stage(part.fn, part.params, x, extra)
      except Exception as error:
        raise PipelineError(
          f"stage {index} cannot be compiled: {error}"
        ) from error
      self.compiled.append(compiled)
      self._steps.append(_steps(part.server))
      self._transforms.append(_transform(part.message))
      x = compiled.y
    if getattr(x, "shape", None) != ():
      raise ValueError(
        "the last stage must return its loss, float[], not"
        f" {jax.tree.map(lambda s: s.shape, x)}"
      )

  def _plan(self):
    """Writes a program for each lane, and counts who reads what how often."""
    schedule, where = self.schedule, self.where
    columns = (column.tolist() for column in schedule[1:6])
    replica = [{d: i for i, d in enumerate(p)} for p in self.places]
    programs = [[] for _ in self.devices]
    for slot, device, stage, microbatch, action in zip(*columns, strict=True):
      mine = replica[stage][device] if stage >= 0 else 0
      programs[device].append(_Op(slot, action, stage, microbatch, mine))
    uses = collections.Counter()
    self._uses_of = {}
    self.every = schedule.every
    for stage, places in enumerate(self.places):
      rows = where.weight[stage]
      order = np.lexsort((schedule.device[rows], schedule.time[rows]))
      for number, microbatch in enumerate(order.tolist()):
        row = rows[microbatch]
        programs[places[0]].append(
          _Op(
            *(int(schedule.time[row]), "update", stage, microbatch),
            replica[stage][int(schedule.device[row])],
            last=(number + 1) % schedule.every == 0,
            group=number // schedule.every,
          )
        )
      for microbatch in range(schedule.microbatches):
        mine = replica[stage][int(schedule.device[rows[microbatch]])]
        reads = (
          self._versions.forward[stage, microbatch],
          self._versions.backward[stage, microbatch],
        )
        for version in reads:
          uses[stage, int(version), mine] += 1
    # At the end of its slot, an update goes before what comes later.
    self._programs = [
      sorted(program, key=lambda op: (op.slot, op.kind == "update"))
      for program in programs
    ]
    self._uses = uses
    self._made = collections.defaultdict(list)  # (stage, version) -> replicas
    for stage, version, mine in sorted(uses):
      self._made[stage, version].append(mine)

  def start(self) -> State:
    """Returns the state before the first slot."""
    servers, messages = [], {}
    for stage, part in enumerate(self.parts):
      state = simulator.start(part.server, part.params)
      state = jax.device_put(state, self._home(stage))
      servers.append(state)
      if self._transforms[stage]:
        for mine, _ in enumerate(self.places[stage]):
          messages[stage, mine] = jax.device_put(
            self._transforms[stage].init(base.weights_of(state.params)),
            self._home(stage),
          )
    servers, tickets = tuple(servers), self._first_tickets(servers)
    return State(0, 0, servers, messages, tickets, {}, {}, {}, {})

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
    return State(
      *(0, state.microbatch + self.schedule.microbatches, state.servers),
      *(state.messages, self._first_tickets(state.servers), {}, {}, {}, {}),
    )

  def place(self, state: State) -> State:
    """Puts a state that was read from a checkpoint on the devices that it is
    for."""

    def put(held, home):
      return {
        key: jax.device_put(value, home(key)) for key, value in held.items()
      }

    where, device = self.where, self.schedule.device

    def lane(key):
      return self.devices[_goes_to(key, where, device, self.places)]

    def own(key):
      return self.devices[device[where.forward[key]]]

    return state._replace(
      servers=tuple(
        jax.tree.map(jnp.copy, jax.device_put(server, self._home(stage)))
        for stage, server in enumerate(state.servers)
      ),
      messages=put(state.messages, lambda key: self._home(key[0])),
      tickets=put(
        state.tickets,
        lambda key: self.devices[self.places[key[0]][key[2]]],
      ),
      sums=put(state.sums, self._home),
      on_their_way=put(state.on_their_way, lane),
      kept=put(state.kept, own),
      halves=put(state.halves, own),
    )

  def _first_tickets(self, servers):
    return {
      (stage, 0, mine): self._ticket(stage, state, mine)
      for stage, state in enumerate(servers)
      for mine in self._made[stage, 0]
    }

  def _home(self, stage):
    return self.devices[self.places[stage][0]]

  def _ticket(self, stage, state, replica):
    """What a replica is sent, on its device."""
    ticket = self._steps[stage].send(state, jnp.int32(replica))
    device = self.devices[self.places[stage][replica]]
    return jax.device_put(ticket, device)

  def params(self, state: State) -> list[Any]:
    """Returns the parameters of each stage, as they are: nothing that is on its
    way is waited for or disturbed."""
    return [server.params for server in state.servers]

  # Running.

  def run(self, state: State, until: int | None = None) -> Result:
    """Obeys the table up to, not including, slot `until` (None: all).

    Consumes `state`, whose buffers it donates.

    Raises:
      PipelineError: if a task fails, naming it. The state is lost.
    """
    until = self.schedule.slots if until is None else until
    run = _Run(self, state, until)
    return run.result()


@functools.lru_cache(maxsize=64)
def _steps(server):
  return simulator.compile_steps(server, None)


def _goes_to(key, where, device, places):
  """The lane that a value is for."""
  kind, stage, number = key
  if kind == "x":
    return int(device[where.forward[stage, number]])
  if kind == "g":
    return int(device[where.backward[stage, number]])
  return places[stage][0]  # "m", a message


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
    self.x64 = jax.config.jax_enable_x64
    self.first, self.offset = state.slot, state.microbatch
    self.servers = list(state.servers)
    self.messages = dict(state.messages)
    self.sums = dict(state.sums)
    self.kept, self.halves = dict(state.kept), dict(state.halves)
    self.losses, self.seen = {}, [[] for _ in executor.parts]
    self.spans = []
    count = len(executor.devices)
    self.queues = [queue.SimpleQueue() for _ in range(count)]
    self.boxes = [{} for _ in range(count)]
    self.tickets = [{} for _ in range(count)]
    self.failed: list[PipelineError] = []
    self._goes_to = functools.partial(
      _goes_to,
      where=executor.where,
      device=executor.schedule.device,
      places=executor.places,
    )
    for key, value in state.on_their_way.items():
      self.boxes[self._goes_to(key)][key] = value
    for (stage, version, mine), ticket in state.tickets.items():
      lane = executor.places[stage][mine]
      self.tickets[lane][stage, version, mine] = ticket
    self.left = collections.Counter(executor._uses)
    # Those that were read before.
    for lane, program in enumerate(executor._programs):
      for op in program:
        if op.slot < self.first:
          self._count(op, lane)

  def _count(self, op, lane):
    """Notes that what an op read of the tickets is read."""
    versions = self.executor._versions
    at = op.stage, op.microbatch
    table = self.tickets[lane]
    if op.kind == "update":
      return
    if op.kind in (BACKWARD, WEIGHT):
      for version in {versions.forward[at], versions.backward[at]}:
        key = op.stage, int(version), op.replica
        same = versions.forward[at] == versions.backward[at]
        self.left[key] -= 2 if same else 1
        if not self.left[key]:
          table.pop(key, None)

  def result(self):
    lanes = [
      threading.Thread(
        target=self._lane, args=(index,), name=f"lane-{index}", daemon=True
      )
      for index in range(len(self.queues))
    ]
    for lane in lanes:
      lane.start()
    for lane in lanes:
      lane.join()
    if self.failed:
      raise self.failed[0]
    on_their_way = {}
    for index, box in enumerate(self.boxes):
      while not self.queues[index].empty():
        self._take(index)
      on_their_way.update(box)
    tickets = {}
    for table in self.tickets:
      tickets.update(table)
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
    op = None
    try:
      for op in self.executor._programs[index]:
        if self.first <= op.slot < self.until:
          self._do(index, op)
    except _Stopped:
      pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, all stop
      what = f"{op.kind} of stage {op.stage}, microbatch {op.microbatch}"
      failure = PipelineError(
        f"{what} (device {index}, slot {op.slot}) failed:"
        f" {type(error).__name__}: {error}"
      )
      failure.__cause__ = error
      self.failed.append(failure)
      for other in self.queues:
        other.put(_Stop)

  def _settle(self, value):
    """Waits, where a lane's own core does the work or its time is taken."""
    if self.executor._blocks:
      jax.block_until_ready(value)

  def _take(self, lane):
    said = self.queues[lane].get()
    if said is _Stop:
      raise _Stopped
    key, value = said
    self.boxes[lane][key] = value

  def _wait(self, lane, key):
    """Returns what comes from another lane."""
    box = self.boxes[lane]
    while key not in box:
      self._take(lane)
    return box.pop(key)

  def _give(self, lane, key, value, to=None):
    target = self._goes_to(key) if to is None else to
    if target == lane:
      self.boxes[lane][key] = value
    else:
      value = jax.device_put(value, self.executor.devices[target])
      self.queues[target].put((key, value))

  def _read(self, lane, op, version):
    """Returns a ticket."""
    key = op.stage, int(version), op.replica
    table = self.tickets[lane]
    if key not in table:
      while (found := self.boxes[lane].pop(("w", *key), None)) is None:
        self._take(lane)
      table[key] = found
    return table[key]

  def _do(self, lane, op):
    executor = self.executor
    clock = executor._clock
    if op.kind == "update":
      self._update(lane, op)
      return
    if op.stage < 0:
      start = clock() if clock else 0.0
      jax.block_until_ready(executor._own[op.kind](lane))
    else:
      start = self._task(lane, op)
    if clock:
      self.spans.append(
        Span(lane, op.stage, op.microbatch, op.kind, start, clock())
      )

  def _task(self, lane, op):
    """Runs a row of the table; returns when it began."""
    executor, (stage, number) = self.executor, (op.stage, op.microbatch)
    compiled, last = executor.compiled[stage], stage == len(executor.parts) - 1
    versions, at = executor._versions, (op.stage, op.microbatch)
    clock = executor._clock or (lambda: 0.0)
    if op.kind == FORWARD:
      x = self._wait(lane, ("x", stage, number)) if stage else ()
      ticket = self._read(lane, op, versions.forward[at])
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
    if op.kind == WEIGHT:
      ticket = self._read(lane, op, versions.backward[at])
      (kept, aux), half = self.kept.pop(at), self.halves.pop(at)
      start = clock()
      gradient = compiled.weight(ticket.params, kept, half)
      self._hand_in(lane, op, gradient, aux)
      return start
    # Backward, of the inputs at least.
    one = [np.ones((), compiled.y.dtype)] if last else None
    gy = one if last else self._wait(lane, ("g", stage, number))
    ticket = self._read(lane, op, versions.backward[at])
    kept, aux = self.kept[at]
    start = clock()
    if executor._recompute and op.kind == INPUT:
      kept = compiled.forward(ticket.params, *kept)[2]
      self.kept[at] = kept, aux
    if op.kind == INPUT:
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
    if op.kind == BACKWARD:
      self._hand_in(lane, op, gradient, aux)
    return start

  def _hand_in(self, lane, op, gradient, aux):
    """Gives a gradient to the stage's server, with the forward's ticket."""
    self._settle(gradient)
    forward = self.executor._versions.forward[op.stage, op.microbatch]
    ticket = self._read(lane, op, forward)
    if isinstance(gradient, base.Variables):
      gradient = gradient._replace(stats=aux)
    self._give(lane, ("m", op.stage, op.microbatch), (gradient, ticket))
    self._count(op, lane)

  def _update(self, lane, op):
    """Receives a message; the last of an update makes a new version."""
    executor, stage = self.executor, op.stage
    message, ticket = self._wait(lane, ("m", stage, op.microbatch))
    if executor.every > 1:
      if stage in self.sums:
        total, oldest = self.sums.pop(stage)
        message = _add(total, message)
        older = self._version(ticket) < self._version(oldest)
        ticket = ticket if older else oldest
      if not op.last:
        self.sums[stage] = message, ticket
        return
      message = _mean(message, executor.every)
    transform = executor._transforms[stage]
    state = self.servers[stage]
    if transform:
      weights, self.messages[stage, op.replica] = transform.update(
        *(base.weights_of(message), self.messages[stage, op.replica]),
        base.weights_of(ticket.params),
      )
      message = base.with_weights(message, weights)
    state, row = executor._steps[stage].receive(
      state, ticket, message, np.float32(0)
    )
    self._settle(state.params)
    self.servers[stage] = state
    time = executor._clock() if executor._clock else float(op.slot)
    self.seen[stage].append((time, op.replica, op.group, row))
    version = op.group + 1
    for mine in executor._made[stage, version]:
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
