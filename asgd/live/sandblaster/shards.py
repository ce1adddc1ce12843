"""All shards of a run, as its driver sees them: none of them dies for it."""

from collections.abc import Callable, Sequence
from typing import Any

from asgd import base, sharding
from asgd.live.failures import ShardsDie
from asgd.live.hosts import Gone, Host, Hosts, Make
from asgd.live.hosts.base import SHARD
from asgd.sandblaster import Command, Image

_DEATHS = 5  # of a shard, before the next message comes
# (shard, its image, whether it begins anew) -> what makes it
MakeShard = Callable[[int, Image, bool], Make]


class LiveShards:
  """Shards in hosts. One that dies is started again, from its files, and is
  asked again: commands are obeyed once."""

  def __init__(
    self,
    plan: sharding.ShardPlan,
    hosts: Hosts,
    make: MakeShard,
    *,
    patience: float,
    number: int = 0,
    unfit: Callable[[], None] = lambda: None,
  ):
    """`number` is that of the next command; a shard that says nothing for
    `patience` seconds is killed. `unfit` is called before an error about the
    files of a shard: nothing can resume from them."""
    self._unfit = unfit
    self.plan, self._hosts, self._make = plan, hosts, make
    self._patience = patience
    self.number = number
    self._pending: list[Command] = []  # that nobody needs the answers to
    self.handles: list[Host] = []
    self._images: list[Image] = []
    self._anew = True  # until all are made
    self._deaths = 0
    self._coming: set[int] = set()  # those that were replaced, until made
    self.replaced = 0
    self.news: list[str] = []  # what the user should be told

  def start(self, images: Sequence[Image], *, anew: bool) -> None:
    """Starts them with images if they begin anew, else from their files."""
    self._images, self._anew = list(images), anew
    for shard, image in enumerate(images):
      make = self._make(shard, image, anew)
      self.handles.append(self._hosts.start(SHARD, shard, make))
    self.check()
    # Their files have it from now on; shapes and dtypes are needed again.
    self._anew = False
    self._images = [
      Image(image.number, {"point": image.vectors["point"]})
      for image in images
    ]

  def check(self) -> None:
    """Waits until all shards are made. Raises ValueError for what keeps one
    from it."""
    for shard in range(self.plan.shards):
      self._of_shard(shard, None)

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
    calls = [handle.call(method, *args) for handle in self.handles]
    self._hosts.wait_for_all(SHARD, dict(enumerate(calls)), self._patience)
    return [
      self._of_shard(shard, call, method, *args)
      for shard, call in enumerate(calls)
    ]

  def _of_shard(self, shard, call, *question):
    """Returns the answer to a call that has ended, or to another one of the
    same question; None: to that of making the shard."""
    while True:
      handle = self.handles[shard]
      if call is None:
        call = self._hosts.made(SHARD, shard)
        if question:
          call = handle.call(*question)
        self._hosts.wait_for_all(SHARD, {shard: call}, self._patience)
      try:
        return call.result()
      except ValueError:
        self._unfit()
        raise
      except Gone:
        self.replace(shard, handle)
        call = None

  # Deaths.

  def replace(self, shard: int, handle: Host) -> None:
    """Starts a shard again, unless another has the place by now. Raises
    ShardsDie if that happens over and over."""
    if self.handles[shard] is not handle:
      return
    self.replaced += 1
    self._deaths += 1
    if self._deaths > _DEATHS:
      raise ShardsDie(
        f"shards ended {self._deaths} times before a message came, the last was"
        f" shard {shard}: look for what ends them in the memory of the machine"
      )
    make = self._make(shard, self._images[shard], self._anew)
    self.handles[shard] = self._hosts.start(SHARD, shard, make)
    self._coming.add(shard)
    self.news.append(f"shard {shard} died; another takes over")

  def made_anew(self) -> bool:
    """Whether a shard that took another's place is being made, for which all
    who call it wait, or was since this was asked last."""
    waited = bool(self._coming)
    made = [s for s in self._coming if self._hosts.made(SHARD, s).done()]
    self._coming.difference_update(made)
    return waited

  def lose(self, shard: int) -> None:
    """Kills one."""
    self._hosts.kill(SHARD, shard)

  def message_came(self) -> None:
    """Deaths before this one do not count together with those after it."""
    self._deaths = 0
