"""The rounds engine: gradients in flight together, in one vmap.

A round is a series of messages: all their tickets were sent before the first of
the messages is received. So no gradient of a round depends on another one. In a
bulk synchronous order these are the jobs of a round, in an asynchronous order
the jobs in flight. A compiled program computes the gradients of a round
together. Then it gives them to the server one after the other, with the program
parts of the chunk engine (`chunk`). If all jobs of a round have the same
ticket, as in a bulk synchronous order, the model multiplies one matrix with the
examples of all workers.

Index letters used in shape comments:
  U  messages of the trace
  C  messages of a call
  R  rounds of a call
  L  lanes: messages of a round, at most
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.simulator import chunk
from asgd.simulator import steps as steps_lib
from asgd.simulator.simulation import (
  SimulationState,
  Simulator,
  make_simulator,
)
from asgd.simulator.tickets import TicketPlan
from asgd.stacking import Batches
from asgd.transforms import rows as rows_lib

_MAX_LANES = 64
_MAX_BYTES = 2**26  # bytes of the messages of a round


class Spans(NamedTuple):
  """The rounds of a call, [R]. A run that was cut within a round recomputes the
  round and receives its remaining messages."""

  begin: Any  # int32, index of its first message in the call
  first: Any  # int32, lane of the first message that is received
  end: Any  # int32, lane after the last message that is received
  first_record: Any  # int32, index of the record of lane `first`


class RoundPlan(NamedTuple):
  """The rounds of a trace."""

  starts: npt.NDArray[np.int64]  # [R], the first message of each round
  lanes: int  # L
  shared: bool  # whether all jobs of a round have one ticket


def find_rounds(
  plan: TicketPlan,
  worker: npt.NDArray[np.int32],
  *,
  stateful: bool,
  max_lanes: int = _MAX_LANES,
) -> RoundPlan:
  """Divides the messages of a trace into rounds.

  Args:
    plan: the tickets of the trace.
    worker: int32[U], worker of each message.
    stateful: whether workers have a state. Then a job needs the state after the
      worker's previous job, so a worker has at most one message in a round.
    max_lanes: largest number of lanes.

  Example:
    A bulk synchronous order of four workers.

    >>> import numpy as np
    >>> from asgd import orders
    >>> from asgd.simulator import rounds, tickets
    >>> times = orders.durations.homogeneous()
    >>> trace = orders.bulk_synchronous(times, workers=4, messages=12)
    >>> plan = tickets.plan_tickets(trace, shared=True)
    >>> worker = trace.worker[plan.row]
    >>> result = rounds.find_rounds(plan, worker, stateful=False)
    >>> result.starts.tolist(), result.lanes, result.shared
    ([0, 4, 8], 4, True)
  """
  # The start that each row of the trace ends, or -1.
  start_ended_by = np.full(int(plan.row.max(initial=-1)) + 1, -1)
  ended_starts = np.flatnonzero(plan.starts.end < len(start_ended_by))
  start_ended_by[plan.starts.end[ended_starts]] = ended_starts
  # By message: how many messages are received before its ticket is sent.
  ticket_row = plan.starts.row[start_ended_by[plan.row]]
  ticket_position = np.searchsorted(plan.row, ticket_row)
  messages = ticket_position.tolist(), worker.tolist()

  def divide(max_size):
    starts, round_workers = [0], set()
    for i, (position, sender) in enumerate(zip(*messages, strict=True)):
      is_sent_later = position > starts[-1]  # after the round's first message
      is_full = i - starts[-1] >= max_size
      repeats = stateful and sender in round_workers
      if i and (is_sent_later or is_full or i in plan.sends or repeats):
        starts.append(i)
        round_workers.clear()
      round_workers.add(sender)
    return np.array(starts)

  def sizes(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.diff(starts, append=len(ticket_position))

  # Divide twice: parts of equal size of a long round waste fewer lanes than
  # full parts and a small last part.
  starts = divide(len(ticket_position))
  longest = max(1, int(sizes(starts).max()))
  n_parts = -(-longest // max_lanes)  # ceil(longest / max_lanes)
  lanes = -(-longest // n_parts)
  starts = divide(lanes)
  # The slot of the first message of each message's round.
  slots = np.repeat(plan.slot[starts], sizes(starts)) if len(worker) else []
  shared = bool((plan.slot == slots).all()) and not plan.earlier_jobs.any()
  return RoundPlan(starts, lanes, shared)


def _job_of(
  jobs: chunk.ComputedMessage, lane: jax.Array, *, shared: bool
) -> chunk.ComputedMessage:
  """Returns the job of one lane; `shared` tickets have one copy of parameters.
  """
  params = jobs.ticket.params
  without_params = jobs._replace(ticket=jobs.ticket._replace(params=()))
  job = jax.tree.map(lambda x: rows_lib.get_row(x, lane), without_params)
  if not shared:
    params = jax.tree.map(lambda x: rows_lib.get_row(x, lane), params)
  return job._replace(ticket=job.ticket._replace(params=params))


@functools.lru_cache(maxsize=32)
def compile_rounds(
  server: base.Server,
  worker: base.Worker,
  joins: bool = False,
  *,
  lanes: int,
  shared: bool,
) -> Callable[..., Any]:
  """Compiles the program of a server and its workers, once.

  Args:
    server, worker, joins: as in `chunk.compile_chunk`.
    lanes: L.
    shared: whether all jobs of a round have one ticket.

  Returns:
    (carry, root, count, Spans, Messages, batches) -> (carry, Observations,
    codes). Messages and batches have C + L rows.
  """
  pure = steps_lib.pure_steps(server, worker)
  parts = chunk.program_parts(server, worker, pure, joins)
  # Axes of vmap over lanes. A shared ticket has none: its parameters are read
  # once, and XLA multiplies one matrix with the examples of all lanes.
  row_axes = chunk.Messages(*(0 for _ in chunk.Messages._fields))
  ticket_axes = base.Ticket(0, 0, 0, 0)
  if shared:
    row_axes = row_axes._replace(slot=None)
    ticket_axes = ticket_axes._replace(params=None)
  read_tickets = jax.vmap(parts.ticket, (None, row_axes), ticket_axes)
  compute_jobs = jax.vmap(
    parts.work,
    (None, None, row_axes, 0, ticket_axes),
    chunk.ComputedMessage(ticket_axes, 0, 0, 0),
  )

  def work(carry, root, rows, batches):
    if shared:
      rows = rows._replace(slot=rows.slot[0])
    tickets = read_tickets(carry, rows)
    return compute_jobs(carry, root, rows, batches, tickets)

  def one_round(carry, results, root, span, rows, batches):
    # [1] Compute all gradients of the round, with the tickets of its start.
    carry = parts.settle(carry)
    jobs = work(carry, root, rows, batches)

    # [2] The server receives them one after the other.
    def step(lane, loop_state):
      carry, results = loop_state
      row = jax.tree.map(lambda x: rows_lib.get_row(x, lane), rows)
      carry = parts.settle(carry)
      job = _job_of(jobs, lane, shared=shared)
      carry, result = parts.receive(carry, row, job)
      record_index = span.first_record + lane - span.first
      put = functools.partial(rows_lib.put_row, index=record_index)
      return carry, jax.tree.map(put, results, result)

    return jax.lax.fori_loop(span.first, span.end, step, (carry, results))

  @functools.partial(jax.jit, donate_argnums=0)
  def rounds(carry, root, count, spans, rows, batches):
    results = chunk.blank_results(parts, carry, root, rows, batches)

    def step(index, loop_state):
      span = jax.tree.map(lambda x: rows_lib.get_row(x, index), spans)
      # Compute L lanes in each round. In a shorter round the server does not
      # receive the messages of the last lanes.
      round_inputs = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, span.begin, lanes),
        (rows, batches),
      )
      return one_round(*loop_state, root, span, *round_inputs)

    carry, results = jax.lax.fori_loop(0, count, step, (carry, results))
    return carry, *results

  return rounds


def abstract_call(
  server: base.Server,
  worker: base.Worker,
  params: base.Params,
  batch: base.Batch,
  *,
  workers: int,
  messages: int,
  lanes: int,
  shared: bool = True,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the program of the rounds engine, and its arguments as shapes, for
  a compilation ahead of time.

  Args:
    server, worker: as in `compile_rounds`.
    params: parameters, or their shapes.
    batch: the batch of any job, or its shapes.
    workers: N.
    messages: C.
    lanes: L.
    shared: whether all jobs of a round have one ticket, in one slot; if not,
      the ticket of each of the N workers has a slot.

  Returns:
    The jitted function, and arguments for its `lower`.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd.simulator import rounds
    >>> worker = asgd.gradient_worker(lambda w, batch: (w * batch).mean())
    >>> function, arguments = rounds.abstract_call(
    ...   asgd.asgd(0.1, workers=4).server(), worker, jnp.zeros(()),
    ...   jnp.zeros(3), workers=4, messages=8, lanes=4,
    ... )
    >>> function.lower(*arguments).out_info[1].reals.shape
    (12, 4)
  """
  function = compile_rounds(server, worker, lanes=lanes, shared=shared)
  number = jax.ShapeDtypeStruct((), np.int32)

  state = jax.eval_shape(server.init, params)
  worker_state = jax.eval_shape(worker.init, params)
  slots = 2 if shared else workers + 1
  states = rows_lib.WorkerRows(
    _with_rows(workers, worker_state), worker_state, number
  )
  carry = chunk.Carry(
    *(state, _with_rows(slots, state.params), _with_rows(slots, number)),
    *(number, number, states),
  )
  row = chunk.Messages(*(number for _ in chunk.Messages._fields))
  row = row._replace(is_first=jax.ShapeDtypeStruct((), np.bool_))
  root = jax.eval_shape(lambda: jax.random.key(0))
  spans = _with_rows(messages, Spans(*(number for _ in Spans._fields)))
  batch = jax.eval_shape(lambda x: x, batch)
  inputs = _with_rows(messages + lanes, (row, batch))
  return function, (carry, root, number, spans, *inputs)


