"""Peers in pairs: a peer that ends a job meets one neighbour; others do not
wait.

An exchange of two peers a < b holds the locks of both. Its initiator always
gets the lock of a first, so peers cannot wait for each other in a circle. A
locked peer has no other row between its put and its mix.

  a initiates                         b initiates
  a locks itself                      b -> a   ASK
  a -> b   ASK                        a locks itself, puts
  b locks itself, puts                a -> b   GRANT, its code
  b -> a   GRANT, its code            b locks itself
  a puts                              b puts
  a -> b   ANSWER, its code           b -> a   ANSWER, its code
  a takes, mixes; b takes, mixes      b takes, mixes; a takes, mixes

A peer grants its lock in the order of requests.
"""

import collections
from concurrent.futures import Future
from typing import Any

import numpy as np

from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.peer import AGAIN, LivePeer
from asgd.live.hosts import Host, HostExited


class Pairs(LivePeer):
  """A peer of AD-PSGD, in the order of `gossip.orders.pairs`."""

  def __init__(
    self,
    *args: Any,
    counter: Host,
    draw: np.random.Generator,
    **options: Any,
  ):
    """Takes the host of the run's `JobCounter`, and the generator that draws
    the peer's partners."""
    super().__init__(*args, **options)
    self._counter: Host | None = counter
    self._draw = draw
    self._asked = False  # whether a call of the counter is open
    self._number: int | None = None  # of the next job, from the counter
    self._partner: int | None = None  # of the exchange after the open job
    self._granted: PeerFrame | None = None  # the partner's code
    # The initiator of the exchange that holds this peer's lock, and initiators
    # that wait for it. This peer's own index is among them if it initiates one.
    self._lock_owner: int | None = None
    self._queue: collections.deque[int] = collections.deque()
    self._no_job_left = False

  def count_by(self, counter: Host | None) -> None:
    """Uses another counter from now on; None: no counter for now. A number that
    the old counter has assigned, and that was not begun, is dropped: the new
    counter assigns it again."""
    self._counter, self._number = counter, None

  def numbered(self, counter: Host, call: Future[int | None]) -> None:
    """Handles the end of a call of a counter, or the loss of its
    connection."""

    def take():
      self._asked = False
      try:
        number = call.result()
      except HostExited:  # retry until the driver passes another counter
        if self._counter is not None:
          self._ask_counter(wait=AGAIN)
        return
      if counter is self._counter:
        self._number, self._no_job_left = number, number is None

    self._handle(take)

  def _ask_counter(self, wait: float = 0.0) -> None:
    """Asks the counter for a number, in another thread, after a wait."""
    self._asked = True
    counter, inside = self._counter, self._inside
    asker = self.index, self.rows.journal.incarnation, self.rows.journal.begun

    def ask():
      if wait:
        inside.wait(wait)
      return counter.call("take", *asker).result()

    inside.later(ask, "numbered", counter)

  def halt(self) -> int:
    """Stops after the open job; returns the count of ended jobs at that
    time."""
    self.limit = min(self.limit, self.rounds + (self._began is not None))
    return self.limit

  @property
  def quiet(self) -> bool:
    """Whether the peer is idle, and stays so until its limit is raised or
    another peer asks for an exchange."""
    done = self._no_job_left or self.rounds >= self.limit
    idle = not self._asked and self._lock_owner is None
    return super().quiet and done and idle

  def peer_exited(self, peer: int) -> None:
    """Cancels or ends an exchange with the peer, too."""
    super().peer_exited(peer)
    self._no_job_left = False  # the counter assigns the peer's job again
    if peer in self._queue:
      self._queue.remove(peer)
    if self._lock_owner == peer:  # it had the lock, and did not ANSWER
      self._lock_owner = None
    if self._partner == peer and self._granted is None:
      self._partner = None
      if self.index in self._queue:
        self._queue.remove(self.index)
      if self._lock_owner == self.index:
        self._lock_owner = None

  def _receive_frame(self, frame: PeerFrame) -> None:
    """Queues an ASK, stores a GRANT, or ends an exchange with an ANSWER."""
    if frame.kind == frames.ASK:
      self._queue.append(frame.sender)
    elif frame.kind == frames.GRANT:
      if self._partner == frame.sender:
        self._granted = frame
        if self.index > frame.sender:
          self._queue.append(self.index)
    elif self._lock_owner == frame.sender:  # ANSWER
      self.rows.mix(0, [frame])
      self._lock_owner = None

  def _step(self) -> bool:
    """Grants the lock, completes an exchange, or begins or ends a job."""
    # [1] Exchanges: grant the lock to the next in the queue, or complete the
    # exchange that this peer has initiated.
    if self._lock_owner is None and self._queue:
      self._lock(self._queue.popleft())
      return True
    if self._lock_owner == self.index and self._granted:
      self._exchange()
      return True
    if self._lock_owner is not None:  # an exchange is under way
      return False

    # [2] Jobs: start one, or look for a partner once it is computed.
    if self._began is None:
      return self._start()
    if self._work is not None and self._partner is None:
      return self._meet()
    return False

  def _start(self) -> bool:
    """Begins a job if its number is known, else asks the counter."""
    if self._no_job_left or self.rounds >= self.limit:
      return False
    if self._number is None:
      if self._counter is not None and not self._asked:
        self._ask_counter()
      return False
    number, self._number = self._number, None
    self._begin(number)
    self._compute()
    return True

  def _meet(self) -> bool:
    """Initiates an exchange with a random neighbour. The job ends without an
    exchange if there is no neighbour, or if its message is not finite."""
    near = np.flatnonzero(self.duty.gossip.topology.union[self.index]).tolist()
    near = [peer for peer in near if peer in self.incarnations]
    if not near or (self._work and not self._work.finite):
      return self._end_job()
    self._partner = near[int(self._draw.integers(len(near)))]
    self._granted = None
    if self.index < self._partner:  # the lower index is locked first
      self._queue.append(self.index)
    else:
      self._ask()
    return True

  def _ask(self):
    incarnation = self.rows.journal.incarnation
    self._send(self._partner, PeerFrame(frames.ASK, self.index, incarnation))

  def _lock(self, owner: int) -> None:
    """Locks this peer for an exchange, and sends the next frame of it."""
    self._lock_owner = owner
    if owner != self.index:
      self._send(owner, self.rows.put(0, frames.GRANT))
    elif self._granted is None:
      self._ask()

  def _exchange(self) -> None:
    """Completes the exchange that this peer has initiated, and ends its job."""
    granted, partner = self._granted, self._partner
    self._send(partner, self.rows.put(0, frames.ANSWER))
    self.rows.mix(0, [granted])
    self._partner = self._granted = self._lock_owner = None
    self._end_job()

  def _end_job(self):
    if self._receive():
      self.rounds += 1
    return True
