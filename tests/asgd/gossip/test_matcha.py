"""MATCHA: matchings, probabilities and weights, against what is known."""

import itertools

import kit
import numpy as np
import pytest

import asgd
from asgd.gossip import matcha, topologies

# Two triangles with a link between them.
BRIDGED = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (3, 5)]
BASES = {
  "ring": "ring",
  "odd": "ring",
  "torus": "torus",
  "star": "star",
  "full": "full",
  "bridged": {"name": "graph", "edges": BRIDGED},
  "random": {"name": "erdos_renyi", "seed": 3},
}
PEERS = {"odd": 7, "bridged": 6, "torus": 12}


def links_of(base):
  return topologies.build(BASES[base], PEERS.get(base, 8)).union


def build(base, **options):
  topology = {"name": "matcha", "base": BASES[base], **options}
  return topologies.build(topology, PEERS.get(base, 8))


bases = pytest.mark.parametrize("base", BASES)


@bases
def test_matchings_are_disjoint_and_have_every_link(base):
  links = links_of(base)
  colours = matcha.matchings(links)
  assert ((colours >= 0) == links).all() and (colours == colours.T).all()
  count, degree = colours.max() + 1, links.sum(1).max()
  assert degree <= count <= 2 * degree - 1
  for j in range(count):
    assert (colours == j).sum(1).max() == 1


@bases
def test_weights_of_all_rounds_are_doubly_stochastic(base):
  topology = build(base, budget=0.4)
  matrices = topology.matrices
  assert topology.symmetric and (matrices >= -1e-15).all()
  np.testing.assert_allclose(matrices.sum(1), 1, atol=1e-14)
  topologies.check_sums(topology, columns=False)
  topologies.check_agrees(topology)
  assert (topology.union == links_of(base)).all()


@pytest.mark.parametrize("budget", [0.25, 0.5, 1.0])
def test_the_traffic_is_that_of_the_budget(budget):
  topology = build("ring", budget=budget)  # 40 rounds of 16 messages at most
  assert topology.links.sum() == budget * 40 * 16


@bases
def test_the_mean_and_the_square_are_those_of_all_draws(base):
  """All sets of active matchings, each with its probability."""
  colours = matcha.matchings(links_of(base))
  rng = np.random.default_rng(0)
  chances, alpha = rng.uniform(0.2, 0.9, colours.max() + 1), 0.1
  n = len(colours)
  mean, square, links = np.zeros((n, n)), np.zeros((n, n)), 0.0
  for active in itertools.product((0.0, 1.0), repeat=len(chances)):
    active = np.array(active)
    chance = np.where(active == 1, chances, 1 - chances).prod()
    weights = np.eye(n) - alpha * matcha.laplacian(colours, active)
    mean += chance * weights
    square += chance * weights.T @ weights
    links += chance * (weights != 0).sum() - chance * n
  expected = np.eye(n) - alpha * matcha.laplacian(colours, chances)
  np.testing.assert_allclose(mean, expected, atol=1e-14)
  norm = np.linalg.norm(square - 1 / n, 2)
  assert matcha.contraction(colours, chances, alpha) == pytest.approx(norm)
  traffic = [chances[j] * (colours == j).sum() for j in range(len(chances))]
  assert links == pytest.approx(sum(traffic))


@bases
@pytest.mark.parametrize("budget", [0.3, 0.7])
def test_probabilities_keep_the_budget_and_are_no_worse_than_equal_ones(
  base, budget
):
  colours = matcha.matchings(links_of(base))
  chances = matcha.probabilities(colours, budget)
  assert chances.sum() == pytest.approx(budget * len(chances))
  assert (chances >= 0).all() and (chances <= 1 + 1e-12).all()
  speeds = [
    np.linalg.eigvalsh(matcha.laplacian(colours, p))[1]
    for p in (chances, np.full(len(chances), budget))
  ]
  assert speeds[0] >= speeds[1]


def test_a_bridge_is_active_more_often_than_other_links():
  colours = matcha.matchings(links_of("bridged"))
  chances = matcha.probabilities(colours, 0.5)
  assert chances[colours[2, 3]] == chances.max() > 0.6
  # In a ring of an even number all matchings are alike.
  even = matcha.probabilities(matcha.matchings(links_of("ring")), 0.5)
  np.testing.assert_allclose(even, 0.5)


def test_with_the_whole_budget_weights_are_the_best_constant_ones():
  laplacian = np.diag([2.0] * 8) - links_of("ring")
  eigenvalues = np.linalg.eigvalsh(laplacian)
  best = np.eye(8) - 2 / (eigenvalues[1] + eigenvalues[-1]) * laplacian
  for matrix in build("ring", budget=1.0).matrices:
    np.testing.assert_allclose(matrix, best, atol=1e-6)


def test_two_peers_average_in_one_of_three_rounds():
  # With p the contraction is 1 - 4 alpha p + 4 alpha^2 p: alpha is 1 / 2.
  topology = topologies.build(
    {"name": "matcha", "budget": 1 / 3, "rounds": 3}, 2
  )
  half, eye = np.full((2, 2), 0.5), np.eye(2)
  rounds = [m.round(6).tolist() for m in topology.matrices]
  assert sorted(rounds) == sorted([half.tolist(), eye.tolist(), eye.tolist()])
  assert topology.first_rounds.count(rounds.index(half.tolist())) == 1


def test_copies_of_neighbours_would_miss_messages():
  with pytest.raises(ValueError, match="the same in all rounds"):
    asgd.choco_sgd(0.1, 8, topology="matcha")


test_mistakes_are_refused = kit.refuses(
  [
    ({"base": "exponential"}, "base 'exponential' is directed, and the peers"),
    ({"budget": 0.0}, r"topology.budget must be in \(0, 1\], not 0.0"),
    ({"base": "rign"}, "unknown topology 'rign'; did you mean 'ring'"),
    ({"rounds": 0}, "topology.rounds must be a positive whole number"),
  ],
  lambda options: topologies.build({"name": "matcha", **options}, 8),
)
