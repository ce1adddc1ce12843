"""What makes the shards and workers of a parameter server in a world.

They are what processes of a machine have (`asgd.live.server.processes`), over
the sockets, the memory and the disk of the world.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asgd import base, sharding, simulator
from asgd.live.duty import Duty
from asgd.live.hosts import Inside, Make
from asgd.live.hosts.base import SHARD
from asgd.live.links.sockets import ShardServer, SocketLink
from asgd.live.server.hosted_shard import HostedShard
from asgd.live.server.hosted_worker import HostedWorker
from asgd.live.setup import Setup, slot_counts
from asgd.live.shard import Shard, ShardStorage
from asgd.live.worker import Reach
from asgd.live.world.hosts import WorldHosts
from asgd.live.world.run import World, WorldScript
from asgd.live.world.storage import Memory

_PATIENCE = 0.5  # seconds after which a worker repeats what is not answered


class Training(NamedTuple):
  """What is trained."""

  setup: Setup
  server: base.Server
  worker: base.Worker
  steps: simulator.Steps
  params: Any  # before the first message
  plan: sharding.ShardPlan | None
  duty: Duty
  batch: Callable[[int, int], Any]  # that of the duty, but at once
  wire: str | None  # dtype in which parameters and messages travel

  @property
  def parts(self) -> list[Any]:
    """The parameters of each shard."""
    if self.plan is None:
      return [self.params]
    return sharding.split(self.plan, self.params)


class WorldMakers:
  """Makes the parties of a run; see `asgd.live.server.cluster.Makers`."""

  def __init__(
    self,
    world: World,
    hosts: WorldHosts,
    training: Training,
    images: Sequence[Any] | None = None,
  ):
    """The images are those of a checkpoint."""
    self._world, self._hosts, self._training = world, hosts, training
    shards = range(training.setup.shards)
    self._images = images or [None for _ in shards]
    # That of each shard as it is now, once it is made.
    self.shards: list[Shard | None] = [None for _ in shards]

  def _memory(self, index, *like):
    world = self._world
    folder = world.folder / "memory" / f"shard-{index}"
    counts = slot_counts(self._training.setup)
    options = {"compress": self._training.wire}
    return Memory(
      *(world.scheduler, world.disk, folder, counts, like), **options
    )

  def _path(self, index):
    return self._world.folder / f"{index}.sock"

  def shard(self, index: int, resumed: bool) -> Make:
    """See `Makers`."""
    self.shards[index] = None
    return functools.partial(self._make_shard, index, resumed)

  def _make_shard(self, index, resumed, inside: Inside):
    world, training = self._world, self._training
    state = simulator.start(training.server, training.parts[index])
    memory = self._memory(index, *training.duty.shares()[index], state)
    store = ShardStorage.open(
      world.folder, index, memory, self._images[index], disk=inside.disk
    )
    shard = Shard(
      *(index, training.setup, training.steps, state, store),
      now=inside.clock(),
      resumed=resumed,
    )
    lead = self._path(0) if index and training.setup.consistent else None
    server = ShardServer(
      *(shard, self._path(index)),
      clock=inside.clock,
      lead=lead,
      network=world.network,
    )
    self.shards[index] = shard
    return HostedShard(inside, server)

  def _living(self, index):
    """Returns a shard, None if its process has ended."""
    host = self._hosts.hosts.get((SHARD, index))
    return self.shards[index] if host is not None and host.alive else None

  def worker(self, worker: int, life: int) -> Make:
    """See `Makers`."""

    def make(inside):
      return HostedWorker(
        *(inside, worker, life, self._reach), patience=_PATIENCE
      )

    return make

  def _reach(self, worker, life, duty: Duty, inside: Inside):
    del worker, life
    shares, world = duty.shares(), self._world
    paths = [self._path(index) for index in range(len(shares))]
    link = SocketLink(paths, world.network)

    def memories():
      opened = [self._memory(i, *like, None) for i, like in enumerate(shares)]
      for index, memory in enumerate(opened):
        memory.shard = functools.partial(self._living, index)
      return opened

    return Reach(
      *(link, memories, inside.clock, inside.wait),
      *(WorldScript(world), None, link.close),
    )

  def close(self) -> None:
    """Nothing is left to be ended."""
