"""The stepwise engine: replays a trace, one compiled step at a time.

A Python loop calls the compiled functions of `asgd.simulator.steps` in the
order of the trace. JAX arrays are immutable, so a ticket is a reference to
parameters, not a copy: memory is (distinct versions in flight) x parameters,
and sending costs nothing.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, own_writes
from asgd.orders import trace as trace_lib
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import concatenate, fetch, records
from asgd.simulator.steps import Steps
from asgd.simulator.traffic import NOTHING_SENT, ReceivedMessage, Sent, Traffic

_CHUNK = 2000  # rows obeyed in one call


class SimulationState(NamedTuple):
  """Everything there is at an event boundary; a checkpoint is this."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[dict[int, base.Ticket], ...]  # N, the open ones by seq
  kept: tuple[base.Ticket | None, ...]  # N, the last sent, if the trace keeps
  marks: dict[int, base.ServerState]  # by row, for rollbacks to come
  sent: Sent = NOTHING_SENT  # if updates are codes


class StepwiseEngine(NamedTuple):
  """The engine."""

  init: Callable[[Any, int], SimulationState]  # (params, workers)
  run: Callable[..., tuple[SimulationState, base.Records]]
  begin: Callable[..., "StepwiseRun"]  # as `run`, but row by row


def make_host(
  server: base.Server,
  worker: base.Worker,
  *,
  group: steps_lib.WorkerDevices = steps_lib.ALONE,
  **options: Any,
) -> StepwiseEngine:
  """Builds the engine for a server and its workers; arguments and options are
  those of `compile_steps`.

  `init(params, workers)` starts a simulation. `run(simulation, trace, end, *,
  batch, root)` replays the rows up to, not including, row `end`, and returns
  the new simulation and the Records of the received messages. `batch` is
  (worker, job) -> NumPy arrays, `root` the key of the run. It consumes the
  simulation: buffers without a ticket are donated. It raises TraceError for a
  row that cannot be replayed. Where jobs share a ticket, the workers are those
  of `own_writes`; ValueError is raised if they cannot be. `begin(simulation, *,
  batch, root)` starts a StepwiseRun, for an order that is made while it is
  replayed.
  """
  steps = steps_lib.compile_steps(server, worker, group=group, **options)

  def init(params, workers):
    if server.workers is not None and workers > server.workers:
      raise ValueError(
        f"the algorithm was built for {server.workers} workers, the simulation"
        f" has {workers}; build both with the same number"
      )
    state = steps_lib.start(server, params)
    states = tuple(worker.init(state.params) for _ in range(workers))
    tickets = tuple({} for _ in range(workers))
    return SimulationState(0, state, states, tickets, (None,) * workers, {})

  begin = functools.partial(StepwiseRun, (worker, steps, group))

  def run(simulation, trace, end, *, batch, root):
    most = int(trace.worker[simulation.event : end].max(initial=-1))
    if most >= len(simulation.workers):
      raise ValueError(
        f"the trace has a worker {most}, the simulation only"
        f" {len(simulation.workers)} workers, counted from 0"
      )
    needs = needs_of(trace)
    own = own_writes.own_writes(worker, server) if needs["keeps"] else worker
    if own is not worker:
      host = make_host(server, own, group=group, **options)
      params = simulation.server.params
      states = [
        own_writes.adopted(own, state, params) for state in simulation.workers
      ]
      simulation = simulation._replace(workers=tuple(states))
      return host.run(simulation, trace, end, batch=batch, root=root)
    going = begin(simulation, batch=batch, root=root, **needs)
    for event in trace_lib.events(trace, simulation.event, end):
      going.obey(event)
    return going.pause()

  return StepwiseEngine(init, run, begin)


