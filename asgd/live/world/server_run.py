"""Runs of the dense parameter server in a world."""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd.live.hosts.base import SHARD
from asgd.live.links.base import Disconnected
from asgd.live.server.cluster import ServerCluster
from asgd.live.shard import Shard
from asgd.live.shard.recovery import agree
from asgd.live.world import invariants, scenario
from asgd.live.world.host_run import HostRun
from asgd.live.world.hosts import WorldHosts
from asgd.live.world.run import Injection, Run, Scenario
from asgd.live.world.scheduler import Process, Stuck
from asgd.live.world.server_makers import Training, WorldMakers
from asgd.live.world.storage import flip

_LOOK = 0.1  # seconds between two looks of the driver
_SAVES = 3  # looks between two checkpoints
_JOB = 0.03  # seconds that a job takes, on average


class ServerHosts(WorldHosts):
  """Hosts whose driver has no reason to end a shard that is alive: none stands
  still for as long as it waits."""

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    host = self.hosts[kind, index]
    if kind == SHARD and host.alive and not self.cuts:
      raise Stuck(f"{kind} {index} does not answer")
    super().kill(kind, index)


class ServerRun(HostRun):
  """One scenario of a parameter server."""

  OPEN, HOSTS = Run.OPEN, ServerHosts

  def __init__(self, drawn: Scenario, folder: Path):
    super().__init__(drawn, folder)
    rng = random.Random(drawn.seed + 1)

    def pause(job, factor):
      self.job_begins(job)
      self.scheduler.sleep(factor * rng.expovariate(1 / _JOB))

    self._training: Training = scenario.training(drawn.case, pause)
    self._shards: list[Shard] = []
    self._images: list[Any] | None = None  # the last checkpoint

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    training, hosts = self._training, self.make_hosts()
    makers = WorldMakers(self.world, hosts, training, self._images)
    cluster = ServerCluster(
      *(training.setup, training.plan, hosts, makers, lambda: training.duty),
      resumed=resumed,
    )

    def drive():
      if resumed:
        agree(training.setup, self.folder, self.folder / "memory")
      self._drive(cluster)
      self._shards = list(makers.shards)
      self.finished = True

    return drive

  def _drive(self, cluster):
    looks = 0
    cluster.start()
    while True:
      cluster.check()
      looks += 1
      if looks % _SAVES == 0:
        with contextlib.suppress(Disconnected):
          self._images = cluster.images() or self._images
      if cluster.status() and cluster.finished:
        return
      self.scheduler.sleep(_LOOK)

  def check(self) -> None:
    """See the base."""
    invariants.check(
      *(self.world, self._training, self.scenario.case, self._shards)
    )

  # Faults.

  def stop(self, kind: str, fault: Injection) -> Process | None:
    """See the base: all that a process does stands still."""
    process = super().stop(kind, fault)
    if host := self._host_of(process):
      for helper in host.helpers:
        helper.sleeps_until = process.sleeps_until
    return process

  def _host_of(self, process):
    hosts = self.hosts.hosts.values()
    return next((host for host in hosts if host.process is process), None)

  def _cut(self, fault: Injection):
    there = self.world.network.connections()
    if there:
      self.world.network.cut(there[int(fault.which * len(there))])
    return there

  def _spoil(self, fault):
    self.world.network.spoil(fault.kind)
    return True

  def _remove_memory(self, fault):
    shutil.rmtree(self.folder / "memory", ignore_errors=True)
    self.kill("shard", fault)
    return True

  def _drain(self, fault):
    host = self._host_of(self.pick("worker", fault))
    return host is not None and host.drain()

  def _spoil_message(self, fault):
    case = self.scenario.case
    if case.tau is None and case.down is None:
      return False  # nobody could tell
    self.world.disk.spoils.append(fault.which)
    return True

  def _flip(self, fault):
    paths = sorted((self.folder / "memory").glob("shard-*/snapshot"))
    if not paths:
      return False
    path = paths[int(fault.which * len(paths))]
    name = path.parent.name.replace("-", " ")
    flip(path, fault.seconds / 8)
    for process in self.processes(name):
      self.scheduler.kill(process)
    return True

  INJECT = {  # noqa: RUF012
    **HostRun.INJECT,
    "cut": _cut,
    "cut call": HostRun.INJECT["cut"],
    "lose": _spoil,
    "double": _spoil,
    "reorder": _spoil,
    "remove memory": _remove_memory,
    "flip": _flip,
    "drain": _drain,
    "spoil": _spoil_message,
  }
