"""Frames on their way to one neighbour: each is processed once, and in order.

In one call a peer sends all frames that its neighbour has not acknowledged. The
peer makes the next call when this one has ended. If the connection breaks, the
peer sends the frames again, and the neighbour skips the frames that it has.

  sender                                        receiver
  first=0, frames 0 1      -- deliver -->       processes 0 1
                           <-- 2 ------
  first=2, frames 2        -- deliver --> X     processes 2; the answer is lost
  first=2, frames 2 3      -- deliver -->       skips 2, processes 3
                           <-- 4 ------
"""

from collections.abc import Sequence
from typing import NamedTuple

from asgd.live.gossip.frames import PeerFrame
from asgd.live.hosts import Host


class Neighbour(NamedTuple):
  """Another peer, as the driver introduces it."""

  incarnation: int  # of the peer, counted from 0
  host: Host


class Outbox:
  """The frames of this peer for one incarnation of a neighbour."""

  def __init__(self, neighbour: Neighbour):
    self.incarnation, self.host = neighbour
    self.has_open_call = False  # a call of `deliver`
    # Frames are numbered from 0. `_first` is the number of `_frames[0]`; all
    # earlier frames are acknowledged.
    self._first = 0
    self._frames: list[PeerFrame] = []

  @property
  def n_unacknowledged(self) -> int:
    """Count of the frames that the neighbour has not acknowledged."""
    return len(self._frames)

  def put(self, frame: PeerFrame) -> None:
    """Adds a frame."""
    self._frames.append(frame)

  def batch(self) -> tuple[int, Sequence[PeerFrame]]:
    """Returns (number of the first frame, frames to send)."""
    return self._first, tuple(self._frames)

  def confirm(self, number: int) -> None:
    """Drops the frames before `number`, which the neighbour has
    acknowledged."""
    # Acknowledgments arrive in order, as only one call is open.
    del self._frames[: number - self._first]
    self._first = max(self._first, number)


class Inbox:
  """Counts the received frames of each incarnation of a neighbour."""

  def __init__(self):
    # (peer, incarnation) -> number of the next expected frame.
    self._expected: dict[tuple[int, int], int] = {}

  def take_new(
    self, sender: int, incarnation: int, first: int, frames: Sequence[PeerFrame]
  ) -> Sequence[PeerFrame]:
    """Returns the frames of a batch that were not received before, and counts
    them as received."""
    expected = self.expected(sender, incarnation)
    # The frames of a late call were delivered before, by a retry.
    self._expected[sender, incarnation] = max(expected, first + len(frames))
    return frames[max(expected - first, 0) :]

  def expected(self, sender: int, incarnation: int) -> int:
    """Returns the number of the next expected frame, which acknowledges all
    frames before it."""
    return self._expected.get((sender, incarnation), 0)
