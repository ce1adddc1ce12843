"""Frames between threads of one process: queues of references."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from asgd.live.faults import Killed
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.shard import Shard

_TICK = 0.1  # seconds between two looks at the deadlines


class ShardThread:
  """One shard and the thread that feeds it."""

  def __init__(
    self, index: int, make: Callable[[], Shard], clock: Callable[[], float]
  ):
    """`make` is called in the thread; `clock` tells seconds of the run."""
    self.index = index
    self._make, self._clock = make, clock
    self._box: queue.SimpleQueue = queue.SimpleQueue()
    self.shard: Shard | None = None
    self.failure: BaseException | None = None
    self.alive = True
    name = f"shard-{index}"
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self.start = self._thread.start

  def put(self, call: Callable[[Shard, float], Any]) -> None:
    """Has the thread call something with its shard and the time."""
    self._box.put(call)

  def ask(self, call: Callable[[Shard], Any]) -> Any:
    """Returns what a call in the thread answers; raises Disconnected if it has
    ended."""
    answer: queue.SimpleQueue = queue.SimpleQueue()
    self.put(lambda shard, now: answer.put(call(shard)))
    while True:
      try:
        return answer.get(timeout=_TICK)
      except queue.Empty:
        if not self.alive:
          raise Disconnected(self.index) from None

  def stop(self) -> None:
    """Ends the thread as a kill would: nothing is said or saved."""

    def kill(shard, now):
      raise Killed

    self.put(kill)
    self._thread.join()

  def _run(self):
    try:
      self.shard = shard = self._make()
      ticked = self._clock()
      while True:
        with contextlib.suppress(queue.Empty):
          self._box.get(timeout=_TICK)(shard, self._clock())
        if self._clock() - ticked >= _TICK:
          ticked = self._clock()
          shard.tick(ticked)
    except Killed:
      pass
    except BaseException as error:  # raised again by the cluster's `check`
      self.failure = error
    finally:
      self.alive = False


def connect_follower(
  shard: Shard, follower: ShardThread, lead: ShardThread
) -> None:
  """Lets a follower and the lead talk; called in the follower's thread."""

  def to_follower(frame):
    follower.put(lambda shard, now: shard.handle(frame, to_lead, now))

  def to_lead(frame):
    lead.put(lambda shard, now: shard.handle(frame, to_follower, now))

  shard.role.follow(to_lead)


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
    shards: Sequence[ShardThread],
    over: Callable[[], bool] = lambda: False,
    *,
    up: Carry = at_once,
    down: Carry = at_once,
  ):
    """Connects to all shards, of the list in which the cluster replaces those
    that died; `over`: the run has ended, and none will be replaced; `up` and
    `down` carry what is said to a shard and by one."""
    self._worker, self._shards, self._over = worker, shards, over
    self._up, self._down = up, down
    self._box: queue.SimpleQueue = queue.SimpleQueue()
    self._threads = list(shards)
    # One object a connection: shards tell holders of a place by it.
    self._ways = [self._way(shard) for shard in range(len(shards))]

  def _way(self, shard):
    def way(frame):
      heard = shard, way, frame
      self._down(self._worker, shard, frame, lambda: self._box.put(heard))

    return way

  def say(self, shard: int, frame: Frame) -> None:
    """Sends a frame. Raises Disconnected."""
    thread = self._threads[shard]
    if not thread.alive:
      raise Disconnected(shard)
    way = self._ways[shard]

    def deliver():
      thread.put(lambda shard, now: shard.handle(frame, way, now))

    self._up(self._worker, shard, frame, deliver)

  def hear(self, seconds: float | None) -> tuple[int, Frame] | None:
    """Returns the next (shard, frame). Raises Disconnected."""
    while True:
      for shard, thread in enumerate(self._threads):
        if not thread.alive:
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
    """Opens the way to a shard anew. Raises Killed if the run has ended."""
    if self._over():
      raise Killed
    self._threads[shard] = self._shards[shard]
    if self._threads[shard].alive:
      self._ways[shard] = self._way(shard)
      return True
    time.sleep(_TICK)
    return False

  def wake(self) -> None:
    """Ends a `hear`; may be called from a signal handler."""
    self._box.put(None)

  def close(self) -> None:
    """Tells all shards that the worker has left, as a broken socket would."""
    for way, thread in zip(self._ways, self._threads, strict=True):
      thread.put(lambda shard, now, way=way: shard.gone(self._worker, now, way))
