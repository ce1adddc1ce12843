"""Events of peers, and the network on which their messages take time.

  peer j --up--> latency --down--> peer i

The links are those of `asgd.orders.network`. The receiving peer is in the role
of a shard: the peer's download link is the shard's port. A peer sends a copy of
its message to each receiver, one after the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.link_queue import Act, LinkQueue
from asgd.orders.network import Links, LinkUse, Network
from asgd.orders.trace import Event

# Bytes of all messages, or a function (sender, seq) -> bytes of the message
# that the sender sends now. The sender's last PUT row is that of the message.
# `seq` is None for a message without a row yet: the sender's parameters.
Size = float | Callable[[int, int | None], float]


class PeerNetwork:
  """The network of one run of peers: an argument of `asgd.gossip.orders`.

  Example:
    Messages of 8 bytes take 0.5 on the way, and 8 / 16 on a link.

    >>> from asgd import base, gossip, orders
    >>> from asgd.gossip import topologies
    >>> network = orders.network.Network(latency=0.5, up=16.0, down=16.0)
    >>> links = PeerNetwork(network, 2, nbytes=8)
    >>> trace = gossip.orders.rounds(
    ...   orders.durations.constant(), topologies.full(2), messages=4,
    ...   links=links,
    ... )
    >>> trace.time[trace.action == base.MIX].tolist()
    [2.0, 2.0, 4.0, 4.0]
    >>> links.use(4.0).utilisation  # each way 2 messages, of 0.5, in 4
    0.25
  """

  def __init__(self, network: Network, peers: int, nbytes: Size):
    """Makes idle links.

    Args:
      network: latency and bandwidths; times in the unit of the durations.
      peers: the number of peers.
      nbytes: bytes of a message; a function is called for each copy of a
        message when it is sent.
    """
    peer_network = network._replace(port=network.down, shards=peers)
    self.links, self._nbytes = Links(peer_network, peers), nbytes

  def nbytes(self, sender: int, seq: int | None) -> float:
    """Returns the bytes of a message; the arguments are those of `Size`."""
    nbytes = self._nbytes
    return nbytes(sender, seq) if callable(nbytes) else nbytes

  def use(self, end: float) -> LinkUse:
    """Returns the use of the links until a time."""
    use = self.links.use(end)
    # `Links.use` averages over a part for each shard. Here a message has one
    # part, for its receiver: undo the division by the number of shards.
    return use._replace(waited=use.waited * self.links.network.shards)


class EventQueue(LinkQueue):
  """Events of peers in the order of their times, and the trace rows so far."""

  def __init__(
    self, durations: Durations, peers: int, network: PeerNetwork | None
  ):
    # Without a network no message uses these links.
    super().__init__(network.links if network else Links(Network(), peers))
    self._streams = [durations.stream(peer) for peer in range(peers)]
    self._network = network
    self._n_jobs, self._next_seq = 0, [0] * peers  # of `start_job`
    self._receiving: set[int] = set()  # see `next_receives`
    self.rows: list[Event] = []

  @property
  def next_receives(self) -> bool:
    """Whether the next event ends a job, and adds its RECEIVE row."""
    return bool(self._heap) and self._heap[0][1] in self._receiving

  def advance(self) -> None:
    """Processes the next event; there must be one."""
    self._receiving.discard(self._heap[0][1])
    super().advance()

  def add_row(self, *fields: Any) -> None:
    """Adds a row: the fields of an Event."""
    self.rows.append(Event(*fields))

  def compute(
    self, time: float, peer: int, on_end: Act, *, receives: bool = True
  ) -> None:
    """Starts a job of a peer; `on_end` is called at the end of the job.
    `receives`: whether `on_end` adds the job's RECEIVE row."""
    if receives:
      self._receiving.add(self._n_scheduled)
    self.at(time + next(self._streams[peer]), on_end)

  def start_job(
    self, time: float, peer: int, on_end: Callable[[int, int, float], None],
    *, receives: bool = True,
  ) -> None:
    """Adds the SEND row of a peer's next job, and starts the job. At the end of
    the job, on_end(seq, job, time) is called. Jobs are numbered in the order of
    their starts."""
    seq, job = self._next_seq[peer], self._n_jobs
    self.add_row(time, peer, seq, job, base.SEND)
    end = functools.partial(on_end, seq, job)
    self.compute(time, peer, end, receives=receives)
    self._next_seq[peer], self._n_jobs = seq + 1, job + 1

  def carry(
    self, time: float, sender: int, receiver: int, on_arrival: Act,
    *, seq: int | None = None,
  ) -> None:
    """Sends a message; `seq` is as in `Size`. `on_arrival` is called when the
    last byte arrives: before this method returns, if messages take no time."""
    if self._network is None:
      on_arrival(time)
    else:
      nbytes = self._network.nbytes(sender, seq)
      self.send_up(time, sender, receiver, nbytes, on_arrival)

  def receivers(self, links: np.ndarray, peer: int) -> list[int]:
    """Returns the receivers of a peer's message, in the order of sending.

    `links`: bool[n, n], the links in the round of the message; `[j, i]` is
    whether peer j receives from peer i."""
    receivers: list[int] = np.flatnonzero(links[:, peer]).tolist()
    if self._network is None:
      return receivers
    # Each peer begins with the next higher index. Otherwise all peers would
    # send to peer 0 first.
    return sorted(receivers, key=lambda j: (j - peer) % len(links))
