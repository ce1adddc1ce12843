"""The chunk engine: many messages of a trace in one compiled program.

A small model's step takes less time than the four calls by which the host
engine makes it. Here one program has a loop over messages: it reads the ticket
of each, does the worker's job, gives the server the message, and keeps the
ticket that is sent next. Tickets are rows (slots) of one buffer (`tickets`),
and worker states are rows of another. A row is written at the start of the next
message, as XLA copies a buffer that is read and then written in one loop step.

The number of messages is an argument of the program, so the same instructions
compute a message wherever a run is cut: a resumed run has the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, compression, stacking
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import concatenate, fetch, of_columns
from asgd.simulator.simulation import (
  SimulationState,
  Simulator,
  make_simulator,
)
from asgd.simulator.tickets import (
  NotCompiled,
  TicketPlan,
  plan_tickets,
  sends_from,
  tickets_at,
)
from asgd.simulator.traffic import Traffic
from asgd.stacking import Batches
from asgd.transforms import rows as rows_lib

_MAX_MESSAGES = 256  # messages of a call
_MAX_BYTES = 2**25  # bytes of the batches and the codes of a call
_AHEAD = 2  # calls whose records have not been fetched


class Carry(NamedTuple):
  """The state between two messages. The ticket that is sent after a message
  (`sent_slot`, `sent_worker`) is written at the start of the next message."""

  server: base.ServerState
  params: base.Params  # parameters of tickets, `TicketPlan.slots` + 1 rows
  version: jax.Array  # int32[slots + 1], versions of tickets
  sent_slot: jax.Array  # int32[], slot of the ticket that is sent now
  sent_worker: jax.Array  # int32[], worker of that ticket
  workers: rows_lib.WorkerRows  # N states


class Messages(NamedTuple):
  """Inputs of the program for the messages of a call, [C]."""

  worker: Any  # int32
  job: Any  # int32
  slot: Any  # int32, slot of the message's ticket
  earlier_jobs: Any  # int32, earlier jobs on the same ticket
  is_first: Any  # bool, first message of a worker that joined
  sent_slot: Any  # int32, slot of the ticket that is sent after it
  sent_worker: Any  # int32, worker of that ticket


class ChunkPrograms(NamedTuple):
  """The compiled functions of the engine."""

  # (carry, root, count, Messages, batches) -> (carry, Observations, codes)
  messages: Callable[..., tuple[Carry, Any, Any]]
  sends: Callable[..., Carry]  # (carry, count, slots, workers)
  pure: steps_lib.PureSteps


class ComputedMessage(NamedTuple):
  """A computed message with its ticket, worker state and loss."""

  ticket: base.Ticket
  state: Any  # state of the worker after the job
  message: optax.Updates
  loss: jax.Array  # float[]


class ProgramParts(NamedTuple):
  """The parts of a program that replays messages."""

  # (Carry) -> the same, with the latest ticket and worker state in their rows
  settle: Callable[[Carry], Carry]
  # (settled Carry, Messages of one) -> its ticket
  ticket: Callable[[Carry, Messages], base.Ticket]
  # (settled Carry, root, Messages of one, batch, ticket) -> ComputedMessage
  work: Callable[..., ComputedMessage]
  # (settled Carry, Messages of one, job) -> (Carry, (Observation, code))
  receive: Callable[[Carry, Messages, ComputedMessage], tuple[Carry, Any]]


def _send(pure, carry):
  """Returns the carry with the latest ticket in its slot."""
  ticket = pure.send(carry.server, carry.sent_worker)
  params, version = jax.tree.map(
    lambda rows, x: rows_lib.put_row(rows, x, carry.sent_slot),
    (carry.params, carry.version),
    (ticket.params, ticket.version),
  )
  return carry._replace(params=params, version=version)


def program_parts(
  server: base.Server,
  worker: base.Worker,
  pure: steps_lib.PureSteps,
  joins: bool,
) -> ProgramParts:
  """Returns the parts of programs; arguments are those of `compile_chunk`."""

  def settle(carry):
    carry = _send(pure, carry)
    stored = rows_lib.settle(carry.workers)
    return carry._replace(workers=carry.workers._replace(stored=stored))

  def ticket(carry, row):
    params, version = jax.tree.map(
      lambda rows: rows_lib.get_row(rows, row.slot),
      (carry.params, carry.version),
    )
    # The worker's copy has its updates of earlier jobs on this ticket.
    if server.alone:
      version += row.earlier_jobs
    return base.Ticket(row.worker, version, params, row.earlier_jobs == 0)

  def work(carry, root, row, batch, ticket):
    state = jax.tree.map(
      lambda rows: rows_lib.get_row(rows, row.worker), carry.workers.stored
    )
    # `where` computes both states for each message, without a branch.
    if joins:
      first_state = worker.init(ticket.params)
      state = jax.tree.map(
        lambda x, y: jnp.where(row.is_first, x, y), first_state, state
      )
    state, message, metrics = pure.work(state, ticket, batch, root, row.job)
    return ComputedMessage(ticket, state, message, metrics.loss)

  def receive(carry, row, job):
    workers = rows_lib.write(carry.workers, row.worker, job.state)
    server_state, observation = pure.receive(
      carry.server, job.ticket, job.message, job.loss
    )
    code = None if pure.codec is None else job.message
    sent = {"sent_slot": row.sent_slot, "sent_worker": row.sent_worker}
    carry = carry._replace(server=server_state, workers=workers, **sent)
    return carry, (observation, code)

  return ProgramParts(settle, ticket, work, receive)


def outputs(
  parts: ProgramParts, carry: Carry, root: jax.Array, rows: Any, batches: Any
) -> Any:
  """Returns zeros, [C, ...], for the (Observation, code) of each message."""

  def one_message(carry, root, row, batch):
    job = parts.work(carry, root, row, batch, parts.ticket(carry, row))
    return parts.receive(carry, row, job)[1]

  first = jax.tree.map(lambda x: x[0], (rows, batches))
  shapes = jax.eval_shape(one_message, carry, root, *first)
  return jax.tree.map(
    lambda x: jnp.zeros((len(rows.job), *x.shape), x.dtype), shapes
  )


def compile_sends(pure: steps_lib.PureSteps) -> Callable[..., Carry]:
  """Compiles (carry, count, slots, workers) -> carry, which sends tickets."""

  @functools.partial(jax.jit, donate_argnums=0)
  def sends(carry, count, slots, workers):
    def step(index, carry):
      slot, worker = slots[index], workers[index]
      return _send(pure, carry._replace(sent_slot=slot, sent_worker=worker))

    return jax.lax.fori_loop(0, count, step, carry)

  return sends


@functools.lru_cache(maxsize=32)
def compile_chunk(
  server: base.Server, worker: base.Worker, wire: str | None, joins: bool
) -> ChunkPrograms:
  """Compiles the program of a server and its workers, once.

  Args:
    server: any.
    worker: any.
    wire: as in `compile_steps`.
    joins: whether workers join; a join resets the worker's state.
  """
  pure = steps_lib.pure_steps(server, worker, wire)
  parts = program_parts(server, worker, pure, joins)

  @functools.partial(jax.jit, donate_argnums=0)
  def messages(carry, root, count, rows, batches):
    out = outputs(parts, carry, root, rows, batches)

    def step(index, loop_state):
      carry, out = loop_state
      row, batch = jax.tree.map(lambda x: x[index], (rows, batches))
      carry = parts.settle(carry)
      job = parts.work(carry, root, row, batch, parts.ticket(carry, row))
      carry, results = parts.receive(carry, row, job)
      out = jax.tree.map(lambda x, y: x.at[index].set(y), out, results)
      return carry, out

    carry, out = jax.lax.fori_loop(0, count, step, (carry, out))
    return carry, *out

  return ChunkPrograms(messages, compile_sends(pure), pure)


def make_chunk(
  server: base.Server, worker: base.Worker, *, wire: str | None = None
) -> Simulator:
  """Builds the chunk engine of a server and its workers.

  Args:
    server: one whose updates are not codes.
    worker: one whose jobs have batches of one shape.
    wire: as in `compile_steps`.

  Returns:
    A Simulator. Its `follow` raises NotCompiled for a trace that only the host
    engine replays.
  """

  def follow(wrapped_worker, simulation, trace, *, batch, root):
    parts = server, wrapped_worker, wire
    return ChunkRun(parts, simulation, trace, batch=batch, root=root)

  return make_simulator(server, worker, follow)


def obstacle(opt_state: Any, worker_state: Any, trace: base.Trace) -> str:
  """Returns why only the host engine can replay a trace; "" if others can.

  Args:
    opt_state: the server's, or its shapes.
    worker_state: that of a worker, or its shapes.
    trace: the trace that is replayed.
  """
  if compression.last_update(opt_state) is not None:
    return "the server's updates are codes (compress_down)"
  action = np.asarray(trace.action)
  if (action == base.ROLLBACK).any():
    return "the order rolls back"
  if (action == base.DROP).any() and jax.tree.leaves(worker_state):
    return "a worker with a state has messages that are dropped"
  return ""


class ChunkRun:
  """A trace that is replayed in chunks; a TraceRun."""

  def __init__(
    self,
    parts: tuple[base.Server, base.Worker, Any],
    simulation: SimulationState,
    trace: base.Trace,
    *,
    batch: Batches,
    root: jax.Array,
  ) -> None:
    """Continues a SimulationState; `parts` are server, worker and wire."""
    server, worker, _ = parts
    # [1] Check, and plan all messages of the trace.
    state = simulation.server.opt_state
    if reason := obstacle(state, simulation.workers[:1], trace):
      raise NotCompiled(reason)
    self._plan = plan = plan_tickets(trace, shared=server.sends_current)
    self._trace, self._batch, self._root = trace, batch, root
    self._worker = np.asarray(trace.worker)[plan.row]  # by message
    self._job = np.asarray(trace.job)[plan.row]
    # [2] Compile.
    self._program = compile_chunk(*parts, bool(plan.is_first.any()))
    self._traffic = Traffic(self._program.pure, simulation.server)
    self._alone, self._workers = server.alone, len(simulation.workers)
    self._stops = np.array(sorted(plan.sends), np.int64)
    # [3] Continue at a row, between two messages.
    self._event = simulation.event
    # Messages received, and those before the latest of `plan.sends`.
    self._received = int(np.searchsorted(plan.row, self._event))
    self._received_at_sends = self._received
    # [4] Send the tickets between this row and the next message. Slots that
    # take the server's parameters as they are need no program.
    slots, workers = sends_from(plan, trace, self._event)
    current = slots
    if not server.sends_current or parts[2] is not None:
      current = slots[:0]  # a program computes what is sent
    self._carry = _initial_carry(plan, trace, simulation, server.alone, current)
    if not len(current):
      self._send(slots, workers)

  @property
  def server(self) -> base.ServerState:
    """The server's state. Parameters are a copy; the next call of `until`
    donates the rest."""
    state = self._carry.server
    return state._replace(params=jax.tree.map(jnp.copy, state.params))

  def until(self, end: int) -> base.Records:
    """Replays the rows up to, not including, row `end`."""
    start, stop = self._received, int(np.searchsorted(self._plan.row, end))
    self._event = end
    calls, parts = [], []
    # A call returns at once, so the host prepares the next one meanwhile. Few
    # calls are in flight, as each holds its batches and records.
    while self._received < stop:
      self._send_between()
      calls.append(self._call(stop))
      if len(calls) > _AHEAD:
        parts.append(self._fetch(*calls.pop(0)))
    parts += [self._fetch(*call) for call in calls]
    return self._records(slice(start, stop), parts)

  def pause(self) -> SimulationState:
    """Returns the simulation in new buffers."""
    # Write the tickets sent after the last message, which wait until now.
    self._send_between()
    latest = self._carry.sent_slot, self._carry.sent_worker
    self._send(*(np.asarray(x)[None] for x in latest))
    carry, trace, starts = self._carry, self._trace, self._plan.starts
    stored, versions = fetch((carry.params, carry.version))
    states = fetch(rows_lib.settle(carry.workers))
    params = functools.cache(lambda slot: _row(stored, slot))

    def ticket(start):
      slot, jobs = int(starts.slot[start]), int(starts.earlier_jobs[start])
      version = int(versions[slot]) + (jobs if self._alone else 0)
      worker = jnp.int32(trace.worker[starts.row[start]])
      fresh = np.bool_(jobs == 0)
      return base.Ticket(worker, jnp.int32(version), params(slot), fresh)

    workers = range(self._workers)
    tickets = tuple({} for _ in workers)
    latest_tickets = [None for _ in workers]
    opened, latest = tickets_at(starts, trace, self._event)
    for (worker, seq), start in opened.items():
      tickets[worker][seq] = ticket(start)
    if starts.earlier_jobs.any():
      for worker, start in latest.items():
        latest_tickets[worker] = ticket(start)
    return SimulationState(
      self._event,
      jax.tree.map(jnp.copy, carry.server),
      tuple(_row(states, worker) for worker in workers),
      tickets,
      tuple(latest_tickets),
      {},
    )

  def _send_between(self):
    """Sends the tickets between two messages, if there are several."""
    sends = self._plan.sends.get(self._received)
    if sends is not None and self._received_at_sends < self._received:
      self._send(*sends)
      self._received_at_sends = self._received

  def _send(self, slots: np.ndarray, workers: np.ndarray) -> None:
    """Sends tickets into these slots, by a compiled program."""
    count = len(slots)
    if not count:
      return
    size = 1 << (count - 1).bit_length()  # few programs for all counts
    rows = padded(slots, size), padded(workers, size)
    self._carry = self._program.sends(self._carry, np.int32(count), *rows)

  @functools.cached_property
  def _call_size(self):
    """Messages of a call."""
    # The batch of the next job: an iterator cannot return to an earlier one.
    worker, job = self._worker[self._received], self._job[self._received]
    batch = self._batch(int(worker), int(job))
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    if self._program.pure.codec is not None:
      size += self._traffic.dense
    return max(1, min(_MAX_MESSAGES, _MAX_BYTES // max(size, 1)))

  def _limit(self, end: int, stop: int) -> int:
    """Returns the message before which a call must end, at most `end`."""
    # A call must end where several tickets are sent: only a program between two
    # calls sends them.
    begin = self._received
    following = self._stops[np.searchsorted(self._stops, begin, "right") :]
    return min(stop, end, *following[:1].tolist())

  def _inputs(self, begin: int, end: int, count: int) -> tuple[Messages, Any]:
    """Returns Messages and batches of some messages, with `count` rows."""
    call, plan = slice(begin, end), self._plan
    columns = self._worker, self._job, plan.slot, plan.earlier_jobs
    columns += plan.is_first, plan.sent_slot, plan.sent_worker
    rows = Messages(*(padded(x[call], count) for x in columns))
    batches = stacking.of_jobs(
      self._batch, self._worker[call].tolist(), self._job[call].tolist()
    )
    return rows, jax.tree.map(lambda x: padded(x, count), batches)

  def _call(self, stop: int) -> tuple[Any, ...]:
    """Starts to compute the next messages, not past `stop`; returns (count,
    Observations, codes)."""
    begin = self._received
    end = self._limit(begin + self._call_size, stop)
    count, inputs = end - begin, self._inputs(begin, end, self._call_size)
    self._carry, *results = self._program.messages(
      self._carry, self._root, np.int32(count), *inputs
    )
    self._received = end
    return count, *results

  def _fetch(self, count: int, observations: Any, codes: Any) -> tuple:
    """Returns Observations [count], bytes up and norms of residuals."""
    observations = jax.tree.map(lambda x: x[:count], fetch(observations))
    up, norms = self._traffic.dense, 0.0
    if codes is not None:
      leaves, structure = jax.tree.flatten(fetch(codes))
      message_leaves = ([x[i, ...] for x in leaves] for i in range(count))
      unflatten = functools.partial(jax.tree.unflatten, structure)
      messages = map(unflatten, message_leaves)
      up, norms = zip(*map(self._traffic.up, messages), strict=True)
    return *observations, *(np.resize(x, count) for x in (up, norms))

  def _records(self, messages, parts):
    """Returns the records of some messages, from what `_fetch` returned."""
    if not parts:
      return concatenate([])
    integers, reals, up, norms = map(np.concatenate, zip(*parts, strict=True))
    # A job on a kept ticket receives no bytes.
    down = self._traffic.dense * (self._plan.earlier_jobs[messages] == 0)
    time = np.asarray(self._trace.time)[self._plan.row[messages]]
    of_trace = time, self._worker[messages], self._job[messages]
    return of_columns(*of_trace, up, down, norms, whole=integers, real=reals)


def _row(stored, index):
  """A row of NumPy arrays, as arrays of JAX."""
  return jax.tree.map(lambda x: jnp.array(x[index]), stored)


def padded(column: Any, count: int) -> Any:
  """Returns a column with so many rows, zeros at its end."""
  missing = count - len(column)
  if not missing:
    return column
  padding = np.zeros((missing, *column.shape[1:]), column.dtype)
  return np.concatenate([column, padding])


def _initial_carry(
  plan: TicketPlan, trace: base.Trace, simulation: SimulationState,
  alone: bool, current: np.ndarray,
) -> Carry:
  """Returns the carry of a simulation: its tickets and worker states as rows.
  The slots `current` hold tickets with the server's own parameters."""
  server, states = simulation.server, simulation.workers
  blank = fetch((server.params, server.version))
  stored = jax.tree.map(
    lambda x: np.zeros((plan.slots + 1, *x.shape), x.dtype), blank
  )
  starts = plan.starts
  opened, latest = tickets_at(starts, trace, simulation.event)
  held_tickets = [
    (i, simulation.tickets[w][seq]) for (w, seq), i in opened.items()
  ]
  held_tickets += [
    (start, simulation.kept[worker])
    for worker, start in latest.items()
    if simulation.kept[worker] is not None
  ]
  # A row holds the version as sent; the program adds the jobs on the ticket.
  for start, ticket in held_tickets:
    version = int(ticket.version) - alone * int(starts.earlier_jobs[start])
    leaves = map(jax.tree.leaves, (stored, (ticket.params, version)))
    for rows, value in zip(*leaves, strict=True):
      rows[starts.slot[start]] = value
  for rows, value in zip(*map(jax.tree.leaves, (stored, blank)), strict=True):
    rows[current] = value
  # New simulations share one state object: repeat it on the device.
  if all(state is states[0] for state in states):
    workers = rows_lib.make_rows(states[0], len(states))
  else:
    rows = stacking.stack([fetch(state) for state in states])
    workers = rows_lib.WorkerRows(rows, fetch(states[0]), np.int32(0))
  carry = Carry(server, *stored, np.int32(plan.slots), np.int32(0), workers)
  return jax.tree.map(jnp.array, carry)
