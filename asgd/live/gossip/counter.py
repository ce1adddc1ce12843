"""The counter of jobs for peers without rounds: each job is assigned to one
peer."""

import heapq
from collections.abc import Collection


class JobCounter:
  """Assigns the numbers of jobs, in a host (`asgd.live.hosts`).

  The counter keeps no file. A new counter reads the taken numbers from the
  peers' journals.

  Example:
    >>> counter = JobCounter(3)
    >>> counter.take(peer=0, incarnation=0, begun=0), counter.take(1, 0, 0)
    (0, 1)
    >>> counter.take(peer=0, incarnation=0, begun=0)  # the answer was lost
    0
    >>> counter.release(peer=1, incarnation=0, begun=0, lost=[])  # it had 1
    >>> counter.take(0, 0, 1), counter.take(0, 0, 2), counter.take(0, 0, 3)
    (1, 2, None)
  """

  def __init__(self, jobs: int, taken: Collection[int] = ()):
    """Takes the number of jobs of the run, and the numbers already taken."""
    # Numbers below `_next_new` are taken, or in the heap `_free_numbers`.
    self._jobs, self._next_new = jobs, max(taken, default=-1) + 1
    self._free_numbers = sorted(set(range(self._next_new)) - set(taken))
    # Peer -> (incarnation, begun, number) of its last successful `take`.
    self._last_takes: dict[int, tuple[int, int, int | None]] = {}

  def take(self, peer: int, incarnation: int, begun: int) -> int | None:
    """Returns the least free number, or None if there is none.

    Args:
      peer: the peer that asks.
      incarnation: the incarnation of the peer.
      begun: number of jobs that the incarnation has begun. A repeated call with
        the same count gets the same answer.
    """
    last_incarnation, last_begun, number = self._last_take(peer)
    last_key, key = (last_incarnation, last_begun), (incarnation, begun)
    if key == last_key:  # a repeated call
      return number
    if key < last_key:  # a late call
      return None
    number = self._next_number()
    # None is not stored: a number may be freed before the peer asks again.
    if number is not None:
      self._last_takes[peer] = incarnation, begun, number
    return number

  def _last_take(self, peer: int) -> tuple[int, int, int | None]:
    """Returns (incarnation, begun, number) of a peer's last `take`. For a peer
    without one, the value is less than the key of any call."""
    return self._last_takes.get(peer, (0, -1, None))

  def _next_number(self) -> int | None:
    """Returns a freed number, or else the next number; None if no number is
    left."""
    if self._free_numbers:
      return heapq.heappop(self._free_numbers)
    if self._next_new >= self._jobs:
      return None
    self._next_new += 1
    return self._next_new - 1

  def release(
    self, peer: int, incarnation: int, begun: int, lost: Collection[int]
  ) -> None:
    """Frees the numbers of an incarnation that has exited.

    Args:
      peer: the peer that exited.
      incarnation: the incarnation of the peer.
      begun: number of jobs that the incarnation has begun. The counter also
        frees a number that it assigned and that the peer did not begin.
      lost: numbers of jobs that the peer began and did not end.
    """
    last_incarnation, last_begun, last_number = self._last_take(peer)
    if last_incarnation > incarnation:  # a repeated call
      return
    # From now on late calls of this incarnation get no number.
    self._last_takes[peer] = incarnation + 1, -1, None
    freed_numbers = set(lost)
    # The peer took its last number when it had begun `last_begun` jobs. If it
    # has begun no job since, it never began the job of that number.
    if (
      last_incarnation == incarnation
      and last_begun >= begun
      and last_number is not None
    ):
      freed_numbers.add(last_number)
    for number in freed_numbers:
      heapq.heappush(self._free_numbers, number)
