"""The host engine: replays a trace, one compiled step at a time.

A Python loop calls the compiled functions of `asgd.simulator.steps` in the
order of the trace. JAX arrays are immutable, so a ticket is a reference to
parameters, not a copy: a send costs nothing, and the memory is (distinct
versions in flight) x parameters.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base
from asgd.orders import trace as trace_lib
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import fetch, records
from asgd.simulator.simulation import (
  SimulationState,
  Simulator,
  make_simulator,
  replay_options,
)
from asgd.simulator.steps import Steps
from asgd.simulator.traffic import (
  NOTHING_SENT,
  ReceivedMessage,
  Sent,
  Traffic,
)
from asgd.stacking import Batches


def make_host(
  server: base.Server,
  worker: base.Worker,
  *,
  group: steps_lib.WorkerDevices = steps_lib.ALONE,
  **options: Any,
) -> Simulator:
  """Builds the host engine of a server and its workers, with the arguments and
  options of `compile_steps`."""

  def follow(wrapped_worker, simulation, trace, **data):
    begin_run = begin_host(server, wrapped_worker, group=group, **options)
    return begin_run(simulation, trace=trace, **data, **replay_options(trace))

  return make_simulator(server, worker, follow)


def begin_host(
  server: base.Server,
  worker: base.Worker,
  *,
  group: steps_lib.WorkerDevices = steps_lib.ALONE,
  **options: Any,
) -> Callable[..., "StepwiseRun"]:
  """Returns StepwiseRun with its first argument bound, for an order that is
  computed while it is replayed. The arguments are as in `make_host`."""
  steps = steps_lib.compile_steps(server, worker, group=group, **options)
  return functools.partial(StepwiseRun, (worker, steps, group))


class StepwiseRun:
  """A simulation that replays rows one by one.

  An order over a network depends on the bytes of its messages, so `bytes_up`
  computes a message before its RECEIVE row exists.
  """

  def __init__(
    self,
    parts: tuple[base.Worker, Steps, steps_lib.WorkerDevices],
    simulation: SimulationState,
    *,
    batch: Batches,
    root: jax.Array,
    trace: base.Trace | None = None,
    keeps: bool = True,
    rollback_rows: Iterable[int] = (),
  ) -> None:
    """Continues a SimulationState, and consumes it. `parts` are worker, steps
    and group, `trace` has the rows that `until` replays, `keeps` and
    `rollback_rows` are as in `replay_options`."""
    self._worker, self._steps, self._group = parts
    self._trace = trace
    self._batch, self._root = batch, root
    self._states = list(simulation.workers)
    worker_indices = steps_lib.worker_indices(len(self._states))
    self._replay = replay = ServerReplay(
      *(simulation.server, self._steps, worker_indices),
      sent=simulation.sent,
      keeps=keeps,
      rollback_rows=rollback_rows,
    )
    replay.marks |= simulation.marks
    ledger = replay.ledger
    ledger.rows = simulation.event
    ledger.open.update(enumerate(map(dict, simulation.tickets)))
    ledger.latest |= {w: t for w, t in enumerate(simulation.kept) if t}
    # For each worker, the messages that were computed before their RECEIVE
    # rows, in the order of its jobs: seq -> (worker state after the job,
    # message, loss)
    self._early_results: list[dict[int, Any]] = [{} for _ in self._states]
    self._n_returned = 0  # messages with records that were returned already

  def apply(self, event: trace_lib.Event) -> None:
    """Replays the next row. Raises TraceError if the row cannot follow the
    earlier rows."""
    replay = self._replay
    ticket, w = replay.apply(event), event.worker
    # Messages are computed as late as possible, at the rows that need them.
    if event.action == base.JOIN:
      self._states[w] = self._worker.init(replay.state.params)
    elif event.action in (base.RECEIVE, base.DROP):
      result = self._early_results[w].pop(event.seq, None)
      result = result or self._work(w, self._states[w], ticket, event.job)
      self._states[w], message, loss = result
      if event.action == base.RECEIVE:
        replay.receive(event, (ticket, message, loss))
      # A dropped message changes the worker's state only.

  def _work(
    self, worker: int, state: Any, ticket: Any, job: int
  ) -> tuple[Any, Any, Any]:
    """Does a job; returns (the worker's state after it, message, loss)."""
    state, message, metrics = self._steps.work(
      state, ticket, self._batch(worker, job), self._root, np.int32(job)
    )
    loss = metrics.loss
    if self._group.devices > 1:
      message, loss = fetch((message, loss))
    return state, message, loss

  def bytes_up(self, worker: int, seq: int, job: int) -> int:
    """Computes a message with an open ticket, stores it until its RECEIVE row,
    and returns its bytes. A caller calls this function for the messages of a
    worker in order."""
    replay, early_results = self._replay, self._early_results[worker]
    state = self._states[worker]
    # The job starts from the worker's state after its latest computed job.
    if early_results:
      state = next(reversed(early_results.values()))[0]
    ticket = replay.ledger.open[worker][seq]
    state, message, loss = self._work(worker, state, ticket, job)
    if self._steps.codec is not None:
      message = fetch(message)  # to be packed
    early_results[seq] = state, message, loss
    return replay.traffic.measure_message(message)[0]

  def bytes_down(self, worker: int, seq: int) -> int:
    """Returns the bytes of an open ticket."""
    return self._replay.traffic.sent_bytes(worker, seq)

  @property
  def server(self) -> base.ServerState:
    """The server's state."""
    return self._replay.state

  def until(self, end: int) -> base.Records:
    """Replays the rows of the trace up to, not including, row `end`."""
    start = self._replay.ledger.rows
    for event in trace_lib.events(self._trace, start, end):
      self.apply(event)
    return self.records()

  def records(self) -> base.Records:
    """Returns the records of the messages received since the last call."""
    records = self._replay.records(self._n_returned)
    self._n_returned += len(records.loss)
    return records

  def pause(self) -> SimulationState:
    """Returns the simulation. A run that continues it computes again the
    messages that `bytes_up` has computed and that were not received."""
    replay, workers = self._replay, range(len(self._states))
    return SimulationState(
      replay.ledger.rows,
      replay.state,
      tuple(self._states),
      tuple(replay.ledger.open[w] for w in workers),
      tuple(replay.ledger.latest.get(w) for w in workers),
      replay.marks,
      replay.traffic.sent,
    )


class ServerReplay:
  """The server's part of a trace, replayed row by row."""

  def __init__(
    self,
    state: base.ServerState,
    steps: Steps,
    worker_indices: Sequence[jax.Array],
    *,
    sent: Sent = NOTHING_SENT,
    keeps: bool = True,
    rollback_rows: Iterable[int] = (),
  ):
    """Starts with a ServerState; `worker_indices` are on the device, `sent` is
    as in `Traffic`, `keeps` and `rollback_rows` as in `replay_options`."""
    self.state, self._steps, self._worker_indices = state, steps, worker_indices
    self._rollback_rows = set(rollback_rows)
    self.marks: dict[int, base.ServerState] = {}  # row -> state before it
    self.ledger = trace_lib.Ledger(self._send, keeps=keeps)
    self.traffic = Traffic(steps, state, sent)
    self._messages: list[ReceivedMessage] = []
    self._observations: list[steps_lib.Observation] = []

  def _send(self, event, kept_ticket):
    if kept_ticket is not None:
      return self._steps.keep(kept_ticket)
    self.traffic.count_ticket(event.worker, event.seq)
    return self._steps.send(self.state, self._worker_indices[event.worker])

  def apply(self, event: trace_lib.Event) -> base.Ticket | None:
    """Replays the next row; returns the ticket that it opens or closes."""
    # Copied, as the next `receive` donates the state's buffers.
    if self.ledger.rows in self._rollback_rows:
      self.marks[self.ledger.rows] = jax.tree.map(jnp.copy, self.state)
    ticket = self.ledger.apply(event)
    if event.action == base.JOIN:
      self.traffic.forget_worker(event.worker)
    if event.action in (base.LOST, base.REJECT, base.STOP):
      self.traffic.drop_ticket(*event.key)
    if event.action == base.ROLLBACK:
      self.state = jax.tree.map(jnp.copy, self.marks[event.job])
      self.traffic.roll_back(self.state)
    return ticket

  def receive(
    self, event: trace_lib.Event, message: Any, totals: Any = None
  ) -> None:
    """Gives the server the message of the last RECEIVE row: (ticket, updates,
    loss). `totals` are sums over all shards, if the algorithm needs them."""
    ticket, updates, loss = message
    if self._steps.codec is not None:
      updates = fetch(updates)  # to be packed
    bytes_up, residual_norm = self.traffic.measure_message(updates)
    arguments = self.state, ticket, updates, loss
    if totals is None:
      self.state, observation = self._steps.receive(*arguments)
    else:
      stage_result = self._steps.stage(steps_lib.as_totals(totals), *arguments)
      self.state, observation = stage_result.result
    self.traffic.count_update(self.state)
    trace_columns = event.time, event.worker, event.job
    bytes_down = self.traffic.close_ticket(*event.key, ticket)
    self._messages.append(
      ReceivedMessage(*trace_columns, bytes_up, bytes_down, residual_norm)
    )
    self._observations.append(observation)

  def records(self, start: int = 0) -> base.Records:
    """Returns the records of the received messages, from index `start` on."""
    return records(self._messages[start:], self._observations[start:])
