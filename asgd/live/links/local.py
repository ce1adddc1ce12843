"""Frames between threads of one process: queues of references."""

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected, ShardFeeder
from asgd.live.shard import Shard

_TICK = 0.1  # seconds between two looks at the deadlines
_PAUSE = 0.01  # seconds between two tries to connect


class ShardQueue(ShardFeeder):
  """Feeds a Shard from a queue. All of it runs in the thread of `serve`; other
  methods may be called by any thread."""

  def __init__(self, index: int, queues: Sequence["ShardQueue | None"]):
    """Keeps calls until the shard is made and served; `queues` has the present
    queue of each shard, where one that exits is replaced."""
    super().__init__(index)
    self._queues = queues
    self._lead: ShardQueue | None = None  # that this follower follows
    self.shard: Shard | None = None  # once it is made

  def open(self, shard: Shard, clock: Callable[[], float]) -> None:
    """Takes the shard, before `serve`; the clock counts from the start of the
    run."""
    self.shard, self._clock = shard, clock

  def put(self, call: Callable[[Shard, float], Any]) -> None:
    """Calls something with the shard and the time, in the serving thread."""
    self._calls.put((lambda shard: call(shard, self._clock()), None))

  def end(self) -> None:
    """Makes `serve` return; nothing connects any more."""
    self._over, self.alive = True, False
    self._calls.put((lambda shard: None, None))  # ends a wait

  def _serve(self):
    ticked = self._clock()
    while not self._over:
      self._follow_lead()
      with contextlib.suppress(queue.Empty):
        call, answer = self._calls.get(timeout=_TICK)
        if self._over:
          self._calls.put((call, answer))  # to be refused
          return
        self._make(self.shard, call, answer)
      if self._clock() - ticked >= _TICK:
        ticked = self._clock()
        self.shard.tick(ticked)

  def _follow_lead(self):
    lead, shard = self._queues[0], self.shard
    if not shard.index or not shard.setup.consistent or lead is self._lead:
      return
    if lead is not None and lead.alive:
      self._lead = lead
      shard.role.follow(self._way_to(lead))

  def _way_to(self, lead):
    def to_follower(frame):
      self.put(lambda shard, now: shard.handle(frame, to_lead, now))

    def to_lead(frame):
      lead.put(lambda shard, now: shard.handle(frame, to_follower, now))

    return to_lead


# (worker, shard, frame, deliver): calls `deliver` when the frame has come
Carry = Callable[[int, int, Frame, Callable[[], None]], None]


def at_once(
  worker: int, shard: int, frame: Frame, deliver: Callable[[], None]
) -> None:
  """Carries a frame in no time."""
  del worker, shard, frame
  deliver()


class ThreadLink:
  """A worker's way to the shards of its process; see `base.WorkerLink`."""

  def __init__(
    self,
    worker: int,
    queues: Sequence[ShardQueue | None],
    *,
    up: Carry = at_once,
    down: Carry = at_once,
  ):
    """Connects to no shard yet.

    Args:
      worker: index.
      queues: the present queue of each shard; the cluster replaces those of
        shards that exit.
      up: carries frames to a shard.
      down: carries frames of a shard.
    """
    self._worker, self._queues = worker, queues
    self._up, self._down = up, down
    self._box: queue.SimpleQueue = queue.SimpleQueue()
    self._open: list[ShardQueue | None] = [None] * len(queues)
    # One object a connection: shards tell holders of a place by it.
    self._ways = [self._way(shard) for shard in range(len(queues))]

  def _way(self, shard):
    def way(frame):
      heard = shard, way, frame
      self._down(self._worker, shard, frame, lambda: self._box.put(heard))

    return way

  def say(self, shard: int, frame: Frame) -> None:
    """See `base.WorkerLink`."""
    there, way = self._open[shard], self._ways[shard]
    if there is None or not there.alive:
      raise Disconnected(shard)

    def deliver():
      there.put(lambda shard, now: shard.handle(frame, way, now))

    self._up(self._worker, shard, frame, deliver)

  def hear(self, seconds: float | None) -> tuple[int, Frame] | None:
    """See `base.WorkerLink`."""
    while True:
      for shard, there in enumerate(self._open):
        if there is None or not there.alive:
          raise Disconnected(shard)
      try:
        heard = self._box.get(block=seconds != 0, timeout=seconds or None)
      except queue.Empty:
        return None
      if heard is None:
        return None
      shard, way, frame = heard
      if way is self._ways[shard]:  # or it was said before a connection broke
        return shard, frame

  def connect(self, shard: int) -> bool:
    """See `base.WorkerLink`."""
    self._open[shard] = there = self._queues[shard]
    if there is not None and there.alive:
      self._ways[shard] = self._way(shard)
      return True
    time.sleep(_PAUSE)
    return False

  def wake(self) -> None:
    """See `base.WorkerLink`."""
    self._box.put(None)

  def close(self) -> None:
    """Disconnects from all shards, as a broken socket would."""
    for way, there in zip(self._ways, self._open, strict=True):
      if there is not None:
        there.put(lambda shard, now, way=way: self._leave(shard, now, way))

  def _leave(self, shard, now, way):
    shard.gone(self._worker, now, way)
