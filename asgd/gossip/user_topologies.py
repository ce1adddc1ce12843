"""Topologies that a user gives: links, or matrices of weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from asgd import checks
from asgd.gossip.topology import Topology, check_sums, of_links, of_matrices


def graph(
  workers: int,
  *,
  edges: Sequence[Sequence[int]] | np.ndarray = (),
  directed: bool = False,
  weights: str | None = None,
) -> Topology:
  """A user's graph, given by its links.

  Args:
    workers: n.
    edges: pairs (i, j), or integers [E, 2]: i sends to j; unless `directed`, j
      also sends to i.
    directed: whether links have one direction.
    weights: "metropolis" or "uniform". None is "metropolis" if all links have
      both directions, else "uniform".

  Raises:
    ValueError: for an edge that is no pair of two different peers.
  """
  checks.flag("directed", directed)
  if isinstance(edges, np.ndarray):
    edges = edges.tolist()  # so that both are checked in the same way
  if isinstance(edges, str) or not isinstance(edges, Sequence):
    raise ValueError(f"edges must be pairs, not {checks.shown(edges)}")
  links = np.zeros((workers, workers), bool)
  for edge in edges:
    is_pair = isinstance(edge, Sequence | np.ndarray) and np.ndim(edge) == 1
    pair: list[Any] = [*edge] if is_pair else [edge]
    if len(pair) != 2:
      raise ValueError(f"edges must be pairs, not {checks.shown(edge)}")
    for peer in pair:
      checks.integer("a peer of edges", peer, 0, workers - 1)
    sender, receiver = pair
    if sender == receiver:
      raise ValueError(
        f"edges has {checks.shown(edge)}, but no peer is its own neighbour:"
        " drop it; a peer's weight of itself is 1 minus the others"
      )
    links[receiver, sender] = True
    if not directed:
      links[sender, receiver] = True
  return of_matrices("graph", of_links(links, weights))


def matrix(workers: int, *, weights: Any = ()) -> Topology:
  """A user's weights: a matrix, or a sequence of matrices, one for each round.

  Args:
    workers: n.
    weights: `[n][n]` or `[T][n][n]`, none negative, each column with the sum 1;
      `[i][j]` is the weight that peer i gives a message of peer j, `[i][i]` the
      weight that it gives itself.

  Raises:
    ValueError: for weights of another shape, sign or sum, or that are no real
      numbers.
  """
  try:
    matrices = np.asarray(weights)
  except ValueError:  # rows of different lengths
    matrices = np.zeros(0)
  if matrices.dtype.kind not in "biuf":
    raise ValueError(
      "weights must be a matrix of real numbers, or several, not"
      f" {checks.shown(weights)}"
    )
  matrices = matrices.astype(np.float64)
  if matrices.ndim == 2:
    matrices = matrices[None]
  if matrices.ndim != 3 or matrices.shape[1:] != (workers, workers):
    raise ValueError(
      f"weights must be a matrix of {workers} rows and columns, one for each"
      f" peer, or several, not {checks.shown(weights)}"
    )
  if not np.isfinite(matrices).all():
    not_finite = matrices[~np.isfinite(matrices)][0]
    raise ValueError(
      f"weights must be finite, but one is {not_finite:g}: use 0 to 1"
    )
  if not len(matrices) or not (matrices >= 0).all():
    raise ValueError(
      f"weights must be 0 or more, not {checks.shown(weights)}"
    )
  topology = of_matrices("matrix", matrices)
  check_sums(topology, columns=True)  # every rule needs these sums
  return topology
