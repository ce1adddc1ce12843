"""The host engine: obeys a trace, one compiled step at a time.

Three functions are compiled once each - a worker's work, the server's receive
and, for algorithms that look ahead, its send - and a Python loop calls them in
the order of the trace. They are the functions that a live runtime compiles, not
one fused step, so that a recorded run replays to the same bits. JAX arrays are
immutable, so a ticket is a reference to parameters, not a copy: memory is
(distinct versions in flight) x parameters, and sending costs nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base
from asgd import worker as worker_lib


class Simulation(NamedTuple):
  """Everything there is at an event boundary; a checkpoint is this."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[base.Ticket | None, ...]  # N, None where none is open


class Host(NamedTuple):
  """The engine."""

  init: Callable[[Any, int], Simulation]  # (params, workers)
  run: Callable[..., tuple[Simulation, base.Records]]


@functools.lru_cache(maxsize=32)
def _compiled_work(worker: base.Worker) -> Callable:
  """Compiles a worker once, however many servers it serves."""

  @jax.jit
  def work(state, ticket, batch, root, job):
    key = worker_lib.job_key(root, ticket.worker, job)
    return worker.work(state, ticket, batch, key)

  return work


def make_host(server: base.Server, worker: base.Worker) -> Host:
  """Builds the engine for a server and its workers.

  Args:
    server: from `make_server`; its functions are compiled here.
    worker: what every worker does; compiled once per Worker.

  Returns:
    A Host. `init(params, workers)` starts a simulation.
    `run(simulation, trace, end, *, batch, root)` obeys the rows up to, not
    including, row `end`, and returns the new simulation and the Records of the
    messages received. `batch` is (worker, job) -> NumPy arrays, `root` the key
    from which `worker.job_key` derives those of the work. It consumes the
    simulation it is given: buffers that nothing else may refer to are donated.
    It raises ValueError if the trace asks for a worker that is not there, or
    receives from one that holds no ticket.
  """
  work = _compiled_work(worker)

  def receive_parts(opt_state, inbox, message, params, version, ticket, loss):
    state = base.ServerState(params, opt_state, version, inbox)
    state, report = server.receive(state, ticket, message)
    return state, _pack(state.version, report, loss)

  # params and version are not donated: open tickets refer to them.
  receive = jax.jit(receive_parts, donate_argnums=(0, 1, 2))
  send = jax.jit(server.send)

  def init(params, workers):
    if server.workers is not None and workers > server.workers:
      raise ValueError(
        f"the algorithm was built for {server.workers} workers, the simulation"
        f" has {workers}; build both with the same number"
      )
    params = jax.tree.map(jnp.asarray, params)
    # Copied, because a state that holds the parameters would donate them.
    state = jax.tree.map(jnp.copy, server.init(params))
    states = tuple(worker.init(params) for _ in range(workers))
    return Simulation(0, state, states, (None,) * workers)

  def run(simulation, trace, end, *, batch, root):
    event, state, workers, tickets = simulation
    workers, tickets = list(workers), list(tickets)
    numbers = [jnp.int32(w) for w in range(len(workers))]
    rows = slice(event, end)
    columns = [column[rows].tolist() for column in trace]
    if columns[1] and max(columns[1]) >= len(workers):
      raise ValueError(
        f"the trace has a worker {max(columns[1])}, the simulation only"
        f" {len(workers)} workers, counted from 0"
      )
    known, seen = [], []
    for time, w, job, action in zip(*columns, strict=True):
      if action == base.SEND:
        if server.sends_current:
          tickets[w] = base.Ticket(numbers[w], state.version, state.params)
        else:
          tickets[w] = send(state, numbers[w])
        continue
      ticket, tickets[w] = tickets[w], None
      if ticket is None:
        raise ValueError(
          f"the trace receives job {job} from worker {w}, which holds no"
          " ticket; orders.check finds the row"
        )
      workers[w], message, metrics = work(
        workers[w], ticket, batch(w, job), root, np.int32(job)
      )
      state, row = receive(
        *(state.opt_state, state.inbox, message),
        *(state.params, state.version, ticket, metrics.loss),
      )
      known.append((time, w, job))
      seen.append(row)
    event += len(columns[0])
    simulation = Simulation(event, state, tuple(workers), tuple(tickets))
    return simulation, _records(known, seen)

  return Host(init, run)


def _pack(version, report, loss) -> tuple[jax.Array, jax.Array]:
  """One event's row as two arrays: a fetch costs as much for one number."""
  whole = jnp.stack([version, report.staleness, report.accepted])
  real = (report.gap, loss, report.message_norm, report.update_norm)
  return whole.astype(jnp.int32), jnp.stack(
    [x.astype(jnp.float32) for x in real]
  )


def _records(known: list[tuple], seen: list[tuple]) -> base.Records:
  """Fetches what was seen, once for all, into columns."""
  time, worker, job = zip(*known, strict=True) if known else ((),) * 3
  seen = jax.device_get(seen)
  whole = np.array([row for row, _ in seen], np.int32).reshape(-1, 3).T
  real = np.array([row for _, row in seen], np.float32).reshape(-1, 4).T
  version, staleness, accepted = whole
  gap, loss, message_norm, update_norm = real
  return base.Records(
    update=version,
    time=np.array(time, np.float64),
    worker=np.array(worker, np.int32),
    job=np.array(job, np.int32),
    staleness=staleness,
    gap=gap,
    loss=loss,
    accepted=accepted.astype(bool),
    message_norm=message_norm,
    update_norm=update_norm,
  )


def concatenate(parts: list[base.Records]) -> base.Records:
  """Joins records of consecutive stretches of a run."""
  if not parts:
    return _records([], [])
  return base.Records(*map(np.concatenate, zip(*parts, strict=True)))


def end_of_message(trace: base.Trace) -> np.ndarray:
  """Returns int[U]: the row after each RECEIVE, where a run can be cut.

  Args:
    trace: an order; see `asgd.orders`.
  """
  return np.flatnonzero(np.asarray(trace.action) == base.RECEIVE) + 1
