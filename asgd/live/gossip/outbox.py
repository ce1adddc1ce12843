"""Frames on their way to one neighbour: each arrives once, and in order.

A peer sends the frames that its neighbour has not confirmed in one call, and
the next call when that one has ended. A connection that breaks loses no frame:
the peer sends it again, and the neighbour skips the numbers that it knows.

  sender                                        receiver
  first=0, frames 0 1      -- deliver -->       takes 0 1
                           <-- 2 ------
  first=2, frames 2        -- deliver --> X     takes 2; the answer is lost
  first=2, frames 2 3      -- deliver -->       skips 2, takes 3
                           <-- 4 ------
"""

from collections.abc import Sequence
from typing import NamedTuple

from asgd.live.gossip.frames import PeerFrame
from asgd.live.hosts import Host


class Neighbour(NamedTuple):
  """Another peer, as the driver introduces it."""

  life: int  # incarnations of its index before this one
  host: Host


class Outbox:
  """The frames of one incarnation of a peer for one of a neighbour."""

  def __init__(self, neighbour: Neighbour):
    self.life, self.host = neighbour
    self.busy = False  # a call is open
    self._first = 0  # number of the first frame below
    self._frames: list[PeerFrame] = []  # that the neighbour has not confirmed

  def put(self, frame: PeerFrame) -> None:
    """Adds a frame."""
    self._frames.append(frame)

  def batch(self) -> tuple[int, Sequence[PeerFrame]]:
    """Returns the frames to send, and the number of the first of them."""
    return self._first, tuple(self._frames)

  def confirm(self, number: int) -> None:
    """The neighbour has all frames before this number."""
    del self._frames[: number - self._first]
    self._first = max(self._first, number)


class Inbox:
  """Which frames have come, of each incarnation of a neighbour."""

  def __init__(self):
    self._next: dict[tuple[int, int], int] = {}  # (peer, life) -> number

  def new(
    self, sender: int, life: int, first: int, frames: Sequence[PeerFrame]
  ) -> Sequence[PeerFrame]:
    """Returns the frames of a batch that have not come before."""
    have = self._next.get((sender, life), 0)
    self._next[sender, life] = max(have, first + len(frames))
    return frames[max(have - first, 0) :]

  def confirmed(self, sender: int, life: int) -> int:
    """Returns the number of the next frame that is expected."""
    return self._next.get((sender, life), 0)
