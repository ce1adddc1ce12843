"""Properties that tests of BlueFog and hivemind hold, of our peers.

BlueFog (`test/torch_win_ops_test.py`, `torch_ops_test.py`): a window of a peer
has a buffer for each neighbour, with a version that counts the puts that the
peer has not mixed yet. Here these are the messages that it has not taken, or
taken and not mixed. hivemind (`tests/test_averaging.py`): groups of peers
average.
"""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import peer_kit
import pytest

import asgd
from asgd import base
from asgd.gossip import topologies
from asgd.orders import durations
from asgd.orders import trace as trace_lib

pytestmark = pytest.mark.usefixtures("float64")


def averaging(recipe, starts, rounds):
  """Returns the peers of a recipe, from different first parameters, and their
  trace."""
  trace = recipe.gossip.trace(
    durations.constant(), messages=rounds * recipe.workers
  )
  start = np.zeros_like(starts[0])
  batch = lambda worker, job: start  # noqa: E731
  parts = trace, start, peer_kit.still, batch, starts
  return peer_kit.peers(recipe, *parts), trace


def after_rounds(recipe, starts, rounds):
  """Yields the parameters of all peers after each round."""
  peers, trace = averaging(recipe, starts, rounds)
  for end in peer_kit.ends_of_rounds(trace, recipe.workers):
    peers.run(end)
    yield np.stack([state.server.params for state in peers.states])


def sources(rank, n, hops=None):
  """Returns the ranks from which a rank receives in BlueFog's exponential
  graph."""
  degree = int(np.ceil(np.log2(n)))
  return [(rank - 2**i) % n for i in (range(degree) if hops is None else hops)]


@pytest.mark.parametrize("n", [4, 6, 8])
def test_bluefog_win_put_on_the_exp2_graph(n):
  # (degree + 1) mean = rank + sum_i (rank - 2^i) mod n
  recipe = asgd.d_psgd(0.1, n, topology="exponential")
  ranks = np.arange(float(n))[:, None]
  (after,) = after_rounds(recipe, ranks, 1)
  for rank in range(n):
    assert recipe.gossip.topology.neighbours(rank) == sorted(sources(rank, n))
    degree = len(sources(rank, n))
    assert (degree + 1) * after[rank, 0] == pytest.approx(
      rank + sum(sources(rank, n)), abs=1e-12
    )


@pytest.mark.parametrize("n", [3, 5, 7, 12, 16])
def test_bluefog_exp2_weights_of_any_number_of_ranks(n):
  (weights,) = topologies.exponential(n).matrices
  expected = np.zeros((n, n))
  for rank in range(n):
    expected[rank, [rank, *sources(rank, n)]] = 1 / (len(sources(rank, n)) + 1)
  np.testing.assert_allclose(weights, expected, atol=1e-15)


def test_bluefog_dynamic_one_peer_exp2():
  recipe = asgd.d_psgd(0.1, 8, topology="one_peer_exponential")
  expected = np.arange(8.0)
  for k, after in enumerate(after_rounds(recipe, expected[:, None], 4)):
    heard = [sources(rank, 8, [k % 3])[0] for rank in range(8)]
    expected = (expected + expected[heard]) / 2
    np.testing.assert_allclose(after[:, 0], expected, atol=1e-15)


def test_bluefog_star_graph_weights():
  # The centre's weight for each peer is 1 / n; other peers give the centre 1 /
  # n and themselves the rest.
  (weights,) = topologies.star(8).matrices
  expected = np.diag([1 / 8] + [7 / 8] * 7)
  expected[0, 1:] = expected[1:, 0] = 1 / 8
  np.testing.assert_allclose(weights, expected, atol=1e-15)


def versions_at_mixes(trace, n):
  """Yields (peer, versions of its neighbours' buffers) before each mix, and
  asserts that a mix takes all."""
  unread = np.zeros((n, n), int)  # by receiver and sender
  put = np.zeros(n, int)
  for event in trace_lib.events(trace):
    i = event.worker
    if event.action == base.PUT:
      put[i] += 1
    elif event.action == base.TAKE:
      assert event.seq < put[event.job]  # of what was put
      unread[i, event.job] += 1
    elif event.action == base.MIX:
      yield i, unread[i].copy()
      unread[i] = 0


