"""What a worker needs of a way to the shards, and a shard of its links."""

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from asgd.live.frames import Frame

Calls = queue.SimpleQueue[tuple[Callable[[Any], Any], Future | None]]


class Disconnected(Exception):
  """A shard cannot be reached; `shard` is its index."""

  def __init__(self, shard: int):
    super().__init__(f"shard {shard} cannot be reached")
    self.shard = shard


class WorkerLink(Protocol):
  """The way of one worker to all shards."""

  def say(self, shard: int, frame: Frame) -> None:
    """Sends a frame. Raises Disconnected."""

  def hear(self, seconds: float | None) -> tuple[int, Frame] | None:
    """Returns the next (shard, frame), None if none comes in that time (None:
    forever), or if `wake` was called. Raises Disconnected."""

  def connect(self, shard: int) -> bool:
    """Opens the way to a shard anew; waits a moment, and is False, if the shard
    is not there."""

  def wake(self) -> None:
    """Ends a `hear` that is waiting; may be called from a signal handler."""


class ShardFeeder:
  """Feeds a shard with frames and calls, all in the thread of `serve`."""

  def __init__(self, index: int):
    self._index = index
    self._calls: Calls = queue.SimpleQueue()
    self._over = False  # `serve` is to return
    self.alive = True  # it is served, or will be

  def submit(self, call: Callable[[Any], Any]) -> Future:
    """Calls something with the shard, in the serving thread. The future raises
    Disconnected if `serve` has ended, or ends before."""
    answer: Future = Future()
    self._calls.put((call, answer))
    self._wake()
    if not self.alive:
      self._refuse_calls()
    return answer

  def serve(self) -> None:
    """Serves until `end`."""
    try:
      self._serve()
    finally:
      self.alive = False
      self._refuse_calls()
      self._close()

  def end(self) -> None:
    """Makes `serve` return; may be called by any thread."""
    self._over = True
    self._wake()

  def _serve(self):
    raise NotImplementedError

  def _wake(self):
    """Ends a wait of the serving thread."""

  def _close(self):
    """Closes what the serving thread has opened."""

  def _make(self, shard, call, answer):
    """Makes a call; without an answer, an error is the serving thread's."""
    if answer is None:
      call(shard)
      return
    try:
      answer.set_result(call(shard))
    except Exception as error:
      answer.set_exception(error)
    except BaseException:
      answer.set_exception(Disconnected(self._index))
      raise

  def _refuse_calls(self):
    with contextlib.suppress(queue.Empty):
      while True:
        _, answer = self._calls.get_nowait()
        if answer is not None:
          answer.set_exception(Disconnected(self._index))
