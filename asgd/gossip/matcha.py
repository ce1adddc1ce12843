"""MATCHA: in each round some matchings of a graph, drawn for a budget.

A matching is a set of links of which each peer has at most one, so all messages
of a matching travel at the same time. The budget is the fraction of matchings
that a round activates on average. Links without which the graph would average
slowly are activated more often.

Index letters in shape comments:
  n  peers
  m  matchings
  T  rounds
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from asgd.gossip.topology import Links, Matrix

_STEPS = 200  # of the ascent that finds the probabilities
_ROUNDING = 1e-12  # changes of lambda_2, and slopes, that count as 0

Colours = npt.NDArray[np.int_]  # [n, n], the matching of a link; -1: no link


def matchings(links: Links) -> Colours:
  """Divides the links of an undirected graph into matchings.

  A link joins the first matching in which neither of its peers has a link. So
  there are fewer than 2 d matchings, where d is the largest number of
  neighbours.

  Example:
    >>> from asgd.gossip import topologies
    >>> matchings(topologies.ring(4).union).tolist()[0]
    [-1, 0, -1, 1]
  """
  colours = np.full(links.shape, -1)
  for i, j in np.argwhere(np.triu(links)):
    taken_colours = {*colours[i].tolist(), *colours[j].tolist()}
    candidates = range(len(taken_colours))
    colour = next(c for c in candidates if c not in taken_colours)
    colours[i, j] = colours[j, i] = colour
  return colours


def laplacian(colours: Colours, factors: npt.NDArray[np.float64]) -> Matrix:
  """Returns sum_j factors[j] L_j, [n, n], for factors [m] of the matchings."""
  # A colour of -1, no link, reads the last entry, which is 0.
  weights = np.append(factors, 0.0)[colours]
  return np.asarray(np.diag(weights.sum(1)) - weights)


def probabilities(
  colours: Colours, budget: float
) -> npt.NDArray[np.float64]:
  """Returns the probability of each matching, [m].

    max lambda_2(sum_j p_j L_j),   sum_j p_j = budget m,   0 <= p_j <= 1

  lambda_2 is concave, and has the derivative u' L_j u for its eigenvector u.
  The projected ascent begins with equal probabilities.
  """
  n_matchings = int(colours.max()) + 1
  best_p = p = np.full(n_matchings, budget)
  best_value = -1.0
  for step in range(_STEPS):
    values, vectors = np.linalg.eigh(laplacian(colours, p))
    if values[1] > best_value + _ROUNDING:
      best_value, best_p = values[1], p
    u = vectors[:, 1]
    squares = (u[:, None] - u[None]) ** 2 / 2  # a link is in both triangles
    slopes = np.array([squares[colours == j].sum() for j in range(n_matchings)])
    slope_norm = np.linalg.norm(slopes - slopes.mean())
    if slope_norm < _ROUNDING:
      break
    p = _project(
      p + slopes / slope_norm / np.sqrt(step + 1.0), budget * n_matchings
    )
  return best_p


def _project(values: npt.NDArray[np.float64], total: float) -> Any:
  """Returns the nearest point of [0, 1]^m with a sum of `total`."""
  low, high = values.min() - 1.0, values.max()  # shifts with the sums m and 0
  for _ in range(60):
    shift = (low + high) / 2
    if np.clip(values - shift, 0.0, 1.0).sum() > total:
      low = shift
    else:
      high = shift
  return np.clip(values - high, 0.0, 1.0)


def contraction(
  colours: Colours, p: npt.NDArray[np.float64], alpha: float
) -> float:
  """Returns || E[W' W] - J ||_2, the fraction of the squared distance to the
  mean that remains after a round.

    E[W' W] = I - 2 alpha L + alpha^2 (L^2 + 2 V)
    L = sum_j p_j L_j,   V = sum_j p_j (1 - p_j) L_j
  """
  mean = laplacian(colours, p)
  spread = laplacian(colours, p * (1 - p))
  n = len(mean)
  square = np.eye(n) - 2 * alpha * mean
  square += alpha**2 * (mean @ mean + 2 * spread)
  return float(np.abs(np.linalg.eigvalsh(square - 1 / n)).max())


def consensus_step(
  colours: Colours, p: npt.NDArray[np.float64]
) -> float:
  """Returns alpha, which minimises `contraction` between 0 and 1 / the largest
  number of neighbours."""
  from scipy import optimize  # only here: other topologies need no SciPy

  max_alpha = 1 / int((colours >= 0).sum(1).max())
  minimum = optimize.minimize_scalar(
    lambda alpha: contraction(colours, p, alpha),
    bounds=(0.0, max_alpha),
    method="bounded",
    options={"xatol": 1e-9},
  )
  return float(minimum.x)


def draw(
  colours: Colours,
  p: npt.NDArray[np.float64],
  alpha: float,
  rounds: int,
  seed: int,
) -> npt.NDArray[np.float64]:
  """Returns the weights of all rounds, [T, n, n]. Each matching is active in a
  fraction p_j of the rounds, but in at least one round."""
  rng = np.random.default_rng((seed, len(colours), rounds))
  counts = np.maximum(np.rint(p * rounds), 1)
  is_active = np.stack([rng.permutation(rounds) < c for c in counts], axis=1)
  eye = np.eye(len(colours))
  return np.stack(
    [eye - alpha * laplacian(colours, row.astype(float)) for row in is_active]
  )
