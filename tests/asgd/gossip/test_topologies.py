"""Topologies: weights, spectral gaps and refused arguments."""

import functools
import math

import numpy as np
import pytest

from asgd import gossip
from asgd.gossip import drawing, topologies

# |lambda_2| of a ring with weights 1/3, and the second singular value of the
# static exponential graph.
GAPS = {
  "ring": {8: 0.8047, 16: 0.9493, 32: 0.9872, 64: 0.9968},
  "exponential": {8: 0.500, 16: 0.600, 32: 2 / 3, 64: 0.7143},
}
HALF = np.full((2, 2), 0.5)
ROWS = [[0.5, 0.5], [1.0, 0.0]]  # that sum to 1; columns do not
UNDIRECTED = ("ring", "torus", "star", "full", "hypercube", "random_regular")
UNDIRECTED += ("erdos_renyi", "hierarchical")


@pytest.mark.parametrize("name", GAPS)
def test_spectral_gaps_are_those_of_the_literature(name):
  of = topologies.second_eigenvalue
  if name == "exponential":
    of = topologies.second_singular_value
  for n, value in GAPS[name].items():
    assert of(topologies.build(name, n)) == pytest.approx(value, abs=6e-5)


def test_spectral_gaps_have_their_formulas():
  for n in (3, 5, 8, 12):
    ring = topologies.second_eigenvalue(topologies.ring(n))
    eigenvalues = (1 + 2 * np.cos(2 * np.pi * np.arange(1, n) / n)) / 3
    assert ring == pytest.approx(np.abs(eigenvalues).max())
  for q in (2, 3, 4, 5):
    cube = topologies.second_eigenvalue(topologies.hypercube(2**q))
    assert cube == pytest.approx((q - 1) / (q + 1))
    graph = topologies.exponential(2**q)
    value = topologies.second_singular_value(graph)
    assert value == pytest.approx(1 - 2 / (q + 1))
  assert topologies.second_eigenvalue(topologies.full(6)) < 1e-12
  star = topologies.second_eigenvalue(topologies.star(8))
  assert star == pytest.approx(1 - 1 / 8)


@pytest.mark.parametrize("name", UNDIRECTED)
def test_weights_of_metropolis_are_symmetric_and_sum_to_one(name):
  topology = topologies.build(name, 8)
  assert topology.symmetric and topology.period == 1
  (matrix,) = topology.matrices
  np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-15)
  degrees = topology.union.sum(1)
  for i, j in np.argwhere(topology.union):
    weight = 1 / (1 + max(degrees[i], degrees[j]))
    assert name == "full" or matrix[i, j] == weight
  topologies.check_sums(topology, columns=False)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["one_peer_exponential", "hypercube"])
def test_one_peer_sequences_average_exactly_after_log2_n_rounds(name, n):
  options = {"one_peer": True} if name == "hypercube" else {}
  topology = topologies.build({"name": name, **options}, n)
  assert topology.period == math.log2(n) and topology.slots == topology.period
  assert (topology.links.sum(2) == 1).all()  # one sender a round
  product = functools.reduce(lambda a, b: b @ a, topology.matrices)
  assert (product == 1 / n).all()


def test_a_torus_has_four_neighbours():
  topology = topologies.build({"name": "torus", "rows": 3}, 12)
  assert topology.neighbours(5) == [1, 4, 6, 9]
  assert (topology.union.sum(1) == 4).all()


def test_random_regular_graphs_are_regular_and_drawn():
  first, again, other = (
    topologies.random_regular(10, degree=4, seed=seed) for seed in (0, 0, 1)
  )
  assert (first.union.sum(1) == 4).all() and (first.union.sum(0) == 4).all()
  assert (first.matrices == again.matrices).all()
  assert (first.matrices != other.matrices).any()


def test_columns_of_an_irregular_digraph_sum_to_one_and_rows_do_not():
  topology = topologies.build("random_digraph", 8)
  topologies.check_sums(topology, columns=True)
  assert len(set(topology.union.sum(0))) > 1
  with pytest.raises(ValueError, match=r"^row \d .* sums to .*: use sgp"):
    topologies.check_sums(topology, columns=False)


