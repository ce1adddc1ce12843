"""The driver's handle of all shards of a run; it restarts shards that exit."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asgd import base, sharding
from asgd.live.failures import ShardsDie
from asgd.live.hosts import Host, Make
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.supervisor import Party, Supervisor
from asgd.sandblaster import Command, Image

# (shard, image, whether the shard starts from the image) -> the shard's factory
MakeShard = Callable[[int, Image, bool], Make]


class LiveShards:
  """Shards in hosts. A shard that exits is restarted from its files, and its
  command is sent again; commands are idempotent."""

  def __init__(
    self,
    plan: sharding.ShardPlan,
    supervisor: Supervisor,
    make: MakeShard,
    images: Sequence[Image],
    *,
    from_images: bool,
    number: int = 0,
    on_unusable: Callable[[], None] = lambda: None,
  ):
    """Prepares the shards; `start` starts them.

    Args:
      plan: the division of the rows among shards.
      supervisor: the supervisor of the processes.
      make: returns the factory of a shard.
      images: the image of each shard.
      from_images: True: shards start from the images. False: from their files.
      number: the number of the next command.
      on_unusable: called if no driver can resume from the files of a shard,
        before the error about the files is raised.
    """
    self.plan, self._supervisor, self._make = plan, supervisor, make
    self.number, self._on_unusable = number, on_unusable
    # Commands without an answer are sent together with the next `dot`. So there
    # is one call for each answer that the coordinator needs, not for each
    # command.
    self._pending_commands: list[Command] = []
    self._images = list(images)
    self._from_images = from_images  # False once all shards are created
    # Restarted shards that are not created yet.
    self._starting_parties: list[Party] = []

  def start(self) -> None:
    """Starts all shards, and waits until they are created."""
    for shard in range(self.plan.shards):
      self._start(shard)
    self.check()
    # The files have the vectors from now on. A restart needs only the shapes
    # and dtypes of `point`.
    self._from_images = False
    self._images = [
      Image(image.number, {"point": image.vectors["point"]})
      for image in self._images
    ]

  def check(self) -> None:
    """Waits until all shards are created. If one of them cannot be created,
    raises a ValueError with the reason."""
    parties = list(self._supervisor.parties[SHARD].values())
    while parties:
      with self._reporting_unusable():
        exited_parties = self._supervisor.await_made(parties)
      for party in exited_parties:
        self._restart(party.index)
      present_parties = self._supervisor.parties[SHARD]
      parties = [present_parties[party.index] for party in exited_parties]

  def _start(self, shard: int) -> Party:
    """Starts a shard, without waiting for it."""
    make = self._make(shard, self._images[shard], self._from_images)
    return self._supervisor.start(SHARD, shard, make)

  @property
  def hosts(self) -> list[Host]:
    """The present hosts, by shard."""
    return [party.host for party in self._supervisor.parties[SHARD].values()]

  @property
  def recoveries(self) -> int:
    """Count of restarts of shards."""
    return self._supervisor.replaced[SHARD]

  # Commands.

  def execute(self, command: Command) -> float | None:
    """Executes a command on every shard: a `dot` at once, any other command
    together with the next `dot`. Returns the sum of the answers to a `dot`;
    None for another command."""
    self._pending_commands.append(command)
    self.number = max(self.number, command.number + 1)
    if command.operation != "dot":
      return None
    # The last answer of each shard is that of the `dot`.
    parts = [answers[-1] for answers in self.flush()]
    return float(sharding.add_up(parts))

  def flush(self) -> list[list[float | None]]:
    """Sends the pending commands to every shard; returns each shard's
    answers."""
    commands, self._pending_commands = self._pending_commands, []
    return self._ask_all("execute_all", commands) if commands else []

  def begin(self, evaluation: int) -> None:
    """Begins an evaluation at every shard: workers may fetch `trial`."""
    self.flush()
    self._ask_all("begin", evaluation, self.number)

  def read(self, name: str) -> base.Params:
    """Returns a complete vector."""
    self.flush()
    return sharding.join(self.plan, self._ask_all("read", name))

  def images(self) -> list[Image] | None:
    """Returns an image of each shard, all before the same command; None while
    the shards have executed commands that this driver has not sent yet."""
    self.flush()
    images = self._ask_all("image_at", self.number)
    return None if any(image is None for image in images) else images

  def _ask_all(self, method: str, *args: Any) -> list[Any]:
    """Calls a method of every shard, restarting those that exit; returns the
    answers."""
    with self._reporting_unusable():
      return self._supervisor.ask_until_answered(
        SHARD, method, *args, restart=self._restart
      )

  @contextlib.contextmanager
  def _reporting_unusable(self) -> Iterator[None]:
    """Calls `on_unusable` if the block raises an error about a shard's files,
    then raises the error."""
    try:
      yield
    except ShardsDie:  # a ValueError, too, but the files are usable
      raise
    except ValueError:
      self._on_unusable()
      raise

  # Exits.

  def _restart(self, shard: int) -> None:
    """Restarts a shard that has exited, without waiting for it."""
    supervisor = self._supervisor
    supervisor.count_exit(SHARD, shard, "died")
    # Workers that wait for the shard must not count as hanging.
    supervisor.stop_job_times(WORKER)
    supervisor.news.append(f"shard {shard} exited and is restarted")
    self._starting_parties.append(self._start(shard))

  def replace(self, shard: int, host: Host) -> None:
    """Restarts a shard that a worker could not reach, unless it was restarted
    since.

    Args:
      shard: its index.
      host: the host that the worker called.

    Raises:
      ShardsDie: if shards exit again and again.
    """
    # Several workers may report the same exit.
    if self._supervisor.parties[SHARD][shard].host is host:
      self._restart(shard)

  def are_made(self) -> bool:
    """Returns whether all restarted shards are created: no worker waits."""
    self._starting_parties = [
      party for party in self._starting_parties if not party.make_call.done()
    ]
    return not self._starting_parties
