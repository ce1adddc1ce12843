"""A cell in simulated time whose server has shards that are out of step.

Each shard has its own order, drawn with the delays of `config.server.delays`.
The orders are written and replayed like the traces of a live run: trace-0.csv
and so on.
"""

from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, orders, sharding, simulator
from asgd.experiment import checkpoint, engines
from asgd.experiment.engines import (
  live_clusters,
  live_hosts,
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

  def _begin(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Draws an order for each shard, and makes the simulation."""
    plan = self._plan
    self._traces = plan.traces(seed)
    self._params = jax.device_get(params)
    split = sharding.make_plan(self._params, len(self._traces))
    # Each shard applies its own trace to its part of the parameters.
    self._sharded = simulator.Sharded(
      *(plan.server, plan.coded_worker(split), self._params, self._traces),
      workers=plan.workers,
      batch=plan.job_batches(seed),
      root=root,
      options=simulator.ShardOptions(
        wire=live_hosts.dtype_on_wire(plan.run.config), plan=split
      ),
    )
    empty = [simulator.concatenate([]) for _ in self._traces]
    # One for each shard, with the rows before the last checkpoint.
    self._earlier_records: list[base.Records] = restore(self._unpack) or empty
    # Messages of the lead in `_earlier_records`.
    self._earlier_messages = len(self._earlier_records[0].loss)
    return self._earlier_messages

  def _run(self, end: int) -> base.Records:
    """Simulates the traces to message `end` of the lead at most.

    With the last message of the lead, the other shards receive their remaining
    messages.
    """
    # None: to the end of all traces.
    self._sharded.until(None if end == self.total else end)
    return self._sharded.records(self.done - self._earlier_messages)[0]

  def _trace(self):
    lead = self._traces[0]
    # The lead's row after the last received message.
    ends = simulator.end_of_message(lead)
    return lead, int(ends[self.done - 1]) if self.done else 0

  def _records(self) -> list[base.Records]:
    """Returns the records of each shard since the cell began."""
    pairs = zip(self._earlier_records, self._sharded.records(), strict=True)
    return [simulator.concatenate(list(pair)) for pair in pairs]

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters as they are, at the lead's simulated time."""
    records = self._records()
    clock = {
      "time": float(records[0].time[-1]),
      "megabytes": traffic.megabytes(records),
    }
    version = int(self._sharded.states[0].version)
    return engines.Snapshot(self._sharded.params, self.done, version, clock)

  def records(self) -> base.Records:
    """Returns a row for each message, as the lead has them, with the norms of
    all shards where each has received the message."""
    plan = self._sharded.plan
    # `combine` joins the norms where all shards have the message.
    return live_clusters.combine(self._records(), plan, self._params)

  def columns(self) -> dict[str, Any]:
    """Returns the engine's columns of the row of results."""
    plan, records, states = self._plan, self.records(), self._sharded.states
    row = server_results.columns(plan, records, int(states[0].version))
    row["simulated_time"] = float(records.time[-1])
    row["shards"] = len(states)
    row["spread_mean"] = float(orders.shards.spreads(self._traces).mean())
    split = self._sharded.plan
    return row | sent_accuracy(
      plan, states, lambda parts: sharding.join(split, jax.device_get(parts))
    )

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns shards, workers, tickets and messages in flight, records."""
    tree, notes = self._sharded.pack()
    # The step of a checkpoint: rows of all shards.
    rows = sum(row for row, *_ in notes["shards"])
    return rows, {**tree, "records": self._records()}, notes

  def _unpack(self, saved: checkpoint.Restored) -> list[base.Records]:
    """Restores the state of a checkpoint; returns each shard's records."""
    like = self._sharded.like(saved.notes)
    empty = checkpoint.any_shapes(simulator.concatenate([]))
    tree = saved.tree({**like, "records": [empty for _ in self._traces]})
    records = tree.pop("records")
    losses = tree.pop("losses")
    # Copied: the simulation donates buffers, and these are NumPy's.
    tree = jax.tree.map(jnp.array, tree)
    self._sharded.unpack({**tree, "losses": losses}, saved.notes)
    return records

  def extras(self) -> dict[str, str]:
    """Returns the trace of each shard."""
    traces = enumerate(self._traces)
    return {f"trace-{i}.csv": orders.dump(trace) for i, trace in traces}
