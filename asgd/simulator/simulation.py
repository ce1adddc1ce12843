"""A simulation between two rows of a trace, and what all engines share.

An engine replays a trace. The host engine (`stepwise`) calls one compiled
function after the other, the chunk engine (`chunk`) has many messages in one
program. They start from, and give back, the same SimulationState.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asgd import base, own_writes
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import concatenate
from asgd.simulator.traffic import NOTHING_SENT, Sent

_ROWS = 2000  # rows that are replayed in one call


class SimulationState(NamedTuple):
  """A simulation between two rows of its trace. A checkpoint stores it."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[dict[int, base.Ticket], ...]  # N, open tickets by seq
  # N, the ticket of each worker's latest job, if the trace has KEEP rows
  kept: tuple[base.Ticket | None, ...]
  marks: dict[int, base.ServerState]  # row -> state before it, for rollbacks
  sent: Sent = NOTHING_SENT  # sent bytes, if the server's updates are codes


class TraceRun(Protocol):
  """A trace that is being replayed."""

  @property
  def server(self) -> base.ServerState:
    """The server's state, up to the next call of `until`."""

  def until(self, end: int) -> base.Records:
    """Replays the rows up to, not including, row `end`; returns the records of
    the messages received. Raises TraceError for a row that cannot follow the
    rows before it."""

  def pause(self) -> SimulationState:
    """Returns the simulation as it is, up to the next call of `until`."""


# (worker, simulation, trace, *, batch, root) -> TraceRun
Follow = Callable[..., TraceRun]


class Simulator(NamedTuple):
  """An engine for a server and its workers.

  `init(params, workers)` starts a simulation of N workers. `follow(simulation,
  trace, *, batch, root)` returns a TraceRun; `batch` is (worker, job) -> new
  NumPy arrays, `root` the key of the run. It consumes the simulation and may
  donate its buffers. If jobs share a ticket, the workers are wrapped by
  `own_writes`; ValueError if that is impossible. `run(simulation, trace, end,
  **data)` replays up to a row and returns (simulation, Records).
  """

  init: Callable[[Any, int], SimulationState]
  follow: Callable[..., TraceRun]

  def run(
    self, simulation: SimulationState, trace: base.Trace, end: int, **data: Any
  ) -> tuple[SimulationState, base.Records]:
    """Replays up to, not including, row `end`; see the class."""
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
  # All workers start alike, as `Worker.init` reads shapes only.
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
    if needs_of(trace)["keeps"]:
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
  count = len(trace.time)
  ends = [*range(_ROWS, count, _ROWS), count]
  records = concatenate([run.until(end) for end in ends])
  return run.pause(), records


def needs_of(trace: base.Trace) -> dict[str, Any]:
  """Returns what the rows of a trace need: `keeps`, whether jobs share tickets,
  and `returns`, the rows to which it rolls back."""
  return {
    "keeps": bool((trace.action == base.KEEP).any()),
    "returns": trace.job[trace.action == base.ROLLBACK].tolist(),
  }
