"""Simulated runs of recipes with `gossip`: peers have no common server.

The engine `simulate` uses this module for such recipes. The order is a trace of
`asgd.gossip.orders`, with rows that a run of a server does not have. The
engine evaluates the mean of the peers' parameters, and up to 16 of the peers.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asgd import (
  algorithms,
  base,
  compression,
  gossip,
  orders,
  problems,
  simulator,
)
from asgd.experiment import checkpoint, checks, engines
from asgd.experiment.engines import (
  networks,
  parameter_server,
  peer_orders,
  server_orders,
  server_results,
  traffic,
)
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.engines.simulated import (
  Restore,
  SimulatedEngine,
  rows_between,
)
from asgd.experiment.schema import Run
from asgd.gossip import coded, topologies
from asgd.gossip.over_network import EventQueue, PeerNetwork, Size
from asgd.live.gossip import frames
from asgd.orders import protocol, trace
from asgd.orders.network import Network
from asgd.orders.trace import Event

_MAX_EVALUATED = 16  # peers that are evaluated one by one


_make_peer = functools.lru_cache(maxsize=32)(gossip.make_peer)


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as an object
class PeerPlan(ServerPlan):
  """The parts that the cells of a run of peers share: `ServerPlan`, with the
  server that each peer has for its own updates."""

  curvature_limit = math.nan  # unknown for peers

  @functools.cached_property
  def peer(self) -> gossip.Peer:
    """A peer, compiled once for all seeds."""
    rule, topology = self.gossip.rule, self.gossip.topology
    return _make_peer(self.server, rule, topology.slots)

  @property
  def gossip(self) -> gossip.Gossip:
    """Topology, order and rule of the exchange between peers."""
    exchange = self.recipe.gossip
    assert exchange is not None, "every recipe of peers has an exchange"
    return exchange

  @property
  def call_network(self) -> Network | None:
    """The network of the peers' messages; None if messages take no time."""
    section = self.run.config.get("network")
    network = section and networks.make_network(section, self.workers)
    # A peer that receives has the role of a shard: the peer's link down is the
    # shard's port.
    return network and network._replace(port=network.down)

  @property
  def quantum(self) -> int:
    """The number of messages that are received together: all N messages of a
    round; 1 without rounds."""
    return self.workers if self.gossip.order == gossip.ROUNDS else 1

  def trace(
    self,
    seed: int,
    messages: int | None = None,
    *,
    links: PeerNetwork | None = None,
  ) -> base.Trace:
    """Returns the order of a cell, which follows from config and seed. A
    network sends messages of dense sizes over `links`, which are idle (None:
    over new ones)."""
    n_messages = self.messages if messages is None else messages
    own_order = self._own_trace(seed, n_messages)
    if own_order is not None:
      return own_order
    return self.gossip.trace(
      self._durations(seed),
      messages=n_messages,
      seed=seed,
      links=self.links() if links is None else links,
    )

  def begin(self, seed: int, links: PeerNetwork) -> EventQueue:
    """Returns the queue that computes a cell's order over its network."""
    clock = self._durations(seed)
    return self.gossip.begin(
      clock, messages=self.messages, seed=seed, links=links
    )

  def links(self, nbytes: Size | None = None) -> PeerNetwork | None:
    """Returns idle links for a cell; None if messages take no time.

    `nbytes`: a message's size, or a function of it; None: the dense size."""
    network = self.call_network
    if network is None:
      return None
    nbytes = self._nbytes if nbytes is None else nbytes
    return PeerNetwork(network, self.workers, nbytes)

  def has_own_order(self) -> bool:
    """Whether the user gave the order, with its times."""
    return server_orders.own_order(self.run) is not None

  @functools.cached_property
  def _nbytes(self) -> int:
    """Bytes of a message without a codec, by the shapes that `put` returns."""
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(self.problem.init, key)

    # Some rules send more than the parameters: `push_sum` adds a weight.
    def put(params: Any, key: Any) -> Any:
      keep: Any = np.float64(1)
      return self.peer.put(self.peer.init(params), keep, key)[1]

    leaves = jax.tree.leaves(jax.eval_shape(put, params, key))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  def rules(self) -> protocol.Rules:
    """Raises ValueError: peers have no protocol of a server."""
    raise ValueError(
      f"config.runs.{self.run.label}.recipe {self.run.recipe!r} has no server"
    )

  @classmethod
  def batches_of_update(cls, recipe: algorithms.Recipe, workers: int) -> int:
    """Returns the number of batches, over all peers, in which each peer makes
    one update."""
    return workers * recipe.steps

  @classmethod
  def with_codec(
    cls, recipe: algorithms.Recipe, codec: compression.Codec | None
  ) -> tuple[algorithms.Recipe, None]:
    """Returns (recipe with peers that encode their messages, None): there is no
    server."""
    if codec is None:
      return recipe, None
    exchange = recipe.gossip
    assert exchange is not None, "every recipe of peers has an exchange"
    with checks.prefix_errors("compress"):
      encoded = coded.with_codec(exchange, codec)
    return recipe._replace(gossip=encoded), None

  def check(self) -> None:
    """Raises ValueError, naming the key, if the parameters cannot be encoded
    by the codec."""
    super().check()
    if self.gossip.compressed:
      params = jax.eval_shape(self.problem.init, jax.random.key(0))
      config, label = self.run.config, self.run.label
      key = "compress" if config["compress"] else f"runs.{label}.codec"
      # Encoding shapes shows whether the codec takes the parameters.
      with checks.prefix_errors(key):
        frames.packed_wire(self.peer, params)

  def peers(
    self, seed: int, trace: base.Trace | list[Event] | None = None
  ) -> simulator.Peers:
    """Returns the peers of a cell, before the first row.

    Args:
      seed: the seed of the cell.
      trace: the rows that the peers will run; see `simulator.Peers`. None: the
        trace of the cell.
    """
    init_key, root = jax.random.split(jax.random.key(seed))
    return simulator.Peers(
      self.gossip,
      self.peer,
      self.worker,
      self.problem.init(init_key),
      self.trace(seed) if trace is None else trace,
      batch=self.job_batches(seed),
      root=root,
      devices=self.devices,
    )


