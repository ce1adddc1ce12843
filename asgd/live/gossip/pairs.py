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
from concurrent.futures import Future
from typing import Any

import numpy as np

from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.peer import AGAIN, LivePeer
from asgd.live.hosts import Gone, Host


class Pairs(LivePeer):
  """A peer of AD-PSGD, as `gossip.orders.pairs` has them."""

  def __init__(
    self,
    *args: Any,
    counter: Host,
    draw: np.random.Generator,
    **options: Any,
  ):
    """`counter` runs the `JobCounter` of the run; whom the peer meets is drawn
    from `draw`."""
    super().__init__(*args, **options)
    self._counter: Host | None = counter
    self._draw = draw
    self._asked = False  # the counter for a number
    self._number: int | None = None  # that the counter gave, not begun yet
    self._partner: int | None = None  # whom it meets, once a job is done
    self._granted: PeerFrame | None = None  # what that has put
    self._holder: int | None = None  # of its lock
    self._queue: collections.deque[int] = collections.deque()
    self._over = False  # no job is left

  def count_by(self, counter: Host | None) -> None:
    """Asks this counter from now on, None nobody. What another one has answered
    or still answers is not begun: this one gives it out again."""
    self._counter, self._number = counter, None

  def numbered(self, counter: Host, call: Future[int | None]) -> None:
    """A call of a counter has ended, which may have lost its connection."""

    def take():
      self._asked = False
      try:
        number = call.result()
      except Gone:  # the driver says where the next counter is
        if self._counter is not None:
          self._ask_counter(wait=AGAIN)
        return
      if counter is self._counter:
        self._number, self._over = number, number is None

    self._happens(take)

  def _ask_counter(self, wait=0.0):
    self._asked = True
    counter, inside = self._counter, self._inside
    asker = self.index, self.rows.journal.life, self.rows.journal.begun

    def ask():
      if wait:
        inside.wait(wait)
      return counter.call("take", *asker).result()

    inside.later(ask, "numbered", counter)

  def halt(self) -> int:
    """Stops after the open job; returns how many it will have ended."""
    self.limit = min(self.limit, self.rounds + (self._began is not None))
    return self.limit

  @property
  def quiet(self) -> bool:
    """See the base."""
    done = self._over or self.rounds >= self.limit
    idle = not self._asked and self._holder is None
    return super().quiet and done and idle

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
    if self._number is None:
      if self._counter is not None and not self._asked:
        self._ask_counter()
      return False
    number, self._number = self._number, None
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
    life = self.rows.journal.life
    self._tell(self._partner, PeerFrame(frames.ASK, self.index, life))

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
