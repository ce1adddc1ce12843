"""Makes the shards and workers of a parameter server in a simulated world.

Their classes are those of a real run (`asgd.live.server.makers`); the sockets,
the memory and the disk are those of the world.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asgd import sharding
from asgd.live.hosts.base import SHARD
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import slot_counts
from asgd.live.shard import Shard
from asgd.live.world.hosts import World, WorldHosts
from asgd.live.world.run import WorldScript
from asgd.live.world.scenario import Training
from asgd.live.world.storage import Memory


class WorldSite:
  """The paths and memory of a run; see `asgd.live.hosts.site.Site`."""

  spans, profile, machine = False, None, ""
  patience = 0.5  # seconds after which a worker repeats a frame

  def __init__(self, world: World, hosts: WorldHosts, training: Training):
    self._world, self._hosts = world, hosts
    self.setup, self.run = training.setup, world.folder
    self.compress = training.wire

  def socket(self, index: int) -> Path:
    """See `Site`."""
    return self.run / f"{index}.sock"

  def open_memory(self, index: int, *like: Any) -> Memory:
    """See `Site`."""
    scheduler, disk = self._world.scheduler, self._world.disk
    folder = self.run / "memory" / f"shard-{index}"
    memory = Memory(
      *(scheduler, disk, folder, slot_counts(self.setup), like),
      compress=self.compress,
    )
    if like[-1] is None:  # opened by a worker: its writes are checked
      memory.shard = lambda: self.shard(index)
    return memory

  def shard(self, index: int) -> Shard | None:
    """Returns a shard; None if its process has ended or has not created it."""
    host = self._hosts.hosts.get((SHARD, index))
    if host is None or not host.is_alive or host.made_object is None:
      return None
    shard: Shard = host.made_object.server.shard
    return shard


def make(
  world: World,
  site: WorldSite,
  training: Training,
  images: Sequence[Any] | None = None,
) -> ServerMakers:
  """Returns the makers of a run's shards and workers. `images` are those of a
  checkpoint; None: there is no checkpoint."""
  parts: list[Any] = [training.params]
  if training.plan is not None:
    parts = sharding.split(training.plan, training.params)
  # They have the methods of a `Site` and of a `UnixNetwork` that makers call.
  world_site: Any = site
  network: Any = world.network
  return ServerMakers(
    *(world_site, lambda: training.server, parts),
    steps=training.steps,
    network=network,
    images=images,
    make_script=lambda *args: WorldScript(world),
  )
