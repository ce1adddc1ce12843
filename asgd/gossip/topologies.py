"""Topologies by name: which peer receives from which, with weights, as data.

A topology is a sequence of matrices W_k, one for each round, repeated. W[i, j]
is the weight that peer i gives a message of peer j. A nonzero entry off the
diagonal is a link from j to i.

Rules that take means (`rules.average`, `choco`, `share`) need rows and columns
that sum to 1. Push-sum needs columns that sum to 1, so it works on any strongly
connected directed graph. Undirected graphs get Metropolis weights,

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours,
    W_ii = 1 - the sum of the others,

where d_i is the number of i's neighbours. "uniform" weights are 1 / (1 + number
of peers that receive from the sender), which is the same if all peers have
equally many neighbours. For all makers here `workers` is n, at least 2, and
`weights` is one of WEIGHTS.

|lambda_2|, the second largest modulus of an eigenvalue of W, is the speed of
averaging: the distance to the mean falls by that factor per round.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asgd import checks, names
from asgd.gossip import matcha as matcha_lib
from asgd.gossip.topology import (
  Links,
  Topology,
  check_connected,
  of_links,
  of_matrices,
  reaches,
)
from asgd.gossip.topology import check_agrees as check_agrees
from asgd.gossip.topology import check_constant as check_constant
from asgd.gossip.topology import check_sums as check_sums
from asgd.gossip.topology import lazy as lazy
from asgd.gossip.topology import second_eigenvalue as second_eigenvalue
from asgd.gossip.topology import second_singular_value as second_singular_value
from asgd.gossip.topology import smallest_eigenvalue as smallest_eigenvalue
from asgd.gossip.topology import two_colours as two_colours
from asgd.gossip.user_topologies import graph as graph
from asgd.gossip.user_topologies import matrix as matrix

_MAX_PEERS = 1024  # peers; a matrix is dense


def _circulant(workers: int, hops: Sequence[int]) -> Links:
  """Returns links by which every peer receives from those `hops` before it."""
  links = np.zeros((workers, workers), bool)
  for hop in hops:
    # Row i, column i - hop: peer i receives from the peer `hop` before it.
    links[np.arange(workers), (np.arange(workers) - hop) % workers] = True
  np.fill_diagonal(links, False)  # a hop may be a multiple of n
  return links


def ring(workers: int, *, weights: str | None = None) -> Topology:
  """Peers in a circle, each with two neighbours.

    |lambda_2| = (1 + 2 cos(2 pi / n)) / 3

  Example:
    >>> from asgd.gossip import topologies
    >>> f"{topologies.second_eigenvalue(topologies.ring(16)):.4f}"
    '0.9493'
  """
  return of_matrices("ring", of_links(_circulant(workers, (1, -1)), weights))


def torus(
  workers: int, *, rows: int | None = None, weights: str | None = None
) -> Topology:
  """Peers on a grid that is closed in both directions: four neighbours.

  Args:
    workers: n.
    rows: a divisor of n; None is the largest that is at most sqrt(n).
    weights: one of WEIGHTS.

  Raises:
    ValueError: for rows that do not divide n, or a prime n without rows.
  """
  if rows is None:
    rows = max(r for r in range(1, math.isqrt(workers) + 1) if workers % r == 0)
    if rows == 1 and workers > 3:
      raise ValueError(
        f"a torus of {workers} peers would have one row, as {workers} is a"
        " prime: use another number, or a ring"
      )
  checks.integer("rows", rows)
  checks.multiple(workers, "peers", rows, "rows of a torus, which are {}")
  grid = np.arange(workers).reshape(rows, -1)
  links = np.zeros((workers, workers), bool)
  for axis, hop in itertools.product((0, 1), (1, -1)):
    links[grid.ravel(), np.roll(grid, hop, axis).ravel()] = True
  np.fill_diagonal(links, False)  # along an axis of length 1
  return of_matrices("torus", of_links(links, weights))


def star(workers: int, *, weights: str | None = None) -> Topology:
  """Peer 0 in the middle, linked with every other peer; no further links."""
  links = np.zeros((workers, workers), bool)
  links[0, 1:] = links[1:, 0] = True
  return of_matrices("star", of_links(links, weights))


def full(workers: int) -> Topology:
  """Every peer receives from all others: a round is an all-reduce."""
  return of_matrices("full", np.full((workers, workers), 1 / workers))


def _hops(workers: int) -> list[int]:
  return [2**k for k in range(int(workers - 1).bit_length())]


def exponential(workers: int) -> Topology:
  """Every peer receives from those 1, 2, 4, ... before it: directed, log2 n
  links.

    second singular value 1 - 2 / (log2 n + 1),   n a power of 2

  Source:
    Ying et al., "Exponential graph is provably efficient for decentralized
    deep training", NeurIPS 2021, arXiv:2110.13363.

  Example:
    >>> from asgd.gossip import topologies
    >>> f"{topologies.second_singular_value(topologies.exponential(8)):.3f}"
    '0.500'
  """
  # All peers have equally many receivers, so the rows of uniform weights sum to
  # 1, too.
  links = _circulant(workers, _hops(workers))
  return of_matrices("exponential", of_links(links, "uniform"))


def one_peer_exponential(workers: int) -> Topology:
  """In round k every peer receives from one, 2^(k mod log2 n) before it.

  If n is a power of 2, log2 n rounds average exactly.

  Source:
    Assran et al., "Stochastic gradient push for distributed deep learning",
    ICML 2019, arXiv:1811.10792.

  Example:
    >>> import numpy as np
    >>> from asgd.gossip import topologies
    >>> first, second = topologies.one_peer_exponential(4).matrices
    >>> (second @ first == np.full((4, 4), 1 / 4)).all()
    np.True_
  """
  rounds = [
    of_links(_circulant(workers, [hop]), "uniform") for hop in _hops(workers)
  ]
  return of_matrices("one_peer_exponential", rounds)


def hypercube(workers: int, *, one_peer: bool = False) -> Topology:
  """Peers at the corners of a cube of log2 n dimensions.

  Args:
    workers: n, a power of 2.
    one_peer: whether round k averages pairs along dimension k mod log2 n alone,
      so that log2 n rounds average exactly.

  Raises:
    ValueError: for an n that is no power of 2.
  """
  checks.flag("one_peer", one_peer)
  if workers & (workers - 1):
    lower_power = 2 ** (workers.bit_length() - 1)
    raise ValueError(
      f"a hypercube has a power of 2 of peers, not {workers}: use"
      f" {lower_power} or {2 * lower_power}"
    )
  ranks, dimensions = np.arange(workers), workers.bit_length() - 1
  rounds = np.zeros((dimensions, workers, workers), bool)
  for k in range(dimensions):  # neighbours differ in one bit of their index
    rounds[k, ranks, ranks ^ (1 << k)] = True
  if one_peer:
    return of_matrices("hypercube", [of_links(links) for links in rounds])
  return of_matrices("hypercube", of_links(np.asarray(rounds.any(0))))


def random_regular(
  workers: int, *, degree: int | None = None, seed: int = 0
) -> Topology:
  """A random connected graph in which all peers have equally many neighbours.

  Args:
    workers: n, at least 3.
    degree: neighbours of each, from 2 to n - 1; n times degree must be even.
      None is 3, or 2 if n is odd.
    seed: the seed of the draw.

  Raises:
    ValueError: for a degree that no such graph has, or fewer than 3 peers.
  """
  if workers < 3:
    raise ValueError(
      f"a random_regular graph needs at least 3 peers, not {workers}: use ring,"
      " or more peers"
    )
  if degree is None:
    degree = 2 if workers % 2 else 3
  checks.integer("degree", degree, 2, workers - 1)
  checks.integer("seed", seed, 0)
  if workers * degree % 2:
    raise ValueError(
      f"no graph of {workers} peers has {degree} neighbours each, as"
      f" {workers} x {degree} is odd: use degree {degree - 1 or 2} or an even"
      " number of peers"
    )
  rng = np.random.default_rng((seed, workers, degree))
  # Start from a circulant. Random pairs of edges a-b, c-d become a-d, c-b,
  # which keeps degrees, until the graph is mixed and connected.
  links = _circulant(workers, [s * h for h in range(1, degree // 2 + 1)
    for s in (1, -1)])
  if degree % 2:
    links |= _circulant(workers, [workers // 2])
  edges = np.argwhere(np.triu(links))
  while True:
    for _ in range(20 * len(edges)):
      first, second = rng.integers(len(edges), size=2)
      (a, b), (c, d) = edges[first], edges[second][:: rng.choice((1, -1))]
      # No swap that would make a loop, or repeat a link.
      if len({a, b, c, d}) < 4 or links[a, d] or links[c, b]:
        continue
      for i, j, value in ((a, b, 0), (c, d, 0), (a, d, 1), (c, b, 1)):
        links[i, j] = links[j, i] = bool(value)
      edges[first], edges[second] = (a, d), (c, b)
    if reaches(links):
      return of_matrices("random_regular", of_links(links))


def erdos_renyi(
  workers: int,
  *,
  probability: float | None = None,
  seed: int = 0,
  weights: str | None = None,
) -> Topology:
  """A random connected graph with independent links.

  Args:
    workers: n.
    probability: the probability of a link, in (0, 1]; None is 2 ln n / n, at
      most 1, with which most graphs are connected.
    seed: the seed of the draw; a graph that is not connected is redrawn.
    weights: one of WEIGHTS.

  Raises:
    ValueError: for a probability out of its range, or so small that none of 100
      graphs is connected.
  """
  if probability is None:
    probability = min(1.0, 2 * math.log(workers) / workers)
  checks.portion("probability", probability)
  rng = np.random.default_rng((checks.integer("seed", seed, 0), workers))
  for _ in range(100):
    # Each pair of peers is drawn once, above the diagonal.
    upper_half = np.triu(rng.random((workers, workers)) < probability, 1)
    links = upper_half | upper_half.T
    if reaches(links):
      return of_matrices("erdos_renyi", of_links(links, weights))
  raise ValueError(
    f"none of 100 graphs of {workers} peers with links of probability"
    f" {probability:g} is connected: use"
    f" {min(1.0, 2 * math.log(workers) / workers):.2g} or more"
  )


def hierarchical(
  workers: int, *, group: int = 4, weights: str | None = None
) -> Topology:
  """Groups of fully linked peers; the first peers of the groups form a ring.

  Args:
    workers: n, a multiple of the group's size.
    group: peers of a group, at least 2.
    weights: one of WEIGHTS.

  Raises:
    ValueError: for an n that is no multiple of the group's size.
  """
  checks.integer("group", group, 2)
  checks.multiple(workers, "peers", group, "groups of {}")
  group_of = np.arange(workers) // group
  links = group_of[:, None] == group_of[None]
  leaders = np.arange(0, workers, group)
  links[leaders, np.roll(leaders, 1)] = True
  links[np.roll(leaders, 1), leaders] = True
  np.fill_diagonal(links, False)
  return of_matrices("hierarchical", of_links(links, weights))


def random_digraph(
  workers: int, *, degree: int | None = None, seed: int = 0
) -> Topology:
  """A random directed graph in which peers have different numbers of receivers.

  Each peer sends to the next one and to 0 to `degree` - 1 others. Only push-sum
  averages on such a graph.

  Args:
    workers: n.
    degree: the largest number of receivers of a peer, at least 1; None is 2, or
      1 for two peers.
    seed: the seed of the draw.
  """
  max_degree = max(workers - 1, 1)
  degree = min(2, max_degree) if degree is None else degree
  max_degree = checks.integer("degree", degree, 1, max_degree)
  checks.integer("seed", seed, 0)
  rng = np.random.default_rng((int(seed), workers, degree))
  links = _circulant(workers, [1])  # a ring keeps the graph connected
  for sender in range(workers):
    receivers = np.setdiff1d(
      np.arange(workers), [sender, (sender + 1) % workers]
    )
    count = min(int(rng.integers(max_degree)), len(receivers))
    links[rng.choice(receivers, count, replace=False), sender] = True
  return of_matrices("random_digraph", of_links(links, "uniform"))


def matcha(
  workers: int,
  *,
  base: str | Mapping[str, Any] = "ring",
  budget: float = 0.5,
  rounds: int = 40,
  seed: int = 0,
) -> Topology:
  """MATCHA: each round activates some matchings of a graph, for a budget.

    W_k = I - alpha sum_j B_j(k) L_j,   sum_j P(B_j = 1) = budget M

  L_j is the Laplacian of matching j of M. Probabilities maximise lambda_2 of
  the expected Laplacian; alpha, at most 1 / the largest degree so that no
  weight is negative, minimises the expected distance to the mean after a round.
  A matching is active in a fixed number of the `rounds`, in a drawn order, so
  these rounds have the traffic of the budget. Then the rounds repeat.

  Args:
    workers: n.
    base: the graph, an undirected topology by name or with options.
    budget: fraction of the matchings that a round activates on average, in (0,
      1]; 1 is the graph itself.
    rounds: T, after which the draws repeat.
    seed: the seed of the draw.

  Raises:
    ValueError: for a value out of its range, or a directed graph.

  Source:
    Wang, Sahu, Yang, Joshi, Kar, "MATCHA: speeding up decentralized SGD via
    matching decomposition sampling", 2019, arXiv:1905.09435. There each round
    is drawn independently, and the matchings are those of Misra and Gries.

  Example:
    A ring of four peers has two matchings, each in half of the rounds.

    >>> from asgd.gossip import topologies
    >>> topology = topologies.build({"name": "matcha", "rounds": 8}, 4)
    >>> topology.links.sum((1, 2)).sum().item()  # half of 8 rounds of 8
    32
  """
  checks.portion("budget", budget)
  checks.integer("rounds", rounds)
  checks.integer("seed", seed, 0)
  links = build(base, workers).union
  if (links != links.T).any():
    raise ValueError(
      f"base {checks.shown(base)} is directed, and the peers of a matching"
      " exchange messages: use an undirected graph, such as ring or torus"
    )
  colours = matcha_lib.matchings(links)
  p = matcha_lib.probabilities(colours, budget)
  alpha = matcha_lib.consensus_step(colours, p)
  return of_matrices(
    "matcha", matcha_lib.draw(colours, p, alpha, rounds, seed)
  )


TOPOLOGIES: dict[str, Callable[..., Topology]] = {
  maker.__name__: maker
  for maker in (
    *(ring, torus, star, full, exponential, one_peer_exponential, hypercube),
    *(random_regular, erdos_renyi, hierarchical, random_digraph, matcha),
    *(graph, matrix),
  )
}


def build(
  topology: str | Mapping[str, Any] | Topology | Any, workers: int
) -> Topology:
  """Builds a topology by its name, and checks that it is connected.

  Args:
    topology: a name of TOPOLOGIES; MODULE:FUNCTION, a user's function of n and
      its options; a dict of a name and its options; a matrix of weights, or one
      for each round (`matrix`); or a Topology of n peers. The function may
      return a matrix, too.
    workers: n.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, for
      an option that the maker rejects, and for a graph that is not connected.

  Example:
    >>> from asgd.gossip import topologies
    >>> topology = topologies.build({"name": "torus", "rows": 2}, 8)
    >>> topology.neighbours(0)
    [1, 3, 4]
    >>> f"{topology.weight(0, receiver=0, sender=4):.2f}"
    '0.25'
  """
  checks.integer("workers", workers)
  if workers < 2:
    raise ValueError(
      "gossip needs at least 2 peers, but there is 1 worker: use 2 or more, or"
      " a recipe with a server"
    )
  if workers > _MAX_PEERS:
    raise ValueError(f"gossip takes at most {_MAX_PEERS} peers, not {workers}")
  if isinstance(topology, str):
    topology = {"name": topology}
  if isinstance(topology, Mapping):
    # `workers` comes from the run, so a config must not set it.
    options = dict(topology)
    name = options.pop("name", None)
    if name is None:
      shown = checks.shown(topology)
      raise ValueError(f"topology {shown} lacks a name, as {{'name': 'ring'}}")
    maker = names.resolve("topology", name, TOPOLOGIES)
    if "workers" in options:
      raise ValueError(
        f"topology has workers {checks.shown(options['workers'])}, but always"
        f" covers all {workers} workers: leave workers out of the topology"
      )
    with checks.section_errors("topology", options):
      topology = names.call_with("topology", name, maker, workers, options)
  if isinstance(topology, list | tuple) or hasattr(topology, "__array__"):
    topology = matrix(workers, weights=topology)
  if not isinstance(topology, Topology):
    raise ValueError(
      "topology must be a name, a dict of a name and options, a matrix of"
      f" weights or a Topology, not {checks.shown(topology)}"
    )
  if topology.workers != workers:
    raise ValueError(
      f"the topology has {topology.workers} peers, but there are {workers}"
      " workers: build it for the same number"
    )
  check_connected(topology)
  return topology
