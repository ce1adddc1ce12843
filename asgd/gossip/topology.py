"""The type of topologies, their speed of averaging, and their checks.

`asgd.gossip.topologies` makes topologies by name.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from asgd import checks

_MODULUS_TOLERANCE = 1e-9  # tolerance for a modulus of an eigenvalue to equal 1
_SUM_TOLERANCE = 1e-6  # tolerance for a row or column to sum to 1
WEIGHTS = "metropolis", "uniform"

Matrix = npt.NDArray[np.float64]
Links = npt.NDArray[np.bool_]  # [n, n]: whether i receives from j, j != i


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as an object
class Topology:
  """Which peer receives from which in each round, and the weights."""

  name: str
  matrices: npt.NDArray[np.float64]  # [T, n, n]; round k has matrix k mod T

  @property
  def workers(self) -> int:
    """Number of peers, n."""
    return int(self.matrices.shape[1])

  @property
  def period(self) -> int:
    """Number of rounds after which the matrices repeat, T."""
    return len(self.matrices)

  @functools.cached_property
  def first_rounds(self) -> list[int]:
    """For each round, the first round with the same matrix."""
    first_round: dict[bytes, int] = {}
    matrices = (matrix.tobytes() for matrix in self.matrices)
    return [first_round.setdefault(m, k) for k, m in enumerate(matrices)]

  @functools.cached_property
  def links(self) -> npt.NDArray[np.bool_]:
    """[T, n, n]: whether peer i receives from peer j in a round."""
    diagonal = np.eye(self.workers, dtype=bool)
    return (self.matrices != 0) & ~diagonal

  @functools.cached_property
  def union(self) -> Links:
    """[n, n]: whether peer i receives from peer j in any round."""
    return np.asarray(self.links.any(0))

  @functools.cached_property
  def _senders(self) -> list[list[list[int]]]:
    return [[np.flatnonzero(row).tolist() for row in m] for m in self.links]

  def neighbours(self, peer: int, round: int = 0) -> list[int]:
    """Returns the peers from which a peer receives in a round, ascending."""
    return self._senders[round % self.period][peer]

  def weight(self, round: int, receiver: int, sender: int) -> float:
    """Returns the weight of a message put in a round."""
    return float(self.matrices[round % self.period, receiver, sender])

  @functools.cached_property
  def _slots(self) -> list[dict[int, int]]:
    return [
      {int(j): slot for slot, j in enumerate(np.flatnonzero(row))}
      for row in self.union
    ]

  def slot(self, receiver: int, sender: int) -> int:
    """Returns the index of a sender among all senders of a receiver, over all
    rounds."""
    return self._slots[receiver][sender]

  @property
  def slots(self) -> int:
    """The largest number of senders of a peer, over all rounds."""
    return int(self.union.sum(1).max())

  @property
  def symmetric(self) -> bool:
    """Whether all links have both directions, with equal weights."""
    return np.allclose(
      self.matrices, self.matrices.transpose(0, 2, 1), 0, _SUM_TOLERANCE
    )


def of_matrices(name: str, matrices: Any) -> Topology:
  """Returns a topology of one matrix, or of one matrix for each round."""
  matrices = np.asarray(matrices, np.float64)
  if matrices.ndim == 2:
    matrices = matrices[None]
  return Topology(name, matrices)


def of_links(links: Links, weights: str | None = None) -> Matrix:
  """Returns the weights of a graph.

  Args:
    links: bool[n, n], whether i receives from j.
    weights: one of WEIGHTS; None is "metropolis" for undirected graphs and
      "uniform" for directed ones.

  Raises:
    ValueError: for unknown weights, or Metropolis weights on a directed graph.
  """
  directed = not (links == links.T).all()
  weights = weights or ("uniform" if directed else "metropolis")
  checks.one_of("weights", weights, WEIGHTS)
  if weights == "uniform":
    matrix = links / (1 + links.sum(0))
  elif directed:
    raise ValueError(
      "weights 'metropolis' are for undirected graphs, but this one is"
      " directed: use 'uniform'"
    )
  else:
    degree = links.sum(1)
    matrix = links / (1 + np.maximum(degree[:, None], degree[None]))
  # The diagonal, which is the weight that a peer gives itself, completes the
  # columns. Metropolis weights are symmetric, so their rows sum to 1, too.
  return matrix + np.diag(1 - matrix.sum(0))


def _reached_peers(links: Links, start: int = 0) -> npt.NDArray[np.bool_]:
  """Returns bool[n]: the peers that messages of `start` reach, also over other
  peers."""
  is_reached = np.zeros(len(links), bool)
  is_reached[start] = True
  while True:
    # Add the receivers of all peers that are reached.
    is_reached_next = is_reached | links[:, is_reached].any(1)
    if (is_reached_next == is_reached).all():
      return is_reached
    is_reached = is_reached_next


def reaches(links: Links) -> bool:
  """Whether messages of every peer reach every other one over links."""
  return bool(_reached_peers(links).all() and _reached_peers(links.T).all())


def check_connected(topology: Topology) -> None:
  """Raises ValueError unless messages of every peer reach every other one, over
  any number of rounds."""
  links, name = topology.union, topology.name
  for direction, path in (
    (links, "from peer 0 to peer {}"),
    (links.T, "from peer {} to peer 0"),
  ):
    is_reached = _reached_peers(direction)
    if not is_reached.all():
      peer = int(np.argmin(is_reached))
      raise ValueError(
        f"the topology {name!r} is not connected: no path of links leads"
        f" {path.format(peer)}; add links between {int(is_reached.sum())} of"
        f" the peers and the other {int((~is_reached).sum())}"
      )


def check_sums(topology: Topology, *, columns: bool) -> None:
  """Raises ValueError unless mixing with the weights keeps the mean over peers.

  Args:
    topology: the topology to check.
    columns: whether only columns need to sum to 1, as for push-sum.
  """
  kinds = [("column", 1)] if columns else [("row", 2), ("column", 1)]
  for kind, axis in kinds:
    sums = _sums(topology.matrices, axis)
    wrong_sums = np.argwhere(~_are_one(sums))
    if not len(wrong_sums):
      continue
    round_, peer = wrong_sums[0]
    remedy = _sum_remedy(topology.matrices, axis)
    if topology.name != "matrix":
      remedy = "use weights='metropolis', or sgp, which needs columns alone"
      if (topology.union != topology.union.T).any():
        remedy = "use sgp, which needs columns alone, or another topology"
    raise ValueError(
      f"{kind} {peer} of the weights of topology {topology.name!r}"
      f"{f', round {round_},' if topology.period > 1 else ''} sums to"
      f" {sums[round_, peer]:.4g}, not to 1, so mixing would change the mean"
      f" over peers: {remedy}"
    )


def _sums(matrices: Any, axis: int) -> Any:
  # A user's weights may overflow: the caller reports the sum.
  with np.errstate(over="ignore", invalid="ignore"):
    return matrices.sum(axis)


def _are_one(sums: Any) -> Any:
  return np.abs(sums - 1) <= _SUM_TOLERANCE  # False for NaN


def _sum_remedy(matrices: Any, axis: int) -> str:
  """Returns how a user can make the rows (axis 2) or columns (1) of a matrix
  sum to 1, without breaking the other sums."""
  sums = _sums(matrices, axis)
  if not np.isfinite(sums).all():
    return "use finite weights, from 0 to 1"
  if not sums.all():
    return "give each peer a positive weight of itself, on the diagonal"
  # Dividing rows by their sums must not break the columns, and vice versa.
  normalised = matrices / np.expand_dims(sums, axis)
  if all(_are_one(normalised.sum(each)).all() for each in (1, 2)):
    return "divide by the sum"
  return (
    "use symmetric weights, such as those of topology 'graph', as rows and"
    " columns must both sum to 1; or sgp, which needs columns alone: divide"
    " each column by its sum"
  )


def check_agrees(topology: Topology) -> None:
  """Raises ValueError if peers never converge to one mean: if the second
  largest eigenvalue of the product of all rounds has modulus 1."""
  # A connected topology converges if each peer has a weight of itself.
  diagonals = np.diagonal(topology.matrices, axis1=1, axis2=2)
  if topology.workers < 2 or (diagonals > 0).all():
    return
  if second_eigenvalue(topology) < 1 - _MODULUS_TOLERANCE:
    return
  peer = int(np.argwhere(diagonals <= 0)[0, 1])
  raise ValueError(
    f"peers never agree by the weights of topology {topology.name!r}:"
    " |lambda_2| is 1, as if two peers always swapped their parameters. Give"
    f" each peer a positive weight of itself (peer {peer} has 0), as"
    " (W + I) / 2 does"
  )


def check_constant(
  rule_name: str, topology: Topology, *, symmetric: bool = False
) -> None:
  """Raises ValueError unless the weights are the same in all rounds, and
  symmetric if `symmetric`.

  Args:
    rule_name: the rule that needs such weights, for the error.
    topology: the topology to check.
    symmetric: whether the weights must be symmetric.
  """
  if topology.period > 1 or (symmetric and not topology.symmetric):
    kind = "symmetric and the same" if symmetric else "the same"
    raise ValueError(
      f"{rule_name} needs weights that are {kind} in all rounds, but those of"
      f" topology {topology.name!r} are not: use ring, or d_psgd"
    )


# Speeds of averaging, and variants.


def _product(topology: Topology) -> Matrix:
  # Round 0 is applied first, so it is the rightmost factor.
  return functools.reduce(lambda a, b: b @ a, topology.matrices)


def second_eigenvalue(topology: Topology) -> float:
  """Returns |lambda_2| per round: the second largest modulus of an eigenvalue.
  For several rounds it is that of their product, to the power of 1 / T."""
  moduli = np.sort(np.abs(np.linalg.eigvals(_product(topology))))[::-1]
  return float(moduli[1] ** (1 / topology.period))


def second_singular_value(topology: Topology) -> float:
  """Returns the second largest singular value per round.

  It bounds the fraction of a distance to the mean that may remain after a
  round, and equals |lambda_2| for symmetric weights.
  """
  values = np.linalg.svd(_product(topology), compute_uv=False)
  return float(values[1] ** (1 / topology.period))


def smallest_eigenvalue(topology: Topology) -> float:
  """Returns the smallest eigenvalue of symmetric weights, over all rounds."""
  return float(np.linalg.eigvalsh(topology.matrices).min())


def lazy(topology: Topology) -> Topology:
  """Returns a topology with (W + I) / 2 instead of W; its eigenvalues are 0 or
  more if the weights are symmetric."""
  half = (topology.matrices + np.eye(topology.workers)) / 2
  return Topology(topology.name, half)


def two_colours(topology: Topology) -> list[int] | None:
  """Returns a colour, 0 or 1, for each peer such that linked peers differ; None
  if there is no such colouring.

  If peers of colour 0 only ask, and peers of colour 1 only answer, no peer
  waits for one that waits.
  """
  links = topology.union | topology.union.T
  colours = np.full(topology.workers, -1)
  colours[0], unvisited = 0, [0]  # a connected graph has one colouring at most
  while unvisited:
    peer = unvisited.pop()
    for neighbour in np.flatnonzero(links[peer]):
      if colours[neighbour] == colours[peer]:
        return None
      if colours[neighbour] < 0:
        colours[neighbour] = 1 - colours[peer]
        unvisited.append(int(neighbour))
  return colours.tolist()
