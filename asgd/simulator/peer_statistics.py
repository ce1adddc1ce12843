"""Statistics over all peers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from asgd import base, gossip


def mean_params(
  states: Sequence[gossip.PeerState], weights: Sequence[Any]
) -> base.Params:
  """Returns the mean of the parameters of peers, as NumPy arrays.

  Args:
    states: states of the present peers.
    weights: `Peer.weight` of each peer; with push-sum the result is the mean of
      x = w z.
  """
  shares = np.array([float(w) for w in weights])
  shares = shares / shares.sum()

  def mean(*leaves):
    first_leaf, total = np.asarray(leaves[0]), 0.0
    for share, leaf in zip(shares, leaves, strict=True):
      total = total + share * np.asarray(leaf, np.float64)
    return np.asarray(total).astype(first_leaf.dtype)

  return jax.tree.map(mean, *(state.server.params for state in states))


def consensus(
  states: Sequence[gossip.PeerState], mean: base.Params
) -> float:
  """Returns the consensus distance, in the unit of a parameter.

    sqrt(1 / (n k) sum_i ||x_i - mean||^2),   k the trained parameters

  Args:
    states: states of n peers.
    mean: the mean of their parameters.
  """
  centre = jax.tree.leaves(base.weights_of(mean))
  square = count = 0.0
  for state in states:
    leaves = jax.tree.leaves(base.weights_of(state.server.params))
    for x, c in zip(leaves, centre, strict=True):
      difference = np.asarray(x, np.float64) - np.asarray(c, np.float64)
      square += float(np.square(difference).sum())
      count += difference.size
  return float(np.sqrt(square / max(count, 1)))