@pytest.mark.parametrize("adapt_first", [False, True])
def test_bluefog_window_versions_with_win_put(adapt_first):
  # 0 at first, 1 of each neighbour after a put, 0 after an update.
  n = 8
  recipe = asgd.d_psgd(
    0.1, n, topology="exponential", adapt_first=adapt_first
  )
  peers, trace = averaging(recipe, np.zeros((n, 1)), 3)
  mixes = 0
  for peer, versions in versions_at_mixes(trace, n):
    expected = np.isin(np.arange(n), sources(peer, n))
    assert versions.tolist() == expected.astype(int).tolist()
    mixes += 1
  assert mixes == 3 * n
  peers.run(len(trace.time))
  assert not peers.codes  # nothing is left unread
  taken = peers.traffic.messages
  assert taken.tolist() == (3 * recipe.gossip.topology.union).tolist()
  assert [int(state.mixes) for state in peers.states] == [3] * n


def test_bluefog_window_versions_of_ad_psgd():
  recipe = asgd.ad_psgd(0.1, 8, topology="hypercube")
  _, trace = averaging(recipe, np.zeros((8, 1)), 4)
  links = recipe.gossip.topology.union
  for peer, versions in versions_at_mixes(trace, 8):
    assert versions.sum() == 1 and links[peer, versions.argmax()]


def test_bluefog_associated_p_of_one_that_sends():
  # One rank keeps half of its weight and adds half of it to two others.
  peer = asgd.sgp(0.1, 4).peer()
  sender, other = peer.init(jnp.float64(3)), peer.init(jnp.float64(5))
  sender, code = peer.put(sender, np.float64(0.5), jax.random.key(0))
  receiver = peer.mix(other, (code,), np.array([0.5]), np.array([0]))
  weights = [float(peer.weight(state)) for state in (sender, receiver, other)]
  assert weights == [0.5, 1.5, 1.0]
  # x = w z: 3 / 2, 5 + 3 / 2 and 5
  states = sender, receiver, other
  values = [float(s.rule_state * s.server.params) for s in states]
  np.testing.assert_allclose(values, [1.5, 6.5, 5.0], atol=1e-15)


def test_bluefog_associated_p_is_what_a_tensor_of_ones_becomes():
  rng, n = np.random.default_rng(0), 6
  links = topologies.exponential(n).union | np.eye(n, dtype=bool)
  weights = rng.random((10, n, n)) * links
  weights /= weights.sum(1, keepdims=True)  # each gives all that it has
  recipe = asgd.sgp(
    0.1, n, topology={"name": "matrix", "weights": weights}
  )
  peers, trace = averaging(recipe, np.ones((n, 2)), 10)
  peers.run(len(trace.time))
  mass = np.array([float(state.rule_state) for state in peers.states])
  expected = np.ones(n)
  for matrix in weights:
    expected = matrix @ expected
  np.testing.assert_allclose(mass, expected, atol=1e-14)
  assert np.ptp(mass) > 0.1 and mass.sum() == pytest.approx(n)
  for state in peers.states:
    np.testing.assert_allclose(state.server.params, 1, atol=1e-14)


def test_hivemind_allreduce_grid():
  # Pairs along each side of a grid of 2 x 2 x 2.
  topology = {"name": "hypercube", "one_peer": True}
  recipe = asgd.d_psgd(0.1, 8, topology=topology)
  before = kit.normal(8, 3)
  assert (before.std(0) > 0.1).all()
  for k, after in enumerate(after_rounds(recipe, before, 5)):
    assert (recipe.gossip.topology.links[k % 3].sum(1) == 1).all()
    np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=0, atol=1e-6)
    assert (after.std(0) <= before.std(0) + 1e-15).all()
    if k >= 3:  # from the fourth round on
      np.testing.assert_allclose(after.std(0), 0, atol=1e-6)
    before = after


def test_hivemind_allreduce_weighted():
  # On the full graph push-sum has the mean by weight after a round.
  values, mass = kit.normal(4, 5), np.array([0.01, 3.0, 7.5, 10.0])
  recipe = asgd.sgp(0.1, 4, topology="full")
  peers, trace = averaging(recipe, values, 1)
  for peer, w in zip(peers.peers, mass, strict=True):
    peer.state = peer.state._replace(rule_state=jnp.asarray(w))
  peers.run(len(trace.time))
  for state in peers.states:
    expected = np.average(values, axis=0, weights=mass)
    np.testing.assert_allclose(state.server.params, expected, atol=1e-14)
