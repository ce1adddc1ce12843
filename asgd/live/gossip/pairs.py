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
    self._asks_counter = False  # whether a call of the counter is open
    self._next_job: int | None = None  # its number, from the counter
    self._partner: int | None = None  # of the exchange after the open job
    self._grant: PeerFrame | None = None  # of the partner, with its code
    # The initiator of the exchange that holds this peer's lock, and initiators
    # that wait for it. This peer's own index is among them if it initiates one.
    self._lock_owner: int | None = None
    self._queue: collections.deque[int] = collections.deque()
    self._no_job_left = False

  def count_by(self, counter: Host | None) -> None:
    """Uses another counter from now on; None: no counter for now. A number that
    the old counter has assigned, and that was not begun, is dropped: the new
    counter assigns it again."""
    self._counter, self._next_job = counter, None

  def numbered(self, counter: Host, call: Future[int | None]) -> None:
    """Handles the end of a call of a counter, or the loss of its
    connection."""

    def store_number() -> None:
      self._asks_counter = False
      try:
        number = call.result()
      except HostExited:  # retry until the driver passes another counter
        if self._counter is not None:
          self._ask_counter(self._counter, wait=AGAIN)
        return
      # A number of an earlier counter is dropped, as by `count_by`.
      if counter is self._counter:
        self._next_job, self._no_job_left = number, number is None

    self._handle(store_number)

  def _ask_counter(self, counter: Host, wait: float = 0.0) -> None:
    """Asks a counter for a number, in another thread, after a wait in
    seconds."""
    self._asks_counter = True
    inside, journal = self._inside, self.rows.journal
    # The count of begun jobs makes the call idempotent: if an answer is lost,
    # the retry gets the same number.
    asker = self.index, journal.incarnation, journal.begun

    def ask() -> int | None:
      if wait:
        inside.wait(wait)
      number: int | None = counter.call("take", *asker).result()
      return number

    inside.later(ask, "numbered", counter)

  def halt(self) -> int:
    """Stops after the open job; returns the count of ended jobs at that
    time."""
    self.limit = min(self.limit, self.rounds + (self._job_start is not None))
    return self.limit

  @property
  def quiet(self) -> bool:
    """Whether the peer is idle, and stays so until its limit is raised or
    another peer asks for an exchange."""
    done = self._no_job_left or self.rounds >= self.limit
    idle = not self._asks_counter and self._lock_owner is None
    return super().quiet and done and idle

  def peer_exited(self, peer: int) -> None:
    """Cancels or ends an exchange with the peer, too."""
    super().peer_exited(peer)
    self._no_job_left = False  # the counter assigns the peer's job again
    # [1] The peer was the initiator.
    if peer in self._queue:
      self._queue.remove(peer)
    if self._lock_owner == peer:  # it had the lock, and did not ANSWER
      self._lock_owner = None
    # [2] The peer was the partner, and sent no GRANT: cancel the exchange. The
    # next step draws another partner. With its GRANT the exchange completes.
    if self._partner == peer and self._grant is None:
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
        self._grant = frame
        # The higher index gets its own lock last; see the module's table.
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
    if self._lock_owner == self.index and self._grant:
      self._complete_exchange(self._grant)
      return True
    # An exchange is under way. A row of a job between its put and its mix would
    # make it non-atomic.
    if self._lock_owner is not None:
      return False

    # [2] Jobs: start one, or look for a partner once it is computed.
    if self._job_start is None:
      return self._start_job()
    if self._result is not None and self._partner is None:
      self._initiate_exchange(self._result.finite)
      return True
    return False

  def _start_job(self) -> bool:
    """Begins a job if its number is known, else asks the counter. Returns
    whether it has begun one."""
    if self._no_job_left or self.rounds >= self.limit:
      return False
    if self._next_job is None:
      if self._counter is not None and not self._asks_counter:
        self._ask_counter(self._counter)
      return False
    number, self._next_job = self._next_job, None
    self._begin_job(number)
    self._compute_job()
    return True

  def _initiate_exchange(self, is_finite: bool) -> None:
    """Initiates an exchange with a random neighbour. The job ends without an
    exchange if no neighbour is alive, or if its message is not finite."""
    linked = self.duty.gossip.topology.union[self.index]
    neighbours = [
      peer
      for peer in np.flatnonzero(linked).tolist()
      if peer in self.incarnations
    ]
    if not neighbours or not is_finite:
      self._count_job()
      return
    partner = neighbours[int(self._draw.integers(len(neighbours)))]
    self._partner, self._grant = partner, None
    if self.index < partner:  # the lower index is locked first
      self._queue.append(self.index)
    else:
      self._send_ask()

  def _send_ask(self) -> None:
    """Requests the exchange with the partner."""
    assert self._partner is not None
    incarnation = self.rows.journal.incarnation
    self._send(self._partner, PeerFrame(frames.ASK, self.index, incarnation))

  def _lock(self, owner: int) -> None:
    """Locks this peer for an exchange, and sends the next frame of it."""
    self._lock_owner = owner
    if owner != self.index:
      self._send(owner, self.rows.put(0, frames.GRANT))
    # With a GRANT (the partner has the lower index) `_step` completes the
    # exchange next.
    elif self._grant is None:
      self._send_ask()

  def _complete_exchange(self, grant: PeerFrame) -> None:
    """Completes the exchange that this peer has initiated, and ends its job."""
    # Put before mix: the partner gets the parameters as they were when it put
    # its own, so both mix the same two.
    self._send(grant.sender, self.rows.put(0, frames.ANSWER))
    self.rows.mix(0, [grant])
    self._partner = self._grant = self._lock_owner = None
    self._count_job()

  def _count_job(self) -> None:
    """Ends the open job, and counts it if its message was finite."""
    if self._end_job():
      self.rounds += 1
