"""All shards of a run, as its driver sees them: none of them dies for it."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from asgd import base, sharding
from asgd.live.failures import ShardsDie
from asgd.live.hosts import Host, Make
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.supervisor import Party, Supervisor
from asgd.sandblaster import Command, Image

# (shard, its image, whether it begins anew) -> what makes it
MakeShard = Callable[[int, Image, bool], Make]


class LiveShards:
  """Shards in hosts. One that exits is started again, from its files, and is
  asked again: commands are obeyed once."""

  def __init__(
    self,
    plan: sharding.ShardPlan,
    supervisor: Supervisor,
    make: MakeShard,
    images: Sequence[Image],
    *,
    anew: bool,
    number: int = 0,
    unfit: Callable[[], None] = lambda: None,
  ):
    """Shards that begin `anew` start with the images, others from their files.
    `number` is that of the next command. `unfit` is called before an error
    about the files of a shard: nothing can resume from them."""
    self.plan, self._supervisor, self._make = plan, supervisor, make
    self.number, self._unfit = number, unfit
    self._pending: list[Command] = []  # that nobody needs the answers to
    self._images = list(images)
    self._anew = anew  # until all are made
    self._coming: list[Party] = []  # that replace others, until made

  def start(self) -> None:
    """Starts them."""
    for shard in range(self.plan.shards):
      self._start(shard)
    self.check()
    # Their files have it from now on; shapes and dtypes are needed again.
    self._anew = False
    self._images = [
      Image(image.number, {"point": image.vectors["point"]})
      for image in self._images
    ]

  def check(self) -> None:
    """Waits until all shards are made. Raises ValueError for what keeps one
    from it."""
    parties = list(self._supervisor.parties[SHARD].values())
    while parties:
      with self._fit():
        exited = self._supervisor.await_made(parties)
      parties = [self._restart(party.index) for party in exited]

  def _start(self, shard):
    make = self._make(shard, self._images[shard], self._anew)
    return self._supervisor.start(SHARD, shard, make)

  @property
  def hosts(self) -> list[Host]:
    """Those of all shards, as they are now."""
    return [party.host for party in self._supervisor.parties[SHARD].values()]

  @property
  def recoveries(self) -> int:
    """How often a shard came back."""
    return self._supervisor.replaced[SHARD]

  # Asking.

  def obey(self, command: Command) -> float | None:
    """Has every shard obey, now or with the next command whose answer is a
    number; returns the total of their answers."""
    self._pending.append(command)
    self.number = max(self.number, command.number + 1)
    if command.operation != "dot":
      return None
    return float(sharding.add_up([each[-1] for each in self.flush()]))

  def flush(self) -> list[list[float | None]]:
    """Has every shard obey what is waiting; returns each one's answers."""
    commands, self._pending = self._pending, []
    return self._of_all("obey_all", commands) if commands else []

  def begin(self, evaluation: int) -> None:
    """Workers are about to fetch `trial`."""
    self.flush()
    self._of_all("begin", evaluation, self.number)

  def read(self, name: str) -> base.Params:
    """Returns a whole vector."""
    self.flush()
    return sharding.join(self.plan, self._of_all("read", name))

  def images(self) -> list[Image] | None:
    """Returns an image of each shard, all of the same command; None while the
    shards have obeyed commands that this driver has not given yet."""
    self.flush()
    images = self._of_all("image_at", self.number)
    return None if any(image is None for image in images) else images

  def _of_all(self, method: str, *args: Any) -> list[Any]:
    with self._fit():
      return self._supervisor.ask_until_answered(
        SHARD, method, *args, restart=self._restart
      )

  @contextlib.contextmanager
  def _fit(self):
    """Calls `unfit` for an error about the files of a shard."""
    try:
      yield
    except ShardsDie:
      raise
    except ValueError:
      self._unfit()
      raise

  # Exits.

  def _restart(self, shard) -> Party:
    supervisor = self._supervisor
    supervisor.count_exit(SHARD, shard, "died")
    supervisor.excuse(WORKER)
    supervisor.news.append(f"shard {shard} died; another takes over")
    party = self._start(shard)
    self._coming.append(party)
    return party

  def replace(self, shard: int, host: Host) -> None:
    """Starts a shard again that a worker has lost, unless that was done since.
    Raises ShardsDie if that happens over and over."""
    if self._supervisor.parties[SHARD][shard].host is host:
      self._restart(shard)

  def are_made(self) -> bool:
    """Returns whether no worker has to wait for a shard to be made again."""
    self._coming = [p for p in self._coming if not p.made.done()]
    return not self._coming