class StepwiseRun:
  """A simulation that replays rows one by one, as they are made.

  A message may be asked for before its RECEIVE row: an order over a network
  depends on its bytes.
  """

  def __init__(
    self, parts, simulation, *, batch, root, keeps=True, returns=()
  ):
    """Continues a SimulationState, which is consumed; `parts` are worker, steps
    and group, `keeps` and `returns` as of `needs_of`."""
    self._worker, self._steps, self._group = parts
    self._batch, self._root = batch, root
    self._states = list(simulation.workers)
    numbers = [jnp.int32(w) for w in range(len(self._states))]
    self._replay = replay = ServerReplay(
      *(simulation.server, self._steps, numbers),
      sent=simulation.sent,
      keeps=keeps,
      returns=returns,
    )
    replay.marks |= simulation.marks
    ledger = replay.ledger
    ledger.rows = simulation.event
    ledger.open.update(enumerate(map(dict, simulation.tickets)))
    ledger.latest |= {w: t for w, t in enumerate(simulation.kept) if t}
    # Messages before their RECEIVE rows, in the order of each worker's jobs:
    # seq -> (state of the worker after it, message, loss)
    self._ahead: list[dict[int, Any]] = [{} for _ in self._states]
    self._told = 0  # messages whose records were given out

  def obey(self, event: trace_lib.Event) -> None:
    """Replays the next row; raises TraceError if it has no meaning."""
    replay = self._replay
    ticket, w = replay.obey(event), event.worker
    if event.action == base.JOIN:
      self._states[w] = self._worker.init(replay.state.params)
    elif event.action in (base.RECEIVE, base.DROP):
      done = self._ahead[w].pop(event.seq, None)
      done = done or self._work(w, self._states[w], ticket, event.job)
      self._states[w], message, loss = done
      if event.action == base.RECEIVE:
        replay.receive(event, (ticket, message, loss))
      # Else the worker has done it, and nobody takes it.

  def _work(self, worker, state, ticket, job):
    state, message, metrics = self._steps.work(
      state, ticket, self._batch(worker, job), self._root, np.int32(job)
    )
    loss = metrics.loss
    if self._group.devices > 1:
      message, loss = fetch((message, loss))
    return state, message, loss

  def bytes_up(self, worker: int, seq: int, job: int) -> int:
    """Returns the bytes of a message whose ticket is open, and keeps it until
    it is received; those before it of its worker have been asked for."""
    replay, ahead = self._replay, self._ahead[worker]
    state = self._states[worker]
    if ahead:
      state = next(reversed(ahead.values()))[0]
    ticket = replay.ledger.open[worker][seq]
    state, message, loss = self._work(worker, state, ticket, job)
    if self._steps.codec is not None:
      message = fetch(message)  # to be packed
    ahead[seq] = state, message, loss
    return replay.traffic.up(message)[0]

  def bytes_down(self, worker: int, seq: int) -> int:
    """Returns the bytes of a ticket that was sent, and is open."""
    return self._replay.traffic.sent_bytes(worker, seq)

  def pause(self) -> tuple[SimulationState, base.Records]:
    """Returns the simulation, and the records since the last pause. Messages
    that were asked for ahead are computed again by another run."""
    replay, workers = self._replay, range(len(self._states))
    after = SimulationState(
      replay.ledger.rows,
      replay.state,
      tuple(self._states),
      tuple(replay.ledger.open[w] for w in workers),
      tuple(replay.ledger.latest.get(w) for w in workers),
      replay.marks,
      replay.traffic.sent,
    )
    records = replay.records(self._told)
    self._told += len(records.loss)
    return after, records


def run_whole(
  host: StepwiseEngine,
  params: Any,
  workers: int,
  trace: base.Trace,
  **data: Any,
) -> tuple[SimulationState, base.Records]:
  """Replays a whole trace of N `workers`; `data` are `batch` and `root`."""
  simulation, parts = host.init(params, workers), []
  while simulation.event < len(trace.time):
    end = min(simulation.event + _CHUNK, len(trace.time))
    simulation, part = host.run(simulation, trace, end, **data)
    parts.append(part)
  return simulation, concatenate(parts)


def needs_of(trace: base.Trace) -> dict[str, Any]:
  """Returns what the rows of a trace need: `keeps` if jobs share tickets, and
  the rows to which it `returns`."""
  return {
    "keeps": bool((trace.action == base.KEEP).any()),
    "returns": trace.job[trace.action == base.ROLLBACK].tolist(),
  }


class ServerReplay:
  """A server that replays the rows of a trace."""

  def __init__(
    self,
    state,
    steps: Steps,
    numbers,
    *,
    sent=NOTHING_SENT,
    keeps: bool = True,
    returns: Iterable[int] = (),
  ):
    """Starts with a ServerState; `numbers` are the workers', on the device,
    `sent` is as of `Traffic`, `keeps` and `returns` as of `needs_of`."""
    self.state, self._steps, self._numbers = state, steps, numbers
    self._returns = set(returns)
    self.marks: dict[int, base.ServerState] = {}  # by row, for rollbacks
    self.ledger = trace_lib.Ledger(self._send, keeps=keeps)
    self.traffic = Traffic(steps, state, sent)
    self._messages: list[ReceivedMessage] = []
    self._observations: list[steps_lib.Observation] = []

  def _send(self, event, kept):
    if kept is not None:
      return self._steps.keep(kept)
    self.traffic.send(event.worker, event.seq)
    return self._steps.send(self.state, self._numbers[event.worker])

  def obey(self, event: trace_lib.Event) -> base.Ticket | None:
    """Replays the next row; returns the ticket that it opens or closes."""
    if self.ledger.rows in self._returns:
      self.marks[self.ledger.rows] = jax.tree.map(jnp.copy, self.state)
    ticket = self.ledger.obey(event)
    if event.action == base.JOIN:
      self.traffic.join(event.worker)
    if event.action in (base.LOST, base.REJECT):
      self.traffic.lose(*event.key)
    if event.action == base.ROLLBACK:
      self.state = jax.tree.map(jnp.copy, self.marks[event.job])
      self.traffic.roll_back(self.state)
    return ticket

  def receive(self, event: trace_lib.Event, message, totals=None) -> None:
    """Gives the server the (ticket, updates, loss) of a RECEIVE just obeyed."""
    ticket, updates, loss = message
    if self._steps.codec is not None:
      updates = fetch(updates)  # to be packed
    up, residual_norm = self.traffic.up(updates)
    message = ticket, updates, loss
    if totals is None:
      self.state, observation = self._steps.receive(self.state, *message)
    else:
      sums = steps_lib.as_totals(totals)
      done = self._steps.stage(sums, self.state, *message)
      self.state, observation = done.result
    self.traffic.update(self.state)
    name = event.time, event.worker, event.job
    down = self.traffic.end(*event.key, ticket)
    self._messages.append(ReceivedMessage(*name, up, down, residual_norm))
    self._observations.append(observation)

  def records(self, start: int = 0) -> base.Records:
    """Returns the records of the messages received, from one on."""
    return records(self._messages[start:], self._observations[start:])
