"""The chunk engine: many messages of a trace in one compiled program.

A small model's step takes less time than the four calls by which the host
engine makes it. Here one program has a loop over messages: it reads the ticket
of each, does the worker's job, gives the server the message, and keeps the
ticket that is sent next. Tickets are rows of one buffer (`tickets`), and so are
the states of workers; each is written at the start of the next message, as XLA
copies a buffer that is read and then written in one step of a loop.

The loop counts to a number that is given to it, so a message is computed by the
same instructions wherever a run is cut: a resumed run has the same bits.
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
from asgd.simulator.tickets import NotCompiled, plan_tickets
from asgd.simulator.traffic import Traffic
from asgd.stacking import Batches
from asgd.transforms import rows as rows_lib

_MOST = 256  # messages of a call
_MOST_BYTES = 2**25  # of the batches and the codes of a call
_AHEAD = 2  # calls whose records have not been fetched


class Carry(NamedTuple):
  """The state between two messages."""

  server: base.ServerState
  params: base.Params  # of tickets, S + 1 rows
  version: jax.Array  # int32[S + 1], of tickets
  put: jax.Array  # int32[], the row of the ticket that is sent now
  to: jax.Array  # int32[], the worker of that ticket
  workers: rows_lib.WorkerRows  # N states


class Messages(NamedTuple):
  """Inputs of the program for the messages of a call, [C]."""

  worker: Any  # int32
  job: Any  # int32
  slot: Any  # int32, the row of its ticket
  kept: Any  # int32, jobs before it on the same ticket
  first: Any  # bool, the first of a worker that joined
  put: Any  # int32, the row of the ticket that is sent after it
  to: Any  # int32, the worker of that ticket


class ChunkPrograms(NamedTuple):
  """The compiled functions of the engine."""

  # (carry, root, count, Messages, batches) -> (carry, Observations, codes)
  messages: Callable[..., tuple[Carry, Any, Any]]
  sends: Callable[..., Carry]  # (carry, count, slots, workers)
  pure: steps_lib.PureSteps


class ComputedMessage(NamedTuple):
  """A computed message with its ticket, worker state and loss."""

  ticket: base.Ticket
  state: Any  # of the worker after it
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
  """Returns the carry with the latest ticket in its row."""
  ticket = pure.send(carry.server, carry.to)
  params, version = jax.tree.map(
    lambda rows, x: rows_lib.put_row(rows, x, carry.put),
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
  """Returns the parts of programs; arguments are as of `compile_chunk`."""

  def settle(carry):
    carry = _send(pure, carry)
    stored = rows_lib.settle(carry.workers)
    return carry._replace(workers=carry.workers._replace(stored=stored))

  def ticket(carry, row):
    params, version = jax.tree.map(
      lambda rows: rows_lib.get_row(rows, row.slot),
      (carry.params, carry.version),
    )
    if server.alone:
      version += row.kept
    return base.Ticket(row.worker, version, params, row.kept == 0)

  def work(carry, root, row, batch, ticket):
    state = jax.tree.map(
      lambda rows: rows_lib.get_row(rows, row.worker), carry.workers.stored
    )
    if joins:
      new = worker.init(ticket.params)
      state = jax.tree.map(lambda x, y: jnp.where(row.first, x, y), new, state)
    state, message, metrics = pure.work(state, ticket, batch, root, row.job)
    return ComputedMessage(ticket, state, message, metrics.loss)

  def receive(carry, row, job):
    workers = rows_lib.write(carry.workers, row.worker, job.state)
    after, observation = pure.receive(
      carry.server, job.ticket, job.message, job.loss
    )
    code = None if pure.codec is None else job.message
    carry = carry._replace(server=after, put=row.put, to=row.to)
    return carry._replace(workers=workers), (observation, code)

  return ProgramParts(settle, ticket, work, receive)


def outputs(
  parts: ProgramParts, carry: Carry, root: jax.Array, rows: Any, batches: Any
) -> Any:
  """Returns zeros, [C, ...], for the (Observation, code) of each message."""

  def one(carry, root, row, batch):
    job = parts.work(carry, root, row, batch, parts.ticket(carry, row))
    return parts.receive(carry, row, job)[1]

  first = jax.tree.map(lambda x: x[0], (rows, batches))
  shapes = jax.eval_shape(one, carry, root, *first)
  return jax.tree.map(
    lambda x: jnp.zeros((len(rows.job), *x.shape), x.dtype), shapes
  )


def compile_sends(pure: steps_lib.PureSteps) -> Callable[..., Carry]:
  """Compiles (carry, count, slots, workers) -> carry, which sends tickets."""

  @functools.partial(jax.jit, donate_argnums=0)
  def sends(carry, count, slots, workers):
    def step(index, carry):
      return _send(pure, carry._replace(put=slots[index], to=workers[index]))

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
    wire: as of `compile_steps`.
    joins: whether workers join; a join resets the worker's state.
  """
  pure = steps_lib.pure_steps(server, worker, wire)
  parts = program_parts(server, worker, pure, joins)

  @functools.partial(jax.jit, donate_argnums=0)
  def messages(carry, root, count, rows, batches):
    out = outputs(parts, carry, root, rows, batches)

    def step(index, both):
      carry, out = both
      row, batch = jax.tree.map(lambda x: x[index], (rows, batches))
      carry = parts.settle(carry)
      job = parts.work(carry, root, row, batch, parts.ticket(carry, row))
      carry, made = parts.receive(carry, row, job)
      out = jax.tree.map(lambda x, y: x.at[index].set(y), out, made)
      return carry, out

    carry, out = jax.lax.fori_loop(0, count, step, (carry, out))
    return carry, *out

  return ChunkPrograms(messages, compile_sends(pure), pure)


