"""The type of a recipe: an algorithm, and where each of its parts runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from asgd import base, transforms
from asgd import gossip as gossip_lib
from asgd import losses as losses_lib
from asgd import server as server_lib
from asgd import worker as worker_lib


# eq=False: compared and hashed by identity, so that a Recipe can be hashed.
@dataclasses.dataclass(frozen=True, eq=False)
class RecipeBuild:
  """The arguments that `algorithms.build` has built a recipe from."""

  name: str
  maker: Callable[..., "Recipe"]
  learning_rate: optax.ScalarOrSchedule
  options: Mapping[str, Any]  # as given to `build`
  parts: tuple[Any, ...]  # the recipe's fields after building, without `build`


class Recipe(NamedTuple):
  """An algorithm, and where each of its parts runs.

  The functions of `asgd.algorithms` make recipes; users may make their own.

  Example:
    Adam at the server, on messages divided by their staleness.

    >>> import optax
    >>> import asgd
    >>> recipe = asgd.Recipe(
    ...   asgd.as_algorithm(optax.adam(0.001)),
    ...   at_server=asgd.scale_by_staleness(),
    ... )
    >>> recipe.order, recipe.every
    ('asynchronous', 1)
    >>> rounds = recipe.in_rounds(8)
    >>> rounds.order, rounds.every
    ('bulk_synchronous', 8)
  """

  algorithm: base.Algorithm  # at the server, once per update
  # At the worker, on each gradient before it is sent.
  at_worker: optax.GradientTransformation | None = None
  # At the server, on each message with the message's own Delay.
  at_server: optax.GradientTransformation | None = None
  every: int = 1  # messages per update
  # The server drops messages of a larger staleness. None: it drops none.
  max_staleness: int | None = None
  order: str = "asynchronous"  # the order (`asgd.orders`) it is designed for
  # (name, value) of each argument of that order's maker: tuples, so that a
  # Recipe can be hashed.
  order_options: tuple[tuple[str, Any], ...] = ()
  workers: int | None = None  # most workers it can serve; None: no limit
  # (loss) -> the Worker. None: a worker that sends one gradient.
  worker: Callable[[losses_lib.Loss], base.Worker] | None = None
  steps: int = 1  # batches in a job; `asgd.stacking.job_batches` stacks them
  # Jobs that a worker does on one ticket, before it fetches the next.
  fetch_every: int = 1
  # A worker sends the sum of its gradients every `push_every` jobs; its other
  # messages are zeros.
  push_every: int = 1
  # Messages are models, not gradients: they are not weighted by the size of the
  # batch, and each job needs its own ticket.
  mixes: bool = False
  # (weights) -> the optimizer state that travels with the parameters
  # (`base.carry`). None: no state travels.
  carried: Callable[[base.Params], Any] | None = None
  # How peers exchange messages; None: workers exchange them with a server.
  gossip: gossip_lib.Gossip | None = None
  build: RecipeBuild | None = None  # None: of a recipe built by hand

  @property
  def protocol(self) -> str:
    """Name of the protocol that trains it: "server" or "peers"."""
    return "peers" if self.gossip else "server"

  @property
  def rounds(self) -> bool:
    """Whether messages are counted in rounds of all workers."""
    if self.gossip:
      return self.order == gossip_lib.ROUNDS
    return self.order not in ("asynchronous", "with_stops")

  def in_rounds(self, workers: int) -> "Recipe":
    """Returns the recipe with updates on the mean of one message per worker."""
    return self._replace(every=workers, order="bulk_synchronous")

  def one_message(self) -> base.Algorithm:
    """Returns the Algorithm for updates on single messages: `at_server`, then
    `algorithm`."""
    if self.at_server is None:
      return self.algorithm
    return transforms.precede(self.algorithm, self.at_server)

  def make_worker(self, loss: losses_lib.Loss) -> base.Worker:
    """Builds the Worker of this recipe for a loss of any form that
    `asgd.losses.as_loss` takes; ValueError if the parts do not fit."""
    if self.worker is None:
      if self.steps != 1:
        raise ValueError(
          f"a gradient worker takes one batch per job, not steps={self.steps};"
          " give the Recipe a worker, such as asgd.worker.local_worker"
        )
      return worker_lib.gradient_worker(loss, self.at_worker)
    if self.at_worker is not None:
      raise ValueError(
        "the Recipe has a worker, which would ignore its `at_worker` transform;"
        " put the transform into the worker"
      )
    worker = self.worker(loss)
    # To mix in a worker's model, the server computes it from the ticket's
    # parameters and the displacement. A second job on the same ticket would not
    # have started at these parameters.
    return worker._replace(kept=base.NEVER) if self.mixes else worker

  def server(
    self,
    *,
    gate: server_lib.Gate = server_lib.accept_all,
    statistics_decay: float = 0.9,
  ) -> base.Server:
    """Builds the server, which also owns the statistics of BatchNorm. If the
    recipe has peers, this is the part of a peer that needs no neighbours.

    Args:
      gate: decides which messages count, beside `max_staleness`.
      statistics_decay: the part of the old statistics that is kept, in [0, 1).

    Raises:
      ValueError: for a value out of its range, or if `algorithm` is an optax
        transform.
    """
    if not hasattr(self.algorithm, "send"):
      raise ValueError(
        "a Recipe needs an Algorithm, not an optax transform: wrap it with"
        " asgd.as_algorithm(tx)"
      )
    # The algorithm gets weights; statistics of BatchNorm are averaged beside
    # it.
    algorithm = transforms.own_statistics(self.algorithm, statistics_decay)
    if self.max_staleness is not None:
      gate = server_lib.max_staleness(self.max_staleness, gate)
    # Jobs between two pushes send zeros, which must not count as messages.
    if self.push_every > 1:
      gate = server_lib.pushed(gate)
    # The rule wraps last, so that it sees statistics as well as weights.
    if self.gossip:
      algorithm = self.gossip.rule.wrap(algorithm)
    return server_lib.make_server(
      algorithm,
      every=self.every,
      gate=gate,
      at_server=self.at_server,
      workers=self.workers,
    )

  def peer(
    self,
    *,
    gate: server_lib.Gate = server_lib.accept_all,
    statistics_decay: float = 0.9,
  ) -> gossip_lib.Peer:
    """Builds a peer of a recipe without a server, with the arguments of
    `server`; ValueError for a recipe with a server."""
    if not self.gossip:
      raise ValueError(
        "the recipe has a server and no peers: use d_psgd or another recipe of"
        " asgd.PEER_RECIPES"
      )
    local_server = self.server(gate=gate, statistics_decay=statistics_decay)
    # The most messages in one mix. The number fixes the shapes of its arrays.
    slots = self.gossip.topology.slots
    return gossip_lib.make_peer(local_server, self.gossip.rule, slots)
