"""What runs in hosts share in a world: their hosts, and the faults of calls."""

from asgd.live.world.hosts import WorldHosts
from asgd.live.world.run import COMMON, Injection, Run
from asgd.live.world.storage import flip

KINDS = (
  *("kill worker", "kill shard", "kill all", "stop worker", "stop shard"),
  "stop driver",
  *("cut", "double"),  # a connection; a call of a shard
  *("tear", "fill", "jump", "flip", "nan"),
)


class HostRun(Run):
  """A run whose shards and workers are in hosts."""

  OPEN = ".csv", ".bin", "/messages", "/commands"
  # Files in the memory of the run of which a byte may be changed.
  FLIPPED: tuple[str, ...] = ("shard-*/*",)
  HOSTS: type[WorldHosts] = WorldHosts

  def make_hosts(self) -> WorldHosts:
    """Returns the hosts of a command."""
    world = self.world
    parts = world.scheduler, world.disk, world.skew
    self.hosts = self.HOSTS(*parts, kills=self.scenario.case.kills)
    return self.hosts

  def _cut(self, fault: Injection):
    return self.hosts.cut(fault.which)

  def _double(self, fault: Injection):
    del fault
    self.hosts.doubles.append(0.0)
    return True

  def _flip(self, fault: Injection):
    """Changes a byte of what a shard or a worker keeps in memory, and kills
    it."""
    paths = [
      path
      for pattern in self.FLIPPED
      for path in sorted((self.folder / "memory").glob(pattern))
      if path.is_file()
    ]
    if not paths:
      return False
    path = paths[int(fault.which * len(paths))]
    flip(path, fault.seconds / 8)
    name = path.parent.name if path.parent.name != "memory" else path.name
    for process in self.processes(" ".join(name.split("-")[:2])):
      self.scheduler.kill(process)
    return True

  INJECT = {  # noqa: RUF012
    **COMMON,
    "stop driver": lambda run, fault: run.stop("driver", fault),
    "cut": _cut,
    "double": _double,
    "flip": _flip,
  }
