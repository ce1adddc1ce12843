"""What all clusters do: ask shards, replace workers, hand out parameters."""

import abc
import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from asgd import sharding
from asgd.live.failures import NotFinite, WorkersDie
from asgd.live.links.base import Disconnected
from asgd.live.setup import Setup
from asgd.live.shard import Shard

Status = dict[str, Any]  # of a shard, see `Shard.status`
_ROWS_AHEAD = 20  # rows, in which all shards hear of an image to keep
_TRIES = 3  # for each place: messages that may be refused before a run ends
_DEATHS = 5  # for each place: workers that may die before another message


def finished(status: Sequence[Status] | None) -> bool:
  """Whether every job was received, by all shards, as their status says."""
  return (
    bool(status)
    and status[0]["stopped"]
    and not any(shard["busy"] for shard in status)
  )


def _keep_image(row, shard):
  shard.keep_image(row)


def _kept_image(row, shard):
  return shard.kept_image(row)


def _take_params(received, shard):  # of a module, to travel by its name
  if received is None:
    return shard.state.server.params
  return shard.state.kept_params.pop(received, None)


class LiveCluster(abc.ABC):
  """Shards and workers of a run: `start` begins, and `check` and `status` are
  to be called again and again until `finished`."""

  def __init__(
    self, setup: Setup, plan: sharding.ShardPlan | None, *, refill: bool
  ):
    """`refill`: put a new worker in the place of one that died."""
    self.setup, self._plan, self._refill = setup, plan, refill
    self.replaced = {"worker": 0, "shard": 0}
    self._lives = collections.Counter[int]()  # loops started at each place
    self._image_row = -1  # at which shards keep an image
    # Places that were filled since the lead last told who is dead: it may tell
    # of the one before, which is one death.
    self._refilled: set[int] = set()
    self._received = 0  # messages, as the lead told last
    self._deaths = 0  # of workers since then

  @abc.abstractmethod
  def add_worker(self, worker: int) -> None:
    """Has a new worker take a place."""

  def _next_life(self, worker: int) -> int:
    """Returns how many loops were started at a place, and counts one more."""
    self._lives[worker] += 1
    return self._lives[worker] - 1

  @abc.abstractmethod
  def check(self) -> list[str]:
    """Replaces workers and shards that have ended; returns what to tell. Raises
    what ended one of them, if it would end a new one, too."""

  @abc.abstractmethod
  def _ask(self, call: Callable[[Shard], Any]) -> list[Any]:
    """Has each shard call something. Raises Disconnected if one is gone."""

  @abc.abstractmethod
  def _ask_status(self) -> list[Status | None] | None:
    """Returns each shard's status, None for one that is gone; None if they do
    not answer now."""

  @abc.abstractmethod
  def _end_lost_workers(self, status: Status) -> None:
    """Replaces the workers that the lead has taken for dead."""

  def _replace_worker(self, worker: int, how: str) -> list[str]:
    """Fills the place of a worker that has ended; returns what to tell. Raises
    WorkersDie if they end over and over."""
    if not self._refill:
      return [f"worker {worker} {how}"]
    self.replaced["worker"] += 1
    self._refilled.add(worker)
    self._deaths += 1
    if self._deaths > _DEATHS * self.setup.workers:
      raise WorkersDie(
        f"{self._deaths} workers ended, one after the other, before a message"
        f" came (the last: worker {worker} {how}): look for what ends them in"
        " the data, in the loss, and in the memory of the machine"
      )
    self.add_worker(worker)
    return [f"worker {worker} {how}; another takes its place"]

  def status(self) -> list[Status] | None:
    """Returns each `Shard.status`, None while a shard is being replaced.
    Workers that were taken for dead are replaced. Raises NotFinite for
    more refused messages, in a row or of one job, than three for each place."""
    statuses = self._ask_status()
    if statuses and (lead := statuses[0]):
      if lead["refused"] > _TRIES * self.setup.workers:
        raise NotFinite(
          f"{lead['refused']} messages, in a row or of one job, were not"
          f" finite, at message {lead['received']}"
        )
      if lead["received"] > self._received:
        self._received, self._deaths = lead["received"], 0
      self._end_lost_workers(lead)
      self._refilled.clear()
      others = filter(None, statuses[1:])
      if finished([lead]) and any(shard["busy"] for shard in others):
        with contextlib.suppress(Disconnected):
          self._ask(Shard.end_open_tickets)
    return statuses if statuses and all(statuses) else None

  def params(self, received: int | None = None) -> Any:
    """Returns the whole parameters: now, or as kept after so many messages.
    Raises Disconnected if a shard that has them is gone."""
    parts = jax.device_get(self._ask(functools.partial(_take_params, received)))
    for index, part in enumerate(parts):
      if part is None:
        raise Disconnected(index)
    return parts[0] if self._plan is None else sharding.join(self._plan, parts)

  def images(self) -> list[tuple[Any, Any]] | None:
    """Returns each `Shard.image`; in a consistent run they are of one row, and
    None says that there are none yet: call again later. Raises Disconnected if
    a shard is gone."""
    if not self.setup.consistent or self.setup.shards == 1:
      return self._ask(Shard.image)
    row = self._image_row
    answers = self._ask(functools.partial(_kept_image, row))
    rows, images = zip(*answers, strict=True)
    if None not in images:
      self._image_row = -1
      return list(images)
    if len(set(rows)) == 1:  # nothing is under way
      images = self._ask(Shard.image)
      if len({meta["rows"] for _, meta in images}) == 1:
        return images
    if row < 0 or max(rows) > row + _ROWS_AHEAD:  # or one has lost it
      self._image_row = max(rows) + _ROWS_AHEAD
      self._ask(functools.partial(_keep_image, self._image_row))
    return None

  def pause(self) -> None:
    """Has workers start nothing new. Raises Disconnected if a shard is gone."""
    self._ask(Shard.pause)
