"""A cell in simulated time, with shards that receive in different orders.

Each shard has its own trace, drawn with the delays of `config.server.delays`.
The traces are written and replayed like those of a live run: trace-0.csv and so
on. The lead is shard 0: its messages are those of the cell's records.
"""

from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, orders, sharding, simulator
from asgd.experiment import checkpoint, engines
from asgd.experiment.engines import (
  live_clusters,
  networks,
  server_results,
  traffic,
)
from asgd.experiment.engines.simulated import (
  Restore,
  SimulatedEngine,
  sent_accuracy,
)


class ShardedEngine(SimulatedEngine):
  """A cell in simulated time, with a server in shards."""

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Draws the traces, and makes the simulation or restores it. Returns the
    number of messages that the lead has received."""
    plan = self._plan
    self._traces, self._use = plan.traces(seed)
    self._params = jax.device_get(params)
    split = sharding.make_plan(self._params, len(self._traces))
    # Each shard applies its own trace to its part of the parameters.
    self._simulation = simulator.Sharded(
      *(plan.server, plan.coded_worker(split), self._params, self._traces),
      workers=plan.workers,
      batch=plan.job_batches(seed),
      root=root,
      options=simulator.ShardOptions(
        wire=networks.dtype_on_wire(plan.run.config), plan=split
      ),
    )
    no_records = [simulator.concatenate([]) for _ in self._traces]
    # The records of each shard before the last checkpoint.
    restored_records = restore(self._unpack)
    self._earlier_records: list[base.Records] = restored_records or no_records
    # Messages of the lead in `_earlier_records`.
    self._earlier_messages = len(self._earlier_records[0].loss)
    return self._earlier_messages

  def _run(self, end: int) -> base.Records:
    """Simulates until the lead has received `end` messages; returns its new
    records. At the end of the cell all shards reach the end of their traces."""
    # None: to the end of all traces.
    self._simulation.until(None if end == self.total else end)
    return self._simulation.records(self.done - self._earlier_messages)[0]

  def _trace(self) -> tuple[base.Trace, int]:
    """Returns the lead's trace, and its next row; see the base."""
    lead = self._traces[0]
    row_after_message = simulator.end_of_message(lead)
    next_row = int(row_after_message[self.done - 1]) if self.done else 0
    return lead, next_row

  def _records(self) -> list[base.Records]:
    """Returns the records of each shard since the cell began."""
    pairs = zip(self._earlier_records, self._simulation.records(), strict=True)
    return [simulator.concatenate(list(pair)) for pair in pairs]

  def snapshot(self) -> engines.Snapshot:
    """Returns the present parameters of all shards, at the lead's time."""
    records = self._records()
    clock = {
      "time": float(records[0].time[-1]),
      "megabytes": traffic.megabytes(records),
    }
    version = int(self._simulation.states[0].version)
    return engines.Snapshot(self._simulation.params, self.done, version, clock)

  def records(self) -> base.Records:
    """Returns the lead's row of each message. If all shards have received the
    message, its norms and bytes are those of all shards together."""
    split = self._simulation.plan
    return live_clusters.combine(self._records(), split, self._params)

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    plan, records, states = self._plan, self.records(), self._simulation.states
    version, lead = int(states[0].version), self._traces[0]
    row = server_results.columns(plan, records, version, lead)
    row["simulated_time"] = time = float(records.time[-1])
    if self._use is not None:
      row |= networks.columns(self._use, len(records.loss), time)
    row["shards"] = len(states)
    row["spread_mean"] = float(orders.shards.spreads(self._traces).mean())
    split = self._simulation.plan
    return row | sent_accuracy(
      plan, states, lambda parts: sharding.join(split, jax.device_get(parts))
    )

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns (step, arrays, JSON values) of a checkpoint. The step is the
    sum of the rows that each shard has applied."""
    tree, notes = self._simulation.pack()
    rows = sum(row for row, *_ in notes["shards"])
    return rows, {**tree, "records": self._records()}, notes

  def _unpack(self, saved: checkpoint.Restored) -> list[base.Records]:
    """Restores the state of a checkpoint; returns each shard's records."""
    state_like = self._simulation.pack_template(saved.notes)
    records_like = checkpoint.any_shapes(simulator.concatenate([]))
    records_of_shards = [records_like for _ in self._traces]
    tree = saved.tree({**state_like, "records": records_of_shards})
    records = tree.pop("records")
    losses = tree.pop("losses")
    # Copied to JAX arrays, because the simulation donates its buffers.
    tree = jax.tree.map(jnp.array, tree)
    self._simulation.unpack({**tree, "losses": losses}, saved.notes)
    return records

  def extras(self) -> dict[str, str]:
    """Returns the trace of each shard."""
    traces = enumerate(self._traces)
    return {f"trace-{i}.csv": orders.dump(trace) for i, trace in traces}
