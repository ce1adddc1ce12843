"""The interface of a worker's link to the shards."""

from typing import Protocol

from asgd.live.frames import Frame


class Disconnected(Exception):
  """A shard cannot be reached; `shard` is its index."""

  def __init__(self, shard: int):
    super().__init__(f"shard {shard} cannot be reached")
    self.shard = shard


class WorkerLink(Protocol):
  """The connections of one worker to all shards."""

  def send(self, shard: int, frame: Frame) -> None:
    """Sends a frame. Raises Disconnected."""

  def receive(self, seconds: float | None) -> tuple[int, Frame] | None:
    """Returns the next (shard, frame).

    Returns None if no frame arrives in `seconds` (None: no limit), or if `wake`
    was called. Raises Disconnected.
    """

  def connect(self, shard: int) -> bool:
    """Opens a new connection to a shard. Returns False, after a short wait, if
    the shard cannot be reached: it may be starting, so the caller repeats."""

  def wake(self) -> None:
    """Ends a `receive` that is waiting; may be called from a signal handler."""
