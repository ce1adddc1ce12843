"""The stepwise engine: obeys a trace, one compiled step at a time.

A Python loop calls the compiled functions of `asgd.simulator.steps` in the
order of the trace. JAX arrays are immutable, so a ticket is a reference to
parameters, not a copy: memory is (distinct versions in flight) x parameters,
and sending costs nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base
from asgd.orders import trace as trace_lib
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import concatenate, fetch, records
from asgd.simulator.steps import Steps, WorkerDevices

_CHUNK = 2000  # rows obeyed in one call


class Simulation(NamedTuple):
  """Everything there is at an event boundary; a checkpoint is this."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[dict[int, base.Ticket], ...]  # N, the open ones by seq
  kept: tuple[base.Ticket | None, ...]  # N, the last sent, if the trace keeps
  marks: dict[int, base.ServerState]  # by row, for rollbacks to come


class Host(NamedTuple):
  """The engine."""

  init: Callable[[Any, int], Simulation]  # (params, workers)
  run: Callable[..., tuple[Simulation, base.Records]]


def make_host(
  server: base.Server,
  worker: base.Worker,
  *,
  wire: str | None = None,
  group: WorkerDevices = WorkerDevices(),  # noqa: B008
) -> Host:
  """Builds the engine for a server and its workers.

  Args:
    server: from `make_server`; its functions are compiled here.
    worker: what every worker does; compiled once per Worker.
    wire: the dtype in which parameters and messages travel, as in
      `compile_steps`.
    group: the devices of each worker.

  Returns:
    A Host. `init(params, workers)` starts a simulation.
    `run(simulation, trace, end, *, batch, root)` obeys the rows up to, not
    including, row `end`, and returns the new simulation and the Records of the
    messages received. `batch` is (worker, job) -> NumPy arrays, `root` the key
    from which `worker.job_key` derives those of the work. It consumes the
    simulation it is given: buffers that no ticket may refer to are donated.
    It raises ValueError if the trace has a worker that the simulation has not,
    and TraceError for a row that cannot be obeyed.
  """
  steps = steps_lib.compile_steps(server, worker, wire=wire, group=group)

  def init(params, workers):
    if server.workers is not None and workers > server.workers:
      raise ValueError(
        f"the algorithm was built for {server.workers} workers, the simulation"
        f" has {workers}; build both with the same number"
      )
    state = steps_lib.start(server, params)
    states = tuple(worker.init(state.params) for _ in range(workers))
    tickets = tuple({} for _ in range(workers))
    return Simulation(0, state, states, tickets, (None,) * workers, {})

  def run(simulation, trace, end, *, batch, root):
    most = int(trace.worker[simulation.event : end].max(initial=-1))
    if most >= len(simulation.workers):
      raise ValueError(
        f"the trace has a worker {most}, the simulation only"
        f" {len(simulation.workers)} workers, counted from 0"
      )
    stretch = _Stretch(simulation, trace, steps, worker, group.devices > 1)
    return stretch.obey(trace, end, batch, root)

  return Host(init, run)


def run_whole(
  host: Host, params: Any, workers: int, trace: base.Trace, **data: Any
) -> tuple[Simulation, base.Records]:
  """Obeys a whole trace.

  Args:
    host: the engine.
    params: before the first message.
    workers: N.
    trace: the order.
    **data: `batch` and `root`, as for `Host.run`.

  Returns:
    The simulation after its last row, and the records of all messages.
  """
  simulation, parts = host.init(params, workers), []
  while simulation.event < len(trace.time):
    end = min(simulation.event + _CHUNK, len(trace.time))
    simulation, part = host.run(simulation, trace, end, **data)
    parts.append(part)
  return simulation, concatenate(parts)


class _Stretch:
  """One call of `run`: the state of a simulation between two of its rows."""

  def __init__(self, simulation, trace, steps: Steps, worker, divided):
    self._steps, self._worker, self._divided = steps, worker, divided
    self._numbers = [jnp.int32(w) for w in range(len(simulation.workers))]
    self._state = simulation.server
    self._workers = list(simulation.workers)
    self._marks = dict(simulation.marks)
    self._returns = set(trace.job[trace.action == base.ROLLBACK].tolist())
    keeps = bool((trace.action == base.KEEP).any())
    self._ledger = trace_lib.Ledger(self._send, keeps=keeps)
    self._ledger.rows = simulation.event
    for w, (tickets, kept) in enumerate(
      zip(simulation.tickets, simulation.kept, strict=True)
    ):
      self._ledger.open[w] = dict(tickets)
      if kept is not None:
        self._ledger.latest[w] = kept

  def _send(self, event, kept):
    if kept is not None:
      return kept._replace(fresh=np.False_)
    return self._steps.send(self._state, self._numbers[event.worker])

  def obey(self, trace, end, batch, root):
    """Obeys the rows up to `end`; returns (Simulation, Records)."""
    ledger, messages, observations = self._ledger, [], []
    for event in trace_lib.events(trace, ledger.rows, end):
      if ledger.rows in self._returns:
        self._marks[ledger.rows] = jax.tree.map(jnp.copy, self._state)
      ticket = ledger.obey(event)
      if event.action == base.RECEIVE:
        observations.append(self._receive(event, ticket, batch, root))
        messages.append((event.time, event.worker, event.job))
      elif event.action == base.JOIN:
        self._workers[event.worker] = self._worker.init(self._state.params)
      elif event.action == base.ROLLBACK:
        self._state = jax.tree.map(jnp.copy, self._marks[event.job])
    places = range(len(self._workers))
    simulation = Simulation(
      ledger.rows,
      self._state,
      tuple(self._workers),
      tuple(ledger.open[w] for w in places),
      tuple(ledger.latest.get(w) for w in places),
      self._marks,
    )
    return simulation, records(messages, observations)

  def _receive(self, event, ticket, batch, root):
    w, job = event.worker, event.job
    self._workers[w], message, metrics = self._steps.work(
      self._workers[w], ticket, batch(w, job), root, np.int32(job)
    )
    loss = metrics.loss
    if self._divided:
      message, loss = fetch((message, loss))
    self._state, observation = self._steps.receive(
      self._state, ticket, message, loss
    )
    return observation
