"""Peers in pairs: who ends a job meets a neighbour, and nobody waits for all.

An exchange of two, a with a smaller number than b, holds the locks of both, and
whoever begins it gets that of a first: so no circle of peers can wait for each
other. A peer that is locked has no other row between its put and its mix.

  a begins                            b begins
  a locks itself                      b -> a   ASK
  a -> b   ASK                        a locks itself, puts
  b locks itself, puts                a -> b   GRANT, its code
  b -> a   GRANT, its code            b locks itself
  a puts                              b puts
  a -> b   ANSWER, its code           b -> a   ANSWER, its code
  a takes, mixes; b takes, mixes      b takes, mixes; a takes, mixes

Locks are given in the order in which they were asked for.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd.live.gossip import frames
from asgd.live.gossip.frames import Frame
from asgd.live.gossip.loop import PeerLoop


class Pairs(PeerLoop):
  """A peer of AD-PSGD, as `gossip.orders.pairs` has them."""

  def __init__(
    self,
    *args: Any,
    jobs: Callable[[], int | None],
    draw: np.random.Generator,
    **options: Any,
  ):
    """`jobs` gives the number of a job that nobody else does, None if all are
    given; whom the peer meets is drawn from `draw`."""
    super().__init__(*args, **options)
    self._jobs, self._draw = jobs, draw
    self._partner: int | None = None  # whom it meets, once a job is done
    self._granted: Frame | None = None  # what that has put
    self._holder: int | None = None  # of its lock
    self._queue: collections.deque[int] = collections.deque()
    self._over = False  # no job is left

  def halt(self) -> int:
    """Stops after the open job; returns how many it will have ended."""
    self.limit = min(self.limit, self.rounds + (self._began is not None))
    return self.limit

  @property
  def quiet(self) -> bool:
    """See the base."""
    done = self._over or self.rounds >= self.limit
    return super().quiet and done and self._holder is None

  def gone(self, peer):
    """See the base; an exchange with it does not take place, or ends."""
    super().gone(peer)
    self._over = False  # what it was doing is to be done
    if peer in self._queue:
      self._queue.remove(peer)
    if self._holder == peer:  # it had been granted, and did not answer
      self._holder = None
    if self._partner == peer and self._granted is None:
      self._partner = None
      if self.index in self._queue:
        self._queue.remove(self.index)
      if self._holder == self.index:
        self._holder = None

  def _heard(self, frame):
    if frame.kind == frames.ASK:
      self._queue.append(frame.sender)
    elif frame.kind == frames.GRANT:
      if self._partner == frame.sender:
        self._granted = frame
        if self.index > frame.sender:
          self._queue.append(self.index)
    elif self._holder == frame.sender:  # ANSWER
      self.rows.mix(0, [frame])
      self._holder = None

  def _step(self):
    if self._holder is None and self._queue:
      self._lock(self._queue.popleft())
      return True
    if self._holder == self.index and self._granted:
      self._exchange()
      return True
    if self._holder is not None:
      return False
    if self._began is None:
      return self._start()
    if self._work is not None and self._partner is None:
      return self._meet()
    return False

  def _start(self):
    if self._over or self.rounds >= self.limit:
      return False
    number = self._jobs()
    if number is None:
      self._over = True
      return False
    self._begin(number)
    self._compute()
    return True

  def _meet(self):
    """Asks a neighbour for an exchange; without one the job ends at once. What
    is not finite meets nobody."""
    near = np.flatnonzero(self.duty.gossip.topology.union[self.index]).tolist()
    near = [peer for peer in near if peer in self.lives]
    if not near or (self._work and not self._work.finite):
      return self._end_job()
    self._partner = near[int(self._draw.integers(len(near)))]
    self._granted = None
    if self.index < self._partner:
      self._queue.append(self.index)
    else:
      self._ask()
    return True

  def _ask(self):
    life = self.rows.life
    self._tell(self._partner, Frame(frames.ASK, self.index, life))

  def _lock(self, holder):
    self._holder = holder
    if holder != self.index:
      self._tell(holder, self.rows.put(0, frames.GRANT))
    elif self._granted is None:
      self._ask()

  def _exchange(self):
    granted, partner = self._granted, self._partner
    self._tell(partner, self.rows.put(0, frames.ANSWER))
    self.rows.mix(0, [granted])
    self._partner = self._granted = self._holder = None
    self._end_job()

  def _end_job(self):
    if self._receive():
      self.rounds += 1
    return True
