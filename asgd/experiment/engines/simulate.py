"""The engine `simulate`: workers in simulated time, in a drawn order.

`SIMULATE` runs cells of all protocols; the rest of this module runs those with
a server.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, orders, simulator
from asgd.experiment import checkpoint, engines
from asgd.experiment.checks import choice
from asgd.experiment.engines import (
  by_protocol,
  live_clusters,
  networks,
  parameter_server,
  server_orders,
  server_results,
  simulated_orders,
  simulated_shards,
  traffic,
)
from asgd.experiment.engines.simulated import (
  Restore,
  SimulatedEngine,
  sent_accuracy,
)
from asgd.experiment.schema import Run, Setting


class SimulationEngine(SimulatedEngine):
  """A cell with a server, in simulated time."""

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Makes the order and the simulation that follows it; see the base."""
    plan = self._plan
    batches = plan.job_batches(seed)
    # The state before the first message is also the template of a checkpoint.
    initial = simulator.initial(
      plan.server, plan.coded_worker(), params, plan.workers
    )
    restored = restore(
      lambda saved: (*_unpack(saved, initial), saved.notes.get("iterators"))
    )
    if restored is None:
      restored = initial, simulator.concatenate([]), None, None
    # `sizes` of encoded packets decide an order over a network, so the order
    # is rebuilt from them; `positions` are those of the user's iterators.
    state, records, sizes, positions = restored
    self._iterators = batches.iterators  # None: a function makes the batches
    if positions is not None:
      self._iterators.restore(positions)
    self._order = simulated_orders.make_order(
      *(plan, seed, batches, root), saved=sizes, rows=state.event
    )
    # The rows of the order before `state.event` were simulated already.
    self._order.begin(state)
    self._record_parts = [records]
    return len(records.loss)

  def _run(self, end):
    new_records = self._order.until(end)
    self._record_parts.append(new_records)
    return new_records

  def work(self) -> list[Any]:
    """Returns the last segments of the workers' time; see the base."""
    return self._order.work()

  def snapshot(self) -> engines.Snapshot:
    """Returns the present parameters, with the simulated time."""
    server = self._order.run.server
    clock = {
      "time": float(self._record_parts[-1].time[-1]),  # of the last message
      "megabytes": traffic.megabytes(self._record_parts),
    }
    return engines.Snapshot(
      server.params, self.done, int(server.version), clock
    )

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    state, records, plan = self._order.run.server, self.records(), self._plan
    version, trace = int(state.version), self._order.trace
    row = server_results.columns(plan, records, version, trace)
    row["simulator"] = str(self._order.choice)
    row["simulated_time"] = time = float(records.time[-1])
    use = self._order.use()
    if use is not None:
      row |= networks.columns(use, len(records.loss), time)
    return row | sent_accuracy(plan, [state], lambda parts: parts[0])

  def extras(self) -> dict[str, str]:
    """Returns the trace, if sizes of codes have decided it."""
    is_grown = self._order.save() is not None
    return {"trace.csv": orders.dump(self._order.trace)} if is_grown else {}

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns server, worker states, tickets in flight and records."""
    # A pause completes all rows that are computed ahead.
    simulation = self._order.run.pause()
    tree, notes = _pack(simulation)
    notes["sizes"] = self._order.save()
    if self._iterators is not None:
      notes["iterators"] = self._iterators.save()
    return simulation.event, {**tree, "records": self.records()}, notes


def _pack(
  simulation: simulator.SimulationState,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns a checkpoint's arrays and JSON.

  The JSON has a row for each ticket: (worker, job, version, index of the tree
  sent, fresh). The job is None if the ticket is kept for a later job. Tickets
  that share parameters store them once.
  """
  trees: list[base.Params] = []
  # Identities of the leaves of parameters -> their index in `trees`.
  tree_index: dict[tuple[int, ...], int] = {}
  rows = []
  for worker, kept_ticket in enumerate(simulation.kept):
    tickets: list[tuple[int | None, base.Ticket]]
    tickets = [*simulation.tickets[worker].items()]
    if kept_ticket is not None:
      tickets.insert(0, (None, kept_ticket))  # it has no job yet
    for job, ticket in tickets:
      # Leaves are immutable, so equal identities are equal parameters.
      identity = tuple(map(id, jax.tree.leaves(ticket.params)))
      if identity not in tree_index:
        tree_index[identity] = len(trees)
        trees.append(ticket.params)
      version, fresh = int(ticket.version), bool(ticket.fresh)
      rows.append((worker, job, version, tree_index[identity], fresh))
  server, workers = simulation.server, simulation.workers
  # `sent`: parameters of tickets, each once.
  tree = {"server": server, "workers": workers, "sent": trees}
  total, version, ticket_totals, ticket_bytes = simulation.sent
  open_tickets = [(*key, nbytes) for key, nbytes in ticket_bytes.items()]
  sent_fields = [total, version, list(ticket_totals.items()), open_tickets]
  notes = {"event": simulation.event, "tickets": rows, "sent": sent_fields}
  return tree, notes


