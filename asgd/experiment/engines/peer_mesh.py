"""Peers on a mesh: each index of the axis "data" is a peer, all in step.

The engine `mesh` uses this module for recipes of peers. A round of n peers has
n messages. Each peer has a batch of `batch_size` examples, and the devices of
the axis "island", if there is one, divide it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from asgd import base, gossip, simulator, stacking
from asgd.experiment import checkpoint, engines, refusals, schema
from asgd.experiment.engines import mesh_plan, parameter_server, peers
from asgd.experiment.engines.simulated import Restore
from asgd.experiment.schema import Run
from asgd.parallel import meshes
from asgd.parallel import peers as program_lib

_CALL_SECONDS = 1.0  # of a call; the loop checks clocks and signals in between
# Settings for one model on all devices, which peers do not have.
ONE_MODEL_KEYS = [
  key for key in mesh_plan.SECTIONS["mesh"] if key not in ("axes", "devices")
]


def check(run: Run) -> None:
  """Raises ValueError for a mesh that does not fit the workers or the batch."""
  mesh_axes = run.config["mesh"]["axes"]
  count = run.config["mesh"]["devices"]
  for workers in run.config["workers"] if count else ():
    if count < (needed := device_count(run, workers)):
      raise ValueError(
        f"config.mesh.devices {count} is less than the {needed} devices of"
        f" config.workers {workers}: leave it out"
      )
  if not mesh_axes:  # then there is one device per worker
    return
  for workers in run.config["workers"]:
    if mesh_axes.get(meshes.DATA) not in (workers, -1) or (
      mesh_axes.keys() - {meshes.DATA, meshes.ISLAND}
    ):
      raise ValueError(
        f"config.mesh.axes {meshes.text(mesh_axes)} does not fit"
        f" config.workers {workers}, as each index of the axis data is a peer:"
        f" leave it out, or use data:{workers}, or data:{workers},island:D for"
        " D devices in each peer"
      )
  peer_devices, size = _peer_devices(run), run.config["batch_size"]
  if peer_devices == -1:
    raise ValueError(
      "config.mesh.axes.island must be a number of devices, not -1: the number"
      " of peers is config.workers"
    )
  if size % peer_devices:
    raise ValueError(
      f"config.mesh.axes.island {peer_devices} must divide config.batch_size"
      f" {size}, the examples of a peer"
    )


def _peer_devices(run: Run) -> int:
  """Returns the number of devices of each peer."""
  count: int = (run.config["mesh"]["axes"] or {}).get(meshes.ISLAND, 1)
  return count


def axes(run: Run, workers: int) -> dict[str, int]:
  """Returns the axes of the mesh of a run of peers."""
  result = {meshes.DATA: workers}
  if (peer_devices := _peer_devices(run)) > 1:
    result[meshes.ISLAND] = peer_devices
  return result


def device_count(run: Run, workers: int) -> int:
  """Returns the number of devices that the peers of a run need."""
  return workers * _peer_devices(run)


def devices(run: Run) -> int:
  """Returns the number of devices that a run needs."""
  needed = device_count(run, max(run.config["workers"]))
  return max(needed, run.config["mesh"]["devices"] or 1)


def plan(experiment: Any, run: Run, workers: int) -> peers.PeerPlan:
  """Builds and checks the plan of a run of peers."""
  # Keys that the config of a mesh does not have get their defaults.
  defaults = schema.default_of(parameter_server.SECTIONS)
  run = run._replace(config={**defaults, **run.config})
  if jax.process_count() > 1:
    raise ValueError(
      f"config.runs.{run.label}.recipe {run.recipe!r} has peers, and a mesh of"
      " peers needs one process: drop --num_processes, or use engine ray"
    )
  available, needed = len(jax.devices()), device_count(run, workers)
  if available < needed:
    raise ValueError(
      f"config.workers {workers} on engine mesh needs {needed} devices, and"
      f" this process has {available}: use fewer, or engine simulate"
    )
  result = parameter_server.plan(experiment, run, workers, peers.PeerPlan)
  if result.gossip.order != gossip.ROUNDS:
    raise ValueError(
      f"{refusals.recipe_text(run)} has no rounds, but all peers of a mesh"
      " compute in rounds: use engine simulate"
    )
  return result


class _LinkMeter:
  """Counts messages and bytes over the links of a mesh of N peers."""

  def __init__(self, exchange: gossip.Gossip, nbytes: int):
    """`nbytes`: size of a message without a codec."""
    n = exchange.topology.workers
    self._gossip, self._message_bytes = exchange, nbytes
    self.links = np.zeros((2, n, n), np.int64)  # messages, bytes
    self._sent_bytes = np.zeros(n, np.int64)  # of each peer's last message
    # The last round's bytes put and taken, and RMS of the change by mixing.
    zeros = np.zeros(n, np.int64)
    self._last_round = zeros, zeros, np.zeros(n, np.float32)

  def count(
    self, k: int, codes: Any, mix_norm: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts the messages of round k. Returns (bytes put, bytes taken, RMS of
    the change by mixing) for the records of round k: arrays [n], each value
    since the peer's previous record."""
    exchange, n = self._gossip, len(self._sent_bytes)
    # `every` rounds make one exchange. Peers put a message in its first round,
    # and take messages in its last round.
    exchange_index, round_in_exchange = divmod(k, exchange.every)
    put_bytes = np.zeros(n, np.int64)
    if not round_in_exchange:
      put_bytes += self._message_bytes
      if exchange.compressed:
        peer_codes = (
          # Codes are stacked by peer; packed messages differ in length.
          jax.tree.map(lambda x, i=i: x[i], codes) for i in range(n)
        )
        put_bytes = np.array(
          [simulator.packed_bytes(code) for code in peer_codes]
        )
      self._sent_bytes = put_bytes
    taken_bytes = np.zeros((n, n), np.int64)
    if round_in_exchange == exchange.every - 1:
      # links[receiver, sender] is 1 if the receiver takes the sender's
      # message.
      links = exchange.topology.links[exchange_index % exchange.topology.period]
      taken_bytes = links * self._sent_bytes
      self.links += np.stack([links, taken_bytes])
    # The record of round k has the mixing of round k - 1, after which the peer
    # computes its gradient.
    bytes_up, bytes_down, mix_change = self._last_round
    self._last_round = put_bytes, taken_bytes.sum(1), mix_norm
    return put_bytes if exchange.put_first else bytes_up, bytes_down, mix_change

  def pack(self) -> dict[str, Any]:
    """Returns the counts as a tree of arrays."""
    return {
      "before": self._last_round,
      "links": self.links,
      "sent": self._sent_bytes,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores packed counts."""
    self._last_round = tuple(tree["before"])
    self.links, self._sent_bytes = tree["links"].copy(), tree["sent"]


class PeerMeshEngine(peers.PeerEngine):
  """A cell of peers on a mesh; `time` of its records counts rounds."""

  def __init__(self, context: engines.Context):
    """Starts the cell, or continues from its last checkpoint."""
    super().__init__(context)
    self._pace = engines.Pace(_CALL_SECONDS)

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Compiles the rounds, and restores a checkpoint; see the base."""
    plan, self._root = self._plan, root
    self._batch = plan.job_batches(seed)
    self.quantum = n = plan.workers
    mesh = meshes.make(axes(plan.run, n))
    self._rounds = program_lib.make_rounds(
      *(plan.gossip, plan.server, plan.worker, mesh), steps=plan.recipe.steps
    )
    # A peer has one row of each array, on each of its devices.
    self._sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(meshes.DATA)
    )
    nbytes = program_lib.message_bytes(plan.gossip, plan.server, params)
    self._meter = _LinkMeter(plan.gossip, nbytes)
    self._state = self._rounds.init(params)
    self._record_parts = [simulator.join_records([])]
    self._cached_states: tuple[int, Any] | None = None  # (messages, states)
    restore(self._unpack)
    # The records show how far a restored cell is.
    done = len(self._record_parts[0].loss)
    self._warm_up(done // n)
    return done

  def _unpack(self, saved: checkpoint.Restored) -> None:
    """Restores states, records and counts of traffic."""
    records = checkpoint.any_shapes(self._record_parts[0])
    tree = {"state": self._state, "records": records, **self._meter.pack()}
    tree, self._seconds = saved.tree(tree), saved.notes["seconds"]
    self._state = meshes.copy(tree["state"], self._sharding)
    self._record_parts = [simulator.PeerRecords(*tree["records"])]
    self._meter.unpack(tree)

  def _warm_up(self, start: int) -> None:
    """Compiles the programs of all later rounds, and discards their results."""
    # The rounds of one period run all programs.
    exchange, rounds = self._plan.gossip, self.total // self.quantum
    arrays = jax.device_get(self._state)
    for k in range(
      start, min(start + exchange.every * exchange.topology.period, rounds)
    ):
      self._round(k)
    self._state = meshes.copy(arrays, self._sharding)

  def _round(self, k: int) -> Any:
    """Runs round k on all devices; returns its metrics."""
    n = self.quantum
    # Job k n + i is the job of peer i in round k.
    batches = [self._batch(i, k * n + i) for i in range(n)]
    batch = self._rounds.place(stacking.stack(batches))
    self._state, metrics = self._rounds.round(self._state, batch, self._root, k)
    return jax.device_get(metrics)

  def _run(self, end: int) -> simulator.PeerRecords:
    """Runs rounds to message `end`; see the base."""
    n = self.quantum
    # Rounds are complete: `end` is rounded up.
    rounds = range(self.done // n, -(-end // n))
    new_records = simulator.join_records(
      [self._round_records(k, self._round(k)) for k in rounds]
    )
    self._record_parts.append(new_records)
    return new_records

  def _round_records(self, k: int, metrics: Any) -> simulator.PeerRecords:
    """Returns the n records of round k, one for each peer."""
    n = self.quantum
    # The program returns integers and floats as two arrays, one row per peer.
    version, staleness, accepted = metrics.integers.T
    gap, message_norm, update_norm, mix_norm, residual = metrics.reals.T
    bytes_up, bytes_down, mix_change = self._meter.count(
      k, metrics.codes, mix_norm
    )
    # One record for each peer, in their order.
    peer = np.arange(n, dtype=np.int32)
    return simulator.PeerRecords(
      *(version, np.full(n, k + 1.0), peer, (k * n + peer).astype(np.int32)),
      *(staleness, gap, np.asarray(metrics.loss, np.float32)),
      *(accepted.astype(bool), message_norm, update_norm),
      *(bytes_up, bytes_down, residual, mix_change),
    )

  def work(self) -> list[Any]:
    """Returns no segments, because all peers work in step."""
    return []

  def _states(self) -> list[gossip.PeerState]:
    """Returns the states of all peers, as NumPy arrays."""
    # Evaluations ask several times for the states of one round.
    if self._cached_states is None or self._cached_states[0] != self.done:
      stacked = jax.device_get(self._state.peers)
      states = [
        jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(self.quantum)
      ]
      self._cached_states = self.done, states
    return self._cached_states[1]

  def _present(self):
    states = self._states()
    return states, [self._plan.peer.weight(state) for state in states]

  def _clock(self):
    return {"seconds": self._seconds}

  def _costs(self) -> dict[str, Any]:
    """Returns the columns on time and memory."""
    batch = self._plan.run.config["batch_size"] * self._plan.recipe.steps
    return {
      "mesh": meshes.text(axes(self._plan.run, self.quantum)),
      "seconds": self._seconds,
      "seconds_per_update": self._seconds * self.quantum / self.done,
      # 1e-9: the first call of `advance` may be too short to be measured.
      "examples_per_second": self.done * batch / max(self._seconds, 1e-9),
      # Parameters and optimizer state of one peer.
      "state_bytes": meshes.bytes_here(self._state),
      "skipped": 0,
    }

  def _traffic(self):
    return simulator.LinkTraffic(*self._meter.links)

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns all peers and the records."""
    tree = {"state": jax.device_get(self._state), **self._meter.pack()}
    tree["records"] = self.records()
    return self.done, tree, {"seconds": self._seconds}


def describe(result: Mapping[str, Any]) -> str:
  """Returns the result of a cell as one line."""
  return f"{peers.describe(result)}, {result['seconds']:.1f} s"