def test_slots_count_the_neighbours_that_a_peer_ever_hears():
  topology = topologies.one_peer_exponential(8)
  heard = [topology.neighbours(0, k) for k in range(4)]
  assert heard == [[7], [6], [4], [7]]
  assert [topology.slot(0, j) for j in (4, 6, 7)] == [0, 1, 2]


def test_lazy_weights_have_no_negative_eigenvalue():
  ring = topologies.ring(8)
  assert topologies.smallest_eigenvalue(ring) == pytest.approx(-1 / 3)
  lazy = topologies.lazy(ring)
  assert topologies.smallest_eigenvalue(lazy) == pytest.approx(1 / 3)
  topologies.check_sums(lazy, columns=False)


def test_two_colours():
  assert topologies.two_colours(topologies.ring(4)) == [0, 1, 0, 1]
  assert topologies.two_colours(topologies.ring(5)) is None
  assert topologies.two_colours(topologies.hypercube(8)) is not None


@pytest.mark.parametrize(
  ("topology", "n", "why"),
  [
    ("rinf", 4, "unknown topology 'rinf'; did you mean 'ring'?"),
    ("ring", 1, "gossip needs at least 2 peers, but there is 1 worker: use 2"),
    ("ring", 2000, "gossip takes at most 1024 peers, not 2000"),
    ("hypercube", 6, "power of 2 of peers, not 6: use 4 or 8"),
    ("torus", 7, "7 is a prime: use another number, or a ring"),
    ({"name": "torus", "rows": 3}, 8, "use 6 or 9"),
    ({"name": "hierarchical", "group": 3}, 8, "groups of 3; use 6 or 9"),
    ({"name": "random_regular", "degree": 3}, 9, "9 x 3 is odd: use degree 2"),
    ({"name": "random_regular", "degree": 9}, 8, "degree must be at most 7"),
    ({"name": "erdos_renyi", "probability": 0}, 8, r"must be in (0, 1], not 0"),
    (
      {"name": "erdos_renyi", "probability": 1e-3},
      8,
      "none of 100 graphs of 8 peers with links of probability 0.001",
    ),
    ({"name": "ring", "weights": "equal"}, 4, "metropolis, uniform, not"),
    ({"name": "ring", "degree": 2}, 4, "degree"),
    (
      {"name": "graph", "edges": [[0, 1], [2, 3]]},
      4,
      "'graph' is not connected: no path of links leads from peer 0 to peer 2;"
      " add links between 2 of the peers and the other 2",
    ),
    (
      {"name": "graph", "edges": [[0, 1], [1, 2]], "directed": True},
      3,
      "is not connected: no path of links leads from peer 1 to peer 0;",
    ),
    (
      {"name": "graph", "edges": [[0, 1], [1, 1]]},
      2,
      "edges has [1, 1], but no peer is its own neighbour: drop it",
    ),
    ({"name": "graph", "edges": [[0, 5]]}, 4, "must be at most 3, not 5"),
    ({"name": "graph", "edges": [[0, 1, 2]]}, 4, "edges must be pairs"),
    ({"name": "matrix", "weights": [[1, 0]]}, 2, "a matrix of 2 rows and"),
    ({"name": "matrix", "weights": [[2, -1], [-1, 2]]}, 2, "0 or more, not"),
    ({"name": "matrix", "weights": "W"}, 2, "must be a"),
    ({"name": "matrix", "weights": HALF + 0j}, 2, "a matrix of real numbers"),
    ({"name": "matrix", "weights": HALF * np.inf}, 2, "finite, but one is"),
    ({"name": "matrix", "weights": HALF + 1.5e308}, 2, "use finite weights"),
    ({"name": "matrix", "weights": HALF * 3}, 2, "to 3, not to 1, so mixing"),
    ({"name": "matrix", "weights": HALF}, 3, "not array([[0.5, 0.5], [0.5"),
    ({"name": "matrix", "weights": ROWS}, 2, "use symmetric weights, such as"),
    ({"name": "graph", "edges": np.eye(2)}, 3, "whole number, 0 or more, not"),
    ({"name": "graph", "edges": np.ones(2)}, 3, "edges must be pairs, not 1.0"),
    ({"name": "graph", "edges": "01"}, 3, "edges must be pairs, not '01'"),
    ({"name": "graph", "directed": "no"}, 3, "directed must be True or False"),
    ({"name": "hypercube", "one_peer": 1}, 4, "one_peer must be True or False"),
    ("random_regular", 2, "needs at least 3 peers, not 2: use ring"),
    ({"name": "ring", "workers": 3}, 8, "always covers all 8 workers"),
    ({"name": "ring", "worker": 3}, 8, "no argument 'worker'; known: weights"),
    (5, 4, "a dict of a name and options, a matrix of weights or a Top"),
    (topologies.ring(3), 4, "has 3 peers, but there are 4 workers"),
  ],
)
def test_what_is_no_topology_is_refused_in_one_line(topology, n, why):
  with pytest.raises(ValueError) as error:
    topologies.build(topology, n)
  text = str(error.value)
  assert why in text and "\n" not in text and len(text) < 600


