"""Runs of the dense parameter server in a world."""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd.live.clusters.base import finished
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard
from asgd.live.world import invariants, scenario
from asgd.live.world.cluster import Training, WorldCluster
from asgd.live.world.run import COMMON, Injection, Run, Scenario
from asgd.live.world.storage import flip

_LOOK = 0.1  # seconds between two looks of the driver
_SAVES = 3  # looks between two checkpoints
_JOB = 0.03  # seconds that a job takes, on average


class ServerRun(Run):
  """One scenario of a parameter server."""

  def __init__(self, drawn: Scenario, folder: Path):
    super().__init__(drawn, folder)
    rng = random.Random(drawn.seed + 1)

    def pause(job):
      self.job_begins(job)
      self.scheduler.sleep(rng.expovariate(1 / _JOB))

    self._training: Training = scenario.training(drawn.case, pause)
    self._cluster: WorldCluster | None = None
    self._shards: list[Shard] = []
    self._images: list[Any] | None = None  # the last checkpoint

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    self._cluster = WorldCluster(
      self.world,
      self._training,
      kills=self.scenario.case.kills,
      resumed=resumed,
      images=self._images,
    )
    return self._drive

  def _drive(self):
    cluster, looks = self._cluster, 0
    cluster.start()
    while True:
      cluster.check()
      looks += 1
      if looks % _SAVES == 0:
        with contextlib.suppress(Disconnected):
          self._images = cluster.images() or self._images
      if finished(cluster.status()):
        break
      self.scheduler.sleep(_LOOK)
    self._shards = list(cluster.opened)
    self.finished = True

  def check(self) -> None:
    """See the base."""
    invariants.check(
      *(self.world, self._training, self.scenario.case, self._shards)
    )

  # Faults.

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
    process = self.pick("worker", fault)
    for there, loops, _ in self._cluster.workers.values():
      for loop in loops if there is process else ():
        loop.drain()
        return True
    return False

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
    **COMMON,
    "cut": _cut,
    "lose": _spoil,
    "double": _spoil,
    "reorder": _spoil,
    "remove memory": _remove_memory,
    "flip": _flip,
    "drain": _drain,
    "spoil": _spoil_message,
  }
