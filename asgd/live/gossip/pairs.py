"""Peers in pairs: a peer that ends a job exchanges parameters with one
neighbour, while all other peers continue.

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
from typing import Any

import numpy as np

from asgd.live.gossip import frames
from asgd.live.gossip.counted import Counted
from asgd.live.gossip.frames import PeerFrame


class Pairs(Counted):
  """A peer of AD-PSGD, in the order of `gossip.orders.pairs`."""

  def __init__(
    self,
    *args: Any,
    rng: np.random.Generator,
    **options: Any,
  ):
    """Takes the generator that draws the peer's partners."""
    super().__init__(*args, **options)
    self._rng = rng
    self._partner: int | None = None  # of the exchange after the open job
    self._grant: PeerFrame | None = None  # of the partner, with its code
    # The initiator of the exchange that holds this peer's lock, and the
    # initiators that wait for the lock. This peer's own index is among them if
    # it initiates an exchange.
    self._lock_owner: int | None = None
    self._queue: collections.deque[int] = collections.deque()

  @property
  def is_quiet(self) -> bool:
    """Whether the peer is idle, and stays so until its limit is raised or
    another peer asks for an exchange."""
    return super().is_quiet and self._lock_owner is None

  def peer_exited(self, peer: int) -> None:
    """Removes the peer, and cancels or ends an exchange with it."""
    super().peer_exited(peer)
    # [1] The peer was the initiator.
    if peer in self._queue:
      self._queue.remove(peer)
    if self._lock_owner == peer:  # it had the lock, and did not ANSWER
      self._lock_owner = None
    # [2] The peer was the partner, and sent no GRANT: cancel the exchange. The
    # next step draws another partner. If the GRANT has arrived, the exchange
    # completes.
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
    # [1] Exchanges: grant the lock to the next initiator in the queue, or
    # complete the exchange that this peer has initiated.
    if self._lock_owner is None and self._queue:
      self._lock(self._queue.popleft())
      return True
    if self._lock_owner == self.index and self._grant:
      self._complete_exchange(self._grant)
      return True
    # An exchange is under way: no row of a job may come between its PUT and its
    # MIX.
    if self._lock_owner is not None:
      return False

    # [2] Jobs: start a job, or initiate an exchange once the job is computed.
    if self._job_start is None:
      return self._start_job()
    if self._result is not None and self._partner is None:
      self._initiate_exchange(self._result.finite)
      return True
    return False

  def _initiate_exchange(self, is_finite: bool) -> None:
    """Initiates an exchange with a random neighbour. The job ends without an
    exchange if no neighbour is alive, or if its message is not finite."""
    has_link = self.spec.gossip.topology.union[self.index]
    neighbours = [
      peer
      for peer in np.flatnonzero(has_link).tolist()
      if peer in self.incarnations
    ]
    if not neighbours or not is_finite:
      self._count_job()
      return
    partner = neighbours[int(self._rng.integers(len(neighbours)))]
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
    """Locks this peer for an exchange, and sends the exchange's next frame."""
    self._lock_owner = owner
    if owner != self.index:
      self._send(owner, self.rows.put(0, frames.GRANT))
    # With a GRANT (the partner has the lower index) `_step` completes the
    # exchange next.
    elif self._grant is None:
      self._send_ask()

  def _complete_exchange(self, grant: PeerFrame) -> None:
    """Completes the exchange that this peer has initiated, and ends its job."""
    # Put before mix: the partner put its parameters before a mix, too. So both
    # mix the same two sets of parameters.
    self._send(grant.sender, self.rows.put(0, frames.ANSWER))
    self.rows.mix(0, [grant])
    self._partner = self._grant = self._lock_owner = None
    self._count_job()
