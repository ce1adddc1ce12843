"""The counter of jobs for peers in pairs: each job is assigned to one peer."""

import heapq
from collections.abc import Collection


class JobCounter:
  """Assigns the numbers of jobs, in a host (`asgd.live.hosts`).

  The counter keeps no file. A new counter reads the taken numbers from the
  peers' journals.

  Example:
    >>> counter = JobCounter(3)
    >>> counter.take(peer=0, incarnation=0, ask=0), counter.take(1, 0, 0)
    (0, 1)
    >>> counter.take(peer=0, incarnation=0, ask=0)  # the answer was lost
    0
    >>> counter.release(peer=1, incarnation=0, begun=0, lost=[])  # it had 1
    >>> counter.take(0, 0, 1), counter.take(0, 0, 2), counter.take(0, 0, 3)
    (1, 2, None)
  """

  def __init__(self, jobs: int, taken: Collection[int] = ()):
    """Takes the number of jobs of the run, and the numbers already taken."""
    self._jobs, self._next = jobs, max(taken, default=-1) + 1
    self._free = sorted(set(range(self._next)) - set(taken))
    # Peer -> (incarnation, ask, number) of its last call of `take`.
    self._given: dict[int, tuple[int, int, int | None]] = {}

  def take(self, peer: int, incarnation: int, ask: int) -> int | None:
    """Returns the least free number, or None if there is none.

    Args:
      peer: that asks.
      incarnation: of the peer.
      ask: jobs that the incarnation has begun. A repeated call with the same
        value gets the same answer.
    """
    last = self._given.get(peer, (0, -1, None))
    if (incarnation, ask) <= last[:2]:  # a repeated or a late call
      return last[2] if (incarnation, ask) == last[:2] else None
    number = self._new()
    # None is not stored: a number may be freed before the peer asks again.
    if number is not None:
      self._given[peer] = incarnation, ask, number
    return number

  def _new(self) -> int | None:
    """Returns a freed number, or else the next one; None if none is left."""
    if self._free:
      return heapq.heappop(self._free)
    if self._next >= self._jobs:
      return None
    self._next += 1
    return self._next - 1

  def release(
    self, peer: int, incarnation: int, begun: int, lost: Collection[int]
  ) -> None:
    """Frees the numbers of an incarnation that has exited.

    Args:
      peer: that exited.
      incarnation: of the peer.
      begun: jobs that the incarnation has begun; a number that was assigned and
        not begun is freed, too.
      lost: numbers of jobs that it began and did not end.
    """
    last_incarnation, ask, number = self._given.get(peer, (0, -1, None))
    if last_incarnation > incarnation:  # a repeated call
      return
    # From now on late calls of this incarnation get no number.
    self._given[peer] = incarnation + 1, -1, None
    returned = set(lost)
    if last_incarnation == incarnation and ask >= begun and number is not None:
      returned.add(number)
    for each in returned:
      heapq.heappush(self._free, each)
