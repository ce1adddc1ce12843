"""Runs of the dense parameter server in a simulated world."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asgd.live.hosts.base import SHARD
from asgd.live.links.base import Disconnected
from asgd.live.server.cluster import ServerCluster
from asgd.live.shard import Shard
from asgd.live.shard.recovery import align_journals
from asgd.live.world import invariants, server_makers
from asgd.live.world import scenario as scenario_lib
from asgd.live.world.hosts import WorldHosts
from asgd.live.world.injections import Injection, Menu, Scenario
from asgd.live.world.run import COMMON, WorldRun
from asgd.live.world.scenario import JOBS, WORKERS
from asgd.live.world.scheduler import Stuck


class ServerHosts(WorldHosts):
  """Hosts that raise an error if the driver kills a live shard without reason.
  A shard is stopped for less than the driver's patience, so the only reason is
  a call with a cut connection."""

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    host = self.hosts[kind, index]
    if kind == SHARD and host.is_alive and not self.cuts:
      raise Stuck(f"{kind} {index} does not answer")
    super().kill(kind, index)


class ServerRun(WorldRun):
  """One scenario of a parameter server."""

  INVARIANTS, HOSTS = invariants.NAMES, ServerHosts
  OPEN = ".csv", ".bin"
  FLIPPED = ("shard-*/snapshot",)

  def __init__(self, scenario: Scenario, folder: Path):
    super().__init__(scenario, folder)
    self._training = scenario_lib.training(scenario.case, self.simulate_work)
    self._shards: list[Shard] = []  # at the end of the run
    self._images: list[Any] | None = None  # the last checkpoint

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(scenario_lib.CASES, scenario_lib.KINDS, WORKERS, JOBS)

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    training, hosts = self._training, self.make_hosts()
    site = server_makers.WorldSite(self.world, hosts, training)
    makers = server_makers.make(self.world, site, training, self._images)
    cluster = ServerCluster(
      *(training.setup, training.plan, hosts, makers, lambda: training.spec),
      resumed=resumed,
    )

    def step() -> bool:
      cluster.check()
      if not (cluster.status() and cluster.finished):
        return False
      count = training.setup.shards
      shards = [site.shard(index) for index in range(count)]
      self._shards = [shard for shard in shards if shard is not None]
      # A shard may have exited after its last job; then the driver restarts it.
      return len(self._shards) == count

    def save() -> None:
      with contextlib.suppress(Disconnected):
        # None: there are no images of one row yet.
        self._images = cluster.images() or self._images

    def drive() -> None:
      if resumed:
        align_journals(training.setup, self.folder, self.memory)
      cluster.start()
      self.drive(step, save)
      self.finished = True

    return drive

  def check(self) -> None:
    """See the base."""
    invariants.check(
      *(self.world, self._training, self.scenario.case, self._shards)
    )

  # Faults.

  def _cut(self, fault: Injection) -> Sequence[str]:
    """Breaks a connection between a worker and a shard."""
    connections = self.world.network.connections()
    if not connections:
      return ()
    self.world.network.cut(connections[int(fault.target * len(connections))])
    return ("connection",)

  def _drain(self, fault: Injection) -> Sequence[str]:
    """Asks a worker to leave, as a preemption notice does."""
    process = self.pick("worker", fault)
    host = self.hosts.host_of(process) if process else None
    return (process.name,) if process and host and host.drain() else ()

  def _spoil(self, fault: Injection) -> Sequence[str]:
    """Arms a flipped bit in a packed message."""
    case = self.scenario.case
    if case.tau is None and case.down is None:
      return ()  # a flipped bit of a message without a codec is not detected
    return self.arm(fault)

  INJECT = {  # noqa: RUF012
    **COMMON,
    "cut": _cut,
    "cut call": WorldRun.cut,
    "lose": WorldRun.arm,
    "reorder": WorldRun.arm,
    "remove memory": WorldRun.remove_memory,
    "drain": _drain,
    "spoil": _spoil,
  }