def _with_rows(count, shapes):
  """Adds a leading axis of `count` to shapes."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), shapes
  )


def make_rounds(server: base.Server, worker: base.Worker) -> Simulator:
  """Builds the rounds engine of a server and its workers.

  In float64 its gradients agree with the gradients of the host engine to 1e-12.
  In float32 they differ in the last bits, as XLA adds up a product of several
  jobs in another order; parameters after some hundred messages agree to 1e-5.

  Args:
    server, worker: as in `make_chunk`.

  Returns:
    A Simulator. Its `follow` raises NotCompiled, as in `make_chunk`.
  """

  def follow(wrapped_worker, simulation, trace, *, batch, root):
    parts = server, wrapped_worker
    return RoundsRun(parts, simulation, trace, batch=batch, root=root)

  return make_simulator(server, worker, follow)


class RoundsRun(chunk.ChunkRun):
  """A trace that is replayed in rounds; a TraceRun."""

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
    super().__init__(parts, simulation, trace, batch=batch, root=root)
    params_nbytes = sum(
      x.nbytes for x in jax.tree.leaves(simulation.server.params)
    )
    max_lanes = min(
      _MAX_LANES, self._call_size, _MAX_BYTES // max(params_nbytes, 1)
    )
    stateful = bool(jax.tree.leaves(simulation.workers[:1]))
    self._rounds = find_rounds(
      self._plan, self._worker, stateful=stateful, max_lanes=max(max_lanes, 1)
    )
    self._rounds_program = compile_rounds(
      *parts,
      bool(self._plan.is_first.any()),
      lanes=self._rounds.lanes,
      shared=self._rounds.shared,
    )

  def _call(self, stop: int) -> tuple[Any, ...]:
    """Starts the computation of the next messages, as in a ChunkRun. The call
    ends after a complete round if `stop` and the size of a call allow that."""
    # [1] The messages of the call, from the start of the present round.
    begin, starts = self._received, self._rounds.starts
    round_begin = int(starts[np.searchsorted(starts, begin, "right") - 1])
    end = self._limit(round_begin + self._call_size, stop)
    last_boundary = int(starts[np.searchsorted(starts, end, "right") - 1])
    if end == round_begin + self._call_size and last_boundary > begin:
      end = last_boundary
    # [2] The rounds of the call. The server may have received the first
    # messages of the first round already.
    call_rounds = starts[(starts >= round_begin) & (starts < end)]
    round_ends = np.minimum(np.append(call_rounds[1:], end), end)
    first_lanes = np.maximum(begin - call_rounds, 0)
    record_starts = np.maximum(call_rounds - begin, 0)
    columns = (
      *(call_rounds - round_begin, first_lanes),
      *(round_ends - call_rounds, record_starts),
    )
    spans = Spans(
      *(chunk.padded(x.astype(np.int32), self._call_size) for x in columns)
    )
    inputs = self._inputs(
      round_begin, end, self._call_size + self._rounds.lanes
    )
    self._carry, *results = self._rounds_program(
      self._carry, self._root, np.int32(len(call_rounds)), spans, *inputs
    )
    self._received = end
    return end - begin, *results
