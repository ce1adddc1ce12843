"""Rounds of peers as one program come to what the simulator comes to."""

import jax
import kit
import numpy as np
import pytest
from linear import quadratic

import asgd
from asgd import simulator, stacking
from asgd.gossip import topologies
from asgd.orders import durations
from asgd.parallel import meshes, peers

pytestmark = pytest.mark.usefixtures("float64")

N, ROUNDS = 4, 5
WANTED = kit.normal(N, 3)


def wanted(worker, job):
  return WANTED[worker] + 0.1 * np.cos(job)


@pytest.mark.parametrize(
  "recipe",
  [
    asgd.d_psgd(0.1, N, topology="star", momentum=0.5),
    asgd.sgp(0.1, N, topology="random_digraph", overlap=1),
    asgd.sgp(0.1, N, overlap=2),
    asgd.choco_sgd(
      *(0.1, N),
      gamma=0.5,
      topology="star",
      codec={"name": "top_k", "density": 0.4},
    ),
    asgd.local_d_psgd(0.1, N, steps=2, topology="exponential"),
    asgd.threshold_sharing(0.1, N),
    asgd.gradient_tracking(0.1, N, momentum=0.5),
  ],
  ids=["d_psgd", "sgp", "sgp_2", "choco", "local_d_psgd", "threshold"]
  + ["tracking"],
)
def test_a_mesh_comes_to_what_the_simulator_comes_to(recipe):
  batch = stacking.job_batches(wanted, recipe.steps)
  start, root = np.zeros(3), jax.random.key(0)
  worker = recipe.make_worker(quadratic)
  trace = recipe.gossip.trace(durations.homogeneous(), messages=ROUNDS * N)
  simulated = simulator.Peers(
    recipe.gossip, recipe.peer(), worker, start, trace, batch=batch, root=root
  )
  rows = simulated.run(len(trace.time))
  rounds = peers.make_rounds(
    recipe.gossip, recipe.server(), worker, meshes.make({"data": N})
  )
  state = rounds.init(start)
  losses, kept = [], []
  for k in range(ROUNDS):
    batches = stacking.stack([batch(i, k * N + i) for i in range(N)])
    state, told = rounds.round(state, rounds.place(batches), root, k)
    losses.append(told.loss)
    kept.append(told.reals[:, -1])
  for i, expected in enumerate(simulated.states):
    mine = jax.tree.map(lambda x, i=i: x[i], state.peers)
    kit.close(mine.server, expected.server, atol=1e-14)
    assert mine.mixes == expected.mixes
  for mine, column in (losses, rows.loss), (kept, rows.residual_norm):
    by_job = column[np.argsort(rows.job)].reshape(ROUNDS, N)
    np.testing.assert_allclose(np.array(mine), by_job, rtol=1e-6)
  size = peers.message_bytes(recipe.gossip, recipe.server(), start)
  if not recipe.gossip.compressed:
    assert simulated.traffic.nbytes.sum() == (
      simulated.traffic.messages.sum() * size
    )


@pytest.mark.parametrize("name", sorted(topologies.TOPOLOGIES))
def test_turns_are_partial_permutations_that_have_every_link_once(name):
  options = {
    "graph": {"edges": [(i, j) for j in range(8) for i in range(0, j, 2)]},
    "matrix": {"weights": np.full((8, 8), 1 / 8).tolist()},
  }
  topology = topologies.build({"name": name, **options.get(name, {})}, 8)
  for k in range(topology.period):
    some = peers.turns(topology, k)
    links = sorted(pair for turn in some.pairs for pair in turn)
    assert links == sorted(
      (int(j), int(i)) for i, j in np.argwhere(topology.links[k])
    )
    for number, turn in enumerate(some.pairs):
      senders, receivers = map(set, zip(*turn, strict=True))
      assert len(senders) == len(receivers) == len(turn)
      for i in range(8):
        hears = [sender for sender, receiver in turn if receiver == i]
        weight = topology.weight(k, i, hears[0]) if hears else 0
        slot = topology.slot(i, hears[0]) if hears else topology.slots
        assert some.weights[i, number] == weight
        assert some.slots[i, number] == slot
    most = max(topology.links[k].sum(0).max(), topology.links[k].sum(1).max())
    assert len(some.pairs) <= 2 * most


def test_what_has_no_rounds_or_other_devices_is_refused():
  mesh = meshes.make({"data": N})
  pairs = asgd.ad_psgd(0.1, N)
  worker = pairs.make_worker(quadratic)
  with pytest.raises(ValueError, match="order 'pairs' have no rounds"):
    peers.make_rounds(pairs.gossip, pairs.server(), worker, mesh)
  rounds = asgd.d_psgd(0.1, 8)
  with pytest.raises(ValueError, match="8 peers need the size 8 .* has 4"):
    peers.make_rounds(rounds.gossip, rounds.server(), worker, mesh)