def test_edges_may_be_an_array():
  edges = [(0, 1), (1, 2)]
  for given in np.array(edges), list(np.array(edges)):
    topology = topologies.graph(3, edges=given)
    expected = topologies.graph(3, edges=edges).matrices
    np.testing.assert_array_equal(topology.matrices, expected)


def test_rows_that_do_not_sum_to_one_are_refused():
  topology = topologies.of_matrices("matrix", [[0.45, 0.45], [0.5, 0.5]])
  with pytest.raises(ValueError, match="row 0 .* sums to 0.9, .* divide by"):
    topologies.check_sums(topology, columns=False)
  topology = topologies.of_matrices("matrix", [[1.0, np.nan], [0, 1]])
  with pytest.raises(ValueError, match="sums to nan, .*: use finite"):
    topologies.check_sums(topology, columns=False)
  weights = [[[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0.5, 0.5]]]
  topology = topologies.of_matrices("matrix", weights)
  with pytest.raises(ValueError, match="column 0 .*, round 1, sums to 1.5"):
    topologies.check_sums(topology, columns=True)


def test_weights_by_which_peers_only_swap_are_refused():
  swap, half = [[0, 1], [1, 0]], [[0.5, 0.5], [0.5, 0.5]]
  matrix = {"name": "matrix"}
  swaps = topologies.build({**matrix, "weights": swap}, 2)
  with pytest.raises(ValueError, match=r"never agree .*peer 0 has 0.*as \(W"):
    topologies.check_agrees(swaps)
  # One round of two that mixes is enough, and so are paths of other lengths.
  sequence = topologies.build({**matrix, "weights": [swap, half]}, 2)
  topologies.check_agrees(sequence)
  triangle = (np.ones((3, 3)) - np.eye(3)) / 2
  topologies.check_agrees(topologies.build({**matrix, "weights": triangle}, 3))


@pytest.mark.parametrize(
  ("name", "n"), [("random_digraph", 2), ("random_regular", 3)]
)
def test_a_default_degree_is_one_that_few_peers_can_have(name, n):
  assert topologies.build(name, n).workers == n


def test_uniform_weights_of_an_irregular_graph_are_for_push_sum():
  star = topologies.build({"name": "star", "weights": "uniform"}, 4)
  topologies.check_sums(star, columns=True)
  with pytest.raises(ValueError, match="use weights='metropolis', or sgp"):
    topologies.check_sums(star, columns=False)
  links = topologies.exponential(8).union
  with pytest.raises(ValueError, match="this one is directed: use 'uniform'"):
    topologies.of_links(links, "metropolis")


def test_a_drawing_has_a_picture_for_each_round():
  figure = drawing.draw(gossip.topologies.one_peer_exponential(8))
  assert [axes.get_title() for axes in figure.axes] == [
    "round 0",
    "round 1",
    "round 2",
  ]
  # A line for each pair of linked peers, and a name for each peer.
  assert len(figure.axes[0].texts) == 8 + 8
