"""A cell in simulated time whose server is in shards that are out of step.

Each shard has an order of its own, drawn with the delays of
`config.server.delays`. They are written as the traces of a live run are,
trace-0.csv, trace-1.csv and so on, and replayed as those are.
"""

from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, orders, sharding, simulator
from asgd.experiment import checkpoint, engines
from asgd.experiment.engines import live_clusters, parameter_server, traffic

_SECONDS = 0.25  # between two looks at clocks and signals
_FIRST = 16  # messages of the first call of `advance`


class ShardedEngine(engines.Engine):
  """A cell in simulated time, with a server in shards."""

  def __init__(self, context: engines.Context):
    """Starts the cell, or goes on from its last checkpoint."""
    seed = context.cell.seed
    self._plan = plan = context.plan.of_seed(seed)
    self._name = context.cell.name
    self._traces = plan.traces(seed)
    init_key, root = jax.random.split(jax.random.key(seed))
    self._params = jax.device_get(plan.problem.init(init_key))
    split = sharding.make_plan(self._params, len(self._traces))
    self._run = simulator.Sharded(
      *(plan.server, plan.coded_worker(split), self._params, self._traces),
      workers=plan.workers,
      batch=plan.job_batches(seed),
      root=root,
      wire=live_clusters.dtype_on_wire(plan.run.config),
      plan=split,
    )
    empty = [simulator.concatenate([]) for _ in self._traces]
    # Of each shard: those before the last checkpoint.
    self._before: list[base.Records] = context.restore(self._unpack) or empty
    self.total, self.done = plan.messages, len(self._before[0].loss)
    self._since = self.done  # messages of the lead in `_before`
    self._pace = engines.Pace(_SECONDS, _FIRST)

  def advance(self, until: int) -> engines.Progress:
    """Obeys the traces, not past message `until` of the lead; with its last one
    the other shards receive what is left."""
    end = min(self.done + self._pace.begin(), until)
    self._run.until(None if end == self.total else end)
    self._pace.end()
    part = self._run.records(self.done - self._since)[0]
    self.done = end
    return engines.Progress(
      loss=part.loss,
      staleness=float(part.staleness.mean()),
      gap=float(part.gap.mean()),
      broken=parameter_server.broken(
        self._plan, part, end, self._name, "staleness {staleness}"
      ),
    )

  def _records(self):
    """Of each shard."""
    pairs = zip(self._before, self._run.records(), strict=True)
    return [simulator.concatenate(list(pair)) for pair in pairs]

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters as they are, at the lead's simulated time."""
    records = self._records()
    clock = {
      "time": float(records[0].time[-1]),
      "megabytes": traffic.megabytes(records),
    }
    version = int(self._run.states[0].version)
    return engines.Snapshot(self._run.params, self.done, version, clock)

  def records(self) -> base.Records:
    """Returns a row for each message, as the lead has them, with the norms of
    all shards where each has received the message."""
    plan = self._run.plan
    return live_clusters.combine(self._records(), plan, self._params)

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of some messages."""
    part = base.Records(*(column[start:end] for column in self.records()))
    return parameter_server.summary(part)

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to."""
    plan, records, states = self._plan, self.records(), self._run.states
    row = parameter_server.columns(plan, records, int(states[0].version))
    row["simulated_time"] = float(records.time[-1])
    row["shards"] = len(states)
    row["spread_mean"] = float(orders.shards.spreads(self._traces).mean())
    if not plan.server.sends_current and plan.run.given is None:
      parts = [plan.server.send(s, jnp.int32(0)).params for s in states]
      sent = sharding.join(self._run.plan, jax.device_get(parts))
      row["sent_accuracy"] = plan.problem.evaluate(sent).accuracy
    return row

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns shards, workers, tickets and messages on their way, records."""
    tree, notes = self._run.pack()
    rows = sum(row for row, *_ in notes["shards"])
    return rows, {**tree, "records": self._records()}, notes

  def _unpack(self, saved):
    """Goes to where a checkpoint is; returns the records until then."""
    like = self._run.like(saved.notes)
    empty = checkpoint.any_shapes(simulator.concatenate([]))
    tree = saved.tree({**like, "records": [empty for _ in self._traces]})
    records = tree.pop("records")
    losses = tree.pop("losses")
    # Copied: the simulation donates buffers, and these are NumPy's.
    tree = jax.tree.map(jnp.array, tree)
    self._run.unpack({**tree, "losses": losses}, saved.notes)
    return records

  def extras(self) -> dict[str, str]:
    """Returns the trace of each shard."""
    traces = enumerate(self._traces)
    return {f"trace-{i}.csv": orders.dump(trace) for i, trace in traces}
