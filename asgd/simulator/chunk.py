"""The chunk engine: many messages of a trace in one compiled program.

The host engine makes four calls for a message; with a small model these calls
take longer than the computation. The program of this engine has a loop over
messages. Each step of the loop reads the ticket of a message, does the worker's
job, gives the message to the server, and stores the ticket that is sent next.

Tickets are rows (slots) of one buffer (`tickets`), and worker states are rows
of another buffer. A row is written at the start of the next message, as XLA
copies a buffer that is read and then written in one loop step.

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

from asgd import base, hoisting, stacking
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
  row_count,
  sends_from,
  tickets_at,
  why_only_host,
)
from asgd.simulator.traffic import Traffic
from asgd.stacking import Batches
from asgd.transforms import rows as rows_lib

_MAX_MESSAGES = 256  # messages of a call
_MAX_BYTES = 2**25  # bytes of the batches and the codes of a call
_MIN_SENDS = 32  # rows of a call that sends tickets
_MAX_CALLS_AHEAD = 2  # calls with records that are not fetched yet


class Carry(NamedTuple):
  """The state between two messages. The ticket that is sent after a message
  (`sent_slot`, `sent_worker`) is written at the start of the next message."""

  server: base.ServerState
  params: base.Params  # parameters of tickets, `row_count` rows
  version: jax.Array  # int32[rows], versions of tickets
  sent_slot: jax.Array  # int32[], slot of the ticket that is sent now
  sent_worker: jax.Array  # int32[], worker of the ticket in `sent_slot`
  workers: rows_lib.WorkerRows  # N states


class Messages(NamedTuple):
  """Inputs of the program for the C messages of a call, [C]."""

  worker: Any  # int32
  job: Any  # int32
  slot: Any  # int32, slot of the message's ticket
  earlier_jobs: Any  # int32, earlier jobs on the same ticket
  is_first: Any  # bool, first message of a worker that joined
  sent_slot: Any  # int32, slot of the ticket that is sent after the message
  sent_worker: Any  # int32, worker of the ticket in `sent_slot`


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

  # Carry -> Carry with the latest ticket and worker state in their rows
  settle: Callable[[Carry], Carry]
  # (settled Carry, row of Messages) -> the ticket of that message
  ticket: Callable[[Carry, Messages], base.Ticket]
  # (settled Carry, root, row of Messages, batch, ticket) -> ComputedMessage
  work: Callable[..., ComputedMessage]
  # (settled Carry, row of Messages, job) -> (Carry, (Observation, code))
  receive: Callable[[Carry, Messages, ComputedMessage], tuple[Carry, Any]]


def _send(pure: steps_lib.PureSteps, carry: Carry) -> Carry:
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
  """Returns the parts of a program, with the arguments of `compile_chunk`."""

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


def blank_results(
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

  @functools.partial(hoisting.jit, donate_argnums=(0,))
  def sends(carry, count, slots, workers):
    def step(index, carry):
      slot, worker = slots[index], workers[index]
      return _send(pure, carry._replace(sent_slot=slot, sent_worker=worker))

    return jax.lax.fori_loop(0, count, step, carry)

  return sends


@functools.lru_cache(maxsize=32)
def compile_chunk(
  server: base.Server, worker: base.Worker, joins: bool
) -> ChunkPrograms:
  """Compiles the program of a server and its workers, once.

  Args:
    server: a server with updates that are not codes.
    worker: a worker; the batches of its jobs have one shape.
    joins: whether workers join; a join resets the worker's state.
  """
  pure = steps_lib.pure_steps(server, worker)
  parts = program_parts(server, worker, pure, joins)

  @functools.partial(hoisting.jit, donate_argnums=(0,))
  def messages(carry, root, count, rows, batches):
    results = blank_results(parts, carry, root, rows, batches)

    def step(index, loop_state):
      carry, results = loop_state
      row, batch = jax.tree.map(lambda x: x[index], (rows, batches))
      carry = parts.settle(carry)
      job = parts.work(carry, root, row, batch, parts.ticket(carry, row))
      carry, result = parts.receive(carry, row, job)
      results = jax.tree.map(lambda x, y: x.at[index].set(y), results, result)
      return carry, results

    carry, results = jax.lax.fori_loop(0, count, step, (carry, results))
    return carry, *results

  return ChunkPrograms(messages, compile_sends(pure), pure)


def make_chunk(server: base.Server, worker: base.Worker) -> Simulator:
  """Builds the chunk engine of a server and its workers.

  Args:
    server: a server with updates that are not codes.
    worker: a worker; the batches of its jobs have one shape.

  Returns:
    A Simulator. Its `follow` raises NotCompiled for a trace that only the host
    engine replays.
  """

  def follow(wrapped_worker, simulation, trace, *, batch, root):
    parts = server, wrapped_worker
    return ChunkRun(parts, simulation, trace, batch=batch, root=root)

  return make_simulator(server, worker, follow)


class ChunkRun:
  """A trace that is replayed in chunks; a TraceRun."""

  def __init__(
    self,
    parts: tuple[base.Server, base.Worker],
    simulation: SimulationState,
    trace: base.Trace,
    *,
    batch: Batches,
    root: jax.Array,
  ) -> None:
    """Continues a SimulationState; `parts` are server and worker."""
    server, worker = parts
    # [1] Check, and plan all messages of the trace.
    state = simulation.server.opt_state
    if reason := why_only_host(state, simulation.workers[:1], trace):
      raise NotCompiled(reason)
    self._plan = plan = plan_tickets(trace, shared=server.sends_current)
    self._trace, self._batch, self._root = trace, batch, root
    self._worker = np.asarray(trace.worker)[plan.row]  # by message
    self._job = np.asarray(trace.job)[plan.row]
    # [2] Compile.
    self._program = compile_chunk(*parts, bool(plan.is_first.any()))
    self._traffic = Traffic(self._program.pure, simulation.server)
    self._alone, self._workers = server.alone, len(simulation.workers)
    self._sends_at = np.array(sorted(plan.sends), np.int64)
    # [3] Continue at a row, between two messages.
    self._event = simulation.event
    self._received = int(np.searchsorted(plan.row, self._event))
    self._received_at_sends = self._received  # when tickets were sent last
    # [4] Send the tickets between this row and the next message. If the server
    # sends its parameters as they are, copy them into the slots; otherwise a
    # program computes the tickets.
    slots, workers = sends_from(plan, trace, self._event)
    copied_slots = slots
    if not server.sends_current:
      copied_slots = slots[:0]
    self._carry = _initial_carry(
      plan, trace, simulation, server.alone, copied_slots
    )
    if not len(copied_slots):
      self._send(slots, workers)

  @property
  def server(self) -> base.ServerState:
    """The server's state. Its parameters are a copy; the next call of `until`
    donates its other buffers."""
    state = self._carry.server
    return state._replace(params=jax.tree.map(jnp.copy, state.params))

  def until(self, end: int) -> base.Records:
    """Replays the rows up to, not including, row `end`."""
    start, stop = self._received, int(np.searchsorted(self._plan.row, end))
    self._event = end
    calls, results = [], []
    # A call returns at once, so the host prepares the next one meanwhile. Few
    # calls are in flight, as each holds its batches and records.
    while self._received < stop:
      self._send_between_messages()
      calls.append(self._call(stop))
      if len(calls) > _MAX_CALLS_AHEAD:
        results.append(self._fetch(*calls.pop(0)))
    results += [self._fetch(*call) for call in calls]
    return self._records(slice(start, stop), results)

  def pause(self) -> SimulationState:
    """Returns the simulation in new buffers."""
    # Write the tickets that were sent after the last message: a row is written
    # at the start of the next message, and there is none.
    self._send_between_messages()
    last_ticket = self._carry.sent_slot, self._carry.sent_worker
    self._send(*(np.asarray(x)[None] for x in last_ticket))
    carry, trace, starts = self._carry, self._trace, self._plan.starts
    slot_params, versions = fetch((carry.params, carry.version))
    states = fetch(rows_lib.settle(carry.workers))
    params = functools.cache(lambda slot: _row(slot_params, slot))

    def ticket(start):
      slot, earlier_jobs = starts.slot[start], starts.earlier_jobs[start]
      version = int(versions[slot]) + int(earlier_jobs) * self._alone
      worker = jnp.int32(trace.worker[starts.row[start]])
      arrays = worker, jnp.int32(version), params(int(slot))
      return base.Ticket(*arrays, np.bool_(earlier_jobs == 0))

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

  def _send_between_messages(self) -> None:
    """Sends the tickets between two messages that the loop cannot send."""
    sends = self._plan.sends.get(self._received)
    if sends is not None and self._received_at_sends < self._received:
      self._send(*sends)
      self._received_at_sends = self._received

  def _send(self, slots: np.ndarray, workers: np.ndarray) -> None:
    """Sends tickets into `slots`, by a compiled program."""
    count = len(slots)
    if not count:
      return
    # Few programs for all counts.
    size = max(_MIN_SENDS, 1 << (count - 1).bit_length())
    rows = padded(slots, size), padded(workers, size)
    self._carry = self._program.sends(self._carry, np.int32(count), *rows)

  @functools.cached_property
  def _call_size(self) -> int:
    """The number of messages of a call."""
    # Measure the batch of the next job, as an iterator cannot return to an
    # earlier batch.
    worker, job = self._worker[self._received], self._job[self._received]
    batch = self._batch(int(worker), int(job))
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    if self._program.pure.codec is not None:
      size += self._traffic.dense_nbytes
    return max(1, min(_MAX_MESSAGES, _MAX_BYTES // max(size, 1)))

  def _limit(self, end: int, stop: int) -> int:
    """Returns the message before which a call must end, at most `end`."""
    # A call must end where several tickets are sent: only a program between two
    # calls sends them.
    begin = self._received
    next_send = np.searchsorted(self._sends_at, begin, "right")
    return min(stop, end, *self._sends_at[next_send:][:1].tolist())

  def _inputs(self, begin: int, end: int, count: int) -> tuple[Messages, Any]:
    """Returns Messages and batches of a call, padded to `count` rows."""
    call, plan = slice(begin, end), self._plan
    columns = self._worker, self._job, plan.slot, plan.earlier_jobs
    columns += plan.is_first, plan.sent_slot, plan.sent_worker
    rows = Messages(*(padded(x[call], count) for x in columns))
    batches = stacking.of_jobs(
      self._batch, self._worker[call].tolist(), self._job[call].tolist()
    )
    return rows, jax.tree.map(lambda x: padded(x, count), batches)

  def _call(self, stop: int) -> tuple[Any, ...]:
    """Starts the computation of the next messages, up to message `stop` at
    most; returns (count, Observations, codes)."""
    begin = self._received
    end = self._limit(begin + self._call_size, stop)
    count, inputs = end - begin, self._inputs(begin, end, self._call_size)
    self._carry, *results = self._program.messages(
      self._carry, self._root, np.int32(count), *inputs
    )
    self._received = end
    return count, *results

  def _fetch(self, count: int, observations: Any, codes: Any) -> tuple:
    """Fetches the results of a call; returns (integers, reals, bytes up,
    residual norms), each with `count` rows."""
    observations = jax.tree.map(lambda x: x[:count], fetch(observations))
    bytes_up, norms = self._traffic.dense_nbytes, 0.0
    if codes is not None:
      leaves, structure = jax.tree.flatten(fetch(codes))
      message_leaves = ([x[i, ...] for x in leaves] for i in range(count))
      unflatten = functools.partial(jax.tree.unflatten, structure)
      sizes = map(
        self._traffic.measure_message, map(unflatten, message_leaves)
      )
      bytes_up, norms = zip(*sizes, strict=True)
    return *observations, *(np.resize(x, count) for x in (bytes_up, norms))

  def _records(self, messages: slice, results: list[Any]) -> base.Records:
    """Returns the records of messages, from the results of `_fetch`."""
    if not results:
      return concatenate([])
    integers, reals, bytes_up, norms = map(
      np.concatenate, zip(*results, strict=True)
    )
    # A job on a kept ticket receives no bytes.
    is_new = self._plan.earlier_jobs[messages] == 0
    bytes_down = self._traffic.dense_nbytes * is_new
    time = np.asarray(self._trace.time)[self._plan.row[messages]]
    columns = time, self._worker[messages], self._job[messages]
    traffic = bytes_up, bytes_down, norms
    return of_columns(*columns, *traffic, integers=integers, reals=reals)


def _row(stored, index):
  """Returns a row of NumPy arrays, as arrays of JAX."""
  return jax.tree.map(lambda x: jnp.array(x[index]), stored)


def padded(column: Any, count: int) -> Any:
  """Returns a column with zeros at its end, so that it has `count` rows."""
  n_missing = count - len(column)
  if not n_missing:
    return column
  padding = np.zeros((n_missing, *column.shape[1:]), column.dtype)
  return np.concatenate([column, padding])


def _initial_carry(
  plan: TicketPlan, trace: base.Trace, simulation: SimulationState,
  alone: bool, copied_slots: np.ndarray,
) -> Carry:
  """Returns the carry of a simulation: its tickets and worker states as rows.
  The tickets in `copied_slots` have the present parameters of the server."""
  server, states = simulation.server, simulation.workers
  ticket_now = fetch((server.params, server.version))
  shape = (row_count(plan, server.params),)
  stored = jax.tree.map(
    lambda x: np.zeros(shape + x.shape, x.dtype), ticket_now
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
  # A row holds the version that was sent; the program adds the number of
  # earlier jobs on the ticket.
  for start, ticket in held_tickets:
    version = int(ticket.version) - alone * int(starts.earlier_jobs[start])
    leaves = map(jax.tree.leaves, (stored, (ticket.params, version)))
    for rows, value in zip(*leaves, strict=True):
      rows[starts.slot[start]] = value
  for rows, value in zip(
    *map(jax.tree.leaves, (stored, ticket_now)), strict=True
  ):
    rows[copied_slots] = value
  # The workers of a new simulation share one state object: repeat it on the
  # device.
  if all(state is states[0] for state in states):
    workers = rows_lib.make_rows(states[0], len(states))
  else:
    rows = stacking.stack([fetch(state) for state in states])
    workers = rows_lib.WorkerRows(rows, fetch(states[0]), np.int32(0))
  carry = Carry(server, *stored, np.int32(plan.slots), np.int32(0), workers)
  return jax.tree.map(jnp.array, carry)
