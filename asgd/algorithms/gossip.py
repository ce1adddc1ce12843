"""Recipes without a server: peers that exchange messages.

Each peer has its own parameters and optimizer. A job is one batch (several in
`local_d_psgd`), and an epoch is one pass of all peers together over the data.
Two options are shared:

- `topology`: a name of `asgd.gossip.topologies`, MODULE:FUNCTION, a dict of a
  name and its options, a matrix, or a Topology; W are its weights;
- `codec`: a name of `asgd.compression.CODECS`, a dict of a name and its
  options, or a Codec. None sends uncompressed parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optax

from asgd import base, checks, compression, gossip
from asgd.algorithms.local_work import displacement_recipe, local_optimizer
from asgd.algorithms.recipe import Recipe
from asgd.algorithms.sgd import sgd
from asgd.gossip import rules, topologies
from asgd.gossip.orders import check_pairs
from asgd.optimizers import OptimizerLike

_Matrix = np.ndarray | Sequence[Sequence[float]]
_Topology = str | Mapping[str, Any] | _Matrix | gossip.Topology
_Codec = str | Mapping[str, Any] | compression.Codec | None
_RING = "ring"


def _with_peers(
  recipe: Recipe,
  rule: gossip.Rule,
  topology: _Topology,
  workers: int,
  **options: Any,
) -> Recipe:
  """Adds an exchange between peers, with the options of `gossip.Gossip`, to a
  recipe. Raises ValueError if the topology does not suit the rule."""
  peer_topology = topologies.build(topology, workers)
  # Averaging needs rows and columns of W that sum to 1; push-sum needs columns
  # only, as its weights w correct the rows.
  topologies.check_sums(peer_topology, columns=rule.columns)
  exchange = gossip.Gossip(rule, peer_topology, **options)
  # In pairs, links must have both directions: two neighbours average. In rounds
  # all weights of W are used, and must lead the peers to one mean.
  if exchange.order == gossip.PAIRS:
    check_pairs(peer_topology)
  else:
    topologies.check_agrees(peer_topology)
  return recipe._replace(gossip=exchange, order=exchange.order)


def d_psgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = _RING, momentum: float = 0.0, weight_decay: float = 0.0,
  adapt_first: bool = False, optimizer: OptimizerLike = None
) -> Recipe:
  """D-PSGD: each peer averages with its neighbours while it computes.

    x_i <- sum_j W_ij x_j - eta v_i,   v_i of the gradient at the old x_i
    with adapt_first:   x_i <- sum_j W_ij (x_j - eta v_j)

  Momenta are not averaged. On the full graph, with adapt_first and without
  momentum, it is all-reduce SGD. Without adapt_first peers on the full graph
  have different parameters, as in the paper: each adds its own last step to the
  mean.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    topology: the neighbours that a peer averages with; rows and columns of W
      sum to 1.
    adapt_first: a peer sends its parameters after its step, not before its job.

  Returns:
    A Recipe of peers, in rounds.

  Raises:
    ValueError: for a value out of its range, or a topology with weights that
      would change the mean over peers.

  Source:
    Lian et al., "Can decentralized algorithms outperform centralized
    algorithms?", NeurIPS 2017, arXiv:1705.09056, algorithm 1.

  Example:
    >>> import asgd
    >>> recipe = asgd.d_psgd(0.1, workers=8, topology="exponential")
    >>> recipe.order, recipe.gossip.topology.neighbours(0)
    ('rounds', [4, 6, 7])
  """
  checks.flag("adapt_first", adapt_first)
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # A peer that puts its message before its job overlaps the transfer with the
  # computation. That message is the old x_i: gradient and average use the same
  # parameters, as in algorithm 1.
  rule, put_first = rules.average(), not adapt_first
  recipe = Recipe(algorithm)
  return _with_peers(recipe, rule, topology, workers, put_first=put_first)


def d2(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = _RING, lazy: bool = True, momentum: float = 0.0,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """D2: D-PSGD with a correction for peers with different data.

    x_i <- sum_j W_ij (2 x_j - x_j' - eta (g_j - g_j')),   ' of the last round

  With a constant learning rate and full gradients it converges to the solution;
  D-PSGD keeps a distance that grows with the difference of the data.

  Args:
    learning_rate, workers, momentum, weight_decay: shared options.
    topology: undirected, and constant.
    lazy: uses (W + I) / 2 instead of W, which is stable on every graph.
      Otherwise the smallest eigenvalue of W must be above -1/3, which excludes
      rings of an even number of peers.
    optimizer: the optimizer of a peer, instead of SGD; g stands for its update.

  Returns:
    A Recipe of peers, in rounds.

  Raises:
    ValueError: for a value out of its range, or a topology on which the
      algorithm is not stable.

  Source:
    Tang et al., "D2: decentralized training over decentralized data", ICML
    2018, arXiv:1803.07068, algorithm 1.

  Example:
    >>> import asgd
    >>> asgd.d2(0.1, workers=5).order
    'rounds'
  """
  checks.flag("lazy", lazy)
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # D2 corrects updates, not gradients: it comes after the optimizer. Its state
  # holds x_i' and the update of the last round.
  tx = optax.GradientTransformationExtraArgs(*algorithm[:2])
  corrected = optax.chain(tx, gossip.correct_variance())
  peer_topology = topologies.build(topology, workers)
  topologies.check_constant("d2", peer_topology, symmetric=True)
  if lazy:
    # W has eigenvalues from -1 to 1, so (W + I) / 2 has them from 0 to 1.
    peer_topology = topologies.lazy(peer_topology)
  smallest = topologies.smallest_eigenvalue(peer_topology)
  # 1e-9 allows for the rounding of the eigenvalue.
  if smallest <= -1 / 3 + 1e-9:
    raise ValueError(
      "d2 is stable only if the smallest eigenvalue of W is above -1/3, and for"
      f" topology {peer_topology.name!r} of {workers} peers it is"
      f" {smallest:.3f}: use lazy=True, or another topology or number of peers"
    )
  return _with_peers(
    Recipe(base.as_algorithm(corrected)),
    rules.average(),
    peer_topology,
    workers,
  )


def gradient_tracking(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = _RING, momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Gradient tracking: peers average their steps' directions as well.

    y_i <- sum_j W_ij y_j + g_i - g_i',   ' of the last round
    x_i <- sum_j W_ij (x_j - eta y_j)

  y_i estimates the mean gradient of all peers, so that peers with different
  data have the same stationary points as all-reduce SGD. A message contains
  x_i and y_i.

  Args:
    learning_rate, workers, momentum, optimizer: shared options, of the step
      along y_i.
    topology: the neighbours that a peer averages with; rows and columns of W
      sum to 1.
    weight_decay: shared option; the decay is no part of y_i.

  Returns:
    A Recipe of peers, in rounds.

  Source:
    Pu, Nedic, "Distributed stochastic gradient tracking methods", Mathematical
    Programming 187, 2021, arXiv:1805.11454; the step before the average, as in
    Nedic, Olshevsky, Shi, Uribe, "Geometrically convergent distributed
    optimization with uncoordinated step-sizes", ACC 2017, arXiv:1609.05877.

  Example:
    >>> import asgd
    >>> asgd.gradient_tracking(0.1, workers=8).order
    'rounds'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # `track` replaces the gradient by y_i before the algorithm sees it.
  return _with_peers(Recipe(algorithm), gossip.track(), topology, workers)


def ad_psgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = _RING, momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """AD-PSGD: a peer that ends a job averages with one neighbour; none waits.

    x_i, x_j <- (x_i + x_j) / 2,   j a random neighbour, both at once
    x_i <- x_i - eta v_i,   v_i of the gradient at x_i at the start of the job

  A gradient's staleness is how often its peer was averaged during the job.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    topology: undirected; a peer selects each neighbour with equal probability.

  Returns:
    A Recipe of peers, in pairs.

  Raises:
    ValueError: for a value out of its range, or a directed topology.

  Source:
    Lian et al., "Asynchronous decentralized parallel stochastic gradient
    descent", ICML 2018, arXiv:1710.06952, algorithm 1.

  Example:
    >>> import asgd
    >>> asgd.ad_psgd(0.1, workers=8, topology="hypercube").order
    'pairs'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # In pairs the same rule averages two peers, both with the weight 1/2.
  recipe, rule = Recipe(algorithm), rules.average()
  return _with_peers(recipe, rule, topology, workers, order=gossip.PAIRS)