def _unpack(
  saved: checkpoint.Restored, template: simulator.SimulationState
) -> tuple[simulator.SimulationState, base.Records, Any]:
  """Returns (simulation, records, sizes) of a checkpoint; `template` is a
  simulation of the same structure."""
  rows, server = saved.notes["tickets"], template.server
  # Entry 3 of a row is the index of the parameters; each index occurs.
  trees = len({row[3] for row in rows})
  tree: dict[str, Any] = {"server": server, "workers": template.workers}
  tree["sent"] = [server.params] * trees
  tree["records"] = checkpoint.any_shapes(simulator.concatenate([]))
  tree = saved.tree(tree)
  records = tree.pop("records")
  # Copied to JAX arrays, because the simulation donates its buffers.
  tree = jax.tree.map(jnp.array, tree)
  tickets: tuple[dict[int, base.Ticket], ...] = tuple(
    {} for _ in template.workers
  )
  kept_tickets: list[Any] = [None] * len(tickets)
  for worker, job, version, params, fresh in rows:
    ticket = base.Ticket(
      *(jnp.int32(worker), jnp.int32(version), tree["sent"][params]),
      np.bool_(fresh),
    )
    if job is None:
      kept_tickets[worker] = ticket
    else:
      tickets[worker][job] = ticket
  event, server, workers = saved.notes["event"], tree["server"], tree["workers"]
  # Only a replay rolls back, and it starts from the beginning. So the saved
  # state of a simulation has no states to roll back to.
  total, version, ticket_totals, open_tickets = saved.notes["sent"]
  ticket_bytes = {(w, seq): nbytes for w, seq, nbytes in open_tickets}
  sent_state = simulator.Sent(total, version, dict(ticket_totals), ticket_bytes)
  simulation = simulator.SimulationState(
    event, server, workers, tickets, tuple(kept_tickets), {}, sent_state
  )
  return simulation, records, saved.notes.get("sizes")


def plan(experiment: Any, run: Run, workers: int) -> Any:
  """Builds and checks the plan of cells with a server."""
  result = parameter_server.plan(experiment, run, workers)
  if server_orders.out_of_step(run):
    live_clusters.needs_totals(result)  # raises if it cannot have shards
  return result


def check(run: Run) -> None:
  """Checks a run with a server, before the data are loaded."""
  parameter_server.check(run)
  engine = run.config["simulator"]["engine"]
  # Shards that are out of step have one simulator, so there is no choice.
  if server_orders.out_of_step(run) and engine != simulator.AUTO:
    raise ValueError(
      f"config.simulator.engine {engine!r} is not for shards that are out of"
      " step, which have another engine: leave it out"
    )
  dtype = run.config["server"]["wire"]
  if networks.dtype_on_wire(run.config) and not server_orders.out_of_step(run):
    raise ValueError(
      f"config.server.wire {dtype!r} is for live servers, and for simulated"
      " shards that are out of step: leave it out, or set"
      " config.server.shards=2 or more and consistent=False"
    )
  server_orders.check_delays(run)


def start(context: engines.Context) -> engines.Engine:
  """Starts a cell with a server; its shards may be out of step."""
  if server_orders.out_of_step(context.plan.run):
    return simulated_shards.ShardedEngine(context)
  return SimulationEngine(context)


_SECTIONS = {
  "simulator": {"engine": Setting(simulator.AUTO, choice(*simulator.ENGINES))}
}
SIMULATE = by_protocol.engine_kind(
  "simulate",
  sections=parameter_server.SECTIONS | _SECTIONS,
  settings=None,
  columns=(engines.Column("time", "simulated_time"), *server_results.COLUMNS),
)
