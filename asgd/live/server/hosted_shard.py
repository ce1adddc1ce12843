"""A shard as an object in a host: it serves beside the calls of its methods."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from asgd.live.hosts import Inside
from asgd.live.links.base import Disconnected, ShardFeeder
from asgd.live.shard import Shard

ENDED = "ended"  # how a shard ends that was asked to


class HostedShard:
  """One incarnation of a shard, which is served from the start."""

  def __init__(self, inside: Inside, server: ShardFeeder):
    """`inside` is of its host."""
    self._server, self._served = server, threading.Event()
    self._ended: Future[str] = Future()
    inside.later(self._serve, "served")

  def _serve(self):
    try:
      self._server.serve()
    finally:
      self._served.set()

  def served(self, call: Future[None]) -> None:
    """The server has ended, or raises what ended it."""
    if error := call.exception():
      self._ended.set_exception(error)
    else:
      self._ended.set_result(ENDED)

  def run(self) -> Future[str]:
    """Returns ENDED once it was asked to end, or raises what ended it."""
    return self._ended

  def ask(self, call: Callable[[Shard], Any]) -> Future[tuple[Any] | None]:
    """Calls something with the shard, in the serving thread.

    Returns:
      (answer,), with NumPy arrays; None if the server has ended: `run` raises
      what ended it.
    """
    answer: Future[tuple[Any] | None] = Future()

    def finish(done):
      error = done.exception()
      if isinstance(error, Disconnected):
        answer.set_result(None)
      elif error is not None:
        answer.set_exception(error)
      else:
        answer.set_result((done.result(),))

    asked = self._server.submit(lambda shard: jax.device_get(call(shard)))
    asked.add_done_callback(finish)
    return answer

  def gone(self, worker: int, life: int) -> None:
    """Takes note that an incarnation of a worker has exited; its connection has
    reported that already."""

  def end(self) -> Future[tuple[None] | None]:
    """Writes what is left to be written, and ends."""
    answer = self.ask(_flush)
    answer.add_done_callback(lambda done: self._server.end())
    return answer

  def interrupt(self) -> None:
    """Ends at once: nothing more is written or sent."""
    self._server.end()

  def close(self) -> None:
    """Returns when nothing is served any more."""
    self._server.end()
    self._served.wait()


def _flush(shard):
  shard.state.messages.flush()
