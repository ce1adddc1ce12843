"""Peers that mix each message when it arrives; none waits for another's job.

A peer that ends a job applies it, mixes its own message, sends it to all
receivers, and starts its next job. It starts no job while a receiver has not
acknowledged its last `_MAX_UNACKNOWLEDGED` messages. Each receiver stores that
many messages of each sender. So if a sender exits, each message that a receiver
lacks is still stored at some other receiver.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from asgd.live.gossip.counted import Counted
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.outbox import Neighbour

_MAX_UNACKNOWLEDGED = 4  # messages of a peer at one receiver


class PeerArrivals(Counted):
  """A peer in the order of `gossip.orders.arrivals`."""

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    # Received messages that wait until the peer has adopted its loans.
    self._arrived_frames: collections.deque[PeerFrame] = collections.deque()
    # Sender -> its last messages, by seq, in case the driver forwards them.
    self._messages: dict[int, dict[int, PeerFrame]] = {}
    # Lost senders: only forwarded messages of them still count.
    self._lost_senders: set[int] = set()

  @property
  def is_quiet(self) -> bool:
    """Whether the peer is idle, has mixed all that arrived, and knows that its
    messages have arrived."""
    is_sent = not any(
      outbox.n_unacknowledged for outbox in self._outboxes.values()
    )
    return super().is_quiet and is_sent and not self._arrived_frames

  def join(
    self, others: Mapping[int, Neighbour], rounds: int, lenders: Iterable[int]
  ) -> None:
    """Begins as a newcomer. Its loan includes all earlier messages, because the
    other peers are quiet."""
    super().join(others, rounds, lenders)
    self._messages.clear()

  def add_newcomer(self, peer: int, newcomer: Neighbour, lend: bool) -> None:
    """Adds a newcomer, to which no earlier message may be forwarded."""
    super().add_newcomer(peer, newcomer, lend)
    self._messages.clear()

  def peer_exited(self, peer: int) -> None:
    """Removes the peer; its last messages were forwarded before."""
    super().peer_exited(peer)
    self._lost_senders.discard(peer)

  def _receive_frame(self, frame: PeerFrame) -> None:
    """Receives a message, unless the driver has already collected its sender's
    messages: others will not get this one."""
    if frame.sender not in self._lost_senders:
      self.store_message(frame)

  def _step(self) -> bool:
    """Mixes a message, or begins or ends a job."""
    if self._arrived_frames:
      frame = self._arrived_frames.popleft()
      self.rows.mix(frame.round, [frame])
      return True
    if self._job_start is None:
      is_behind = any(
        outbox.n_unacknowledged >= _MAX_UNACKNOWLEDGED
        for outbox in self._outboxes.values()
      )
      return not is_behind and self._start_job()
    if self._result is None:
      return False
    if self._count_job():
      self._broadcast()
    return True

  def _broadcast(self) -> None:
    """Puts the message of the ended job, mixes it, and sends it to all
    receivers."""
    number = self.rows.journal.puts
    frame = self.rows.put(number)
    self.rows.mix(number, [])
    links = self.spec.gossip.topology.union[:, self.index]
    for peer in np.flatnonzero(links).tolist():
      self._send(peer, frame)

  # The driver forwards a lost peer's messages to all its receivers.

  def numbers_received_from(self, peer: int) -> list[int]:
    """Returns the numbers of a lost peer's last received messages. Later frames
    of that peer are dropped."""
    self._lost_senders.add(peer)
    return list(self._messages.get(peer, ()))

  def find_message(self, peer: int, number: int) -> PeerFrame | None:
    """Returns the received message of a peer and number, or None."""
    return self._messages.get(peer, {}).get(number)

  def store_message(self, frame: PeerFrame) -> None:
    """Receives a message, from its sender or forwarded by the driver."""
    messages = self._messages.setdefault(frame.sender, {})
    # The messages of a sender come in order, so an earlier one was mixed. It
    # may have been dropped, and be forwarded by a receiver that still has it.
    if frame.seq > max(messages, default=-1):
      messages[frame.seq] = frame
      messages.pop(frame.seq - _MAX_UNACKNOWLEDGED, None)
      self._arrived_frames.append(frame)