def sgp(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = "one_peer_exponential", overlap: int = 0,
  momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Stochastic gradient push: SGD with push-sum, on any directed graph.

    x_i <- x_i - eta v_i,   v_i of the gradient at z_i
    x_i <- sum_j W_ij x_j;   w_i <- sum_j W_ij w_j;   z_i = x_i / w_i

  Columns of W sum to 1. With overlap tau it is overlap SGP:

  - In rounds 0, tau, 2 tau, ... a peer sends (x_i, w_i) before its job, and
    keeps the share W_ii of both.
  - At the end of rounds tau - 1, 2 tau - 1, ... it mixes its neighbours'
    messages, before it sends the next one.
  - Message m uses matrix m of the topology.

  Args:
    learning_rate, workers, momentum, optimizer: shared options.
    topology: which peer sends to which.
    overlap: tau, 0 or more: the jobs that a peer does while a message travels.
      With 0 it sends after its job, and waits.
    weight_decay: shared option; it decays z_i, not x_i.

  Returns:
    A Recipe of peers, in rounds.

  Source:
    Assran et al., "Stochastic gradient push for distributed deep learning",
    ICML 2019, arXiv:1811.10792, algorithms 1 and 2, and the authors' code.

  Example:
    >>> import asgd
    >>> recipe = asgd.sgp(0.1, workers=8, topology="random_digraph")
    >>> recipe.gossip.topology.matrices.sum(1).round(9).tolist()[0][:3]
    [1.0, 1.0, 1.0]
  """
  checks.integer("overlap", overlap, 0)
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # The rule stores w_i. The peer's parameters are z_i, not x_i = w_i z_i.
  return _with_peers(
    Recipe(algorithm),
    *(rules.push_sum(), topology, workers),
    # With overlap a message leaves before the job that hides its transfer.
    put_first=overlap > 0,
    every=max(overlap, 1),  # rounds between two messages
  )


def choco_sgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, codec: _Codec = None,
  gamma: float | None = None, topology: _Topology = _RING,
  momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """CHOCO-SGD: peers send compressed changes of their parameters.

    x_i <- x_i - eta v_i;   q_i = codec(x_i - x^_i);   x^_i <- x^_i + q_i
    x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i)

  x^_i is the copy of peer i's parameters that its neighbours keep. A message
  is the compressed difference between the parameters and this copy. With the
  identity codec and gamma = 1 it is `d_psgd` with adapt_first.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
    codec: without error feedback, which the algorithm does not need.
    gamma: the consensus step, in (0, 1], smaller for coarser codecs. None
      means 1 without a codec, and is an error with a codec. The proved value
      (`gossip.rules.proved_gamma`) is far below the best one, and above the
      best one peers diverge.
    topology: the neighbours that a peer averages with, the same in all rounds;
      rows and columns of W sum to 1.

  Returns:
    A Recipe of peers, in rounds. A peer keeps a copy of the parameters of each
    of its neighbours.

  Raises:
    ValueError: for a value out of its range, a topology that changes (copies
      would miss messages), a codec with errors larger than its input, or a
      codec without a gamma.

  Source:
    Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", ICML 2019, arXiv:1902.00340,
    algorithm 2.

  Example:
    >>> import asgd
    >>> asgd.choco_sgd(0.1, workers=8, gamma=0.5).order
    'rounds'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # x_i - x^_i already contains what earlier messages left out.
  plain_codec = compression.as_codec(codec, error_feedback=False)
  peer_topology = topologies.build(topology, workers)
  topologies.check_constant("choco_sgd", peer_topology)
  # E||codec(x) - x||^2 <= (1 - delta) ||x||^2, None if nothing is proved. With
  # delta <= 0 errors may grow without bound.
  delta = plain_codec.delta
  if delta is not None and delta <= 0:
    raise ValueError(
      "choco_sgd converges for no gamma with this codec: its errors are larger"
      f" than its input (delta {delta:.3g}): use one that does not scale up, as"
      " random_k with scaled=False, or top_k"
    )
  # delta is 1 for a codec without error; then gamma = 1 is exact averaging.
  if gamma is None and delta != 1:
    raise ValueError(_missing_gamma_error(peer_topology, delta))
  # The rule keeps x^_i and the copies x^_j, and computes q_i and the mix.
  return _with_peers(
    Recipe(algorithm),
    rules.choco(plain_codec, 1.0 if gamma is None else gamma),
    peer_topology,
    workers,
    compressed=codec is not None,
  )