def make_chunk(
  server: base.Server, worker: base.Worker, *, wire: str | None = None
) -> Simulator:
  """Builds the chunk engine of a server and its workers.

  Args:
    server: whose updates are not codes.
    worker: whose jobs have batches of one shape.
    wire: as of `compile_steps`.

  Returns:
    A Simulator. Its `follow` raises NotCompiled for a trace that the host
    engine alone replays.
  """

  def follow(own, simulation, trace, *, batch, root):
    parts = server, own, wire
    return ChunkRun(parts, simulation, trace, batch=batch, root=root)

  return make_simulator(server, worker, follow)


def obstacle(opt_state: Any, worker_state: Any, trace: base.Trace) -> str:
  """Returns why only the host engine can replay a trace; "" if others can.

  Args:
    opt_state: of the server, or its shapes.
    worker_state: of a worker, or its shapes.
    trace: that is replayed.
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
    state = simulation.server.opt_state
    if why := obstacle(state, simulation.workers[:1], trace):
      raise NotCompiled(why)
    self._plan = plan = plan_tickets(trace, shared=server.sends_current)
    self._trace, self._batch, self._root = trace, batch, root
    self._worker = np.asarray(trace.worker)[plan.row]
    self._job = np.asarray(trace.job)[plan.row]
    self._program = compile_chunk(*parts, bool(plan.first.any()))
    self._traffic = Traffic(self._program.pure, simulation.server)
    self._alone, self._workers = server.alone, len(simulation.workers)
    self._stops = np.array(sorted(plan.sends), np.int64)
    self._event = simulation.event
    # Messages received, and those before the latest of `plan.sends`.
    self._done = self._sent = int(np.searchsorted(plan.row, self._event))
    slots, workers = _sends_from(plan, trace, self._event)
    current = slots
    if not server.sends_current or parts[2] is not None:
      current = slots[:0]  # a program computes what is sent
    self._carry = _stacked(plan, trace, simulation, server.alone, current)
    if not len(current):
      self._send(slots, workers)

  @property
  def server(self) -> base.ServerState:
    """The server's state; parameters are a copy, the rest is given up by the
    next call of `until`."""
    state = self._carry.server
    return state._replace(params=jax.tree.map(jnp.copy, state.params))

  def until(self, end: int) -> base.Records:
    """Replays the rows up to, not including, row `end`."""
    start, stop = self._done, int(np.searchsorted(self._plan.row, end))
    self._event = end
    waiting, parts = [], []
    while self._done < stop:
      self._send_between()
      waiting.append(self._call(stop))
      if len(waiting) > _AHEAD:
        parts.append(self._fetch(*waiting.pop(0)))
    parts += [self._fetch(*call) for call in waiting]
    return self._records(slice(start, stop), parts)

  def pause(self) -> SimulationState:
    """Returns the simulation in new buffers."""
    self._send_between()
    latest = self._carry.put, self._carry.to
    self._send(*(np.asarray(x)[None] for x in latest))
    carry, trace, starts = self._carry, self._trace, self._plan.starts
    stored, versions = fetch((carry.params, carry.version))
    states = fetch(rows_lib.settle(carry.workers))
    params = functools.cache(lambda slot: _row(stored, slot))

    def ticket(start):
      slot, jobs = int(starts.slot[start]), int(starts.kept[start])
      version = int(versions[slot]) + (jobs if self._alone else 0)
      numbers = jnp.int32(trace.worker[starts.row[start]]), jnp.int32(version)
      return base.Ticket(*numbers, params(slot), np.bool_(jobs == 0))

    workers = range(self._workers)
    tickets, kept = tuple({} for _ in workers), [None for _ in workers]
    opened, latest = _held(starts, trace, self._event)
    for (worker, seq), start in opened.items():
      tickets[worker][seq] = ticket(start)
    if starts.kept.any():
      for worker, start in latest.items():
        kept[worker] = ticket(start)
    return SimulationState(
      self._event,
      jax.tree.map(jnp.copy, carry.server),
      tuple(_row(states, worker) for worker in workers),
      tickets,
      tuple(kept),
      {},
    )

  def _send_between(self):
    """Sends the tickets between two messages, if there are several."""
    sends = self._plan.sends.get(self._done)
    if sends is not None and self._sent < self._done:
      self._send(*sends)
      self._sent = self._done

  def _send(self, slots, workers):
    count = len(slots)
    if not count:
      return
    size = 1 << (count - 1).bit_length()  # few programs for all counts
    rows = padded(slots, size), padded(workers, size)
    self._carry = self._program.sends(self._carry, np.int32(count), *rows)

  @functools.cached_property
  def _most(self):
    """Messages of a call."""
    # The next job: an iterator cannot go back to the first.
    first = self._done
    batch = self._batch(int(self._worker[first]), int(self._job[first]))
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    if self._program.pure.codec is not None:
      size += self._traffic.dense
    return max(1, min(_MOST, _MOST_BYTES // max(size, 1)))

  def _limit(self, end, stop):
    """Returns where a call ends that would end at message `end`."""
    begin = self._done
    following = self._stops[np.searchsorted(self._stops, begin, "right") :]
    return min(stop, end, *following[:1].tolist())

  def _inputs(self, begin, end, count):
    """Returns Messages and batches of some messages, with `count` rows."""
    some, plan = slice(begin, end), self._plan
    columns = self._worker, self._job, plan.slot, plan.kept
    columns += plan.first, plan.put, plan.to
    rows = Messages(*(padded(x[some], count) for x in columns))
    batches = stacking.of_jobs(
      self._batch, self._worker[some].tolist(), self._job[some].tolist()
    )
    return rows, jax.tree.map(lambda x: padded(x, count), batches)

  def _call(self, stop):
    """Starts to compute the next messages, not past `stop`; returns their count
    and what is computed."""
    begin = self._done
    end = self._limit(begin + self._most, stop)
    count, inputs = end - begin, self._inputs(begin, end, self._most)
    self._carry, *made = self._program.messages(
      self._carry, self._root, np.int32(count), *inputs
    )
    self._done = end
    return count, *made

  def _fetch(self, count, observations, codes):
    """Returns Observations [count], bytes up and norms of residuals."""
    observations = jax.tree.map(lambda x: x[:count], fetch(observations))
    up, norms = self._traffic.dense, 0.0
    if codes is not None:
      leaves, structure = jax.tree.flatten(fetch(codes))
      each = ([x[i, ...] for x in leaves] for i in range(count))
      messages = map(functools.partial(jax.tree.unflatten, structure), each)
      up, norms = zip(*map(self._traffic.up, messages), strict=True)
    return *observations, *(np.resize(x, count) for x in (up, norms))

  def _records(self, some, parts):
    """Returns the records of some messages, from what `_fetch` returned."""
    if not parts:
      return concatenate([])
    whole, real, up, norms = map(np.concatenate, zip(*parts, strict=True))
    down = np.where(self._plan.kept[some] == 0, self._traffic.dense, 0)
    time = np.asarray(self._trace.time)[self._plan.row[some]]
    of_trace = time, self._worker[some], self._job[some]
    return of_columns(*of_trace, up, down, norms, whole=whole, real=real)


def _row(stored, index):
  """A row of NumPy arrays, as arrays of JAX."""
  return jax.tree.map(lambda x: jnp.array(x[index]), stored)


def padded(column: Any, count: int) -> Any:
  """Returns a column with so many rows, zeros at its end."""
  missing = count - len(column)
  if not missing:
    return column
  rest = np.zeros((missing, *column.shape[1:]), column.dtype)
  return np.concatenate([column, rest])


def _held(starts, trace, event):
  """Returns the starts whose tickets are held at row `event`: the open ones by
  (worker, seq), and the latest one of each worker."""
  before = np.flatnonzero(starts.row < event)
  worker, seq = (np.asarray(x)[starts.row[before]] for x in trace[1:3])
  still = starts.end[before] >= event
  keys = zip(worker[still].tolist(), seq[still].tolist(), strict=True)
  opened = dict(zip(keys, before[still].tolist(), strict=True))
  return opened, dict(zip(worker.tolist(), before.tolist(), strict=True))


def _sends_from(plan, trace, event):
  """The slots and workers of tickets that are sent from row `event` on, before
  the next message."""
  message = np.searchsorted(plan.row, event)
  stop = plan.row[message] if message < len(plan.row) else len(trace.time)
  starts = plan.starts
  sent = (starts.row >= event) & (starts.row < stop) & (starts.kept == 0)
  slots, first = np.unique(starts.slot[sent], return_index=True)
  return slots, np.asarray(trace.worker)[starts.row[sent][first]]


def _stacked(plan, trace, simulation, alone, current):
  """Returns the carry of a simulation: its tickets and worker states as rows.
  The slots `current` hold tickets with the server's own parameters."""
  server, states = simulation.server, simulation.workers
  blank = fetch((server.params, server.version))
  stored = jax.tree.map(
    lambda x: np.zeros((plan.slots + 1, *x.shape), x.dtype), blank
  )
  starts = plan.starts
  opened, latest = _held(starts, trace, simulation.event)
  held = [(i, simulation.tickets[w][seq]) for (w, seq), i in opened.items()]
  held += [
    (start, simulation.kept[worker])
    for worker, start in latest.items()
    if simulation.kept[worker] is not None
  ]
  for start, ticket in held:
    version = int(ticket.version) - (int(starts.kept[start]) if alone else 0)
    sent = ticket.params, version
    for rows, value in zip(*map(jax.tree.leaves, (stored, sent)), strict=True):
      rows[starts.slot[start]] = value
  for rows, value in zip(*map(jax.tree.leaves, (stored, blank)), strict=True):
    rows[current] = value
  if all(state is states[0] for state in states):
    workers = rows_lib.make_rows(states[0], len(states))
  else:
    rows = stacking.stack([fetch(state) for state in states])
    workers = rows_lib.WorkerRows(rows, fetch(states[0]), np.int32(0))
  carry = Carry(server, *stored, np.int32(plan.slots), np.int32(0), workers)
  return jax.tree.map(jnp.array, carry)
