"""Rounds of peers as one program: each index of an axis is a peer.

Inside shard_map each peer calls the functions of `asgd.gossip.peer` on its
state, as a simulator does. `jax.lax.ppermute` sends the messages: a peer sends
one to each neighbour in a round. If the mesh has the axis "island" too, the
devices of a peer divide its examples: shard_map is manual over the axis of the
peers alone, so XLA adds up the gradients of a peer's devices.

Index letters in shape comments:
  n  peers, the size of the axis
  c  turns of a round
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from asgd import base, gossip, norms
from asgd import worker as worker_lib
from asgd.parallel import memory, meshes


class Turns(NamedTuple):
  """A round of messages, in turns in which each peer sends at most one message
  and receives at most one."""

  pairs: list[list[tuple[int, int]]]  # by turn, pairs (sender, receiver)
  weights: npt.NDArray[np.float64]  # [n, c], 0 where a peer receives nothing
  # [n, c], the slot of each sender at its receiver; `Topology.slots`, one past
  # the last, where a peer receives nothing
  slots: npt.NDArray[np.int32]
  keep: npt.NDArray[np.float64]  # [n], weight of each peer's own parameters


def turns(topology: gossip.Topology, round: int) -> Turns:
  """Returns the messages of round number `round` in turns.

  A hop is the distance of two peers around the ring of peers. If all peers
  receive over the same hops, there is a turn for each hop; else there are at
  most twice as many turns as the largest number of neighbours.

  Example:
    >>> from asgd.gossip import topologies
    >>> from asgd.parallel import peers
    >>> peers.turns(topologies.ring(3), 0).pairs
    [[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
  """
  n = topology.workers
  matrix = topology.links[round % topology.period]
  # links[i, j]: peer i receives from peer j; transposed, (sender, receiver).
  links = [(int(i), int(j)) for i, j in np.argwhere(matrix.T)]
  # Links with the same hop fit in one turn: senders and receivers differ.
  links_of_hop: dict[int, list[tuple[int, int]]] = {}
  for sender, receiver in links:
    links_of_hop.setdefault((receiver - sender) % n, []).append(
      (sender, receiver)
    )
  hops = [links_of_hop[hop] for hop in sorted(links_of_hop)]
  pairs = min(hops, _first_fit(links), key=len)
  weights = np.zeros((n, len(pairs)))
  # A peer that receives nothing uses the slot after the last, with weight 0.
  slots = np.full((n, len(pairs)), topology.slots, np.int32)
  for turn, turn_pairs in enumerate(pairs):
    for sender, receiver in turn_pairs:
      weights[receiver, turn] = topology.weight(round, receiver, sender)
      slots[receiver, turn] = topology.slot(receiver, sender)
  keep = [topology.weight(round, i, i) for i in range(n)]
  return Turns(pairs, weights, slots, np.array(keep))


def _first_fit(links: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
  """Puts each link into the first turn in which its sender sends nothing and
  its receiver receives nothing, else into a new turn. There are at most twice
  as many turns as the largest number of neighbours."""
  result: list[list[tuple[int, int]]] = []
  for sender, receiver in links:
    for turn in result:
      if all(sender != s and receiver != r for s, r in turn):
        turn.append((sender, receiver))
        break
    else:
      result.append([(sender, receiver)])
  return result


class RoundState(NamedTuple):
  """The state between two rounds; each leaf is [n, ...], a row on each device.
  `round` donates it."""

  peers: gossip.PeerState
  workers: Any  # states of the workers
  # The message that a later round mixes, if peers do not send in every round
  # (`Gossip.every` > 1); else ().
  codes: tuple[Any, ...]


class RoundMetrics(NamedTuple):
  """The metrics of each peer in a round."""

  loss: jax.Array  # float[n]
  integers: jax.Array  # int32[n, 3], version, staleness, accepted
  # float32[n, 5], gap, message_norm, update_norm, mix_norm, and the RMS of the
  # codec's residual before the round
  reals: jax.Array
  codes: Any  # [n, ...], the messages, if they are compressed; else ()


class RoundProgram(NamedTuple):
  """The program of a round and the functions that go with it."""

  init: Callable[[base.Params], RoundState]
  # (state, batches [n, ...], root, round) -> (state, RoundMetrics)
  round: Callable[..., tuple[RoundState, RoundMetrics]]
  place: Callable[[base.Batch], base.Batch]  # batches [n, ...], on the devices
  # round -> (index of the topology's matrix, whether the round puts a message,
  # whether it mixes one)
  phases: Callable[[int], Any]
  # Jitted: (phases, state, batches, root, round) -> as `round`. Given shapes,
  # `init` and `place` return shapes, with which `program` can be lowered.
  program: Callable[..., tuple[RoundState, RoundMetrics]]


def message_shapes(peer: gossip.Peer, params: base.Params) -> Any:
  """Returns the shapes of a message, given parameters or their shapes."""

  def code(params):
    return peer.put(peer.init(params), jnp.float32(1), jax.random.key(0))[1]

  return jax.eval_shape(code, params)


def message_bytes(
  exchange: gossip.Gossip, server: base.Server, params: base.Params
) -> int:
  """Returns the bytes of an uncompressed message of peers that each have this
  server, given parameters or their shapes."""
  peer = gossip.make_peer(server, exchange.rule, exchange.topology.slots)
  return memory.bytes_of(message_shapes(peer, params))


class _Device(NamedTuple):
  """The functions of a round at one device, inside shard_map."""

  exchange: gossip.Gossip
  peer: gossip.Peer
  worker: base.Worker
  axis: str

  def put(self, matrix_index, state, root, k):
    """Makes the message of round k, which `mix` sends. Returns (state, code of
    the message)."""
    i = jax.lax.axis_index(self.axis)
    table = turns(self.exchange.topology, matrix_index)
    keep = jnp.asarray(table.keep)[i]
    key = gossip.message_key(root, i, k // self.exchange.every)
    return self.peer.put(state, keep, key)

  def mix(self, matrix_index, state, code):
    """Sends this peer's message, and mixes the messages that it receives."""
    i = jax.lax.axis_index(self.axis)
    table = turns(self.exchange.topology, matrix_index)
    # One message in each turn. A peer that receives no message gets zeros, with
    # the weight 0.
    codes = tuple(
      jax.tree.map(
        lambda x, p=pairs: jax.lax.ppermute(x, self.axis, p), code
      )
      for pairs in table.pairs
    )
    weights, slots = jnp.asarray(table.weights)[i], jnp.asarray(table.slots)[i]
    return self.peer.mix(state, codes, weights, slots)

  def round(self, phases, state, batch, root, k):
    """Computes round k. `phases` is (index of the topology's matrix for its
    message, whether the round puts the message, whether it mixes it)."""
    (matrix_index, puts, mixes), exchange = phases, self.exchange
    peer = self.peer
    # shard_map hands each device a row, [1, ...].
    state, batch = jax.tree.map(lambda x: x[0], (state, batch))
    peer_state, i = state.peers, jax.lax.axis_index(self.axis)
    # [1] The job starts; its ticket has the peer's present parameters.
    job = peer.send(peer_state, i)
    code = None if puts else state.codes[0]
    # [2] Put the message now: XLA may overlap its transfer and the job...
    if puts and exchange.put_first:
      peer_state, code = self.put(matrix_index, peer_state, root, k)
    # [3] The job, with the number and key that the simulator gives it.
    n = exchange.topology.workers
    key = worker_lib.job_key(root, i, k * n + i)
    workers, message, metrics = self.worker.work(
      state.workers, job.ticket, batch, key
    )
    residual = peer.residual(peer_state)
    # [4] The peer's own update.
    peer_state, report = peer.receive(peer_state, job, message)
    # [5] ... or put the parameters after the update.
    if puts and not exchange.put_first:
      peer_state, code = self.put(matrix_index, peer_state, root, k)
    # [6] Mix the message that this round put, or (`every`) an earlier round.
    params_before = peer_state.server.params
    if mixes:
      peer_state = self.mix(matrix_index, peer_state, code)
    mix_norm = norms.gap(peer_state.server.params, params_before)
    integers = peer_state.server.version, report.staleness, report.accepted
    floats = (
      *(report.gap, report.message_norm, report.update_norm),
      *(mix_norm, residual),
    )
    metrics_row = RoundMetrics(
      metrics.loss,
      jnp.stack([jnp.asarray(x, jnp.int32) for x in integers]),
      jnp.stack([x.astype(jnp.float32) for x in floats]),
      code if exchange.compressed else (),
    )
    codes = () if exchange.every == 1 else (code,)
    new_state = RoundState(peer_state, workers, codes)
    return jax.tree.map(lambda x: x[None], (new_state, metrics_row))


def make_rounds(
  exchange: gossip.Gossip,
  server: base.Server,
  worker: base.Worker,
  mesh: Mesh,
  *,
  axis: str = meshes.DATA,
  steps: int = 1,
) -> RoundProgram:
  """Makes the program of a round. It computes the same numbers as the simulator
  with `Gossip.trace`, except that it adds messages up in another order.

  Args:
    exchange: topology and rule of the peers, in rounds.
    server: the server in each peer; make it of the algorithm that
      `exchange.rule.wrap` returns.
    worker: computes a message; the job of peer i in round k is k n + i.
    mesh: with an axis of size n, and perhaps the axis "island".
    axis: the name of the peers' axis.
    steps: batches in a job. Above 1 a peer's batch is [steps, B, ...].

  Raises:
    ValueError: for peers without rounds (`Gossip.order`), and for an axis with
      more or fewer than n devices.
  """
  n = exchange.topology.workers
  if exchange.order != gossip.ROUNDS:
    raise ValueError(
      f"peers in the order {exchange.order!r} have no rounds, but all peers of"
      " a mesh compute in rounds: use engine simulate, or another recipe"
    )
  if meshes.size(mesh, axis) != n:
    raise ValueError(
      f"{n} peers need the size {n} of the axis {axis!r}, which has"
      f" {meshes.size(mesh, axis)}"
    )
  # One more slot, for turns in which a peer receives nothing.
  peer = gossip.make_peer(server, exchange.rule, exchange.topology.slots + 1)
  device = _Device(exchange, peer, worker, axis)
  row_sharding = NamedSharding(mesh, P(axis))

  def first_state(params):
    state = peer.init(params)
    zeros = optax.tree.zeros_like(message_shapes(peer, params))
    codes = () if exchange.every == 1 else (zeros,)
    row = RoundState(state, worker.init(state.server.params), codes)
    return meshes.repeat(row, n)  # all peers have the same first state

  # One program for each matrix of the topology: the pairs are constants of the
  # program.
  @partial(jax.jit, static_argnums=0, donate_argnums=1)
  def program(phases, state, batch, root, k):
    return jax.shard_map(
      partial(device.round, phases),
      mesh=mesh,
      in_specs=(P(axis), P(axis), P(), P()),
      out_specs=P(axis),
      axis_names={axis},
      check_vma=False,
    )(state, batch, root, k)

  def phases_of(k):
    # Message m is put in round m * every, and uses matrix m of the topology.
    every = exchange.every
    topology = exchange.topology
    matrix_index = topology.first_rounds[k // every % topology.period]
    return matrix_index, k % every == 0, (k + 1) % every == 0

  def run_round(state, batch, root, k):
    return program(phases_of(k), state, batch, root, jnp.int32(k))

  batch_spec = P(axis)
  if meshes.ISLAND in mesh.shape:
    batch_spec = P(axis, *(() if steps == 1 else (None,)), meshes.ISLAND)
  place = partial(meshes.place, mesh=mesh, specs=batch_spec)
  jitted_init = jax.jit(first_state, out_shardings=row_sharding)

  def init(params):
    if meshes.are_shapes(params):
      return meshes.place(jax.eval_shape(first_state, params), mesh, P(axis))
    return jitted_init(params)

  return RoundProgram(init, run_round, place, phases_of, program)
