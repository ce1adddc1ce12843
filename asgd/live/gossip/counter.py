"""Numbers of jobs for peers in pairs: each is given to one peer at a time."""

import heapq
from collections.abc import Collection


class JobCounter:
  """Gives out the numbers of jobs, in a host (`asgd.live.hosts`).

  It keeps no file. The next counter reads in the journals of the peers which
  numbers are taken.

  Example:
    >>> counter = JobCounter(3)
    >>> counter.take(peer=0, life=0, ask=0), counter.take(1, 0, 0)
    (0, 1)
    >>> counter.take(peer=0, life=0, ask=0)  # the answer was lost
    0
    >>> counter.left(peer=1, life=0, begun=0, lost=[])  # without a job
    >>> counter.take(0, 0, 1), counter.take(0, 0, 2), counter.take(0, 0, 3)
    (1, 2, None)
  """

  def __init__(self, jobs: int, taken: Collection[int] = ()):
    """`jobs` are all of a run; those that are taken are not given again."""
    self._jobs, self._next = jobs, max(taken, default=-1) + 1
    self._free = sorted(set(range(self._next)) - set(taken))
    # Peer -> (life, ask, number) of the last that it was given.
    self._given: dict[int, tuple[int, int, int | None]] = {}

  def take(self, peer: int, life: int, ask: int) -> int | None:
    """Returns the least number that nobody has, None if there is none.

    Args:
      peer: who asks.
      life: which incarnation of it.
      ask: how many jobs that has begun. It gets the same answer when it asks
        again.
    """
    last = self._given.get(peer, (0, -1, None))
    if (life, ask) <= last[:2]:  # a call that was made twice, or came late
      return last[2] if (life, ask) == last[:2] else None
    number = self._new()
    if number is not None:
      self._given[peer] = life, ask, number
    return number

  def _new(self):
    if self._free:
      return heapq.heappop(self._free)
    if self._next >= self._jobs:
      return None
    self._next += 1
    return self._next - 1

  def left(
    self, peer: int, life: int, begun: int, lost: Collection[int]
  ) -> None:
    """Takes back the numbers of an incarnation that has exited: those of the
    jobs that it did not end, and one that it was given and did not begin."""
    last_life, ask, number = self._given.get(peer, (0, -1, None))
    if last_life > life:
      return
    self._given[peer] = life + 1, -1, None
    back = set(lost)
    if last_life == life and ask >= begun and number is not None:
      back.add(number)
    for each in back:
      heapq.heappush(self._free, each)
