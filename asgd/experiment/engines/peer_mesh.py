"""Peers on a mesh: each device of the axis "data" is a peer, all in step.

The engine `mesh` trains recipes of peers by this module. A round is n messages,
and a batch is of `batch_size` examples on each device.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import gossip, simulator, stacking
from asgd.experiment import checkpoint, engines, schema
from asgd.experiment.engines import mesh_plan, parameter_server, peers
from asgd.experiment.schema import Run
from asgd.parallel import meshes
from asgd.parallel import peers as program_lib

_SECONDS = 1.0  # of training, between two looks at clocks and signals
# Settings of one model on all devices.
OF_ONE_MODEL = [
  key for key in mesh_plan.SECTIONS["mesh"] if key not in ("axes", "devices")
]


def check(run: Run) -> None:
  """Checks what can be known before there are devices."""
  axes = run.config["mesh"]["axes"]
  if not axes:
    return
  for workers in run.config["workers"]:
    if axes not in ({meshes.DATA: workers}, {meshes.DATA: -1}):
      raise ValueError(
        f"config.mesh.axes {mesh_plan.mesh_text(axes)} does not fit"
        f" config.workers {workers}, as each device is a peer: leave it out, or"
        f" use data:{workers}"
      )


def devices(run: Run) -> int:
  """Returns how many devices a run needs."""
  return max([*run.config["workers"], run.config["mesh"]["devices"] or 1])


def plan(experiment: Any, run: Run, workers: int) -> peers.PeerPlan:
  """Builds what the cells of a run share, checking that they fit."""
  # What a mesh has no keys of, as it is where nobody sets it.
  defaults = schema.default_of(parameter_server.SECTIONS)
  run = run._replace(config={**defaults, **run.config})
  if jax.process_count() > 1:
    raise ValueError(
      f"config.runs.{run.label}.recipe {run.recipe!r} is of peers, whose mesh"
      " is of one process: drop --num_processes, or use engine ray"
    )
  here = len(jax.devices())
  if here < workers:
    raise ValueError(
      f"config.workers {workers} on engine mesh are as many devices, and there"
      f" are {here}: use fewer, or engine simulate"
    )
  result = parameter_server.plan(experiment, run, workers, peers.PeerPlan)
  if result.gossip.order != gossip.ROUNDS:
    raise ValueError(
      f"config.runs.{run.label}.recipe {run.recipe!r} has no rounds, and a mesh"
      " is in step: use engine simulate"
    )
  return result


class _LinkMeter:
  """Counts messages and bytes over the links of a mesh of N peers."""

  def __init__(self, how: gossip.Gossip, nbytes: int):
    """`nbytes` are those of a message that is not compressed."""
    n = how.topology.workers
    self._gossip, self._bytes = how, nbytes
    self.links = np.zeros((2, n, n), np.int64)  # messages, bytes
    self._sent = np.zeros(n, np.int64)  # bytes of the last message of each
    # Of the round before: bytes put and taken, RMS of the change by mixing.
    zeros = np.zeros(n, np.int64)
    self._before = zeros, zeros, np.zeros(n, np.float32)

  def count(
    self, k: int, codes: Any, mix_norm: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts the messages of round k. Returns bytes put, bytes taken, and the
    RMS of changes by mixing, since the record before of each peer."""
    how, n = self._gossip, len(self._sent)
    message, rest = divmod(k, how.every)
    put = np.zeros(n, np.int64)
    if not rest:
      put += self._bytes
      if how.compressed:
        each = (jax.tree.map(lambda x, i=i: x[i], codes) for i in range(n))
        put = np.array([simulator.packed_bytes(code) for code in each])
      self._sent = put
    heard = np.zeros((n, n), np.int64)
    if rest == how.every - 1:
      links = how.topology.links[message % how.topology.period]
      heard = links * self._sent
      self.links += np.stack([links, heard])
    up, down, mixed = self._before
    self._before = put, heard.sum(1), mix_norm
    return put if how.put_first else up, down, mixed

  def pack(self) -> dict[str, Any]:
    """Returns the counts as a tree of arrays."""
    return {"before": self._before, "links": self.links, "sent": self._sent}

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over packed counts."""
    self._before = tuple(tree["before"])
    self.links, self._sent = tree["links"].copy(), tree["sent"]


class PeerMeshEngine(engines.Engine):
  """A cell of peers on a mesh."""

  def __init__(self, context: engines.Context):
    """Starts the cell, or goes on from its last checkpoint."""
    self._plan = plan = context.plan
    self._name, seed = context.cell.name, context.cell.seed
    init_key, self._root = jax.random.split(jax.random.key(seed))
    params = plan.problem.init(init_key)
    self._batch = plan.job_batches(seed)
    self.quantum = n = plan.workers
    mesh = meshes.make({meshes.DATA: n}, jax.devices()[:n])
    self._rounds = program_lib.make_rounds(
      plan.gossip, plan.server, plan.worker, mesh
    )
    self._where = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(meshes.DATA)
    )
    self._meter = _LinkMeter(
      plan.gossip,
      program_lib.message_bytes(plan.gossip, plan.server, params),
    )
    self._state = self._rounds.init(params)
    self.total, self.done, self._seconds = plan.messages, 0, 0.0
    self._parts = [simulator.join_records([])]
    self._restore(context)
    self._pace = engines.Pace(_SECONDS)
    self._kept: tuple[int, Any] | None = None  # states, and when they were so
    self._warm_up()

  def _restore(self, context):
    def unpack(saved):
      records = checkpoint.any_shapes(self._parts[0])
      tree = {"state": self._state, "records": records}
      tree = saved.tree({**tree, **self._meter.pack()})
      return tree, saved.notes["seconds"]

    restored = context.restore(unpack)
    if restored is None:
      return
    tree, self._seconds = restored
    self._put(tree["state"])
    self._parts = [simulator.PeerRecords(*tree["records"])]
    self._meter.unpack(tree)
    self.done = len(self._parts[0].loss)

  def _put(self, arrays):
    # Copied: a round donates buffers, and these are NumPy's.
    copy = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=self._where)
    self._state = copy(arrays)

  def _warm_up(self):
    """Compiles the programs of all rounds to come, which are forgotten."""
    how, rounds = self._plan.gossip, self.total // self.quantum
    start = self.done // self.quantum
    arrays = jax.device_get(self._state)
    for k in range(start, min(start + how.every * how.topology.period, rounds)):
      self._round(k)
    self._put(arrays)

  def _round(self, k):
    n = self.quantum
    batches = [self._batch(i, k * n + i) for i in range(n)]
    batch = self._rounds.place(stacking.stack(batches))
    self._state, metrics = self._rounds.round(
      self._state, batch, self._root, k
    )
    return jax.device_get(metrics)

  def advance(self, until: int) -> engines.Progress:
    """Makes rounds, as many as there is time for."""
    first, parts = self.done, []
    steps = self._pace.begin()
    end = min(first + steps * self.quantum, until)
    while self.done < end:
      metrics = self._round(self.done // self.quantum)
      parts.append(self._records_of(self.done // self.quantum, metrics))
      self.done += self.quantum
    self._seconds += self._pace.end()
    part = simulator.join_records(parts)
    self._parts.append(part)
    return engines.Progress(
      loss=part.loss,
      staleness=float(part.staleness.mean()),
      gap=float(part.gap.mean()),
      broken=parameter_server.broken(
        self._plan, part, self.done, self._name, "of peer {worker}"
      ),
    )

  def _records_of(self, k, metrics) -> simulator.PeerRecords:
    n = self.quantum
    version, staleness, accepted = metrics.whole.T
    gap, message_norm, update_norm, mix_norm, kept = metrics.real.T
    up, down, mixed = self._meter.count(k, metrics.codes, mix_norm)
    peer = np.arange(n, dtype=np.int32)
    return simulator.PeerRecords(
      *(version, np.full(n, k + 1.0), peer, (k * n + peer).astype(np.int32)),
      *(staleness, gap, np.asarray(metrics.loss, np.float32)),
      *(accepted.astype(bool), message_norm, update_norm),
      *(up, down, kept, mixed),
    )

  def _states(self):
    """The states of all peers, as NumPy arrays."""
    if self._kept is None or self._kept[0] != self.done:
      whole = jax.device_get(self._state.peers)
      states = [
        jax.tree.map(lambda x, i=i: x[i], whole) for i in range(self.quantum)
      ]
      self._kept = self.done, states
    states = self._kept[1]
    return states, [self._plan.peer.weight(state) for state in states]

  def snapshot(self) -> engines.Snapshot:
    """Returns the mean model."""
    states, weights = self._states()
    params = simulator.mean_params(states, weights)
    clock = {"seconds": self._seconds}
    update = round(np.mean([int(s.server.version) for s in states]))
    return engines.Snapshot(params, self.done, update, clock)

  def records(self) -> simulator.PeerRecords:
    """Returns a row for each message of a peer to itself; their time counts
    rounds."""
    self._parts = [simulator.join_records(self._parts)]
    return self._parts[0]

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns losses of some messages, how far apart peers are, and how good
    single ones."""
    part = simulator.PeerRecords(*(c[start:end] for c in self.records()))
    states, weights = self._states()
    quality = peers.peer_quality(
      self._plan.problem, [state.server.params for state in states]
    )
    return peers.summary(part, states, weights) | quality

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to."""
    config, plan = self._plan.run.config, self._plan
    size = config["batch_size"] * plan.recipe.steps
    snapshot = self.snapshot()
    row = parameter_server.columns(plan, self.records(), snapshot.update)
    here = jax.local_devices()[0]
    return {
      **row,
      **self.summary(0, self.done),
      **peers.of_links(plan.gossip, self._traffic()),
      "mesh": mesh_plan.mesh_text({meshes.DATA: self.quantum}),
      "seconds": self._seconds,
      "seconds_per_update": self._seconds * self.quantum / self.done,
      "examples_per_second": self.done * size / max(self._seconds, 1e-9),
      # Parameters and the optimizer's state, of one peer.
      "state_bytes": sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(self._state)
        for shard in leaf.addressable_shards
        if shard.device == here
      ),
      "skipped": 0,
    }

  def _traffic(self) -> simulator.LinkTraffic:
    return simulator.LinkTraffic(*self._meter.links)

  def extras(self) -> dict[str, str]:
    """Returns what went over each link, as a table."""
    return {"links.csv": peers.links_table(self._traffic())}

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns all peers, and records."""
    tree = {"state": jax.device_get(self._state), **self._meter.pack()}
    tree["records"] = self.records()
    return self.done, tree, {"seconds": self._seconds}


def describe(result: Mapping[str, Any]) -> str:
  """Returns what a cell came to in a few words."""
  return f"{peers.describe(result)}, {result['seconds']:.1f} s"
