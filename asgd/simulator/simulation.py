"""A simulation between two rows of a trace, and what all engines share.

An engine replays a trace. The host engine (`stepwise`) calls one compiled
function after the other, the chunk engine (`chunk`) replays many messages in
one program. All engines start from a SimulationState, and return one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asgd import base, own_writes
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import concatenate
from asgd.simulator.traffic import NOTHING_SENT, Sent

_ROWS_PER_CALL = 2000  # rows that `run_whole` replays in one call


class SimulationState(NamedTuple):
  """A simulation between two rows of its trace. A checkpoint stores it."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[dict[int, base.Ticket], ...]  # N, open tickets by seq
  # N, the ticket of each worker's latest job, if the trace has KEEP rows
  kept: tuple[base.Ticket | None, ...]
  marks: dict[int, base.ServerState]  # row -> state before it, for rollbacks
  sent: Sent = NOTHING_SENT  # counted if the server's updates are codes


class TraceRun(Protocol):
  """A trace that is being replayed."""

  @property
  def server(self) -> base.ServerState:
    """The server's state, which is valid up to the next call of `until`."""

  def until(self, end: int) -> base.Records:
    """Replays the rows up to, not including, row `end`; returns the records of
    the messages received. Raises TraceError for a row that cannot follow the
    rows before it."""

  def pause(self) -> SimulationState:
    """Returns the simulation between two rows. The state is valid up to the
    next call of `until`."""


# (worker, simulation, trace, *, batch, root) -> TraceRun
Follow = Callable[..., TraceRun]


class Simulator(NamedTuple):
  """An engine for a server and its workers.

  `init(params, workers)` starts a simulation of N workers.

  `follow(simulation, trace, *, batch, root)` returns a TraceRun. `batch` is
  (worker, job) -> new NumPy arrays, `root` the key of the run. `follow`
  consumes the simulation and may donate its buffers. If jobs share a ticket, it
  wraps the workers by `own_writes`; it raises ValueError if that is impossible.

  `run(simulation, trace, end, **data)` replays up to a row and returns
  (simulation, Records).
  """

  init: Callable[[Any, int], SimulationState]
  follow: Callable[..., TraceRun]

  def run(
    self, simulation: SimulationState, trace: base.Trace, end: int, **data: Any
  ) -> tuple[SimulationState, base.Records]:
    """Replays the rows up to, not including, row `end`; see the class."""
    run = self.follow(simulation, trace, **data)
    records = run.until(end)
    return run.pause(), records


def initial(
  server: base.Server, worker: base.Worker, params: Any, workers: int
) -> SimulationState:
  """Returns a simulation of N `workers` before the first row."""
  if server.workers is not None and workers > server.workers:
    raise ValueError(
      f"the algorithm was built for {server.workers} workers, the simulation"
      f" has {workers}; build both with the same number"
    )
  state = steps_lib.start(server, params)
  # `Worker.init` reads shapes only: all workers have the same first state.
  states = (worker.init(state.params),) * workers
  tickets = tuple({} for _ in range(workers))
  return SimulationState(0, state, states, tickets, (None,) * workers, {})


def make_simulator(
  server: base.Server, worker: base.Worker, follow: Follow
) -> Simulator:
  """Builds an engine from its function `follow`."""

  def init(params, workers):
    return initial(server, worker, params, workers)

  def follow_trace(simulation, trace, *, batch, root):
    last_worker = int(trace.worker.max(initial=-1))
    if last_worker >= len(simulation.workers):
      raise ValueError(
        f"the trace has a worker {last_worker}, the simulation only"
        f" {len(simulation.workers)} workers, counted from 0"
      )
    wrapped_worker = worker
    if replay_options(trace)["keeps"]:
      wrapped_worker = own_writes.own_writes(worker, server)
    if wrapped_worker is not worker:
      params = simulation.server.params
      wrap_state = functools.partial(
        own_writes.wrap_state, wrapped_worker, params=params
      )
      states = tuple(map(wrap_state, simulation.workers))
      simulation = simulation._replace(workers=states)
    return follow(wrapped_worker, simulation, trace, batch=batch, root=root)

  return Simulator(init, follow_trace)


def run_whole(
  simulator: Simulator,
  params: Any,
  workers: int,
  trace: base.Trace,
  **data: Any,
) -> tuple[SimulationState, base.Records]:
  """Replays a whole trace of N `workers`; `data` are `batch` and `root`."""
  run = simulator.follow(simulator.init(params, workers), trace, **data)
  n_rows = len(trace.time)
  ends = [*range(_ROWS_PER_CALL, n_rows, _ROWS_PER_CALL), n_rows]
  records = concatenate([run.until(end) for end in ends])
  return run.pause(), records


def replay_options(trace: base.Trace) -> dict[str, Any]:
  """Returns the options of a `ServerReplay` for a trace: `keeps`, whether jobs
  share tickets, and `rollback_rows`, to which the trace rolls back."""
  return {
    "keeps": bool((trace.action == base.KEEP).any()),
    "rollback_rows": trace.job[trace.action == base.ROLLBACK].tolist(),
  }
