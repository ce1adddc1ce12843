"""Makers of the shards and workers of a parameter server.

Threads and processes of one machine exchange messages through sockets and
shared memory (`links.sockets`, `slots`): a call of Ray takes 0.5 ms, a frame on
a socket a twentieth of that. Shards run on the driver's machine. Workers on
other machines call the hosts of shards (`links.remote`), and the lead writes
their spans and faults (`links.notes`).

A simulated world and the tests replace the network and the faults.
"""

from collections.abc import Callable, Sequence
from typing import Any

from asgd import base, simulator
from asgd.live import faults as faults_lib
from asgd.live.hosts import Make
from asgd.live.hosts.site import Site
from asgd.live.links.sockets import UNIX, UnixNetwork
from asgd.live.server.hosted_shard import ShardMaker
from asgd.live.server.hosted_worker import MakeScript, WorkerMaker
from asgd.live.shard.images import Image


class ServerMakers:
  """Makes the shards and workers of a run, in threads or in processes."""

  def __init__(
    self,
    site: Site,
    make_server: Callable[[], base.Server],
    parts: Sequence[Any],
    *,
    steps: simulator.Steps | None = None,
    network: UnixNetwork = UNIX,
    faults: Sequence[faults_lib.Fault] = (),
    images: Sequence[Image] | None = None,
    make_script: MakeScript = faults_lib.script_of,
  ):
    """Stores the arguments of the makers.

    Args:
      site: folders and settings of the run.
      make_server: makes the server; called in the hosts of shards.
      parts: parameters of each shard, before the first message.
      steps: compiled steps of the server, which threads share. None: each shard
        and each worker compiles in its process.
      network: makes the sockets of shards and workers.
      faults: the faults to inject, each once.
      images: the image of each shard in a checkpoint; used if the memory is
        lost.
      make_script: returns the Script that injects a worker's faults.
    """
    self.site, self._network, self._parts = site, network, parts
    self._make_server, self._steps = make_server, steps
    self._faults, self._make_script = faults, make_script
    self._images: Sequence[Image | None] = images or [None] * len(parts)

  def shard(self, index: int, resumed: bool) -> Make:
    """Returns the maker of a shard. If `resumed`, the shard's journal has rows
    from earlier drivers, and no other participant is alive."""
    part, image = self._parts[index], self._images[index]
    return ShardMaker(
      *(self.site, self._network, self._make_server, self._steps),
      *(index, part, image, resumed),
    )

  def worker(self, worker: int, restarts: int) -> Make:
    """Returns the maker of a worker; `restarts` counts the worker's earlier
    hosts."""
    return WorkerMaker(
      *(self.site, self._network, worker, restarts),
      *(self._faults, self._make_script),
      # Workers in threads share programs that are compiled already.
      warm_up=self._steps is None,
    )