def _missing_gamma_error(topology: gossip.Topology, delta: float | None) -> str:
  """Returns the error for a missing gamma, with the proved value if any."""
  proof = "nothing is proved for this codec and topology"
  if delta is not None and topology.symmetric:
    gamma = rules.proved_gamma(topology, delta)
    spectral_gap = 1 - topologies.second_eigenvalue(topology)
    proof = (
      f"{gamma:.2g} is proved to converge (delta {delta:.3g} of the codec,"
      f" spectral gap {spectral_gap:.3g}), but is far below the best value"
    )
  return (
    "choco_sgd with a codec needs gamma, the consensus step in (0, 1]: 1"
    f" diverges with coarse codecs; {proof}; tune it, beginning with gamma=0.1"
  )


def threshold_sharing(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, codec: _Codec = None,
  momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Decentralised threshold sharing: every peer applies every message.

    u_i = -eta v_i;   q_i = codec(u_i);   x <- x + (1 / N) sum_j q_j

  All peers begin with the same parameters and receive all messages, so their
  parameters stay equal. The part of an update that a codec leaves out is
  added to the next update (error feedback), as in Strom's method with its
  threshold.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
      As in DL4J, the codec encodes their updates, not gradients.
    codec: with error feedback if it needs that.

  Returns:
    A Recipe of peers, in rounds on the full graph.

  Source:
    Strom, "Scalable distributed DNN training using commodity GPU cloud
    computing", Interspeech 2015; the gradients sharing of Deeplearning4j.

  Example:
    >>> import asgd
    >>> asgd.threshold_sharing(0.1, workers=4).gossip.topology.name
    'full'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  # A peer does not apply its own u_i. When the peer mixes, it applies the coded
  # q_i, as the other peers do.
  return _with_peers(
    Recipe(algorithm),
    *(rules.share(compression.as_codec(codec)), "full", workers),
    compressed=codec is not None,
  )


def async_threshold_sharing(
  learning_rate: optax.ScalarOrSchedule, workers: int, *, codec: _Codec = None,
  momentum: float = 0.0, weight_decay: float = 0.0,
  optimizer: OptimizerLike = None
) -> Recipe:
  """Asynchronous threshold sharing: every peer adds each message on arrival.

    u_i = -eta v_i;   q_i = codec(u_i);   x_j <- x_j + q_i when q_i arrives at j

  A peer adds its own q_i at once, and starts its next job without waiting. All
  peers add the same messages in different orders, so their parameters differ by
  messages on the way. Messages are added, not averaged: N peers take N steps
  where those of `threshold_sharing` take the mean of N, so eta is smaller here.

  A gradient's staleness is how many messages its peer added during the job.

  Args:
    learning_rate, workers, momentum, weight_decay, optimizer: shared options.
      The codec encodes their updates, not gradients.
    codec: with error feedback if it needs that; Strom's is "threshold".

  Returns:
    A Recipe of peers that mix arrivals, on the full graph.

  Source:
    Strom, "Scalable distributed DNN training using commodity GPU cloud
    computing", Interspeech 2015.

  Example:
    >>> import asgd
    >>> codec = {"name": "threshold", "tau": 0.01}
    >>> asgd.async_threshold_sharing(0.1, workers=4, codec=codec).order
    'arrivals'
  """
  algorithm = sgd(learning_rate, momentum, weight_decay, optimizer)
  return _with_peers(
    Recipe(algorithm),
    *(rules.share(compression.as_codec(codec)), "full", workers),
    order=gossip.ARRIVALS,
    compressed=codec is not None,
  )


def local_d_psgd(
  learning_rate: optax.ScalarOrSchedule, workers: int, *,
  topology: _Topology = _RING, steps: int = 8, momentum: float = 0.0,
  weight_decay: float = 0.0, optimizer: OptimizerLike = None
) -> Recipe:
  """Local SGD on a graph: H local steps of each peer between two averages.

    x_i <- H steps of SGD from x_i;   x_i <- sum_j W_ij x_j

  On the full graph it is `model_averaging`, which is local SGD with a server.

  Args:
    learning_rate, workers, weight_decay, optimizer: shared options; a schedule
      counts rounds.
    momentum: the momentum of the steps; it is not reset by an average.
    topology: the neighbours that a peer averages with; rows and columns of W
      sum to 1.
    steps: H, batches between averages.

  Returns:
    A Recipe of peers, in rounds, with jobs of H batches.

  Source:
    Koloskova et al., "A unified theory of decentralized SGD with changing
    topology and local updates", ICML 2020, arXiv:2003.10422, algorithm 1.

  Example:
    >>> import asgd
    >>> asgd.local_d_psgd(0.1, workers=8, steps=4).steps
    4
  """
  tx = local_optimizer(optimizer, learning_rate, momentum, weight_decay)
  # SGD with rate 1 on its displacement moves a peer to the end of its job.
  recipe = displacement_recipe(sgd(1.0), tx, steps)
  return _with_peers(recipe, rules.average(), topology, workers)
