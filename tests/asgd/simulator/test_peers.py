"""What peers without a server compute, against what is known of it."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import peer_kit
import pytest

import asgd
from asgd import base, compression, gossip, orders, simulator, stacking
from asgd.gossip import topologies
from asgd.orders import durations
from asgd.orders import trace as trace_lib

pytestmark = pytest.mark.usefixtures("float64")

N = 4
ROOT = jax.random.key(0)
START = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.array([0.5])}
# What each peer's loss wants its parameters to be.
WANTED = kit.normal(8, 7)


def loss(params, batch):
  flat = jnp.concatenate([params["w"].ravel(), params["b"]])
  return 0.5 * jnp.sum((flat - batch) ** 2)


def flat(params):
  return np.concatenate([np.ravel(params["w"]), params["b"]])


def wanted(worker, job):
  return WANTED[worker] + 0.1 * np.cos(job)


def peers(recipe, trace, *, batch=wanted, starts=None, loss=loss):
  """Returns the peers of a recipe before the first row of a trace."""
  rows = () if starts is None else starts
  trees = [{"w": row[:6].reshape(2, 3), "b": row[6:]} for row in rows]
  result = peer_kit.peers(recipe, trace, START, loss, batch, trees)
  for peer, params in zip(result.peers, trees, strict=False):
    own = recipe.gossip.rule.init(params, recipe.gossip.topology.slots)
    peer.state = peer.state._replace(rule_state=own)
  return result


def trace_of(recipe, rounds=6, clock=None, seed=0):
  clock = clock or durations.constant()
  trace = recipe.gossip.trace(
    clock, messages=rounds * recipe.workers, seed=seed
  )
  orders.check(trace)
  return trace


def run(recipe, rounds=6, **options):
  """Returns the parameters of all peers, [n, 7], after some rounds."""
  trace = trace_of(recipe, rounds)
  result = peers(recipe, trace, **options)
  result.run(len(trace.time))
  return params_of(result)


def params_of(result):
  return np.stack([flat(state.server.params) for state in result.states])


def with_server(recipe, rounds=6):
  """Returns the parameters of a recipe with a server, after some rounds."""
  trace = orders.build(
    recipe.order, durations.constant(), workers=N, messages=rounds * N
  )
  host = simulator.make_host(recipe.server(), recipe.make_worker(loss))
  simulation, _ = simulator.run_whole(
    host,
    START,
    N,
    trace,
    batch=stacking.job_batches(wanted, recipe.steps),
    root=ROOT,
  )
  return flat(simulation.server.params)


def assert_all(actual, expected, atol=1e-13):
  np.testing.assert_allclose(
    actual, np.broadcast_to(expected, np.shape(actual)), rtol=0, atol=atol
  )


# Peers against servers.


@pytest.mark.parametrize(
  "recipe",
  [
    asgd.d_psgd(0.1, workers=N, topology="full", adapt_first=True),
    asgd.sgp(0.1, workers=N, topology="full"),
    asgd.choco_sgd(0.1, workers=N, topology="full"),
    asgd.threshold_sharing(0.1, workers=N),
  ],
  ids=["d_psgd", "sgp", "choco_sgd", "threshold_sharing"],
)
def test_on_the_full_graph_it_is_all_reduce_sgd(recipe):
  assert_all(run(recipe), with_server(asgd.ssgd(0.1, workers=N)))


def test_peers_that_add_all_updates_at_once_are_asgd_with_a_server():
  # Of jobs that end at the same time both apply them in the same order.
  recipe = asgd.async_threshold_sharing(0.1, workers=N)
  assert_all(run(recipe), with_server(asgd.asgd(0.1, workers=N)))


def test_local_sgd_on_the_full_graph_is_local_sgd_with_a_server():
  options = {"steps": 3, "momentum": 0.5}
  recipe = asgd.local_d_psgd(0.1, workers=N, topology="full", **options)
  other = asgd.model_averaging(0.1, workers=N, **options)
  assert_all(run(recipe), with_server(other))


# Peers against peers.


@pytest.mark.parametrize(
  "recipe",
  [
    asgd.sgp(0.1, workers=N, topology="exponential", momentum=0.5),
    asgd.choco_sgd(0.1, workers=N, topology="exponential", momentum=0.5),
  ],
  ids=["sgp", "choco_sgd"],
)
def test_it_is_d_psgd_that_adapts_first(recipe):
  # On a regular directed graph SGP's weights stay 1; CHOCO with the identity
  # codec and gamma 1 puts what is public.
  other = asgd.d_psgd(
    *(0.1, N), topology="exponential", momentum=0.5, adapt_first=True
  )
  assert_all(run(recipe), run(other))


@pytest.mark.parametrize("adapt_first", [False, True])
def test_d_psgd_is_its_equation(adapt_first):
  recipe = asgd.d_psgd(0.1, workers=8, adapt_first=adapt_first)
  (weights,) = recipe.gossip.topology.matrices
  x = np.broadcast_to(flat(START), (8, 7))
  for k in range(5):
    gradient = x - np.stack([wanted(i, k * 8 + i) for i in range(8)])
    if adapt_first:
      x = weights @ (x - 0.1 * gradient)
    else:
      x = weights @ x - 0.1 * gradient
  assert_all(run(recipe, 5), x)


@pytest.mark.parametrize(
  "recipe",
  [
    asgd.sgp(0.1, workers=6, topology="random_digraph"),
    asgd.sgp(0.1, workers=8, momentum=0.5),
  ],
  ids=["irregular", "one peer"],
)
def test_sgp_is_its_equation(recipe):
  n, matrices = recipe.workers, recipe.gossip.topology.matrices
  x, w = np.broadcast_to(flat(START), (n, 7)), np.ones((n, 1))
  velocity, momentum = 0.0, 0.5 if n == 8 else 0.0
  for k in range(5):
    batch = np.stack([wanted(i, k * n + i) for i in range(n)])
    velocity = momentum * velocity + (x / w - batch)
    weights = matrices[k % len(matrices)]
    x, w = weights @ (x - 0.1 * velocity), weights @ w
  assert n == 8 or np.ptp(w) > 0.1  # of an irregular graph
  assert_all(run(recipe, 5), x / w)


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("topology", ["random_digraph", "one_peer_exponential"])
def test_overlap_sgp_puts_no_message_before_the_last_was_mixed(
  topology, overlap
):
  # As by the authors' code: a put before the job, and the next one after the
  # messages of the neighbours came, `overlap` rounds later.
  recipe = asgd.sgp(
    *(0.1, 6), topology=topology, overlap=overlap, momentum=0.5
  )
  trace, matrices = trace_of(recipe, rounds=7), recipe.gossip.topology.matrices
  for peer in range(6):
    actions = trace.action[trace.worker == peer]
    actions = actions[np.isin(actions, [base.PUT, base.MIX])].tolist()
    assert actions == ([base.PUT, base.MIX] * 7)[: len(actions)]
    assert actions.count(base.PUT) == -(-7 // overlap)
  x, w, velocity = np.broadcast_to(flat(START), (6, 7)), np.ones((6, 1)), 0.0
  for k in range(7):
    weights = matrices[k // overlap % len(matrices)]
    own = np.diag(weights)[:, None]
    if k % overlap == 0:
      others = weights - np.diag(own[:, 0])
      heard, mass = others @ x, others @ w
      x, w = own * x, own * w
    batch = np.stack([wanted(i, k * 6 + i) for i in range(6)])
    velocity = 0.5 * velocity + (x / w - batch)
    x = x - 0.1 * velocity
    if (k + 1) % overlap == 0:
      x, w = x + heard, w + mass
  assert_all(run(recipe, 7), x / w)


def test_choco_is_its_equation_with_any_codec():
  def largest(tree, key):
    del key
    return jax.tree.map(
      lambda x: jnp.where(jnp.abs(x) == jnp.abs(x).max(), x, 0), tree
    )

  codec = compression.Codec(
    lambda like: (),
    lambda state, tree, key: (largest(tree, key), state),
    lambda code: code,
  )
  recipe = asgd.choco_sgd(0.1, workers=N, codec=codec, gamma=0.3)
  (weights,) = recipe.gossip.topology.matrices
  x = np.broadcast_to(flat(START), (N, 7))
  public = x.copy()
  for k in range(5):
    x = x - 0.1 * (x - np.stack([wanted(i, k * N + i) for i in range(N)]))
    for i in range(N):
      # Of the leaves w and b, the element that is furthest away.
      for leaf in (slice(0, 6), slice(6, 7)):
        missing = (x - public)[i, leaf]
        at = np.argmax(np.abs(missing))
        public[i, leaf][at] += missing[at]
    x = x + 0.3 * (weights @ public - public)
  assert_all(run(recipe, 5), x)


def test_d2_converges_where_the_data_of_peers_differ_and_d_psgd_does_not():
  def same(worker, job):
    del job
    return WANTED[worker]

  mean = WANTED[:5].mean(0)
  d2 = run(asgd.d2(0.3, workers=5, lazy=False), rounds=50, batch=same)
  d_psgd = run(asgd.d_psgd(0.3, workers=5), rounds=50, batch=same)
  assert_all(d2, mean, atol=1e-6)
  assert np.abs(d_psgd - mean).max() > 0.1


def test_gradient_tracking_by_hand():
  # Two peers average; the loss is (x - wanted)^2 / 2, so g_i = x_i - wanted_i.
  # Round 1: g = y = (-2, -6); x = (1, 3), then 2; y mixes to -4.
  # Round 2: g = (0, -4), y = -4 + (2, 2) = (-2, -2); x = 3; y mixes to -2.
  # Round 3: g = (1, -3), y = -2 + (1, 1) = (-1, -1); x = 3.5.
  wanted = np.array([[2.0], [6.0]]) * np.ones(7)
  recipe = asgd.gradient_tracking(0.5, workers=2, topology="full")
  starts = np.zeros((2, 7))
  for rounds, expected in ((1, 2.0), (2, 3.0), (3, 3.5)):
    found = run(
      recipe, rounds, starts=starts, batch=lambda worker, job: wanted[worker]
    )
    assert_all(found, np.full(7, expected))


def test_gradient_tracking_converges_where_the_data_of_peers_differ():
  recipe = asgd.gradient_tracking(0.3, workers=5)
  found = run(recipe, rounds=80, batch=lambda worker, job: WANTED[worker])
  assert_all(found, WANTED[:5].mean(0), atol=1e-6)


# Averaging.


def test_one_peer_exponential_averages_exactly_after_log2_n_rounds():
  starts = np.random.default_rng(0).integers(-99, 99, (8, 7)).astype(float)
  for make in (asgd.sgp, asgd.d_psgd):
    recipe = make(0.1, workers=8, topology="one_peer_exponential")
    before = run(recipe, 2, starts=starts, loss=peer_kit.still)
    assert (before != starts.mean(0)).any()
    after = run(recipe, 3, starts=starts, loss=peer_kit.still)
    assert (after == starts.mean(0)).all()


@pytest.mark.parametrize("name", ["ring", "star", "hypercube", "erdos_renyi"])
def test_consensus_follows_lambda_2(name):
  # What peers want differs along the second eigenvector: a peer's distance to
  # the mean is e_k = eta (1 - q^k) / (1 - q) of it, q = lambda_2 - eta.
  recipe = asgd.d_psgd(0.1, workers=8, topology=name)
  values, vectors = np.linalg.eigh(recipe.gossip.topology.matrices[0])
  second = vectors[:, -2]
  if abs(values[0]) > values[-2]:
    pytest.fail("lambda_2 of this graph is negative")

  def along(worker, job):
    del job
    return np.full(7, second[worker])

  lambda_2 = topologies.second_eigenvalue(recipe.gossip.topology)
  q, states = lambda_2 - 0.1, None
  for k in (1, 2, 5, 20):
    states = run(recipe, k, batch=along)
    apart = states - states.mean(0)
    expected = 0.1 * (1 - q**k) / (1 - q) * second[:, None]
    assert_all(apart, np.broadcast_to(expected, (8, 7)))


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(
  "topology",
  [
    "random_digraph",
    {"name": "random_digraph", "degree": 4, "seed": 3},
    {"name": "star", "weights": "uniform"},
    "one_peer_exponential",
    "exponential",
  ],
  ids=str,
)
def test_push_sum_conserves_mass_on_every_digraph(topology, overlap):
  recipe = asgd.sgp(0.1, workers=6, topology=topology, overlap=overlap)
  starts = kit.normal(6, 7)
  trace = trace_of(recipe, rounds=9)
  result = peers(recipe, trace, starts=starts, loss=peer_kit.still)
  # Until the sends of round 7; with overlap messages were put in round 6.
  result.run(int(np.flatnonzero(trace.job == 42)[0]))
  mass = sum(float(state.rule_state) for state in result.states)
  total = sum(
    float(state.rule_state) * flat(state.server.params)
    for state in result.states
  )
  on_their_way = 0
  for (sender, seq), (params, weight) in result.codes.items():
    for receiver in range(6):
      if receiver != sender:
        part = recipe.gossip.weight(seq, receiver, sender) * float(weight)
        mass, total = mass + part, total + part * flat(params)
    on_their_way += 1
  assert on_their_way == (6 if overlap else 0)
  np.testing.assert_allclose(mass, 6, rtol=1e-14)
  np.testing.assert_allclose(total, starts.sum(0), rtol=0, atol=1e-13)


def test_the_mean_is_conserved_by_the_averages_of_ad_psgd():
  recipe = asgd.ad_psgd(0.1, workers=6, topology="random_regular")
  starts = kit.normal(6, 7)
  trace = trace_of(recipe, clock=durations.heterogeneous())
  result = peers(recipe, trace, starts=starts, loss=peer_kit.still)
  before = np.inf
  mixes = np.flatnonzero(trace.action == base.MIX)[1::2] + 1  # both have mixed
  for end in mixes.tolist():
    result.run(end)
    now = params_of(result)
    np.testing.assert_allclose(now.mean(0), starts.mean(0), atol=1e-14)
    spread = np.square(now - now.mean(0)).sum()
    assert spread <= before
    before = spread


def test_a_pair_averages_and_then_the_stale_gradient_is_applied():
  recipe = asgd.ad_psgd(0.5, workers=2)
  # Peer 1 is slow; peer 0 ends its first job at 1.
  clock = durations.constant(slowdown=[1, 9])
  trace = recipe.gossip.trace(clock, messages=2)
  starts = np.stack([np.full(7, 1.0), np.full(7, 3.0)])
  result = peers(recipe, trace, starts=starts, batch=lambda w, j: np.zeros(7))
  rows = result.run(len(trace.time))
  # (1 + 3) / 2 - 0.5 * 1; then (1.5 + 2) / 2 - 0.5 * 1.5, and 1 is at 1.75.
  assert_all(params_of(result), [[1.0] * 7, [1.75] * 7], atol=0)
  assert rows.staleness.tolist() == [1, 1]
  np.testing.assert_allclose(rows.gap, [1.0, 0.25])
  assert rows.bytes_down.tolist() == rows.bytes_up.tolist() == [56, 56]


def test_updates_of_half_are_added_as_they_arrive():
  codec = {"name": "threshold", "tau": 0.5}
  recipe = asgd.async_threshold_sharing(1.0, workers=2, codec=codec)
  # Peer 0 ends jobs at 2 and 4, peer 1 ends its first one at 3.
  trace = recipe.gossip.trace(
    durations.constant(slowdown=[2, 3]), messages=3
  )
  assert orders.check(trace) == 2
  gradients = [-0.75, 1.25, -0.375]

  def linear(params, batch):
    return jnp.sum(params["w"] * batch[0]) + jnp.sum(params["b"] * batch[0])

  result = peers(
    *(recipe, trace), loss=linear,
    starts=np.zeros((2, 7)), batch=lambda w, j: np.full(1, gradients[j]),
  )
  # u = 0.75: 0.5 is added, 0.25 kept. u = -1.25: -0.5, and -0.75 kept.
  # u = 0.375 + 0.25: 0.5, and 0.125 kept.
  for job, (expected, left) in enumerate(
    [(0.5, (0.25, 0.0)), (0.0, (0.25, -0.75)), (0.5, (0.125, -0.75))]
  ):
    end = np.flatnonzero(trace.action == base.RECEIVE)
    end = [*end.tolist(), len(trace.time)][job + 1]
    rows = result.run(end)
    assert_all(params_of(result), expected, atol=0)
    residuals = [state.rule_state.codec.residual for state in result.states]
    assert [float(r["b"][0]) for r in residuals] == list(left)
    # Each job but the first began before another peer's message arrived.
    assert rows.staleness.tolist() == [min(job, 1)]


def test_a_transform_that_reads_a_delay_is_told_how_often_the_peer_mixed():
  recipe = asgd.ad_psgd(0.5, workers=2)
  recipe = recipe._replace(at_server=asgd.scale_by_staleness())
  # Of three mixes in its first job, peer 1 is told at its end.
  clock = durations.constant(slowdown=[1, 2.5])
  trace = recipe.gossip.trace(clock, messages=3)
  result = peers(recipe, trace, batch=lambda w, j: np.zeros(7))
  rows = result.run(len(trace.time))
  assert rows.worker.tolist() == [0, 0, 1]
  assert rows.staleness.tolist() == [1, 1, 3]
  np.testing.assert_allclose(
    rows.update_norm, 0.5 * rows.message_norm / [1, 1, 3], rtol=1e-6
  )


# Codecs that send less.


def test_what_was_shared_and_what_is_left_is_the_sum_of_updates():
  def rounded(tree):
    return jax.tree.map(lambda x: jnp.round(x * 4) / 4, tree)

  inner = compression.Codec(
    lambda like: (),
    lambda state, tree, key: (rounded(tree), state),
    lambda code: code,
  )
  codec = compression.error_feedback(inner)
  recipe = asgd.threshold_sharing(1.0, workers=N, codec=codec)
  trace = trace_of(recipe, rounds=4)

  def linear(params, batch):  # the gradient is the batch
    return loss(params, batch) - loss(params, 0 * batch)

  result = peers(recipe, trace, loss=linear)
  result.run(len(trace.time))
  gradients = [wanted(job % N, job) for job in range(4 * N)]
  left = [flat(state.rule_state.codec.residual) for state in result.states]
  for now in params_of(result):
    moved = (now - flat(START)) * N
    np.testing.assert_allclose(
      moved + sum(left), np.sum(gradients, 0), atol=1e-13
    )
    assert_all(moved * 4, np.round(moved * 4), atol=1e-12)


CODEC = {"name": "top_k", "density": 0.3}


@pytest.mark.parametrize("name", ["choco_sgd", "threshold_sharing"])
def test_records_have_what_was_kept_back_of_all_before(name):
  options = {"gamma": 0.5} if name == "choco_sgd" else {}
  recipe = getattr(asgd, name)(0.1, workers=N, codec=CODEC, **options)
  trace = trace_of(recipe, rounds=3)
  result = peers(recipe, trace)
  for row in np.flatnonzero(trace.action == base.RECEIVE).tolist():
    result.run(row)
    state = result.states[trace.worker[row]]
    kept = flat(state.server.params)
    if name == "choco_sgd":
      kept = kept - flat(state.rule_state.public)
    else:
      kept = flat(state.rule_state.codec.residual)
    (norm,) = result.run(row + 1).residual_norm
    np.testing.assert_allclose(norm, np.sqrt(np.mean(kept**2)), rtol=1e-6)
  assert norm > 0


# Traces.

RECIPES = {
  "d_psgd": asgd.d_psgd(0.1, workers=N, momentum=0.5),
  "ad_psgd": asgd.ad_psgd(0.1, workers=N, momentum=0.5),
  "sgp": asgd.sgp(0.1, workers=N, topology="random_digraph", overlap=2),
  "choco_sgd": asgd.choco_sgd(0.1, workers=N, gamma=0.5),
  "local_d_psgd": asgd.local_d_psgd(0.1, workers=N, steps=2, momentum=0.5),
  "threshold_sharing": asgd.threshold_sharing(0.1, workers=N),
  "async_threshold_sharing": asgd.async_threshold_sharing(
    0.1, workers=N, codec=CODEC
  ),
}
recipes = pytest.mark.parametrize("name", RECIPES)


@recipes
def test_a_trace_that_was_written_and_read_replays_to_the_same_bits(name):
  recipe = RECIPES[name]
  trace = trace_of(recipe, clock=durations.heterogeneous())
  again = orders.load(orders.dump(trace).splitlines(keepends=True))
  results = [peers(recipe, each) for each in (trace, again)]
  records = [result.run(len(trace.time)) for result in results]
  kit.same(results[0].states, results[1].states)
  kit.same(records[0], records[1])
  # And so does what peers wrote each of itself, in another order of theirs.
  parts = [
    [e for e in trace_lib.events(trace) if e.worker == i] for i in range(N)
  ]
  late = [[e._replace(time=e.time + i) for e in p] for i, p in enumerate(parts)]
  merged = gossip.orders.merge(late)
  orders.check(merged)
  assert (merged.worker != trace.worker).any()
  other = peers(recipe, merged)
  other.run(len(merged.time))
  kit.same(other.states, results[0].states)


@recipes
def test_going_on_from_any_row_comes_to_the_same_bits(name):
  recipe = RECIPES[name]
  trace = trace_of(recipe, rounds=4, clock=durations.heterogeneous())
  whole, end = peers(recipe, trace), len(trace.time)
  records = whole.run(end)
  for row in np.linspace(1, end - 1, 4).astype(int).tolist():
    first = peers(recipe, trace)
    rows = [first.run(row)]
    tree, notes = first.save()
    tree = jax.tree.map(np.asarray, tree)
    second = peers(recipe, trace)
    template = second.template(notes)
    assert jax.tree.structure(template) == jax.tree.structure(tree)
    assert jax.tree.map(np.shape, template) == jax.tree.map(np.shape, tree)
    second.restore(tree, notes)
    rows.append(second.run(end))
    kit.same(second.states, whole.states)
    kit.same(second.traffic, whole.traffic)
    kit.same(simulator.join_records(rows), records)


def rows_of(text):
  return orders.load([f"{trace_lib.HEADER}\n", *text.splitlines(True)])


# Peer 1 leaves in its job, and comes again with what peers 0 and 2 lend it.
LEAVES = """\
0.0,0,0,0,send
0.0,1,0,1,send
0.0,2,0,2,send
1.0,0,0,0,receive
1.0,2,0,2,receive
1.0,0,0,0,put
1.0,2,0,0,put
2.0,1,0,1,lost
2.0,1,-1,0,leave
2.0,0,0,2,take
2.0,0,-1,0,mix
2.0,2,0,0,take
2.0,2,-1,0,mix
3.0,1,-1,1,join
3.0,0,1,1,lend
3.0,2,1,1,lend
3.0,1,1,0,adopt
3.0,1,1,2,adopt
3.0,1,0,0,lend
3.0,1,1,2,lend
3.0,0,0,1,adopt
3.0,2,1,1,adopt
3.0,1,1,3,send
4.0,1,1,3,receive
4.0,1,2,1,put
4.0,0,2,1,take
4.0,0,-1,1,mix
"""


@pytest.mark.parametrize("name", ["d_psgd", "sgp", "choco_sgd"])
def test_a_peer_that_left_adopts_what_its_neighbours_lend(name):
  recipe = asgd.build(name, 0.1, 3, topology="full")
  trace = rows_of(LEAVES)
  assert orders.check(trace) == 3
  result = peers(recipe, trace)
  result.run(13)
  assert result.present == [0, 2]
  without = params_of(result)
  # The weight of the one who left stays with the others, here 2/3 and 1/3.
  steps = [flat(START) - 0.1 * (flat(START) - wanted(i, i)) for i in (0, 2)]
  expected = (2 * steps[0] + steps[1]) / 3
  if name == "sgp":  # of which each has given it a third, that is lost
    expected = (steps[0] + steps[1]) / 2
  assert_all(without[0], expected)
  result.run(18)
  assert result.present == [0, 1, 2]
  np.testing.assert_allclose(params_of(result)[1], without[0], atol=1e-15)
  states = result.states
  mass = [float(states[i].rule_state) for i in range(3)] if name == "sgp" else 0
  if name == "sgp":  # it has half of what each had
    np.testing.assert_allclose(mass, [1 / 3, 2 / 3, 1 / 3], atol=1e-15)
  result.run(22)
  assert_all(params_of(result)[0], without[0])
  if name == "sgp":
    after = sum(float(state.rule_state) for state in result.states)
    assert after == pytest.approx(sum(mass))
  if name == "choco_sgd":
    states = [state.rule_state for state in result.states]
    assert_all(flat(states[1].public), without[0], atol=1e-15)
    for i in range(3):
      others = [j for j in range(3) if j != i]
      for slot, j in enumerate(others):
        copy = jax.tree.map(lambda c, s=slot: c[s], states[i].copies)
        assert_all(flat(copy), flat(states[j].public), atol=1e-15)
  result.run(len(trace.time))
  assert np.isfinite(params_of(result)).all()


def test_a_message_that_a_peer_took_before_it_left_is_dropped():
  take = "1.5,1,0,0,take\n2.0,1,0,1,lost\n"
  trace = rows_of(LEAVES.replace("2.0,1,0,1,lost\n", take))
  recipe = asgd.build("d_psgd", 0.1, 3, topology="full")
  first, second = (peers(recipe, trace) for _ in range(2))
  first.run(11)
  assert (0, 0) in first.codes
  second.restore(*first.save())
  for each in (first, second):
    each.run(16)  # peer 1 has joined again
    assert (0, 0) not in each.codes
    each.run(len(trace.time))
    assert not each.codes


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ("5.0,0,1,0,put", "its next message is 2"),
    ("5.0,0,3,1,take", "peer 1 has put no message 3 yet"),
    ("5.0,0,0,2,take", "has taken that message, or a later one, already"),
    ("5.0,0,0,0,take", "a peer is not its own neighbour"),
  ],
)
def test_rows_between_peers_are_checked(row, why):
  trace = rows_of(LEAVES + row + "\n")
  with pytest.raises(trace_lib.TraceError, match=why) as error:
    orders.check(trace)
  assert error.value.row == len(LEAVES.splitlines())


def test_traces_that_do_not_belong_together_are_refused():
  rows = [e for e in trace_lib.events(rows_of(LEAVES)) if e.worker != 1]
  with pytest.raises(ValueError, match="of peer 1, which peer 1 did not"):
    gossip.orders.merge([rows])


def test_a_trace_of_more_peers_is_refused():
  with pytest.raises(ValueError, match="has a peer 3, the topology only 3"):
    peers(asgd.d_psgd(0.1, workers=3), trace_of(RECIPES["d_psgd"]))


# Time.


def test_a_slow_peer_holds_up_rounds_and_not_pairs():
  def last(recipe, slow):
    clock = durations.constant(slowdown=[1] * 7 + [slow])
    return recipe.gossip.trace(clock, messages=400).time[-1]

  rounds, pairs = asgd.d_psgd(0.1, 8), asgd.ad_psgd(0.1, 8)
  assert last(rounds, 10) == pytest.approx(10 * last(rounds, 1), rel=0.02)
  # Seven workers of rate 1 and one of rate 1 / 10.
  assert last(pairs, 10) / last(pairs, 1) == pytest.approx(8 / 7.1, rel=0.02)


def test_a_peer_waits_for_its_neighbours_and_not_for_all():
  ring = asgd.d_psgd(0.1, 8, topology="ring", adapt_first=True)
  clock = durations.constant(slowdown=[5])
  trace = ring.gossip.trace(clock, messages=24)
  rows = trace_lib.events(trace)
  ends = {(e.worker, e.job): e.time for e in rows if e.action == base.MIX}
  # Peer 0 is slow: its neighbours wait for it at once, the fourth not yet.
  assert [ends[i, 0] for i in range(5)] == [5, 5, 1, 1, 1]
  assert [ends[i, 1] for i in range(5)] == [10, 10, 6, 2, 2]


def test_overlap_hides_a_peer_that_is_slow_for_a_moment():
  def ends(overlap):
    recipe = asgd.sgp(0.1, workers=2, overlap=overlap)
    times = durations.measured([[1, 1, 1, 1], [1, 2, 1, 1]])
    trace = recipe.gossip.trace(times, messages=8)
    rows = [e for e in trace_lib.events(trace) if e.action == base.RECEIVE]
    return [e.time for e in rows if e.worker == 0]

  assert ends(0) == [1, 2, 4, 5]
  assert ends(1) == [1, 2, 3, 4]


# What is refused.


@pytest.mark.parametrize(
  ("make", "why"),
  [
    (
      lambda: asgd.d_psgd(0.1, 6, topology="random_digraph"),
      "would change the mean over peers: use sgp",
    ),
    (
      lambda: asgd.d2(0.1, 8, lazy=False),
      "topology 'ring' of 8 peers it is -0.333: use lazy=True",
    ),
    (
      lambda: asgd.d2(0.1, 8, topology="one_peer_exponential"),
      "symmetric and the same in all rounds",
    ),
    (
      lambda: asgd.ad_psgd(0.1, 8, topology="exponential"),
      "is directed (peer 0 receives from 6, but 6 does not receive from 0)",
    ),
    (lambda: asgd.sgp(0.1, 8, overlap=-1), "overlap must be a whole number, 0"),
    (lambda: asgd.choco_sgd(0.1, 8, gamma=1.5), "gamma must be in (0, 1]"),
    (lambda: asgd.choco_sgd(0.1, 8, codec=1), "codec must be a name"),
    (
      lambda: asgd.choco_sgd(0.1, 8, codec={"name": "topk"}),
      "unknown codec 'topk'; did you mean 'top_k'",
    ),
    (
      lambda: asgd.threshold_sharing(0.1, 8, codec={}),
      "codec {} has no name: add one of",
    ),
    (lambda: asgd.d_psgd(0.1, 1), "there is 1 worker: use 2 or more"),
    (lambda: asgd.ssgd(0.1, 4).peer(), "the recipe has a server and no peers"),
    (lambda: asgd.d_psgd(0.1, 4, momentum=1), "momentum must be in"),
  ],
)
def test_recipes_of_peers_refuse_what_does_not_fit_in_one_line(make, why):
  with pytest.raises(ValueError) as error:
    make()
  text = str(error.value)
  assert why in text and "\n" not in text and len(text) < 600