class PeerEngine(SimulatedEngine):
  """A cell of peers, in simulated time."""

  _message_text = "of peer {worker}"
  _order: Any = None  # peer_orders.Order; on a mesh there is none
  _join = staticmethod(simulator.join_records)

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Makes the peers, new or from a checkpoint. Returns the count of messages
    so far; see the base."""
    del params, root  # `PeerPlan.peers` makes them from the seed
    plan = self._plan
    self._order = peer_orders.order_of(plan, seed)
    # `restore` returns None for a new cell, which has no records.
    records: Any = restore(lambda saved: _unpack(saved, self._order))
    self._peers = self._order.peers
    no_records = simulator.join_records([])
    self._record_parts = [no_records if records is None else records]
    self.quantum = plan.quantum
    return len(self._record_parts[0].loss)

  def _run(self, end):
    new_records = self._order.until(end)
    self._record_parts.append(new_records)
    return new_records

  def _trace(self):
    return self._peers.trace, self._peers.event

  def _states(self):
    return self._peers.states

  def _present(self) -> tuple[list[gossip.PeerState], list[Any]]:
    """Returns (states, weights in the mean) of the peers that have not left."""
    states = [self._peers.states[i] for i in self._peers.present]
    return states, [self._plan.peer.weight(state) for state in states]

  def _clock(self):
    return {"time": float(self.records().time[-1])}

  def _costs(self) -> dict[str, Any]:
    """Returns the simulated time and the use of the network, as columns."""
    records = self.records()
    row = {"simulated_time": float(records.time[-1])}
    use = self._order.use()
    if use is not None:
      count = len(records.loss)
      row |= networks.columns(use, count, row["simulated_time"])
    return row

  def _traffic(self):
    return self._peers.traffic

  def snapshot(self) -> engines.Snapshot:
    """Returns the mean parameters of the peers, with the simulated time."""
    states, weights = self._present()
    params = simulator.mean_params(states, weights)
    # Each peer counts its own updates, and the counts may differ. The mean of
    # the counts is the number of rounds; without rounds, of messages per peer.
    updates = np.mean([int(state.server.version) for state in states])
    return engines.Snapshot(params, self.done, round(updates), self._clock())

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of messages `start`, ..., `end` - 1,
    and the present consensus distance and quality of peers, as columns."""
    records = rows_between(self.records(), start, end)
    row = summary(records, *self._present())
    return row | peer_quality(
      self._plan.problem, [s.server.params for s in self._present()[0]]
    )

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    records = self.records()
    updates = round(np.mean([int(s.server.version) for s in self._states()]))
    row = server_results.columns(self._plan, records, updates)
    row |= self.summary(0, len(records.loss))
    row |= link_columns(self._plan, self._traffic())
    return {**row, **self._costs()}

  def extras(self) -> dict[str, str]:
    """Returns the traffic of each link, as a table; and the trace, if sizes of
    codes have decided it."""
    files = {"links.csv": links_table(self._traffic())}
    if self._order is not None and self._order.save() is not None:
      rows = self._peers.trace[: self._peers.event]
      files["trace.csv"] = orders.dump(trace.from_events(rows))
    return files

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns (next row of the trace, tree of arrays, notes for JSON).

    The tree has the states of the peers, their open jobs, the codes of messages
    that a peer has yet to take, and the records.
    """
    tree, notes = self._peers.save()
    notes["link_bytes"] = self._order.save()
    return self._peers.event, {**tree, "records": self.records()}, notes


def _unpack(saved: checkpoint.Restored, order: peer_orders.Order) -> Any:
  """Restores the peers of `order` from a checkpoint; returns the records."""
  order.rebuild(saved.notes["event"], saved.notes.get("link_bytes"))
  peers = order.peers
  template = peers.template(saved.notes)
  # The template cannot know how many records there are.
  template["records"] = checkpoint.any_shapes(simulator.join_records([]))
  tree = saved.tree(template)
  records = tree.pop("records")
  peers.restore(tree, saved.notes)
  return records


# Columns and tables of all engines of peers.


def summary(
  records: simulator.PeerRecords,
  states: Sequence[gossip.PeerState],
  weights: Sequence[Any],
) -> dict[str, float]:
  """Returns a summary of records and the consensus distance of peers, as
  columns.

  Args:
    records: the records to summarise.
    states: the states of the peers.
    weights: the weight of each peer in the mean.
  """
  # With push-sum the mean is weighted. With other rules all weights are 1.
  mean = simulator.mean_params(states, weights)
  rows: Any = records  # has all columns of `base.Records` that `summary` reads
  return {
    **server_results.summary(rows),
    "mix_norm": float(rows.mix_norm.mean()),
    "consensus": simulator.consensus(states, mean),
  }


def peer_quality(
  problem: problems.Problem, params: Sequence[base.Params]
) -> dict[str, float]:
  """Returns losses and accuracies of the worst and the best peer, as columns.
  With more than 16 peers the function evaluates 16 of them, at evenly spread
  indices."""
  indices = np.linspace(0, len(params) - 1, min(len(params), _MAX_EVALUATED))
  evaluations = [problem.evaluate(params[round(i)]) for i in indices]
  losses, accuracies = zip(
    *((evaluation.loss, evaluation.accuracy) for evaluation in evaluations),
    strict=True,
  )
  return {
    "peer_loss_best": float(np.min(losses)),
    "peer_loss_worst": float(np.max(losses)),
    "peer_accuracy_worst": float(np.min(accuracies)),
    "peer_accuracy_best": float(np.max(accuracies)),
  }


def link_columns(
  plan: PeerPlan, link_traffic: simulator.LinkTraffic
) -> dict[str, Any]:
  """Returns the topology and the traffic of its links, as columns."""
  topology, messages = plan.gossip.topology, int(link_traffic.messages.sum())
  # Only links with at least one taken message count.
  links = int((link_traffic.messages > 0).sum())
  taken_bytes = int(link_traffic.nbytes.sum())
  row = {
    "topology": topology.name,
    "second_eigenvalue": topologies.second_eigenvalue(topology),
    "links": links,
    "link_messages": messages,
    "taken_bytes": taken_bytes,
    "bytes_per_link": taken_bytes / max(links, 1),
    "bytes_per_peer": taken_bytes / topology.workers,
  }
  if plan.run.config["compress"]:
    # A record may have no message, or several. A peer receives what others
    # send, so both directions have the codec.
    factor = traffic.dense_bytes(plan) * messages / max(taken_bytes, 1)
    row |= {"compression_up": factor, "compression_down": factor}
  return row


def links_table(traffic: simulator.LinkTraffic) -> str:
  """Returns a table of links, one line each, as CSV."""
  lines = ["sender,receiver,messages,bytes"]
  # Row: the receiver. Column: the sender.
  for receiver, sender in np.argwhere(traffic.messages):
    numbers = traffic.messages[receiver, sender], traffic.nbytes[
      receiver, sender
    ]
    lines.append(",".join(map(str, (sender, receiver, *numbers))))
  return "\n".join([*lines, ""])


def plan(experiment: Any, run: Run, workers: int) -> PeerPlan:
  """Builds and checks the plan of a run of peers."""
  return parameter_server.plan(experiment, run, workers, PeerPlan)


def describe(result: Mapping[str, Any]) -> str:
  """Returns consensus distance, accuracies and costs in a few words."""
  text = (
    "{topology} (|lambda_2| {second_eigenvalue:.3f}), consensus distance"
    " {consensus:.2g}"
  ).format_map(result)
  worst, best = (
    result[f"peer_accuracy_{rank}"] for rank in ("worst", "best")
  )
  if worst == worst:  # not NaN, so the task has accuracies
    text += f", peers from {100 * worst:.1f} to {100 * best:.1f} %"
  text += f", {result['bytes_per_link'] / 1e6:.3g} MB per link"
  if "simulated_time" in result:
    text += f", time {result['simulated_time']:.4g}"
  if result.get("staleness_max"):
    text += (
      f", staleness mean {result['staleness_mean']:.1f} max"
      f" {result['staleness_max']}"
    )
  return text + networks.describe(result)


COLUMNS = (
  engines.Column("consensus", "consensus"),
  engines.Column("worst peer %", "peer_accuracy_worst", 100, "{:.1f}"),
  engines.Column("MB/link", "bytes_per_link", 1e-6),
)
